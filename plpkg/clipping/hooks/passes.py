"""The backward passes that make sums of clipped gradients of what the taps report (:mod:`plpkg.clipping.hooks.taps`).

:class:`NormPass` takes the norms, and the sums of what is kept until the norms are known; :class:`SumPass`, a second
backward pass, the sums that nothing was kept for.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from plpkg.clipping import factors
from plpkg.clipping.clip import Clip, check_finite
from plpkg.clipping.execution import Execution, Keep
from plpkg.clipping.factors import Outer
from plpkg.clipping.guard.replay import Projections
from plpkg.clipping.layers import Call
from plpkg.clipping.sites import Site


@dataclass(eq=False)
class ClipGroup:
    """Parameters that are scaled by one norm, to ``limit``: all of them, or a layer's."""

    limit: float
    waiting: set[str] = field(default_factory=set)  # those whose gradients are not known
    square: Any = None  # (batch,): the squared norm of the others' gradients, once there is one
    kept: dict[str, list[Outer] | torch.Tensor] = field(default_factory=dict)  # what their sums are to be made of


class NormPass:
    """The norm of each example's gradient, and the sums of what is kept.

    Parameters
    ----------
    layers
        The layer of each parameter; ``per_layer`` scales by it.
    uses
        How often each parameter's layers were called.
    clip
        The clip function.
    execution
        How it is computed, and what is kept.
    owners
        ``(batch,)``: the number of the user to whom each example belongs, if users are clipped and not examples.
    beside
        Receives each part of a gradient.

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
        self._uses = uses
        self._clip = clip
        self._execution = execution
        self._owners = owners
        self._members = None if owners is None else factors.members_of(owners)
        self._beside = beside
        limits = clip.limits(list(dict.fromkeys(layers.values())))
        groups = {name: ClipGroup(limit) for name, limit in limits.items()}
        self._groups: dict[str, ClipGroup] = {}
        for key, layer in layers.items():
            group = groups[layer if clip.local else ""]
            group.waiting.add(key)
            self._groups[key] = group
        self._arrived: dict[str, list[Outer | torch.Tensor]] = {}
        self._open: list[ClipGroup] = []  # those with a norm that is not complete
        self._closed: list[ClipGroup] = []
        self.sums: dict[str, torch.Tensor] = {}

    def wanted(self, site: Site) -> tuple[str, ...]:
        """All that learn."""
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """Collect a parameter's parts until all its uses have come."""
        for key, part in site.contributions(call, precision):
            if key not in self._groups[key].waiting:
                raise RuntimeError(f"{key} was used more often in the backward pass than its layers were called")
            if self._beside:
                self._beside.add(key, part)
            arrived = self._arrived.setdefault(key, [])
            arrived.append(part)
            if len(arrived) == self._uses[key]:
                self._settle(key)

    def finish(self, losses: torch.Tensor) -> torch.Tensor:
        """The norms before clipping, ``(batch,)``. After the pass: what has not arrived will not.

        Raises
        ------
        FloatingPointError
            An example's gradient is not finite.
        """
        for key in list(self._arrived):
            self._settle(key)
        count = len(losses) if self._members is None else len(self._members)
        norms = losses.new_zeros(count)
        squares = [group.square for group in (*self._open, *self._closed)]
        if squares:
            norms = functools.reduce(torch.add, squares).sqrt()
        check_finite(norms, 0, count)
        for group in list(self._open):
            self._close(group)
        return norms

    def _settle(self, key: str) -> None:
        """All uses of a parameter are known: its norm, and what is kept of it."""
        group = self._groups[key]
        kept, square, is_kept = self._norm_of(self._arrived.pop(key))
        if group.square is None:
            group.square = square
            self._open.append(group)
        else:
            group.square = group.square + square
        group.waiting.remove(key)
        if self._clip.local or is_kept:
            group.kept[key] = kept
        if self._clip.local and not group.waiting:
            self._close(group)

    def _norm_of(self, arrived: list[Outer | torch.Tensor]) -> tuple[list[Outer] | torch.Tensor, torch.Tensor, bool]:
        """A parameter's factors or gradients, their squared norms ``(batch,)``, and whether to keep the first."""
        outer: list[Outer] = []
        built: list[torch.Tensor] = []
        for part in map(self._of_users, arrived):
            if isinstance(part, Outer):
                outer.append(part)
            else:
                built.append(part)
        choice = self._execution.choose(outer)
        is_kept = choice.keep is not Keep.NOTHING
        if not built and choice.keep is not Keep.GRADIENT:
            return outer, factors.norms_squared(outer, choice.norm), is_kept
        if outer:
            built.append(factors.instantiate(outer))
        gradients = sum(built[1:], built[0])
        return gradients, factors.square(gradients), is_kept

    def _close(self, group: ClipGroup) -> None:
        """The norm that a group is scaled by is known: add up what was kept of it."""
        self._open.remove(group)
        self._closed.append(group)
        scale = self._clip.factors(group.square, group.limit)
        for key in list(group.kept):
            self.sums[key] = _weighted_sum(group.kept.pop(key), scale)

    def _of_users(self, part: Outer | torch.Tensor) -> Outer | torch.Tensor:
        """The gradients of users, made of their examples'."""
        if self._members is None or self._owners is None:
            return part
        if isinstance(part, Outer):
            return part.of_users(self._members)
        users = part.new_zeros(len(self._members), *part.shape[1:])
        return users.index_add_(0, self._owners.to(part.device), part)


class SumPass:
    """Adds to ``sums`` the gradients of the parameters that it lacks, an example's scaled by its factor."""

    def __init__(self, scale: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        self._scale = scale
        self._sums = sums
        self._done = set(sums)

    def wanted(self, site: Site) -> tuple[str, ...]:
        """Those without a sum when the pass begins."""
        return tuple(name for name, key in site.keys.items() if key not in self._done)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """Add up at once: the factors are known."""
        for key, part in site.contributions(call, precision):
            kept = [part] if isinstance(part, Outer) else part
            total = _weighted_sum(kept, self._scale)
            self._sums[key] = self._sums[key].add_(total) if key in self._sums else total


def _weighted_sum(kept: list[Outer] | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return torch.tensordot(weights.to(kept.dtype), kept, dims=1)
    first, *others = [use.weighted_sum(weights) for use in kept]
    return sum(others, first)
