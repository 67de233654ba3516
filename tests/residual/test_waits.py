"""The explorer of waits: sums of times from what was measured without a delay."""

import pytest

from plpkg.residual import waits
from plpkg.show import theme


def test_without_a_delay_the_speeds_are_those_measured():
    measured = waits.measured().query("rtt_ms == 0").set_index("what")["tokens_per_s"]
    for way, speed in waits.compute(0).tokens_per_s.items():
        assert speed == pytest.approx(measured[waits.WAYS[way]])


def test_a_delay_is_waited_for_once_a_round_trip():
    near, far = waits.compute(0), waits.compute(20)
    for way, trips in near.round_trips.items():
        assert 1 / far.tokens_per_s[way] - 1 / near.tokens_per_s[way] == pytest.approx(trips * 0.020)


def test_the_sum_is_the_one_that_the_benchmark_computed():
    for row in waits.measured().query("rtt_ms == 33").itertuples():
        way = next(way for way, scheme in waits.WAYS.items() if scheme == row.what)
        assert waits.compute(33).tokens_per_s[way] == pytest.approx(row.computed, rel=2e-3)  # it rounds to two digits


def test_it_says_and_draws_the_ways():
    result = waits.compute(33)
    assert "Fastest: ladder." in waits.read_out(result)
    ax = waits.draw(result)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*waits.WAYS, "measured"]
    assert waits.read_out(result) in theme.alt(ax.figure)


def test_the_slider_changes_the_answer():
    explorer = waits.explorer()
    assert "At 0 ms" in explorer.text
    explorer.controls["rtt_ms"].value = 50
    assert "At 50 ms" in explorer.text
