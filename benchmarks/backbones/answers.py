"""How often plpkg-small and plpkg-reader answer rightly, and how well they still predict text.

* sets: the generator's questions, with what training held out, and two sets that no generator made.
* length, near: plpkg-reader by the tokens of the text, and by how many facts of each sort could be mistaken.
* text: bits per byte of the public test text and of each private writer's.
* transcript: twenty questions, drawn at random from all sets, with plpkg-reader's answers.

Shares are of exact matches but for capitals and a full stop, with Wilson's 95 % interval.

Run: ``python -m benchmarks.backbones.answers`` (12 minutes), or some sections by name. Not part of ``make bench``.
"""

import random
from collections.abc import Iterator

import torch

from benchmarks import record
from benchmarks.backbones.reading import drawn, sets
from plpkg import corpora
from plpkg.backbones import READER_POSITIONS, load_backbone
from plpkg.corpora import Passage
from plpkg.questions import ask
from plpkg.scoring import score

MODELS = ("plpkg-small", "plpkg-reader")
COUNT = 200
"""Questions of a set that the generator makes."""


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


SECTIONS = {
    "sets": rows_of_sets,
    "length": rows_of_length,
    "near": rows_of_near,
    "text": rows_of_text,
    "transcript": rows_of_transcript,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("backbones.answers", SECTIONS, __doc__)
