"""Figures of notebook 02: quality and bytes, the link, and what the cloud recovers."""

from plpkg import theme
from plpkg.residual import recorded


def quality(ax=None):
    """Each split method's gain in bits per byte, by writer and in the mean, with its share of LoRA's bytes."""
    ax = theme.axes(ax)
    table = recorded.personalisation().query("bytes_per_token > 0").sort_values("gain")
    names = [f"{method} ({100 * row.share_of_actual:.0f} %)" for method, row in table.iterrows()]
    writers, at = recorded.gains().loc[table.index], range(len(names))
    for writer, style in zip(writers, theme.styles(len(writers.columns) + 1)[1:], strict=True):
        faint = {"color": "0.5", "marker": style["marker"], "linestyle": "none", "mfc": "none", "ms": 6}
        ax.plot(writers[writer], at, label=writer, **faint)
    colour, few = theme.styles(1)[0]["color"], table["share_of_actual"] <= 0.25
    for chosen, fill, label in ((few, colour, "mean, at most a quarter of the bytes"), (~few, "white", "mean, more")):
        own = [y for y, here in zip(at, chosen, strict=True) if here]
        ax.plot(table["gain"][chosen], own, "o", ms=8, color=colour, mfc=fill, label=label)
    ax.axvline(0.8 * table["gain"][recorded.LORA], color="0.4", linestyle="--", lw=1)
    ax.set_yticks(at, names)
    ax.grid(False, axis="y")
    ax.set(xlabel=f"gain, bits per byte (dashed: 80 % of {recorded.LORA}'s)")
    ax.legend(loc="lower right", fontsize=9)
    ax.figure.set_size_inches(8.6, 5.2)
    said = "; ".join(f"{name} {gain:.3f}" for name, gain in zip(names, table["gain"], strict=True))
    return theme.describe(
        ax, f"Gain in bits per byte in the mean, by method and its share of LoRA's bytes a token: {said}."
    )


def link_times(ax=None):
    """A token's time on each link over the formula's: by the relay's clock, and beyond its time without limits.

    Lines reach from the first to the third quartile of the blocks of tokens.
    """
    ax = theme.axes(ax)
    table = recorded.links()
    series = {
        "the relay's clock, busy waits": ("busy", "held_ratio"),
        "beyond the time without limits, busy waits": ("busy", "ratio"),
        "beyond the time without limits, asleep": ("asleep", "ratio"),
    }
    ax.axvspan(0.9, 1.1, color="0.9", lw=0)
    names, limits, said = list(dict.fromkeys(table["link"])), (0.65, 1.5), []
    for i, ((label, (waits, column)), style) in enumerate(zip(series.items(), theme.styles(len(series)), strict=True)):
        own = table[table["waits"] == waits].dropna(subset=column)
        at = [names.index(name) + 0.27 * (i - 1) for name in own["link"]]
        ax.plot(own[column].clip(*limits), at, **style | {"linestyle": "none", "label": label, "clip_on": False})
        if column == "ratio":
            ax.hlines(at, own["ratio_q1"].clip(*limits), own["ratio_q3"].clip(*limits), color=style["color"], lw=1)
        for ratio, y in zip(own[column], at, strict=True):
            if not limits[0] <= ratio <= limits[1]:  # drawn at the edge, with its value
                side = 1 if ratio < limits[0] else -1
                ax.annotate(f"{ratio:.1f}", (min(max(ratio, limits[0]), limits[1]), y), (side * 7, -3),
                            textcoords="offset points", ha="left" if side > 0 else "right", fontsize=8,
                            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        said.append(f"{label}: {own[column].between(0.9, 1.1).sum()} of {len(own)}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="measured over computed (grey: within 10 %)", xlim=limits)
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0))
    ax.figure.set_size_inches(8.6, 7.4)
    return theme.describe(ax, f"Measured over computed time of a token on the link, within 10 % {'; '.join(said)}.")


def m_recovery(ax=None):
    """The error of the M that the cloud computes, against the different tokens that it has seen."""
    ax = theme.axes(ax)
    rows = recorded.attack("m")
    groups = list(rows.groupby("case", sort=False))
    for (case, own), style in zip(groups, theme.styles(len(groups)), strict=True):
        ax.plot(own["x"], own["error"], label=f"M with {case}", **style)
    ax.set(xscale="log", yscale="log", xlabel="different tokens seen", ylabel="relative error of M", ylim=(None, 2))
    ax.set_xscale("log", base=2)
    ax.set_title("M by least squares, messages in fp16")
    ax.legend()
    said = "; ".join(f"{case}: {own['error'].min():.1g} after {own['x'].max():.0f} tokens" for case, own in groups)
    return theme.describe(
        ax, f"The error of the recovered M falls steeply once as many different tokens as ranks are seen: {said}."
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
