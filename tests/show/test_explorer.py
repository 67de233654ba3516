import importlib
import re
from base64 import b64decode
from io import BytesIO

import ipywidgets
import pytest
from PIL import Image

from plpkg import ROOMS
from plpkg.show import theme
from plpkg.show.explorer import Explorer


def build(**controls):
    return Explorer(
        controls or {"n": ipywidgets.IntSlider(value=3, min=0, max=9, description="n (items)")},
        compute=lambda n: 10 // n,
        read_out=lambda result: f"{result} <each>",
        draw=lambda result, ax: theme.describe(ax.bar([0], [result])[0].axes, f"A bar of {result}."),
        question="How many <each>?",
    )


def test_a_moved_control_recomputes_words_and_figure():
    explorer = build()
    before = explorer._image.value
    explorer.controls["n"].value = 5
    assert explorer.result == 2
    assert "2 &lt;each&gt;" in explorer._sentence.value
    assert explorer._image.value != before
    assert explorer._image.value.startswith('<img alt="A bar of 2." ')
    assert repr(explorer) == explorer._repr_mimebundle_()["text/plain"] == "Explorer(n=5): 2 <each>"


def test_a_question_stands_above_the_controls():
    first, *_ = build().children
    assert "How many &lt;each&gt;?" in first.value


def test_it_says_that_it_computes_until_it_has_the_result():
    said = []

    def compute(n):
        said.append(explorer._sentence.value)
        return 10 // n

    explorer = build()
    explorer._functions = compute, *explorer._functions[1:]
    assert "computing" not in explorer._sentence.value
    explorer.controls["n"].value = 5
    assert "computing …" in said[0]
    assert "3 &lt;each&gt;" in said[0]  # keeps its place
    assert explorer._sentence.value == "<p role='status'>2 &lt;each&gt;</p>"


def test_a_page_without_a_kernel_has_question_positions_sentence_and_picture():
    links = ipywidgets.SelectionSlider(options=[("5g: 33 ms", 33), ("lan: <1 ms", 1)], value=1, description="Link")
    explorer = build(n=ipywidgets.IntSlider(value=3, min=0, max=9, description="n (items)"))
    explorer.controls["link"] = links
    html = explorer._repr_mimebundle_()["text/html"]
    assert html.startswith("<p><strong>How many &lt;each&gt;?</strong></p><table>")
    assert "<th>n (items)</th><th>Link</th>" in html
    assert "<td>3</td><td>lan: &lt;1 ms</td>" in html
    assert "<p>3 &lt;each&gt;</p>" in html
    alt, picture = re.search('<img alt="(.*)" style=.* src="data:image/png;base64,(.*)">', html).groups()
    assert alt == "A bar of 3."
    assert b64decode(picture).startswith(b"\x89PNG")


def test_an_error_is_not_swallowed():
    explorer = build()
    with pytest.raises(ZeroDivisionError):
        explorer.controls["n"].value = 0
    assert "computing" not in explorer._sentence.value


def test_the_picture_keeps_its_place_at_any_width():
    style, picture = re.search('style="(.*)" src="data:image/png;base64,(.*)">', build()._image.value).groups()
    width, height = Image.open(BytesIO(b64decode(picture))).size
    assert style == f"aspect-ratio: {width} / {height}; display: block; max-width: {width}px; width: 100%"


def test_controls_do_not_fire_while_dragged():
    assert build().controls["n"].continuous_update is False


def test_five_controls_are_too_many():
    with pytest.raises(ValueError, match="at most 4 controls, got 5: a, b, c, d, e"):
        build(**{name: ipywidgets.IntSlider() for name in "abcde"})


def others(control):
    """What a control can be set to beside what it is."""
    if options := getattr(control, "options", None):
        values = [option[1] if isinstance(option, tuple) else option for option in options]
    elif isinstance(control.value, str):
        values = [f"{control.value} And more."]
    else:
        values = [not control.value] if isinstance(control.value, bool) else [control.min, control.max]
    return [value for value in values if value != control.value]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_asks_and_every_control_changes_the_words(room):
    explorer = importlib.import_module(f"plpkg.{room}.widget").explorer()
    first = explorer.text
    assert explorer.question.endswith("?")
    for name, control in explorer.controls.items():
        stood = control.value
        for value in others(control):
            control.value = value
            if explorer.text != first:
                break
        assert explorer.text != first, name
        control.value = stood
        assert explorer.text == first, name
