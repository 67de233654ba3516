"""Six designs and four onlookers: what reaches whom, beside what was recorded."""

import itertools

import pytest

from plpkg import catalog
from plpkg.communication import designs
from plpkg.communication.designs import ASKING, DESIGNS, FILE, LATER, ONLOOKERS, TRAINING
from plpkg.show import theme

ALL = list(itertools.product(DESIGNS, ONLOOKERS))


@pytest.mark.parametrize(("design", "onlooker"), ALL)
def test_every_view_names_what_is_received_and_what_follows(design, onlooker):
    view = designs.compute(design, onlooker)
    said = designs.read_out(view)
    assert all(each in said for each in (*view.received, *view.conclusions))
    assert ("receives nothing" in said) == (not view.received)
    assert said in theme.alt(designs.draw(view).figure)


def test_nobody_but_who_asks_has_anything_of_a_search_at_home():
    views = {onlooker: designs.compute("search, at home", onlooker) for onlooker in ONLOOKERS}
    assert [onlooker for onlooker, view in views.items() if view.received] == [ASKING]


def test_only_the_wire_is_read_while_it_learns_and_has_no_file():
    readers = [design for design in DESIGNS if designs.compute(design, TRAINING).received]
    assert readers == ["M, over the wire"]
    assert "your words" in designs.compute("M, over the wire", LATER).conclusions
    assert not designs.compute("M, over the wire", FILE).received


def test_the_attacks_are_the_rows_means_the_worst_first():
    rows = catalog.measured("assistant")
    for design in ("device", "device, small", "device, ε=7"):
        told = designs.attacks(design)
        some = rows[(rows["model"] == "plpkg-small") & (rows["design"] == design)]
        means = some[some["attack"].isin(designs.ATTACKS)].groupby("attack")["auc"].mean()
        assert {each.name: each.auc for each in told.attacks} == pytest.approx(means.to_dict())
        assert told.attacks[0].auc == pytest.approx(means.max())
        assert all(each.low <= each.auc <= each.high for each in told.attacks)
    assert designs.attacks("device").bound == 1
    assert designs.attacks("device, ε=1").bound < designs.attacks("device, ε=7").bound < 1


def test_the_figure_says_every_design_whose_file_leaves_home():
    said = theme.alt(designs.worst().figure)
    served = {name for name, design in DESIGNS.items() if FILE in design.received}
    assert all(name in said for name in served)
    assert said.count("allowed") == sum("ε" in name for name in served)


def test_unknown_names_are_refused_by_name():
    with pytest.raises(ValueError, match="'a pigeon'"):
        designs.compute("a pigeon", FILE)
    with pytest.raises(ValueError, match="'a neighbour'"):
        designs.compute("adapter, served", "a neighbour")
    with pytest.raises(ValueError, match="'device, large'"):
        designs.attacks("device, large")


def test_the_explorer_answers_both_sliders():
    explorer = designs.explorer()
    first = explorer.text
    explorer.controls["design"].value = "small adapter, ε = 1"
    second = explorer.text
    explorer.controls["onlooker"].value = TRAINING
    assert len({first, second, explorer.text}) == 3
