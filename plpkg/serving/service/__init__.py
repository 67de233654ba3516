"""Adapters from a store, served over HTTP: tiers of memory, a scheduler, an OpenAI-compatible service.

The names a notebook imports; each loads on first use.
"""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.serving.service import exercises, plots, widget
    from plpkg.serving.service.http.api import app
    from plpkg.serving.service.http.listener import Listener
    from plpkg.serving.service.replica import Replica
    from plpkg.serving.service.scheduler import Scheduler, Ticket
    from plpkg.serving.service.simulation import Arrival, arrivals, simulate
    from plpkg.serving.service.store import Store
    from plpkg.serving.service.tiers import Tiers
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "Arrival",
    "Listener",
    "Replica",
    "Scheduler",
    "Store",
    "Ticket",
    "Tiers",
    "app",
    "arrivals",
    "exercises",
    "plots",
    "simulate",
    "widget",
]
