"""Each figure draws what its rows say, and says so in words; the widget says what its simulation gave."""

import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from plpkg.serving.popularity import ARRIVALS
from plpkg.serving.service import plots, widget
from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.simulation import Arrival, arrivals, simulate
from plpkg.show import theme

SLOTS = pd.DataFrame({"slots": [4, 8], "hit_rate": [0.25, 0.5], "first_token_p99_s": [2.0, 0.5]})
TOKENS = pd.DataFrame({"request": ["running 0"] * 3 + ["cold 0"] * 2, "token_s": [0.0, 0.01, 0.27, 0.1, 0.3]})
TOKENS = TOKENS.assign(what="blocking")
COMING = [Arrival(0, "ann", 1, 4), Arrival(1, "bob", 1, 2), Arrival(3, "ann", 1, 1)]
RESULT = simulate(COMING, Scheduler(slots=1), fetch_s=2, step_s=1, token_s=0)
RUNS = "ann from 0.0, runs 2.0 to 6.0; bob from 1.0, runs 6.0 to 8.0; ann from 3.0, runs 3.0"
FIRST = "all: half within 3.00 s, all in 6.00 s"


@pytest.mark.parametrize(
    ("plot", "data", "said"),
    [
        (plots.timeline, RESULT, RUNS),
        (plots.first_tokens, {"all": RESULT}, FIRST),
        (plots.hit_rates, SLOTS, "4 slots: 25 %; 8 slots: 50 %"),
        (plots.slowest, SLOTS, "4 slots: 2.00 s; 8 slots: 0.50 s"),
        (plots.cold_start, TOKENS, "blocking: the first request's longest pause is 260 ms"),
    ],
)
def test_figures_say_what_they_draw(plot, data, said):
    ax = plt.subplots()[1]
    assert plot(data, ax) is ax
    assert said in theme.alt(ax.figure)


def test_a_bar_for_each_step_of_each_request():
    bars = plots.timeline(RESULT).patches
    assert [bar.get_x() for bar in bars] == [0, 1, 3, 2, 3, 3, 2, 6, 3]
    assert [bar.get_width() for bar in bars] == [2, 2, 0, 0, 3, 0, 4, 2, 1]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 3
    slots = plots.timeline(RESULT, plt.subplots()[1], slots=1).patches[9:]
    assert [(bar.get_x(), bar.get_width()) for bar in slots] == [(2, 4), (6, 2)]  # bob's when both of ann's end


def test_values_are_drawn():
    lines = *plots.hit_rates(SLOTS, best={8: 0.75}).lines, *plots.slowest(SLOTS).lines
    assert [list(line.get_ydata()) for line in lines] == [[25, 50], [75], [2, 0.5]]
    ax = plots.cold_start(TOKENS)
    assert [patch.get_x() for patch in ax.patches] == [0.01]  # its one long pause
    lines = ax.lines
    assert [line.get_xdata().tolist() for line in lines] == [[0, 0.01, 0.27], [0.1], [0.3]]
    assert [set(line.get_ydata()) for line in lines] == [{0}, {1}, {1}]


def test_only_what_has_a_slot_is_in_the_batch():
    ax = plots.service(["ann", "bob", "cem", "dee", "eva"])
    texts = [text.get_text() for text in ax.texts]
    assert [texts.count(f"{name}'s") for name in ("ann", "bob", "cem", "dee", "eva")] == [4, 4, 3, 2, 1]
    assert {text for text in texts if "next token" in text} == {"ann: next token", "bob: next token"}
    assert "slots: ann, bob. eva waits for the store, dee waits for the disk, cem waits for a slot" in ax.alt_text


def test_the_widget_says_and_draws_its_simulation_beside_the_one_before():
    before, result = (widget.compute(32, 16, patience, 0.25) for patience in (math.inf, 2.0))
    busy, rare = widget.parts(result).values()
    assert len(busy.rows()) + len(rare.rows()) == len(result.rows())
    assert f"{widget.shown(rare.first_token_s(1))} at worst; the busy" in widget.read_out(result)
    assert widget.shown(0.05) == "50 ms"
    assert widget.shown(305.697) == "305.7 s"
    ax = widget.draw(result, plt.subplots()[1], before)
    assert [max(line.get_ydata()) for line in ax.lines] == [100] * 4
    assert [line.get_color() for line in ax.lines[:2]] == ["0.7"] * 2
    assert [len(line.get_ydata()) for line in ax.lines[2:]] == [len(busy.rows()), len(rare.rows())]


def test_patience_slots_and_popularity_decide_who_waits():
    waits = [widget.compute(32, 16, patience, 0.25).of(widget.RARE).first_token_s(1) for patience in (2.0, math.inf)]
    assert 2 * waits[0] < waits[1]
    few, many = (widget.compute(32, slots, 2.0, 0.25) for slots in (12, 17))
    assert few.first_token_s(0.99) > many.first_token_s(0.99)
    kinds = [simulate(arrivals(400, 11, 200, kind), Scheduler()).tokens_per_s for kind in ARRIVALS]
    assert kinds == sorted(kinds)


def test_each_position_of_each_control_changes_words_and_picture():
    explorer = widget.explorer()
    first = explorer.values
    for name, control in explorer.controls.items():
        words, pictures, options = set(), set(), len(control.options)
        for control.index in range(options):
            words.add(explorer.text)
            pictures.add(explorer._image.value)
        assert len(words) == len(pictures) == options, name
        control.value = first[name]
