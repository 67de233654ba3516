"""Dropout that a layer draws inside of its forward, where ``torch.func`` cannot draw it again: kept, or left out."""

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)
_MATH = torch.ops.aten._scaled_dot_product_attention_math


class Without(TorchFunctionMode):
    """Inside, nothing is dropped."""

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        if func in _DROPOUTS:
            return args[0]
        if func is functional.scaled_dot_product_attention:
            args, kwargs = _without_dropout(*args, **kwargs or {})[1:]
        return func(*args, **kwargs or {})


class Kept(TorchFunctionMode):
    """Inside, what is dropped is drawn here and kept; or, with ``masks``, taken from there.

    Attributes
    ----------
    masks
        In their order, 0 or 1 / (1 − p), in the shape of what they are multiplied with.
    """

    def __init__(self, masks: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []
        self._given = None if masks is None else iter(masks)

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            p, args, kwargs = _without_dropout(*args, **kwargs)
            if p:
                q, k, v, mask, *rest = args
                dropped = self._mask(q.new_ones(*q.shape[:-1], k.shape[-2]), p)
                return _MATH(q, k, v, mask, p, *rest[1:], dropout_mask=dropped != 0, **kwargs)[0]
        return func(*args, **kwargs)

    def _dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * self._mask(torch.ones_like(x), p) if training and p else x

    def _mask(self, ones: torch.Tensor, p: float) -> torch.Tensor:
        if self._given is not None:
            return next(self._given)
        self.masks.append(functional.dropout(ones, p))  # a mode around this one sees it
        return self.masks[-1]


def _without_dropout(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> tuple[float, tuple, dict]:
    """The dropout of an attention, and its arguments without it."""
    return dropout_p, (q, k, v, attn_mask, 0.0, is_causal), options
