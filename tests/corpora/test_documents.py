"""What is masked is compared with a plain search for substrings."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from plpkg.corpora import Document, Writer
from plpkg.corpora.documents import SPAN, mask, window_hashes

DOCUMENT = Document("a.py", "0123456789", ((2, 4), (8, 10)))


def writer(**changes):
    parts = {"train": (), "validation": (), "test": (DOCUMENT,)} | changes
    return Writer("w", parts)


def test_masked_spans_are_cut_out():
    assert DOCUMENT.unmasked() == ["01", "4567"]
    assert DOCUMENT.masked_characters == 4
    assert Document("b", "abc").unmasked() == ["abc"]
    assert Document("b", "abc", ((0, 3),)).unmasked() == []
    assert Document("b", "").unmasked() == []


def test_a_split_is_a_list_of_documents():
    assert writer().split("test") == [DOCUMENT]
    with pytest.raises(ValueError, match="split must be one of 'train', 'validation', 'test', got 'dev'"):
        writer().split("dev")


def test_rows_report_size_and_masked_share():
    rows = {row["split"]: row for row in writer(train=(Document("c", "x" * 30),)).rows()}
    assert (rows["test"]["documents"], rows["test"]["characters"], rows["test"]["masked_share"]) == (1, 10, 0.4)
    assert (rows["train"]["characters"], rows["train"]["masked_share"]) == (30, 0)
    assert rows["validation"]["masked_share"] == 0
    assert repr(writer()) == "Writer('w': train 0, validation 0, test 1 documents)"


@pytest.mark.parametrize(
    "other",
    [
        (Document("a.py", "0123456789", ((2, 4),)),),
        (Document("b.py", "0123456789", ((2, 4), (8, 10))),),
        (Document("a.py", "1123456789", ((2, 4), (8, 10))),),
        (DOCUMENT, DOCUMENT),
        (Document("a.py0", "123456789x", ((2, 4), (8, 10))),),
    ],
)
def test_every_part_of_a_split_decides_its_fingerprint(other):
    assert writer().fingerprint("test") == writer().fingerprint("test")
    assert writer(test=other).fingerprint("test") != writer().fingerprint("test")


@pytest.mark.parametrize(
    ("text", "masked", "message"),
    [
        ("0123456789", ((4, 2),), r"a.py: masked spans must be ascending and disjoint, got \(\(4, 2\),\)"),
        ("0123456789", ((0, 4), (3, 6)), "ascending and disjoint"),
        ("0123456789", ((4, 4),), "ascending and disjoint"),
        ("0123456789", ((1, 2, 3),), "ascending and disjoint"),
        ("0123456789", ((-1, 2),), "a.py: a masked span lies outside its 10 characters"),
        ("0123456789", ((8, 11),), "a masked span lies outside its 10 characters"),
        ("ab\ud800", (), r"a.py: character 2 of its text is '\\ud800'"),
        (b"ab", (), "a document's text must be a text, got b'ab'"),
        (None, (), "a document's text must be a text, got None"),
    ],
)
def test_impossible_documents_are_named(text, masked, message):
    with pytest.raises(ValueError, match=message):
        Document("a.py", text, masked)
    with pytest.raises(ValueError, match=r"a\\udce9: character 1 of its name is '\\udce9'"):
        Document("a\udce9", "text")


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
