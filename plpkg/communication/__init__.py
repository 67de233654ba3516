"""Communication: bits and round trips between a device and the cloud (notebook 01).

The names a notebook imports; ``plots``, ``widget``, ``exercises``, ``onlookers`` and ``designs`` load on first use, and
``count`` imports torch when it is called, so that a calculation needs neither torch nor matplotlib.
"""

from typing import TYPE_CHECKING

from plpkg.communication.formulas import BASELINES, full_activations, ladder, layer_cut, low_rank
from plpkg.communication.run import PHASES, Run
from plpkg.communication.schedule import (
    Message,
    count,
    ladder_messages,
    low_rank_messages,
)
from plpkg.communication.traffic import Traffic
from plpkg.communication.wire import WireBytes, on_the_wire
from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.communication import designs, exercises, onlookers, plots, widget
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "BASELINES",
    "PHASES",
    "Message",
    "Run",
    "Traffic",
    "WireBytes",
    "count",
    "designs",
    "exercises",
    "full_activations",
    "ladder",
    "ladder_messages",
    "layer_cut",
    "low_rank",
    "low_rank_messages",
    "on_the_wire",
    "onlookers",
    "plots",
    "widget",
]
