"""Figures of notebook 03: how well the published curves are met, where time goes, what the round trip costs."""

from collections.abc import Mapping, Sequence

from plpkg import theme
from plpkg.catalog import Link, ModelShape, device as find_device, link as find_link
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


def roofline(measured, models: Sequence[str] = ("llama-2-7b", "llama-2-13b", "llama-30b"), ax=None):
    """The bound of reading and computing, with what was measured of an LM head and reported of a GPU and a phone.

    Both axes are relative, so that one line holds for every machine: positions, over those at which computing takes as
    long as reading; time, over that of reading the weights once.

    Parameters
    ----------
    measured
        The table ``throughput``: an LM head of 32-bit weights, and the machine's own bandwidth and arithmetic.
    models
        Whose reported speed on the cloud's GPU, one token at a time, is marked.
    """
    ax = theme.axes(ax)
    xs = [10 ** (i / 20) for i in range(-60, 45)]
    here, cloud, phone = theme.styles(4)[1:]
    ax.plot(xs, [max(1, x) for x in xs], color="0.2", lw=2, label="the bound, for any machine")
    ax.plot([1, xs[-1]], [1, 1], color="0.6", lw=1, linestyle=":")
    ax.plot([0.1, 1], [0.1, 1], color="0.6", lw=1, linestyle=":")
    machine = measured.iloc[0]
    turn = _turn(1e9 * machine["gflops_per_s"], 1e9 * machine["bandwidth_gb_per_s"], 32)
    times = measured["measured_ms"] / measured["roofline_ms"].min()
    ax.plot(measured["positions"] / turn, times, here["marker"], color=here["color"], ms=7, label="LM head, measured")
    gpu, handset = find_device("a100-80gb-pcie"), find_device("iphone-13-pro-max")
    above = [decode(m, gpu="roofline").gpu_tokens_per_s / decode(m).gpu_tokens_per_s for m in models]
    at = [1 / _turn(gpu.flops_per_s, gpu.memory_bandwidth_bytes_per_s, 16)] * len(models)
    ax.plot(at, above, cloud["marker"], color=cloud["color"], ms=7, label="A100, batch 1, reported")
    for model, x, y in zip(models, at, above, strict=True):
        ax.text(1.2 * x, y, model, va="center", fontsize=9)
    turn = _turn(handset.flops_per_s, handset.memory_bandwidth_bytes_per_s, 16)
    ax.plot([1 / turn], [1], phone["marker"], color=phone["color"], ms=7, label="phone's LM head, as in the curves")
    ax.text(0.02, 0.75, "reading", fontsize=9, color="0.4")
    ax.text(16, 9, "computing", fontsize=9, color="0.4", rotation=42)
    ax.set(xscale="log", yscale="log", xlim=(1e-3, 200), ylim=(0.5, 200))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set_xlabel("positions (1 = where reading and computing take equally long)")
    ax.set_ylabel("time (1 = reading the weights once)")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    said = "; ".join(f"{model} {y:.1f}" for model, y in zip(models, above, strict=True))
    return theme.describe(
        ax,
        "Time against positions, both relative and logarithmic: a flat bound of reading that turns into a rising one "
        f"of computing. The measured LM head takes {measured['ratio'].iloc[0]:.1f} times the bound at one position and "
        f"{measured['ratio'].iloc[-1]:.1f} times at {measured['positions'].iloc[-1]}. "
        f"The A100's reported speeds are above it by {said}; the phone's LM head is on it.",
    )


def _turn(flops_per_s: float, bytes_per_s: float, bits: int) -> float:
    """Positions at which a machine computes for as long as it reads: two operations a weight and position."""
    return flops_per_s / 2 / (8 * bytes_per_s / bits)


def residuals(ax=None):
    """How far each accounting is from the publication's digitised points, in per cent, against the rank.

    Filled markers are the ``figure`` accounting, hollow ones ``literal``, in the colour of their curve.
    """
    ax = theme.axes(ax)
    curves = {
        f"{model}, {stage}": points
        for stage in ("decode", "prefill")
        for model, points in published.curves(stage).groupby("model", sort=False)
    }
    said = []
    ax.axhline(0, color="0.4", lw=1)
    for (name, points), style in zip(curves.items(), theme.styles(len(curves)), strict=True):
        look = dict(color=style["color"], marker=style["marker"], linestyle="none", ms=7)
        shift = 1.06 ** (list(curves).index(name) - 1.5)  # markers of one rank side by side
        for column, label, fill in (("computed", name, {}), ("literal", None, dict(mfc="none"))):
            percent = 100 * (points[column] / points["tokens_per_s"] - 1)
            ax.plot(points["rank"] * shift, percent, label=label, **look, **fill)
            said.append(f"{name}, {'figure' if label else 'literal'}, {percent.min():.1f} to {percent.max():.1f} %")
    ranks = sorted({rank for points in curves.values() for rank in points["rank"]})
    ax.set(xscale="log", xlabel="rank", ylabel="computed over reported (%)")
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
    **settings
        Passed to :func:`~plpkg.throughput.decode`.
    """
    ax = theme.axes(ax)
    table = latency.against_rtt(models, [0.1 * 10 ** (i / 20) for i in range(61)], **settings)
    for (name, speeds), style in zip(table.iterrows(), theme.styles(len(table)), strict=True):
        ax.plot(table.columns, speeds, label=name, **{**style, "marker": ""}, lw=2)
    for (label, speed), dash in zip((phone_only or {}).items(), theme.DASHES[1:], strict=False):
        ax.axhline(speed, color="0.35", linestyle=dash, lw=1.2, label=f"{label}: {speed:.1f} tokens/s")
    top = ax.get_ylim()[1]
    for link in map(find_link, marks):
        ax.axvline(1e3 * link.rtt_s, color="0.75", lw=1, zorder=0)
        ax.text(1e3 * link.rtt_s, top, f" {link.name}", rotation=90, va="top", ha="right", fontsize=9, color="0.3")
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


def schemes(schemes: Mapping[str, Mapping], rtts_ms: Sequence[float] = (0, 5, 20, 33), ax=None, **settings):
    """Tokens per second against the round-trip time for several schemes of running a model, one curve each.

    Arguments as in :func:`~plpkg.throughput.schemes_against_rtt`, the table behind the figure.
    """
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    ax = theme.axes(ax)
    table = latency.schemes_against_rtt(schemes, rtts_ms, **settings)
    for (name, speeds), style in zip(table.iterrows(), theme.styles(len(table)), strict=True):
        ax.plot(table.columns, speeds, label=name, **style)
    ax.set(yscale="log", xlabel="round-trip time (ms)", ylabel="tokens per second")
    ax.set_xticks(list(rtts_ms), [f"{rtt:g}" for rtt in rtts_ms])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.minorticks_off()
    theme.name_lines(ax)
    ax.figure.set_size_inches(8.6, 4.4)
    shown = ", ".join(f"{rtt:g}" for rtt in rtts_ms)
    said = "; ".join(f"{name} {', '.join(f'{v:.1f}' for v in speeds)}" for name, speeds in table.iterrows())
    return theme.describe(ax, f"Tokens per second, logarithmic, at round-trip times of {shown} ms: {said}.")


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
