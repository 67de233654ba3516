"""Replay of a step: whoever stands beside an example, what the model makes of it must stay the same.

Mixing leaves no trace in a graph where it has no gradient (a scale from the largest number of the batch) or happens on
the way back (a hook, an autograd function). So a step is now and then made again, in the same shapes and with the same
random numbers: one example stays where it was, and copies of another one replace all others. The kept example's rows of
the model's outputs must stay, its loss, and its gradient, given the same gradients at the outputs.

An example *alone* would be the wrong comparison: dropout would draw other numbers, and kernels would round otherwise.

The losses are computed again, too, from a batch that was put together anew (:class:`Look`).

Left out: a model that gives something else whenever it is run, because it draws from a generator of its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom

import torch
from torch import nn

from plpkg.clipping.batches import behind, examples, float_tensors
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import Call, Site
from plpkg.clipping.mixing import Guard, Probe, without_gradients

FIRST, SELDOM = 3, 100
"""The steps that are made again: the first ones, then one in so many."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05
"""How far a norm may be from what it was: float32 rounds by 1e-6 where a router gives a kernel another shape."""
CONFIRMED = 3
"""So often it has to fit when it is repeated, and not with others: once, random numbers of its own may do by chance."""
PROJECTIONS = 4
"""Random numbers that stand for a parameter's gradient, which need not be built."""

_RANDOM = SystemRandom()


class Projections:
    """Random projections of one example's gradient, by parameter: linear, so that the uses of a parameter add up.

    A pass of the recorder's, or told of each part by another one.
    """

    def __init__(self, example: int, seed: int) -> None:
        self._example, self._seed = example, seed
        self.found: dict[str, torch.Tensor] = {}

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
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


@dataclass
class _Forward:
    """A forward pass: what the model was called with, what it gave the kept example, and what gradients came back."""

    args: tuple
    kwargs: dict
    known: Probe
    precision: torch.autocast
    before: RandomState
    after: RandomState | None = None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)  # by output
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by output, of all examples


class Replay:
    """A step that will be made again.

    Attributes
    ----------
    kept
        The place of the example that stays where it is.
    among
        ``(batch,)``: whose copy each place has then.
    """

    def __init__(self, batch: int) -> None:
        self.kept, other = _RANDOM.sample(range(batch), 2)
        self.among = torch.full((batch,), self.kept if batch == 2 else other)
        self.among[self.kept] = self.kept
        self._seed = _RANDOM.randrange(2**32)
        self._first: Projections | None = None
        self._forwards: list[_Forward] = []
        self._given: tuple[list[torch.Tensor], RandomState] | None = None  # by a pass that is made again

    def projections(self) -> Projections:
        """Those of the kept example's gradient, to be told by the pass that computes the norms."""
        self._first = Projections(self.kept, self._seed)
        return self._first

    def begin(self, args: tuple, kwargs: dict, known: Probe, device: str) -> None:
        """The model is called."""
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        precision = torch.autocast(device, dtype=dtype, enabled=enabled)
        self._forwards.append(_Forward(args, kwargs, known, precision, RandomState()))

    def end(self, output: object) -> None:
        """The model has given its output, for the first time or again."""
        given, forward = float_tensors(output), self._forwards[-1]
        if forward.after is not None:
            self._given = given, RandomState()
            return
        forward.after = RandomState()
        for place, tensor in enumerate(given):
            if place in forward.known.outputs:
                forward.rows[place] = tensor[self.kept].detach().clone()
            if tensor.requires_grad:
                tensor.register_hook(partial(_keep, forward.gradients, place))

    def check(self, model: nn.Module, guard: Guard, passing: Callable[[Projections], AbstractContextManager]) -> None:
        """After the backward pass: make the step again.

        Parameters
        ----------
        model, guard
            Of the recorder whose step it is.
        passing
            Within it, what the model's layers report goes to the pass that it is given.

        Raises
        ------
        ValueError
            The kept example's part is another one, or nobody can tell.
        """
        state = RandomState()
        try:
            for _ in range(CONFIRMED):
                misfit = self._misfit(self.among, model, guard, passing)
                if not misfit or self._misfit(torch.arange(len(self.among)), model, guard, passing):
                    return  # it fits, or it does not repeat itself: nothing can be told
        except Exception:  # a model may have any reason not to run on copies
            return
        finally:
            state.restore()
        raise ValueError(misfit)

    def _misfit(self, index: torch.Tensor, model: nn.Module, guard: Guard, passing: Callable) -> str:
        """What is not as it was when the model is run on these examples, or ``""``."""
        batch, again = len(index), Projections(self.kept, self._seed)
        tolerance = TOLERANCE
        for forward in self._forwards:
            if not forward.gradients:
                continue
            guard.known = forward.known
            shared = forward.known.shared(forward.args, forward.kwargs)
            args, kwargs = (examples(each, index, batch, shared) for each in (forward.args, forward.kwargs))
            forward.before.restore()
            with passing(again):
                with forward.precision:
                    model(*args, **kwargs)
                given, after = self._given
                # What is on the way to another output has the gradient that came from there in its own.
                within = set(behind(*(n for p in forward.gradients for n, _ in given[p].grad_fn.next_functions)))
                last = {
                    given[p]: g[index] if p in forward.known.outputs else g
                    for p, g in forward.gradients.items()
                    if given[p].grad_fn not in within
                }
                torch.autograd.backward(list(last), list(last.values()))
            if after != forward.after:
                return (
                    "how many random numbers the model draws depends on what its examples say, so that whether it "
                    "mixes them cannot be seen: draw as many for each example"
                )
            half = forward.precision._enabled or any(given[place].dtype.itemsize < 4 for place in forward.rows)
            tolerance = HALF_TOLERANCE if half else tolerance
            for place, row in forward.rows.items():
                if (given[place][self.kept] - row).norm() > tolerance * row.norm():
                    return "examples are mixed: beside other examples the model gives something else for the same one"
        if self._first.misfit(again, tolerance):
            return (
                "examples are mixed on the way back: beside other examples the same one has another gradient (a hook, "
                "or an autograd function?)"
            )
        return ""


@dataclass(frozen=True)
class Look:
    """A batch that was put together again: the example ``kept`` is where it was, and others are around it."""

    kept: int
    among: object


def check_losses_alike(
    losses: torch.Tensor, losses_of: Callable[[object], torch.Tensor], batch: object, look: Look, before: RandomState
) -> None:
    """Compute the losses again, with others around one example.

    Parameters
    ----------
    losses
        ``(batch,)``, of ``batch``.
    losses_of
        Gives a batch's losses.
    look
        What to compare with.
    before
        The generators' state when ``losses`` were computed.

    Raises
    ------
    ValueError
        The kept example has another loss.
    """
    state = RandomState()

    def misfit(batch: object) -> bool:
        before.restore()
        with without_gradients():
            loss, was = losses_of(batch)[look.kept], losses.detach()[look.kept]
        return bool((loss - was).abs() > (HALF_TOLERANCE if was.dtype.itemsize < 4 else TOLERANCE) * was.abs())

    try:
        mixed = confirmed(misfit, look.among, batch)
    except Exception:  # a losses function may have any reason not to run on copies
        return
    finally:
        state.restore()
    if mixed:
        raise ValueError(
            "examples are mixed: beside other examples the same one has another loss (a mean or weights of the whole "
            "batch, or a collate function that mixes or sorts them?)"
        )


def confirmed(misfit: Callable[[object], bool], among: object, same: object) -> bool:
    """Whether what is repeated is the same each time, and beside others never."""
    return all(misfit(among) and not misfit(same) for _ in range(CONFIRMED))


def _keep(gradients: dict[int, torch.Tensor], place: int, gradient: torch.Tensor) -> None:
    gradients[place] = gradient
