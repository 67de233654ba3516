"""How often plpkg-small and plpkg-reader answer rightly, and how well they still predict text.

* sets: the generator's questions, with what training held out, and two sets that no generator made.
* length, near: the generator's by the tokens of the text, and by how many facts of each sort could be mistaken.
* text: bits per byte of the public test text and of each private writer's.
* transcript: twenty questions, drawn at random from all sets, with the reader's answers.

Shares are of exact matches but for capitals and a full stop, with Wilson's 95 % interval.

Run: ``python -m benchmarks.backbones.reading`` (about QQ minutes), or some sections by name.
"""

import csv
import random
from collections.abc import Callable, Iterator

import torch

from benchmarks import record
from plpkg import catalog, corpora
from plpkg.backbones import READER_POSITIONS, load_backbone
from plpkg.corpora import Passage
from plpkg.corpora.notes import SIDES
from plpkg.questions import ask
from plpkg.scoring import score

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
        return [corpora.reading(rng, **options) for _ in range(count)]

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


MODELS = ("plpkg-small", "plpkg-reader")
COUNT = 200


def loaded(name: str):
    """A model and its tokenizer; plpkg-small may read texts as long as the reader's."""
    model, tokenizer = load_backbone(name)
    model.config.max_position_embeddings = READER_POSITIONS
    return model, tokenizer


def row(model, tokenizer, passages: list[Passage]) -> dict:
    answered = ask(model, tokenizer, passages)
    low, high = answered.interval
    return dict(share=round(answered.share, 4), low=round(low, 4), high=round(high, 4), questions=len(passages))


def rows_of_sets() -> Iterator[dict]:
    for name in MODELS:
        model, tokenizer = loaded(name)
        for title, make in sets(COUNT).items():
            yield dict(case=title, model=name) | row(model, tokenizer, make())


def rows_of_length() -> Iterator[dict]:
    model, tokenizer = loaded("plpkg-reader")
    for tokens in (25, 50, 100, 200, 400, 900):
        yield dict(case="all kinds", x=tokens) | row(model, tokenizer, drawn(COUNT, tokens=tokens)())


def rows_of_near() -> Iterator[dict]:
    model, tokenizer = loaded("plpkg-reader")
    for near in (0, 1, 2, 4):
        passages = drawn(COUNT, facts=14, near=near, kinds=("fact", "event"))()
        yield dict(case="facts and events, of 14", x=near) | row(model, tokenizer, passages)


def rows_of_text() -> Iterator[dict]:
    for name in MODELS:
        model, tokenizer = load_backbone(name)
        for text in ("public", *corpora.writers()):
            found = score(model, tokenizer, corpora.writer(text).split("test"))
            yield dict(case=text, model=name, bits_per_byte=round(found.bits_per_byte, 4))


def rows_of_transcript() -> Iterator[dict]:
    model, tokenizer = loaded("plpkg-reader")
    rng, each = random.Random(20), {title: make() for title, make in sets(COUNT).items()}
    for title in rng.choices(list(each), k=20):
        answered = ask(model, tokenizer, [rng.choice(each[title])])
        yield dict(case=title, text=answered.passages[0].text) | answered.rows()[0]


SECTIONS = {name: globals()[f"rows_of_{name}"] for name in ("sets", "length", "near", "text", "transcript")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("backbones.reading", SECTIONS, __doc__)
