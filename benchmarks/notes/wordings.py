"""The words that :mod:`benchmarks.notes.generator`'s notes are made of, and the small grammar that puts them together.

A wording has slots: ``{e}`` is what it is about (``{e's}`` and ``{o}`` its other cases, ``{he}``, ``{his}`` and
``{him}`` its pronouns), ``{v}`` the value, ``{old}`` another value, ``[like|likes]`` and ``[am|is|are]`` agree with
``{e}``; the name of any list of ``words.csv`` draws one of its items, ``{2-99}`` a number. Wordings are in
the first person; a question can also be put to "you", or name the person.
"""

import csv
import random
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from plpkg import catalog

HERE = Path(__file__).parent
ME, YOU = "I", "you"
"""Who tells or is asked; anybody else is a name."""

PERSON = {"self", "role", "named"}
"""What ``person`` stands for among the classes that a relation can be about."""

_NARRATOR = re.compile(r"\b(I|me|my|we|us|our)\b")
_SLOT = re.compile(r"(\{[^{}]+\}|\[[^\[\]]+\])")
_VERBS = {"am": ("are", "is"), "do": ("do", "does"), "have": ("have", "has"), "was": ("were", "was")}


def held_out(text: str) -> bool:
    """Whether an entity, a relation or a wording is one of the eighth that is never trained on."""
    return zlib.crc32(text.encode()) % 8 == 5


def capital(text: str) -> str:
    """The text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


@cache
def addressed(text: str, view: str) -> "Wording":
    """A first-person wording as it is put to ``"you"``, or about ``"{narrator}"``, a slot for a name."""
    if view == ME:
        return Wording(text)
    third = view != YOU
    text = re.sub(r"\b(am|do|have|was) (?:I|we)\b", lambda match: f"{_VERBS[match[1]][third]} {view}", text)
    text = re.sub(r"\b(?:I|we) (am|do|have|was)\b", lambda match: f"{view} {_VERBS[match[1]][third]}", text)
    text = re.sub(r"\b(?:my|our)\b", f"{view}'s" if third else "your", text)
    return Wording(re.sub(r"\b(?:I|me|we|us)\b", view, text))


@dataclass(frozen=True)
class Entity:
    """What a note is about: ``I``, ``my sister``, ``the old boat``, ``Ola Brenn``.

    Attributes
    ----------
    text
        The noun phrase as the narrator says it.
    kind
        Its class: ``self``, ``role``, ``named``, or one of the classes of things.
    head, owner, modifier
        The noun, whose it is, and what tells it from another: two entities with one head must differ visibly.
    pronoun
        ``he``, ``she``, ``it`` or ``they``.
    speaker
        Whose "I" and "my" these are: ``"I"``, or a name.
    """

    text: str
    kind: str
    head: str
    owner: str = ""
    modifier: str = ""
    pronoun: str = "it"
    speaker: str = ME

    def cases(self, view: str) -> tuple[str, str, str]:
        """Subject, possessive and object for a reader to whom the narrator is ``I``, ``you``, or a name."""
        if self.text == "I":
            return {ME: ("I", "my", "me"), YOU: ("you", "your", "you")}.get(view, (view, f"{view}'s", view))
        text = self.text
        if view != ME and text.startswith(("my ", "our ")):
            text = ("your" if view == YOU else f"{view}'s") + text[text.index(" ") :]
        return text, text + ("'" if self.pronoun == "they" else "'s"), text

    def pronouns(self, view: str) -> tuple[str, str, str]:
        """The same three cases of its pronoun."""
        if self.text == "I" and view in (ME, YOU):
            return self.cases(view)
        return _PRONOUNS[self.pronoun]

    def person(self, view: str) -> int:
        """Which form of a verb goes with it: 0 for I, 1 for he, 2 for you and they."""
        if self.text == "I" and view in (ME, YOU):
            return 0 if view == ME else 2
        return 2 if self.pronoun == "they" else 1


_PRONOUNS = {
    "he": ("he", "his", "him"),
    "she": ("she", "her", "her"),
    "it": ("it", "its", "it"),
    "they": ("they", "their", "them"),
}


class Wording:
    """One wording, cut at its slots once.

    ``narrator``: whether somebody says I in it. ``changed``: whether it names an old value, too. ``value_last``:
    whether it names the entity, then the value, and no other.
    """

    def __init__(self, text: str) -> None:
        self.text, self.held_out = text, held_out(text)
        self.narrator = bool(_NARRATOR.search(text))
        self.changed = "{old}" in text or "{a old}" in text
        self.value_last = not self.changed and 0 <= max(text.find("{e"), text.find("{o}")) < text.find("{v}")
        self.parts = [p for p in _SLOT.split(text) if p]

    def fill(self, rng: random.Random, words: "Words", slots: dict[str, str], person: int = 1) -> str:
        """The wording with its slots filled; a slot that is not in ``slots`` is a list of words."""
        filled = []
        for part in self.parts:
            if part[0] == "{":
                name = part[1:-1]
                if name in slots:
                    filled.append(slots[name])
                elif name.startswith("a "):
                    filled.append(with_article(slots[name[2:]]))
                else:
                    filled.append(words.draw(rng, name))
            elif part[0] == "[":
                forms = part[1:-1].split("|")
                filled.append(forms[person] if len(forms) == 3 else forms[person == 1])
            else:
                filled.append(part)
        return "".join(filled)


def with_article(noun: str) -> str:
    """``a lamp``, ``an umbrella``, ``a uniform``."""
    vowel = noun[0] in "aeiouAEIO" and not noun.startswith(("uni", "use", "eu", "one"))
    return f"{'an' if vowel or noun.startswith(('hour', 'honest', 'X-')) else 'a'} {noun}"


@dataclass(frozen=True)
class Relation:
    """What can be noted about an entity: one row of ``relations.csv``.

    Attributes
    ----------
    id
        Its name.
    about
        The classes of entities that have it.
    value
        The pattern that values are drawn from.
    label
        What it is called in a table; with a colon in front it is no noun that a sentence could use.
    group
        Relations of one group could be asked for in the same words, so that no entity has two of them.
    statements, questions, inverse
        The wordings; ``inverse`` asks for the entity.
    """

    id: str
    about: tuple[str, ...]
    value: str
    label: str
    group: str
    statements: tuple[Wording, ...]
    questions: tuple[Wording, ...]
    inverse: tuple[Wording, ...]


@dataclass(frozen=True)
class Bridge:
    """How one entity is described by another: "the place where my sister works"; a row of ``bridges.csv``."""

    id: str
    about: str
    statements: tuple[Wording, ...]
    description: Wording


class Words:
    """The lists of ``words.csv``, the relations and the bridges."""

    def __init__(self) -> None:
        self.lists: dict[str, list[str]] = {}
        for row in _rows(HERE / "words.csv"):
            self.lists.setdefault(row["list"], []).extend(row["items"].split(" | "))
        self.wordings = {name: _wordings(" | ".join(self.heads(name, False))) for name in self.lists}
        self.relations = [
            Relation(
                row["id"], tuple(row["about"].split()), row["value"], row["label"], row["group"],
                *(_wordings(row[column]) for column in ("statements", "questions", "inverse")),
            )
            for row in _rows(HERE / "relations.csv")
        ]  # fmt: skip
        self.sides = [[r for r in self.relations if held_out(r.id) == held] for held in (False, True)]
        self.bridges = [
            Bridge(row["id"], row["about"], _wordings(row["statements"]), Wording(row["description"]))
            for row in _rows(HERE / "bridges.csv")
        ]
        written = (catalog.data_path("notes", "handwritten.csv"), catalog.data_path("diary", "questions.csv"))
        questions = [row["question"] for path in written for row in _rows(path)]
        self.kept_back = frozenset(question.casefold() for question in questions)
        """Questions of the test sets that were written by hand: none of them is ever asked."""

    @cache  # noqa: B019 - there is one instance
    def heads(self, name: str, held: bool) -> list[str]:
        """The items of a list that training may see, or those that it may not; most lists have none of these."""
        if not name.startswith(("head.", "verb")) and name not in ("kin", "noun"):
            return [] if held else self.lists[name]
        return [item for item in self.lists[name] if held_out(item) == held]

    @cache  # noqa: B019 - as above
    def relations_of(self, kind: str, woman: bool, held: bool) -> list[Relation]:
        """The relations that a class of entities has, of training's or of those held out."""
        names = {kind} | ({"person"} if kind in PERSON else set()) | ({"other"} if kind in ("role", "named") else set())
        names |= {"woman"} if woman and kind in ("role", "named") else set()
        return [r for r in self.relations if held_out(r.id) == held and names & set(r.about)]

    def draw(self, rng: random.Random, name: str) -> str:
        """An item of a list, its own slots filled; or a number, for ``2-99``."""
        items = self.wordings.get(name)
        if items is None:
            low, _, high = name.rpartition("-")
            return str(rng.randint(int(low), int(high)))
        return items[int(rng.random() * len(items))].fill(rng, self, {})

    def value(self, rng: random.Random, pattern: str) -> str:
        """A value of a relation's pattern."""
        return _pattern(pattern).fill(rng, self, {})


@cache
def words() -> Words:
    """Everything that is read from the files beside this one."""
    return Words()


@cache
def _pattern(text: str) -> Wording:
    return Wording(text)


def _wordings(cell: str) -> tuple[Wording, ...]:
    return tuple(Wording(text) for text in cell.split(" | ") if text)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
