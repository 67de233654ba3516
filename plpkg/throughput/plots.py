"""Figures of notebook 03: how well the published curves are met, where time goes, what the round trip costs."""

from collections.abc import Mapping, Sequence

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
    """Time of a pass against its positions, one panel a machine: the bound, and what is known of the machine.

    Parameters
    ----------
    measured
        The table ``throughput``: an LM head of 32-bit weights on one thread.
    models
        Whose reported speed on the cloud's GPU, one token at a time, is marked, each with its bound.

    Returns
    -------
    array of matplotlib Axes
        The thread, the GPU.
    """
    panels = thread, cloud = theme.axes(ncols=2, sharey=True, figsize=(8, 3.6))
    (here, *looks), xs = theme.styles(1 + len(models)), [2 ** (i / 4) for i in range(49)]
    here["marker"] = ""
    machine, gpu = measured.iloc[0], find_device("a100-80gb-pcie")
    reading = measured["roofline_ms"].min()
    bounds = {"bound": (reading, _turn(1e9 * machine["gflops_per_s"], 1e9 * machine["bandwidth_gb_per_s"], 32))}
    _bounds(thread, xs, bounds, [here])
    look = dict(color=here["color"], linestyle="none", marker="o", ms=6)
    thread.plot(measured["positions"], measured["measured_ms"], label="measured", **look)
    turn = _turn(gpu.flops_per_s, gpu.memory_bandwidth_bytes_per_s, 16)
    bound_ms = {m: 1e3 / decode(m, gpu="roofline").gpu_tokens_per_s for m in models}
    reported_ms = {m: 1e3 / decode(m).gpu_tokens_per_s for m in models}
    _bounds(cloud, xs, {m: (ms, turn) for m, ms in bound_ms.items()}, looks)
    for shift, ms, style in zip((0.7, 1, 1.4), reported_ms.values(), looks, strict=False):  # side by side
        cloud.plot([shift], [ms], color=style["color"], marker=style["marker"], ms=7, label="_")
    rates = f"{machine['bandwidth_gb_per_s']:.0f} GB/s, {machine['gflops_per_s']:.0f} GFLOP/s"
    names = "LM head on a CPU thread", "a whole model on an A100"
    below = rates, "markers: reported, one position"
    for ax, name, more in zip(panels, names, below, strict=True):
        ax.set(xscale="log", yscale="log", xlabel="positions", title=f"{name}\n({more})", ylim=(2, 5000))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:g}")
        ax.legend(loc="upper left")
    thread.set_ylabel("ms a pass")
    said = "; ".join(f"{m} {reported_ms[m] / bound_ms[m]:.1f}" for m in models)
    theme.describe(
        thread,
        "Two panels, time of a pass against positions, both logarithmic: a flat bound of reading that turns into a "
        f"rising one of computing. The measured LM head takes {measured['ratio'].iloc[0]:.1f} times the bound at one "
        f"position and {measured['ratio'].iloc[-1]:.1f} times at {measured['positions'].iloc[-1]}. "
        f"The A100's reported speeds are above it by {said}.",
    )
    return panels


def _bounds(ax, positions, bounds: Mapping[str, tuple[float, float]], styles) -> None:
    """Lines that are flat at the milliseconds of reading, and rise from where computing takes as long."""
    for (name, (ms, turn)), style in zip(bounds.items(), styles, strict=True):
        ax.plot(positions, [ms * max(1, x / turn) for x in positions], label=name, markevery=[], **style)
        ax.axvline(turn, color="0.6", lw=1, linestyle=":")
    ax.text(turn, 0.02, f" {turn:.3g}", fontsize=9, color="0.3", transform=ax.get_xaxis_transform())


def _turn(flops_per_s: float, bytes_per_s: float, bits: int) -> float:
    """Positions at which a machine computes for as long as it reads: two operations a weight and position."""
    return flops_per_s / 2 / (8 * bytes_per_s / bits)


def residuals(ax=None):
    """How far each accounting is from the publication's digitised points, in per cent, against the rank.

    Filled markers are the ``figure`` accounting, hollow ones ``literal``, in the colour of their curve.
    """
    ax = theme.axes(ax)
    curves = {f"{model}, decode": points for model, points in published.curves("decode").groupby("model", sort=False)}
    prefill = published.curves("prefill").groupby(["model", "tokens"], sort=False)
    curves |= {f"{model}, prefill of {tokens}": points for (model, tokens), points in prefill}
    said = []
    ax.axhline(0, color="0.4", lw=1)
    for (name, points), style in zip(curves.items(), theme.styles(len(curves)), strict=True):
        look = dict(color=style["color"], marker=style["marker"], linestyle="none", ms=7)
        shift = 1.06 ** (list(curves).index(name) - 2)  # markers of one rank side by side
        for column, label, fill in (("computed", name, {}), ("literal", None, dict(mfc="none"))):
            percent = 100 * (points[column] / points["tokens_per_s"] - 1)
            ax.plot(points["rank"] * shift, percent, label=label, **look, **fill)
            said.append(f"{name}, {'figure' if label else 'literal'}, {percent.min():.1f} to {percent.max():.1f} %")
    ranks = sorted({rank for points in curves.values() for rank in points["rank"]})
    ax.set(xscale="log", xlabel="rank", ylabel="difference from reported (%)")
    ax.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    ax.minorticks_off()
    ax.set_title("filled: figure; hollow: literal")
    ax.legend(loc="lower right")
    return theme.describe(ax, f"Computed speeds over the publication's points, by rank: {'; '.join(said)}.")


def breakdown(estimates: Mapping[str, Estimate], others: Mapping[str, float] | None = None, ax=None):
    """Where a token's time goes: one stacked bar in milliseconds for each named estimate.

    ``others`` adds plain bars for speeds without a breakdown, in tokens per second by name.
    """
    ax = theme.axes(ax)
    names = list(estimates)
    others = others or {}
    longest = max(1e3 / speed for speed in [*(e.tokens_per_s for e in estimates.values()), *others.values()])
    left = [0.0] * len(names)
    for term, fill in zip(TERMS, theme.fills(len(TERMS)), strict=True):
        ms = [1e3 * estimate.breakdown()[term] for estimate in estimates.values()]
        if any(ms):
            ax.barh(names, ms, left=left, label=_named(TERM_LABELS[term], ms, longest), **fill)
        left = [a + b for a, b in zip(left, ms, strict=True)]
    for row, (total, estimate) in enumerate(zip(left, estimates.values(), strict=True)):
        ax.text(total, row, f" {estimate.tokens_per_s:.1f} tokens/s", va="center")
    ax.barh(list(others), [1e3 / speed for speed in others.values()], color="0.6")
    for row, speed in enumerate(others.values(), start=len(names)):
        ax.text(1e3 / speed, row, f" {speed:.1f} tokens/s", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="milliseconds per token", xlim=(0, 1.25 * longest))
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    ax.figure.set_size_inches(9.6, max(2.8, 1.4 + 0.55 * (len(names) + len(others))))
    said = "; ".join(
        f"{name} {1e3 / e.tokens_per_s:.1f} ms, largest part {TERM_LABELS[max(e.breakdown(), key=e.breakdown().get)]}"
        for name, e in estimates.items()
    )
    return theme.describe(ax, f"Stacked bars of the milliseconds of a token: {said}.")


def _named(label: str, lengths: Sequence[float], longest: float) -> str:
    """A bar's label in the legend; it says so where the bar is too thin to see."""
    return label if max(lengths) > 0.005 * longest else f"{label}, too thin to see"


def against_rtt(
    models: Sequence[str | ModelShape] = ("llama-2-7b", "llama-2-13b", "llama-30b"),
    phone_only: Mapping[str, float] | None = None,
    marks: Sequence[str | Link] = ("lan", "wifi", "5g", "5g-us-2024", "4g"),
    ax=None,
    *,
    schemes: Mapping[str, Mapping] | None = None,
    more_ms: Sequence[tuple[float, float]] = (),
    **settings,
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
        A band each for the first model with so many milliseconds more for each trip, from the first to the second.
    **settings
        Passed to :func:`~plpkg.throughput.decode`.
    """
    ax = theme.axes(ax)
    rtts = [0.1 * 10 ** (i / 20) for i in range(61)]
    table = latency.against_rtt(models, rtts, **settings)
    for name, scheme in (schemes or {}).items():
        table.loc[name] = latency.against_rtt(models[:1], rtts, **settings | scheme).iloc[0]
    for (name, speeds), style in zip(table.iterrows(), theme.styles(len(table)), strict=True):
        ax.plot(rtts, speeds, label=name, **{**style, "marker": ""}, lw=2)
    for band, hatch in zip(more_ms, ("", "////"), strict=False):
        edges = [latency.against_rtt(models[:1], [rtt + ms for rtt in rtts], **settings).iloc[0] for ms in band]
        label = f"{table.index[0]}, {band[0]:g} to {band[1]:g} ms more a trip"
        ax.fill_between(rtts, *edges, color=ax.lines[0].get_color(), alpha=0.25, hatch=hatch, lw=0, label=label)
    for (label, speed), dash in zip((phone_only or {}).items(), theme.DASHES[1:], strict=False):
        ax.axhline(speed, color="0.35", linestyle=dash, lw=1.2, label=f"{label}: {speed:.1f} tokens/s")
    top = 1.15 * ax.get_ylim()[1]
    for mark in marks:
        link, side = find_link(mark), "left" if mark == marks[-1] else "right"  # the last two may lie close
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
    left, longest = [0.0] * len(shapes), max(part.total_mb for part in parts)
    labels = {
        "lm_head_bytes": "LM head",
        "m_bytes": "M",
        "embedding_bytes": "word embedding (not in the published figure)",
    }
    for (field, label), fill in zip(labels.items(), theme.fills(3), strict=True):
        mb = [getattr(part, field) / 1e6 for part in parts]
        ax.barh(names, mb, left=left, label=_named(label, mb, longest), **fill)
        left = [a + b for a, b in zip(left, mb, strict=True)]
    for row, total in enumerate(left):
        ax.text(total, row, f" {total:.0f}", va="center")
    if limit_mb is not None:
        ax.axvline(limit_mb, color="0.3", linestyle="--", lw=1.2)
        ax.text(limit_mb, -0.45, f" {limit_mb:g} MB", ha="left", va="bottom", fontsize=9, color="0.3")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel=f"MB at 16 bit, rank {rank}", xlim=(0, 1.15 * max(left)))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3)
    said = "; ".join(f"{name} {total:.0f}" for name, total in zip(names, left, strict=True))
    return theme.describe(ax, f"Stacked bars of the megabytes of weights on the phone: {said}.")
