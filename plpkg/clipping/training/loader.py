"""Batches by Poisson sampling: each example is in each batch with probability q, independently.

That is what the accountants assume; a shuffled epoch is not. Batches differ in size, and some are empty. One that
is too large for the memory comes in pieces, and the optimizer waits for the last of them. Users are sampled with all
that is theirs, and a piece has whole users, or a part of one alone.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import SystemRandom

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from plpkg.clipping.batches import leaves
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.training.processes import Processes
from plpkg.clipping.training.randomness import Randomness


@dataclass
class Piece:
    """A batch: the indices of its examples, and who owns each.

    If it ``goes_on``, all its examples are one user's, and the next batch has more of them. ``last`` ends the sample
    with the number ``draw``, after which its loop over the data loader has ``left`` more.
    """

    indices: list[int]
    owners: list[int]
    goes_on: bool = False
    last: bool = False
    draw: int = 0
    left: int = 0
    loop: object = None


class PrivateSampler(Sampler):
    """Lists of indices: the pieces of one sample after the other.

    Parameters
    ----------
    members
        The indices of each user's examples; where examples are protected each is a user.
    rate, steps
        The probability q of each, and how many samples an epoch has.
    randomness
        Where the samples come from.
    processes
        Of each sample this process takes its share.
    limit
        The most examples of a piece.
    shuffled
        The users of a sample where samples are not drawn: each is in one of the ``steps`` of an epoch.
    """

    def __init__(
        self,
        members: list[list[int]],
        rate: float,
        steps: int,
        randomness: Randomness,
        processes: Processes,
        limit: int,
        shuffled: int | None = None,
    ) -> None:
        self.members, self.rate, self.steps, self.processes = members, rate, steps, processes
        self.randomness, self.limit, self.shuffled = randomness, limit, shuffled
        self.drawn = 0  # the number of the sample after the latest that was trained on, over all epochs
        self.left = steps  # samples that the epoch still has
        self.resumes = False  # whether the next epoch is the rest of one; after a break it is a new one
        self.asked: deque[Piece] = deque()  # by the latest loop; not given yet
        self._next = 0  # the sample that nobody has asked for, however many loops there are

    def resume(self, drawn: int, left: int, *, anew: bool) -> None:
        """Go on with a sample's number, where an epoch has so many left; ``anew``: none of them has been drawn yet."""
        self.drawn, self.left, self.resumes = drawn, left, True
        self._next = drawn if anew else max(drawn, self._next)

    def trained(self, piece: Piece) -> None:
        """A batch has been given to be trained on."""
        if piece.last:
            self.drawn, self.left = max(self.drawn, piece.draw + 1), piece.left

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """A loop over samples of its own, whatever other loops there are; ``asked`` are its batches."""
        self.asked = deque()
        return self._loop(self.asked, self.left if self.resumes and self.left else self.steps)

    def _loop(self, asked: deque[Piece], left: int) -> Iterator[list[int]]:
        while left:
            draw, self._next, left = self._next, self._next + 1, left - 1
            pieces = self._pieces(self.processes.share(self._users(draw))) or [Piece([], [])]
            pieces[-1].last = True
            for piece in pieces:
                piece.draw, piece.left, piece.loop = draw, left, asked
                asked.append(piece)
                yield piece.indices

    def _users(self, draw: int) -> list[int]:
        """Who is in a sample."""
        if self.shuffled is None:
            return self.randomness.sample(len(self.members), self.rate, draw)
        epoch, place = divmod(draw, self.steps)
        return self.randomness.order(len(self.members), epoch)[place * self.shuffled : (place + 1) * self.shuffled]

    def _pieces(self, users: list[int]) -> list[Piece]:
        pieces: list[Piece] = []
        room = 0  # in the last one
        for user in users:
            theirs = self.members[user]
            if len(theirs) <= room:
                pieces[-1].indices.extend(theirs)
                pieces[-1].owners.extend([user] * len(theirs))
                room -= len(theirs)
                continue
            for start in range(0, len(theirs), self.limit):
                part = theirs[start : start + self.limit]
                pieces.append(Piece(list(part), [user] * len(part), start + self.limit < len(theirs)))
            room = max(0, self.limit - len(theirs))
        return pieces


class PrivateLoader(DataLoader):
    """A data loader like another one, but for how it samples.

    An empty sample is a step of noise alone: the loader takes it itself and goes on to the next, because many models
    cannot run on no examples. When the most steps have been taken it gives nothing more.

    Parameters
    ----------
    like
        The other one.
    private
        The :class:`~plpkg.clipping.training.private.Private` that is told when an epoch begins, of each batch, and
        whether it ends its sample.
    sampler
        What it samples with.
    """

    def __init__(self, like: DataLoader, private, sampler: PrivateSampler) -> None:
        workers = dict(prefetch_factor=like.prefetch_factor, persistent_workers=like.persistent_workers)
        super().__init__(
            like.dataset,
            batch_sampler=sampler,
            collate_fn=_Collate(like.collate_fn),
            num_workers=like.num_workers,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            **(workers if like.num_workers else {}),
        )
        self._private, self._loops = private, 0

    def __iter__(self) -> Iterator:
        """A loop of its own, whatever others there are: persistent workers would leave the first for the next."""
        if self._private.learning and self._private.done:
            return
        batches = self._get_iterator() if self._loops else super().__iter__()
        self._loops += 1
        try:
            yield from self._batches(batches)
        finally:
            self._loops -= 1

    def _batches(self, batches: Iterator) -> Iterator:
        """Batches to train on, and steps of noise for empty samples; in an evaluation batches alone."""
        sampler, private = self.batch_sampler, self._private
        pieces: list[Piece] = []
        asked, sampler.resumes = sampler.asked, sampler.resumes and not private.learning
        for batch in batches:
            pieces.append(asked.popleft())
            if batch is None and not private.learning:
                continue  # a step of noise only if what comes next is trained on
            private.offer(pieces)
            if private.learning and not private.begin():
                return
            if batch is not None:
                yield batch
            if pieces[-1].last and private.learning and private.done:
                return
            pieces = []
        private.offer([])


_RANDOM = SystemRandom()
FIRST, SELDOM = 3, 100
"""The batches at which it is looked whether the collate function mixes: the first ones, then one in so many."""


class _Collate:
    """Puts examples together, and looks whether it mixes them; of none there is nothing to put together."""

    def __init__(self, collate: Callable) -> None:
        self.collate = collate
        self._given = 0

    def __call__(self, examples: list):
        if len(examples) > 2 and (self._given < FIRST or _RANDOM.randrange(SELDOM) == 0):
            self._look(examples)
        self._given += len(examples) > 2
        return self.collate(examples) if examples else None

    def _look(self, examples: list) -> None:
        """Put one example together with copies of another one: what becomes of it must be what was.

        Raises
        ------
        ValueError
            It is something else: mixup, say, or a mean over the batch.
        """
        kept, other = _RANDOM.sample(range(len(examples)), 2)
        among = [examples[i if i == kept else other] for i in range(len(examples))]
        state = RandomState()

        def batch(examples: list) -> tuple[list[torch.Size], list[torch.Tensor]]:
            """The shapes of a batch's tensors, and those that have a row for each example."""
            state.restore()
            tensors = leaves(self.collate(copy.deepcopy(examples)))  # which may change what it is given
            tensors = [leaf for leaf in tensors if leaf.ndim]
            rows = [leaf.nan_to_num() for leaf in tensors if len(leaf) == len(examples)]
            if len(rows) < len(tensors):  # texts end to end, perhaps: where one begins depends on those before
                rows = [leaf for leaf in rows if leaf.ndim > 1 or leaf.is_floating_point()]
            return [leaf.shape for leaf in tensors], rows

        try:
            (shapes, once), (_, again), (others, alone) = batch(examples), batch(examples), batch(among)
        except Exception:  # it, or a copy of what it is given, may have any reason not to be had
            return
        finally:  # the training draws what it would draw if nobody had looked
            state.restore()
        if shapes != others or not all(map(torch.equal, once, again)):  # others were longer, or it draws by itself
            return

        def same(some: list[torch.Tensor], row: int, others: list[torch.Tensor], place: int) -> bool:
            return all(torch.equal(one[row], other[place]) for one, other in zip(some, others, strict=True))

        if same(once, kept, alone, kept):
            return
        # It may sort: then one row stands among others that are all alike, and was there before.
        count = range(len(examples))
        equals = [sum(same(alone, place, alone, each) for each in count) for place in count]
        sorts = sorted(equals) == [1, *[len(examples) - 1] * (len(examples) - 1)]
        moved = sorts and any(same(once, row, alone, equals.index(1)) for row in count)
        if not moved:
            raise ValueError(
                "collate_fn mixes examples: beside others it makes something else of the same one (mixup, or a mean "
                "over the batch?), so that clipping bounds nobody's part: do that in the data set, example by example"
            )


def check_loader(loader: DataLoader) -> None:
    """Refuse what Poisson sampling cannot replace.

    Raises
    ------
    ValueError
        No data loader, an iterable data set, an empty one, or one that samples in a way of its own.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(f"Poisson sampling needs examples by number, got the iterable {type(loader.dataset).__name__}")
    ordinary = isinstance(loader.sampler, (SequentialSampler, RandomSampler))
    ordinary &= not getattr(loader.sampler, "replacement", False)
    if not ordinary or len(loader.sampler) != len(loader.dataset):
        raise ValueError(
            f"data_loader samples with a {type(loader.sampler).__name__} of its own; Poisson sampling takes its place, "
            "from all examples: give a torch.utils.data.Subset for some of them (and to each of several processes the "
            "whole, of which it takes its share)"
        )
    if loader.batch_size is None:
        raise ValueError("data_loader must have a batch_size, which becomes the expected one")
    if len(loader) == 0:
        raise ValueError(f"data_loader gives no batch from {len(loader.dataset)} examples")
