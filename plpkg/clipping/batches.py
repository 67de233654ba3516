"""Batches: tensors in tuples, lists and mappings, with the examples along the first dimension of each.

Within a model a tensor may have several rows for each example, or the same for all of them: :class:`Rows`.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def leaves(batch) -> list[torch.Tensor]:
    """The tensors of a batch, also inside of mappings that are not dictionaries (transformers' BatchEncoding)."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (tuple, list)):
        values = batch
    else:
        return []
    found = []
    for value in values:
        found += leaves(value)
    return found


def examples(batch, index, of: int | None = None, but: Sequence[torch.Tensor] = ()) -> Any:
    """The batch of some of its examples: every tensor's first dimension is indexed alike.

    With ``of``, only tensors of that length are indexed, except those in ``but``, which all examples share.
    """
    if isinstance(batch, torch.Tensor):
        if of is None:
            return batch[index]
        is_long = batch.ndim > 0 and len(batch) == of
        is_shared = any(batch is each for each in but)
        return batch[index] if is_long and not is_shared else batch
    if isinstance(batch, Mapping):
        return {key: examples(value, index, of, but) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(examples(value, index, of, but) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(examples(value, index, of, but) for value in batch)
    return batch


def batch_size(batch) -> int:
    """How many examples a batch has.

    Raises
    ------
    ValueError
        No tensors, or tensors that do not agree.
    """
    shapes = [tuple(leaf.shape) for leaf in leaves(batch)]
    counts = {shape[0] for shape in shapes if shape}
    if len(counts) != 1 or () in shapes:
        given = f"shapes {shapes}" if shapes else f"no tensor in a {type(batch).__name__}"
        raise ValueError(f"the tensors of a batch must have one first dimension in common, got {given}")
    return counts.pop()


def numbered(users: torch.Tensor | Iterable[Hashable], count: int) -> torch.Tensor:
    """Whose each of ``count`` examples is, ``(count,)``: users are numbered as they come first."""
    numbers: dict[Hashable, int] = {}
    names = named(users, count)
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)


def named(users: torch.Tensor | Iterable[Hashable], count: int) -> list[Hashable]:
    """Whose each of ``count`` examples is, by names that are equal where the user is the same.

    Raises
    ------
    ValueError
        There is not one user for each example, or a name is told from others by its place in memory alone.
    """
    if not isinstance(users, Iterable):
        raise ValueError(f"users must name whose each of {count} examples is, got {users!r}")
    shape = tuple(getattr(users, "shape", (count,)))
    if shape != (count,):
        raise ValueError(f"users must name whose each of {count} examples is, of shape ({count},), got {shape}")
    names = users.tolist() if isinstance(users, torch.Tensor) else list(users)
    names = [name.tolist() if hasattr(name, "tolist") else name for name in names]  # of a list of tensors the numbers
    if len(names) != count:
        raise ValueError(f"users must name whose each of {count} examples is, got {len(names)}")
    for i, name in enumerate(names):
        if not _says_who(name):
            raise ValueError(f"users[{i}]={name} is nobody: whose example is that? (A number or a text says it.)")
    return names


def _says_who(name: object) -> bool:
    if isinstance(name, tuple):
        return all(map(_says_who, name))
    by_place = type(name).__hash__ in (None, object.__hash__, torch.Tensor.__hash__)
    return not by_place and name is not None and name == name  # a NaN is not equal to itself


class CheckedLosses:
    """A losses function of this package, which looks at the model and a batch before it is first called."""

    def check(self, model, batch) -> None:
        """ValueError if it does not compute what it promises for this model."""
        raise NotImplementedError


def check_losses(losses: object, count: int) -> None:
    """One loss an example, or a sentence.

    Raises
    ------
    ValueError
        Another shape, no gradient, or not a tensor.
    """
    if not isinstance(losses, torch.Tensor):
        raise ValueError(f"the losses must be a tensor with one loss an example, got {type(losses).__name__}")
    if losses.shape != (count,):
        hint = " (a reduced loss? take reduction='none' and each example's own mean)" if losses.ndim == 0 else ""
        raise ValueError(f"the losses must be one an example, of shape ({count},), got {tuple(losses.shape)}{hint}")
    if losses.is_complex():
        raise ValueError(f"the losses must be real numbers, got {losses.dtype}")
    if not losses.requires_grad:
        raise ValueError("the losses do not depend on any parameter that learns")


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
        """Whether a tensor has as many, for a batch of so many examples."""
        expected = self.each if self.shared else batch * self.each
        return tensor.ndim > 0 and len(tensor) == expected

    def given(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """A layer's output with rows for each example: shared ones are repeated, without memory."""
        if not self.shared:
            return tensor
        is_batch_of_one = self.each == 1 and not self.apart
        shape = tensor.shape[1:] if is_batch_of_one else tensor.shape
        return tensor.expand(batch, *shape)

    def by_example(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """``(batch, …)``; if an example has several rows, ``(batch, each, …)``."""
        if self.shared or len(tensor) == self.each == 1:
            return Rows(self.each, shared=True).given(tensor, batch)
        return tensor if self.each == 1 else tensor.unflatten(0, (batch, self.each))


OWN = Rows()
"""One row for each example."""
EVERYBODYS = Rows(shared=True)
"""One row for all."""


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, in half precision too."""
    if one.shape != other.shape:
        return False
    largest = one.abs().max().item()
    return torch.allclose(one, other, rtol=1e-2, atol=1e-2 * largest)


def behind(*nodes, but: tuple = ()) -> Iterator:
    """The nodes of autograd's graph from these on, each once; ``but`` are not passed."""
    left = list(nodes)
    known = {None, *but}
    while left:
        node = left.pop()
        if node in known:
            continue
        known.add(node)
        yield node
        left += [after for after, _ in node.next_functions]


def float_tensors(output: object) -> list[torch.Tensor]:
    """The tensors among what a layer returned that a gradient can come back to."""
    return [leaf for leaf in tree_leaves(output) if is_float(leaf)]


def is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
