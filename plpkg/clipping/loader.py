"""Batches by Poisson sampling: each example is in each batch with probability q, independently.

That is what the accountants assume; a shuffled epoch is not. Batches differ in size, and some are empty. One that
is too large for the memory comes in pieces, and the optimizer waits for the last of them.
"""

from collections import deque
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from plpkg.clipping.randomness import Randomness


class PoissonSampler(Sampler):
    """Lists of indices: the pieces of one sample after the other.

    Parameters
    ----------
    size
        The number of examples.
    rate
        q.
    steps
        Samples in an epoch.
    randomness
        Where they come from.
    max_physical_batch_size
        The most examples of a piece.

    Attributes
    ----------
    drawn
        The number of the next sample, over all epochs.
    ends
        For each list that was given and not yet asked for: whether it ends its sample.
    """

    def __init__(
        self, size: int, rate: float, steps: int, randomness: Randomness, max_physical_batch_size: int | None = None
    ) -> None:
        self.size, self.rate, self.steps = size, rate, steps
        self.randomness, self.limit = randomness, max_physical_batch_size or size
        self.drawn = 0
        self.left = steps
        self.ends: deque[bool] = deque()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.ends.clear()
        first, count = self.drawn, self.left
        for draw in range(first, first + count):
            chosen = self.randomness.sample(self.size, self.rate, draw)
            pieces = [chosen[start : start + self.limit] for start in range(0, len(chosen), self.limit)] or [[]]
            for place, piece in enumerate(pieces, 1):
                self.ends.append(place == len(pieces))
                yield piece


class PoissonLoader(DataLoader):
    """A data loader like another one, but for how it samples.

    ``begin`` is told of each batch whether it ends its sample. An empty sample is a step of noise alone: ``skip`` takes
    it, and the loader goes on to the next, because many models cannot run on no examples.
    """

    def __init__(
        self, like: DataLoader, sampler: PoissonSampler, begin: Callable[[bool], object], skip: Callable[[], object]
    ) -> None:
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
        self._begin, self._skip = begin, skip

    def __iter__(self) -> Iterator:
        sampler = self.batch_sampler
        for batch in super().__iter__():
            last = sampler.ends.popleft()
            self._begin(last)
            if last:
                sampler.drawn += 1
                sampler.left -= 1
            if batch is None:
                self._skip()
            else:
                yield batch
        sampler.left = sampler.steps


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
        No data loader, an iterable data set, an empty one, or a sampler for several processes.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(f"Poisson sampling needs examples by number, got the iterable {type(loader.dataset).__name__}")
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError("data_loader has a DistributedSampler: private training runs in one process")
    if len(loader) == 0:
        raise ValueError(f"data_loader gives no batch from {len(loader.dataset)} examples")
