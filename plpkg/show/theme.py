"""One look for every figure: colours that colour-blind readers tell apart, and a second channel.

A figure carries a sentence for those who cannot see it: plot functions set it with
:func:`describe`, and the notebook stores it beside the image as ``alt`` (which the HTML export
shows; JupyterLab itself does not render it, so every figure also stands beside a table).
"""

from itertools import cycle, pairwise

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "**")


def use() -> None:
    """Set the theme for all figures that follow, and make notebooks keep their alt text."""
    import seaborn as sns

    sns.set_theme(
        context="notebook",
        style="whitegrid",
        palette="colorblind",
        rc={
            "figure.figsize": (7.2, 4.2),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "axes.spines.right": False,
            "axes.spines.top": False,
            "legend.frameon": True,
            "legend.fontsize": "small",
            "font.size": 11,
        },
    )
    _keep_alt_text()


def _keep_alt_text() -> None:
    """In a notebook, let the image formatter hand over the alt text; elsewhere do nothing."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    def register(*_result) -> None:
        shell.display_formatter.formatters["image/png"].for_type(Figure, _png_with_alt)

    def register_once(*_result) -> None:
        register()
        shell.events.unregister("post_run_cell", register_once)

    # The inline backend installs its own formatter when it loads, so make it load first, and may
    # install it once more after this cell.
    plt.switch_backend(plt.get_backend())
    register()
    shell.events.register("post_run_cell", register_once)


def _png_with_alt(figure) -> tuple[bytes, dict]:
    return png(figure), {"alt": alt(figure)}


def png(figure) -> bytes:
    """The figure as a PNG file, with a palette of 128 colours, which makes it a third as large."""
    from io import BytesIO

    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    buffer = BytesIO()
    with Image.open(drawn) as image:
        # Maximum coverage keeps the colour of a thin bar and its legend, which the median cut mixes with others.
        palette = image.convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def axes(ax=None, **figure):
    """``ax``, or the axes of a new figure, which matplotlib makes with the other arguments."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(**figure)[1]


def styles(count: int) -> list[dict]:
    """``count`` line styles that differ in colour, dash and marker: keyword arguments of ``plot``."""
    import seaborn as sns

    colours = cycle(sns.color_palette("colorblind"))
    dashes = cycle(DASHES)
    markers = cycle(MARKERS)
    return [{"color": next(colours), "linestyle": next(dashes), "marker": next(markers)} for _ in range(count)]


def fills(count: int) -> list[dict]:
    """``count`` bar fills that differ in colour and hatching: keyword arguments of ``bar``."""
    import seaborn as sns

    colours = cycle(sns.color_palette("colorblind"))
    hatches = cycle(HATCHES)
    return [{"color": next(colours), "hatch": next(hatches), "edgecolor": "white"} for _ in range(count)]


def name_lines(ax, gap: float = 0.06) -> None:
    """Write each line's name behind its last point, in its colour but darker, instead of a legend.

    Called once the axes have their limits. Names of lines that end together stand at least ``gap`` of the axes' height
    apart; those of the lines that go on to the right stand outside the axes.
    """
    from matplotlib.colors import to_rgb

    ends = {}  # by the x of a last point: [height, name, colour] of each line; x and height as fractions of the axes
    for line, name in zip(*ax.get_legend_handles_labels(), strict=True):
        line = getattr(line, "lines", [line])[0]  # an error bar has its line in ``lines``
        last_point = line.get_xdata()[-1], line.get_ydata()[-1]
        x, height = ax.transAxes.inverted().transform(ax.transData.transform(last_point))
        ends.setdefault(round(x, 3), []).append([height, name, line.get_color()])
    for x, names in ends.items():
        _spread(names, gap)
        left = 1 if x == max(ends) else x
        for height, name, colour in names:
            darker = [0.75 * part for part in to_rgb(colour)]
            offset = dict(xytext=(8, 0), textcoords="offset points")
            style = dict(color=darker, va="center", fontsize=10)
            ax.annotate(name, (left, height), xycoords="axes fraction", **offset, **style)


def _spread(names: list[list], gap: float) -> None:
    """Move names ``[height, …]`` of one x apart: up where they are closer than ``gap``, then down to below the top."""
    names.sort(key=lambda name: name[0])
    for below, above in pairwise(names):
        above[0] = max(above[0], below[0] + gap)
    over_the_top = [1 + gap]
    for above, below in pairwise([over_the_top, *reversed(names)]):
        below[0] = min(below[0], above[0] - gap)


def describe(ax, sentence: str):
    """Give ``ax`` its alternative text, and return it: a figure with several axes says one after the other."""
    ax.alt_text = sentence
    return ax


def alt(figure) -> str:
    """The alternative text of a figure; empty if nobody described it."""
    return " ".join(ax.alt_text for ax in figure.axes if hasattr(ax, "alt_text"))
