"""Whose the rows of a layer's output are: an example's, one or several each, or everybody's.

Shapes do not tell: there may be as many positions as examples. So the model is run on one example and on two, without
gradients and without dropout. What grows from one to two belongs to the examples; what stays, made of the same input,
depends on none of them: positions, ``embedding(torch.arange(T))``. Such rows are then given once for each example: that
must not change what the model gives.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves, tree_map

from plpkg.clipping.batches import examples
from plpkg.clipping.dropout import Without


@dataclass(frozen=True)
class Rows:
    """How many rows a tensor has for each example; ``shared``: for all examples together."""

    each: int = 1
    shared: bool = False

    def fit(self, tensor: torch.Tensor, batch: int) -> bool:
        """Whether a tensor has as many."""
        return tensor.ndim > 0 and len(tensor) == (self.each if self.shared else batch * self.each)

    def given(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """What a layer gave, with rows for each example: the shared ones are repeated, without memory."""
        if not self.shared:
            return tensor
        return tensor.expand(batch, *(tensor.shape[1:] if self.each == 1 else tensor.shape))

    def by_example(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """``(batch, …)``; if an example has several rows, ``(batch, each, …)``."""
        if self.shared or len(tensor) == self.each == 1:
            return Rows(self.each, shared=True).given(tensor, batch)
        return tensor if self.each == 1 else tensor.unflatten(0, (batch, self.each))


OWN, EVERYBODYS = Rows(), Rows(shared=True)

_Calls = dict[str, list[tuple[list[int], list[torch.Tensor]]]]
"""By layer, of each call the first dimensions of what was given, and what was read."""


class Probe:
    """Finds the rows of a model's layers. While it runs, :meth:`see` is told each call of a layer.

    Attributes
    ----------
    found
        By layer, its rows; ``None`` if they follow from nothing.
    """

    def __init__(self) -> None:
        self.found: dict[str, Rows | None] = {}
        self._calls: _Calls = {}

    def run(self, forward: Callable, args: tuple, kwargs: dict, batch: int) -> None:
        """Run a model on one and on two of a batch's examples; nothing is found if it cannot be.

        Raises
        ------
        ValueError
            The model does not take what is shared once for each example.
        """

        def of(count: int) -> tuple[list[torch.Tensor], _Calls]:
            index, self._calls = torch.arange(count) % batch, {}
            with torch.random.fork_rng(), torch.no_grad(), Without(), warnings.catch_warnings():
                # Reentrant checkpointing, of what has no gradient here.
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
                given = forward(*examples(args, index, of=batch), **examples(kwargs, index, of=batch))
            return float_tensors(given), self._calls

        try:
            (_, one), (plain, two) = of(1), of(2)
        except (RuntimeError, ValueError, IndexError):
            return
        found = {name: _rows(one.get(name, []), calls) for name, calls in two.items()}
        self.found = found
        shared = [name for name, rows in found.items() if rows and rows.shared]
        if not shared:
            return
        try:
            same = all(map(alike, plain, of(2)[0]))
        except (RuntimeError, ValueError, IndexError):
            same = False
        if not same:
            raise ValueError(
                f"{shared[0]} gives the same for all examples, and the model does not take it once for each: their "
                "gradients cannot be told apart: freeze the layer, or take execution='loop'"
            )

    def see(self, name: str, read: Sequence[torch.Tensor], output):
        """A layer was called. Gives its output, what is shared once for each example if that is known."""
        counts = [len(tensor) if tensor.ndim else 0 for tensor in float_tensors(output)]
        self._calls.setdefault(name, []).append((counts, list(read)))
        rows = self.found.get(name)
        if rows and rows.shared:
            return tree_map(lambda leaf: rows.given(leaf, 2) if _is_float(leaf) else leaf, output)
        return output

    def rows(self, name: str, given: Sequence[torch.Tensor], batch: int) -> Rows:
        """The rows of what a layer gave for a batch.

        Raises
        ------
        ValueError
            They are not what was found; or, where nothing was, neither the examples nor one for all of them.
        """
        for rows in [self.found[name]] if name in self.found else [OWN, EVERYBODYS]:
            if rows and all(rows.fit(tensor, batch) for tensor in given):
                return rows
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in given)
        raise ValueError(
            f"{name} gave a tensor of shape {shapes}, whose first dimension is not the batch of {batch}, nor a "
            "multiple of it, nor the same for all examples (tokens routed by what they say?): give the layer "
            "the batch first"
        )


def _rows(one: list, two: list) -> Rows | None:
    """The rows of a layer that was called so for one example and for two."""
    rows = set(_of_each(one, two)) if len(one) == len(two) else set()
    return rows.pop() if len(rows) == 1 else None


def _of_each(one: list, two: list) -> Iterator[Rows | None]:
    for (counts, read), (doubled, again) in zip(one, two, strict=True):
        same = counts == doubled and len(read) == len(again) and all(map(torch.equal, read, again))
        if len(set(counts)) == 1 and all(counts) and (same or doubled == [2 * n for n in counts]):
            yield Rows(counts[0], shared=same)
        else:
            yield None


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, in half precision too."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-2 * one.abs().max().item())


def float_tensors(output: object) -> list[torch.Tensor]:
    """The tensors among what a layer returned that a gradient can come back to."""
    return [leaf for leaf in tree_leaves(output) if _is_float(leaf)]


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
