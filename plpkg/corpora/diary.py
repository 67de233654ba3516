"""The diary of an invented person, with questions that only its reader can answer.

For experiments on memorisation and privacy: short facts (a locker's code, a dog's name) that occur nowhere
else, so that whoever can tell them has learnt from the diary.
"""

import csv
import re
from dataclasses import dataclass

from plpkg import catalog
from plpkg.corpora.documents import Document
from plpkg.results import Tabular


@dataclass(frozen=True)
class Question:
    """A question about the diary.

    Attributes
    ----------
    question, answer
        The answer occurs verbatim in the entry.
    date
        The entry's name.
    kind
        ``fact``, or ``paraphrase``: a second wording of a fact's question.
    """

    question: str
    answer: str
    date: str
    kind: str


@dataclass(frozen=True)
class Diary(Tabular):
    """The diary: ``entries`` in the order of their dates, and ``questions`` about them."""

    entries: tuple[Document, ...]
    questions: tuple[Question, ...]

    def rows(self) -> list[dict]:
        return [vars(question) for question in self.questions]

    def __repr__(self) -> str:
        first = self.entries[0].name
        last = self.entries[-1].name
        return f"Diary({len(self.entries)} entries from {first} to {last}, {len(self.questions)} questions)"


def diary() -> Diary:
    """Read the diary from ``data/diary/``: hand-written for this project, every person and number invented."""
    text = catalog.data_path("diary/entries.md").read_text(encoding="utf-8")
    # What stands before the first date, then a date, its entry, a date, its entry …
    _, *parts = re.split(r"^## (\d{4}-\d{2}-\d{2})\n+", text, flags=re.MULTILINE)
    dates = parts[::2]
    bodies = parts[1::2]
    entries = tuple(Document(date, body.strip()) for date, body in zip(dates, bodies, strict=True))
    with catalog.data_path("diary/questions.csv").open(encoding="utf-8", newline="") as file:
        questions = tuple(Question(**row) for row in csv.DictReader(file))
    return Diary(entries, questions)
