"""Attention over other keys and values than the model's own: what ``sparse.py`` and ``offload.py`` share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plpkg.retention.watch import Units, Watch


@dataclass
class Rewriting(Watch):
    """A watch that changes what it sees.

    ``show`` returns the keys and values that attention shall use, and which pairs ``(batch, num_heads or 1, n, keys)``
    may be attended to, or ``None`` for the model's own mask.
    """

    show: Callable[[Units], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]

    def attended(self, units: Units, mask: torch.Tensor | None) -> tuple:
        keys, values, allowed = self.show(units)
        if allowed is None:
            return keys, values, mask
        zero = torch.zeros_like(allowed, dtype=units.query.dtype)  # what is added to the logits
        return keys, values, zero.masked_fill(~allowed, torch.finfo(zero.dtype).min)
