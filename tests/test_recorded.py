import math

import pandas as pd
import pytest

from plpkg import catalog, recorded


def test_a_section_has_its_rows_without_their_origin():
    table, every = recorded.section("residual_attacks", "m"), catalog.measured("residual_attacks")
    assert len(table) == (every["section"] == "m").sum() > 0
    assert not {"command", "commit", "machine", "section"} & set(table)
    assert not table.isna().all().any()


def test_an_unknown_section_lists_those_that_there_are():
    with pytest.raises(ValueError, match=r"title must be one of .*'m'.*, got 'n'"):
        recorded.section("residual_attacks", "n")
    with pytest.raises(ValueError, match=r"corpora has no sections: catalog.measured\('corpora'\)"):
        recorded.section("corpora", "n")


def test_half_width_of_an_interval():
    values = pd.Series([1.0, 2.0, 4.0])
    expected = 4.302652729749464 * values.std() / math.sqrt(3)  # t of 2 degrees of freedom at 0.975
    assert recorded.half_width(values) == pytest.approx(expected, rel=1e-9)
    assert recorded.half_width(pd.Series([*values, math.nan])) == recorded.half_width(values)
    assert math.isnan(recorded.half_width(values[:1]))


def test_a_table_finds_each_row_by_its_values_and_renames_columns():
    rows = {"found first": dict(set="diary", among=1), "among three": dict(set="diary", among=3)}
    columns = {"right": "right", "share, %": "share", "low": "low"}
    table = recorded.table("backbones_asking", rows, columns, section="prose", method="BM25")
    measured = catalog.measured("backbones_asking").query("section == 'prose' and set == 'diary' and method == 'BM25'")
    first, three = measured.to_dict("records")
    assert table.index.to_list() == ["found first", "among three"]
    assert table["right"].to_list() == [f"{first['right']:.0f}", f"{three['right']:.0f}"]
    assert table["share, %"].to_list() == [f"{100 * first['share']:.3g}", f"{100 * three['share']:.3g}"]
    assert table["low"].to_list() == [f"{first['low']:.3g}", f"{three['low']:.3g}"]


def test_a_row_that_is_none_or_several_is_refused():
    for values, count in ((dict(set="no such"), 0), (dict(set="diary"), 2)):
        with pytest.raises(ValueError, match=f"^{count} rows of backbones_asking have .*{values['set']}"):
            recorded.table("backbones_asking", {"row": values}, {"right": "right"}, section="prose", method="BM25")
