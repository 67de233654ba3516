"""Figures of notebook 02: quality and bytes, the link, and what the cloud recovers.

Each takes the ``rows`` of a recorded section: ``quality`` of ``residual_quality``, ``link`` of ``residual_wire``; those
of ``residual_attacks`` are ``m``, ``inversion``, ``noise`` and ``embedding``.
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


def link_times(rows, ax=None):
    """A token's time on each link over the formula's: by the relay's clock, and beyond its time without limits.

    Lines reach from the first to the third quartile of the blocks of tokens.
    """
    ax = theme.axes(ax)
    many = rows["batch"].map(lambda batch: f", {batch:.0f} sequences" if batch > 1 else "")
    names = list(rows["what"] + rows["case"].str.extract("(, RTT .*)")[0] + many)
    series = {"the relay's clock": "held_ratio", "beyond the time without limits": "ratio"}
    ax.axvspan(0.9, 1.1, color="0.9", lw=0)
    limits, described = (0.65, 1.5), []
    for i, ((label, column), style) in enumerate(zip(series.items(), theme.styles(len(series)), strict=True)):
        measured = rows.reset_index(drop=True).dropna(subset=column)
        at = measured.index + 0.25 * (i - 0.5)
        ax.plot(measured[column].clip(*limits), at, **style | {"linestyle": "none", "label": label, "clip_on": False})
        if column == "ratio":
            quartiles = (measured[name].clip(*limits) for name in ("ratio_q1", "ratio_q3"))
            ax.hlines(at, *quartiles, color=style["color"], lw=1)
        for ratio, y in zip(measured[column], at, strict=True):
            if not limits[0] <= ratio <= limits[1]:  # drawn at the edge, with its value
                side = 1 if ratio < limits[0] else -1
                ax.annotate(f"{ratio:.1f}", (min(max(ratio, limits[0]), limits[1]), y), (side * 7, -3),
                            textcoords="offset points", ha="left" if side > 0 else "right", fontsize=8,
                            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        described.append(f"{label}: {measured[column].between(0.9, 1.1).sum()} of {len(measured)}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="measured over computed (grey: within 10 %)", xlim=limits)
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0))
    ax.figure.set_size_inches(8.6, 5.6)
    return theme.describe(
        ax, f"Measured over computed time of a token on the link, within 10 % {'; '.join(described)}."
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
