"""Backward passes: what is done with the gradients that a model's layers report.

Each has ``wanted(site)``, the names of a layer's parameters whose gradients it asks for, and ``report(site, call,
precision)``, which is told them. A step of DP-SGD has up to three: :class:`RowPass` checks that rows are examples,
:class:`NormPass` takes the norms and keeps what the sums need, :class:`SumPass` adds up what nothing was kept for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from plpkg.clipping import factors
from plpkg.clipping.clip import Clip, check_finite
from plpkg.clipping.execution import Execution
from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import Call
from plpkg.clipping.taps import Site


class RowPass:
    """The losses of some examples, ``half`` of ``(batch,)``, reach their own rows of every layer, and no others."""

    def __init__(self, half: torch.Tensor) -> None:
        self._half = half

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for gradient in call.gradients:
            others = gradient[~self._half.to(gradient.device)]
            if not others.any():
                continue
            # What is not finite is refused with its norm.
            reached = (others.isfinite() & (others != 0)).flatten(1).any(1)
            if reached.any():
                rows = (~self._half).nonzero().flatten()[reached.cpu()].tolist()
                raise ValueError(
                    f"{site}: the losses of examples {self._half.nonzero().flatten().tolist()} depend on row {rows[0]} "
                    f"of what it gave, of shape {tuple(gradient.shape)}: examples are mixed, or the rows are not the "
                    "examples"
                )


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
    loss_scale
        What the losses were multiplied with.

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
        loss_scale: float = 1.0,
    ) -> None:
        self._uses, self._clip, self._execution, self._loss_scale = uses, clip, execution, loss_scale
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
        choice = self._execution.choose(key, outer, sum(part.nbytes for part in built))
        if built or choice.keep == "gradient":
            built += [factors.instantiate(outer)] if outer else []
            kept = sum(built[1:], built[0])
            square = factors.square(kept)
        else:
            kept, square = outer, factors.norms_squared(outer, choice.norm)
        square = square / self._loss_scale**2
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
        scale = self._clip.factors(group.square, group.limit) / self._loss_scale
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

    def __init__(self, scale: torch.Tensor, sums: dict[str, torch.Tensor], seen: Callable | None) -> None:
        self._scale, self._sums, self._done, self._seen = scale, sums, set(sums), seen

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(name for name, key in site.keys.items() if key not in self._done)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for key, part in site.contributions(call, precision):
            if self._seen:
                self._seen(key)
            part = _weighted_sum([part] if isinstance(part, Outer) else part, self._scale)
            self._sums[key] = self._sums[key].add_(part) if key in self._sums else part


def _weighted_sum(kept: list[Outer] | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return torch.tensordot(weights.to(kept.dtype), kept, dims=1)
    first, *others = [use.weighted_sum(weights) for use in kept]
    return sum(others, first)
