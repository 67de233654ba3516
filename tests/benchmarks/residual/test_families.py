"""What is recorded of the families, tried anew, and what README and site say of it."""

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.residual.families import FAMILIES, METHODS, divided
from plpkg import recorded

README = (Path(__file__).parents[3] / "README.md").read_text()
RECORDED = recorded.section("residual_families", "families").set_index("name")


@pytest.mark.parametrize(("family", "method"), [*zip(FAMILIES, itertools.cycle(METHODS))])
def test_each_family_by_one_of_the_methods_in_turn(family, method):
    how, said = divided(family, method)
    assert how == RECORDED[method][family], said
    assert how != "refused" or said in RECORDED["reason"][family]


def test_every_family_and_method_is_recorded_and_none_is_wrong():
    assert list(RECORDED.index) == list(FAMILIES)
    assert set(RECORDED.columns) == {*METHODS, "difference", "reason"}
    assert set(RECORDED[list(METHODS)].stack()) == {"ok", "refused"}


@pytest.mark.parametrize(("line", "how"), [("divided", "ok"), ("refused, by a sentence that says why", "refused")])
def test_the_readme_names_them(line, how):
    names = re.search(rf"^- {line}: (.*)$", README, flags=re.M)[1].split("; ")
    assert names == list(RECORDED.index[RECORDED["M"] == how])
