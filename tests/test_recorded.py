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
