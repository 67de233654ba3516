"""Each figure says what it shows, and draws the numbers that it is given."""

import pytest

from plpkg import recorded, theme
from plpkg.residual import plots


@pytest.fixture
def quality_rows():
    return recorded.section("residual_quality", "quality")


def test_each_method_is_averaged_over_writers_whose_seeds_are_averaged_first(quality_rows):
    table = plots.personalisation(quality_rows)
    for method in ("none", plots.LORA, "PrivateLoRA r=16"):
        runs = quality_rows.query("method == @method")
        means = [runs.query("case == @writer")["gain"].mean() for writer in runs["case"].unique()]
        assert table.loc[method, "gain"] == pytest.approx(sum(means) / len(means))
        assert list(plots.gains(quality_rows).loc[method]) == pytest.approx(means)
        assert table.loc[method, "share_of_lora"] == table.loc[method, "gain"] / table.loc[plots.LORA, "gain"]


def test_m_s_is_recomputed_from_its_parts(quality_rows):
    for writer, runs in quality_rows.groupby("case"):
        none = runs.query("method == 'none'").iloc[0]
        for row in runs.dropna(subset="m_s").itertuples():
            m_s = row.tokens_per_s / none.tokens_per_s * (row.accuracy - none.accuracy)
            assert row.m_s == pytest.approx(m_s, abs=3e-3), (writer, row.method)  # from rounded accuracies


def test_quality(quality_rows):
    ax = plots.quality(quality_rows)
    table = plots.personalisation(quality_rows).query("bytes_per_token > 0").sort_values("gain")
    writers, lines = plots.gains(quality_rows).loc[table.index], {line.get_label(): line for line in ax.lines}
    for writer in writers:
        assert list(lines[writer].get_xdata()) == list(writers[writer])
    few = table["share_of_actual"] <= 0.25
    for label, chosen in (("mean, at most a quarter of the bytes", few), ("mean, more", ~few)):
        assert list(lines[label].get_xdata()) == list(table["gain"][chosen])
        assert [table.index[y] for y in lines[label].get_ydata()] == list(table.index[chosen])
        assert (lines[label].get_markerfacecolor() == "white") == (label == "mean, more")
    target = next(line for line in ax.lines if line.get_linestyle() == "--")
    assert target.get_xdata()[0] == 0.8 * table["gain"][plots.LORA]
    assert f"LoRA r=16 (100 %) {table['gain'][plots.LORA]:.3f}" in theme.alt(ax.figure)


def test_link_times():
    rows = recorded.section("residual_wire", "link")
    ax = plots.link_times(rows)
    for line, column in zip(ax.lines, ("held_ratio", "ratio"), strict=True):
        ratios = rows[column].dropna()
        assert list(line.get_xdata()) == list(ratios.clip(0.65, 1.5))
        beyond = {f"{ratio:.1f}" for ratio in ratios if not 0.65 <= ratio <= 1.5}
        assert beyond <= {text.get_text() for text in ax.texts}
    (lines,) = ax.collections
    drawn = [list(ends[:, 0]) for ends in lines.get_segments()]
    assert drawn == [list(ends) for ends in rows[["ratio_q1", "ratio_q3"]].clip(0.65, 1.5).to_numpy()]
    assert "within 10 %" in theme.alt(ax.figure)


def test_m_recovery():
    rows = recorded.section("residual_attacks", "m")
    ax = plots.m_recovery(rows)
    for line in ax.lines:
        seen = rows.query("case == @line.get_label().removeprefix('M with ')")
        assert list(line.get_ydata()) == list(seen["error"])
    assert "falls steeply" in theme.alt(ax.figure)


@pytest.mark.parametrize(("name", "options"), [("inversion", {}), ("noise", {"untuned": 1.5})])
def test_tokens_recovered(name, options):
    rows = recorded.section("residual_attacks", name)
    ax = getattr(plots, name)(rows, **options)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert drawn == {case: list(100 * seen["recovered"]) for case, seen in rows.groupby("case")}
    assert "Tokens recovered against" in theme.alt(ax.figure)
