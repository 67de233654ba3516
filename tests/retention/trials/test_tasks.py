"""Tasks: the answer is there, is what the scorer wants, and the length is what was asked."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from plpkg.retention.trials.tasks import (
    BLANK,
    BOS,
    FIRST_KEY,
    FIRST_VALUE,
    QUERY,
    VOCAB,
    lookup,
    pairs_in_noise,
)  # fmt: skip

from rounding import sampling_error


@settings(max_examples=50)
@given(data=st.data(), pairs=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_every_pair_lies_in_the_noise_once(data, pairs, seed):
    length = data.draw(st.integers(2 * pairs, 40))
    task = pairs_in_noise(3, length, pairs=pairs, seed=seed)
    assert task.prompt.shape == (3, 1 + length)
    assert task.answer.shape == (3, 1 + 2 * pairs)
    assert task.ids.shape == (3, length + 2 + 2 * pairs)
    for prompt, answer in zip(task.prompt.tolist(), task.answer.tolist(), strict=True):
        assert (prompt[0], answer[0]) == (BOS, QUERY)
        asked = dict(zip(answer[1::2], answer[2::2], strict=True))
        in_prompt = {k: v for k, v in itertools.pairwise(prompt) if FIRST_KEY <= k < FIRST_VALUE}
        assert in_prompt == asked
        assert len(in_prompt) == pairs
        noise = [t for t in prompt[1:] if not FIRST_KEY <= t < FIRST_VALUE]
        assert len(noise) == length - pairs
        assert all(FIRST_VALUE <= t < VOCAB for t in noise)


def test_places_and_order_are_random():
    task = pairs_in_noise(4000, 8, pairs=2, seed=0)
    keys = (task.prompt >= FIRST_KEY) & (task.prompt < FIRST_VALUE)
    places = keys[:, 1:].float().mean(0)
    # Two pairs lie in 8 places in 15 ways: a key at either end of the first seven in five of them, elsewhere in four.
    expected = torch.tensor([5, 4, 4, 4, 4, 4, 5]) / 15
    assert places[-1] == 0
    assert ((places[:-1] - expected).abs() < sampling_error(1 / 3 * 2 / 3, 4000)).all()
    first_key = task.prompt[torch.arange(4000), keys.int().argmax(1)]
    share = (first_key == task.answer[:, 1]).float().mean().item()
    assert share == pytest.approx(1 / 2, abs=sampling_error(1 / 4, 4000))


def test_asked_twice_ends_with_the_question_that_follows():
    task = pairs_in_noise(3, 20, pairs=3)
    twice = task.asked_twice
    assert torch.equal(twice.prompt[:, :-2], task.prompt)
    assert torch.equal(twice.prompt[:, -2:], twice.answer)
    assert torch.equal(torch.cat([twice.answer, twice.values[:, None]], dim=1), task.answer[:, :3])


def test_accuracy_counts_the_values_alone():
    task = pairs_in_noise(2, 20, pairs=3)
    logits = torch.nn.functional.one_hot(task.answer.roll(-1, dims=1), VOCAB).float()
    assert task.accuracy(logits) == 1.0
    logits[0, 1] = 0.0
    assert task.accuracy(logits) == pytest.approx(5 / 6)
    logits[:, ::2] = 0.0  # what comes after values is not asked
    assert task.accuracy(logits) == pytest.approx(5 / 6)


def test_seeds():
    assert torch.equal(pairs_in_noise(2, 30, seed=1).ids, pairs_in_noise(2, 30, seed=1).ids)
    assert not torch.equal(pairs_in_noise(2, 30, seed=1).ids, pairs_in_noise(2, 30, seed=2).ids)


def test_bad_sizes_get_a_sentence():
    with pytest.raises(ValueError, match="pairs must be between 1 and keys=32, got 33"):
        pairs_in_noise(1, 99, pairs=33)
    with pytest.raises(ValueError, match="length must be a whole number of at least 12, got 11"):
        pairs_in_noise(1, 11)


@pytest.mark.parametrize(("question", "before"), [("last", 1), ("first", 3), ("both", 3)])
def test_a_lookup_asks_for_one_of_its_pairs(question, before):
    task, last = (lookup(50, 5, question=q, seed=3) for q in (question, "last"))
    assert task.prompt.shape == (50, before + 10)
    assert torch.equal(task.values, last.values)
    assert torch.equal(task.prompt[:, before:], last.prompt[:, 1:])
    keys, values = task.prompt[:, before::2], task.prompt[:, before + 1 :: 2]
    asked = last.answer[:, 1:]
    assert torch.equal(values[keys == asked], task.values)
    assert (task.answer[:, 0] == QUERY).all()
    assert torch.equal(task.answer[:, 1:], torch.full_like(asked, BLANK) if question == "first" else asked)
    if question != "last":
        assert torch.equal(task.prompt[:, 2:3], asked)
    assert task.ids.shape == (50, before + 12)


def test_a_lookups_accuracy_is_of_the_last_token():
    task = lookup(4, 3)
    logits = torch.zeros(4, 2, VOCAB)
    logits[:3, 1] = torch.nn.functional.one_hot(task.values[:3], VOCAB).float()
    assert task.accuracy(logits) == 0.75
    with pytest.raises(ValueError, match="question must be one of 'last', 'first', 'both', got 'middle'"):
        lookup(1, question="middle")
