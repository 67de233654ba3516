"""Taps behind the layers of a model, and the backward passes that take what they report.

A *tap* is an identity whose backward hands on what the layer read, and its output's gradient. From the two follow the
per-sample gradients (:mod:`plpkg.clipping.layers`), as factors where they are matrices. A *pass* takes them:
:class:`NormPass` the norms, and the sums of what is kept until the norms are known; :class:`SumPass`, a second backward
pass, the sums that nothing was kept for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from plpkg.clipping import factors
from plpkg.clipping.batches import Rows
from plpkg.clipping.clip import Clip, check_finite
from plpkg.clipping.execution import Execution
from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import Call, Site
from plpkg.clipping.replay import Projections


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
    # Copies: what comes after the layer may change its output in place, as nn.ReLU(inplace=True) does.
    again = [_by_example(rows, tensor.detach().clone(), batch) for tensor in outputs if site.is_compared]
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


@dataclass(eq=False)
class ClipGroup:
    """Parameters that are scaled by one norm, to ``limit``: all of them, or a layer's."""

    limit: float
    waiting: set[str] = field(default_factory=set)  # those whose gradients are not known
    square: torch.Tensor | None = None  # (batch,): the squared norm of the others' gradients
    kept: dict[str, list[Outer] | torch.Tensor] = field(default_factory=dict)  # what their sums are to be made of


class NormPass:
    """The norm of each example's gradient, and the sums of what is kept.

    Parameters
    ----------
    layers
        The layer of each parameter; ``per_layer`` scales by it.
    uses
        How often each parameter's layers were called.
    clip, execution
        What is done with a norm, and what is kept.
    owners
        ``(batch,)``: the number of the user to whom each example belongs, if users are clipped and not examples.
    beside
        Is told each part of a gradient.

    Attributes
    ----------
    sums
        By parameter, the sums of clipped gradients.
    """

    def __init__(
        self,
        layers: Mapping[str, str],
        uses: Mapping[str, int],
        clip: Clip,
        execution: Execution,
        owners: torch.Tensor | None = None,
        beside: Projections | None = None,
    ) -> None:
        self._uses, self._clip, self._execution, self._beside = uses, clip, execution, beside
        self._owners, self._members = owners, None if owners is None else factors.members_of(owners)
        limits = clip.limits(list(dict.fromkeys(layers.values())))
        groups = {name: ClipGroup(limit) for name, limit in limits.items()}
        self._groups = {key: groups[layer if clip.local else ""] for key, layer in layers.items()}
        for key, group in self._groups.items():
            group.waiting.add(key)
        self._arrived: dict[str, list[Outer | torch.Tensor]] = {}
        self._open: list[ClipGroup] = []  # those with a norm that is not complete
        self._closed: list[ClipGroup] = []
        self.sums: dict[str, torch.Tensor] = {}

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for key, part in site.contributions(call, precision):
            if key not in self._groups[key].waiting:
                raise RuntimeError(f"{key} was used more often in the backward pass than its layers were called")
            if self._beside:
                self._beside.add(key, part)
            self._arrived.setdefault(key, []).append(part)
            if len(self._arrived[key]) == self._uses[key]:
                self._settle(key)

    def finish(self, losses: torch.Tensor) -> torch.Tensor:
        """After the pass: what has not arrived will not. Gives the norms before clipping, ``(batch,)``.

        Raises
        ------
        FloatingPointError
            An example's gradient is not finite.
        """
        for key in list(self._arrived):
            self._settle(key)
        squares = [group.square for group in (*self._open, *self._closed)]
        count = len(losses) if self._members is None else len(self._members)
        norms = sum(squares[1:], squares[0]).sqrt() if squares else losses.new_zeros(count)
        check_finite(norms, 0, count)
        for group in list(self._open):
            self._close(group)
        return norms

    def _settle(self, key: str) -> None:
        """All uses of a parameter are known: its norm, and what is kept of it."""
        parts, group = [self._of_users(part) for part in self._arrived.pop(key)], self._groups[key]
        outer = [part for part in parts if isinstance(part, Outer)]
        built = [part for part in parts if not isinstance(part, Outer)]
        choice = self._execution.choose(outer)
        if built or choice.keep == "gradient":
            built += [factors.instantiate(outer)] if outer else []
            kept = sum(built[1:], built[0])
            square = factors.square(kept)
        else:
            kept, square = outer, factors.norms_squared(outer, choice.norm)
        if group.square is None:
            group.square = square
            self._open.append(group)
        else:
            group.square = group.square + square
        group.waiting.remove(key)
        if self._clip.local or choice.keep != "nothing":
            group.kept[key] = kept
        if self._clip.local and not group.waiting:
            self._close(group)

    def _close(self, group: ClipGroup) -> None:
        """The norm that a group is scaled by is known: add up what was kept of it."""
        self._open.remove(group)
        self._closed.append(group)
        scale = self._clip.factors(group.square, group.limit)
        for key in list(group.kept):
            self.sums[key] = _weighted_sum(group.kept.pop(key), scale)

    def _of_users(self, part: Outer | torch.Tensor) -> Outer | torch.Tensor:
        if self._members is None:
            return part
        if isinstance(part, Outer):
            return part.of_users(self._members)
        return part.new_zeros(len(self._members), *part.shape[1:]).index_add_(0, self._owners.to(part.device), part)


class SumPass:
    """Adds to ``sums`` the gradients of the parameters that it lacks, an example's scaled by its factor."""

    def __init__(self, scale: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        self._scale, self._sums, self._done = scale, sums, set(sums)

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(name for name, key in site.keys.items() if key not in self._done)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for key, part in site.contributions(call, precision):
            part = _weighted_sum([part] if isinstance(part, Outer) else part, self._scale)
            self._sums[key] = self._sums[key].add_(part) if key in self._sums else part


def _weighted_sum(kept: list[Outer] | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return torch.tensordot(weights.to(kept.dtype), kept, dims=1)
    first, *others = [use.weighted_sum(weights) for use in kept]
    return sum(others, first)
