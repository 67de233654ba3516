"""What is masked is compared with a plain search for substrings."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from plpkg.corpora import Document
from plpkg.corpora.overlap import SPAN, Deduplicator, mask, window_hashes

SENTENCE = "The quick brown fox jumps over the lazy dog near the old stone bridge at noon."


def masked(text, *training):
    hashes = np.sort(np.concatenate([window_hashes(t) for t in training]))
    return mask([Document("d", text)], hashes)[0]


def brute(text, training, span):
    """Every character in a window of ``span`` that also stands in the training text."""
    flags = [False] * len(text)
    for i in range(len(text) - span + 1):
        if any(text[i : i + span] in t for t in training):
            flags[i : i + span] = [True] * span
    return flags


def flags(document):
    masked = [False] * len(document.text)
    for start, end in document.masked:
        masked[start:end] = [True] * (end - start)
    return masked


@settings(max_examples=200)
@given(st.data())
def test_masked_spans_are_those_of_a_plain_search(data):
    letters = st.text("abé\n😀", min_size=40, max_size=90)
    training = data.draw(st.lists(letters, min_size=1, max_size=3))
    pieces = [data.draw(st.text("abxy", max_size=30)), data.draw(st.sampled_from(training))]
    start = data.draw(st.integers(0, 30))
    text = pieces[0] + pieces[1][start:] + pieces[0] + pieces[1][: len(pieces[1]) - start]
    document = masked(text, *training)
    assert flags(document) == brute(text, training, SPAN)
    assert all(a < b for a, b in document.masked)
    assert all(b < c for (_, b), (c, _) in zip(document.masked, document.masked[1:], strict=False))


def test_fifty_characters_are_masked_and_forty_nine_are_not():
    shared = SENTENCE[:SPAN]
    assert masked(f"!{shared}!", f"?{shared}?").masked == ((1, SPAN + 1),)
    assert masked(f"!{shared[:-1]}!", f"?{shared[:-1]}?").masked == ()


def test_no_training_text_masks_nothing():
    assert masked(SENTENCE, "short").masked == ()


def test_hash_depends_on_the_text_alone_not_on_its_place():
    inside = window_hashes("anything before " * 9 + SENTENCE)
    assert np.isin(window_hashes(SENTENCE), inside).all()
    assert len(np.unique(window_hashes(SENTENCE))) == len(SENTENCE) - SPAN + 1


def test_a_paragraph_seen_before_is_dropped_and_the_new_one_stays():
    keep = Deduplicator()
    assert keep([SENTENCE]) == SENTENCE
    new = "Something entirely different is told in this other paragraph here."
    assert keep([f"{SENTENCE.upper()}\n\n{new}"]) == new
    assert keep([SENTENCE]) == ""


def test_numbers_do_not_make_a_paragraph_new():
    keep = Deduplicator()
    assert keep(["Added in version 3.11 of the library, changed in 3.12 of it."])
    assert keep(["Added in version 2.7 of the library, changed in 3.0 of it."]) == ""


def test_part_of_an_earlier_paragraph_is_a_duplicate():
    keep = Deduplicator()
    keep([SENTENCE])
    assert keep(["quick brown fox jumps over the lazy dog near"]) == ""


def test_half_new_is_new():
    keep = Deduplicator()
    keep([SENTENCE])
    text = "The quick brown fox jumps over every fence that our neighbours put up last year."
    assert keep([text]) == text


def test_headings_stay_only_beside_something_longer():
    keep = Deduplicator()
    assert keep([f"{SENTENCE}\n\nSee also"]) == f"{SENTENCE}\n\nSee also"
    assert keep([f"{SENTENCE}\n\nSee also"]) == ""
    assert keep(["See also"]) == "See also"
    assert keep(["See also", "See Also."]) == ""


def test_order_decides_who_keeps_a_text():
    first, second = Deduplicator(), Deduplicator()
    other = f"{SENTENCE} And then it rests for a while in the shade."
    assert (first([SENTENCE]), first([other])) == (SENTENCE, "")
    assert (second([other]), second([SENTENCE])) == (other, "")


@pytest.mark.parametrize("text", ["", "a", "x" * (SPAN - 1)])
def test_short_texts_have_no_window(text):
    assert len(window_hashes(text)) == 0
