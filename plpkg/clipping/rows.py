"""Which example each row of a layer's output belongs to: one example has one row or several, or all share it.

Shapes do not tell: there may be as many positions as examples. So the model is run on one example and on two, without
gradients and without dropout. What grows from one to two belongs to the examples; what stays, made of the same input,
depends on none of them: positions, ``embedding(torch.arange(T))``. Such rows are then given once for each example: that
must not change what the model gives.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves, tree_map

from plpkg.clipping.batches import examples
from plpkg.clipping.dropout import Without


@dataclass(frozen=True)
class Rows:
    """How many rows a tensor has for each example.

    ``shared``: for all examples together. ``apart``: the tensor has no batch dimension; its one row is a position.
    ``own`` says, where it is known, which of the tensors that the layer read grow with the examples.
    """

    each: int = 1
    shared: bool = False
    apart: bool = False
    own: tuple[bool, ...] | None = None

    def fit(self, tensor: torch.Tensor, batch: int) -> bool:
        """Whether a tensor has as many."""
        return tensor.ndim > 0 and len(tensor) == (self.each if self.shared else batch * self.each)

    def given(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """What a layer gave, with rows for each example: the shared ones are repeated, without memory."""
        if not self.shared:
            return tensor
        one = self.each == 1 and not self.apart
        return tensor.expand(batch, *(tensor.shape[1:] if one else tensor.shape))

    def by_example(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """``(batch, …)``; if an example has several rows, ``(batch, each, …)``."""
        if self.shared or len(tensor) == self.each == 1:
            return Rows(self.each, shared=True).given(tensor, batch)
        return tensor if self.each == 1 else tensor.unflatten(0, (batch, self.each))


OWN, EVERYBODYS = Rows(), Rows(shared=True)

_Calls = dict[str, list[tuple[list[torch.Tensor], list[torch.Tensor]]]]
"""By layer, of each call what was given and what was read."""


class Probe:
    """Finds the rows of a model's layers. While it runs, :meth:`see` is told each call of a layer.

    Attributes
    ----------
    found
        By layer, the rows of its calls; none if they follow from nothing.
    """

    def __init__(self) -> None:
        self.found: dict[str, set[Rows]] = {}
        self._calls: _Calls = {}

    def run(self, forward: Callable, args: tuple, kwargs: dict, batch: int) -> None:
        """Run a model on one and on two of a batch's examples; nothing is found if it cannot be.

        Raises
        ------
        ValueError
            The model does not take what is shared once for each example.
        """

        def of(count: int, seed: int | None = None) -> tuple[list[torch.Tensor], _Calls]:
            index, self._calls = torch.arange(count) % batch, {}
            with torch.random.fork_rng(), torch.no_grad(), Without(), warnings.catch_warnings():
                if seed is not None:
                    torch.manual_seed(seed)
                # Reentrant checkpointing, of what has no gradient here.
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
                given = forward(*examples(args, index, of=batch), **examples(kwargs, index, of=batch))
            calls, self._calls = self._calls, {}
            return float_tensors(given), calls

        try:
            (single, one), (plain, two) = of(1), of(2)
        except Exception:  # a model may have any reason not to run on so few
            return
        if _mixed(single, plain) and not any(_mixed(single, of(1, seed)[0]) for seed in (0, 1)):
            layers = [name for name, calls in two.items() if _mixed(*(c[0][0] for c in (one[name], calls)))]
            raise ValueError(
                f"examples are mixed{f', by {layers[0]} at the latest' if layers else ''}: the model gives something "
                "else for one that stands beside another, whose numbers it takes, perhaps without a gradient"
            )
        found = {name: _rows(one.get(name, []), calls) for name, calls in two.items()}
        self.found = found
        shared = [name for name, calls in found.items() if any(rows.shared for rows in calls)]
        if not shared:
            return

        def same() -> bool:
            try:
                return all(map(alike, plain, of(2)[0]))
            except Exception:  # shapes that do not go together, in whatever words
                return False

        if not same():
            lone = {r: replace(r, apart=True) for rows in found.values() for r in rows if r.shared and r.each == 1}
            self.found = {name: {lone.get(r, r) for r in rows} for name, rows in found.items()}
            if lone and same():
                return
            self.found = found
            raise ValueError(
                f"{shared[0]} gives the same for all examples, and the model does not take it once for each: their "
                "gradients cannot be told apart: freeze the layer, or take execution='loop'"
            )

    def see(self, name: str, read: Sequence[torch.Tensor], output):
        """A layer was called. Gives its output, what is shared once for each example if that is known."""
        given = float_tensors(output)
        self._calls.setdefault(name, []).append((given, list(read)))
        rows = next((r for r in self.found.get(name, ()) if all(r.fit(tensor, 2) for tensor in given)), OWN)
        return tree_map(lambda leaf: rows.given(leaf, 2) if _is_float(leaf) else leaf, output)

    def rows(self, name: str, given: Sequence[torch.Tensor], batch: int) -> Rows:
        """The rows of what a layer gave for a batch.

        Raises
        ------
        ValueError
            They are not what was found; or, where nothing was, neither the examples nor one for all of them.
        """
        known = self.found.get(name, (OWN, EVERYBODYS))
        fitting = [rows for rows in known if all(rows.fit(tensor, batch) for tensor in given)]
        if len(fitting) == 1 or (fitting and batch == 1):
            return fitting[0]
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in given)
        raise ValueError(
            f"{name} gave a tensor of shape {shapes}, whose first dimension is neither the batch of {batch}, once or "
            "several times, nor the same for all examples (time first, or tokens routed by what they say?): give the "
            "layer the batch first"
        )


def _rows(one: list, two: list) -> set[Rows]:
    """The rows of a layer that was called so for one example and for two."""
    rows = {_of_call(*calls) for calls in zip(one, two, strict=False)}
    return set() if None in rows or len(one) != len(two) else rows


def _of_call(one: tuple, two: tuple) -> Rows | None:
    (given, read), (again, reread) = one, two
    counts, doubled = ([len(tensor) if tensor.ndim else 0 for tensor in tensors] for tensors in (given, again))
    if len(set(counts)) != 1 or not all(counts):
        return None
    if doubled == [2 * count for count in counts]:
        own = (one.ndim > 0 and len(two) == 2 * len(one) for one, two in zip(read, reread, strict=False))
        return Rows(counts[0], own=tuple(own))
    # A gate that is closed gives zeros whatever it reads.
    alike = _equal(read, reread) or (_equal(given, again) and all(tensor.any() for tensor in given))
    return Rows(counts[0], shared=True) if alike and counts == doubled else None


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, in half precision too."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-2 * one.abs().max().item())


def _mixed(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    """Whether the first half of what was given for two examples is not what was given for the first alone."""
    for alone, both in zip(one, two, strict=False):
        if alone.shape[1:] == both.shape[1:] and alone.ndim and len(both) in (len(alone), 2 * len(alone)):
            half = alone.dtype.itemsize < 4 or torch.is_autocast_enabled(alone.device.type)
            apart = (alone - both[: len(alone)]).float().norm()
            if apart > (0.1 if half else 0.01) * alone.float().norm():
                return True
    return False


def float_tensors(output: object) -> list[torch.Tensor]:
    """The tensors among what a layer returned that a gradient can come back to."""
    return [leaf for leaf in tree_leaves(output) if _is_float(leaf)]


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
