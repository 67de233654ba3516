"""The explorer's errors are those of solving for M; they fall past the rank, and averaging beats noise; its words."""

import pytest
import torch

from plpkg import theme
from plpkg.residual import widget


def test_layers_read_other_things_and_the_lowest_repeats_itself():
    reads = widget.inputs()
    assert [x.shape for x in reads] == [(2048, 320)] * 5
    assert len(reads[0][:256].unique(dim=0)) < 256 == len(reads[1][:256].unique(dim=0))


@pytest.mark.parametrize("rank", widget.RANKS)
def test_m_is_open_below_its_rank_and_had_above(rank):
    theft = widget.compute(rank, 2, 2048, 0.0)
    few, many = ([n for n in theft.errors if low <= n < high] for low, high in ((1, rank), (2 * rank, 4096)))
    assert all(theft.errors[n] > widget.GOOD for n in few)
    assert all(theft.errors[n] < 0.01 for n in many)
    assert theft.error == theft.errors[2048]


def test_repeated_tokens_tell_nothing_new():
    assert widget.compute(64, 0, 128, 0.0).error > widget.GOOD > widget.compute(64, 2, 128, 0.0).error


def test_noise_is_averaged_away():
    quiet, loud = (widget.compute(16, 2, 256, noise) for noise in (0.0, 1.0))
    assert all(loud.errors[n] > quiet.errors[n] for n in (32, 2048))
    assert loud.errors[2048] < loud.errors[256] / 2


def test_the_words_say_whether_a_copy_would_be_good():
    good, bad = widget.compute(16, 2, 2048, 0.0), widget.compute(16, 2, 8, 0.1)
    assert "From 2,048 tokens the cloud" in widget.read_out(good)
    assert widget.read_out(good).endswith("a copy as good as the original.")
    assert "8 tokens and noise of 0.1 times the answers" in widget.read_out(bad)
    assert "no good copy" in widget.read_out(bad)


def test_the_chosen_point_is_filled():
    theft, ax = widget.compute(32, 2, 48, 0.0), theme.axes()
    widget.draw(theft, ax)
    curve, chosen, *_ = ax.lines
    assert list(curve.get_ydata()) == list(theft.errors.values())
    assert (chosen.get_xdata()[0], chosen.get_ydata()[0]) == (48, theft.error)
    assert "rank 32, layer 2" in theme.alt(ax.figure)


def test_it_does_not_disturb_the_stream_of_random_numbers():
    state = torch.get_rng_state()
    widget.compute(8, 1, 64, 0.3)
    assert torch.equal(state, torch.get_rng_state())
