"""DP-SGD: clipping each example's gradient, in every execution, and what it costs (Opacus article, 2024-08-20)."""

from plpkg.imports import on_first_use

PLACES = dict(
    clipped_gradients="gradients",
    Clip="clip",
    clip_dense="clip",
    accounting="training.accounting",
    make_private="training.make",
    PrivateTrainer="training.trainer",
    check_sensitivity="checks.sensitivity",
    conformance="checks.conformance",
    zoo="checks.zoo",
    costs="memory.costs",
    dataflow="memory.dataflow",
    published="memory.published",
    exercises="exercises",
    plots="plots",
    widget="widget",
)

__all__ = list(PLACES)
__getattr__ = on_first_use(__name__, **PLACES)
