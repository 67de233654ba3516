"""The explorer of notebook 02: scheme of saving round trips, delay and guesses → tokens per second, bytes, gain.

Time without a delay, round trips, bytes and gain are *measured (recorded)* on plpkg-small; the delay's share of a
token's time is *computed*.
"""

from dataclasses import dataclass
from functools import cache

import ipywidgets

from plpkg import recorded, theme
from plpkg.explorer import Explorer

REFERENCE = "all layers"
"""The adapter that the others' gain is a share of."""


@dataclass(frozen=True)
class Choice:
    """What a scheme comes to.

    Attributes
    ----------
    scheme, rtt_ms, draft_tokens
        Of the benchmark's schemes; the delay; and how many guesses travel at once, 0 where nobody guesses.
    seconds, trips_per_token
        A token's time without a delay, and its round trips.
    tokens_per_pass, bytes_per_token
        How many tokens a pass yields, and what crosses for each, both ways.
    share_of_gain
        Of the gain of an adapter in all layers.
    """

    scheme: str
    rtt_ms: float
    draft_tokens: int
    seconds: float
    trips_per_token: float
    tokens_per_pass: float
    bytes_per_token: float
    share_of_gain: float

    @property
    def tokens_per_s(self) -> float:
        return 1 / (self.seconds + self.trips_per_token * self.rtt_ms / 1e3)


@cache
def speeds():
    """The recorded speeds without a delay, greedy."""
    rows = recorded.section("residual_trips", "speed")
    return rows[(rows["case"] == "plpkg-small") & (rows["rtt_ms"] == 0) & (rows["temperature"] == 0)]


@cache
def share_of_gain():
    """Each adapter's mean gain over all writers and orders, by its name, as a share of :data:`REFERENCE`'s."""
    gain = recorded.section("residual_adapters", "quality").groupby("method")["gain"].mean()
    return gain / gain[REFERENCE]


def schemes() -> list[str]:
    """The benchmark's, in its order."""
    return list(speeds()["what"].unique())


def compute(scheme: str, rtt_ms: float, draft_tokens: int) -> Choice:
    """Look a scheme up; for guesses that were not measured with those that were, none where nobody guesses."""
    rows = speeds()[speeds()["what"] == scheme].set_index("draft_tokens")
    draft_tokens = draft_tokens if draft_tokens in rows.index else rows.index[0]
    row = rows.loc[draft_tokens]
    return Choice(
        scheme,
        rtt_ms,
        draft_tokens,
        1 / row["tokens_per_s"],
        row["trips_per_token"],
        row["tokens_per_pass"],
        row["bytes_per_token"],
        share_of_gain()[row["adapter"]],
    )


def read_out(choice: Choice) -> str:
    """The result in words."""
    guesses = (
        f"{choice.draft_tokens} guesses, {choice.tokens_per_pass:.2f} tokens a pass" if choice.draft_tokens else ""
    )
    return (
        f"{choice.scheme}{': ' * bool(guesses)}{guesses}. {choice.tokens_per_s:.1f} tokens a second at "
        f"{choice.rtt_ms:g} ms ({choice.trips_per_token:.2f} round trips and {choice.bytes_per_token:,.0f} bytes a "
        f"token); {100 * choice.share_of_gain:.0f} % of the gain of an adapter in all layers."
    )


def draw(choice: Choice, ax):
    """Tokens per second of every scheme at this delay, and its gain; the chosen one is filled."""
    from matplotlib.ticker import LogLocator, NullLocator

    described, style = [], theme.styles(1)[0]
    for scheme in schemes():
        here = choice if scheme == choice.scheme else compute(scheme, choice.rtt_ms, choice.draft_tokens)
        chosen = scheme == choice.scheme
        fill = style["color"] if chosen else "white"
        ax.plot(here.tokens_per_s, 100 * here.share_of_gain, "o", ms=9, color=style["color"], mfc=fill)
        described.append(f"{scheme} {here.tokens_per_s:.1f} and {100 * here.share_of_gain:.0f} %")
    ax.set(xlabel=f"tokens per second at {choice.rtt_ms:g} ms", ylabel="share of the gain (%)", title=choice.scheme)
    ax.set_xscale("log")
    ax.set_ylim(0, 1.15 * max(100 * compute(scheme, 0, 6).share_of_gain for scheme in schemes()))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    return theme.describe(
        ax, f"Tokens per second and share of the gain at {choice.rtt_ms:g} ms: {'; '.join(described)}."
    )


def explorer() -> Explorer:
    """The widget."""
    guesses = [int(count) for count in sorted(speeds()["draft_tokens"].unique()) if count]
    controls = {
        "scheme": ipywidgets.SelectionSlider(options=schemes(), value=schemes()[1], description="Scheme"),
        "rtt_ms": ipywidgets.IntSlider(value=20, min=0, max=100, description="Round-trip time (ms)"),
        "draft_tokens": ipywidgets.SelectionSlider(options=guesses, value=guesses[-2], description="Guesses (tokens)"),
    }
    return Explorer(controls, compute, read_out, draw)
