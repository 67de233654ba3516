"""Handwritten digits that come with scikit-learn, and what their order tells about who wrote them.

``load_digits`` is the test set of the UCI "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
1998): of 43 people 30 contributed to the training set, 13 others to this test set. Nobody labelled which image is
whose. The file keeps the order of the forms, though: 14 times it starts anew with 0, 1, ..., 9, up to three times
over, before the digits mix. These 14 blocks are *inferred from the order*, not labelled, and one more than the 13
documented writers: 13-14 writers. scikit-learn's course (Inria's MOOC, "Sample grouping") reads the order alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch

from plpkg.corpora.documents import cuts
from plpkg.results import Tabular
from plpkg.validation import one_of, whole_number

GAP = 20
"""An ordered run at most this many images after a block's start still belongs to it: forms repeat 0 to 9 at first."""


@dataclass(frozen=True, eq=False)
class Images(Tabular):
    """Labelled images of one person or of many.

    Attributes
    ----------
    images
        ``(images, channels, height, width)``, float32, 0 to 1.
    labels
        ``(images,)``, int64.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, seed: int = 0, shares: tuple[float, float, float] = (0.6, 0.2, 0.2)) -> dict[str, Self]:
        """Deal the images out at random to ``"train"``, ``"validation"`` and ``"test"``.

        Parameters
        ----------
        seed
            The seed of the order; the same seed gives the same split.
        shares
            The shares of the three splits; each gets at least one image.

        Raises
        ------
        ValueError
            Shares that are not three positive numbers with sum 1, fewer than three images, or a bad seed.
        """
        parts = cuts("images", len(self), shares)
        order = torch.from_numpy(np.random.default_rng(whole_number("seed", seed, 0)).permutation(len(self)))
        return {split: self._take(order[part]) for split, part in parts.items()}

    def batches(self, batch: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless training batches, the same for the same seed.

        Each epoch shuffles the images; what does not fill a batch is left out until the next epoch.

        Parameters
        ----------
        batch
            Images in a batch.
        seed
            The seed of the order.

        Returns
        -------
        An iterator of ``(batch, channels, height, width)`` float32 with ``(batch,)`` int64.

        Raises
        ------
        ValueError
            A batch of no image or of more images than there are, or a bad seed.
        """
        whole_number("batch", batch, 1, len(self), "images")
        whole_number("seed", seed, 0)

        def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            generator = np.random.default_rng(seed)
            while True:
                order = torch.from_numpy(generator.permutation(len(self)))
                for at in order[: len(self) // batch * batch].split(batch):
                    yield self.images[at], self.labels[at]

        return endless()

    def _take(self, which: torch.Tensor) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def rows(self) -> list[dict]:
        labels, counts = self.labels.unique(return_counts=True)
        return [{"label": a, "images": n} for a, n in zip(labels.tolist(), counts.tolist(), strict=True)]

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.images.shape[1:]))
        return f"{type(self).__name__}({len(self):,} images of {shape}, {len(self.labels.unique())} labels)"


@dataclass(frozen=True, eq=False)
class Digits(Images):
    """Handwritten digits with the block of the file that each comes from.

    Attributes
    ----------
    blocks
        ``(images,)``, int64: a guess at the writer, inferred from the file's order.
    """

    blocks: torch.Tensor

    def block(self, i: int) -> "Digits":
        """The images of one block.

        Raises
        ------
        ValueError
            No image is of that block.
        """
        return self._take(self.blocks == one_of("block", i, tuple(self.blocks.unique().tolist())))

    def rows(self) -> list[dict]:
        blocks, counts = self.blocks.unique(return_counts=True)
        return [{"block": a, "images": n} for a, n in zip(blocks.tolist(), counts.tolist(), strict=True)]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {len(self.blocks.unique())} blocks)"


def digits() -> Digits:
    """All 1,797 digits of scikit-learn's ``load_digits``, in the file's order.

    Images are ``(1797, 1, 8, 8)`` with paper 0 and full ink 1: sixteenths, the number of dark pixels among 4 × 4.
    Labels are 0 to 9. Blocks are 0 to 13, computed from the order of the labels: the source documents 13 test
    writers and does not say who wrote what, so that a block is a good guess at a writer (13-14 writers), not a fact.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    return Digits(
        torch.from_numpy(data.images / 16).float().unsqueeze(1),  # (images, 1, 8, 8)
        torch.from_numpy(data.target.astype(np.int64)),
        torch.from_numpy(_blocks(data.target)),
    )


def _blocks(labels: np.ndarray) -> np.ndarray:
    """Which block each image is of: ``(images,)`` int64, from 0, by the ordered runs of the labels ``(images,)``."""
    windows = np.lib.stride_tricks.sliding_window_view(labels, 10)  # (images - 9, 10)
    starts: list[int] = []
    for run in np.flatnonzero((windows == np.arange(10)).all(axis=1)):
        if not starts or run - starts[-1] > GAP:
            starts.append(run)
    return np.searchsorted(starts, np.arange(len(labels)), side="right") - 1
