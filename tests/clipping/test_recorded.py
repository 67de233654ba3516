"""What the record has to show: the targets that were set, and where they are missed."""

import pytest

from plpkg.clipping import recorded


def test_sections_and_cases_are_there():
    assert recorded.DECODER in recorded.cases()
    assert all(len(recorded.section(name)) for name in recorded.SECTIONS)
    with pytest.raises(ValueError, match=r"name must be one of 'cost', .*, got 'costs'"):
        recorded.section("costs")
    with pytest.raises(ValueError, match="case must be one of"):
        recorded.costs("another")


def test_a_plan_costs_less_than_a_third_more_than_sgd():
    costs = recorded.costs(recorded.DECODER).set_index("what")
    assert costs.loc["plan, 1.6 × SGD's memory", "ratio"] <= 1.30
    assert costs.loc["plan, 1.6 × SGD's memory", "peak_ratio"] <= 1.6
    assert costs.loc["Opacus, ghost", "ratio"] > costs.loc["Opacus, hooks", "ratio"] > 1.3


def test_lora_costs_a_tenth_more():
    costs = recorded.costs(recorded.LORA).set_index("what")["ratio"]
    assert costs[["book_keeping", "plan, 1.6 × SGD's memory"]].max() <= 1.10


def test_the_plan_is_faster_than_ghost_everywhere_in_its_memory():
    table = recorded.grid()
    assert len(table) >= 15
    assert (table["ratio"] < 1).all()
    assert (table["peak_ratio"] <= 1.01).all()


def test_learning_is_worth_something_and_privacy_hides_the_secrets():
    accuracy = recorded.learning("accuracy")
    untuned = accuracy[accuracy["method"] == "none"]["bits_per_byte"].mean()
    private = accuracy[accuracy["case"] == "private"]
    assert (private["bits_per_byte"] < untuned).all()
    exposure = recorded.learning("exposure").set_index("case")
    assert (exposure.loc["not clipped", "rank_1"] == 11).all()
    assert (exposure.loc["private", "rank_1"] == 0).all()
    assert (recorded.learning("rate")["noise_multiplier"].dropna() > 0).all()
    with pytest.raises(ValueError, match=r"name must be one of 'rate', .*, got 'cost'"):
        recorded.learning("cost")
