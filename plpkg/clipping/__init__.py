"""DP-SGD: clipping each sample's gradient, in every execution, and what it costs (Opacus article, 2024-08-20)."""

from plpkg.clipping import accounting, audit, costs, dataflow, published
from plpkg.clipping.audit import canary_audit, one_run_audit
from plpkg.clipping.costs import stack_costs
from plpkg.clipping.gradients import clipped_gradients, plan
from plpkg.clipping.private import make_private
from plpkg.clipping.sensitivity import check_sensitivity

__all__ = [
    "accounting",
    "audit",
    "canary_audit",
    "check_sensitivity",
    "clipped_gradients",
    "costs",
    "dataflow",
    "exercises",
    "make_private",
    "one_run_audit",
    "plan",
    "plots",
    "published",
    "recorded",
    "stack_costs",
    "widget",
    "zoo",
]


def __getattr__(name: str):
    if name in ("exercises", "plots", "recorded", "widget", "zoo"):
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
