"""The explorer of notebook 09: a delay → tokens a second of the ways of saving round trips, and what was measured.

Each curve is a sum of times, t0 + n · RTT: t0 is what ``residual_trips`` measured without a delay, n the round trips a
token that it counted. The points beside the curves are what it measured over links with a delay.
"""

from dataclasses import dataclass
from functools import cache

from plpkg import recorded
from plpkg.show import theme

WAYS = {
    "M in every layer": "plain",
    "the same, guesses from public text": "lookup and public counts",
    "one layer late, folded": "one layer late, folded",
    "ladder": "ladder",
}
"""Names of the schemes in the explorer, and in ``residual_trips``."""
DELAYS = (0, 1, 2, 5, 10, 20, 33, 50, 100)
MOST_GUESSES = 6


@cache
def measured():
    """The rows of ``residual_trips`` that are shown: plpkg-small, greedy text, six guesses at most."""
    rows = recorded.section("residual_trips", "speed")
    alike = (rows["case"] == "plpkg-small") & (rows["temperature"] == 0)
    return rows[alike & rows["draft_tokens"].isin((0, MOST_GUESSES)) & rows["what"].isin(WAYS.values())]


@dataclass(frozen=True)
class Waits:
    """Tokens a second of each way at a delay, and the round trips that a token of it takes."""

    rtt_ms: float
    tokens_per_s: dict[str, float]
    round_trips: dict[str, float]


def compute(rtt_ms: float) -> Waits:
    """The speeds at a round-trip time."""
    without_delay = measured().query("rtt_ms == 0").set_index("what")
    trips_per_token = without_delay["trips_per_token"]
    tokens_per_s = without_delay["tokens_per_s"]
    speeds: dict[str, float] = {}
    trips: dict[str, float] = {}
    for way, scheme in WAYS.items():
        trips[way] = float(trips_per_token[scheme])
        own_s = 1 / tokens_per_s[scheme]  # t0 of a token
        speeds[way] = 1 / (own_s + trips[way] * rtt_ms / 1e3)
    return Waits(rtt_ms, speeds, trips)


def read_out(waits: Waits) -> str:
    """The result in words."""
    speeds = ", ".join(
        f"{way} {speed:.1f} tokens/s ({waits.round_trips[way]:.1f} round trips)"
        for way, speed in waits.tokens_per_s.items()
    )
    fastest = max(waits.tokens_per_s, key=waits.tokens_per_s.__getitem__)
    return f"At {waits.rtt_ms:g} ms: {speeds}. Fastest: {fastest}."


def draw(waits: Waits, ax=None):
    """Draw the four curves over the delay, the points that were measured, and where the slider stands."""
    ax = theme.axes(ax, figsize=(7.2, 3.9))
    curves = [compute(delay) for delay in DELAYS]
    delayed = measured()[measured()["rtt_ms"] > 0]
    for way, style in zip(WAYS, theme.styles(len(WAYS)), strict=True):
        ax.plot(DELAYS, [curve.tokens_per_s[way] for curve in curves], label=way, **style)
        points = delayed[delayed["what"] == WAYS[way]]
        ax.plot(points["rtt_ms"], points["tokens_per_s"], "x", color=style["color"])
    ax.plot([], [], "x", color="0.4", label="measured")
    ax.axvline(waits.rtt_ms, color="0.5", linestyle=":")
    ax.set(xlabel="round-trip time, ms", ylabel="tokens per second (better ↑)", yscale="log", ylim=(1, 150))
    ax.set_yticks([1, 2, 5, 10, 20, 50, 100], [1, 2, 5, 10, 20, 50, 100])
    ax.minorticks_off()
    ax.legend(loc="upper right", fontsize=8)
    return theme.describe(
        ax,
        f"Tokens per second of four ways against the round-trip time; crosses are measured. {read_out(waits)}",
    )


def explorer():
    """A slider for the delay."""
    import ipywidgets

    from plpkg.show.explorer import Explorer

    delay = ipywidgets.SelectionSlider(description="round-trip time, ms", options=DELAYS, value=0)
    question = "From which delay on does a ladder write three times as fast as M in every layer?"
    return Explorer({"rtt_ms": delay}, compute, read_out, draw, question)
