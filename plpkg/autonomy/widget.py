"""The explorer of notebook 08: how much is read, model, what is trained, frequency → time and energy, *computed*."""

from dataclasses import dataclass
from typing import NamedTuple

import ipywidgets

from plpkg import catalog
from plpkg.autonomy import availability, plots
from plpkg.explorer import Explorer
from plpkg.results import Tabular


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
READ = ("1,400, twice (a night)", (1_400, 2)), ("10,000, twenty times", (10_000, 20))
KEPT, SKIPPED_S = 0.4, 60
"""What pruning leaves of both parts; what each window loses, s."""
PER_CYCLE = 1.0
"""Multiply-adds in a processor's cycle: a phone's core without a library tuned for it."""


@dataclass(frozen=True)
class Plan(Tabular):
    """What each way to learn takes: ``ways`` with learning, minutes, days, joules; and which of them is chosen."""

    ways: list[dict]
    chosen: str

    def rows(self) -> list[dict]:
        return self.ways


def cycles(model: str, learning: str, samples: int, epochs: int) -> float:
    """The cycles of all steps: a backward pass takes two of a forward's, or one where the input needs no gradient."""
    body, head = MODELS[model]
    passes = {LEARNING[0]: 3 * (body + head) * epochs, LEARNING[1]: (body + 2 * head) * epochs}
    cached = body + 2 * head * epochs
    return samples * passes.get(learning, cached * (KEPT if learning == LEARNING[3] else 1)) / PER_CYCLE


def compute(read: tuple[int, int], model: str, learning: str, ghz: float, minutes: int = 60) -> Plan:
    """The plan for so many samples, read so often, by a device that may learn for so many minutes each night."""
    ways = []
    for each in LEARNING:
        work = cycles(model, each, *read)
        seconds = work / (ghz * 1e9)
        nights = int(seconds / (60 * minutes - SKIPPED_S)) + 1
        windows = [(day * availability.DAY, day * availability.DAY + 60 * minutes) for day in range(nights)]
        days = availability.days_until(seconds, windows, SKIPPED_S)
        joules = plots.joules(work, ghz, static_watts=0.3)
        ways.append({"learning": each, "minutes": seconds / 60, "days": days, "joules": joules})
    return Plan(ways, learning)


def read_out(plan: Plan) -> str:
    """Say the chosen way in words."""
    row = next(row for row in plan.ways if row["learning"] == plan.chosen)
    battery = catalog.assumed("phone_battery_j")
    minutes, days, joules = (_rounded(row[name]) for name in ("minutes", "days", "joules"))
    share = _rounded(100 * row["joules"] / battery, 2)
    return (
        f"Training {plan.chosen} takes {minutes} minutes of one core, {days} days from the first window on, and "
        f"{joules} J ({share} % of a battery of {battery / 1e3:g} kJ); no token leaves the device."
    )


def _rounded(value: float, digits: int = 3) -> str:
    """So many digits, without a power of ten."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


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
