"""Drawings of a mechanism: boxes, arrows between them, and lanes that say who holds them.

Coordinates are units of the drawing, y downwards; each function adds to axes that :func:`canvas` made, and a drawing
ends with :func:`plpkg.show.theme.describe`, which gives it its alternative text.
"""

from plpkg.show import theme

INK, PALE = "0.25", "0.93"


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
    """An arrow from ``start`` to ``stop``, both ``(x, y)``; its text stands over its middle, or under it."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "linestyle": "--" if dashed else "-"}
    ax.annotate("", stop, start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, zorder=4)
    middle = ((start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2 + (-0.08 if above else 0.08))
    ax.text(*middle, text, ha="center", va="bottom" if above else "top", color=INK, fontsize=9, zorder=5)


def note(ax, x: float, y: float, text: str, size: float = 9, **style) -> None:
    """A few words; ``ha``, ``va``, ``color`` and so on as matplotlib has them."""
    ax.text(x, y, text, **{"ha": "center", "va": "center", "color": INK, "fontsize": size, "zorder": 5} | style)


def _patch(ax, x, y, width, height, colour, zorder) -> None:
    from matplotlib.patches import FancyBboxPatch

    round_ = 0.06  # the corner is added on each side of what matplotlib is given
    inside = (x + round_, y + round_), width - 2 * round_, height - 2 * round_
    style = dict(boxstyle=f"round,pad={round_}", facecolor=colour, edgecolor="white", zorder=zorder)
    ax.add_patch(FancyBboxPatch(*inside, **style))
