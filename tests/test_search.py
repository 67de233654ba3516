"""Passages are cut where a person would, and only what stands in the files now is found."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from plpkg import passages, search

from noted import Words, write_notes

PLACE = Path("place.md")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PLPKG_CACHE", str(folder))
    return folder


@pytest.fixture
def notes(tmp_path):
    return write_notes(tmp_path)


def cut(text):
    return [(passage.line, passage.heading, passage.text) for passage in passages.passages(PLACE, text)]


WRAPPED = "The wall behind the sinks is damp again and the patch is about the size\nof a door by now. " * 2
LIST = "For the weekend:\n- rye flour, two bags\n- dill and beetroot and eggs\n- cat litter, the wood one"
TABLE = "| date | what | how it went |\n|---|---|---|\n| 9 Jan | bowls of beginners | fine |"
COLUMNS = "site | depth m | kelp cover\nCarna | 4.5 | 38\nMweenish | 7 | 71"
CODE = "```\ngit switch main please now\n\ngit pull --rebase it all\n```"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("\n \n", []),
        ("one\n\ntwo\n", [(1, "place", "one\n\ntwo")]),
        ("\n\n  one\n", [(3, "place", "  one")]),
        ("# A\none\n# B\n\ntwo", [(2, "A", "one"), (5, "B", "two")]),
        ("# A\n## B\none\n## C\ntwo\n# D\nsix", [(3, "A\nB", "one"), (5, "A\nC", "two"), (7, "D", "six")]),
        ("# A\n\n# B\none", [(1, "A", "# A"), (4, "B", "one")]),
        ("#hash no heading", [(1, "place", "#hash no heading")]),
        (LIST, [(1, "place", LIST)]),
        (TABLE, [(1, "place", TABLE)]),
        (COLUMNS, [(1, "place", COLUMNS)]),
        (COLUMNS.replace(" | ", "\t"), [(1, "place", COLUMNS.replace(" | ", "\t"))]),
        (CODE, [(1, "place", CODE)]),
        ("```\n# no heading\n```", [(1, "place", "```\n# no heading\n```")]),
        (WRAPPED.strip(), [(1, "place", WRAPPED.strip())]),
        (
            "bike lock combination 4471\ndentist moved to Roundhay Road\nJoan calls before noon",
            [
                (1, "place", "bike lock combination 4471"),
                (2, "place", "dentist moved to Roundhay Road"),
                (3, "place", "Joan calls before noon"),
            ],
        ),
    ],
)
def test_where_a_text_is_cut(text, expected):
    assert cut(text) == expected


@pytest.mark.parametrize(
    "long",
    [
        "".join(f"The boat for island {i} leaves at nine. " for i in range(60)),
        "".join(f"The boat for island {i} leaves at nine.\n" for i in range(60)),
        "".join(f"word{i} " for i in range(400)),
        "".join(f"{i:04}" for i in range(700)),
        "".join(f"- item {i}\n" for i in range(200)),
    ],
)
def test_what_is_long_is_cut_with_nothing_lost(long):
    pieces = passages.passages(PLACE, long)
    assert len(pieces) > 1
    place = 0
    for piece in pieces:
        assert len(piece.text) <= passages.LONGEST
        begin = long.index(piece.text, max(0, place - passages.OVERLAP - 1))
        assert not long[place:begin].strip()  # between two pieces there is nothing but white space
        place = begin + len(piece.text)
    assert not long[place:].strip()


@given(st.text(st.sampled_from("ab .\n#`-|"), max_size=300))
def test_every_passage_is_verbatim_at_its_line_and_no_word_is_lost(text):
    found = passages.passages(PLACE, text)
    lines = text.split("\n")
    for passage in found:
        assert passage.text in text
        assert passage.text.split("\n")[0] in lines[passage.line - 1]
    letters = set("".join(passage.read for passage in found)) & set("ab")
    assert letters >= set(text) & set("ab")


def test_the_best_passage_comes_first_with_its_line(notes):
    finder = search.Search(notes, Words())
    best, *_ = finder.find("where is the spare key")
    assert (best.passage.file, best.passage.line, best.passage.heading) == (Path("home.md"), 3, "Home")
    assert finder.find("dentist moved")[0].passage.line == 2
    assert len(finder.find("key", most=2)) == 2


@given(st.text("ab .!?\n", max_size=1500))
def test_pieces_are_a_passages_sentences_and_nothing_is_lost(text):
    found = list(passages.pieces(text))
    assert found
    assert "".join("".join(found).split()) == "".join(text.split())  # the space between two pieces belongs to neither
    for piece in found:
        assert len(piece) <= passages.PIECE or len(passages.ENDS.findall(piece)) == 0


def test_what_was_edited_added_or_deleted_counts_at_the_next_question(notes):
    embed = Words()
    finder = search.Search(notes, embed)
    (notes / "home.md").write_text("# Home\n\nThe spare key is with Lou.\n\n## Boiler\n\nPress reset twice.\n")
    embed.texts.clear()
    assert finder.find("where is the spare key")[0].passage.text == "The spare key is with Lou."
    said = "The spare key is with Lou."
    assert embed.texts == [said, f"Home\n{said}", "where is the spare key"]  # nothing else anew
    (notes / "more.txt").write_text("The spare key was lost, the spare key is gone.")
    assert finder.find("spare key")[0].passage.file == Path("more.txt")
    for file in notes.iterdir():
        file.unlink()
    assert finder.find("spare key") == []


def test_a_passage_that_changed_says_so(notes):
    finder = search.Search(notes, Words())
    best = finder.find("where is the spare key")[0].passage
    assert finder.still_says(best)
    (notes / "home.md").write_text("\n" + (notes / "home.md").read_text())  # the same words, a line lower
    assert not finder.still_says(best)
    (notes / "home.md").unlink()
    assert not finder.still_says(best)


def test_vectors_are_kept_forgotten_and_the_owners_alone(notes, cache):
    embed = Words()
    search.Search(notes, embed)
    assert len(embed.texts) == 2 * 5  # each passage, and its only piece
    again = Words()
    finder = search.Search(notes, again)
    assert again.texts == []
    (file,) = (cache / "vectors").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    (notes / "lines.txt").unlink()
    gone = hashlib.sha256(b"lines\nbike lock combination 4471").digest()
    assert gone in file.read_bytes()
    finder.find("anything")
    assert gone not in file.read_bytes()
    assert search.remove() == [cache / "vectors"]
    assert search.remove() == []


def test_an_interrupted_embedding_goes_on(tmp_path):
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"note number {number}")

    class Stops(Words):
        def __call__(self, texts, batch=16):
            if len(self.texts) > 100:
                raise KeyboardInterrupt
            return super().__call__(texts)

    first, second = Stops(), Words()
    with pytest.raises(KeyboardInterrupt):
        search.Search(tmp_path, first, progress=False)
    search.Search(tmp_path, second, progress=False)
    said = [f"note number {n}" for n in range(200)]
    assert sorted(first.texts + second.texts) == sorted([*said, *(f"{n}\n{each}" for n, each in enumerate(said))])


def test_what_is_not_read_is_named_with_the_reason(notes):
    (notes / "letter.pdf").write_bytes(b"%PDF")
    (notes / "old.txt").write_bytes(b"caf\xe9")
    (notes / "large.txt").write_bytes(b"a" * (passages.MAX_FILE_BYTES + 1))
    os.symlink("home.md", notes / "link.md")
    os.mkfifo(notes / "pipe.txt")
    (notes / ".git").mkdir()
    (notes / ".git" / "hidden.md").write_text("hidden")
    (notes / "below").mkdir()
    (notes / "below" / "deep.MD").write_text("deep down")
    found, skipped = passages.read_folder(notes)
    assert {str(passage.file) for passage in found} == {"home.md", "lines.txt", "below/deep.MD"}
    reasons = {str(file): reason for file, reason in skipped.items()}
    assert reasons.keys() == {"letter.pdf", "old.txt", "large.txt", "link.md", "pipe.txt"}
    assert reasons["letter.pdf"] == "neither .txt nor .md"
    assert reasons["old.txt"].startswith("is not UTF-8: byte 3, in line 1")
    assert reasons["large.txt"].startswith("has 4,194,305 bytes")


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9-keys.txt")).write_text("The spare key is with Lou.")
    (best,) = search.Search(tmp_path, Words()).find("spare key")
    assert best.passage.heading == "caf\ufffd keys"
    assert best.passage.text == "The spare key is with Lou."


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        passages.read_folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        passages.read_folder(tmp_path / "file")
