"""Many LoRA adapters on one backbone, in one batch: what serves them, and what trains them.

The names a notebook imports; each loads on first use.
"""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.adapters import Adapter, AdapterLimits, Factors, InvalidAdapterError, targets, validate_adapter
    from plpkg.serving import exercises, plots, popularity, widget
    from plpkg.serving.engine import Engine
    from plpkg.serving.merging import merge, unmerge
    from plpkg.serving.requests import Request
    from plpkg.serving.segments import sgmv
    from plpkg.serving.training import per_person_gradients, train_many
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "Adapter",
    "AdapterLimits",
    "Engine",
    "Factors",
    "InvalidAdapterError",
    "Request",
    "exercises",
    "merge",
    "per_person_gradients",
    "plots",
    "popularity",
    "sgmv",
    "targets",
    "train_many",
    "unmerge",
    "validate_adapter",
    "widget",
]
