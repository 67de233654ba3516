"""Notes with questions by many hands (``data/notes/hands``): what smollm2-reader learns from, and what measures it.

A hand is a file by one writer: ten persons, twelve notes each, and questions about them, some of which no note answers.
Hands 1 to 12 are notes of everyday life; 13 to 22 are lists, tables, mails, minutes, dates, code, chats, instructions,
journals, and notes that are easily confused. Two hands choose (:data:`CHOOSING`), and two that nothing was chosen by
report (:data:`REPORTING`): ``plain``, where questions and notes mostly share words, and ``misleading``, where a
question shares more words with a wrong note than with the right one.
"""

import csv
import functools
import json
from dataclasses import dataclass

from plpkg import catalog

CHOOSING = ("hand10", "hand22")
REPORTING = ("plain", "misleading")


@dataclass(frozen=True)
class Question:
    """``answers`` are all that is accepted, the best first; ``note`` says which note answers, None that none does."""

    question: str
    answers: tuple[str, ...]
    note: int | None


@dataclass(frozen=True)
class Collection:
    """One person's notes, and the questions about them."""

    who: str
    notes: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def answerable(self) -> list[Question]:
        return [each for each in self.questions if each.note is not None]

    @property
    def absent(self) -> list[Question]:
        return [each for each in self.questions if each.note is None]


@functools.cache
def collections(hand: str) -> tuple[Collection, ...]:
    """The persons of one hand."""
    whole = json.loads(catalog.data_path("notes", "hands", f"{hand}.json").read_text(encoding="utf-8"))
    return tuple(
        Collection(
            each["who"],
            tuple(each["notes"]),
            tuple(Question(q["q"], tuple(q["a"] or ()), q["note"]) for q in each["questions"]),
        )
        for each in whole["collections"]
    )


def training_hands() -> list[str]:
    """All that are learnt from, in their order."""
    names = [path.stem for path in catalog.data_path("notes", "hands").glob("hand*.json")]
    return sorted((name for name in names if name not in CHOOSING), key=lambda name: int(name.removeprefix("hand")))


def handwritten() -> list[tuple[str, str, str]]:
    """Thirty older notes by another writer, each with a question and its answer."""
    with catalog.data_path("notes", "handwritten.csv").open(encoding="utf-8", newline="") as file:
        return [(row["note"], row["question"], row["answer"]) for row in csv.DictReader(file)]
