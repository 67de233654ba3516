"""Random numbers that a layer draws inside of its forward: kept, left out, or drawn again."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
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
        return func(*args, **kwargs)

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, **options)


DRAWS = (
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli),
    *(torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
)
"""Functions that layers draw from beside dropout: for the depth of a network (drop path), or noise."""


class Kept(Without):
    """Inside, what is drawn is kept, since ``torch.func`` cannot draw it again; or, with ``masks``, taken from there.

    Attributes
    ----------
    masks
        In their order: of dropout 0 or 1 / (1 − p), in the shape of what they are multiplied with.
    """

    def __init__(self, masks: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []
        self._given = None if masks is None else iter(masks)

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or not p:
            return x
        return x * self._mask(torch.ones_like(x), p)

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> torch.Tensor:
        if not dropout_p:
            return super().attention(q, k, v, attn_mask, is_causal=is_causal, **options)
        scores = q.new_ones(*q.shape[:-1], k.shape[-2])  # (batch, heads, queries, keys)
        kept = self._mask(scores, dropout_p) != 0
        attend = torch.ops.aten._scaled_dot_product_attention_math  # the one that takes a mask
        output, _ = attend(q, k, v, attn_mask, dropout_p, is_causal, kept, **options)
        return output

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        if func in DRAWS:
            return self._drawn(func, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _mask(self, ones: torch.Tensor, p: float) -> torch.Tensor:
        return self._drawn(functional.dropout, ones, p)  # a mode around this one sees it

    def _drawn(self, draw: Callable, *args, **options) -> torch.Tensor:
        if self._given is not None:
            return next(self._given).clone()  # the layer may change it in place, and be run again
        drawn = draw(*args, **options)
        self.masks.append(drawn.clone())
        return drawn


def each_example(drawn: torch.Tensor, batch: int) -> torch.Tensor:
    """Numbers drawn for a batch, or for all examples together, by example: ``(batch, …)``."""
    if drawn.ndim and len(drawn) % batch == 0:
        return drawn.unflatten(0, (batch, -1))
    return drawn.expand(batch, *drawn.shape)


class RandomState:
    """The states of Python's, NumPy's and PyTorch's generators."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Let them go on from here."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def __eq__(self, other: object) -> bool:
        """Whether the same would be drawn next."""
        if not isinstance(other, RandomState) or self._python != other._python:
            return False
        mine = (*self._numpy, self._torch, *self._cuda)
        theirs = (*other._numpy, other._torch, *other._cuda)
        return all(map(np.array_equal, mine, theirs))


@contextmanager
def untouched() -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again afterwards."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()
