"""The explorer's numbers are the recorded ones, a token's time grows by its round trips; its words; its points."""

import pytest

from plpkg import recorded, theme
from plpkg.residual import widget


@pytest.mark.parametrize(("scheme", "guesses"), [("plain", 0), ("lookup", 3), ("ladder, cloud ahead", 10)])
def test_without_delay_it_is_what_was_measured(scheme, guesses):
    rows = recorded.section("residual_trips", "speed").query("case == 'plpkg-small' and rtt_ms == 0")
    row = rows.query("what == @scheme and draft_tokens == @guesses").iloc[0]
    choice = widget.compute(scheme, 0, guesses or 6)  # who makes no guesses sends none
    assert choice.draft_tokens == guesses
    assert choice.tokens_per_s == pytest.approx(row["tokens_per_s"])
    assert (choice.trips_per_token, choice.bytes_per_token) == (row["trips_per_token"], row["bytes_per_token"])


def test_each_round_trip_takes_the_delay():
    near, far = (widget.compute("plain", ms, 6) for ms in (0, 50))
    assert 1 / far.tokens_per_s - 1 / near.tokens_per_s == pytest.approx(6 * 0.05)


def test_the_gain_is_a_share_of_that_of_an_adapter_in_all_layers():
    gain = recorded.section("residual_adapters", "quality").groupby("method")["gain"].mean()
    assert widget.compute("plain", 20, 6).share_of_gain == 1
    assert widget.compute("ladder", 20, 6).share_of_gain == pytest.approx(gain["ladder"] / gain["all layers"])


def test_points_are_the_schemes():
    ax = theme.axes()
    choice = widget.compute("lookup", 20, 6)
    widget.draw(choice, ax)
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines]
    every = [widget.compute(scheme, 20, 6) for scheme in widget.schemes()]
    assert points == [(each.tokens_per_s, 100 * each.share_of_gain) for each in every]
    filled = [line for line in ax.lines if line.get_markerfacecolor() != "white"]
    assert [line.get_xdata()[0] for line in filled] == [choice.tokens_per_s]
    assert f"lookup {choice.tokens_per_s:.1f} and 100 %" in theme.alt(ax.figure)
