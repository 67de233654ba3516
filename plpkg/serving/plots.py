"""Figures of notebook 06. What takes ``rows`` takes those of a recorded section of that name."""

from plpkg.serving.popularity import Decoding
from plpkg.show import drawing, theme


def batch(segments, names, ax=None):
    """A layer and a batch: tokens as rows, all through W, each run of them through its own A and B besides.

    ``segments`` are ``(start, stop, i)``, ``names`` those of the adapters.
    """
    ax = theme.axes(ax)
    tokens = max(stop for _, stop, _ in segments)
    colours = drawing.colours(len(names))

    def block(x, y, width, height, label="", colour="0.8", size=11):
        drawing.box(ax, x, y + 0.05, width, height - 0.1, label, colour, size)

    def arrow(x, y, to, dashed=False):
        drawing.arrow(ax, (x, y), (to, y), dashed=dashed)

    centred = {"ha": "center", "va": "center"}
    longest_begin, longest_end, _ = max(segments, key=lambda segment: segment[1] - segment[0])
    block(1.6, 0, 2.4, tokens, colour="0.9")
    ax.text(
        2.8,
        (longest_begin + longest_end) / 2,
        "$W$, read once\nfor all tokens\n(dashed: past it)",
        **centred,
        color="0.2",
    )
    for start, stop, index in segments:
        middle = (start + stop) / 2
        colour = "0.75" if index is None else colours[index]
        name = "no adapter" if index is None else names[index]
        for token in range(start, stop):
            block(0, token, 1, 1, colour=colour)
            block(7.2, token, 1, 1, colour=colour)
        ax.text(-0.15, middle, name, ha="right", va="center")
        if index is None:
            arrow(1.05, middle, 1.6)
            arrow(4.0, middle, 7.15)
            continue
        above = start + (stop - start) / 4
        arrow(1.05, above, 1.6)
        arrow(4.0, above, 6.5)
        below = middle + (stop - start) / 4  # its own way, past W
        for x, to in ((1.05, 4.5), (5.1, 5.4), (6.0, 6.5)):
            arrow(x, below, to, dashed=x < 2)
        for x, matrix in ((4.5, "A"), (5.4, "B")):  # all alike, as their ranks are
            block(x, below - 0.3, 0.6, 0.6, f"${matrix}_{index}$", colour, 9)
        ax.text(6.65, middle, "+", **centred, fontsize=15)
        arrow(6.8, middle, 7.15)
    for x, label in ((0.5, "$x$"), (5.2, "read for its tokens"), (7.7, "$y$")):
        ax.text(x, -0.2, label, ha="center", va="bottom")
    ax.set(xlim=(-1.9, 8.3), ylim=(tokens + 0.1, -0.8))
    ax.axis("off")
    parts = "; ".join(f"tokens {a} to {b - 1}: {'none' if i is None else names[i]}" for a, b, i in segments)
    return theme.describe(
        ax,
        f"A layer's weight W multiplies all {tokens} tokens at once; beside it, each run has its own A and B: {parts}.",
    )


def decoding(result: Decoding, ax=None):
    """Tokens per second by how a batch is served."""
    ax = theme.axes(ax)
    speeds = result.tokens_per_s
    for k, (speed, fill) in enumerate(zip(speeds.values(), theme.fills(len(speeds)), strict=True)):
        ax.barh(k, speed, **fill)
        ax.text(speed, k, f" {speed:,.0f}", va="center")
    ax.set_yticks(range(len(speeds)), speeds)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="tokens/s (computed)", xlim=(0, 1.15 * max(speeds.values())))
    return theme.describe(ax, repr(result))


def popularity(rows, ax=None):
    """Tokens per second of each way to serve, by popularity."""
    table = rows.pivot_table(index="case", columns="what", values="tokens_per_s", sort=False)
    ax = _grouped(table, rows.groupby("case", sort=False)["adapters"].first(), ax)
    ax.set(ylabel="tokens/s (better ↑)", xlabel="how the 16 requests spread over adapters")
    ax.get_legend().set_title("PEFT's bars and merging: another engine")
    return theme.describe(ax, f"Tokens per second by popularity. {_said(table, '.0f')}.")


def _grouped(table, adapters, ax=None):
    """A group of bars for each row of ``table``, with the number of its ``adapters``."""
    ax = theme.axes(ax)
    count = len(table.columns)
    width = 0.8 / count
    for k, (name, fill) in enumerate(zip(table, theme.fills(count), strict=True)):
        offset = (k - (count - 1) / 2) * width
        ax.bar([x + offset for x in range(len(table))], table[name], width, label=name, **fill)
    labels = []
    for case in table.index:
        number = adapters[case]
        labels.append(f"{case}\n({number} adapter{'s' if number > 1 else ''})")
    ax.set_xticks(range(len(table)), labels)
    ax.grid(False, axis="x")
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return ax


def _said(table, digits: str) -> str:
    """A table in words: each column's values."""
    columns = []
    for name in table:
        values = ", ".join(f"{case} {value:{digits}}" for case, value in table[name].items())
        columns.append(f"{name}: {values}")
    return "; ".join(columns)


def people(rows, ax=None):
    """How many times faster sixteen people learn in one step than one by one, and the backbone's own part in it."""
    ax = theme.axes(ax)
    series = {"ratio": "adapters, everything", "backbone": "the backbone alone"}
    for (column, label), style in zip(series.items(), theme.styles(2), strict=True):
        ax.plot(rows["tokens"], rows[column], label=label, **style)
    ax.axhline(1, color="0.4", lw=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(rows["tokens"], rows["tokens"])
    ax.set(xlabel="tokens of each person", ylabel="time one by one / together (better ↑)", ylim=(0, None))
    ax.legend()
    values = ", ".join(f"{ratio:.1f} at {tokens}" for tokens, ratio in zip(rows["tokens"], rows["ratio"], strict=True))
    return theme.describe(ax, f"Sixteen people in one step, times faster than one by one: {values} tokens.")


def drift(rows, ax=None):
    """How far the weights are from what they were, against swaps, by precision."""
    ax = theme.axes(ax)
    groups = list(rows.groupby("case", sort=False))
    for (dtype, each), style in zip(groups, theme.styles(len(groups)), strict=True):
        ax.plot(each["swaps"], each["drift"], label=f"{dtype}, four random", **style)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="swaps (merge, then unmerge)",
        ylabel="← better: distance (% of the weights' norm)",
        title="how far swapping moves the weights",
    )
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter(lambda drift, _: f"{100 * drift:.6f}".rstrip("0").rstrip("."))
    ax.legend()
    last = "; ".join(f"{dtype} {each['drift'].iloc[-1]:.1g}" for dtype, each in groups)
    return theme.describe(ax, f"Weights drift with every swap; after {rows['swaps'].max():,.0f}: {last}.")
