"""DP-SGD: clipping each example's gradient, in every execution, and what it costs (Opacus article, 2024-08-20)."""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.clipping import exercises, plots, widget
    from plpkg.clipping.checks import conformance, zoo
    from plpkg.clipping.checks.sensitivity import check_sensitivity
    from plpkg.clipping.clip import Clip, clip_dense
    from plpkg.clipping.gradients import clipped_gradients
    from plpkg.clipping.memory import costs, dataflow, published
    from plpkg.clipping.training import accounting
    from plpkg.clipping.training.make import make_private
    from plpkg.clipping.training.trainer import PrivateTrainer
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "Clip",
    "PrivateTrainer",
    "accounting",
    "check_sensitivity",
    "clip_dense",
    "clipped_gradients",
    "conformance",
    "costs",
    "dataflow",
    "exercises",
    "make_private",
    "plots",
    "published",
    "widget",
    "zoo",
]
