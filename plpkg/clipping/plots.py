"""Figures of notebook 05.

What was measured comes as ``rows``: a case, or the section ``grid``, of ``benchmarks/clipping/costs.py``; the sections
``accuracy`` and ``exposure`` of ``benchmarks/clipping/learning.py``.
"""

import math

from plpkg import theme
from plpkg.clipping.memory.costs import Costs
from plpkg.clipping.memory.dataflow import StepMemory
from plpkg.clipping.training.accounting import epsilon_of
from plpkg.memory import MIB
from plpkg.validation import one_of

SMALL = 0.002
"""Parts below this share of a phase are drawn as one."""


def parts(memory: StepMemory, phase: str, ax=None):
    """The tensors that a phase adds up to, largest first, as one bar each."""
    ax = theme.axes(ax)
    total = memory.increase_bytes(phase) / MIB
    sizes = sorted(((size / MIB, name) for name, size in memory.parts_bytes[phase].items() if size), reverse=True)
    named = [(name, size) for size, name in sizes if abs(size) >= SMALL * total]
    if rest := sizes[len(named) :]:
        named.append((f"{len(rest)} small ones", sum(size for size, _ in rest)))
    fill = theme.fills(1)[0]
    ax.barh([name for name, _ in named], [size for _, size in named], color=fill["color"])
    for place, (_, size) in enumerate(named):
        ax.text(max(size, 0), place, f" {size:,.4g}", va="center", fontsize=9)
    ax.invert_yaxis()
    ax.set(xlabel="MiB", title=f"{memory.execution}, {phase}: {total:,.2f} MiB", xlim=(0, 1.2 * named[0][1]))
    said = "; ".join(f"{name} {size:,.4g}" for name, size in named)
    return theme.describe(ax, f"What the {phase} of {memory.execution} holds at its peak, in MiB: {said}.")


def costs(costs: Costs, chosen: str | None = None, ax=None):
    """Peak memory and operations of every execution, as multiples of SGD's; the chosen one is outlined."""
    ax = theme.axes(ax)
    rows = costs.rows()
    fills = theme.fills(2)
    for shift, (key, label) in enumerate((("of SGD's peak", "peak memory"), ("of SGD's", "operations"))):
        heights = [row[key] for row in rows]
        places = [place + 0.4 * shift - 0.2 for place in range(len(rows))]
        edges = ["black" if row["execution"] == chosen else "white" for row in rows]
        style = {**fills[shift], "edgecolor": edges}
        ax.bar(places, heights, 0.38, label=label, linewidth=1.5, **style)
        for place, height in zip(places, heights, strict=True):
            ax.text(place, height, f"{height:.3g}", ha="center", va="bottom", fontsize=8)
    if max(row["of SGD's peak"] for row in rows) > 12:
        ax.set_yscale("log")
    ax.margins(y=0.12)
    ax.set_xticks(range(len(rows)), [row["execution"].replace("_", "\n") for row in rows])
    ax.set(ylabel="times plain SGD", title=f"batch {costs.batch:,}, {costs.seq:,} tokens")
    ax.legend(loc="upper right")
    peak, flops = "of SGD's peak", "of SGD's"
    said = "; ".join(f"{row['execution']} {row[peak]:.2f} and {row[flops]:.2f}" for row in rows)
    return theme.describe(ax, f"Peak memory and operations as multiples of plain SGD's: {said}.")


def gram_or_gradient(rows: int, cols: int, ax=None):
    """Operations and bytes of a norm by Gram matrices and by the gradient, against the number of positions."""
    ax = theme.axes(ax)
    lengths = [2**k for k in range(13)]
    lines = {
        "Gram matrices, MFLOP": [2 * t * t * (rows + cols) / 1e6 for t in lengths],
        "gradient, MFLOP": [2 * t * rows * cols / 1e6 for t in lengths],
        "Gram matrices, MB": [8 * t * t / 1e6 for t in lengths],
        "gradient, MB": [4 * rows * cols / 1e6 for _ in lengths],
    }
    for (label, values), style in zip(lines.items(), theme.styles(len(lines)), strict=True):
        ax.plot(lengths, values, label=label, markersize=4, **style)
    flop, byte = rows * cols / (rows + cols), math.sqrt(rows * cols / 2)
    for place, what, side in ((flop, "operations equal", "right"), (byte, "bytes equal", "left")):
        ax.axvline(place, color="0.4", lw=1, linestyle=":")
        ax.annotate(
            what, (place, 0.02), (4 if side == "left" else -4, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", rotation=90, ha=side, va="bottom", fontsize=8,
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="positions T", ylabel="for each example", title=f"One layer, {cols:,} → {rows:,}")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return theme.describe(
        ax, f"A norm's operations and bytes against T for {cols} → {rows}. Gram matrices take more operations from "
        f"T = {flop:.0f} on, and more bytes from T = {math.ceil(byte)} on.",
    )  # fmt: skip


def measured(rows, ax=None):
    """CPU time against peak memory of every execution, as multiples of SGD's."""
    ax = theme.axes(ax)
    for row, style in zip(rows.itertuples(), theme.styles(len(rows)), strict=True):
        style = {"markersize": 9, **style, "linestyle": "none"}
        if row.what.startswith("plan"):  # around what it may have the same costs as
            style |= {"markerfacecolor": "none", "markersize": 15, "markeredgewidth": 1.5}
        ax.plot(row.peak_ratio, row.ratio, label=row.what, **style)
    ax.axhline(1, color="0.6", lw=0.8)
    ax.axvline(1, color="0.6", lw=0.8)
    ax.set(xlabel="peak memory, times SGD's", ylabel="CPU time, times SGD's", title=rows["case"].iloc[0])
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    said = "; ".join(f"{row.what} {row.ratio:.2f} at {row.peak_ratio:.2f}" for row in rows.itertuples())
    return theme.describe(ax, f"CPU time at peak memory, as multiples of SGD's. {said}.")


def epsilon_of_noise(examples: int, batch: int, epochs: tuple[int, ...] = (1, 3, 10), delta: float = 1e-5, ax=None):
    """The ε that a training spends, against the noise multiplier (computed by the prv accountant)."""
    ax = theme.axes(ax)
    sigmas = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
    steps = math.ceil(examples / batch)
    said = []
    for count, style in zip(epochs, theme.styles(len(epochs)), strict=True):
        curve = [epsilon_of(sigma, 1 / steps, count * steps, delta) for sigma in sigmas]
        ax.plot(sigmas, curve, label=f"{count} epoch{'s' if count > 1 else ''}", **style)
        said.append(f"{count} epochs: {', '.join(f'{e:.3g}' for e in curve)}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas], minor=False)
    ax.xaxis.set_minor_formatter("")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="noise multiplier σ", ylabel=f"ε at δ = {delta:g}", title=f"{examples:,} examples, {batch} in a step")
    ax.legend()
    sizes = ", ".join(map(str, sigmas))
    return theme.describe(ax, f"ε at σ = {sizes}, for {examples:,} examples and {batch} in a step. {'; '.join(said)}.")


def by_epsilon(rows, columns: list[str]):
    """Means over the seeds of what was learnt: the untuned model first, then each method's cases by ε.

    The ``columns`` are averaged; ``runs``, how many seeds there are, is added.
    """
    import pandas as pd

    methods = ["none", *sorted(set(rows["method"]) - {"none"})]
    rows = rows.assign(
        method=pd.Categorical(rows["method"], methods),
        case=pd.Categorical(rows["case"], ["untuned", "private", "clipped", "not clipped"]),
        epsilon=rows["epsilon"].round(1),
    )
    groups = rows.groupby(["method", "case", "epsilon"], observed=True)[columns]
    return groups.mean().assign(runs=groups.size())


def epsilon_curve(rows, what: str = "accuracy", ax=None):
    """What held-out text says of private fine-tuning, against ε; a small point is a run.

    ``what`` is ``accuracy``, of the next token, in percent, or ``bits_per_byte``.
    """
    labels = {"accuracy": "next tokens right, %", "bits_per_byte": "bits per byte"}
    label = labels[one_of("what", what, tuple(labels))]
    ax = theme.axes(ax)
    tuned = rows[rows["method"] != "none"]
    levels = [("not fine-tuned", rows[rows["method"] == "none"][what].mean(), {"color": "0.3", "linestyle": "--"})]
    said = []
    for (method, runs), style in zip(tuned.groupby("method"), theme.styles(tuned["method"].nunique()), strict=True):
        private = runs[runs["case"] == "private"]
        curve = private.groupby(private["epsilon"].round(1))[what].mean()
        ax.plot(curve.index, curve, label=method, **style)
        ax.plot(private["epsilon"], private[what], ".", color=style["color"], markersize=4)
        free = runs[runs["case"] == "not clipped"][what].mean()
        levels.append(("without privacy", free, {"color": style["color"], "linestyle": style["linestyle"]}))
        points = ", ".join(f"{value:.4g} at ε {epsilon:g}" for epsilon, value in curve.items())
        said.append(f"{method}: {points}, without privacy {free:.4g}")
    for text, level, style in levels:
        ax.axhline(level, lw=1, alpha=0.7, **style)
        ax.annotate(
            text, (0, level), (4, 2), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8,
            color=style["color"],
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="ε spent (δ = 1e-5)", ylabel=label)
    ax.legend(loc="best", fontsize=8)
    return theme.describe(ax, f"{label} against ε; not fine-tuned {levels[0][1]:.4g}. {'; '.join(said)}.")


def noise_by_scale(rows, what: str = "noise", ax=None):
    """What noise does to adapters whose factors are scaled against each other; ``what``: ``noise``, or
    ``bits_per_byte``.
    """
    labels = {"noise": "noise in ΔW, as a share of ΔW", "bits_per_byte": "bits per byte with the noise"}
    label = labels[one_of("what", what, tuple(labels))]
    ax, said = theme.axes(ax), []
    for (method, some), style in zip(rows.groupby("method"), theme.styles(rows["method"].nunique()), strict=True):
        ax.plot(some["scale"], some[what], label=method, **style)
        said.append(f"{method}: {', '.join(f'{value:.3g}' for value in some[what])}")
    scales = sorted(set(rows["scale"]))
    ax.set_xscale("log", base=2)
    ax.set_xticks(scales, [f"{scale:g}" for scale in scales])
    if what == "noise":
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="s: A is multiplied with it, and B divided", ylabel=label)
    ax.legend(fontsize=8)
    return theme.describe(ax, f"{label} at s = {', '.join(f'{s:g}' for s in scales)}. {'; '.join(said)}.")


def exposure(rows, ax=None):
    """The mean exposure of the diary's secrets before learning, after it, and with privacy."""
    ax = theme.axes(ax)
    means = by_epsilon(rows, ["mean_exposure", "rank_1"])
    labels = [
        ("" if method == "none" else f"{method.partition(',')[0]}, ")
        + (f"ε = {epsilon:.2g}" if case == "private" else case)
        for method, case, epsilon in means.index
    ]
    ax.barh(range(len(means)), means["mean_exposure"], color=theme.fills(1)[0]["color"])
    for place, (bits, first) in enumerate(zip(means["mean_exposure"], means["rank_1"], strict=True)):
        ax.text(bits, place, f" {bits:.1f}, {first:.2g} first", va="center", fontsize=8)
    ax.set_yticks(range(len(means)), labels)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.axvline(1 / math.log(2), color="0.4", lw=1, linestyle="--")
    ax.set(xlabel="mean exposure, bits (dashed: by guessing)", xlim=(0, 11))
    said = "; ".join(f"{label} {bits:.1f}" for label, bits in zip(labels, means["mean_exposure"], strict=True))
    return theme.describe(ax, f"Mean exposure of the diary's secrets in bits: {said}; by guessing 1.4.")


def caught(zoo, ax=None):
    """Which check catches which bug."""
    ax = theme.axes(ax)
    checks = ("parity", "sensitivity", "audit", "Gaussian audit")
    bugs = [finding.case.name for finding in zoo.findings]
    for row, finding in enumerate(zoo.findings):
        verdicts = dict.fromkeys(checks, "no breach" if finding.sensitivity.ok else "missed")
        verdicts["parity"] = "no reference" if finding.parity is None else "missed"
        verdicts |= dict.fromkeys(finding.caught_by, "caught")
        for column, verdict in enumerate(verdicts.values()):
            caught = verdict == "caught"
            ax.plot(column, row, marker="s" if caught else "o", markersize=13, color="C2" if caught else "0.85")
            ax.text(column + 0.14, row, verdict, va="center", color="k" if caught else "0.5")
    ax.grid(visible=False)
    ax.set_xticks(range(len(checks)), checks)
    ax.set_yticks(range(len(bugs)), bugs)
    ax.set(xlim=(-0.3, len(checks) - 0.3), ylim=(len(bugs) - 0.5, -0.5))
    said = "; ".join(f"{f.case.name}: {' and '.join(f.caught_by) or 'nothing'}" for f in zoo.findings)
    return theme.describe(ax, f"What catches each bug. {said}.")
