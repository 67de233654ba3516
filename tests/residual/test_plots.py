"""Each figure says what it shows, and draws the numbers that it is given."""

import math

import pytest

from plpkg import catalog, communication, recorded, theme
from plpkg.backbones import load_backbone
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


@pytest.fixture
def trips():
    rows = recorded.section("residual_trips", "speed")
    return rows[(rows["case"] == "plpkg-small") & (rows["temperature"] == 0) & rows["draft_tokens"].isin([0, 6])]


def test_against_rtt(trips):
    schemes = ["plain", "ladder"]
    ax = plots.against_rtt(trips, schemes)
    lines = [line for line in ax.lines if len(line.get_xdata())]  # the others are for the legend
    for i, scheme in enumerate(schemes):
        (computed, measured), seen = lines[2 * i : 2 * i + 2], trips[trips["what"] == scheme].sort_values("rtt_ms")
        assert list(computed.get_xdata()) == list(measured.get_xdata()) == [0, 5, 20, 33]
        assert list(computed.get_ydata()) == list(seen["computed"])
        assert list(measured.get_ydata()) == list(seen["tokens_per_s"])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["plain (6)", "ladder (1)"]
    assert "plain, 6 round trips a token: " in theme.alt(ax.figure)


def test_each_scheme_is_compared_with_an_adapter_in_all_layers(trips):
    quality = recorded.section("residual_adapters", "quality")
    facts = catalog.measured("residual_diary").query("case == 'fact'")
    imitation = recorded.section("residual_imitation", "imitation")
    table = plots.by_scheme(trips.query("rtt_ms == 20"), quality, facts, imitation)
    means = {
        method: sum(runs.groupby("case")["gain"].mean()) / runs["case"].nunique()
        for method, runs in quality.groupby("method")
    }
    for scheme, adapter in (("plain", "all layers"), ("lookup", "all layers"), ("ladder, cloud ahead", "ladder")):
        row = table.loc[scheme]
        assert row["share_of_gain"] == pytest.approx(means[adapter] / means["all layers"])
        assert row["facts"] == facts.query("method == @adapter")["right"].item()
        assert row["gain_ci"] == 0 if adapter == "all layers" else row["gain_ci"] > 0
    solved = imitation.query("what == 'answers'").set_index("method")["error"]
    for scheme, adapter in (("lookup", "all layers"), ("two layers, folded", "two layers")):
        assert table.loc[scheme, "m_error"] == solved[adapter]


@pytest.mark.parametrize(
    ("scheme", "what", "method"),
    [
        ("ladder", "sampled", "ladder"),
        ("ladder, cloud ahead", "sampled, known times", "ladder"),  # the cloud writes ahead with times of its own
        ("ladder 512, cloud ahead", "sampled, known times", "ladder 512"),
        ("lookup", "answers", "all layers"),
        ("two layers, folded, public counts", "answers", "two layers"),
    ],
)
def test_what_is_stolen_is_what_the_cloud_knows_in_that_scheme(trips, scheme, what, method):
    imitation = recorded.section("residual_imitation", "imitation")
    seen = imitation.query("method == @method and what == @what")
    most = seen[seen["tokens"] == seen["tokens"].max()].iloc[0]
    kept = recorded.section("residual_adapters", "quality"), catalog.measured("residual_diary").query("case == 'fact'")
    row = plots.by_scheme(trips.query("rtt_ms == 20"), *kept, imitation).loc[scheme]
    assert row["stolen"] == most["stolen"] > 0.3
    assert most["tokens"] == (256 if what == "answers" else 100_000)
    if "512" in method:
        assert math.isnan(row["m_error"])  # hidden units can stand in any order
    else:
        assert row["m_error"] == most["error"]


def test_bytes_are_those_of_a_token_without_the_prompt(trips):
    """The same for an adapter in all layers and a ladder, as the formulas have it, at any length of the prompt."""
    shape = catalog.ModelShape.from_config(load_backbone("plpkg-small")[0].config, "plpkg-small")
    table = trips.query("rtt_ms == 20").set_index("what")
    for scheme, traffic in (
        ("plain", communication.low_rank(shape, 48, projections=1)),
        ("ladder", communication.ladder(shape, 96)),
        ("two layers, folded", communication.low_rank(shape, 48, projections=1, adapted_layers=2, folded=True)),
    ):
        assert table.loc[scheme, "bytes_per_token"] == (traffic.uplink_bits + traffic.downlink_bits) / 8
        assert table.loc[scheme, "up_bytes_per_token"] == traffic.uplink_bits / 8


def test_weights_on_the_device_are_those_of_its_part(trips):
    """Where the last u rides down, its B and the norm are there, too."""
    held = trips.query("rtt_ms == 20").set_index("what")["device_parameters"]
    head, hidden, rank = 8192 * 320, 320, 48
    assert held["plain"] == head + 5 * rank**2
    assert held["two layers, folded"] == head + 2 * rank**2 + hidden * rank + hidden
    assert held["ladder"] == head + 5 * 96 * hidden + hidden


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
