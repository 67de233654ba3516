"""Sets of questions about texts: the generator's, with what training held out, and two that no generator made."""

import csv
import random
from collections.abc import Callable

from benchmarks.notes import generator
from benchmarks.notes.generator import SIDES
from plpkg import catalog, corpora
from plpkg.corpora import Passage
from plpkg.questions import ask

PLAIN = dict(kinds=("fact",), voice="prose", near=0, idle=0.0)
COMMON = 16
"""Relations that are asked for everywhere: names, addresses, birthdays, codes, prices."""


def handwritten() -> list[Passage]:
    """Thirty notes that no generator made, each alone with its question."""
    with catalog.data_path("notes/handwritten.csv").open(encoding="utf-8", newline="") as file:
        return [Passage(row["note"], row["question"], row["answer"], "handwritten") for row in csv.DictReader(file)]


def diary() -> list[Passage]:
    """The questions of the diary, each with its entry alone."""
    entries = {entry.name: entry.text for entry in corpora.diary().entries}
    return [Passage(entries[q.date], q.question, q.answer, "diary") for q in corpora.diary().questions]


def among(passages: list[Passage], texts: int, apart: str) -> list[Passage]:
    """Each text at a random place among others of the set, ``texts`` of them altogether."""
    rng, result = random.Random(3), []
    for passage in passages:
        others = rng.sample(sorted({each.text for each in passages} - {passage.text}), texts - 1)
        together = rng.sample([*others, passage.text], texts)
        result.append(Passage(apart.join(together), passage.question, passage.answer, passage.kind))
    return result


def absent(passages: list[Passage], texts: int, apart: str) -> list[Passage]:
    """Each question with other texts of the set, where no answer stands."""
    rng, result = random.Random(4), []
    for passage in passages:
        others = sorted({each.text for each in passages if passage.answer.casefold() not in each.text.casefold()})
        together = apart.join(rng.sample([text for text in others if text != passage.text], texts))
        result.append(Passage(together, passage.question, corpora.ABSENT, "absent"))
    return result


def drawn(count: int, **options) -> Callable[[], list[Passage]]:
    """So many passages of the generator, from other seeds than training's: the values are drawn anew."""

    def draw() -> list[Passage]:
        rng = random.Random(f"test {options}")
        return [generator.reading(rng, **options) for _ in range(count)]

    return draw


def sets(count: int) -> dict[str, Callable[[], list[Passage]]]:
    """Every set of questions; ``count`` for each that the generator makes."""
    made = {f"common, of {n}": drawn(count, facts=n, relations=COMMON, **PLAIN) for n in (2, 5, 9, 14)}
    made |= {f"plain, of {n}": drawn(count, facts=n, **PLAIN) for n in (2, 5, 9, 14)}
    made |= {f"unseen {side}, of 5": drawn(count, facts=5, side=side, **PLAIN) for side in SIDES[1:]}
    made |= {"all kinds, of 5": drawn(count, facts=5)}
    made |= {f"{kind}, of 5": drawn(count, facts=5, kinds=(kind,)) for kind in ("pronoun", "bridge", "event", "absent")}
    return made | {
        "handwritten, alone": handwritten,
        "handwritten, among 5": lambda: among(handwritten(), 5, " "),
        "handwritten, absent from 5": lambda: absent(handwritten(), 5, " "),
        "diary, alone": diary,
        "diary, among 10": lambda: among(diary(), 10, "\n\n"),
    }


def shares(model, tokenizer, questions_a_set: int) -> dict[str, float]:
    """The share of right answers in each set."""
    return {name: round(ask(model, tokenizer, make()).share, 3) for name, make in sets(questions_a_set).items()}
