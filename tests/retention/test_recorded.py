"""The recorded tables, recomputed from their rows; the figures that must hold."""

import pytest
from scipy.stats import t

from plpkg import catalog
from plpkg.retention import recorded


def test_sections_lose_their_origin_and_empty_columns():
    rows = recorded.section("positions")
    assert list(rows.columns) == ["case", "x", "accuracy"]
    with pytest.raises(ValueError, match="got 'nothing'"):
        recorded.section("nothing")
    assert set(catalog.measured("retention_quality")["section"]) <= set(recorded.SECTIONS)


def test_budget_is_the_mean_over_models():
    rows = recorded.section("budget")
    own = rows[(rows["case"] == "H2O") & (rows["x"] == 16)]
    assert len(own) == own["model_seed"].nunique() == 5
    found = recorded.budget().set_index(["case", "x"]).loc[("H2O", 16)]
    assert found["mean"] == pytest.approx(own["of_full"].mean())
    assert found["ci"] == pytest.approx(t.ppf(0.975, 4) * own["of_full"].std() / 5**0.5)


def test_shares_are_of_the_same_models_full_cache():
    rows = recorded.section("budget")
    full = rows[rows["case"] == "full cache"].set_index("model_seed")["accuracy"]
    for row in rows.dropna(subset="x").itertuples():
        assert row.of_full == pytest.approx(row.accuracy / full[row.model_seed])


def test_cases_keep_their_order():
    table = recorded.by_case("length")
    assert list(table.index)[:2] == ["full cache", "Locret, 16 units"]
    assert list(table.columns) == sorted(table.columns)
    rows = recorded.section("length")
    first = rows[(rows["case"] == "Locret, 32 units") & (rows["x"] == 16_384)]
    assert table.loc["Locret, 32 units", 16_384] == first["accuracy"].item()


def test_keys_and_values_are_the_formula_at_every_length():
    flat = recorded.section("flat")
    assert flat["x"].max() == 65_536
    assert (flat["kib"] == flat["formula_kib"]).all()
    assert flat["kib"].nunique() == 1
