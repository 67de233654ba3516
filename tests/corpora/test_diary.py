from datetime import date

from plpkg import corpora
from plpkg.corpora import Document


def test_answers_stand_in_their_entries():
    diary = corpora.diary()
    entries = {entry.name: entry.text for entry in diary.entries}
    assert len(diary.questions) == 60
    for question in diary.questions:
        assert question.answer in entries[question.date], question
        assert question.answer not in question.question


def test_entries_are_dated_and_in_order():
    diary = corpora.diary()
    dates = [date.fromisoformat(entry.name) for entry in diary.entries]
    assert dates == sorted(set(dates))
    assert repr(diary) == f"Diary({len(dates)} entries from {dates[0]} to {dates[-1]}, 60 questions)"
    assert all(isinstance(entry, Document) and len(entry.text.split()) > 60 for entry in diary.entries)
    assert "##" not in "".join(entry.text for entry in diary.entries)


def test_a_paraphrase_asks_for_a_fact():
    questions = corpora.diary().questions
    facts = {(q.answer, q.date) for q in questions if q.kind == "fact"}
    paraphrases = [q for q in questions if q.kind == "paraphrase"]
    assert paraphrases
    assert all((q.answer, q.date) in facts for q in paraphrases)
    assert len({q.question for q in questions}) == len(questions)
    assert len(facts) + len(paraphrases) == len(questions)
