"""Figures of notebook 01: what is sent, in which order, and how much of it."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from plpkg import results
from plpkg.catalog import Link, ModelShape, link as find_link, model as find_model
from plpkg.communication.formulas import full_activations, low_rank
from plpkg.communication.schedule import Message
from plpkg.communication.traffic import Traffic
from plpkg.show import drawing, theme

RANKS = (8, 16, 32, 64, 128, 256, 512)


def split(ax=None):
    """Draw one token's way through PrivateLoRA: who holds what, and the four messages that cross."""
    from matplotlib.patches import Patch

    ax = drawing.canvas(14.4, 9.4, ax)
    public, personal = drawing.colours(2)
    drawing.lane(ax, 0, 0, 4.6, 8.6, "phone")
    drawing.lane(ax, 4.8, 0, 3.4, 8.6, "network", "0.98")
    drawing.lane(ax, 8.4, 0, 6, 8.6, "cloud")
    drawing.lane(ax, 8.6, 0.9, 5.6, 6.0, "each of the L layers", "0.85")
    drawing.box(ax, 0.9, 1.0, 3.3, 1, "embedding", public)
    drawing.box(ax, 1.5, 2.8, 2.7, 2.8, "M\nof q, k and v\nin each layer\n(learns)", personal)
    drawing.box(ax, 0.9, 7.2, 3.3, 1, "LM head", public)
    drawing.box(ax, 9.0, 2.8, 1.4, 1, "A", public)
    drawing.box(ax, 9.0, 4.6, 1.4, 1, "B", public)
    drawing.box(ax, 11.0, 2.8, 2.9, 1.7, "frozen weights\nW of q, k, v", public)
    drawing.box(ax, 9.0, 5.9, 4.9, 0.8, "attention and KV cache", personal)
    drawing.box(ax, 9.0, 7.2, 4.9, 1, "final norm", public)
    across = [
        ((4.2, 1.5), (8.6, 1.5), "1  x: d numbers"),
        ((9.0, 3.3), (4.2, 3.3), "2  A x: 3 r numbers"),
        ((4.2, 5.1), (9.0, 5.1), "3  M A x: 3 r numbers"),
        ((9.0, 7.7), (4.2, 7.7), "4  h: d numbers"),
    ]
    for start, stop, text in across:
        drawing.arrow(ax, start, stop, text)
    drawing.note(ax, 6.5, 4.2, "2 and 3 in each layer,\none after the other", style="italic")
    drawing.note(ax, 9.95, 2.35, "x")
    drawing.note(ax, 12.7, 2.35, "x")
    for x, top, bottom in ((9.7, 2.0, 2.8), (12.45, 2.0, 2.8), (12.45, 4.5, 5.9), (12.45, 6.7, 7.2)):
        drawing.arrow(ax, (x, top), (x, bottom))
    drawing.arrow(ax, (10.4, 5.1), (12.35, 5.1))
    drawing.note(ax, 12.75, 5.1, "+", 12)
    drawing.arrow(ax, (1.2, 7.2), (1.2, 2.0), dashed=True)
    drawing.note(ax, 0.85, 4.6, "the next word", rotation=90)
    colours = {"computed or learnt from your text": personal, "public": public}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    ax.legend(handles=handles, loc="lower center", ncols=2, frameon=False, borderaxespad=0)
    return theme.describe(
        ax,
        "Three areas side by side. The phone holds the embedding, an M for q, k and v of each layer, and the LM head; "
        "the cloud holds W, A, B and the KV cache of each layer. One token: 1, its embedding x goes up, d numbers; in "
        "each of the L layers 2, A x comes down and 3, M A x goes up, 3 r numbers each; 4, the last hidden state h "
        "comes down, d numbers, and the LM head chooses the next word.",
    )


def sequence_chart(messages: Iterable[Message], ax=None):
    """Draw messages in the order in which they cross the network: device on the left, cloud on the right.

    A bracket on the left spans each round trip: what goes one way at once, and what then comes back.
    """
    messages = list(messages)
    ax = theme.axes(ax)
    up, down = theme.styles(2)
    for position, message in enumerate(messages):
        if message.direction == "up":
            start, end = 0, 1
            style = up
        else:
            start, end = 1, 0
            style = down
        arrow = dict(arrowstyle="-|>", color=style["color"], linestyle=style["linestyle"], lw=1.6)
        ax.annotate("", xy=(end, position + 0.15), xytext=(start, position - 0.15), arrowprops=arrow)
        where = "" if message.layer is None else f"layer {message.layer}: "
        shape = " × ".join(map(str, message.shape))
        ax.text(0.5, position - 0.14, f"{where}{message.content}  ({shape})", ha="center", va="bottom", fontsize=11)
    # The positions of the messages that follow each other in one direction; two such runs are a round trip.
    runs = [list(run) for _, run in groupby(range(len(messages)), key=lambda i: messages[i].direction)]
    for there, back in zip(runs[::2], runs[1::2], strict=False):
        top = there[0] - 0.2
        bottom = back[-1] + 0.2
        ax.plot([-0.03, -0.06, -0.06, -0.03], [top, top, bottom, bottom], color="0.4", lw=1.2)
    ax.set(xlim=(-0.1, 1.05), ylim=(len(messages) - 0.3, -0.8), xticks=[0, 1], yticks=[])
    ax.set_xticklabels(["device", "cloud"], fontweight="bold")
    ax.set_ylabel("← time", labelpad=10)  # rotated, it points down
    ax.figure.set_size_inches(7.2, 0.6 + 0.55 * len(messages))
    directions = [message.direction for message in messages]
    return theme.describe(
        ax,
        f"Sequence chart of {len(messages)} messages between device and cloud, {directions.count('up')} up and "
        f"{directions.count('down')} down, each sent only after what came before it the other way has arrived.",
    )


def by_rank(model: str | ModelShape = "llama-7b", ranks: Sequence[int] = RANKS, ax=None):
    """Bits per token against the rank, with the full-width baselines as horizontal lines."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    model = find_model(model)
    ranks = [rank for rank in ranks if rank <= model.hidden]
    ax = theme.axes(ax)
    kbit = [low_rank(model, rank).total_bits / 1e3 for rank in ranks]
    style, *baselines = theme.styles(4)
    ax.plot(ranks, kbit, label="low rank, 3 projections and end points (computed)", **style | {"marker": ""})
    ends_kbit = (low_rank(model, 1).total_bits - low_rank(model, 1, endpoints=False).total_bits) / 1e3
    lines = {
        "1 projection, as the article counts": full_activations(model, 1, False),
        "split LoRA, 3 projections and end points": full_activations(model, 3, True, baseline="actual"),
        "3 projections down and up, end points": full_activations(model, 3, True),
    }
    for (label, traffic), line in zip(lines.items(), baselines, strict=True):
        ax.axhline(traffic.total_bits / 1e3, label=label, color=line["color"], linestyle=line["linestyle"])
    ax.axhline(ends_kbit, color="0.4", lw=1, linestyle=":", label="end points alone")
    article = lines["1 projection, as the article counts"].total_bits / 1e3
    drawing.note(ax, ranks[0], 1.1 * article, f"article, {article:,.0f} kbit", ha="left", va="bottom")
    if 64 in ranks:
        at_64 = low_rank(model, 64).total_bits / 1e3
        drawing.note(ax, 64, 1.25 * at_64, f"{at_64:.0f} kbit", va="bottom")
    ax.set(xscale="log", yscale="log", xlabel="rank (both directions)", ylabel="kbit per token")
    ax.set_xticks(ranks, [str(rank) for rank in ranks])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.minorticks_off()
    ax.set_title(model.name)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    ax.figure.set_size_inches(7.2, 5.2)
    full_mbit = [traffic.total_bits / 1e6 for traffic in lines.values()]
    return theme.describe(
        ax,
        f"Traffic per token of {model.name} against the rank, both axes logarithmic: from {kbit[0]:.0f} kbit at "
        f"rank {ranks[0]} to {kbit[-1]:.0f} kbit at rank {ranks[-1]}, above the end points' {ends_kbit:.0f} kbit; "
        f"horizontal lines for full activations between {min(full_mbit):.1f} and {max(full_mbit):.1f} Mbit.",
    )


def by_model(models: Sequence[str | ModelShape], rank: int = 32, ax=None):
    """Bits per token of several models at one rank, split into residuals and end points."""
    shapes = [find_model(model) for model in models]
    ax = theme.axes(ax)
    residuals = [low_rank(shape, rank, endpoints=False).total_bits / 1e3 for shape in shapes]
    both = [low_rank(shape, rank).total_bits / 1e3 for shape in shapes]
    ends = [total - residual for total, residual in zip(both, residuals, strict=True)]
    names = [f"{shape.name}\n{shape.num_layers} layers × {shape.hidden}" for shape in shapes]
    first, second = theme.fills(2)
    ax.barh(names, residuals, label="residuals (∝ layers)", **first)
    ax.barh(names, ends, left=residuals, label="end points (∝ hidden)", **second)
    for row, (total, shape) in enumerate(zip(both, shapes, strict=True)):
        trips = low_rank(shape, rank).round_trips
        ax.text(total, row, f" {total:.0f} kbit,\n {trips} round trips", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel=f"kbit per token at rank {rank}", xlim=(0, 1.25 * max(both)))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)
    sums = []
    for shape, residual, end in zip(shapes, residuals, ends, strict=True):
        sums.append(f"{shape.name} {residual:.0f} + {end:.0f}")
    said = "; ".join(sums)
    return theme.describe(ax, f"Stacked bars of kbit per token at rank {rank}, residuals plus end points: {said}.")


def link_time(traffics: Mapping[str, Traffic], link: str | Link, ax=None):
    """Milliseconds per token of several named traffics on one link: up, down and round trips, stacked."""
    link = find_link(link)
    ax = theme.axes(ax)
    names = [f"{name}\n{results.bits(traffic.bits_per_token)}" for name, traffic in traffics.items()]
    totals = [0.0] * len(names)  # of the parts drawn so far: where the next one begins
    labels = {"uplink": "uplink", "downlink": "downlink", "round_trips": "round trips"}
    for (part, label), fill in zip(labels.items(), theme.fills(3), strict=True):
        ms = [1e3 * traffic.seconds(link)[part] / traffic.tokens for traffic in traffics.values()]
        if any(ms):
            ax.barh(names, ms, left=totals, label=label, **fill)
        totals = [total + more for total, more in zip(totals, ms, strict=True)]
    waits = ms  # the last part: round trips
    for row, (total, wait) in enumerate(zip(totals, waits, strict=True)):
        ax.text(total, row, f" {total:.1f} ms,\n {total - wait:.1f} of bits", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel=f"milliseconds per token on {link.name}", xlim=(0, 1.25 * max(totals)))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=3)
    said = "; ".join(f"{name} {total:.1f} ms" for name, total in zip(traffics, totals, strict=True))
    return theme.describe(ax, f"Stacked bars of the milliseconds a token spends on {link.name}: {said}.")
