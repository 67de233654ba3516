"""Which example owns each row of a layer's output: the model is run on one example and on two.

Shapes do not tell the owner of a row: there may be as many positions as examples. So the model is run without gradients
and without dropout. What grows from one example to two belongs to the examples; what stays, made of the same input,
depends on none of them: positions, ``embedding(torch.arange(T))``. Such rows are then repeated for each example: the
model's output must stay the same.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from plpkg.clipping.batches import EVERYBODYS, OWN, Rows, alike, examples, float_tensors, is_float, leaves
from plpkg.clipping.dropout import Without, untouched
from plpkg.clipping.sites import LOOP_TAKES_IT

MIXED = 0.01
"""How far the norm of what is given for an example may be from what it is for the example alone, relatively."""
MIXED_HALF = 0.1
"""The same in half precision."""


class _LayerCall(NamedTuple):
    given: list[torch.Tensor]
    read: list[torch.Tensor]


@dataclass(frozen=True)
class _Run:
    """A run of the model on some examples: what it gave, and by layer its calls."""

    given: list[torch.Tensor]
    calls: dict[str, list[_LayerCall]]


@dataclass(frozen=True)
class _Inputs:
    """A model and its inputs for a batch. ``shared`` tensors are everybody's, though they are as long as the batch."""

    forward: Callable
    args: tuple
    kwargs: dict
    batch: int
    shared: tuple[torch.Tensor, ...] = ()

    def run(self, count: int) -> object:
        """The model's output for so many of the examples."""
        index = torch.arange(count) % self.batch
        args = examples(self.args, index, self.batch, self.shared)
        kwargs = examples(self.kwargs, index, self.batch, self.shared)
        return self.forward(*args, **kwargs)

    def tensors(self) -> list[torch.Tensor]:
        return leaves([*self.args, self.kwargs])

    def with_shared(self) -> Iterator["_Inputs"]:
        """These inputs, and the same with one or two tensors that are taken whole.

        A tensor as long as the batch may be everybody's, as a mask (seq, seq) is: the model then runs with it whole,
        and not with a part. (What examples are mixed with could be cut as they are.)
        """
        yield self
        long = [tensor for tensor in self.tensors() if tensor.ndim and len(tensor) == self.batch]
        for count in (1, 2):
            if len(long) > count:
                for some in combinations(long, count):
                    yield replace(self, shared=some)


class Probe:
    """Finds the rows of a model's layers. While it runs, :meth:`see` is told each call of a layer.

    Attributes
    ----------
    found
        By layer, the rows of its calls; none if they follow from nothing.
    """

    def __init__(self) -> None:
        self.found: dict[str, set[Rows]] = {}
        self._calls: dict[str, list[_LayerCall]] = {}  # of the run under way

    def run(self, forward: Callable, args: tuple, kwargs: dict, batch: int) -> None:
        """Run a model on one and on two of a batch's examples; nothing is found if it cannot be.

        Raises
        ------
        ValueError
            Examples are mixed, or the model does not take what is shared once for each example.
        """
        runs = self._on_one_and_two(_Inputs(forward, args, kwargs, batch))
        if runs is None:
            return
        inputs, one, two = runs
        if _mixed(one.given, two.given) and not self._draws(inputs, one):
            raise _mixing(inputs, one, two)
        self.found = {name: _rows(one.calls.get(name, []), calls) for name, calls in two.calls.items()}
        shared = [name for name, calls in self.found.items() if any(rows.shared for rows in calls)]
        if not shared or self._gives_again(inputs, two):
            return
        found = self.found
        self.found = {name: _apart(calls) for name, calls in found.items()}
        if self.found != found and self._gives_again(inputs, two):
            return
        self.found = found
        raise ValueError(
            f"{shared[0]} gives the same for all examples, and the model does not take it once for each: their "
            "gradients cannot be told apart: freeze the layer, or take execution='loop'"
        )

    def _on_one_and_two(self, inputs: _Inputs) -> tuple[_Inputs, _Run, _Run] | None:
        """The first inputs that the model runs on, and its runs on one example and on two."""
        for candidate in inputs.with_shared():
            try:
                one = self._run(candidate, 1)
                two = self._run(candidate, 2)
            except Exception:  # a model may have any reason not to run on so few
                continue
            if not candidate.shared or _counts_examples(one, two):
                return candidate, one, two
        return None

    def _run(self, inputs: _Inputs, count: int, seed: int | None = None) -> _Run:
        self._calls = {}
        try:
            with untouched(), without_gradients(), Without():
                if seed is not None:
                    torch.manual_seed(seed)
                output = inputs.run(count)
            return _Run(float_tensors(output), self._calls)
        finally:
            self._calls = {}

    def _draws(self, inputs: _Inputs, one: _Run) -> bool:
        """Whether the model gives something else for one example with other random numbers."""
        return any(_mixed(one.given, self._run(inputs, 1, seed).given) for seed in (0, 1))

    def _gives_again(self, inputs: _Inputs, two: _Run) -> bool:
        """Whether the model gives the same where shared rows are given once for each example (:meth:`see`)."""
        try:
            again = self._run(inputs, 2)
            return all(map(alike, two.given, again.given))
        except Exception:  # shapes that do not go together, in whatever words
            return False

    def see(self, name: str, read: Sequence[torch.Tensor], output):
        """A layer was called. Gives its output, what is shared once for each example if that is known."""
        given = float_tensors(output)
        self._calls.setdefault(name, []).append(_LayerCall(given, list(read)))
        fitting = [rows for rows in self.found.get(name, ()) if all(rows.fit(tensor, 2) for tensor in given)]
        rows = fitting[0] if fitting else OWN
        return tree_map(lambda leaf: rows.given(leaf, 2) if is_float(leaf) else leaf, output)

    def rows(self, name: str, given: Sequence[torch.Tensor], read: int, batch: int) -> Rows:
        """The rows of what a layer gave for a batch, when it had read so many tensors.

        Raises
        ------
        ValueError
            They are not what was found; or, where nothing was, neither the examples nor one for all of them.
        """
        known = self.found.get(name, (OWN, EVERYBODYS))
        fitting = [rows for rows in known if all(rows.fit(tensor, batch) for tensor in given)]
        # A cell may have a state to read only after its first call.
        of_this_call = [rows for rows in fitting if rows.own is None or len(rows.own) == read]
        fitting = of_this_call or fitting
        if len(fitting) == 1 or (fitting and batch == 1):
            return fitting[0]
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in given)
        raise ValueError(
            f"{name} gave a tensor of shape {shapes}, whose first dimension is neither the batch of {batch}, once or "
            "several times, nor the same for all examples (time first, or tokens routed by what they say?): give the "
            f"layer the batch first; {LOOP_TAKES_IT}"
        )


@contextmanager
def without_gradients() -> Iterator[None]:
    """As ``torch.no_grad``; reentrant checkpointing warns that there are none."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
        yield


def _counts_examples(one: _Run, two: _Run) -> bool:
    """Whether the model gave something for one example, and for two tensors of length two."""
    return bool(two.given) and all(x.ndim and len(x) == 2 for x in two.given) and all(map(len, one.given))


def _mixing(inputs: _Inputs, one: _Run, two: _Run) -> ValueError:
    """The error that names the first layer in which examples are mixed, and an input without the batch first."""
    layer = ""
    for name, calls in two.calls.items():
        if name in one.calls and _mixed(one.calls[name][0].given, calls[0].given):
            layer = f", by {name} at the latest"
            break
    otherwise = ""
    remedy = ""
    for tensor in inputs.tensors():
        if tensor.ndim and len(tensor) not in (1, inputs.batch):
            otherwise = f", or they are not along the first dimension of a tensor of shape {tuple(tensor.shape)}"
            remedy = f"; {LOOP_TAKES_IT}"
            break
    return ValueError(
        f"examples are mixed{layer}{otherwise}: the model gives something else for one that stands beside another, "
        f"whose numbers it takes, perhaps without a gradient{remedy}"
    )


def _mixed(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    """Whether the first half of what was given for two examples is not what was given for the first alone."""
    for alone, both in zip(one, two, strict=False):
        if not alone.ndim or alone.shape[1:] != both.shape[1:]:
            continue
        count = len(alone)
        if _length(both) not in (count, 2 * count):
            continue
        half = alone.dtype.itemsize < 4 or torch.is_autocast_enabled(alone.device.type)
        tolerance = MIXED_HALF if half else MIXED
        moved = (alone - both[:count]).float().norm()
        if moved > tolerance * alone.float().norm():
            return True
    return False


def _rows(one: list[_LayerCall], two: list[_LayerCall]) -> set[Rows]:
    """The rows of a layer that was called so for one example and for two; none if a call says nothing."""
    if len(one) != len(two):
        return set()
    rows = set()
    for alone, both in zip(one, two, strict=True):
        of_call = _rows_of_call(alone, both)
        if of_call is None:
            return set()
        rows.add(of_call)
    return rows


def _rows_of_call(alone: _LayerCall, both: _LayerCall) -> Rows | None:
    """The rows of what a layer gave in one call, for one example and for ``both``."""
    counts = [_length(tensor) for tensor in alone.given]
    counts_of_both = [_length(tensor) for tensor in both.given]
    if len(set(counts)) != 1 or not all(counts):
        return None
    each = counts[0]
    if counts_of_both == [2 * count for count in counts]:
        own = [_doubles(first, second) for first, second in zip(alone.read, both.read, strict=False)]
        return Rows(each, own=tuple(own))
    if counts_of_both != counts:
        return None
    if _equal(alone.read, both.read):
        return Rows(each, shared=True)
    # What is the same whatever it is made of is everybody's too; but a gate that is closed gives zeros.
    if _equal(alone.given, both.given) and all(tensor.any() for tensor in alone.given):
        return Rows(each, shared=True)
    return None


def _length(tensor: torch.Tensor) -> int:
    return len(tensor) if tensor.ndim else 0


def _doubles(alone: torch.Tensor, both: torch.Tensor) -> bool:
    return alone.ndim > 0 and len(both) == 2 * len(alone)


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _apart(calls: set[Rows]) -> set[Rows]:
    """The rows of a layer's calls, where a shared one is a position and not the batch's dimension."""
    return {replace(rows, apart=True) if rows.shared and rows.each == 1 else rows for rows in calls}
