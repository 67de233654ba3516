"""Tasks: the answer is there, is what the scorer wants, and the length is what was asked."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st

from plpkg.backbones import load_backbone
from plpkg.retention import tasks
from plpkg.retention.tasks import (
    BLANK,
    BOS,
    FIRST_KEY,
    FIRST_VALUE,
    QUERY,
    TASKS,
    VOCAB,
    Sample,
    lookup,
    pairs_in_noise,
    samples,
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
        there = {k: v for k, v in itertools.pairwise(prompt) if FIRST_KEY <= k < FIRST_VALUE}
        assert there == asked
        assert len(there) == pairs
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


# Text.


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [300, 900])
def test_prompts_fill_their_length_and_hold_their_answers(task, length):
    found = list(samples(task, 4, length, seed=3))
    assert len({sample.prompt for sample in found}) == 4
    for sample in found:
        words = len(sample.prompt.split())
        assert 0.8 * length < words <= length
        assert sample.prompt.endswith("\n" + sample.query)
        assert all(answer in sample.prompt for answer in sample.answers)
        assert sample.score(" ".join(sample.answers).upper()) == 1.0
        assert sample.score("nothing of that") == 0.0


def test_the_score_is_the_share_of_answers():
    sample = Sample("x", "", "", ("abc", "def", "ghi", "jkl"))
    assert sample.score("so ABC, and jkl.") == 0.5


def test_lengths_are_the_tokenizers():
    tokenizer = load_backbone("plpkg-small")[1]
    (sample,) = samples("needle", 1, 400, tokenizer)
    assert 360 < len(tokenizer(sample.prompt)["input_ids"]) <= 400


def test_every_sample_has_its_own_words():
    """RULER's code draws the same permutation for every sample."""
    found = [re.findall(r"numbers for (\S+) is", s.prompt) for s in samples("multi-key", 5, 400)]
    assert len({tuple(keys) for keys in found}) == 5
    assert all(len(set(keys)) == len(keys) for keys in found)


def test_variables_lead_back_to_the_value():
    (sample,) = samples("variable tracking", 1, 300)
    links = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt))
    assert set(links) == set(sample.answers)
    for name in sample.answers:
        while name in links:
            name = links[name]
        assert name == re.search(r"the value (\d+)", sample.query)[1]


@pytest.mark.parametrize(("task", "count"), [("common words", 10), ("frequent words", 3)])
def test_the_answers_are_the_most_frequent(task, count):
    (sample,) = samples(task, 1, 2000)
    text = sample.prompt.rpartition("\n")[0]
    words = re.findall(r"[a-z]+-[a-z]+" if task == "common words" else r"[a-z]{6}", text)
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert set(ranked[:count]) == set(sample.answers)
    assert words.count(ranked[count - 1]) > words.count(ranked[count])


def test_there_are_words_for_any_length():
    (sample,) = samples("common words", 1, 40_000)
    assert len(sample.prompt.split()) > 39_000


@pytest.mark.parametrize("length", [75, 80, 90, 120])
def test_short_lists_have_no_ties(length):
    (sample,) = samples("frequent words", 1, length)
    words = re.findall(r"[a-z]{6}", sample.prompt.rpartition("\n")[0])
    assert min(words.count(w) for w in sample.answers) > max(words.count(w) for w in {*words} - {*sample.answers})


def test_the_question_can_stand_first():
    (sample,) = samples("needle", 1, 200, template="{query}\n{text}\n{query}")
    assert sample.prompt.startswith(sample.query)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"the shortest prompt of 'passkey' has .* tokens, more than length=10"):
        next(samples("passkey", 1, 10))
    with pytest.raises(ValueError, match=r"task must be one of 'passkey', .*, got 'essay'"):
        next(samples("essay", 1, 100))


def test_the_word_list_has_no_doubles():
    for words in (tasks.ADJECTIVES, tasks.NOUNS):
        assert len(set(words)) == len(words) > 80
