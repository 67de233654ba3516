"""Handwritten digits that come with scikit-learn, what their order tells about who wrote them, and printed digits.

``load_digits`` is the test set of the UCI "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
1998): of 43 people 30 contributed to the training set, 13 others to this test set. Nobody labelled which image is
whose. The file keeps the order of the forms, though: 14 times it starts anew with 0, 1, ..., 9, up to three times
over, before the digits mix. These 14 blocks are *inferred from the order*, not labelled, and one more than the 13
documented writers: 13-14 writers. scikit-learn's course (Inria's MOOC, "Sample grouping") reads the order alike.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

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

    Raises
    ------
    ValueError
        Not as many labels as images.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        counts = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"there must be as many of each, got {counts}")

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, seed: int = 0, shares: tuple[float, float, float] = (0.6, 0.2, 0.2)) -> dict[str, Self]:
        """Deal the images out at random to ``"train"``, ``"validation"`` and ``"test"``.

        Parameters
        ----------
        seed
            The seed of the order; the same seed gives the same split.
        shares
            The shares of the three splits; each whose share is not 0 gets at least one image.

        Raises
        ------
        ValueError
            Shares that are not three numbers from 0 on with sum 1, too few images, or a bad seed.
        """
        parts = cuts("images", len(self), shares)
        generator = np.random.default_rng(whole_number("seed", seed, 0))
        order = torch.from_numpy(generator.permutation(len(self)))
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
            whole_batches = len(self) // batch * batch  # the images in them
            while True:
                order = torch.from_numpy(generator.permutation(len(self)))
                for at in order[:whole_batches].split(batch):
                    yield self.images[at], self.labels[at]

        return endless()

    def _take(self, which: torch.Tensor) -> Self:
        """Some of the images, with all that is known of them."""
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
        known = tuple(self.blocks.unique().tolist())
        return self._take(self.blocks == one_of("block", i, known))

    def rows(self) -> list[dict]:
        blocks, counts = self.blocks.unique(return_counts=True)
        return [{"block": a, "images": n} for a, n in zip(blocks.tolist(), counts.tolist(), strict=True)]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {len(self.blocks.unique())} blocks)"


FONTS = ("DejaVu*[!y].ttf", "STIXGeneral*.ttf", "cm[br]10.ttf", "cmss10.ttf", "cmt[it]10.ttf")
"""Which of matplotlib's fonts :func:`printed_digits` draws: 21 of 41, and of DejaVu none that ends in Display."""


def digits() -> Digits:
    """All 1,797 digits of scikit-learn's ``load_digits``, in the file's order.

    Images are ``(1797, 1, 8, 8)`` with paper 0 and full ink 1: sixteenths, the number of dark pixels among 4 × 4.
    Labels are 0 to 9. Blocks are 0 to 13, computed from the order of the labels: the source documents 13 test
    writers and does not say who wrote what, so that a block is a good guess at a writer (13-14 writers), not a fact.
    """
    from sklearn.datasets import load_digits

    data: Any = load_digits()  # only with return_X_y is it a tuple
    return Digits(
        torch.from_numpy(data.images / 16).float().unsqueeze(1),  # (images, 1, 8, 8)
        torch.from_numpy(data.target.astype(np.int64)),
        torch.from_numpy(_blocks(data.target)),
    )


def printed_digits() -> Images:
    """The 1,890 printed digits 0 to 9 of 21 fonts: ``(1890, 1, 8, 8)``, paper 0 and ink 1, as in :func:`digits`.

    Each is drawn in black and white on 32 × 32 pixels, about 22, 26 and 30 pixels high, in the middle and two pixels
    to the left and right of it; then the ink in blocks of 4 × 4 is counted, as the handwritten ones were made. Public
    data that are far from anybody's hand. The order is by font, digit, height and place. Of the fonts inside
    matplotlib those are left out that have no digits (DejaVu's Display, STIXNonUni, STIXSiz), that have other signs
    in their place (cmex10 brackets, cmsy10 operators, LastResortHE one placeholder), and cmmi10, whose digits are
    old-style: its zero is a circle.
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    paths = []
    for pattern in FONTS:
        paths += sorted(folder.glob(pattern))
    drawn = []
    for path, digit, height in itertools.product(paths, "0123456789", (22, 26, 30)):
        font = partial(ImageFont.truetype, path, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = font(size=1000).getbbox(digit)
        scaled = font(size=1000 * height / (bottom - top))
        left, top, right, bottom = scaled.getbbox(digit)
        for shift in (-2, 0, 2):
            image = Image.new("1", (32, 32))
            at = (16 + shift - (left + right) / 2, 16 - (top + bottom) / 2)  # its middle in the picture's
            ImageDraw.Draw(image).text(at, digit, 1, scaled)
            blocks = np.asarray(image).reshape(8, 4, 8, 4)
            drawn.append(blocks.mean(axis=(1, 3)))  # (8, 8)
    images = torch.from_numpy(np.stack(drawn)).float().unsqueeze(1)  # (images, 1, 8, 8)
    labels = torch.arange(10).repeat_interleave(9).repeat(len(paths))  # (images,): each digit in 3 heights, 3 places
    return Images(images, labels)


def _blocks(labels: np.ndarray) -> np.ndarray:
    """Each image's block: ``(images,)`` int64, from 0, by the ordered runs of the labels ``(images,)``."""
    windows = np.lib.stride_tricks.sliding_window_view(labels, 10)  # (images - 9, 10)
    runs = np.flatnonzero((windows == np.arange(10)).all(axis=1))  # where 0, 1, ..., 9 begin
    starts: list[int] = []
    for run in runs.tolist():
        if not starts or run - starts[-1] > GAP:
            starts.append(run)
    return np.searchsorted(starts, np.arange(len(labels)), side="right") - 1
