"""What `plpkg ask` does around its two models: here one counts words, and the other says what it is told to."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from plpkg import ask, search
from plpkg.cli import app
from plpkg.questions import Reading

from noted import Words, write_notes


def reads(answer="under the blue pot", unknown=-9.0):
    """A reader that is sure of its answer where it stands in the text, and else less."""

    def read(texts, question):
        return [Reading(answer, 0.0 if answer in text else -10.0, unknown) for text in texts]

    return read


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PLPKG_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def notes(tmp_path):
    return write_notes(tmp_path)


@pytest.fixture
def finder(notes):
    return search.Search(notes, Words())


def test_the_surest_answer_is_taken_with_its_passage(finder):
    answer = ask.answered("Joan calls dentist before noon", finder, reads())
    assert answer.found.passage.text == "The spare key is under the blue pot."
    assert len(answer.others) == 2
    assert answer.found not in answer.others


def test_where_all_are_as_sure_the_best_found_passage_is_taken(finder):
    answer = ask.answered("dentist moved", finder, reads("to the moon"))
    assert answer.found.passage.text == "dentist moved to Roundhay Road"


@pytest.mark.parametrize("more", [1.0, 0.1])
def test_search_and_likelihood_are_weighed(more):
    nats = ask.SEARCH * more
    readings = [Reading("a", -9.0, -1.0), Reading("b", -9.0 + 1.1 * nats, -1.0), Reading("c", -9.0 + 0.9 * nats, -1.0)]
    assert ask.surest([0.2 + more, 0.2, 0.2], readings) == 1
    assert ask.surest([0.2 + more, 0.2, 0.2], [readings[0], readings[2], readings[2]]) == 0


@pytest.mark.parametrize(("unknown", "doubtful"), [(ask.DOUBT + 0.01, True), (ask.DOUBT - 0.01, False)])
def test_an_answer_is_doubted_where_its_reader_nearly_said_unknown(finder, capsys, unknown, doubtful):
    answer = ask.answered("spare key", finder, reads(unknown=unknown))
    assert answer.doubtful is answer.fields()["doubtful"] is doubtful
    ask.show(answer)
    assert ("the notes may not say" in capsys.readouterr().out) is doubtful


@pytest.mark.parametrize(
    ("answer", "doubtful"),
    [
        ("beer hotel", True),  # a word of the note, and one of nobody's
        ("the beer's in a cellar", False),  # small words and forms of a word are no others
        ("at 6.40", False),
        ("6:41", True),
        ("Unknown", True),
    ],
)
def test_an_answer_is_doubted_where_it_has_a_word_that_its_passage_has_not(answer, doubtful):
    assert ask.doubted(Reading(answer, -1.0, -9.0), "Beer is in the cellar, from 6:40 on.") is doubtful


def test_the_model_reads_each_passage_under_its_heading(finder):
    seen = []

    def read(texts, question):
        seen.append((texts, question))
        return reads()(texts, question)

    answer = ask.answered("where is the spare key", finder, read)
    ((texts, question),) = seen
    assert texts[0] == "Home\nThe spare key is under the blue pot."
    assert len(texts) == ask.NUM_PASSAGES
    assert answer.texts == texts
    assert question == "where is the spare key"


def test_a_file_that_is_edited_while_it_is_read_is_read_again(finder, notes):
    seen = []

    def read(texts, question):
        seen.append(texts)
        if len(seen) == 1:
            (notes / "home.md").write_text("The spare key is with Lou.")
        return reads("with Lou")(texts, question)

    answer = ask.answered("where is the spare key", finder, read)
    assert len(seen) == 2
    assert answer.found.passage.text == "The spare key is with Lou."
    assert "blue pot" not in str(answer)


def test_a_folder_that_was_emptied_is_said(finder, notes):
    for file in notes.iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="has nothing to read any more"):
        ask.answered("where", finder, reads())


@pytest.mark.parametrize(
    ("question", "whole"),
    [
        ("and until when?", "Where is the bike? and until when?"),
        ("What about the car?", "Where is the bike? What about the car?"),
        ("Anders' birthday?", "Anders' birthday?"),
        ("Where is the android?", "Where is the android?"),
    ],
)
def test_a_follow_up_goes_with_the_question_before_it(question, whole):
    assert ask.with_the_one_before(question, "Where is the bike?") == whole
    assert ask.with_the_one_before(question, None) == question


def test_the_json_has_what_it_promises(finder):
    fields = ask.answered("spare key", finder, reads()).fields()
    assert fields.keys() == {"question", "answer", "passage", "file", "line", "score", "others", "doubtful"}
    assert (fields["file"], fields["line"], fields["answer"]) == ("home.md", 3, "under the blue pot")
    assert all(other.keys() == {"file", "line", "score"} for other in fields["others"])
    assert json.loads(json.dumps(fields)) == fields


def test_a_terminal_is_told_nothing_that_it_would_obey(tmp_path, capsys):
    (tmp_path / "a\x1b[31m.md").write_text("The key is red\x1b[2J\x07 and\tblue.")
    finder = search.Search(tmp_path, Words())
    ask.show(ask.answered("key", finder, reads("red\x1b[2J\x07")))
    printed = capsys.readouterr().out
    assert "The key is red\ufffd[2J\ufffd and blue." in printed
    assert not set(printed) & {"\x07", "\r"}
    assert printed.replace(typer.style("", bold=True), "").count("\x1b") <= 2  # what makes the answer bold


def test_what_is_not_read_is_named_a_line_a_reason():
    skipped = {Path(f"{i}.pdf"): "neither .txt nor .md" for i in range(7)} | {Path("a.txt"): "a link"}
    assert ask.unread(skipped) == (
        "not read (neither .txt nor .md): 0.pdf, 1.pdf, 2.pdf, 3.pdf, 4.pdf and 2 more\nnot read (a link): a.txt"
    )


@pytest.mark.parametrize(
    ("make", "arguments", "sentence"),
    [
        (lambda folder: None, ["nowhere"], "nowhere is not a folder"),
        (lambda folder: (folder / "file").touch(), ["file"], "file is not a folder"),
        (lambda folder: (folder / "empty").mkdir(), ["empty"], "empty has no .txt or .md file with something to read"),
        (lambda folder: (folder / "a.txt").write_text(" \n"), ["."], "has no .txt or .md file"),
        (lambda folder: None, [".", " "], "the question is empty"),
    ],
)
def test_nothing_to_read_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, make, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ask, "Reader", None)  # which would fail with another error
    make(tmp_path)
    result = CliRunner().invoke(app, ["ask", *arguments])
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.replace("│", " ").split())


def test_questions_are_read_a_line_each(monkeypatch, tmp_path):
    file = tmp_path / "questions"
    file.write_bytes(b"one?\n\n \ncaf\xe9?\nlast")
    with file.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert list(ask.lines(terminal=False)) == ["one?", "caf\ufffd?", "last"]
