"""Figures of notebooks 02 and 09: what can be personal, the ladder, and what saving round trips costs and keeps.

What takes ``rows`` takes those of a recorded section; :func:`by_scheme` and :func:`defences` are tables of several.
"""

from collections.abc import Sequence

from plpkg.recorded import half_width
from plpkg.residual.cost import device_cost
from plpkg.residual.cut.parts import split
from plpkg.show import drawing, theme

SCHEMES = {
    "plain": "M r=48 at down",
    "lookup and public counts": "M, drafts from public counts",
    "one layer late, folded": "M one layer late, folded",
    "two layers, folded, public counts": "M in two layers, folded, public counts",
    "ladder": "ladder",
}
"""Those of ``residual_trips`` that are compared, and what they are called: M in all layers, and each way out."""

FORMS = {
    "LoRA r=16 at q, k, v": "learned",
    "M r=64 at q, k, v": "a seed",
    "LoRA r=16 at down": "learned",
    "M r=48 at down": "own text",
    "M r=64 at all seven": "a seed",
    "counts of the same text": "-",
    "counts of all own text": "-",
}
"""Forms of what can be personal, and where their A and B come from."""

PAIRS = (
    ("M r=64 at q, k, v", "LoRA r=16 at q, k, v"),
    ("M r=48 at down", "LoRA r=16 at down"),
    ("LoRA r=16 at down", "LoRA r=16 at q, k, v"),
    ("counts of the same text", "LoRA r=16 at down"),
    ("counts of all own text", "LoRA r=16 at down"),
)
"""Whose gains are compared."""

NAMES = {
    "none": "no adapter",
    "LoRA q k v r=16": "LoRA r=16 at q, k, v",
    "LoRA r=16": "LoRA r=16 at q, k, v",
    "LoRA down r=16": "LoRA r=16 at down",
    "PrivateLoRA q k v r=64": "M r=64 at q, k, v",
    "PrivateLoRA r=64": "M r=64 at q, k, v",
    "PrivateLoRA down r=48, gradient": "M r=48 at down",
    "all layers": "M r=48 at down",
    "PrivateLoRA r=64, all 7 projections": "M r=64 at all seven",
    "counts, the adapters' text": "counts of the same text",
    "counts": "counts of all own text",
}
"""The forms' names in the recorded tables."""


def ladder(ax=None):
    """One token's way where M is behind all layers: one round trip."""
    ax = drawing.canvas(8.4, 6, theme.axes(ax, figsize=(5.4, 3.9)))
    table, private, frozen = drawing.colours(3)  # as notebook 01 has them
    for x, width, title, colour in ((0, 2.5, "device", drawing.PALE), (2.6, 2.5, "network", "white")):
        drawing.lane(ax, x, 0, width, 6, title, colour)
    drawing.lane(ax, 5.2, 0, 3.2, 6, "cloud")
    drawing.box(ax, 0.6, 0.8, 1.6, 0.75, "embedding", table)
    drawing.box(ax, 0.95, 3.2, 0.9, 0.85, "$M$", private, size=15)
    drawing.box(ax, 0.6, 4.85, 1.6, 0.75, "norm,\nLM head", table, size=9)
    drawing.arrow(ax, (2.2, 1.175), (7.4, 1.175), "word embedding")
    drawing.arrow(ax, (7.4, 1.175), (7.4, 1.65))
    for y, name in ((1.65, "0"), (2.65, "1"), (3.65, "L-1")):
        drawing.box(ax, 6.65, y, 1.5, 0.7, f"layer ${name}$", frozen)
        drawing.box(ax, 5.6, y, 0.75, 0.7, f"$A_{{{name}}}$", frozen)
        drawing.arrow(ax, (6.65, y + 0.35), (6.35, y + 0.35))
    for y, stop, dashed in ((2.35, 2.65, False), (3.35, 3.65, True), (4.35, 5.4, False)):
        drawing.arrow(ax, (7.4, y), (7.4, stop), dashed=dashed)
    drawing.arrow(ax, (7.4, 5.4), (2.2, 5.4), "h: d numbers", above=False)
    for start, stop in ((2.0, 3.45), (3.0, 3.62), (4.0, 3.8)):
        drawing.arrow(ax, (5.6, start), (1.85, stop), colour=private)
    drawing.note(ax, 3.75, 2.1, "$A_0x_0, \\dots, A_{L-1}x_{L-1}$\nr numbers each")
    drawing.arrow(ax, (1.4, 4.05), (1.4, 4.85), colour=private)
    drawing.arrow(ax, (0.35, 5.2), (0.35, 1.2), dashed=True)
    drawing.note(ax, 0.2, 3.2, "next token", rotation=90)
    return theme.describe(
        ax,
        "A ladder: the cloud runs all layers; what each gives through its A goes down with the final hidden state h in "
        "one message, and the device adds M times it to h before the norm and the LM head. Nothing goes up but the "
        "next word embedding.",
    )


def by_scheme(trips, quality, facts, imitation):
    """Costs of each scheme of saving round trips, and what it keeps.

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
        By scheme, of :data:`SCHEMES`: ``tokens_per_s``; ``round_trips`` and ``bytes_per_token``; ``gain``, as
        a share of that of an adapter in all layers, means over writers and orders, with ``gain_ci``, the half-width
        of the 95 % interval over the writers of the difference to it, as such a share; ``facts`` of forty;
        ``device_parameters``, the weights on the device; ``stolen``, the gain of the cloud's copy as a share of the
        owner's: from answers, or by imitation of as many sampled tokens as were tried.
    """
    copies = imitation.sort_values("tokens").groupby(["what", "method"])["stolen"].last()
    gain = quality.pivot_table(index="method", columns="case", values="gain")
    mean = gain.mean(axis=1)
    difference = (gain - gain.loc["all layers"]).apply(half_width, axis=1)
    table = trips.set_index("what").loc[list(SCHEMES)]
    adapter = table["adapter"]
    seen = adapter.str.startswith("ladder").map({True: "sampled", False: "answers"})
    return (
        table[["tokens_per_s", "trips_per_token", "bytes_per_token", "device_parameters"]]
        .rename(columns={"trips_per_token": "round_trips"}, index=SCHEMES)
        .assign(
            gain=adapter.map(mean / mean["all layers"]).to_numpy(),
            gain_ci=adapter.map(difference / mean["all layers"]).to_numpy(),
            facts=adapter.map(facts.set_index("method")["right"].astype(int)).to_numpy(),
            stolen=copies.reindex(list(zip(seen, adapter, strict=True))).to_numpy(),
        )
    )


def schemes(near, far, rtt_ms: float, ax=None):
    """Tokens per second of each scheme, without a delay and with one; ``near`` and ``far`` are :func:`by_scheme`."""
    ax = theme.axes(ax, figsize=(7.6, 3.8))
    rows = range(len(far))
    names = [f"{name} ({trips:.2g})" for name, trips in far["round_trips"].items()]
    colour = theme.styles(1)[0]["color"]
    ax.hlines(rows, far["tokens_per_s"], near["tokens_per_s"], color="0.7", lw=1.5, zorder=1)
    for table, face, label in ((near, "white", "no delay"), (far, colour, f"{rtt_ms:g} ms")):
        ax.plot(table["tokens_per_s"], rows, "o", color=colour, mfc=face, label=label)
    ax.set(xlabel="tokens per second, logarithmic (better →)", xscale="log", xlim=(2, 150), ylim=(len(far) - 0.4, -0.6))
    ax.set_xticks([5, 10, 20, 50, 100], [5, 10, 20, 50, 100], minor=False)
    ax.minorticks_off()
    ax.set_yticks(rows, names)
    ax.grid(False, axis="y")
    ax.legend(loc="lower left")
    described = "; ".join(
        f"{name}: {near['tokens_per_s'][name]:.0f} and {speed:.0f}" for name, speed in far["tokens_per_s"].items()
    )
    return theme.describe(ax, f"Tokens per second of each scheme without a delay and at {rtt_ms:g} ms. {described}.")


def gains(baselines):
    """Bits per byte gained over the backbone alone, by method (rows) and writer (columns).

    ``gain`` of ``residual_baselines``, by :data:`NAMES`; means over the orders.
    """
    return baselines.pivot_table(index="method", columns="case", values="gain").rename(index=NAMES)


def forms(adapted, gain, facts):
    """One row for each of :data:`FORMS`: what a token and the learning cost, and what is gained.

    Parameters
    ----------
    adapted
        Models with these adapters, by form; round trips, bytes and learned numbers are counted on them.
    gain, facts
        As from :func:`gains`; as for :func:`by_scheme`.
    """
    import pandas as pd

    counted = {}
    for name, model in adapted.items():
        device, _ = split(model)
        sent = device_cost(device)
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        crossing = int(sent.up_bytes_per_token + sent.down_bytes_per_token)
        counted[name] = (len(device.matrices) + 1, crossing, learned)
        hidden_bytes = 2 * device.embedding.embedding_dim
        without_m = (1, 2 * hidden_bytes, 0)  # one round trip: hidden states of two bytes a number, up and down
    for name in FORMS:
        if name.startswith("counts"):
            counted[name] = without_m
    right = facts.set_index(facts["method"].replace(NAMES))["right"]
    columns = {
        "A and B from": pd.Series(FORMS),
        **pd.DataFrame(counted, index=["round trips", "bytes a token", "numbers learned"]).T,
        "gain, bits per byte": gain.mean(axis=1).map("{:.3f}".format),
        "facts of 40": right.map("{:.0f}".format),
    }
    return pd.DataFrame({name: column.reindex(list(FORMS)) for name, column in columns.items()}).fillna("not measured")


def differences(gain, pairs: Sequence[tuple[str, str]] = PAIRS, ax=None):
    """Paired differences of gains over the writers, each mean with its 95 % interval.

    Parameters
    ----------
    gain
        As from :func:`gains`.
    pairs
        ``(method, other)``: the first's gain minus the second's.
    """
    ax = theme.axes(ax, figsize=(8, 3.6))
    colour = theme.styles(1)[0]["color"]
    described: list[str] = []
    for y, (method, other) in enumerate(pairs):
        difference = gain.loc[method] - gain.loc[other]
        mean = difference.mean()
        half = half_width(difference)
        face = colour
        said = f"{method} minus {other}: {mean:+.3f} ± {half:.3f}"
        if abs(mean) <= half:  # 0 is in the interval
            face = "white"
            said += ", not distinguishable"
        described.append(said)
        ax.plot(difference, [y + 0.25] * len(difference), "|", color="0.45", ms=9, mew=1.5)
        ax.errorbar(mean, y, xerr=half, fmt="D", ms=8, color=colour, mfc=face, capsize=4)
    ax.axvline(0, color="0.4", lw=1)
    ax.plot([], [], "|", color="0.45", ms=9, mew=1.5, label="one writer")
    ax.plot([], [], "D", ms=8, color=colour, label="mean, 95 % interval")
    if any(line.get_mfc() == "white" for line in ax.lines):
        ax.plot([], [], "D", ms=8, color=colour, mfc="white", label="the same, with 0 in it")
    ax.legend(loc="upper right")
    ax.set_yticks(range(len(pairs)), [f"{method}\nminus {other}" for method, other in pairs], fontsize=10)
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.set(xlabel="difference of gains (bits per byte; → the first is better)")
    return theme.describe(
        ax, f"Paired differences in bits per byte over {gain.shape[1]} writers. {'; '.join(described)}."
    )


def defences(rows):
    """One row for each defence (noise on the embedding apart): its cost, what is read all the same, and a verdict.

    Parameters
    ----------
    rows
        All of ``residual_attacks``.

    Returns
    -------
    pandas.DataFrame
        By defence: bits per byte lost; tokens read by the best attacker who knows no text in clear, in per cent; what
        the cloud has of M; the device's weights, as a multiple of those without; a verdict.
    """
    import pandas as pd

    seen = {name: section.dropna(axis=1, how="all") for name, section in rows.groupby("section")}
    plain = seen["noise"].query("x == 0").iloc[0]

    def row(rows, m, verdict, beside=plain):
        lost = rows["bits_per_byte"].min() - beside["bits_per_byte"] if "bits_per_byte" in rows else 0
        tokens = 100 * rows["recovered"].max() if "recovered" in rows else 100
        weights = rows["device_parameters"].iloc[0] / beside["device_parameters"] if "device_parameters" in rows else 1
        return round(lost, 2), round(tokens), m, round(weights, 2), verdict

    def from_tokens(rows, tokens):
        return f"error {rows['error'].iloc[0]:.2g} from {tokens:,} tokens"

    secret = seen["embedding"].query("attacker != '5 % known pairs'")
    units = seen["nonlinear"]
    exact = seen["answers"].query("x == 0 and tokens == 256")
    noisy = seen["answers"].query("x == 1 and tokens == 16384")
    same = "as without a defence"
    rows = {
        "none": row(exact, from_tokens(exact, 256), "-"),
        "4 of 5 layers on the device": row(
            seen["inversion"].query("x == 4"), "of the last layer only", "hides no text"
        ),
        "noise, 1 × the answers": row(noisy, from_tokens(noisy, 16384), "averaged away"),
        "secret embedding, perturbed": row(secret[secret["case"].str.contains("pert.*0.3")], same, "a weak cipher"),
        "the same, cosine up to 0.1": row(
            secret[secret["case"].str.contains("pert.*0.1")], same, "with 5 % known, 60 % read"
        ),
        "secret embedding, rotated": row(
            secret[secret["case"].str.contains("rot")], same, "with 5 % known, 100 % read"
        ),
        "256 hidden units for M": row(units[-1:], from_tokens(units[-1:], 8192), "copied by a network", units.iloc[0]),
    }
    columns = ["bits per byte lost", "tokens read (%)", "the cloud's M", "weights (×)", "verdict"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)
