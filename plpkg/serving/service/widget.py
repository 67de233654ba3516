"""The explorer of notebook 07: popularity, tenants, slots, store → throughput and first tokens, *simulated*."""

import ipywidgets

from plpkg.explorer import Explorer
from plpkg.serving.popularity import POPULARITIES
from plpkg.serving.service import plots
from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.simulation import Simulation, arrivals, simulate


def compute(popularity: str, tenants: int, slots: int, fetch_ms: int) -> Simulation:
    """Four hundred requests, eleven a second: nearly all that 32 places write at 25 ms a step."""
    return simulate(arrivals(400, 11, tenants, popularity), Scheduler(slots), fetch_s=fetch_ms / 1e3)


def read_out(result: Simulation) -> str:
    """Say the result in words."""
    return (
        f"Simulated: {100 * result.hit_rate:.1f} % of the requests find their adapter in a slot. "
        f"{result.tokens_per_s:,.1f} tokens/s; the first token comes after {1e3 * result.first_token_s():,.0f} ms for "
        f"half of the requests, and after {1e3 * result.first_token_s(0.99):,.0f} ms for all but one in a hundred."
    )


def draw(result: Simulation, ax):
    """By when how many have their first token."""
    ax = plots.first_tokens(result, ax)
    ax.set_title(f"{100 * result.hit_rate:.1f} % in a slot, {result.tokens_per_s:,.0f} tokens/s")
    return ax


def explorer() -> Explorer:
    """The widget of the notebook."""

    def slider(name, options, value):
        return ipywidgets.SelectionSlider(options=options, value=value, description=name)

    controls = {
        "popularity": slider("Popularity", POPULARITIES[::-1], "skewed"),
        "tenants": slider("Tenants (adapters)", [25, 50, 100, 200, 400, 800], 200),
        "slots": slider("Slots (adapters)", [2, 4, 8, 16, 32, 64], 16),
        "fetch_ms": slider("Store latency (ms)", [0, 50, 100, 250, 500, 1000, 2000], 250),
    }
    return Explorer(controls, compute, read_out, draw)
