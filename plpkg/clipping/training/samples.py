"""Poisson samples: each example is in each sample with probability q, independently.

That is what the accountants assume. Samples differ in size, and some are empty. One that is too large for the memory
goes through the model in pieces. Users are sampled with all that is theirs, and a piece has whole users, or a part of
one alone.
"""

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import SystemRandom
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from plpkg.clipping.batches import batch_size, leaves, named
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.guard.replay import FIRST, SELDOM, Look
from plpkg.clipping.training.processes import Processes
from plpkg.clipping.training.randomness import Randomness
from plpkg.validation import whole_number

_RANDOM = SystemRandom()
LOOP = "for sample in private: private.step(sample)"


@dataclass(frozen=True)
class Piece:
    """Examples that go through the model together.

    Attributes
    ----------
    indices
        Their places in the data set.
    users
        Whose each is; ``None`` where examples are protected.
    goes_on
        All are one user's, who has more of them in the next piece.
    """

    indices: tuple[int, ...]
    users: tuple[Hashable, ...] | None = None
    goes_on: bool = False


@dataclass(frozen=True, eq=False)
class Sample:
    """The examples of one step: :meth:`~plpkg.clipping.training.private.Private.step` takes it, once.

    Attributes
    ----------
    number
        The step's, from 0.
    pieces
        None where nobody was drawn (or nobody of this process's share).
    users
        Whose each example is; ``None`` where examples are protected.
    """

    number: int
    pieces: tuple[Piece, ...]
    users: tuple[Hashable, ...] | None
    _collated: Callable[[Piece], object] = field(repr=False)

    @property
    def indices(self) -> tuple[int, ...]:
        """The examples' places in the data set."""
        indices: list[int] = []
        for piece in self.pieces:
            indices += piece.indices
        return tuple(indices)

    def batches(self) -> Iterator:
        """Each piece, collated by itself. They are to look at: ``step`` collates its own."""
        return map(self._collated, self.pieces)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Part:
    """A batch that goes through the model: ``count`` examples, the ``owners`` whose they are, and whether the last of
    these ``goes_on`` in the next part.
    """

    batch: object
    count: int
    owners: Sequence[Hashable] | None = None
    goes_on: bool = False
    look: Look | None = None


class Samples:
    """Draws the samples of a training, and collates their pieces.

    Parameters
    ----------
    loader
        The data set, collate function and workers are taken from it, and not its order.
    users
        Whose each example is, or ``None``.
    limit
        The most examples of a piece; ``None``: all.
    randomness
        Where the samples come from.
    processes
        Of each sample this process takes its share.

    Attributes
    ----------
    members
        The indices of each user's examples; where examples are protected each is alone.
    steps
        The samples of an epoch: as many as the loader has batches.
    rate
        The probability q of each example, or user: one over that.
    """

    def __init__(
        self,
        loader: DataLoader,
        users: Sequence[Hashable] | torch.Tensor | None,
        limit: int | None,
        randomness: Randomness,
        processes: Processes,
    ) -> None:
        everything: Any = loader.dataset
        count = len(everything)
        self.names = None if users is None else named(users, count)
        keys = range(count) if self.names is None else self.names
        members: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            members.setdefault(key, []).append(index)
        self.members = members
        self.steps = len(loader)
        self.rate = 1 / self.steps
        self._limit = limit or count
        self._randomness = randomness
        self._processes = processes
        self._drawn: dict[int, tuple[Sample, tuple[Piece, ...]]] = {}
        self._batches: list[Iterator] = []  # one, or none, of the pieces from that of sample `_next` on
        # Its workers end with this. A garbage collector that found both at once would first close the queues by which
        # they are told to end, and wait five seconds for each.
        weakref.finalize(self, self._batches.clear)
        self._next = 0
        self._loader = loader
        self._collate = _Collate(loader.collate_fn)

    def sample(self, number: int) -> Sample:
        """The sample of a step; the same until it is used."""
        if number not in self._drawn:
            keys = list(self.members)
            drawn = self._randomness.sample(len(keys), self.rate, number)
            ours = [keys[place] for place in self._processes.share(drawn)]
            pieces = tuple(self._pieces(ours))
            users = None
            if self.names is not None:
                users = tuple(chain.from_iterable(piece.users or () for piece in pieces))
            sample = Sample(number, pieces, users, self._collated)
            self._drawn[number] = (sample, pieces)
        sample, _ = self._drawn[number]
        return sample

    def collated(self, sample: Sample) -> Iterator[Part]:
        """The parts of the next step's sample, now and then with a look whether examples are mixed."""
        if self._next != sample.number:
            self.stop()
        if sample.pieces and not self._batches:
            self._batches.append(self._fetch(sample.number))
        batches = self._batches[:]
        self.stop()  # an exception leaves them in the middle
        for piece in sample.pieces:
            batch, look = next(batches[0])
            yield Part(batch, len(piece.indices), piece.users, piece.goes_on, look)
        self._batches[:] = batches
        self._next = sample.number + 1

    def is_drawn(self, sample: Sample) -> bool:
        """Whether a sample is one of this training's that nobody has used, as it was drawn."""
        drawn, pieces = self._drawn.get(sample.number, (None, ()))
        return drawn is sample and sample.pieces is pieces

    def use(self, sample: Sample) -> None:
        """A sample is released, and no more to be had."""
        del self._drawn[sample.number]

    def stop(self) -> None:
        """Workers end; what they have collated ahead is collated again if it goes on."""
        self._batches.clear()

    def forget(self) -> None:
        """Drop the samples that were drawn ahead: a state was loaded."""
        self._drawn.clear()
        self.stop()

    def _fetch(self, number: int) -> Iterator:
        like = self._loader
        workers: dict[str, Any] = dict(prefetch_factor=like.prefetch_factor) if like.num_workers else {}
        return iter(
            DataLoader(
                like.dataset,
                batch_sampler=_indices(weakref.ref(self), number),
                collate_fn=self._collate,
                num_workers=like.num_workers,
                pin_memory=like.pin_memory,
                timeout=like.timeout,
                worker_init_fn=like.worker_init_fn,
                multiprocessing_context=like.multiprocessing_context,
                # Its own, so that a loop that is broken off and goes on draws nothing of the training's.
                generator=torch.Generator().manual_seed(self._randomness.seed_of("workers", number)),
                **workers,
            )
        )

    def _collated(self, piece: Piece) -> object:
        return self._loader.collate_fn([self._loader.dataset[index] for index in piece.indices])

    def _pieces(self, keys: Sequence[Hashable]) -> Iterator[Piece]:
        """Whole users, as many as fit; a user with more than the limit alone, in several pieces."""
        indices: list[int] = []  # of the piece that begins
        for key in keys:
            theirs = self.members[key]
            if indices and len(indices) + len(theirs) > self._limit:
                yield self._piece(indices)
                indices = []
            if len(theirs) <= self._limit:
                indices = indices + theirs
                continue
            for start in range(0, len(theirs), self._limit):
                end = start + self._limit
                yield self._piece(theirs[start:end], goes_on=end < len(theirs))
        if indices:
            yield self._piece(indices)

    def _piece(self, indices: list[int], *, goes_on: bool = False) -> Piece:
        users = None if self.names is None else tuple(self.names[index] for index in indices)
        return Piece(tuple(indices), users, goes_on)


def _indices(samples: Callable[[], Any], number: int) -> Iterator[list[int]]:
    while True:
        for piece in samples().sample(number).pieces:
            yield list(piece.indices)
        number += 1


class _Collate:
    """Collates examples and, now and then, once more with others around one of them."""

    def __init__(self, collate: Callable) -> None:
        self.collate = collate
        self._given = 0

    def __call__(self, items: list) -> tuple[object, Look | None]:
        state = RandomState()
        look = None
        if len(items) > 1:
            if self._given < FIRST or _RANDOM.randrange(SELDOM) == 0:
                look = self._look(items, state)
            self._given += 1
        state.restore()
        return self.collate(items), look

    def _look(self, items: list, state: RandomState) -> Look | None:
        """All others are replaced by one of them; where that shortens the batch, half, and the rest change places."""
        try:
            shapes = _shapes(self.collate(copy.deepcopy(items)))
            for attempt in range(8):
                kept, among = _others_around(len(items), by_half=attempt >= 3)
                state.restore()
                batch = self.collate(copy.deepcopy([items[place] for place in among]))
                if _shapes(batch) == shapes:
                    return Look(kept, batch)
        except Exception:  # it, or a copy of what it is given, may have any reason not to be had
            return None
        return None


def _shapes(batch: object) -> list[torch.Size]:
    return [leaf.shape for leaf in leaves(batch)]


def _others_around(count: int, by_half: bool) -> tuple[int, list[int]]:
    """The place of one of ``count`` examples, which stays; and which example comes to each place."""
    kept, *others = _RANDOM.sample(range(count), count)
    replaced = (len(others) + 1) // 2 if by_half else len(others)
    copied = others[-1] if len(others) > 1 else kept
    rest = [copied] * replaced + others[replaced:]
    moved = iter(_RANDOM.sample(rest, len(rest)))
    among = [kept if place == kept else next(moved) for place in range(count)]
    return kept, among


def own_parts(batches: object, users: Iterable[Hashable] | torch.Tensor | None) -> Iterator[Part]:
    """The parts of a sample that somebody else has drawn; ``users`` are those of all batches.

    Raises
    ------
    RuntimeError, ValueError
        No list of batches, not one user for each example, or a user with examples in two batches.
    """
    if not isinstance(batches, list):
        raise RuntimeError(f"step takes a list of batches, [batch], got a {type(batches).__name__}")
    counts = [batch_size(batch) for batch in batches]
    names = None if users is None else named(users, sum(counts))
    parts = []
    begin = 0
    earlier: set[Hashable] = set()
    for batch, count in zip(batches, counts, strict=True):
        owners = None
        if names is not None:
            owners = names[begin : begin + count]
            for owner in owners:
                if owner in earlier:
                    raise ValueError(f"user {owner!r} has examples in two batches: keep a user's together")
            earlier.update(owners)
        parts.append(Part(batch, count, owners))
        begin += count
    return iter(parts)


def loader_of(dataset, batch_size: int | None) -> DataLoader:
    """A data set as a data loader; or a data loader as it is.

    Raises
    ------
    ValueError
        It cannot be sampled from by number, is empty, or samples in a way of its own.
    """
    if not isinstance(dataset, DataLoader):
        return _loader_of_examples(dataset, batch_size)
    if batch_size is not None:
        raise ValueError(f"the data loader has a batch_size, {dataset.batch_size}: leave batch_size={batch_size} out")
    examples: Any = dataset.dataset
    if isinstance(examples, IterableDataset):
        kind = type(examples).__name__
        raise ValueError(f"Poisson sampling needs examples by number, got the data loader of a {kind}")
    sampler = dataset.sampler
    is_ordinary = isinstance(sampler, (SequentialSampler, RandomSampler))
    replaces = getattr(sampler, "replacement", False)
    if not is_ordinary or replaces or len(sampler) != len(examples):
        raise ValueError(
            f"the data loader samples with a {type(sampler).__name__} of its own; Poisson sampling takes its place, "
            "from all examples: give a torch.utils.data.Subset for some of them (and to each of several processes the "
            "whole, of which it takes its share)"
        )
    if dataset.batch_size is None:
        raise ValueError("the data loader must have a batch_size, which becomes the expected one")
    if len(dataset) == 0:
        raise ValueError(f"the data loader gives no batch from {len(examples)} examples")
    return dataset


def _loader_of_examples(dataset, batch_size: int | None) -> DataLoader:
    if batch_size is None:
        raise ValueError("batch_size, the expected number of examples in a step, is missing")
    whole_number("batch_size", batch_size, 1)
    by_number = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not by_number or isinstance(dataset, (IterableDataset, Mapping)):
        kind = type(dataset).__name__
        raise ValueError(f"dataset must give examples by number, dataset[i], for Poisson sampling, got a {kind}")
    if len(dataset) == 0:
        raise ValueError("dataset has no examples")
    return DataLoader(dataset, batch_size=batch_size)
