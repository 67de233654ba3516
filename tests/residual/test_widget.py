"""The explorer starts with nothing known; a sentence is read as it passes, and M falls where tokens reach its rank."""

import pytest
import torch

from plpkg.residual import widget
from plpkg.show import theme
from plpkg.show.explorer import Explorer

SENTENCE = "Nobody knows what I write here."


def last(*values):
    """Tokens that have passed, the copy's error, and that of its answers."""
    passed, pair = list(widget.compute(*values).errors.items())[-1]
    return passed, *pair


def test_it_starts_unsolved_and_takes_a_sentence_of_yours():
    explorer = widget.explorer()
    assert isinstance(explorer, Explorer)
    assert "knows nothing of your 10 tokens, nor of the 32 × 32 numbers" in explorer.text
    explorer.controls["sentence"].value = "A cat"
    assert "nothing of your 2 tokens" in explorer.text
    explorer.controls["sent"].value = 0
    assert "reads “A cat”, 2 of 2 tokens right" in explorer.text


@pytest.mark.parametrize("text", ["", "$x_1$ é 日本 <b>", SENTENCE, "word " * 3000])
def test_any_text_is_read(text):
    theft = widget.compute(text, 0, 4, 1)
    assert theft.read == text
    assert theft.right == theft.tokens


@pytest.mark.parametrize("rank", widget.RANKS)
def test_m_is_open_below_its_rank_and_had_above(rank):
    errors = widget.compute("", 1024, rank, 2).errors
    assert all(min(pair) > 0.1 for n, pair in errors.items() if n < 0.8 * rank)
    assert all(max(pair) < 0.01 for n, pair in errors.items() if n >= 2 * rank)


def test_the_error_is_that_of_the_copy_on_what_it_has_not_seen():
    """Of two inputs that span a plane, the copy knows M there and nothing beside it."""
    x = torch.eye(8)[:2]
    inside, beside = (widget.errors(x, 4, others)[2] for others in (x.repeat(3, 1), torch.eye(8)[2:]))
    assert inside[0] == beside[0]
    assert inside[1] < 0.01 < 0.3 < beside[1]


def test_repeated_words_tell_nothing_new_in_the_lowest_layer():
    repeated = "no no no no no no no no"
    assert last(repeated, 0, 4, 0)[1] > 0.5
    assert last(repeated, 0, 4, 2)[1] < 0.05


def test_what_is_read_is_what_the_cloud_has_from_the_wire(monkeypatch):
    monkeypatch.setattr(widget, "recover_tokens", lambda *_: torch.zeros(10, dtype=torch.long))
    assert widget.compute(SENTENCE, 0, 4, 2).right == 0


def test_the_figure_has_both_errors():
    theft, ax = widget.compute(SENTENCE, 64, 32, 2), theme.axes()
    widget.draw(theft, ax)
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [
        list(each) for each in zip(*theft.errors.values(), strict=True)
    ]
    assert "rank 32 in layer 2" in theme.alt(ax.figure)
    empty = widget.draw(widget.compute(SENTENCE, widget.NOTHING, 32, 2), theme.axes())
    assert "nothing has been sent" in theme.alt(empty.figure)


def test_it_does_not_disturb_the_stream_of_random_numbers():
    state = torch.get_rng_state()
    widget.compute(SENTENCE, 16, 8, 1)
    assert torch.equal(state, torch.get_rng_state())
