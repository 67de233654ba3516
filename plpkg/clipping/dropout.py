"""Dropout that a layer draws inside of its forward, where ``torch.func`` cannot draw it again: kept, or left out."""

from collections.abc import Callable, Iterable
from types import FunctionType

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Without(TorchFunctionMode):
    """Inside, nothing is dropped."""

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self.dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # a mode does not see what a function calls: this one does
            names = dict(dropout=self.dropout, scaled_dot_product_attention=self.attention)
            names["has_torch_function"] = lambda tensors: False
            func = FunctionType(func.__code__, func.__globals__ | names, argdefs=func.__defaults__)
        return func(*args, **kwargs)

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, **options)


class Kept(Without):
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

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * self._mask(torch.ones_like(x), p) if training and p else x

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> torch.Tensor:
        if not dropout_p:
            return super().attention(q, k, v, attn_mask, is_causal=is_causal, **options)
        dropped = self._mask(q.new_ones(*q.shape[:-1], k.shape[-2]), dropout_p) != 0
        attend = torch.ops.aten._scaled_dot_product_attention_math  # the one that takes a mask
        return attend(q, k, v, attn_mask, dropout_p, is_causal, dropped, **options)[0]

    def _mask(self, ones: torch.Tensor, p: float) -> torch.Tensor:
        if self._given is not None:
            return next(self._given)
        self.masks.append(functional.dropout(ones, p))  # a mode around this one sees it
        return self.masks[-1]
