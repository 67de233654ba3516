"""Taps: identities after a layer whose backward hands on what the layer read, and its output's gradient.

A tap is a node of the graph. Each node reports once, however often its forward was run; so reuse, ties and both kinds
of gradient checkpointing come out right.

Left out: what a layer hands on in another way than by returning it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import UNITS, Call, any_layer, float_tensors, rule_for


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
    args: tuple,
    kwargs: dict,
    output,
    wanted: Callable[[Site], tuple[str, ...]],
    see: Callable[[Site, Call, torch.autocast], None],
):
    """Let a layer's output through; its backward tells what the layer read and what gradient came.

    Parameters
    ----------
    site, args, kwargs, output
        The layer, what it was called with and what it gave.
    batch
        Examples: the first dimension of each tensor of the output, or 1 for all examples alike.
    wanted
        Asked in the backward pass which of the site's parameters to report; nothing is reported for none.
    see
        Told then: the site, the call, and the precision that the forward pass ran in.

    Returns
    -------
    The output with its tensors tapped, each with a row of its own for each example; ``None``, which leaves a hook's
    output as it is, where no gradient will come.

    Raises
    ------
    ValueError
        A tensor whose first dimension is not the batch.
    NotImplementedError
        An output without a tensor.
    """
    leaves, structure = tree_flatten((args, kwargs))
    if not float_tensors(output):
        raise NotImplementedError(f"{site} gave a {type(output).__name__} without tensors that can be followed")
    for tensor in float_tensors(output):
        if tensor.ndim == 0 or tensor.shape[0] not in (1, batch):
            raise ValueError(
                f"{site} gave a tensor of shape {tuple(tensor.shape)}, whose first dimension is not "
                f"the batch of {batch}: give the layer the batch first (or 1 for all examples alike)"
            )
    if not torch.is_grad_enabled():
        return None
    results, shape = tree_flatten(output)
    places = [i for i, leaf in enumerate(results) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    # What is the same for all examples gets a gradient of its own for each of them.
    outputs = [results[i].expand(batch, *results[i].shape[1:]) for i in places]
    inputs = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    results_too = [tensor.detach() for tensor in outputs] if site.rule is any_layer else []
    device = outputs[0].device.type
    precision = dict(dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def report(saved: Sequence[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> None:
        if names := wanted(site):
            rest = iter(saved)
            filled = [next(rest) if known else other for known, other in zip(tensors, others, strict=True)]
            args, kwargs = tree_unflatten(filled, structure)
            call = Call(site.module, names, args, kwargs, gradients, batch, tuple(rest))
            see(site, call, torch.autocast(device, **precision))

    anchor = torch.zeros(0, requires_grad=True)  # so that the first layer's output has a gradient, too
    tapped = _Tap.apply(report, len(places), anchor, *outputs, *inputs, *results_too)
    for place, tensor in zip(places, tapped, strict=True):
        results[place] = tensor
    return tree_unflatten(results, shape)


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
