"""Each figure says what it shows, and draws the numbers that were recorded."""

import pytest

from plpkg import catalog, theme
from plpkg.residual import plots, recorded


def test_quality_against_bytes():
    ax = plots.quality_against_bytes()
    table = recorded.personalisation().query("bytes_per_token > 0")
    drawn = {c.get_label(): c.lines[0].get_xydata()[0] for c in ax.containers}
    assert set(drawn) == set(table.index)
    for method, (x, y) in drawn.items():
        assert 0 <= x - 100 * table.loc[method, "share_of_actual"] < 10  # beside others with the same bytes
        assert y == pytest.approx(100 * table.loc[method, "share_of_lora"])
    assert "LoRA r=16 100 % at 100 %" in theme.alt(ax.figure)


def test_link_times():
    ax = plots.link_times()
    rows = catalog.measured("residual").query("section == 'link'")
    formula, measured = ([bar.get_width() for bar in bars] for bars in ax.containers)
    assert formula == list(rows["formula_ms"])
    assert measured == list(rows["ms_per_token"])
    assert f"Bars of {len(rows)} links" in theme.alt(ax.figure)


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
