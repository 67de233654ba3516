"""The recorded tables: what is averaged over what, checked against the rows themselves."""

import pandas as pd
import pytest

from plpkg import catalog
from plpkg.residual import recorded


@pytest.fixture(scope="module")
def rows():
    return catalog.measured("residual_quality")


def test_each_method_is_averaged_over_writers_whose_seeds_are_averaged_first(rows):
    table = recorded.personalisation()
    quality = rows.query("section == 'quality'")
    for method in ("none", recorded.LORA, "PrivateLoRA r=16"):
        own = quality.query("method == @method")
        means = [own.query("case == @writer")["gain"].mean() for writer in own["case"].unique()]
        assert table.loc[method, "gain"] == pytest.approx(sum(means) / len(means))
        assert list(recorded.gains().loc[method]) == pytest.approx(means)
        assert table.loc[method, "share_of_lora"] == table.loc[method, "gain"] / table.loc[recorded.LORA, "gain"]
    assert table.loc[recorded.LORA, "share_of_lora"] == pytest.approx(1)
    assert table.loc["none", "share_of_lora"] == 0


def test_the_interval_is_students():
    # Four values with a standard deviation of 2: half the interval is 3.182 * 2 / 2.
    assert recorded.half_width(pd.Series([1.0, 1.0, 1.0, 5.0])) == pytest.approx(3.182, abs=5e-4)
    assert recorded.half_width(pd.Series([1.0])) != recorded.half_width(pd.Series([1.0]))  # NaN


def test_m_s_is_recomputed_from_its_parts(rows):
    quality = rows.query("section == 'quality'")
    for writer, own in quality.groupby("case"):
        none = own.query("method == 'none'").iloc[0]
        for row in own.dropna(subset="m_s").itertuples():
            m_s = row.tokens_per_s / none.tokens_per_s * (row.accuracy - none.accuracy)
            assert row.m_s == pytest.approx(m_s, abs=3e-3), (writer, row.method)  # from rounded accuracies


def test_every_section_of_the_attacks_is_there():
    for section in recorded.ATTACKS:
        assert len(recorded.attack(section)) >= 2
    with pytest.raises(ValueError, match=r"section must be one of .*, got 'guess'"):
        recorded.attack("guess")


def test_defences_are_shown_with_their_costs():
    rows = recorded.attack("embedding")
    shown = recorded.embedding()
    assert shown.size == len(rows)
    for row in rows.itertuples():
        found = shown.xs(row.case, level="case")[row.attacker]
        assert found.item() == row.recovered
        assert found.index.get_level_values("bits_per_byte")[0] == row.bits_per_byte
    assert list(recorded.nonlinear()["copy_bits_per_byte"]) == list(recorded.attack("nonlinear")["copy_bits_per_byte"])
    assert list(recorded.answers()["error"]) == list(recorded.attack("answers")["error"])


def test_the_strongest_attacker_is_taken():
    table = recorded.attack("inversion")
    best = recorded.strongest_inversion()
    for first_k, own in table.groupby("x"):
        assert best[first_k] == own["recovered"].max()


def test_migration_and_diary_name_what_was_done():
    assert {"M kept", "closed form, own text", "closed form, public text"} < set(recorded.migration().index)
    table = recorded.migration()
    for backbone, what in (("old", "old backbone, its M"), ("updated", "closed form, own text")):
        without, bits = table.loc[f"{backbone} backbone, no M", "mean"], table.loc[what, "mean"]
        assert table.loc[what, "gain"] == pytest.approx(without - bits)
    assert recorded.diary().loc["none"].str.startswith("0 of").all()
    assert set(recorded.speed().columns) > {"one process"}


def test_what_crossed_is_the_rows_that_it_says():
    rows = catalog.measured("residual_wire")
    table = recorded.links()
    assert set(table["waits"]) == {"asleep", "busy"}
    assert len(table) == len(rows.query("section == 'link'"))
    for waits, own in table.groupby("waits"):
        assert own["link"].is_unique
        mine = rows.query("section == 'link' and waits == @waits and what == 'r=64' and batch == 1")
        shown = own.query("link == 'r=64, RTT 5 ms'")["ratio"].item()
        assert shown == mine[mine["case"].str.endswith("RTT 5 ms")]["ratio"].item()
        speed = rows.query("section == 'speed' and waits == @waits and what == 'split'")["ratio"].item()
        assert recorded.two_processes().loc["split", waits] == speed
        whole = rows.query("section == 'speed' and waits == @waits and what == 'one process'")["tokens_per_s"].item()
        shown = recorded.two_processes().loc["split, 60/100 Mb/s, RTT 5 ms", waits]
        assert shown == mine[mine["case"].str.endswith("RTT 5 ms")]["tokens_per_s"].item() / whole
    many = table[table["link"].str.endswith("256 sequences")]
    assert len(many) == 6
    assert many["held_ratio"].isna().all()  # many pieces at once
    speeds = rows.query("section == 'link' and waits == 'busy' and batch == 1 and case.str.endswith('RTT 5 ms')")
    speeds = speeds.set_index("what")["tokens_per_s"]
    assert list(recorded.speed_ups().columns) == ["r=16", "r=64"]
    at_5_ms = recorded.speed_ups().loc["60/100 Mb/s, RTT 5 ms", "busy"]
    assert at_5_ms["r=16"] == speeds["r=16"] / speeds["full activations"]
    trips = rows.query("section == 'round trip' and what == 'call'")
    assert recorded.round_trips().loc["call", "median_us"] == trips["median_us"].item()
