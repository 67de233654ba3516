import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from plpkg import theme


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


def test_use_sets_the_palette():
    theme.use()
    import seaborn as sns

    cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert list(map(tuple, sns.color_palette(cycle))) == list(map(tuple, sns.color_palette("colorblind")))
