"""Batches by Poisson sampling: each example is in each batch with probability q, independently.

That is what the accountants assume; a shuffled epoch is not. Batches differ in size, and some are empty. One that
is too large for the memory comes in pieces, and the optimizer waits for the last of them.
"""

from collections import deque
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from plpkg.clipping.training.processes import Processes
from plpkg.clipping.training.randomness import Randomness


class PoissonSampler(Sampler):
    """Lists of indices: the pieces of one sample after the other.

    Parameters
    ----------
    size, rate, steps
        The number of examples, the probability q of each, and how many samples an epoch has.
    randomness
        Where the samples come from.
    processes
        Of each sample this process takes its share.
    max_physical_batch_size
        The most examples of a piece.
    """

    def __init__(
        self,
        size: int,
        rate: float,
        steps: int,
        randomness: Randomness,
        processes: Processes,
        max_physical_batch_size: int | None = None,
    ) -> None:
        self.size, self.rate, self.steps, self.processes = size, rate, steps, processes
        self.randomness, self.limit = randomness, max_physical_batch_size or size
        self.drawn = 0  # the number of the next sample, over all epochs
        self.left = steps  # samples that the epoch still has
        self.resumes = False  # whether the next epoch is the rest of one; after a break it is a new one
        self.pieces: deque[tuple[int, bool]] = deque()  # given, not asked for: the length, and whether it ends a sample

    def resume(self, drawn: int, left: int) -> None:
        """Go on with a sample's number, where an epoch has so many left."""
        self.drawn, self.left, self.resumes = drawn, left, True

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.pieces.clear()
        first = self.drawn
        for draw in range(first, first + self.left):
            chosen = self.processes.share(self.randomness.sample(self.size, self.rate, draw))
            parts = [chosen[start : start + self.limit] for start in range(0, len(chosen), self.limit)] or [[]]
            for place, part in enumerate(parts, 1):
                self.pieces.append((len(part), place == len(parts)))
                yield part


class PoissonLoader(DataLoader):
    """A data loader like another one, but for how it samples.

    An empty sample is a step of noise alone: the loader takes it itself and goes on to the next, because many models
    cannot run on no examples.

    Parameters
    ----------
    like
        The other one.
    private
        The :class:`~plpkg.clipping.training.private.Private` that is told when an epoch begins, and of each batch how
        many examples it has and whether it ends its sample.
    max_physical_batch_size
        The most examples of a batch; by default a sample is one batch.
    """

    def __init__(self, like: DataLoader, private, max_physical_batch_size: int | None = None) -> None:
        rate = private.mechanism.sample_rate
        workers = dict(prefetch_factor=like.prefetch_factor, persistent_workers=like.persistent_workers)
        super().__init__(
            like.dataset,
            batch_sampler=PoissonSampler(
                len(like.dataset), rate, len(like), private.randomness, private.processes, max_physical_batch_size
            ),
            collate_fn=_Collate(like.collate_fn),
            num_workers=like.num_workers,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            **(workers if like.num_workers else {}),
        )
        self._private = private

    def __iter__(self) -> Iterator:
        sampler, private = self.batch_sampler, self._private
        private.restart()
        if not (sampler.resumes and sampler.left):
            sampler.left = sampler.steps
        sampler.resumes, left = False, sampler.left
        for batch in super().__iter__():
            examples, last = sampler.pieces.popleft()
            if last:
                left -= 1
                sampler.drawn, sampler.left = sampler.drawn + 1, left
            private.begin(examples, last)
            if batch is None:
                private.skip()
            else:
                yield batch


class _Collate:
    """Puts examples together; of none there is nothing to put together."""

    def __init__(self, collate: Callable) -> None:
        self.collate = collate

    def __call__(self, examples: list):
        return self.collate(examples) if examples else None


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
