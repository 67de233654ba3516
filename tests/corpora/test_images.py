from itertools import chain, islice
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from matplotlib.ft2font import FT2Font

from plpkg.corpora import SPLITS, Images, digits, printed_digits
from plpkg.corpora.documents import cuts
from plpkg.corpora.images import FONTS, _blocks

STARTS = [0, 130, 256, 386, 516, 646, 776, 915, 1029, 1157, 1287, 1415, 1545, 1667]
"""Where the file begins anew with 0, 1, ..., 9, read by eye."""


@pytest.fixture(scope="module")
def everything():
    return digits()


def numbered(count):
    """Images that know their own place."""
    return Images(torch.arange(count).float().view(-1, 1, 1, 1), torch.arange(count))


def test_images_are_sixteenths_in_the_order_of_the_file_with_blocks_as_read_by_eye(everything):
    from sklearn.datasets import load_digits

    data = load_digits()
    assert everything.images.shape == (1797, 1, 8, 8)
    assert everything.images.dtype == torch.float32
    assert everything.labels.dtype == everything.blocks.dtype == torch.int64
    assert (everything.images.min(), everything.images.max()) == (0, 1)
    assert np.array_equal(everything.images[:, 0].numpy() * 16, data.images)
    assert np.array_equal(everything.labels.numpy(), data.target)
    assert np.array_equal(everything.blocks.numpy(), np.repeat(np.arange(14), np.diff([*STARTS, 1797])))


@pytest.mark.parametrize(
    ("runs", "starts"),
    [
        ([0, 10, 20], [0]),
        ([0, 20], [0]),
        ([0, 21], [0, 21]),
        ([0, 20, 40], [0, 40]),  # counted from the block's start, not from the last run
        ([0, 20, 41, 61], [0, 41]),
    ],
)
def test_a_run_up_to_twenty_images_after_a_blocks_start_belongs_to_it(runs, starts):
    labels = np.full(runs[-1] + 15, 9)
    for run in runs:
        labels[run : run + 10] = range(10)
    assert np.flatnonzero(np.diff(_blocks(labels), prepend=-1)).tolist() == starts


@pytest.mark.parametrize(("i", "size"), [(0, 130), (6, 139), (7, 114), (13, 130)])
def test_a_block_is_the_images_of_its_part(everything, i, size):
    block = everything.block(i)
    assert len(block) == size
    assert torch.equal(block.images, everything.images[STARTS[i] : STARTS[i] + size])
    assert torch.equal(block.labels, everything.labels[STARTS[i] : STARTS[i] + size])
    assert block.labels[:10].tolist() == list(range(10))
    assert set(block.blocks.tolist()) == {i}


@pytest.mark.parametrize("i", [14, -1, 1.0, True, "0"])
def test_a_block_that_is_not_there_is_named(everything, i):
    with pytest.raises(ValueError, match=f"block must be one of 0, 1, .*, 13, got {i!r}"):
        everything.block(i)


def test_results_show_themselves(everything):
    assert repr(everything) == "Digits(1,797 images of 1 × 8 × 8, 10 labels, 14 blocks)"
    assert everything.to_frame()["images"].tolist() == np.diff([*STARTS, 1797]).tolist()
    assert everything.block(3).rows() == [{"block": 3, "images": 130}]
    assert "<table>" in everything._repr_html_()
    images = Images(torch.zeros(3, 1, 2, 2), torch.tensor([7, 5, 7]))
    assert repr(images) == "Images(3 images of 1 × 2 × 2, 2 labels)"
    assert images.rows() == [{"label": 5, "images": 1}, {"label": 7, "images": 2}]


def test_a_split_keeps_each_image_with_its_label_and_block(everything):
    parts = everything.split(seed=1)
    assert [len(parts[s]) for s in SPLITS] == [1078, 360, 359]

    def rows(part):
        return [(i.numpy().tobytes(), int(a), int(b)) for i, a, b in zip(*vars(part).values(), strict=True)]

    assert sorted(chain(*map(rows, parts.values()))) == sorted(rows(everything))


def test_a_split_and_batches_are_random_and_repeatable():
    def split(seed):
        return {name: part.labels.tolist() for name, part in numbered(10).split(seed, (0.5, 0.3, 0.2)).items()}

    def order(seed):
        return [labels.tolist() for _, labels in islice(numbered(30).batches(7, seed), 9)]

    assert [len(part) for part in split(0).values()] == [5, 3, 2]
    assert list(chain(*split(0).values())) != list(range(10))
    assert split(0) == split(0) != split(1)
    assert order(3) == order(3) != order(4)


@given(st.integers(3, 500), st.floats(0, 1), st.floats(0, 1))
def test_cuts_leave_no_split_empty_but_those_without_a_share(count, train, part):
    shares = (train, (1 - train) * part, (1 - train) * (1 - part))
    parts = cuts("things", count, shares)
    assert tuple(parts) == SPLITS
    sizes = [len(range(count)[at]) for at in parts.values()]
    assert [i for at in parts.values() for i in range(count)[at]] == list(range(count))
    assert [size > 0 for size in sizes] == [share > 0 for share in shares]
    assert all(abs(size - share * count) <= 2 for size, share in zip(sizes, shares, strict=True))


@pytest.mark.parametrize(
    ("count", "shares", "message"),
    [
        (10, (0.6, 0.2, 0.1), r"add up to 1, for train, validation, test, got \(0.6, 0.2, 0.1\)"),
        (10, (0.8, 0.2), r"three numbers .* got \(0.8, 0.2\)"),
        (10, (1.2, -0.1, -0.1), "share must be at least 0, got -0.1"),
        (10, (float("nan"), 0.5, 0.5), "share must be at least 0, got nan"),
        (1, (0.6, 0, 0.4), "1 images: too few, train, test need one each"),
        (2, (0.6, 0.2, 0.2), "2 images: too few, train, validation, test need one each"),
    ],
)
def test_bad_shares_and_too_few_images_are_named(count, shares, message):
    with pytest.raises(ValueError, match=message):
        numbered(count).split(0, shares)


def test_batches_go_through_all_images_each_epoch_and_what_fills_no_batch_waits():
    drawn = list(islice(numbered(12).batches(4), 6))
    assert all(images.shape == (4, 1, 1, 1) for images, _ in drawn)
    assert all(torch.equal(images.flatten().long(), labels) for images, labels in drawn)
    first, second = (torch.cat([labels for _, labels in drawn[i : i + 3]]).tolist() for i in (0, 3))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    drawn = torch.cat([labels for _, labels in islice(numbered(11).batches(4), 100)]).view(50, 8)
    assert all(len(set(epoch.tolist())) == 8 for epoch in drawn)
    assert set(drawn.flatten().tolist()) == set(range(11))


@pytest.mark.parametrize("batch", [0, 11, 2.5, True])
def test_a_bad_batch_is_named_at_the_call(batch):
    with pytest.raises(ValueError, match=f"batch must be .*between 1 and images=10, got {batch!r}"):
        numbered(10).batches(batch)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
@pytest.mark.parametrize("call", [lambda seed: numbered(10).batches(2, seed), lambda seed: numbered(10).split(seed)])
def test_a_bad_seed_is_named_at_the_call(call, seed):
    with pytest.raises(ValueError, match=f"seed must be a whole number of at least 0, got {seed!r}"):
        call(seed)


@pytest.fixture(scope="module")
def printed():
    return printed_digits()


def test_printed_digits_are_sixteenths_of_ink_in_the_form_of_the_handwritten(printed, everything):
    assert repr(printed) == "Images(1,890 images of 1 × 8 × 8, 10 labels)"
    assert type(printed) is Images
    assert printed.images.dtype == torch.float32
    assert printed.labels.dtype == torch.int64
    assert printed.labels.bincount().tolist() == [189] * 10
    assert torch.equal(printed.images * 16, (printed.images * 16).round())
    assert (printed.images.min(), printed.images.max()) == (0, 1)
    assert 0.5 < printed.images.mean() / everything.images.mean() < 1  # a pen is broader than a font's strokes


def test_a_printed_digit_that_is_moved_keeps_its_ink(printed):
    ink = printed.images.view(-1, 3, 64).sum(-1)  # (glyphs and heights, places)
    assert (ink == ink[:, :1]).all()
    columns = torch.arange(8.0)
    middle = (printed.images.sum(-2) @ columns / printed.images.sum((-1, -2))).view(-1, 3)
    left, right = (middle[:, 1] - middle[:, 0]).mean(), (middle[:, 2] - middle[:, 1]).mean()
    assert (left.item(), right.item()) == pytest.approx((0.5, 0.5), abs=0.1)  # two pixels are half a block


def test_the_fonts_are_those_whose_glyphs_are_called_zero_to_nine():
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")

    def names(path):
        font = FT2Font(path)
        return [font.get_glyph_name(font.get_char_index(ord(digit))) for digit in "0123456789"]

    called = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    usable = {path for path in folder.glob("*.ttf") if names(path) == called}
    assert {path for pattern in FONTS for path in folder.glob(pattern)} == usable
    assert len(usable) == 21


def test_printed_digits_are_far_from_handwriting_yet_tell_of_it(printed, everything):
    from sklearn.neighbors import KNeighborsClassifier

    known = KNeighborsClassifier(3).fit(printed.images.flatten(1), printed.labels)
    assert 0.3 < known.score(everything.images.flatten(1), everything.labels) < 0.9


def test_labels_that_are_not_as_many_as_images_are_named():
    with pytest.raises(ValueError, match=r"there must be as many of each, got {'images': 5, 'labels': 4}"):
        Images(torch.zeros(5, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
