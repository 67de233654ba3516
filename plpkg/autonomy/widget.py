"""The explorer of notebook 08: how much is read, model, what is trained, frequency → time and energy, *computed*."""

from dataclasses import dataclass
from typing import NamedTuple

import ipywidgets

from plpkg import catalog
from plpkg.autonomy import availability, plots
from plpkg.results import Tabular
from plpkg.show.explorer import Explorer


class Work(NamedTuple):
    """Multiply-adds of a sample's forward pass: of the body, and of the last layer."""

    body: float
    head: float


MODELS = {
    "word LSTM": Work(10 * 4 * (64 * 128 + 128 * 128 + 128 * 96 + 96 * 96), 10 * 96 * 10_000),  # ten words
    "MobileNet": Work(568e6, 1.024e6),  # 224 x 224 pixels: 569 million, as its paper reports
    "plpkg-small": Work(128 * 5.2e6, 128 * 320 * 8192),  # 128 tokens
}
LEARNING = ("all layers", "last layer", "last layer, cached", "last layer, cached, pruned")
READ = (("1,400, twice (a night)", (1_400, 2)), ("10,000, twenty times", (10_000, 20)))
KEPT = 0.4
"""The share of both parts that pruning leaves."""

SKIPPED_S = 60
"""Seconds that each window loses."""

PER_CYCLE = 1.0
"""Multiply-adds in a processor's cycle: a phone's core without a library tuned for it."""


@dataclass(frozen=True)
class Plan(Tabular):
    """The cost of each way to learn: ``ways`` with learning, minutes, days, joules; and which of them is chosen."""

    ways: list[dict]
    chosen: str

    def rows(self) -> list[dict]:
        return self.ways


def cycles(model: str, learning: str, samples: int, epochs: int) -> float:
    """The cycles of all steps: a backward pass takes two of a forward's, or one where the input needs no gradient."""
    body, head = MODELS[model]
    cached = body + 2 * head * epochs  # the body's work is done once
    of_a_sample = {
        "all layers": 3 * (body + head) * epochs,
        "last layer": (body + 2 * head) * epochs,
        "last layer, cached": cached,
        "last layer, cached, pruned": cached * KEPT,
    }
    return samples * of_a_sample[learning] / PER_CYCLE


def compute(read: tuple[int, int], model: str, learning: str, ghz: float, minutes: int = 60) -> Plan:
    """The plan for so many samples, read so often, by a device that may learn for so many minutes each night."""
    ways = []
    window_s = 60 * minutes
    for each in LEARNING:
        work = cycles(model, each, *read)
        seconds = work / (ghz * 1e9)
        nights = int(seconds / (window_s - SKIPPED_S)) + 1
        begins = [day * availability.DAY for day in range(nights)]
        windows = [(begin, begin + window_s) for begin in begins]
        days = availability.days_until(seconds, windows, SKIPPED_S)
        joules = plots.joules(work, ghz, static_watts=0.3)
        ways.append({"learning": each, "minutes": seconds / 60, "days": days, "joules": joules})
    return Plan(ways, learning)


def read_out(plan: Plan) -> str:
    """Say the chosen way in words."""
    (row,) = [row for row in plan.ways if row["learning"] == plan.chosen]
    battery = catalog.assumed("phone_battery_j")
    minutes = _rounded(row["minutes"])
    days = _rounded(row["days"])
    joules = _rounded(row["joules"])
    share = _rounded(100 * row["joules"] / battery, 2)
    return (
        f"Training {plan.chosen} takes {minutes} minutes of one core, {days} days from the first window on, and "
        f"{joules} J ({share} % of a battery of {battery / 1e3:g} kJ); no token leaves the device."
    )


def _rounded(value: float, digits: int = 3) -> str:
    """So many digits, without a power of ten."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.10g}"


def draw(plan: Plan, ax):
    """A bar for each way to learn."""
    ax = plots.plans(plan.ways, ax=ax)
    ax.set_title(f"chosen: {plan.chosen}")
    # Here the picture is narrower than in the notebook, and the words at the longest bar need room.
    ax.set_yticks(ax.get_yticks(), [way.replace(", ", ",\n", 1) for way in LEARNING])
    ax.set_xlim(right=1.2 * ax.get_xlim()[1])
    return ax


def explorer() -> Explorer:
    """The widget of the notebook."""
    slider = ipywidgets.SelectionSlider
    controls = {
        "read": slider(options=list(READ), value=READ[0][1], description="Samples read"),
        "model": slider(options=list(MODELS), value="word LSTM", description="Model"),
        "learning": slider(options=LEARNING, value=LEARNING[1], description="What is trained"),
        "ghz": slider(options=[0.5, 0.7, 1.0, 1.5, 2.0], value=1.0, description="Frequency (GHz)"),
    }
    question = "At which frequency does a night take the least energy, and why is it not the lowest?"
    return Explorer(controls, compute, read_out, draw, question)
