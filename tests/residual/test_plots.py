"""Each figure says what it shows, and draws the numbers that it is given."""

import pandas as pd
import pytest
from peft import LoraConfig, get_peft_model

from plpkg import catalog, communication, recorded
from plpkg.backbones import load_backbone
from plpkg.residual import PrivateLoraConfig, plots
from plpkg.show import theme


def test_m_s_is_recomputed_from_its_parts():
    for writer, runs in recorded.section("residual_quality", "quality").groupby("case"):
        none = runs.query("method == 'none'").iloc[0]
        for row in runs.dropna(subset="m_s").itertuples():
            m_s = row.tokens_per_s / none.tokens_per_s * (row.accuracy - none.accuracy)
            assert row.m_s == pytest.approx(m_s, abs=3e-3), (writer, row.method)  # from rounded accuracies


def test_a_ladder_is_drawn():
    assert "one message" in theme.alt(plots.ladder().figure)


QUALITY = recorded.section("residual_adapters", "quality")
FACTS = catalog.measured("residual_diary").query("case == 'fact'")
IMITATION = recorded.section("residual_imitation", "imitation")
BASELINES = recorded.section("residual_baselines", "gain")


@pytest.fixture
def trips():
    rows = recorded.section("residual_trips", "speed")
    return rows[(rows["case"] == "plpkg-small") & (rows["temperature"] == 0) & rows["draft_tokens"].isin([0, 6])]


@pytest.fixture
def tables(trips):
    """By scheme, without a delay and with one."""
    return [plots.by_scheme(trips.query("rtt_ms == @ms"), QUALITY, FACTS, IMITATION) for ms in (0, 20)]


@pytest.mark.parametrize(
    ("scheme", "adapter"),
    [("M r=48 at down", "all layers"), ("M one layer late, folded", "one layer late"), ("ladder", "ladder")],
)
def test_each_scheme_is_compared_with_an_adapter_in_all_layers(tables, scheme, adapter):
    means = QUALITY.groupby(["method", "case"])["gain"].mean().groupby("method").mean()
    row = tables[1].loc[scheme]
    assert row["gain"] == pytest.approx(means[adapter] / means["all layers"])
    assert row["facts"] == FACTS.query("method == @adapter")["right"].item()
    assert row["gain_ci"] == 0 if adapter == "all layers" else row["gain_ci"] > 0


@pytest.mark.parametrize(
    ("scheme", "what", "method"),
    [
        ("ladder", "sampled", "ladder"),
        ("M r=48 at down", "answers", "all layers"),
        ("M in two layers, folded, public counts", "answers", "two layers"),
    ],
)
def test_what_is_stolen_is_what_the_cloud_knows_in_that_scheme(tables, scheme, what, method):
    seen = IMITATION.query("method == @method and what == @what")
    most = seen[seen["tokens"] == seen["tokens"].max()].iloc[0]
    assert tables[1].loc[scheme, "stolen"] == most["stolen"] > 0.3
    assert most["tokens"] == (256 if what == "answers" else 100_000)


def test_schemes_are_drawn_as_they_are(tables):
    near, far = (table.loc[["M r=48 at down", "ladder"]] for table in tables)
    ax = plots.schemes(near, far, 20)
    for line, table in zip(ax.lines, (near, far), strict=True):
        assert list(line.get_xdata()) == list(table["tokens_per_s"])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["M r=48 at down (6)", "ladder (1)"]
    assert "ladder: 97 and 30" in theme.alt(ax.figure)


def test_gains_are_compared_where_the_adapters_are_in_the_same_places():
    gain = plots.gains(BASELINES)
    assert gain.shape[1] == 9
    assert not gain.loc[list({name for pair in plots.PAIRS for name in pair})].isna().any(axis=None)
    down = BASELINES.query("method == 'LoRA down r=16' and case == 'scipy'")["gain"].mean()
    assert gain.loc["LoRA r=16 at down", "scipy"] == pytest.approx(down)
    kept = recorded.section("residual_baselines", "difference").query("other == 'PrivateLoRA down r=48, gradient'")
    mean = (gain.loc["LoRA r=16 at down"] - gain.loc["M r=48 at down"]).mean()
    assert mean == pytest.approx(kept.query("method == 'LoRA down r=16'")["gain"].item(), abs=1e-4)


def test_a_form_has_what_a_token_costs_and_what_was_recorded():
    configs = {
        "M r=48 at down": PrivateLoraConfig(r_c2d=48, r_d2c=48, target_modules=["down_proj"]),
        "M r=64 at all seven": PrivateLoraConfig(target_modules="all-linear"),
        "LoRA r=16 at down": LoraConfig(r=16, target_modules=["down_proj"]),
        "M r=64 at q, k, v": PrivateLoraConfig(),
        "LoRA r=16 at q, k, v": LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj"]),
    }
    adapted = {name: get_peft_model(load_backbone("plpkg-small")[0], config) for name, config in configs.items()}
    table = plots.forms(adapted, plots.gains(BASELINES), FACTS)
    assert list(table.index) == list(plots.FORMS)
    assert table["round trips"][list(configs)].tolist() == [6, 21, 6, 6, 6]
    assert table["bytes a token"][list(configs)].tolist() == [2240, 10240, 12800, 5120, 8960]
    assert table["numbers learned"][list(configs)].tolist() == [11520, 143360, 92160, 61440, 112640]
    counts = table.loc["counts of all own text", ["round trips", "bytes a token", "gain, bits per byte"]]
    assert counts.tolist() == [1, 1280, "0.195"]
    shown = table.loc[["M r=64 at q, k, v", "LoRA r=16 at q, k, v", "LoRA r=16 at down"], "facts of 40"]
    assert shown.tolist() == ["27", "39", "not measured"]


def test_a_difference_is_told_by_its_interval():
    gain = pd.DataFrame({"none": [0, 0, 0], "good": [1, 1.1, 0.9], "chance": [-1, 1, 0.2]}).T
    ax = plots.differences(gain, [("good", "none"), ("chance", "none")])
    faces = [line.get_markerfacecolor() for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert [face == "white" for face in faces] == [False, True]
    assert "good minus none: +1.000 ± 0.248; chance minus none" in theme.alt(ax.figure)
    assert theme.alt(ax.figure).endswith("not distinguishable.")


def test_defences_are_the_recorded_ones():
    table = plots.defences(catalog.measured("residual_attacks"))
    assert len(table) == 7
    lost, read, weights = (table[name] for name in ("bits per byte lost", "tokens read (%)", "weights (×)"))
    assert lost["noise, 1 × the answers"] == round(1.6147 - 1.4930, 2)
    assert lost["256 hidden units for M"] == round(1.4870 - 1.4923, 2)
    assert read["secret embedding, rotated"] == 38
    assert table.loc["4 of 5 layers on the device", "the cloud's M"] == "of the last layer only"
    assert (read["secret embedding, perturbed"], read["the same, cosine up to 0.1"]) == (82, 51)
    assert lost["the same, cosine up to 0.1"] == round(2.1187 - 1.4930, 2)
    assert weights["4 of 5 layers on the device"] == round(7223808 / 2682880, 2)
    assert table.loc["none", "the cloud's M"] == "error 0.00047 from 256 tokens"


@pytest.mark.parametrize(
    ("scheme", "formula", "options"),
    [
        ("plain", communication.low_rank, dict(rank=48, projections=1)),
        ("ladder", communication.ladder, dict(rank=96)),
        ("two layers, folded", communication.low_rank, dict(rank=48, projections=1, adapted_layers=2, folded=True)),
    ],
)
def test_bytes_are_those_of_a_token_without_the_prompt(trips, scheme, formula, options):
    """The same for an adapter in all layers and a ladder, as the formulas have it, at any length of the prompt."""
    traffic = formula(catalog.ModelShape.from_config(load_backbone("plpkg-small")[0].config, "plpkg-small"), **options)
    row = trips.query("rtt_ms == 20").set_index("what").loc[scheme]
    assert row["bytes_per_token"] == (traffic.uplink_bits + traffic.downlink_bits) / 8
    assert row["up_bytes_per_token"] == traffic.uplink_bits / 8


def test_weights_on_the_device_are_those_of_its_part(trips):
    """Where the last u rides down, its B and the norm are there, too."""
    held = trips.query("rtt_ms == 20").set_index("what")["device_parameters"]
    head, hidden, rank = 8192 * 320, 320, 48
    assert held["plain"] == head + 5 * rank**2
    assert held["two layers, folded"] == head + 2 * rank**2 + hidden * rank + hidden
    assert held["ladder"] == head + 5 * 96 * hidden + hidden
