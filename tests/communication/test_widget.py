import pytest

from plpkg import communication
from plpkg.communication import plots, widget


def test_compute_and_read_out():
    result = widget.compute("llama-7b", 32, "5g", True)
    assert result.low_rank == communication.low_rank("llama-7b", 32)
    text = widget.read_out(result)
    assert "rank 32, on 5g (RTT 33 ms): a token takes 1092.1 ms" in text
    assert "3.1 of them for its 229.4 kbit, 1089.0 for 33 round trips" in text


def test_a_baseline_says_whether_it_has_the_end_points():
    bare, whole = (widget.compute("llama-7b", 32, "5g", endpoints).traffics for endpoints in (False, True))
    assert list(bare) == ["low rank", "1 projection", "split LoRA", "3 projections down and up"]
    assert bare["1 projection"].total_bits == 4_194_304
    assert whole["1 projection, end points"].total_bits == 4_194_304 + 131_072


def test_it_starts_where_round_trips_take_time_and_a_link_shows_its_own():
    assert widget.explorer().result.milliseconds("low rank") > 1000
    assert ("wifi (1 ms)", "wifi") in widget.links().options


@pytest.mark.parametrize("rank", plots.RANKS)
def test_every_rank_works_with_every_model(rank):
    for name in widget.explorer().controls["model"].options:
        assert widget.compute(name, rank, "4g", True).low_rank.total_bits > 0
