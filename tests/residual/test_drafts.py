"""Guesses without a model against a search through strings."""

import pytest
import torch
from hypothesis import given, strategies as st

from plpkg import residual
from plpkg.ngrams import Counts
from plpkg.residual import drafts

text = st.lists(st.integers(0, 2), min_size=1, max_size=12)
count = st.integers(1, 6)


def searched(ids, count):
    """What follows the last place where the last three, two or one characters stand: Python's own search."""
    string = "".join(map(str, ids))
    for length in (3, 2, 1):
        if length < len(string) and (at := string.rfind(string[-length:], 0, len(string) - 1)) >= 0:
            return [int(c) for c in string[at + length :][:count]], length
    return [], 0


@given(text, count)
def test_lookup_is_a_search_for_the_last_words(ids, count):
    assert drafts.lookup(ids, count) == searched(ids, count)[0]
    assert drafts.lookup(torch.tensor(ids).tolist(), count) == drafts.lookup(tuple(ids), count)


def follower(documents, orders, ids):
    """The most frequent follower of the longest context, by a search; the first of equals."""
    for n in sorted(orders, reverse=True):
        before = ids[len(ids) - n + 1 :] if len(ids) >= n - 1 else None
        after = [d[i] for d in documents for i in range(max(1, n - 1), len(d)) if d[i - n + 1 : i] == before]
        if after:
            return max(dict.fromkeys(after), key=after.count)
    return None


@given(st.lists(text, max_size=3), st.sets(st.integers(1, 4), min_size=1).map(sorted), text, count)
def test_counted_is_lookup_or_what_followed_most_often(documents, orders, ids, count):
    found, length = searched(ids, count)
    expected = []
    while length < 2 and len(expected) < count:
        token = follower(documents, orders, ids + expected)
        if token is None:
            break
        expected.append(token)
    guess = drafts.counted(Counts(map(torch.tensor, documents), orders))
    assert guess(ids, count) == (expected or found)


def test_counts_of_public_text_are_made_once_for_a_tokenizer(monkeypatch):
    def encoded(documents, tokenizer):
        asked.append((documents, tokenizer))
        return [type("Tokens", (), {"ids": torch.tensor([1, 2, 3, 4])})]

    asked = []
    monkeypatch.setattr("plpkg.corpora.public", lambda split: [split] * 17)
    monkeypatch.setattr("plpkg.corpora.encode", encoded)
    drafts.public.cache_clear()
    for _ in range(2):
        assert drafts.chosen("public", "a tokenizer")([1, 2], 2) == [3, 4]
    assert asked == [(["train"] * 3, "a tokenizer")]
    drafts.public.cache_clear()


def test_counts_of_a_persons_own_text_are_made_at_the_front_door():
    assert residual.drafts is drafts
    assert residual.drafts.counted(Counts([torch.tensor([1, 2, 3, 4])]))([2], 2) == [3, 4]


def test_a_draft_is_a_name_or_a_function():
    assert drafts.chosen("lookup") is drafts.lookup
    assert drafts.chosen(None) is None
    assert drafts.chosen(searched) is searched
    for draft, message in (
        ("other", "draft must be one of 'lookup', 'public', got 'other'"),
        (7, "draft must be one of .*, got 7"),
        ("public", "draft='public' counts text: give the model's tokenizer as well"),
    ):
        with pytest.raises(ValueError, match=message):
            drafts.chosen(draft)
