"""What `plpkg ask` does around its two models: here one counts words, and the other says what it is told to."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from plpkg import ask, search
from plpkg.cli import app

from noted import Words, write_notes

READ = ask.Reading("under the blue pot")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PLPKG_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def notes(tmp_path):
    return write_notes(tmp_path)


@pytest.fixture
def finder(notes):
    return search.Search(notes, Words())


def test_an_answer_rests_on_the_passage_that_says_it(finder):
    answer = ask.answered("Joan calls dentist before noon", finder, lambda text, question: READ)
    assert answer.found.passage.text == "The spare key is under the blue pot."
    assert len(answer.others) == 2
    assert answer.found not in answer.others


def test_an_answer_that_stands_nowhere_rests_on_the_best_passage(finder):
    answer = ask.answered("dentist moved", finder, lambda text, question: ask.Reading("to the moon"))
    assert answer.found.passage.text == "dentist moved to Roundhay Road"


def test_the_model_reads_headings_and_passages(finder):
    read = []

    def reads(text, question):
        read.append((text, question))
        return READ

    ask.answered("where is the spare key", finder, reads)
    ((text, question),) = read
    assert text.startswith("Home\nThe spare key is under the blue pot.\n\n")
    assert text.count("\n\n") == ask.NUM_PASSAGES - 1
    assert question == "where is the spare key"


def test_a_file_that_is_edited_while_it_is_read_is_read_again(finder, notes):
    texts = []

    def reads(text, question):
        texts.append(text)
        if len(texts) == 1:
            (notes / "home.md").write_text("The spare key is with Lou.")
        return ask.Reading("with Lou")

    answer = ask.answered("where is the spare key", finder, reads)
    assert len(texts) == 2
    assert answer.found.passage.text == "The spare key is with Lou."
    assert "blue pot" not in str(answer)


def test_a_folder_that_was_emptied_is_said(finder, notes):
    for file in notes.iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="has nothing to read any more"):
        ask.answered("where", finder, lambda text, question: READ)


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
    fields = ask.answered("spare key", finder, lambda text, question: READ).fields()
    assert fields.keys() == {"question", "answer", "passage", "file", "line", "score", "others"}
    assert (fields["file"], fields["line"], fields["answer"]) == ("home.md", 3, "under the blue pot")
    assert all(other.keys() == {"file", "line", "score"} for other in fields["others"])
    assert json.loads(json.dumps(fields)) == fields


def test_a_terminal_is_told_nothing_that_it_would_obey(tmp_path, capsys):
    (tmp_path / "a\x1b[31m.md").write_text("The key is red\x1b[2J\x07 and\tblue.")
    finder = search.Search(tmp_path, Words())
    ask.show(ask.answered("key", finder, lambda text, question: ask.Reading("red\x1b[2J", cloud="\x1b]0;x\x07")))
    printed = capsys.readouterr().out
    assert "The key is red\ufffd[2J\ufffd and blue." in printed
    assert not set(printed) & {"\x07", "\r"}
    assert printed.replace(typer.style("", bold=True), "").count("\x1b") <= 2  # what makes the answer bold


def test_what_is_not_read_is_named_a_line_a_reason():
    skipped = {search.Path(f"{i}.pdf"): "neither .txt nor .md" for i in range(7)} | {search.Path("a.txt"): "a link"}
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
