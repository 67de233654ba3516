"""What is recorded of the families, tried anew, and what tour and site say of it."""

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.residual.families import FAMILIES, METHODS, divided
from plpkg import recorded

TOUR = (Path(__file__).parents[3] / "docs" / "tour.md").read_text()
RECORDED = recorded.section("residual_families", "families").set_index("name")
TRIED = [*zip(FAMILIES, itertools.cycle(METHODS)), *(("OPT", method) for method in METHODS)]
TRIED += [
    ("GLM 4", "folded"),
    ("MiniCPM 3", "late, folded"),
    *((name, "a layer on the device") for name in ("GPT-Neo", "nanochat")),
]
"""Each family by one of the methods in turn, a new one by all, and what is refused for what its numbers show."""


@pytest.mark.parametrize(("family", "method"), dict.fromkeys(TRIED))
def test_it_is_as_recorded(family, method):
    how, said = divided(family, method)
    assert how == RECORDED[method][family], said
    assert how != "refused" or said in RECORDED["reason"][family]


def test_every_family_and_method_is_recorded_and_none_is_wrong():
    assert list(RECORDED.index) == list(FAMILIES)
    assert set(RECORDED.columns) == {*METHODS, "difference", "reason"}
    assert set(RECORDED[list(METHODS)].stack()) == {"ok", "refused"}


@pytest.mark.parametrize(("line", "how"), [("divided", "ok"), ("refused, by a sentence that says why", "refused")])
def test_the_tour_names_them(line, how):
    names = re.search(rf"^- {line}: (.*)$", TOUR, flags=re.M)[1].split("; ")
    assert names == list(RECORDED.index[RECORDED["M"] == how])
