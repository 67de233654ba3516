"""Figures of notebook 03: how well the published curves are met, where time goes, what the round trip costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from plpkg.catalog import Link, ModelShape, device as find_device, link as find_link
from plpkg.show import theme
from plpkg.throughput import latency, published
from plpkg.throughput.estimate import TERMS, Estimate, decode
from plpkg.throughput.resources import phone_memory

TERM_LABELS = {
    "decoder": "decoder (cloud)",
    "lm_head": "LM head (phone)",
    "m": "M (phone)",
    "a_and_b": "A and B (cloud)",
    "endpoints": "end points",
    "uplink": "residuals up",
    "downlink": "residuals down",
    "round_trips": "round trips",
    "kv_cache": "KV cache (cloud)",
}


def roofline(measured, models: Sequence[str] = ("llama-2-7b", "llama-2-13b", "llama-30b")):
    """Time of a pass against its positions, one panel a machine: the bound, with measured or reported times.

    Parameters
    ----------
    measured
        The table ``throughput``: an LM head of 32-bit weights on one thread.
    models
        Models whose reported speed on the cloud's GPU, one token at a time, is marked, each with its bound.

    Returns
    -------
    array of matplotlib Axes
        The panels of the CPU thread and of the GPU.
    """
    panels = theme.axes(ncols=2, sharey=True, figsize=(8, 3.6))
    thread, cloud = panels
    here, *looks = theme.styles(1 + len(models))
    here["marker"] = ""
    positions = [2 ** (i / 4) for i in range(49)]

    machine = measured.iloc[0]
    reading_ms = measured["roofline_ms"].min()
    turn = _turn(1e9 * machine["gflops_per_s"], 1e9 * machine["bandwidth_gb_per_s"], 32)
    _bounds(thread, positions, {"bound": reading_ms}, turn, [here])
    look = dict(color=here["color"], linestyle="none", marker="o", ms=6)
    thread.plot(measured["positions"], measured["measured_ms"], label="measured", **look)

    gpu = find_device("a100-80gb-pcie")
    turn = _turn(gpu.flops_per_s, gpu.memory_bandwidth_bytes_per_s, 16)
    bound_ms = {model: 1e3 / decode(model, gpu="roofline").gpu_tokens_per_s for model in models}
    reported_ms = {model: 1e3 / decode(model).gpu_tokens_per_s for model in models}
    _bounds(cloud, positions, bound_ms, turn, looks)
    for shift, ms, style in zip((0.7, 1, 1.4), reported_ms.values(), looks, strict=False):  # side by side
        cloud.plot([shift], [ms], color=style["color"], marker=style["marker"], ms=7, label="_")

    rates = f"{machine['bandwidth_gb_per_s']:.0f} GB/s, {machine['gflops_per_s']:.0f} GFLOP/s"
    thread.set_title(f"LM head on a CPU thread\n({rates})")
    cloud.set_title("a whole model on an A100\n(markers: reported, one position)")
    for ax in panels:
        ax.set(xscale="log", yscale="log", xlabel="positions", ylim=(2, 5000))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.legend(loc="upper left")
    thread.set_ylabel("ms a pass")
    said = "; ".join(f"{model} {reported_ms[model] / bound_ms[model]:.1f}" for model in models)
    theme.describe(
        thread,
        "Two panels, time of a pass against positions, both logarithmic: a flat bound of reading that turns into a "
        f"rising one of computing. The measured LM head takes {measured['ratio'].iloc[0]:.1f} times the bound at one "
        f"position and {measured['ratio'].iloc[-1]:.1f} times at {measured['positions'].iloc[-1]}. "
        f"The A100's reported speeds are above it by {said}.",
    )
    return panels


def _bounds(ax, positions: Sequence[float], reading_ms: Mapping[str, float], turn: float, styles) -> None:
    """Draw a line for each name: flat at the milliseconds of reading, and rising from ``turn`` positions on."""
    for (name, ms), style in zip(reading_ms.items(), styles, strict=True):
        ax.plot(positions, [ms * max(1, x / turn) for x in positions], label=name, markevery=[], **style)
        ax.axvline(turn, color="0.6", lw=1, linestyle=":")
    ax.text(turn, 0.02, f" {turn:.3g}", fontsize=9, color="0.3", transform=ax.get_xaxis_transform())


def _turn(flops_per_s: float, bytes_per_s: float, bits: int) -> float:
    """Positions at which computing takes as long as reading: two operations for each weight and position."""
    positions_per_s = flops_per_s / 2
    weights_per_s = 8 * bytes_per_s / bits
    return positions_per_s / weights_per_s


def residuals(ax=None):
    """Difference of each accounting from the publication's digitised points, in per cent, against the rank.

    Filled markers are the ``figure`` accounting, hollow ones ``literal``, in the colour of their curve.
    """
    ax = theme.axes(ax)
    curves = {f"{model}, decode": points for model, points in published.curves("decode").groupby("model", sort=False)}
    prefill = published.curves("prefill").groupby(["model", "tokens"], sort=False)
    curves |= {f"{model}, prefill of {tokens}": points for (model, tokens), points in prefill}
    styles = theme.styles(len(curves))
    said = []
    ax.axhline(0, color="0.4", lw=1)
    for place, (name, points) in enumerate(curves.items()):
        look = dict(color=styles[place]["color"], marker=styles[place]["marker"], linestyle="none", ms=7)
        shifted = points["rank"] * 1.06 ** (place - 2)  # markers of one rank side by side
        figure = 100 * (points["computed"] / points["tokens_per_s"] - 1)
        literal = 100 * (points["literal"] / points["tokens_per_s"] - 1)
        ax.plot(shifted, figure, label=name, **look)
        ax.plot(shifted, literal, mfc="none", **look)
        said.append(f"{name}, figure, {figure.min():.1f} to {figure.max():.1f} %")
        said.append(f"{name}, literal, {literal.min():.1f} to {literal.max():.1f} %")
    ranks = sorted({rank for points in curves.values() for rank in points["rank"]})
    ax.set(xscale="log", xlabel="rank", ylabel="difference from reported (%)")
    ax.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    ax.minorticks_off()
    ax.set_title("filled: figure; hollow: literal")
    ax.legend(loc="lower right")
    return theme.describe(ax, f"Computed speeds over the publication's points, by rank: {'; '.join(said)}.")


def breakdown(estimates: Mapping[str, Estimate], others: Mapping[str, float] | None = None, ax=None):
    """One stacked bar for each named estimate: the milliseconds of a token, term by term.

    ``others`` adds plain bars for speeds without a breakdown, in tokens per second by name.
    """
    ax = theme.axes(ax)
    names = list(estimates)
    others = others or {}
    speeds = [estimate.tokens_per_s for estimate in estimates.values()]
    longest = max(1e3 / speed for speed in [*speeds, *others.values()])
    totals = [0.0] * len(names)  # of the terms drawn so far: where the next one begins
    for term, fill in zip(TERMS, theme.fills(len(TERMS)), strict=True):
        ms = [1e3 * estimate.breakdown()[term] for estimate in estimates.values()]
        if any(ms):
            ax.barh(names, ms, left=totals, label=_named(TERM_LABELS[term], ms, longest), **fill)
        totals = [total + more for total, more in zip(totals, ms, strict=True)]
    for row, (total, estimate) in enumerate(zip(totals, estimates.values(), strict=True)):
        ax.text(total, row, f" {estimate.tokens_per_s:.1f} tokens/s", va="center")
    ax.barh(list(others), [1e3 / speed for speed in others.values()], color="0.6")
    for row, speed in enumerate(others.values(), start=len(names)):
        ax.text(1e3 / speed, row, f" {speed:.1f} tokens/s", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="milliseconds per token", xlim=(0, 1.25 * longest))
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    ax.figure.set_size_inches(9.6, max(2.8, 1.4 + 0.55 * (len(names) + len(others))))
    said = []
    for name, estimate in estimates.items():
        seconds = estimate.breakdown()
        largest = max(seconds, key=seconds.__getitem__)
        said.append(f"{name} {1e3 / estimate.tokens_per_s:.1f} ms, largest part {TERM_LABELS[largest]}")
    return theme.describe(ax, f"Stacked bars of the milliseconds of a token: {'; '.join(said)}.")


def _named(label: str, lengths: Sequence[float], longest: float) -> str:
    """A bar's label in the legend; it says so where the bar is too thin to see."""
    return label if max(lengths) > 0.005 * longest else f"{label}, too thin to see"


def against_rtt(
    models: Sequence[str | ModelShape] = ("llama-2-7b", "llama-2-13b", "llama-30b"),
    phone_only: Mapping[str, float] | None = None,
    marks: Sequence[str | Link] = ("lan", "wifi", "5g", "5g-us-2024", "4g"),
    ax=None,
    *,
    schemes: Mapping[str, Mapping[str, Any]] | None = None,
    more_ms: Sequence[tuple[float, float]] = (),
    **settings: Any,
):
    """Tokens per second against the round-trip time, with horizontal lines for the phone alone.

    Parameters
    ----------
    models
        One curve each.
    phone_only
        Tokens per second of the phone by itself, by label.
    marks
        Links whose round-trip times are marked; their rates play no part here.
    schemes
        Other settings of :func:`~plpkg.throughput.decode` for the first model, one curve each.
    more_ms
        Pairs of additional milliseconds a round trip: for each, a band between the two speeds of the first model.
    **settings
        Passed to :func:`~plpkg.throughput.decode`.
    """
    ax = theme.axes(ax)
    rtts = [0.1 * 10 ** (i / 20) for i in range(61)]
    table = latency.against_rtt(models, rtts, **settings)
    for name, scheme in (schemes or {}).items():
        table.loc[name] = latency.against_rtt(models[:1], rtts, **settings, **scheme).iloc[0]
    for (name, speeds), style in zip(table.iterrows(), theme.styles(len(table)), strict=True):
        ax.plot(rtts, speeds, label=name, **style | {"marker": ""}, lw=2)
    for (least, most), hatch in zip(more_ms, ("", "////"), strict=False):
        upper = latency.against_rtt(models[:1], [rtt + least for rtt in rtts], **settings).iloc[0]
        lower = latency.against_rtt(models[:1], [rtt + most for rtt in rtts], **settings).iloc[0]
        label = f"{table.index[0]}, {least:g} to {most:g} ms more a trip"
        ax.fill_between(rtts, upper, lower, color=ax.lines[0].get_color(), alpha=0.25, hatch=hatch, lw=0, label=label)
    for (label, speed), dash in zip((phone_only or {}).items(), theme.DASHES[1:], strict=False):
        ax.axhline(speed, color="0.35", linestyle=dash, lw=1.2, label=f"{label}: {speed:.1f} tokens/s")
    top = 1.15 * ax.get_ylim()[1]
    for mark in marks:
        link = find_link(mark)
        side = "left" if mark == marks[-1] else "right"  # the last two may lie close
        ax.axvline(1e3 * link.rtt_s, color="0.75", lw=1, zorder=0)
        ax.text(1e3 * link.rtt_s, top, f" {link.name}", rotation=90, va="top", ha=side, fontsize=9, color="0.3")
    ax.set(xscale="log", xlabel="round-trip time (ms)", ylabel="tokens per second", ylim=(0, top), xlim=(0.1, 100))
    ax.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    ax.figure.set_size_inches(7.2, 4.6)
    first = latency.against_rtt(models[:1], (0, 1, 33), **settings).iloc[0]
    return theme.describe(
        ax,
        f"Tokens per second against round-trip time, logarithmic from 0.1 to 100 ms, for {', '.join(table.index)}; "
        f"{first.name} falls from {first[0]:.1f} at 0 ms to {first[1]:.1f} at 1 ms and {first[33]:.1f} at 33 ms.",
    )


def phone_memory_bars(models: Sequence[str | ModelShape], rank: int = 128, limit_mb: float | None = None, ax=None):
    """Megabytes on the phone: LM head, M, and the word embedding that the publication leaves out."""
    ax = theme.axes(ax)
    shapes = latency.distinct(models)
    parts = [phone_memory(shape, rank, embedding=True) for shape in shapes]
    names = [shape.name for shape in shapes]
    longest = max(part.total_mb for part in parts)
    totals = [0.0] * len(shapes)  # of the parts drawn so far: where the next one begins
    labels = {
        "lm_head_bytes": "LM head",
        "m_bytes": "M",
        "embedding_bytes": "word embedding (not in the published figure)",
    }
    for (field, label), fill in zip(labels.items(), theme.fills(3), strict=True):
        mb = [getattr(part, field) / 1e6 for part in parts]
        ax.barh(names, mb, left=totals, label=_named(label, mb, longest), **fill)
        totals = [total + more for total, more in zip(totals, mb, strict=True)]
    for row, total in enumerate(totals):
        ax.text(total, row, f" {total:.0f}", va="center")
    if limit_mb is not None:
        ax.axvline(limit_mb, color="0.3", linestyle="--", lw=1.2)
        ax.text(limit_mb, -0.45, f" {limit_mb:g} MB", ha="left", va="bottom", fontsize=9, color="0.3")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel=f"MB at 16 bit, rank {rank}", xlim=(0, 1.15 * max(totals)))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3)
    said = "; ".join(f"{name} {total:.0f}" for name, total in zip(names, totals, strict=True))
    return theme.describe(ax, f"Stacked bars of the megabytes of weights on the phone: {said}.")
