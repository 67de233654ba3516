"""The explorer: what it shows is what a prefill keeps and the model answers."""

import pytest
import torch

from plpkg.decoding import cache_argument
from plpkg.retention import chunked_prefill, scorers, tiny, widget
from plpkg.show import theme


def test_the_result_is_a_prefill_and_an_answer():
    model, heads = tiny.shipped("pairs")
    task = widget.example()
    kept = widget.compute("Locret", 12, 4)
    ids, prompt_len = tiny.packed(task.ids), task.prompt.shape[1]
    with torch.no_grad():
        read = chunked_prefill(
            model, ids[:, :prompt_len], scorers.Locret(heads["pairs"]), 12, widget.CHUNK, 4, log_positions=True
        )
        logits = model(ids[:, prompt_len:], **cache_argument(read.cache)).logits
    assert kept.mean == pytest.approx(6 * task.accuracy(logits))
    assert kept.right == task.right(logits)[0]
    assert torch.equal(kept.log[-1].kept, read.log[-1].kept)


def test_locret_finds_what_chance_does_not():
    assert widget.compute("Locret", 12, 0).right == 6
    assert widget.compute("oracle", 12, 0).right == 6
    assert widget.compute("random", 12, 0).right < 6  # of 97 units it keeps 12


def test_the_mean_of_random_choice_grows_with_the_budget():
    found = [widget.compute("random", budget, 0).mean for budget in (4, 16, 48)]
    assert found == sorted(found)
    assert found[2] > found[0] + 1  # 48 of 97 units, and 4


@pytest.mark.parametrize("scorer", widget.SCORERS)
@pytest.mark.parametrize(("budget", "stabilizers"), [(4, 16), (48, 0)])
def test_every_position_of_the_sliders_works(scorer, budget, stabilizers):
    kept = widget.compute(scorer, budget, stabilizers)
    assert kept.stabilizers < budget
    assert kept.log[-1].after == budget
    assert f"{kept.right} of 6 values found" in widget.read_out(kept)
    ax = theme.axes()
    widget.draw(kept, ax)
    assert ax.lines


def test_the_figure_shows_every_head():
    ax = theme.axes()
    kept = widget.compute("Locret", 12, 0)
    widget.draw(kept, ax)
    assert [line.get_xdata().tolist() for line in ax.lines] == kept.log[-1].kept[:, 0].flatten(0, 1).tolist()
    assert len(ax.patches) == 6
    assert "layer 1, KV head 1" in theme.alt(ax.figure)
