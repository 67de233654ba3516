"""The learning rates are those of the recorded search, on facts that are not asked."""

from benchmarks.residual import diary
from plpkg import catalog


def test_rates_are_those_with_the_least_loss_on_other_facts():
    rows = catalog.measured("residual_diary").query("case == 'other facts'")
    assert {tuple(sorted(tried["lr"])) for _, tried in rows.groupby("method")} == {diary.TRIED}
    best = rows.loc[rows.groupby("method")["loss"].idxmin()].set_index("method")["lr"].to_dict()
    assert best == diary.RATES
    asked = catalog.measured("residual_diary").query("case == 'fact' and method in @diary.RATES").set_index("method")
    assert asked["lr"].to_dict() == diary.RATES


def test_other_facts_are_no_facts():
    true, other = diary.facts(), diary.other_facts()
    assert [q.question for q in true] == [q.question for q in other]
    assert sorted(q.answer for q in true) == sorted(q.answer for q in other)
    assert all(q.answer != o.answer for q, o in zip(true, other, strict=True))
