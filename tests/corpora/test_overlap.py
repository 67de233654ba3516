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
    assert masked(SENTENCE, "short").masked == ()


def test_hash_depends_on_the_text_alone_not_on_its_place():
    inside = window_hashes("anything before " * 9 + SENTENCE)
    assert np.isin(window_hashes(SENTENCE), inside).all()
    assert len(np.unique(window_hashes(SENTENCE))) == len(SENTENCE) - SPAN + 1
    assert [len(window_hashes(short)) for short in ("", "a", "x" * (SPAN - 1))] == [0, 0, 0]


LONGER = f"{SENTENCE} And then it rests for a while in the shade."
HEADED = f"{SENTENCE}\n\nSee also"
NEW = "Something entirely different is told in this other paragraph here."
HALF = "The quick brown fox jumps over every fence that our neighbours put up last year."


@pytest.mark.parametrize(
    ("earlier", "texts", "kept"),
    [
        ([], [SENTENCE], SENTENCE),
        ([SENTENCE], [SENTENCE], ""),
        ([SENTENCE], [f"{SENTENCE.upper()}\n\n{NEW}"], NEW),
        ([SENTENCE], [HALF], HALF),  # half new is new
        ([SENTENCE], ["quick brown fox jumps over the lazy dog near"], ""),  # a part of an earlier paragraph
        ([SENTENCE], [LONGER], ""),
        ([LONGER], [SENTENCE], ""),
        (["Added in version 3.11, changed in 3.12 of it."], ["Added in version 2.7, changed in 3.0 of it."], ""),
        ([], [HEADED], HEADED),  # a heading stays beside something longer
        ([HEADED], [HEADED], ""),
        ([HEADED], ["See also"], "See also"),
        ([HEADED, "See also"], ["See also", "See Also."], ""),
    ],
)
def test_only_paragraphs_that_are_new_are_kept(earlier, texts, kept):
    keep = Deduplicator()
    for text in earlier:
        assert keep([text]) == text
    assert keep(texts) == kept
