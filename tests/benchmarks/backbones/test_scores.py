import lzma
import random
import shutil
import subprocess

import numpy as np
import pytest

from benchmarks.backbones import scores


def words(count):
    rng = random.Random(0)
    lexicon = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(2000)]
    return " ".join(rng.choices(lexicon, k=count)).encode()


def test_xz_repetition_is_almost_free_and_noise_costs_eight_bits_a_byte():
    train, test = random.Random(1).randbytes(50_000), random.Random(2).randbytes(20_000)
    assert scores.xz_bits(train, train) < 0.2 * len(train)
    assert scores.xz_bits(train, test) == pytest.approx(8 * len(test), rel=0.01)


def test_xz_counts_what_the_test_text_adds():
    text = words(20_000)
    train, test = text[:80_000], text[80_000:]
    added = scores.xz_bits(train, test)
    assert 0.1 * len(test) < added / 8 < len(lzma.compress(test, preset=9 | lzma.PRESET_EXTREME))


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs the xz command")
def test_xz_command_line():
    text = words(20_000)
    train, test = text[:80_000], text[80_000:]

    def size(data):
        return len(subprocess.run(["xz", "-9e", "--stdout"], input=data, capture_output=True, check=True).stdout)

    assert scores.xz_bits(train, test) / 8 == pytest.approx(size(train + test) - size(train), abs=8)


def test_xz_beyond_its_window_is_refused():
    with pytest.raises(ValueError, match=r"looks back 67108864 bytes, got 67108860 \+ 5 of train and test"):
        scores.xz_bits(bytes(2**26 - 4), b"tests")


def test_the_interval_is_that_of_a_mean_and_nothing_for_one_document():
    bits = np.random.default_rng(0).normal(2, 0.5, 400)
    low, high = scores.interval(bits, np.ones(400))
    assert (high - low) / 2 == pytest.approx(1.96 * bits.std() / 20, rel=0.05)  # 10,000 draws: 2 % of a quantile
    assert tuple(scores.interval(np.array([3.0]), np.array([2.0]))) == (1.5, 1.5)
