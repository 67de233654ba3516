"""Figures of notebook 02: quality and bytes, the link, and what the cloud recovers."""

from plpkg import theme
from plpkg.residual import recorded


def quality(ax=None):
    """Each split method's share of LoRA's gain, with the share of LoRA's bytes that it sends."""
    ax = theme.axes(ax)
    table = recorded.personalisation().query("bytes_per_token > 0").sort_values("share_of_lora")
    names = [f"{method} ({100 * row.share_of_actual:.0f} %)" for method, row in table.iterrows()]
    colour = theme.styles(1)[0]["color"]
    for name, row in zip(names, table.itertuples(), strict=True):
        fill = colour if row.share_of_actual <= 0.25 else "white"
        spread = 100 * row.share_ci
        ax.errorbar(100 * row.share_of_lora, name, xerr=spread, fmt="o", ms=7, capsize=3, color=colour, mfc=fill)
    ax.axvline(80, color="0.4", linestyle="--", lw=1)
    ax.grid(False, axis="y")
    ax.set(xlabel=f"gain in bits per byte, % of that of {recorded.LORA} (mean of the writers, 95 %)", xlim=(-60, 260))
    ax.figure.set_size_inches(8.6, 4.6)
    said = "; ".join(f"{name} {100 * share:.0f} %" for name, share in zip(names, table["share_of_lora"], strict=True))
    return theme.describe(
        ax, f"Share of LoRA's gain in quality, by method and its share of LoRA's bytes a token: {said}."
    )


def link_times(ax=None):
    """What a token spends on a limited link by the formula, in the relay, and beyond the time without limits."""
    ax = theme.axes(ax)
    rows = recorded.links()
    names = [f"{row.what}, {row.case.split(', ')[1]}" for row in rows.itertuples()]
    shown = {
        "formula_ms": "formula (computed)",
        "held_ms": "held by the relay (measured, recorded)",
        "ms_per_token": "longer than without a limit (measured, recorded)",
    }
    for i, ((column, label), fill) in enumerate(zip(shown.items(), theme.fills(3), strict=True)):
        ax.barh([at + 0.27 * (i - 1) for at in range(len(rows))], rows[column], height=0.27, label=label, **fill)
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="milliseconds of a token on the link, 60/100 Mb/s")
    ax.legend()
    ax.figure.set_size_inches(8.6, 5.2)
    held, beyond = rows["held_ratio"], rows["ratio"]
    return theme.describe(
        ax,
        f"Bars of {len(rows)} links: the relay holds a token {held.min():.2f} to {held.max():.2f} times as long as the "
        f"formula says; it takes longer than without a limit by {beyond.min():.2f} to {beyond.max():.2f} times that.",
    )


def m_recovery(ax=None):
    """The error of the M that the cloud computes, against the tokens that it has seen."""
    ax = theme.axes(ax)
    rows = recorded.attack("m")
    groups = list(rows.groupby("case", sort=False))
    for (case, own), style in zip(groups, theme.styles(len(groups)), strict=True):
        ax.plot(own["x"], own["error"], label=f"M with {case}", **style)
    ax.set(xscale="log", yscale="log", xlabel="tokens seen", ylabel="relative error of M", ylim=(None, 2))
    ax.set_xscale("log", base=2)
    ax.set_title("M by least squares, messages in fp16")
    ax.legend()
    said = "; ".join(f"{case}: {own['error'].min():.1g} after {own['x'].max():.0f} tokens" for case, own in groups)
    return theme.describe(
        ax, f"The error of the recovered M falls steeply once as many tokens as ranks are seen: {said}."
    )


def inversion(ax=None):
    """The share of tokens that each attacker recovers, against the layers on the device."""
    ax = _recovered("inversion", "decoder layers on the device", ax)
    ax.set_xticks(range(int(recorded.attack("inversion")["x"].max()) + 1))
    return ax


def noise(ax=None):
    """The share of tokens that each attacker recovers, against the noise on the embeddings."""
    ax = _recovered("noise", "standard deviation of the noise, in units of the embedding's own", ax)
    quality = recorded.attack("noise").groupby("x")["bits_per_byte"].first()
    untuned = recorded.attack("quality").set_index("case")["bits_per_byte"]["no M"]
    for x, bits in quality.items():
        ax.text(x, 104, f"{bits:.2f}", ha="center", fontsize=9, color="0.3")
    ax.set_title(f"above: bits per byte (without M and noise {untuned:.2f})", loc="left", pad=18)
    return ax


def _recovered(section: str, xlabel: str, ax):
    ax = theme.axes(ax)
    groups = list(recorded.attack(section).groupby("case", sort=False))
    for (attacker, own), style in zip(groups, theme.styles(len(groups)), strict=True):
        ax.plot(own["x"], 100 * own["recovered"], label=attacker, **style)
    ax.set(xlabel=xlabel, ylabel="tokens recovered (%)", ylim=(0, 103))
    ax.legend()
    said = "; ".join(
        f"{attacker} from {100 * own['recovered'].iloc[0]:.0f} to {100 * own['recovered'].iloc[-1]:.0f} %"
        for attacker, own in groups
    )
    return theme.describe(ax, f"Tokens recovered against {xlabel}: {said}.")
