"""Adapters from a store, served over HTTP: tiers of memory, a scheduler, an OpenAI-compatible service.

The names a notebook imports; each loads on first use.
"""

from plpkg.imports import on_first_use

PLACES = dict(
    Store="store",
    Tiers="tiers",
    Scheduler="scheduler",
    Ticket="scheduler",
    Replica="replica",
    app="http.api",
    Listener="http.listener",
    Arrival="simulation",
    arrivals="simulation",
    simulate="simulation",
    exercises="exercises",
    plots="plots",
    widget="widget",
)

__all__ = [*PLACES]
__getattr__ = on_first_use(__name__, **PLACES)
