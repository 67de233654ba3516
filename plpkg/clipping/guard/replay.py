"""Replay of a step: whoever stands beside an example, what the losses function makes of it must stay the same.

Mixing leaves no trace in a graph where it has no gradient (a scale from the largest number of the batch) or happens on
the way back (a hook, an autograd function). So a step is now and then made again, in the same shapes and with the same
random numbers: one example stays where it was, and others are around it (:class:`Look`). Its loss must stay, and its
gradient.

An example *alone* would be the wrong comparison: dropout would draw other numbers, and kernels would round otherwise.

Left out: a model that gives something else whenever it is run, because it keeps a tensor of the batch before, or draws
from a generator of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import SystemRandom

import torch

from plpkg.clipping.batches import examples
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import Call
from plpkg.clipping.sites import Site

FIRST = 3
"""So many steps are made again in the beginning,"""
SELDOM = 100
"""and then one in so many."""
TOLERANCE = 1e-3
"""How far a norm may be from what it was: float32 rounds by 1e-6 where a router gives a kernel another shape."""
HALF_TOLERANCE = 0.05
"""The same in half precision."""
LOSS_ROUNDS = 1e-5
"""A loss in float32 that is farther off than this share has changed, even if it is within the tolerance by chance."""
CONFIRMED = 3
"""So often it has to fit when it is repeated, and not with others: once, random numbers of its own may do by chance."""
PROJECTIONS = 4
"""Random numbers that stand for a parameter's gradient, which need not be built."""

_RANDOM = SystemRandom()


@dataclass(frozen=True)
class Look:
    """A batch that was put together again: the example ``kept`` is where it was, and others are around it.

    ``seed`` is of the projections of its gradient.
    """

    kept: int
    among: object
    seed: int = field(default_factory=lambda: _RANDOM.randrange(2**32))


def copies(batch: object, count: int, shared: tuple[torch.Tensor, ...] = ()) -> Look:
    """One example of a batch among copies of another one; ``shared`` tensors are of all examples."""
    kept, other = _RANDOM.sample(range(count), 2)
    copied = kept if count == 2 else other  # of two examples the other one would be no change
    places = torch.full((count,), copied)
    places[kept] = kept
    return Look(kept, examples(batch, places, count, shared))


class Projections:
    """Random projections of one example's gradient, by parameter: linear, so that the uses of a parameter add up.

    A pass of the recorder's; or another one hands on each part (:meth:`add`).
    """

    def __init__(self, example: int, seed: int) -> None:
        self._example = example
        self._seed = seed
        self.found: dict[str, torch.Tensor] = {}
        self.rounds = False  # to half precision

    def wanted(self, site: Site) -> tuple[str, ...]:
        """All that learn."""
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """Project the example's part."""
        self.rounds |= precision._enabled or any(gradient.dtype.itemsize < 4 for gradient in call.gradients)
        for key, part in site.contributions(call, precision):
            self.add(key, part)

    def add(self, key: str, part: Outer | torch.Tensor) -> None:
        """Add what one use gives to the gradients of a parameter: factors, or ``(batch, *shape)``."""
        mine = part.examples([self._example]) if isinstance(part, Outer) else part[self._example]
        height = mine.shape[:1].numel()
        width = mine.shape[1:].numel()
        # The same signs in each use, and when the step is made again.
        generator = torch.Generator().manual_seed(self._seed)
        left = _signs(height, generator)
        right = _signs(width, generator)
        if isinstance(mine, Outer):
            values = mine.projected(left, right)
        else:
            matrix = mine.reshape(height, width)
            values = (left.to(mine) @ matrix * right.to(mine)).sum(1)
        self.found[key] = self.found.get(key, 0) + values.double().cpu()

    def misfit(self, other: "Projections", tolerance: float) -> bool:
        """Whether another gradient is not this one but for rounding."""
        zeros = torch.zeros(PROJECTIONS, dtype=torch.float64)  # of an expert that only one of the two batches asked
        keys = sorted(self.found.keys() | other.found.keys())
        mine = torch.cat([self.found.get(key, zeros) for key in keys])
        theirs = torch.cat([other.found.get(key, zeros) for key in keys])
        return bool((mine - theirs).norm() > tolerance * mine.norm())


def _signs(side: int, generator: torch.Generator) -> torch.Tensor:
    """Random ±1, ``(PROJECTIONS, side)``."""
    return torch.randint(2, (PROJECTIONS, side), generator=generator) * 2.0 - 1


@dataclass(frozen=True)
class Made:
    """The kept example's part of a step.

    Attributes
    ----------
    loss
        Its loss.
    gradient
        Projections of its gradient.
    random
        The generators after the losses were computed.
    """

    loss: torch.Tensor
    gradient: Projections
    random: RandomState

    def misfit(self, again: "Made") -> str:
        """A sentence about what is not as it was when the step is made ``again``; ``""`` if all is."""
        if self.random != again.random:
            return (
                "how many random numbers the model draws depends on what its examples say, so that whether it mixes "
                "them cannot be seen: draw as many for each example"
            )
        in_half = again.gradient.rounds or self.loss.dtype.itemsize < 4
        tolerance = HALF_TOLERANCE if in_half else TOLERANCE
        apart = (again.loss - self.loss).abs()
        has_another_loss = apart > tolerance * self.loss.abs()
        has_another_gradient = self.gradient.misfit(again.gradient, tolerance)
        if has_another_gradient and not in_half:
            has_another_loss |= apart > LOSS_ROUNDS * self.loss.abs()
        if has_another_loss:
            return (
                "examples are mixed: beside other examples the same one has another loss (a mean or weights of the "
                "whole batch, or a collate function that mixes or sorts them?)"
            )
        if has_another_gradient:
            return (
                "examples are mixed on the way back: beside other examples the same one has another gradient (a hook, "
                "or an autograd function?)"
            )
        return ""


def check(first: Made, make: Callable[[object], Made], look: Look, batch: object) -> None:
    """Make a step again.

    Parameters
    ----------
    first
        The kept example's part of it.
    make
        Makes the step of another batch, with the same random numbers.
    look, batch
        The batch with others around one example, and as it was.

    Raises
    ------
    ValueError
        The kept example's part is another one, or nobody can tell.
    """
    state = RandomState()
    said = []

    def misfit(batch: object) -> bool:
        sentence = first.misfit(make(batch))
        said.append(sentence)
        return bool(sentence)

    try:
        mixed = confirmed(misfit, look.among, batch)
    except Exception:  # a losses function may have any reason not to run on copies
        return
    finally:
        state.restore()
    if mixed:
        raise ValueError(said[0])


def confirmed(misfit: Callable[[object], bool], among: object, same: object) -> bool:
    """Whether what is repeated is the same each time, and beside others never."""
    return all(misfit(among) and not misfit(same) for _ in range(CONFIRMED))
