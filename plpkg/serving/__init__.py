"""Many LoRA adapters on one backbone, in one batch: what serves them, and what trains them.

The names a notebook imports; each loads on first use.
"""

from plpkg.lazy import on_first_use

PLACES = dict(
    validate_adapter="adapter",
    InvalidAdapterError="adapter",
    Limits="adapter",
    Adapter="adapter",
    Factors="adapter",
    targets="adapter",
    merge="merge",
    unmerge="merge",
    sgmv="sgmv",
    Engine="engine",
    Request="engine",
    train_many="training",
    per_person_gradients="training",
    popularity="popularity",
    exercises="exercises",
    plots="plots",
    widget="widget",
)

__all__ = list(PLACES)
__getattr__ = on_first_use(__name__, **PLACES)
