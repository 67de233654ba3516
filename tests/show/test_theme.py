import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from plpkg.show import theme


def test_styles_differ_in_colour_and_in_a_second_channel():
    lines = theme.styles(6)
    assert len({line["color"] for line in lines}) == 6
    assert len({(str(line["linestyle"]), line["marker"]) for line in lines}) == 6
    bars = theme.fills(8)
    assert len({bar["hatch"] for bar in bars}) == 8


def test_alt_text_travels_with_the_image_and_says_all_axes():
    ax = theme.describe(theme.axes(), "A line that rises.")
    image, metadata = theme._png_with_alt(ax.figure)
    assert image.startswith(b"\x89PNG")
    assert metadata == {"alt": "A line that rises."}
    assert theme.alt(Figure()) == ""
    figure, (left, right) = plt.subplots(1, 2)
    theme.describe(left, "A first line.")
    theme.describe(right, "A line.")
    theme.describe(right, "A second line.")
    assert theme.alt(figure) == "A first line. A second line."


def test_lines_are_named_in_their_order_and_apart():
    ax = theme.axes()
    ax.errorbar([0, 1], [0, 5], yerr=1, label="middle")
    for name, end in (("top", 10), ("below the top", 9.9), ("bottom", 0)):
        ax.plot([0, 1], [0, end], label=name)
    ax.set_ylim(0, 10)
    theme.name_lines(ax, gap=0.1)
    heights = {text.get_text(): text.xy[1] for text in ax.texts}
    assert heights == pytest.approx({"top": 1, "below the top": 0.9, "middle": 0.5, "bottom": 0})
    assert ax.texts[-1].get_text() == "top"
    assert ax.texts[-1].get_color() == pytest.approx([0.75 * part for part in to_rgb(ax.lines[1].get_color())])


def test_use_sets_the_palette():
    theme.use()
    import seaborn as sns

    cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert list(map(tuple, sns.color_palette(cycle))) == list(map(tuple, sns.color_palette("colorblind")))
