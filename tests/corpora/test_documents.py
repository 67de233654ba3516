import pytest

from plpkg.corpora import Document, Writer

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
