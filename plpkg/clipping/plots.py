"""Figures of notebook 05.

What was measured comes as ``rows``: a case of ``benchmarks/clipping/costs.py``; the sections ``accuracy``,
``exposure`` and ``settings`` of ``benchmarks/clipping/learning.py``.
"""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from plpkg.clipping.checks.zoo import CHECKS
from plpkg.clipping.memory.costs import Costs
from plpkg.clipping.training.accounting import epsilon_of
from plpkg.memory import MIB
from plpkg.show import drawing, theme


def layer(batch: int, seq: int, read: int, written: int, ax=None):
    """A drawing: a linear layer's activations and output gradients, and what each execution makes of them and keeps.

    ``read`` and ``written`` are the layer's widths, d and p.
    """
    sizes = {
        "a": batch * seq * read,
        "g": batch * seq * written,
        "G": batch * written * read,
        "grams": 2 * batch * seq**2,
    }
    mib = {name: f"{4 * count / MIB:,.3g} MiB" for name, count in sizes.items()}
    ax = drawing.canvas(16, 9.2, ax)
    blue, orange, green, _, purple = drawing.colours(5)
    drawing.lane(ax, 0, 0, 4.5, 9.2, "one linear layer")
    drawing.box(ax, 0.4, 1.5, 3.7, 1.3, f"$a$: what it read\n$B × T × d$, {mib['a']}", blue, 9)
    drawing.box(ax, 0.4, 4.0, 3.7, 1.3, "weight\n$p × d$", "0.55", 9)
    drawing.box(ax, 0.4, 6.5, 3.7, 1.3, f"$g$: its output's gradient\n$B × T × p$, {mib['g']}", orange, 9)
    drawing.arrow(ax, (2.25, 2.85), (2.25, 3.95))
    drawing.arrow(ax, (2.25, 6.45), (2.25, 5.35), dashed=True)
    drawing.note(ax, 2.4, 3.3, "forward", ha="left", size=8)
    drawing.note(ax, 2.4, 5.9, "backward", ha="left", size=8)
    for x, text in ((7.1, "builds, for norms"), (11.2, "keeps"), (14.45, "adds up by")):
        drawing.note(ax, x, 0.45, text, fontweight="bold")
    gradients = f"gradients $G_i$\n$B×p×d$, {mib['G']}"
    grams = f"Gram matrices\n$2 B\\, T^2$, {mib['grams']}"
    second = ("second\nbackward pass", "0.45")
    nothing = ("nothing more", "0.6")
    rows: dict[str, tuple[tuple[str, Any], ...]] = {  # texts and colours
        "per_sample": ((gradients, green), ("all $G_i$\n" + mib["G"], green), (r"$\sum_i c_i G_i$", green)),
        "fast": ((gradients, green), nothing, second),
        "ghost": ((grams, purple), nothing, second),
        "book_keeping": (
            (grams, purple), (f"$a$ and $g$\n$g$: {mib['g']} more", orange), (r"$\sum_i c_i\, g_i^⊤ a_i$", orange)
        ),
    }  # fmt: skip
    for row, (name, (norms, kept, total)) in enumerate(rows.items()):
        y = 0.9 + 2.1 * row
        drawing.note(ax, 4.9, y + 0.18, name, ha="left", fontweight="bold")
        drawing.box(ax, 4.9, y + 0.5, 4.4, 1.3, *norms, 9.5)
        drawing.arrow(ax, (9.35, y + 1.15), (9.85, y + 1.15))
        drawing.box(ax, 9.9, y + 0.5, 2.6, 1.3, *kept, 9.5)
        drawing.arrow(ax, (12.55, y + 1.15), (13.05, y + 1.15))
        drawing.box(ax, 13.1, y + 0.5, 2.7, 1.3, *total, 9.5)
    return theme.describe(
        ax, f"A linear layer reads a ({mib['a']}) and gets g ({mib['g']}) on the way back. per_sample builds all "
        f"examples' gradients ({mib['G']}), keeps them, and adds them up. fast builds the same and keeps nothing more; "
        f"a second backward pass adds up. ghost builds Gram matrices ({mib['grams']}), keeps nothing more, and needs "
        f"that pass too. book_keeping builds these, keeps a and g, and adds up with one product.",
    )  # fmt: skip


def costs(costs: Costs, chosen: str | None = None, ax=None):
    """Peak memory and operations of every execution, as multiples of SGD's; the chosen one is outlined."""
    ax = theme.axes(ax)
    rows = costs.rows()
    edges = ["black" if row["execution"] == chosen else "white" for row in rows]
    bars = (("of SGD's peak", "peak memory", -0.2), ("of SGD's", "operations", 0.2))
    for (key, label, shift), fill in zip(bars, theme.fills(2), strict=True):
        heights = [row[key] for row in rows]
        places = [place + shift for place in range(len(rows))]
        ax.bar(places, heights, 0.38, label=label, linewidth=1.5, **{**fill, "edgecolor": edges})
        for place, height in zip(places, heights, strict=True):
            ax.text(place, height, f"{height:.3g}", ha="center", va="bottom", fontsize=8)
    if max(row["of SGD's peak"] for row in rows) > 12:
        ax.set_yscale("log")
    ax.margins(y=0.12)
    ax.set_xticks(range(len(rows)), [row["execution"].replace("_", "\n") for row in rows])
    ax.set(ylabel="times plain SGD", title=f"batch {costs.batch:,}, {costs.seq:,} tokens")
    ax.legend(loc="upper right")
    described = []
    for row in rows:
        peak = row["of SGD's peak"]
        operations = row["of SGD's"]
        described.append(f"{row['execution']} {peak:.2f} and {operations:.2f}")
    said = "; ".join(described)
    return theme.describe(ax, f"Peak memory and operations as multiples of plain SGD's: {said}.")


def measured(rows, ax=None):
    """CPU time and peak memory of every execution, as multiples of SGD's: a row each."""
    ax = theme.axes(ax)
    for key, label, style in zip(("ratio", "peak_ratio"), ("CPU time", "peak memory"), theme.styles(2), strict=True):
        ax.plot(rows[key], range(len(rows)), label=label, **{**style, "linestyle": "none", "markersize": 8})
    ax.hlines(range(len(rows)), rows["ratio"], rows["peak_ratio"], color="0.7", lw=1, zorder=0)
    ax.axvline(1, color="0.4", lw=1)
    ax.set_yticks(range(len(rows)), rows["what"])
    ax.invert_yaxis()
    ax.set(xlabel="← better: times SGD's", title=rows["case"].iloc[0])
    ax.legend()
    said = "; ".join(f"{row.what} {row.ratio:.2f} at {row.peak_ratio:.2f}" for row in rows.itertuples())
    return theme.describe(ax, f"CPU time at peak memory, as multiples of SGD's. {said}.")


def settings(rows, ax=None):
    """The gain of learning rate, batch and steps at one ε: bits per 1,000 bytes below the untuned model, best first.

    The first setting of ``rows`` is the one that the others change, and is marked.
    """
    ax = theme.axes(ax)
    untuned = rows.loc[rows["method"] == "none", "bits_per_byte"].item()
    rows = rows[rows["method"] != "none"]
    first = rows.index[0]
    rows = rows.sort_values("bits_per_byte")
    gains = 1000 * (untuned - rows["bits_per_byte"])
    labels = []
    for row in rows.itertuples():
        before = "baseline: " if row.Index == first else ""
        labels.append(f"{before}rate {row.lr:g}, batch {row.batch:.0f}, {row.steps:.0f} steps")
    baseline, other = (fill["color"] for fill in theme.fills(2))
    ax.barh(range(len(rows)), gains, color=[baseline if k == first else other for k in rows.index])
    for place, gain in enumerate(gains):
        ax.text(max(gain, 0), place, f" {gain:.1f}", va="center", fontsize=10)
    ax.axvline(0, color="0.3", lw=1)
    ax.set_yticks(range(len(rows)), labels)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    epsilon = rows["epsilon_target"].iloc[0]
    title = f"ε = {epsilon:g}: few large batches gain, large rates ruin"
    ax.set(xlabel="bits gained per 1,000 bytes (better →)", title=title)
    said = "; ".join(f"{label}: {gain:.1f}" for label, gain in zip(labels, gains, strict=True))
    return theme.describe(ax, f"Bits per 1,000 bytes that private learning gains at ε = {epsilon:g}. {said}.")


def epsilon_of_noise(
    examples: int,
    batch: int,
    marked: Mapping[float, float],
    epochs: tuple[int, ...] = (1, 3, 10),
    delta: float = 1e-5,
    ax=None,
):
    """The ε that a training spends, against the noise multiplier (computed by the prv accountant).

    ``marked``: by ε, the noise multipliers to point out.
    """
    ax = theme.axes(ax)
    sigmas = (0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
    steps = math.ceil(examples / batch)
    said = []
    for count, style in zip(epochs, theme.styles(len(epochs)), strict=True):
        curve = [epsilon_of(sigma, 1 / steps, count * steps, delta) for sigma in sigmas]
        ax.plot(sigmas, curve, label=f"{count} epoch{'s' if count > 1 else ''}", **style)
        said.append(f"{count} epochs: {', '.join(f'{e:.3g}' for e in curve)}")
    for epsilon, sigma in marked.items():
        ax.plot(sigma, epsilon, "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
        ax.annotate(
            f"σ = {sigma:.2f}", (sigma, epsilon), (12, 6), textcoords="offset points", fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    levels = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
    for axis, ticks in ((ax.xaxis, sigmas), (ax.yaxis, levels)):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_minor_formatter("")
    ax.set(xlabel="noise multiplier σ", ylabel=f"ε at δ = {delta:g}", title=f"{examples:,} examples, {batch} in a step")
    ax.legend()
    sizes = ", ".join(map(str, sigmas))
    return theme.describe(ax, f"ε at σ = {sizes}, for {examples:,} examples and {batch} in a step. {'; '.join(said)}.")


def by_epsilon(rows):
    """Means over the runs of what a diary left in a model: the untuned one first, then each method's cases by ε."""
    import pandas as pd

    methods = ["none", *sorted(set(rows["method"]) - {"none"})]
    rows = rows.assign(
        method=pd.Categorical(rows["method"], methods),
        case=pd.Categorical(rows["case"], ["untuned", "private", "clipped", "not clipped"]),
        epsilon=rows["epsilon"].round(1),
    )
    columns = {
        "mean_exposure": "mean exposure, bits",
        "max_exposure": "largest",
        "right": "facts told, of 40",
        "bits_per_byte": "public text, bits per byte",
    }
    means = rows.groupby(["method", "case", "epsilon"], observed=True)[list(columns)].mean()
    return means.rename(columns=columns)


def epsilon_curve(rows, ax=None):
    """Bits per byte of held-out text against the ε of private fine-tuning; a ring is a run, ∞ is without noise."""
    ax = theme.axes(ax)
    tuned = rows[(rows["method"] != "none") & (rows["case"] != "clipped")]
    before = rows[rows["method"] == "none"]["bits_per_byte"].mean()
    levels = sorted(set(tuned["epsilon"].round(1)))
    said = []
    styles = theme.styles(tuned["method"].nunique())
    for k, ((method, runs), style) in enumerate(zip(tuned.groupby("method"), styles, strict=True), start=1):
        curve = runs.groupby(runs["epsilon"].round(1))["bits_per_byte"].mean()
        ax.plot(range(len(curve)), curve, label=method, **style)
        places = [levels.index(epsilon) + 0.06 * k for epsilon in runs["epsilon"].round(1)]
        ax.plot(places, runs["bits_per_byte"], "o", color=style["color"], markersize=5, markerfacecolor="none")
        said.append(f"{method}: {', '.join(f'{value:.4g}' for value in curve)}")
    ax.axhline(before, lw=1, color="0.3", linestyle="--")
    ax.annotate(
        "not fine-tuned", (0, before), (4, -3), xycoords=("axes fraction", "data"), textcoords="offset points",
        fontsize=8, va="top", color="0.3",
    )  # fmt: skip
    names = [f"{epsilon:g}" if math.isfinite(epsilon) else "∞" for epsilon in levels]
    ax.set_xticks(range(len(levels)), names)
    ax.set(
        xlabel="ε spent (δ = 1e-5); ∞: no noise, same 20 steps",
        ylabel="← better: bits per byte",
        title="What it costs (rings: single runs)",
    )
    ax.legend(loc="lower left", fontsize=8)
    return theme.describe(
        ax, f"Bits per byte at ε = {', '.join(names)}; not fine-tuned {before:.4g}. {'; '.join(said)}."
    )


def exposure(rows, ax=None):
    """The exposure of the diary's secrets before learning, after it, and with privacy.

    A bar is the mean, a point a run's, a cross a run's largest.
    """
    ax = theme.axes(ax)
    means = by_epsilon(rows)["mean exposure, bits"]
    runs = rows.set_index(["method", "case", rows["epsilon"].round(1)])
    labels = []
    for method, case, epsilon in means.index:
        what = f"ε = {epsilon:.2g}" if case == "private" else case
        labels.append(what if method == "none" else f"{method}, {what}")
    ax.barh(range(len(means)), means, color=theme.fills(1)[0]["color"])
    for place, group in enumerate(means.index):
        each = runs.loc[[group], "mean_exposure"]
        largest = runs.loc[[group], "max_exposure"]
        places = [place + 0.3 * (k - (len(each) - 1) / 2) for k in range(len(each))]  # runs below each other
        ax.plot(each, places, "o", color="black", markersize=4)
        ax.plot(largest, places, "x", color="black", markersize=6)
        ax.text(max(each) + 0.25, place, f"{each.mean():.1f}", va="center", fontsize=8)
    broken = [label.replace(", all", ",\nall") for label in labels]
    ax.set_yticks(range(len(means)), broken, fontsize=9)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.axvline(1 / math.log(2), color="0.4", lw=1, linestyle="--")
    ax.set(
        xlabel="← better: mean exposure, bits (dashed: by guessing)",
        xlim=(0, 10),
        title="What it buys (dots: single runs; crosses: their largest)",
    )
    said = "; ".join(f"{label} {bits:.1f}" for label, bits in zip(labels, means, strict=True))
    return theme.describe(ax, f"Mean exposure of the diary's secrets in bits: {said}; by guessing 1.4.")


def caught(zoo, ax=None):
    """Every bug of a zoo with its lesson, which check catches it, and what this package does about it."""
    ax = theme.axes(ax, figsize=(8, 8))
    green = "C2"
    grey = "0.45"
    marks = {
        "caught": dict(marker="s", markersize=11, color=green),
        "missed": dict(marker="o", markersize=10, markerfacecolor="none", markeredgecolor=grey, markeredgewidth=1.4),
        "no breach of privacy to find": dict(marker="_", markersize=10, markeredgewidth=1.4, color=grey),
        "no example has a gradient of its own": dict(marker="$?$", markersize=10, color=grey),
    }
    caught, missed, nothing, unknown = marks
    said = []
    for row, finding in enumerate(zoo.findings):
        breach = not finding.sensitivity.ok or {*finding.caught_by} - {"parity"}
        verdicts = dict.fromkeys(CHECKS, missed if breach else nothing)
        verdicts["parity"] = unknown if finding.parity is None else missed
        verdicts |= dict.fromkeys(finding.caught_by, caught)
        for column, verdict in enumerate(verdicts.values()):
            ax.plot(column, row, linestyle="none", **marks[verdict])
        ours, _, _ = finding.ours.partition(":")
        ax.text(len(CHECKS), row, ours.replace(" ", "\n"), va="center", ha="center", fontsize=10, linespacing=0.95)
        lesson = textwrap.fill(finding.case.lesson, 56)
        ax.text(-0.5, row - 0.12, finding.case.name, va="bottom", ha="right", fontsize=11, fontweight="bold")
        ax.text(-0.5, row - 0.07, lesson, va="top", ha="right", fontsize=10, color="0.25", linespacing=0.95)
        checks = " and ".join(finding.caught_by) or "nothing"
        said.append(f"{finding.case.name} ({finding.case.lesson[:-1]}): {checks}; {ours}")
    ax.text(1.5, -1.45, "on Opacus, ghost mode", va="bottom", ha="center", fontsize=10, fontweight="bold")
    for column, head in enumerate((*CHECKS, "plpkg does")):
        ax.text(column, -0.75, head.replace(" ", "\n"), va="bottom", ha="center", fontsize=10)
    ax.set_axis_off()
    ax.set(xlim=(-7, len(CHECKS) + 0.6), ylim=(len(zoo.findings) - 0.4, -1.9))
    lines = [ax.plot([], [], linestyle="none", label=verdict, **mark)[0] for verdict, mark in marks.items()]
    ax.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 0), ncol=4, frameon=False, fontsize=9)
    return theme.describe(ax, f"What catches each bug, and what this package does. {'. '.join(said)}.")
