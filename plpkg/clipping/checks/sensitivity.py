"""How far one example, or one user, moves a training's update: what the noise of DP-SGD is scaled by, measured.

DP-SGD adds noise of standard deviation σ·C to a sum, because nobody's presence moves the sum by more than C
(Abadi et al., arXiv 1607.00133, Section 3.1). That is a claim about code, and code can be asked: take each example
away, and look. No noise, no statistics, no attack; a violation is seen however small it is beside the noise. (Running
neighbouring data sets through an implementation is also what Re:cord-play does, arXiv 2602.17454.)

Left out: what another batch or another C would show. One batch proves a violation; that there is none, it cannot
prove. A loss that is scaled by the other examples shows only where C is near the norms: where all are clipped, no scale
is left, and where C is far above all norms, what moves is far below C. So take several C.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plpkg.clipping.batches import batch_size, examples, named
from plpkg.results import Tabular
from plpkg.validation import number

Update = torch.Tensor | Mapping[str, torch.Tensor]
"""The tensor that noise is added to, or one for each parameter."""


@dataclass(frozen=True)
class Sensitivity(Tabular):
    """How far each example of a batch, or each user, moves the update, in units of C.

    Attributes
    ----------
    removed
        By example (or user), ‖step(batch) − step(batch without it)‖ / C.
    alone
        By example (or user), ‖step(it alone)‖ / C: how far it moves the update of nobody.
    max_grad_norm
        C.
    tolerance
        How far over C is put down to rounding, in C.
    users
        The users' ids, in the order of ``removed``; ``None`` if examples were taken away.
    """

    removed: tuple[float, ...]
    alone: tuple[float, ...]
    max_grad_norm: float
    tolerance: float
    users: tuple | None = None

    @property
    def worst(self) -> float:
        """The farthest that any example (or user) moves the update, in C."""
        return max(*self.removed, *self.alone)

    @property
    def worst_example(self) -> int:
        """The place of the (first) example that moves it so far: in the batch, of a user in :attr:`users`."""
        moved = [max(pair) for pair in zip(self.removed, self.alone, strict=True)]
        return moved.index(max(moved))

    @property
    def ok(self) -> bool:
        """Whether no example (or user) moves the update by more than C."""
        return self.worst <= 1 + self.tolerance

    @property
    def all_clipped(self) -> bool:
        """Whether each alone moves it by just C: then no scale of a loss shows, and a larger C should be tried, too."""
        return all(abs(moved - 1) <= self.tolerance for moved in self.alone)

    @property
    def unit(self) -> str:
        """``example`` or ``user``: what was taken away."""
        return "example" if self.users is None else "user"

    def rows(self) -> list[dict]:
        names = range(len(self.removed)) if self.users is None else self.users
        return [
            {self.unit: name, "taken away (C)": removed, "alone (C)": alone}
            for name, removed, alone in zip(names, self.removed, self.alone, strict=True)
        ]

    def __repr__(self) -> str:
        verdict = "ok" if self.ok else "violated"
        worst = f"{self.worst:.4g} C, by {self.unit} {self.rows()[self.worst_example][self.unit]}"
        more = "; all are clipped: try a larger C, too" if self.ok and self.all_clipped else ""
        return f"Sensitivity({verdict}: at most {worst}; C={self.max_grad_norm:g}{more})"


def check_sensitivity(
    step: Callable[..., Update],
    batch: Any,
    max_grad_norm: float,
    *,
    users: Sequence[object] | torch.Tensor | None = None,
    tolerance: float = 1e-4,
) -> Sensitivity:
    """Take each example away from a batch, and take each alone; or each user, with all examples of that user.

    Parameters
    ----------
    step
        ``step(batch)`` gives the update before noise: the sum of clipped gradients, or whatever a training adds noise
        of σ·C to. It begins from the same state in every call. Any implementation may be behind it.
    batch
        A tensor, or tensors in tuples, lists and mappings; the first dimension of each is the batch. ``step`` is
        called ``2·batch + 2`` times, with parts of it (``2·users + 2``).
    max_grad_norm
        C.
    users
        Whose each example is, ``(batch,)``: ids in a tensor or a sequence. A step that has to know them finds them in
        its batch.
    tolerance
        In C.

    Raises
    ------
    ValueError
        Bad arguments, an empty batch, not one user an example, an update that is no tensor or changes its shape, a
        step that gives another update when it is called again.
    FloatingPointError
        An update that is not finite.
    """
    number("max_grad_norm", max_grad_norm, open_low=True)
    number("tolerance", tolerance)
    count = batch_size(batch)
    if count == 0:
        raise ValueError("the batch must have at least one example, got 0")
    whole = as_vector(step(batch))
    gap = _distance(as_vector(step(batch)), whole) / max_grad_norm
    if gap > tolerance:
        raise ValueError(
            f"step gives another update when it is called again with the same batch, {gap:.4g} C away: it must begin "
            "from the same state in every call, without noise, dropout and shuffling"
        )
    members = members_of(range(count) if users is None else users, count)
    nothing = 0 * whole
    alone = [as_vector(step(examples(batch, which))) for which in members.values()]
    removed = []
    for which in members.values():
        rest = nothing  # without its only example a batch is empty, and many models cannot run on nothing
        if not which.all():
            rest = as_vector(step(examples(batch, ~which)))
        removed.append(_distance(whole, rest) / max_grad_norm)
    return Sensitivity(
        tuple(removed),
        tuple(_distance(update, nothing) / max_grad_norm for update in alone),
        max_grad_norm,
        tolerance,
        None if users is None else tuple(members),
    )


def members_of(users: Sequence | torch.Tensor, count: int) -> dict[object, torch.Tensor]:
    """By user, in the order in which they come: which of ``count`` examples are that user's, ``(batch,)`` of bool."""
    ids = named(users, count)
    members = {}
    for user in dict.fromkeys(ids):
        members[user] = torch.tensor([user == other for other in ids])
    return members


def as_vector(update: Update) -> torch.Tensor:
    """An update as one vector of float64, parameters in the order of their names.

    Raises
    ------
    ValueError
        Not a tensor, nor a mapping of some.
    FloatingPointError
        Not finite.
    """
    parts = [update[name] for name in sorted(update)] if isinstance(update, Mapping) else [update]
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        given = ", ".join(sorted({type(part).__name__ for part in parts})) or "an empty mapping"
        raise ValueError(f"step must give a tensor, or a mapping of tensors, got {given}")
    vector = torch.cat([part.detach().flatten().double() for part in parts])
    if not vector.isfinite().all():
        raise FloatingPointError("step gave an update that is not finite")
    return vector


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if len(one) != len(other):
        raise ValueError(f"step gave updates of {len(other)} and of {len(one)} numbers: it must give all parameters")
    return torch.linalg.vector_norm(one - other).item()
