"""Every widget as its reader meets it: in JupyterLab or on the demo's page, moved with the keyboard, read."""

import re

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect

from plpkg import ROOMS

from waiting import wait_until

pytestmark = pytest.mark.browser
CONTROLS = "select, .noUi-handle, input[type=checkbox], input[type=text]"
FITS = """() => [...document.querySelectorAll(".plpkg-explorer")].every(explorer => {
    const edge = explorer.getBoundingClientRect()
    const inside = e => e.getBoundingClientRect().right <= edge.right + 1
    const whole = e => e.scrollWidth <= e.clientWidth + 1
    const picture = explorer.querySelector("img").getBoundingClientRect()
    return edge.right <= innerWidth && whole(explorer) && edge.bottom - picture.bottom < 10
        && [...explorer.querySelectorAll("img, input, .noUi-handle")].every(inside)
        && [...explorer.querySelectorAll("p, label, .widget-readout")].every(e => inside(e) && whole(e))
})"""
"""Whether no label, slider or value is cut off, and nothing is left blank below a picture."""


def move(server, explorer, control):
    """Move a control with the keyboard: the explorer has to say that it computes, and then what, and to show it."""
    read_out, picture = explorer.locator(".plpkg-read-out"), explorer.locator("img")
    computing = read_out.get_by_text("computing …")
    label = control.evaluate("element => element.closest('.plpkg-explorer > *').innerText")
    assert re.search(r"\w", label)
    words, drawn = read_out.inner_text(), picture.evaluate("image => image.outerHTML")
    height = explorer.bounding_box()["height"]
    control.focus()
    keys = {"INPUT.checkbox": "Space", "INPUT.text": "Enter"}
    kind = control.evaluate("element => element.tagName + '.' + (element.type || '')")
    if kind == "INPUT.text":
        control.page.keyboard.type("One more. ")
    at_the_end = control.get_attribute("aria-valuenow") == control.get_attribute("aria-valuemax")
    server.hold.touch()
    control.page.keyboard.press(keys.get(kind, "ArrowLeft" if at_the_end else "ArrowRight"))
    expect(computing).to_be_visible()
    assert explorer.bounding_box()["height"] == height
    server.hold.unlink()
    expect(computing).to_have_count(0)
    expect(read_out).not_to_have_text(words)
    wait_until(lambda: picture.evaluate("image => image.outerHTML") != drawn)  # or, of an equal picture, its text
    assert picture.evaluate("image => image.naturalWidth") > 300


def test_every_control_answers_to_the_keyboard(lab, page, widget_notebook):
    page.goto(f"{lab.address}/lab/tree/{widget_notebook}?reset")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    # The kernel has to be there: what is run before it answers is lost.
    expect(page.locator("#jp-bottom-panel")).to_contain_text("Python 3 (ipykernel) | Idle")
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()

    explorer = page.locator(".plpkg-explorer")
    explorer.locator("img").wait_for()
    controls = explorer.locator(CONTROLS)
    assert 1 <= controls.count() <= 4
    for index in range(controls.count()):
        move(lab, explorer, controls.nth(index))
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    for width in (1400, 700):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_function(FITS)
    page.keyboard.press("Control+b")  # the file browser leaves no room in a window of 380 pixels
    page.set_viewport_size({"width": 380, "height": 1000})
    page.wait_for_function(FITS)


def test_the_demo_says_that_it_starts_and_each_explorer_fits_a_narrow_window(demo, page):
    demo.hold.touch()
    page.goto(f"{demo.address}?room={'&room='.join(ROOMS)}", wait_until="commit")
    starting = page.get_by_text("Starting Python for this page")
    expect(starting).to_be_visible()
    demo.hold.unlink()
    explorers = page.locator(".plpkg-explorer")
    expect(explorers.locator("img")).to_have_count(len(ROOMS))
    expect(starting).to_be_hidden()
    for width in (1400, 700, 380):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_function(FITS)
        for explorer in explorers.all():
            move(demo, explorer, explorer.locator(CONTROLS).first)
        page.wait_for_function(FITS)


def test_the_demo_shows_three_explorers_and_no_code_and_leads_to_the_others(demo, page, tmp_path):
    errors, elsewhere = [], []
    page.on("pageerror", lambda error: errors.append(error))  # playwright takes no method of a list
    page.on("request", lambda request: elsewhere.append(request) if "//127.0.0.1:" not in request.url else None)
    page.goto(demo.address)
    explorers = page.locator(".plpkg-explorer")
    code = page.locator(".jp-InputArea-editor, [data-mime-type$='.error'], [data-mime-type$='.stderr']")
    expect(explorers.locator("img")).to_have_count(3)
    assert code.count() == 0
    for explorer in explorers.all():
        move(demo, explorer, explorer.locator(CONTROLS).first)
    others = page.locator("a[href^='?room=']")
    rooms = [other.get_attribute("href").removeprefix("?room=") for other in others.all()]
    assert {*rooms, "communication", "throughput", "serving.service"} == {*ROOMS}

    page.get_by_role("link", name="many people on one GPU").click()
    expect(page.locator("h2")).to_contain_text("Many people on one GPU")
    expect(explorers.locator("img")).to_have_count(1)
    move(demo, explorers, explorers.locator(CONTROLS).first)
    wait_until(lambda: "Kernel shutdown" in (tmp_path / "server.log").read_text())  # of the page that was left
    assert code.count() == 0
    assert errors == []
    refused = {request.failure for request in elsewhere if not request.url.startswith(("data:", "blob:"))}
    assert refused <= {"csp"}, "the page may take nothing from other hosts"


def test_static_rendering_reads_without_scripts(browser, tmp_path, notebook):
    html, _ = HTMLExporter().from_filename(str(notebook))
    outputs = [each for cell in nbformat.read(notebook, 4).cells for each in cell.get("outputs", [])]
    stored = sum("image/png" in each.get("data", {}) for each in outputs)
    (tmp_path / "static.html").write_text(html, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1200, "height": 900}, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "static.html").as_uri())
    expect(page.locator("h1")).to_have_count(1)
    images = page.locator(".jp-RenderedImage img")
    assert all(len(image.get_attribute("alt") or "") > 40 for image in images.all())
    is_report = notebook.parent.name == "reports"
    is_divided = (notebook.parent / "reports" / notebook.name).exists()
    assert images.count() == stored > (0 if is_report or is_divided else 1)
    details = page.locator("details")
    assert all(each.is_visible() for each in details.all())
    assert details.count() or is_report  # which has no exercises
    if not is_divided and notebook.stem != "00_start_here":
        assert page.locator("table").count() >= 5
    context.close()
