"""Figures of notebook 01: what is sent, in which order, and how much of it."""

from collections.abc import Iterable, Mapping, Sequence

from plpkg import results, theme
from plpkg.catalog import Link, ModelShape, link as find_link, model as find_model
from plpkg.communication.formulas import full_activations, low_rank
from plpkg.communication.schedule import Message
from plpkg.communication.traffic import Traffic

RANKS = (8, 16, 32, 64, 128, 256, 512)


def sequence_chart(messages: Iterable[Message], ax=None):
    """Draw messages in the order in which they cross the network: device on the left, cloud on the right."""
    messages = list(messages)
    ax = theme.axes(ax)
    up, down = theme.styles(2)
    for position, message in enumerate(messages):
        start, end, style = (0, 1, up) if message.direction == "up" else (1, 0, down)
        arrow = dict(arrowstyle="-|>", color=style["color"], linestyle=style["linestyle"], lw=1.6)
        ax.annotate("", xy=(end, position + 0.25), xytext=(start, position - 0.25), arrowprops=arrow)
        where = "" if message.layer is None else f"layer {message.layer}: "
        shape = " × ".join(map(str, message.shape))
        ax.text(0.5, position - 0.12, f"{where}{message.content}  ({shape})", ha="center", va="bottom", fontsize=9)
    ax.set(xlim=(-0.05, 1.05), ylim=(len(messages) - 0.3, -0.8), xticks=[0, 1], yticks=[])
    ax.set_xticklabels(["device", "cloud"], fontweight="bold")
    ax.set_ylabel("← time", labelpad=10)  # rotated, it points down
    directions = [m.direction for m in messages]
    return theme.describe(
        ax,
        f"Sequence chart of {len(messages)} messages between device and cloud, {directions.count('up')} up and "
        f"{directions.count('down')} down, each sent only after what came before it the other way has arrived.",
    )


def by_rank(
    model: str | ModelShape = "llama-7b",
    ranks: Sequence[int] = RANKS,
    counted: Mapping[int, Traffic] | None = None,
    ax=None,
):
    """Bits per token against the rank, with the full-width baselines as horizontal lines.

    ``counted`` marks traffic that was counted from serialised tensors, by rank.
    """
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    model = find_model(model)
    ranks = [rank for rank in ranks if rank <= model.hidden]
    ax = theme.axes(ax)
    kbit = [low_rank(model, r).total_bits / 1e3 for r in ranks]
    style, *baselines = theme.styles(4)
    ax.plot(ranks, kbit, label="low rank, 3 projections and end points", **{**style, "marker": ""})
    if counted:
        points = [traffic.total_bits / 1e3 for traffic in counted.values()]
        ax.plot(list(counted), points, "o", color="black", mfc="none", ms=9, label="the same, counted from tensors")
    ends = low_rank(model, 1).total_bits - low_rank(model, 1, endpoints=False).total_bits
    lines = {
        "published count, 1 projection": full_activations(model, 1, False),
        "actual, 3 projections and end points": full_activations(model, 3, True, baseline="actual"),
        "published count, 3 projections and end points": full_activations(model, 3, True),
    }
    for (label, traffic), line in zip(lines.items(), baselines, strict=True):
        ax.axhline(traffic.total_bits / 1e3, label=label, color=line["color"], linestyle=line["linestyle"])
    ax.axhline(ends / 1e3, color="0.4", lw=1, linestyle=":", label="end points alone")
    ax.set(xscale="log", yscale="log", xlabel="rank (both directions)", ylabel="kbit per token")
    ax.set_xticks(ranks, [str(r) for r in ranks])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.minorticks_off()
    ax.set_title(model.name)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    ax.figure.set_size_inches(9.6, 4.2)
    return theme.describe(
        ax,
        f"Traffic per token of {model.name} against the rank, both axes logarithmic: from {kbit[0]:.0f} kbit at "
        f"rank {ranks[0]} to {kbit[-1]:.0f} kbit at rank {ranks[-1]}, above the end points' {ends / 1e3:.0f} kbit; "
        f"horizontal lines for full activations between {min(t.total_bits for t in lines.values()) / 1e6:.1f} and "
        f"{max(t.total_bits for t in lines.values()) / 1e6:.1f} Mbit.",
    )


def by_model(models: Sequence[str | ModelShape], rank: int = 32, ax=None):
    """Bits per token of several models at one rank, split into residuals and end points."""
    shapes = [find_model(model) for model in models]
    ax = theme.axes(ax)
    residuals = [low_rank(shape, rank, endpoints=False).total_bits / 1e3 for shape in shapes]
    ends = [low_rank(shape, rank).total_bits / 1e3 - part for shape, part in zip(shapes, residuals, strict=True)]
    names = [f"{shape.name}\n{shape.num_layers} layers × {shape.hidden}" for shape in shapes]
    first, second = theme.fills(2)
    ax.barh(names, residuals, label="residuals (∝ layers)", **first)
    ax.barh(names, ends, left=residuals, label="end points (∝ hidden)", **second)
    for row, (a, b) in enumerate(zip(residuals, ends, strict=True)):
        ax.text(a + b, row, f" {a + b:.0f}", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(
        xlabel=f"kbit per token at rank {rank}",
        xlim=(0, 1.12 * max(a + b for a, b in zip(residuals, ends, strict=True))),
    )
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)
    said = "; ".join(f"{s.name} {a:.0f} + {b:.0f}" for s, a, b in zip(shapes, residuals, ends, strict=True))
    return theme.describe(ax, f"Stacked bars of kbit per token at rank {rank}, residuals plus end points: {said}.")


def link_time(traffics: Mapping[str, Traffic], link: str | Link, ax=None):
    """Milliseconds per token of several named traffics on one link: up, down and round trips, stacked."""
    link = find_link(link)
    ax = theme.axes(ax)
    seconds = [traffic.seconds(link) for traffic in traffics.values()]
    names = [f"{name}\n{results.bits(traffic.bits_per_token)}" for name, traffic in traffics.items()]
    left = [0.0] * len(names)
    labels = {"uplink": "uplink", "downlink": "downlink", "round_trips": "round trips"}
    for (part, label), fill in zip(labels.items(), theme.fills(3), strict=True):
        ms = [1e3 * s[part] / traffic.tokens for s, traffic in zip(seconds, traffics.values(), strict=True)]
        ax.barh(names, ms, left=left, label=label, **fill)
        left = [a + b for a, b in zip(left, ms, strict=True)]
    for row, total in enumerate(left):
        ax.text(total, row, f" {total:.1f} ms", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel=f"milliseconds per token on {link.name}", xlim=(0, 1.2 * max(left)))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=3)
    said = "; ".join(f"{name} {total:.1f} ms" for name, total in zip(traffics, left, strict=True))
    return theme.describe(ax, f"Stacked bars of the milliseconds a token spends on {link.name}: {said}.")
