"""Many LoRA adapters on one backbone, in one batch: what serves them, and what trains them.

The names a notebook imports; each loads on first use.
"""

from plpkg.adapters import Adapter, Factors, InvalidAdapterError, Limits, targets, validate_adapter
from plpkg.lazy import on_first_use
from plpkg.serving.merge import merge, unmerge
from plpkg.serving.sgmv import sgmv

PLACES = dict(
    Engine="engine",
    Request="requests",
    train_many="training",
    per_person_gradients="training",
    popularity="popularity",
    exercises="exercises",
    plots="plots",
    widget="widget",
)

__all__ = ["Adapter", "Factors", "InvalidAdapterError", "Limits", "targets", "validate_adapter"]
__all__ += ["merge", "sgmv", "unmerge", *PLACES]
__getattr__ = on_first_use(__name__, **PLACES)
