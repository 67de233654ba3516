"""Figures of notebook 02: quality and bytes, tokens per second against the delay, and what the cloud recovers.

Each takes the ``rows`` of a recorded section: ``quality`` of ``residual_quality``, ``speed`` of ``residual_trips``;
those of ``residual_attacks`` are ``m``, ``inversion``, ``noise`` and ``embedding``.
"""

from plpkg import theme
from plpkg.recorded import half_width

LORA = "LoRA r=16"
"""What everything is compared with: LoRA on q, k and v, cut so that full activations cross."""


def gains(rows):
    """Bits per byte below the untuned model, means over the seeds.

    Returns
    -------
    pandas.DataFrame
        By method (rows) and writer (columns).
    """
    return rows.pivot_table(index="method", columns="case", values="gain", sort=False)


def personalisation(rows):
    """Each method's mean over writers, whose seeds are averaged.

    Returns
    -------
    pandas.DataFrame
        By method: ``bits_per_byte`` of held-out text; ``gain`` over the untuned model, with its interval's half-width
        ``gain_ci``; ``share_of_lora``, of :data:`LORA`'s mean gain; ``tokens_per_s`` at 60/100 Mb/s without delay and
        ``m_s``; the adapter's ``rank`` and ``targets``; ``trained`` parameters; ``bytes_per_token`` on the wire with
        both end points, and ``share_of_actual``: of LoRA's full activations; ``device_mb``, the weights on the device.
    """
    by_method, by_writer = rows.groupby("method", sort=False), gains(rows)
    gain = by_writer.mean(axis=1)
    table = by_method[["bits_per_byte", "tokens_per_s", "m_s"]].mean()  # as many seeds for each writer
    table = table.assign(gain=gain, gain_ci=by_writer.apply(half_width, axis=1), share_of_lora=gain / gain[LORA])
    return table.join(
        by_method[["rank", "targets", "trained", "bytes_per_token", "share_of_actual", "device_mb"]].first()
    )


def quality(rows, ax=None):
    """Each split method's gain in bits per byte, by writer and in the mean, with its share of LoRA's bytes."""
    ax = theme.axes(ax)
    table = personalisation(rows).query("bytes_per_token > 0").sort_values("gain")
    names = [f"{method} ({100 * row.share_of_actual:.0f} %)" for method, row in table.iterrows()]
    writers, at = gains(rows).loc[table.index], range(len(names))
    for writer, style in zip(writers, theme.styles(len(writers.columns) + 1)[1:], strict=True):
        faint = {"color": "0.5", "marker": style["marker"], "linestyle": "none", "mfc": "none", "ms": 6}
        ax.plot(writers[writer], at, label=writer, **faint)
    colour, few = theme.styles(1)[0]["color"], table["share_of_actual"] <= 0.25
    for chosen, fill, label in ((few, colour, "mean, at most a quarter of the bytes"), (~few, "white", "mean, more")):
        heights = [y for y, drawn in zip(at, chosen, strict=True) if drawn]
        ax.plot(table["gain"][chosen], heights, "o", ms=8, color=colour, mfc=fill, label=label)
    ax.axvline(0.8 * table["gain"][LORA], color="0.4", linestyle="--", lw=1)
    ax.set_yticks(at, names)
    ax.grid(False, axis="y")
    ax.set(xlabel=f"gain, bits per byte (dashed: 80 % of {LORA}'s)")
    ax.legend(loc="lower right", fontsize=9)
    ax.figure.set_size_inches(8.6, 5.2)
    described = "; ".join(f"{name} {gain:.3f}" for name, gain in zip(names, table["gain"], strict=True))
    return theme.describe(
        ax, f"Gain in bits per byte in the mean, by method and its share of LoRA's bytes a token: {described}."
    )


def against_rtt(rows, schemes, ax=None):
    """Tokens per second against the round-trip time, by scheme of saving round trips: measured, and computed.

    ``rows`` of ``residual_trips``, of one model at one temperature; ``schemes`` are the ``what`` to draw.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ax = theme.axes(ax)
    described = []
    for scheme, style in zip(schemes, theme.styles(len(schemes)), strict=True):
        seen = rows[rows["what"] == scheme].sort_values("rtt_ms")
        ax.plot(seen["rtt_ms"], seen["computed"], **style | {"marker": ""})
        ax.plot(seen["rtt_ms"], seen["tokens_per_s"], **style | {"linestyle": "none"})
        trips = seen["trips_per_token"].iloc[0]
        ax.plot([], [], label=f"{scheme} ({trips:.2g})", **style)
        at = ", ".join(f"{speed:.0f}" for speed in seen["tokens_per_s"])
        described.append(f"{scheme}, {trips:.2g} round trips a token: {at}")
    ax.set(xlabel="round-trip time (ms)", ylabel="tokens per second", yscale="log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_title("markers measured, lines computed; in brackets round trips a token", loc="left", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    ax.figure.set_size_inches(9.6, 4.4)
    delays = ", ".join(f"{ms:g}" for ms in sorted(rows["rtt_ms"].unique()))
    return theme.describe(ax, f"Tokens per second at round-trip times of {delays} ms. {'; '.join(described)}.")


def by_scheme(trips, quality, facts, imitation):
    """What each scheme of saving round trips costs and keeps.

    Parameters
    ----------
    trips
        Rows of ``residual_trips``, of one model, temperature and RTT.
    quality
        ``quality`` of ``residual_adapters``.
    facts
        Rows of ``residual_diary``, of the diary's facts.
    imitation
        ``imitation`` of ``residual_imitation``.

    Returns
    -------
    pandas.DataFrame
        By scheme: ``tokens_per_s``; ``trips_per_token`` and ``bytes_per_token``; ``share_of_gain``, of an adapter in
        all layers, the mean over writers and orders, with ``gain_ci``, the half-width of the 95 % interval over the
        writers of the difference to it, in bits per byte; ``facts`` of forty; ``device_parameters``, the weights on the
        device. Of the cloud's copy, from answers or by imitation of as many sampled tokens as were tried, with known
        times where it writes ahead: ``m_error``, the relative error of every M that it has, if they are matrices;
        ``stolen``, its gain as a share of the owner's.
    """
    copies = imitation.sort_values("tokens").groupby(["what", "method"])[["error", "stolen"]].last()
    gain = quality.pivot_table(index="method", columns="case", values="gain")
    mean, difference = gain.mean(axis=1), (gain - gain.loc["all layers"]).apply(half_width, axis=1)
    table = trips.set_index("what")
    adapter, ahead = table["adapter"], table["draft_tokens"] > 0
    seen = adapter.str.startswith("ladder").map({True: "sampled", False: "answers"})
    seen = seen.mask(ahead & (seen == "sampled"), "sampled, known times")
    stolen = copies.reindex(list(zip(seen, adapter, strict=True)))
    return table[["tokens_per_s", "trips_per_token", "bytes_per_token"]].assign(
        share_of_gain=adapter.map(mean / mean["all layers"]),
        gain_ci=adapter.map(difference),
        facts=adapter.map(facts.set_index("method")["right"].astype(int)),
        device_parameters=table["device_parameters"],
        m_error=stolen["error"].to_numpy(),
        stolen=stolen["stolen"].to_numpy(),
    )


def m_recovery(rows, ax=None):
    """The error of the M that the cloud computes, against the different tokens that it has seen."""
    ax = theme.axes(ax)
    groups = list(rows.groupby("case", sort=False))
    for (case, seen), style in zip(groups, theme.styles(len(groups)), strict=True):
        ax.plot(seen["x"], seen["error"], label=f"M with {case}", **style)
    ax.set(xscale="log", yscale="log", xlabel="different tokens seen", ylabel="relative error of M", ylim=(None, 2))
    ax.set_xscale("log", base=2)
    ax.set_title("M by least squares, messages in fp16")
    ax.legend()
    least = "; ".join(f"{case}: {seen['error'].min():.1g} after {seen['x'].max():.0f} tokens" for case, seen in groups)
    return theme.describe(
        ax, f"The error of the recovered M falls steeply once as many different tokens as ranks are seen: {least}."
    )


def inversion(rows, ax=None):
    """The share of tokens that each attacker recovers, against the layers on the device."""
    ax = _recovered(rows, "decoder layers on the device", ax)
    ax.set_xticks(range(int(rows["x"].max()) + 1))
    return ax


def noise(rows, untuned: float, ax=None):
    """The share of tokens that each attacker recovers, against the noise on the embeddings.

    ``untuned`` is in bits per byte, without M and without noise.
    """
    ax = _recovered(rows, "standard deviation of the noise, in units of the embedding's own", ax)
    for x, bits in rows.groupby("x")["bits_per_byte"].first().items():
        ax.text(x, 104, f"{bits:.2f}", ha="center", fontsize=9, color="0.3")
    ax.set_title(f"above: bits per byte (without M and noise {untuned:.2f})", loc="left", pad=18)
    return ax


def by_attacker(rows):
    """What each attacker recovers of each secret embedding, beside its quality and its costs.

    Returns
    -------
    pandas.DataFrame
        By case, bits per byte, and what the device holds, computes and sends; a column for each attacker.
    """
    index = ["case", "bits_per_byte", "device_parameters", "flops_per_token", "bytes_per_token"]
    return rows.pivot_table(index=index, columns="attacker", values="recovered", sort=False)


def _recovered(rows, xlabel: str, ax):
    ax = theme.axes(ax)
    shares = {attacker: (seen["x"], 100 * seen["recovered"]) for attacker, seen in rows.groupby("case", sort=False)}
    for (attacker, (x, share)), style in zip(shares.items(), theme.styles(len(shares)), strict=True):
        ax.plot(x, share, label=attacker, **style)
    ax.set(xlabel=xlabel, ylabel="tokens recovered (%)", ylim=(0, 103))
    ax.legend()
    described = "; ".join(
        f"{attacker} from {share.iloc[0]:.0f} to {share.iloc[-1]:.0f} %" for attacker, (_, share) in shares.items()
    )
    return theme.describe(ax, f"Tokens recovered against {xlabel}: {described}.")
