"""What follows from what an onlooker receives, and that the drawing says the same."""

import pytest

from plpkg.communication import onlookers
from plpkg.communication.onlookers import CLOUD, CUSTOMER, LATER, ONLOOKERS, RECEIVED, WIRE
from plpkg.show import theme


def test_a_conclusion_may_be_what_another_rule_needs():
    rules = [({"c"}, "d"), ({"b"}, "c"), ({"a"}, "b")]  # in the order that needs most passes
    assert onlookers.follows({"a"}, rules) == {"a", "b", "c", "d"}
    assert onlookers.follows({"b"}, rules) == {"b", "c", "d"}
    assert onlookers.follows(set(), rules) == set()


def test_a_rule_needs_all_of_its_first_part():
    rules = [({"a", "b"}, "c"), (set(), "public")]
    assert onlookers.follows({"a"}, rules) == {"a", "public"}
    assert onlookers.follows({"a", "b"}, rules) == {"a", "b", "c", "public"}


def test_what_is_received_is_left_as_it_was():
    received = {"embeddings"}
    onlookers.follows(received)
    assert received == {"embeddings"}


@pytest.mark.parametrize(
    ("system", "onlooker", "known"),
    [
        ("PrivateLoRA", CLOUD, {"your words", "M", "what the personal part has learnt"}),
        ("PrivateLoRA", WIRE, {"the lengths of prompt and answer"}),
        ("Multi-tenant LoRA", CLOUD, {"your words", "what the personal part has learnt"}),
        ("Multi-tenant LoRA", CUSTOMER, {"how busy the service is"}),
        ("Ghost clipping", LATER, {"a little of each example, at most what ε allows"}),
    ],
)
def test_who_knows_what(system, onlooker, known):
    sight = onlookers.compute(system, onlooker)
    assert known <= set(sight.conclusions)
    assert all(each in onlookers.read_out(sight) for each in known)


def test_nobody_receives_anything_of_locret_and_autlearn():
    for system in ("Locret", "AutLearn"):
        for onlooker in ONLOOKERS:
            assert "receives nothing of yours" in onlookers.read_out(onlookers.compute(system, onlooker))


def test_only_the_cloud_of_two_systems_reads_words():
    readers = {(s, o) for s in RECEIVED for o in ONLOOKERS if "your words" in onlookers.compute(s, o).conclusions}
    assert readers == {("PrivateLoRA", CLOUD), ("Multi-tenant LoRA", CLOUD)}


def test_every_rule_is_about_something_that_is_received_or_follows():
    received = {each for those in RECEIVED.values() for things in those.values() for each in things}
    received |= {conclusion for _, conclusion in onlookers.RULES}
    assert all(needed <= received for needed, _ in onlookers.RULES)


def test_unknown_names_are_refused_by_name():
    with pytest.raises(ValueError, match="'Signal'"):
        onlookers.compute("Signal", CLOUD)
    with pytest.raises(ValueError, match="'a neighbour'"):
        onlookers.compute("Locret", "a neighbour")


def test_the_drawing_has_every_system_and_onlooker_and_says_what_was_chosen():
    ax = onlookers.draw()
    said = " ".join(text.get_text() for text in ax.texts)
    assert all(system in said for system in RECEIVED)
    assert all(f"{number} {name}" in said for number, name in enumerate(ONLOOKERS, start=1))
    sight = onlookers.compute("PrivateLoRA", CLOUD)
    chosen = onlookers.draw(sight)
    assert onlookers.read_out(sight) in theme.alt(chosen.figure)
    assert set(onlookers.ROWS) == set(RECEIVED)


def test_the_explorer_answers_both_sliders():
    explorer = onlookers.explorer()
    first = explorer.text
    explorer.controls["onlooker"].value = WIRE
    assert "sizes and times" in explorer.text != first
    explorer.controls["system"].value = "Locret"
    assert "nothing of yours" in explorer.text
