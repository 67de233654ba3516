"""DP-SGD: clipping each sample's gradient, in every execution, and what it costs (Opacus article, 2024-08-20)."""

from plpkg.clipping.gradients import clipped_gradients, plan
from plpkg.lazy import on_first_use

__all__ = [
    "accounting",
    "check_sensitivity",
    "clipped_gradients",
    "costs",
    "dataflow",
    "exercises",
    "make_private",
    "plan",
    "plots",
    "published",
    "widget",
    "zoo",
]

__getattr__ = on_first_use(
    __name__,
    accounting="training.accounting",
    make_private="training.private",
    check_sensitivity="checks.sensitivity",
    zoo="checks.zoo",
    costs="memory.costs",
    dataflow="memory.dataflow",
    published="memory.published",
    exercises="exercises",
    plots="plots",
    widget="widget",
)
