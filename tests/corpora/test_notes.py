import pytest

from plpkg import corpora
from plpkg.corpora import ABSENT, Notes


def test_notes_of_one_person():
    notes = corpora.notes(0)
    assert isinstance(notes, Notes)
    assert repr(notes) == f"Notes({notes.person!r}, 60 entries, 60 questions)"
    texts = {entry.name: entry.text for entry in notes.entries}
    assert len(texts) == 60
    for question in notes.questions:
        assert set(question.notes) <= set(texts)
        if question.kind == "absent":
            assert question.answer == ABSENT
        else:
            assert any(question.answer in texts[name] for name in question.notes), question
            assert len(question.notes) <= (2 if question.kind == "bridge" else 1)
    assert list(notes.to_frame().columns) == ["question", "answer", "notes", "kind"]
    assert notes == corpora.notes(0) != corpora.notes(2)
    assert len(corpora.notes(3, entries=6).entries) == 6


@pytest.mark.parametrize("arguments", [dict(seed=7), dict(seed=0, entries=61), dict(seed="../0")])
def test_notes_that_nobody_has_drawn_are_named(arguments):
    with pytest.raises(ValueError, match=f"got '{arguments['seed']}_{arguments.get('entries', 60)}'"):
        corpora.notes(**arguments)
