"""Notes of invented people, with questions whose answers stand in them.

They were drawn once, by a generator that is no longer part of the project, and are data (``data/notes/people``).
"""

import json
from dataclasses import dataclass

from plpkg import catalog
from plpkg.corpora.documents import Document
from plpkg.results import Tabular
from plpkg.validation import one_of

ABSENT = "the notes do not say"
"""The answer to a question that the notes leave open."""


@dataclass(frozen=True)
class Asked:
    """A question about somebody's notes.

    Attributes
    ----------
    question, answer
        The answer stands verbatim in the notes, or is ``ABSENT``.
    notes
        The names of the notes that have to be read for it: one, two for a bridge, and those of what is near it if
        the answer is absent.
    kind
        ``fact``, ``pronoun``, ``bridge``, ``absent`` or ``event``.
    """

    question: str
    answer: str
    notes: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Notes(Tabular):
    """The notes of one invented ``person``: ``entries`` in their order, and ``questions`` about them."""

    person: str
    entries: tuple[Document, ...]
    questions: tuple[Asked, ...]

    def rows(self) -> list[dict]:
        return [vars(question) | {"notes": ", ".join(question.notes)} for question in self.questions]

    def __repr__(self) -> str:
        return f"Notes({self.person!r}, {len(self.entries)} entries, {len(self.questions)} questions)"


def notes(seed: int, *, entries: int = 60) -> Notes:
    """The notes of one invented person, with questions about them.

    Parameters
    ----------
    seed
        Which person.
    entries
        The number of notes.

    Raises
    ------
    ValueError
        There are no notes of this person, or not so many.
    """
    people = catalog.data_path("notes", "people")
    kept = sorted(path.stem for path in people.glob("*.json"))
    name = one_of("notes, as seed_entries,", f"{seed}_{entries}", tuple(kept))
    whole = json.loads((people / f"{name}.json").read_text(encoding="utf-8"))
    documents = tuple(Document(name, text) for name, text in whole["entries"].items())
    questions = tuple(Asked(**each | {"notes": tuple(each["notes"])}) for each in whole["questions"])
    return Notes(whole["person"], documents, questions)
