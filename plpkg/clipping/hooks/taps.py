"""Taps behind the layers of a model: what a layer read, and its output's gradient, reported on the way back.

A *tap* is an identity whose backward hands on both. From the two follow the per-sample gradients
(:mod:`plpkg.clipping.layers`), as factors where they are matrices. A :class:`Pass` takes them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from plpkg.clipping.batches import Rows, is_float
from plpkg.clipping.layers import Call
from plpkg.clipping.sites import Site


class Pass(Protocol):
    """A backward pass over a model with taps."""

    def wanted(self, site: Site) -> tuple[str, ...]:
        """The site's parameters that are asked for, by their names in the layer; for none it does not report."""
        ...

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """Take a call of the site, from which the gradients follow; ``precision`` is that of the forward pass."""


@dataclass(frozen=True)
class Forward:
    """A call of a layer, seen from its forward pass.

    Attributes
    ----------
    site, args, kwargs, output
        The layer, what it was called with, and what it gave.
    masks
        The dropout masks that it drew.
    batch, rows
        Examples, and which rows of the output are theirs.
    """

    site: Site
    args: tuple
    kwargs: dict
    output: object
    masks: Sequence[torch.Tensor]
    batch: int
    rows: Rows


def tap(
    forward: Forward,
    wanted: Callable[[Site], tuple[str, ...]],
    report: Callable[[Site, Call, torch.autocast], None],
):
    """Let a layer's output through; its backward tells what the layer read and what gradient came.

    Parameters
    ----------
    forward
        The call.
    wanted, report
        Asked, and then told, in the backward pass: as :meth:`Pass.wanted` and :meth:`Pass.report`.

    Returns
    -------
    The output with its tensors tapped, each with rows of its own for each example; ``None``, which leaves a hook's
    output as it is, where no gradient will come.
    """
    if not torch.is_grad_enabled():
        return None
    site, batch, rows = forward.site, forward.batch, forward.rows
    results, structure = tree_flatten(forward.output)
    places = [place for place, leaf in enumerate(results) if is_float(leaf)]
    # What is the same for all examples gets a gradient of its own for each of them.
    outputs = [rows.given(results[place], batch) for place in places]
    arguments = _Arguments(forward.args, forward.kwargs)
    inputs = [tensor.detach() for tensor in _tensors((forward.args, forward.kwargs))]
    copies = []
    if site.is_compared:
        # Copies: what comes after the layer may change its output in place, as nn.ReLU(inplace=True) does.
        copies = [_by_example(rows, output.detach().clone(), batch) for output in outputs]
    device = outputs[0].device.type
    precision = torch.get_autocast_dtype(device)
    is_autocast = torch.is_autocast_enabled(device)
    saved_tensors = [*inputs, *copies, *forward.masks]
    # Numbers alone: the backward keeps this function alive, and checkpointing is to drop the tensors.
    first_copy = len(inputs)
    first_mask = first_copy + len(copies)

    def on_backward(saved: Sequence[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> None:
        names = wanted(site)
        if not names:
            return
        args, kwargs = arguments.with_tensors(saved[:first_copy])
        call = Call(
            site.module,
            names,
            args,
            kwargs,
            tuple(_by_example(rows, gradient, batch) for gradient in gradients),
            batch,
            rows,
            outputs=tuple(saved[first_copy:first_mask]),
            masks=tuple(saved[first_mask:]),
        )
        report(site, call, torch.autocast(device, dtype=precision, enabled=is_autocast))

    anchor = torch.zeros(0, requires_grad=True)  # so that the first layer's output has a gradient, too
    tapped = _Tap.apply(on_backward, len(outputs), anchor, *outputs, *saved_tensors)
    for place, output in zip(places, tapped, strict=True):
        results[place] = output
    return tree_unflatten(results, structure)


class _Tap(torch.autograd.Function):
    """Hands on the first ``count`` tensors as they are, and reports in the backward pass. The others are saved."""

    @staticmethod
    def forward(ctx, report, count, anchor, *tensors):
        handed_on = tensors[:count]
        saved = tensors[count:]
        ctx.report = report
        ctx.num_saved = len(saved)
        ctx.save_for_backward(*saved)  # lets checkpointing recompute them
        return tuple(tensor.detach() for tensor in handed_on)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.report(ctx.saved_tensors, gradients)
        of_saved = [None] * ctx.num_saved
        return None, None, None, *gradients, *of_saved


class _Arguments:
    """The arguments of a call but for the tensors, which are saved elsewhere."""

    def __init__(self, args: tuple, kwargs: dict) -> None:
        leaves, self._structure = tree_flatten((args, kwargs))
        self._leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple, dict]:
        """All arguments, with these tensors in their order."""
        left = iter(tensors)
        leaves = [next(left) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._structure)


_TENSOR = object()


def _tensors(arguments: tuple[tuple, dict]) -> list[torch.Tensor]:
    leaves, _ = tree_flatten(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _by_example(rows: Rows, given: torch.Tensor, batch: int) -> torch.Tensor:
    return given if rows.shared else rows.by_example(given, batch)
