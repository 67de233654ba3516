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
from plpkg.clipping.layers import Call, Site

FIRST, SELDOM = 3, 100
"""The steps that are made again: the first ones, then one in so many."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05
"""How far a norm may be from what it was: float32 rounds by 1e-6 where a router gives a kernel another shape."""
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
    among = torch.full((count,), kept if count == 2 else other)
    among[kept] = kept
    return Look(kept, examples(batch, among, count, shared))


class Projections:
    """Random projections of one example's gradient, by parameter: linear, so that the uses of a parameter add up.

    A pass of the recorder's, or told of each part by another one.
    """

    def __init__(self, example: int, seed: int) -> None:
        self._example, self._seed = example, seed
        self.found: dict[str, torch.Tensor] = {}
        self.rounds = False  # to half precision

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        self.rounds |= precision._enabled or any(gradient.dtype.itemsize < 4 for gradient in call.gradients)
        for key, part in site.contributions(call, precision):
            self.add(key, part)

    def add(self, key: str, part: Outer | torch.Tensor) -> None:
        """Add what one use gives to the gradients of a parameter: factors, or ``(batch, *shape)``."""
        part = part.examples([self._example]) if isinstance(part, Outer) else part[self._example]
        sides = part.shape[:1].numel(), part.shape[1:].numel()
        generator = torch.Generator().manual_seed(self._seed)  # the same signs in each use, and when it is made again
        left, right = (torch.randint(2, (PROJECTIONS, side), generator=generator) * 2.0 - 1 for side in sides)
        if isinstance(part, Outer):
            values = part.projected(left, right)
        else:
            values = (left.to(part) @ part.reshape(sides) * right.to(part)).sum(1)
        self.found[key] = self.found.get(key, 0) + values.double().cpu()

    def misfit(self, other: "Projections", tolerance: float) -> bool:
        """Whether another gradient is not this one but for rounding."""
        zeros = torch.zeros(PROJECTIONS, dtype=torch.float64)  # of an expert that only one of the two batches asked
        keys = sorted(self.found.keys() | other.found.keys())
        mine, theirs = (torch.cat([each.found.get(key, zeros) for key in keys]) for each in (self, other))
        return bool((mine - theirs).norm() > tolerance * mine.norm())


@dataclass(frozen=True)
class Made:
    """What a step made of the kept example.

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
        """What is not as it was when it was made ``again``, or ``""``."""
        if self.random != again.random:
            return (
                "how many random numbers the model draws depends on what its examples say, so that whether it mixes "
                "them cannot be seen: draw as many for each example"
            )
        tolerance = HALF_TOLERANCE if again.gradient.rounds or self.loss.dtype.itemsize < 4 else TOLERANCE
        if (again.loss - self.loss).abs() > tolerance * self.loss.abs():
            return (
                "examples are mixed: beside other examples the same one has another loss (a mean or weights of the "
                "whole batch, or a collate function that mixes or sorts them?)"
            )
        if self.gradient.misfit(again.gradient, tolerance):
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
        What it made.
    make
        Makes the step of another batch, with the same random numbers.
    look, batch
        The batch with others around one example, and as it was.

    Raises
    ------
    ValueError
        The kept example's part is another one, or nobody can tell.
    """
    state, said = RandomState(), []

    def misfit(batch: object) -> bool:
        said.append(first.misfit(make(batch)))
        return bool(said[-1])

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
