"""Many LoRA adapters on one backbone, in one batch: what serves them, and what trains them.

The names a notebook imports; each loads on first use.
"""

from plpkg.imports import on_first_use

PLACES = dict(
    Adapter=".adapters",
    Factors=".adapters",
    InvalidAdapterError=".adapters",
    AdapterLimits=".adapters",
    targets=".adapters",
    validate_adapter=".adapters",
    Engine="engine",
    Request="requests",
    sgmv="segments",
    merge="merging",
    unmerge="merging",
    train_many="training",
    per_person_gradients="training",
    popularity="popularity",
    exercises="exercises",
    plots="plots",
    widget="widget",
)

__all__ = [*PLACES]
__getattr__ = on_first_use(__name__, **PLACES)
