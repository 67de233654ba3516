"""The explorer of notebook 07: load, slots, patience, store → who waits how long for a first token, *simulated*."""

import math
from collections import deque

import ipywidgets

from plpkg.serving.service import plots
from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.simulation import Arrival, Simulation, arrivals, simulate
from plpkg.show.explorer import Explorer

BUSY = 16
"""People who ask all the time."""
RARE = "rare"
"""The one who seldom asks, every :data:`EVERY_S` seconds."""
EVERY_S = 4
PLACES = 128
SECONDS = 60


def compute(load: int, slots: int, patience_s: float, fetch_s: float, seed: int = 0) -> Simulation:
    """A minute of ``load`` requests a second by sixteen busy people, and of one by another person each four seconds."""
    busy = arrivals(load * SECONDS, load, BUSY, "even", seed=seed)
    rare = [Arrival(float(at), RARE, 64, 64) for at in range(EVERY_S, SECONDS + 1, EVERY_S)]
    coming = sorted(busy + rare)
    return simulate(coming, Scheduler(slots, PLACES, max_queued=len(coming), patience_s=patience_s), fetch_s=fetch_s)


def parts(result: Simulation) -> dict[str, Simulation]:
    """The requests of the sixteen busy people, and of the one who seldom asks."""
    busy = Simulation([row for row in result.rows() if row["adapter"] != RARE])
    return {"the busy sixteen": busy, "the one who seldom asks": result.of(RARE)}


def read_out(result: Simulation) -> str:
    """Say the result in words."""
    busy, rare = parts(result).values()
    return (
        f"Simulated: the one who seldom asks waits for a first token for {shown(rare.first_token_s())} in half of the "
        f"cases, and {shown(rare.first_token_s(1))} at worst; the busy sixteen {shown(busy.first_token_s())}, and "
        f"{shown(busy.first_token_s(0.99))} at worst but for one in a hundred. {result.tokens_per_s:,.0f} tokens/s."
    )


def shown(seconds: float) -> str:
    """A time in the unit that suits it."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def draw(result: Simulation, ax, earlier: Simulation | None = None):
    """By when how many have their first token, now and (grey) with the setting before."""
    return plots.first_tokens(parts(result), ax, parts(earlier) if earlier else {})


def explorer() -> Explorer:
    """The widget of the notebook."""
    drawn = deque([None], maxlen=2)

    def draw_beside_the_last(result, ax):
        drawn.append(result)
        return draw(result, ax, drawn[0])

    def slider(name, options, value):
        return ipywidgets.SelectionSlider(options=options, value=value, description=name)

    patience = [("never", math.inf), *((f"{seconds:g}", seconds) for seconds in (8.0, 4.0, 2.0, 1.0, 0.0))]
    controls = {
        "load": slider("Load (requests/s)", [16, 24, 32, 36, 40], 32),
        "patience_s": slider("Patience (s)", patience, math.inf),
        "slots": slider("Slots (adapters)", [10, 12, 14, 16, 17], 16),
        "fetch_s": slider("Store latency (s)", [0.25, 0.5, 1.0, 2.0, 4.0], 0.25),
    }
    question = "What shortens the longest wait more: less patience, or a 17th slot?"
    return Explorer(controls, compute, read_out, draw_beside_the_last, question)
