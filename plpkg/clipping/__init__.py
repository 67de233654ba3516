"""DP-SGD: clipping each sample's gradient, in every execution, and what it costs (Opacus article, 2024-08-20)."""

from plpkg.clipping.gradients import clipped_gradients, plan
from plpkg.clipping.private import make_private

__all__ = ["clipped_gradients", "make_private", "plan"]
