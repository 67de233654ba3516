"""Taps: identities after a layer whose backward hands on what the layer read, and its output's gradient.

A tap is a node of the graph. Each node reports once, however often its forward was run; so reuse, ties and both kinds
of gradient checkpointing come out right.

Left out: what a layer hands on in another way than by returning it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import UNITS, Call, any_layer, rule_for
from plpkg.clipping.rows import Rows


@dataclass(frozen=True)
class Site:
    """A layer with parameters that learn: ``keys`` maps their names in the layer to their names in the model."""

    name: str
    module: nn.Module
    rule: Callable
    keys: dict[str, str]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.module.get_parameter(name) for name in self.keys]

    def contributions(self, call: Call, precision: torch.autocast) -> Iterator[tuple[str, Outer | torch.Tensor]]:
        """What a call adds to each parameter's per-sample gradients, by the parameter's name in the model."""
        try:
            with precision:  # a rule may run the layer; sums and norms are not for autocast to round
                parts = self.rule(call)
        except (NotImplementedError, ValueError) as error:
            raise type(error)(f"{self}: {error}") from error
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                part = part.to(torch.promote_types(part.dtype, torch.float32))
            yield self.keys[name], part

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"


def sites(model: nn.Module, names: Mapping[int, str]) -> list[Site]:
    """The layers that own the parameters that learn, in the model's order.

    Parameters
    ----------
    names
        The learning parameters' names by their ``id``.
    """
    learning, covered = [], set()
    for name, module in model.named_modules():
        if module in covered:
            continue
        unit = isinstance(module, UNITS)
        keys = {n: names[id(p)] for n, p in module.named_parameters(recurse=unit) if id(p) in names}
        if unit:
            covered |= set(module.modules())
        else:  # what a layer below owns as well is counted there
            below = {id(p) for child in module.children() for p in child.parameters()}
            keys = {n: key for n, key in keys.items() if id(module._parameters[n]) not in below}
        if keys:
            learning.append(Site(name, module, any_layer if unit else rule_for(module), keys))
    return learning


def tap(
    site: Site,
    batch: int,
    rows: Rows,
    args: tuple,
    kwargs: dict,
    output,
    masks: Sequence[torch.Tensor],
    wanted: Callable[[Site], tuple[str, ...]],
    see: Callable[[Site, Call, torch.autocast], None],
):
    """Let a layer's output through; its backward tells what the layer read and what gradient came.

    Parameters
    ----------
    site, args, kwargs, output, masks
        The layer, what it was called with, what it gave, and what it dropped.
    batch, rows
        Examples, and which rows of the output are theirs.
    wanted
        Asked in the backward pass which of the site's parameters to report; nothing is reported for none.
    see
        Told then: the site, the call, and the precision that the forward pass ran in.

    Returns
    -------
    The output with its tensors tapped, each with rows of its own for each example; ``None``, which leaves a hook's
    output as it is, where no gradient will come.
    """
    if not torch.is_grad_enabled():
        return None
    leaves, structure = tree_flatten((args, kwargs))
    results, shape = tree_flatten(output)
    places = [i for i, leaf in enumerate(results) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    # What is the same for all examples gets a gradient of its own for each of them.
    outputs = [rows.given(results[i], batch) for i in places]
    inputs = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    again = [_by_example(rows, tensor.detach(), batch) for tensor in outputs] if site.rule is any_layer else []
    device = outputs[0].device.type
    precision = dict(dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def report(saved: Sequence[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> None:
        if names := wanted(site):
            rest = iter(saved)
            filled = [next(rest) if known else other for known, other in zip(tensors, others, strict=True)]
            args, kwargs = tree_unflatten(filled, structure)
            gave, dropped = tuple(islice(rest, len(again))), tuple(rest)
            by_example = tuple(_by_example(rows, gradient, batch) for gradient in gradients)
            call = Call(site.module, names, args, kwargs, by_example, batch, rows, gave, dropped)
            see(site, call, torch.autocast(device, **precision))

    anchor = torch.zeros(0, requires_grad=True)  # so that the first layer's output has a gradient, too
    tapped = _Tap.apply(report, len(places), anchor, *outputs, *inputs, *again, *masks)
    for place, tensor in zip(places, tapped, strict=True):
        results[place] = tensor
    return tree_unflatten(results, shape)


def _by_example(rows: Rows, given: torch.Tensor, batch: int) -> torch.Tensor:
    return given if rows.shared else rows.by_example(given, batch)


class _Tap(torch.autograd.Function):
    """Hands on the first ``count`` tensors as they are, and reports in the backward pass. The others are saved."""

    @staticmethod
    def forward(ctx, report, count, anchor, *tensors):
        ctx.report, ctx.others = report, len(tensors) - count
        ctx.save_for_backward(*tensors[count:])  # lets checkpointing recompute them
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients):
        ctx.report(ctx.saved_tensors, gradients)
        return None, None, None, *gradients, *[None] * ctx.others
