"""Every widget as its reader meets it: run in JupyterLab, moved with the keyboard, read."""

import re

import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_every_control_answers_to_the_keyboard(lab, page, widget_notebook):
    page.goto(f"{lab}/lab/workspaces/{widget_notebook.stem}/tree/{widget_notebook.name}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    # The kernel has to be there: what is run before it answers is lost.
    expect(page.locator("#jp-bottom-panel")).to_contain_text("Python 3 (ipykernel) | Idle")
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()

    explorer = page.locator(".plpkg-explorer")
    read_out = explorer.locator(".plpkg-read-out")
    picture = explorer.locator("img")
    expect(read_out).to_contain_text("token")  # all cells above have to run first
    controls = explorer.locator("select, .noUi-handle, input[type=checkbox], input[type=text]")
    assert 1 <= controls.count() <= 4

    for index in range(controls.count()):
        control = controls.nth(index)
        label = control.evaluate("element => element.closest('.plpkg-explorer > *').innerText")
        assert re.search(r"\w", label)
        words, source = read_out.inner_text(), picture.get_attribute("src")
        control.focus()
        kind = control.evaluate("element => element.tagName + '.' + (element.type || '')")
        if kind == "INPUT.text":
            page.keyboard.type("One more. ")
        page.keyboard.press({"INPUT.checkbox": "Space", "INPUT.text": "Enter"}.get(kind, "ArrowRight"))
        expect(read_out).not_to_have_text(words)
        expect(picture).not_to_have_attribute("src", source)
    assert picture.evaluate("image => image.naturalWidth") > 300
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0


def test_static_rendering_reads_without_scripts(browser, tmp_path, notebook):
    html, _ = HTMLExporter().from_filename(str(notebook))
    (tmp_path / "static.html").write_text(html, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1200, "height": 900}, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "static.html").as_uri())
    expect(page.locator("h1")).to_have_count(1)
    images = page.locator(".jp-RenderedImage img")
    assert all(len(image.get_attribute("alt") or "") > 40 for image in images.all())
    expect(page.locator("details").first).to_be_visible()
    if notebook.stem != "00_start_here":
        assert images.count() >= 3
        assert page.locator("table").count() >= 5
    context.close()
