"""Each figure says what it shows, and draws the numbers that were recorded."""

import pytest

from plpkg import theme
from plpkg.residual import plots, recorded


def test_quality():
    ax = plots.quality()
    table = recorded.personalisation().query("bytes_per_token > 0").sort_values("gain")
    writers, lines = recorded.gains().loc[table.index], {line.get_label(): line for line in ax.lines}
    for writer in writers:
        assert list(lines[writer].get_xdata()) == list(writers[writer])
    few = table["share_of_actual"] <= 0.25
    for label, chosen in (("mean, at most a quarter of the bytes", few), ("mean, more", ~few)):
        assert list(lines[label].get_xdata()) == list(table["gain"][chosen])
        assert [table.index[y] for y in lines[label].get_ydata()] == list(table.index[chosen])
        assert (lines[label].get_markerfacecolor() == "white") == (label == "mean, more")
    target = next(line for line in ax.lines if line.get_linestyle() == "--")
    assert target.get_xdata()[0] == 0.8 * table["gain"][recorded.LORA]
    assert f"LoRA r=16 (100 %) {table['gain'][recorded.LORA]:.3f}" in theme.alt(ax.figure)


def test_link_times():
    ax = plots.link_times()
    rows = recorded.links()
    shown = [("busy", "held_ratio"), ("busy", "ratio"), ("asleep", "ratio")]
    for line, (waits, column) in zip(ax.lines, shown, strict=True):
        ratios = rows[rows["waits"] == waits][column].dropna()
        assert list(line.get_xdata()) == list(ratios.clip(0.65, 1.5))
        assert {f"{ratio:.1f}" for ratio in ratios if not 0.65 <= ratio <= 1.5} <= {
            text.get_text() for text in ax.texts
        }
    for lines, waits in zip(ax.collections, ("busy", "asleep"), strict=True):
        own = rows[rows["waits"] == waits]
        assert [list(ends[:, 0]) for ends in lines.get_segments()] == [
            list(ends) for ends in own[["ratio_q1", "ratio_q3"]].clip(0.65, 1.5).to_numpy()
        ]
    assert "within 10 %" in theme.alt(ax.figure)


def test_m_recovery():
    ax = plots.m_recovery()
    for line in ax.lines:
        own = recorded.attack("m").query("case == @line.get_label().removeprefix('M with ')")
        assert list(line.get_ydata()) == list(own["error"])
    assert "falls steeply" in theme.alt(ax.figure)


@pytest.mark.parametrize("name", ["inversion", "noise"])
def test_tokens_recovered(name):
    ax = getattr(plots, name)()
    rows = recorded.attack(name)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert drawn == {case: list(100 * own["recovered"]) for case, own in rows.groupby("case")}
    assert "Tokens recovered against" in theme.alt(ax.figure)
