"""Drawings of a mechanism: boxes, arrows between them, and lanes that say who holds them.

Coordinates are units of the drawing, y downwards; each function adds to axes that :func:`canvas` made, and a drawing
ends with :func:`plpkg.show.theme.describe`, which gives it its alternative text.
"""

from plpkg.show import theme

INK = "0.25"
PALE = "0.93"


def canvas(width: float, height: float, ax=None):
    """Axes for a drawing of ``width`` by ``height`` units; a figure of its own is 7.2 inches wide."""
    ax = theme.axes(ax, figsize=(7.2, 7.2 * height / width))
    ax.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    ax.axis("off")
    return ax


def colours(count: int) -> list:
    """The first ``count`` colours of the theme's palette: one for each thing that a drawing tells apart."""
    return [fill["color"] for fill in theme.fills(count)]


def lane(ax, x: float, y: float, width: float, height: float, title: str, colour=PALE) -> None:
    """A pale area behind boxes, with a title at its top: a machine, a phase, a person."""
    _patch(ax, x, y, width, height, colour, zorder=0)
    ax.text(x + width / 2, y + 0.12, title, ha="center", va="top", fontweight="bold", color=INK)


def box(ax, x: float, y: float, width: float, height: float, text: str = "", colour=INK, size: float = 10) -> None:
    """A filled box with white text in its middle."""
    _patch(ax, x, y, width, height, colour, zorder=2)
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=size, zorder=3)


def arrow(ax, start: tuple, stop: tuple, text: str = "", dashed: bool = False, colour=INK, above: bool = True) -> None:
    """An arrow from ``start`` to ``stop``, both ``(x, y)``, with a text above its middle or below it."""
    dashes = "--" if dashed else "-"
    style = dict(arrowstyle="-|>", color=colour, lw=1.6, linestyle=dashes, shrinkA=0, shrinkB=0)
    ax.annotate("", stop, start, arrowprops=style, zorder=4)
    x = (start[0] + stop[0]) / 2
    y = (start[1] + stop[1]) / 2
    if above:
        ax.text(x, y - 0.08, text, ha="center", va="bottom", color=INK, fontsize=9, zorder=5)
    else:
        ax.text(x, y + 0.08, text, ha="center", va="top", color=INK, fontsize=9, zorder=5)


def note(ax, x: float, y: float, text: str, size: float = 9, **style) -> None:
    """A few words centred at ``(x, y)``; ``style`` are keyword arguments of matplotlib's ``text``."""
    defaults = dict(ha="center", va="center", color=INK, fontsize=size, zorder=5)
    ax.text(x, y, text, **defaults | style)


def _patch(ax, x, y, width, height, colour, zorder) -> None:
    from matplotlib.patches import FancyBboxPatch

    pad = 0.06  # matplotlib adds the round corners outside of the box that it is given
    ax.add_patch(
        FancyBboxPatch(
            (x + pad, y + pad), width - 2 * pad, height - 2 * pad, boxstyle=f"round,pad={pad}",
            facecolor=colour, edgecolor="white", zorder=zorder,
        )
    )  # fmt: skip
