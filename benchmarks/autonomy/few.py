"""How few of a person's own examples suffice, and which part of a model to train on them. One thread.

A person has ``examples`` words or tokens, and keeps a fifth as many later ones for validation: who has little has
little to judge by, too. The test is later text again. The state counts that was best on the validation data, which may
be the public model's. Rates are those of ``benchmarks.autonomy.text`` and ``benchmarks.autonomy.model``; that of all
layers of plpkg-small is the better of two on opacus's validation text.

* ``words``: the word predictor, three writers; its head, all of it, and counts of one's own words.
* ``model``: plpkg-small, one writer; each scope that it has (a Llama has no biases), and counts.

Run: ``python -m benchmarks.autonomy.few [words] [model]``, about three minutes each.
"""

import math
import time

import torch

from benchmarks import record
from benchmarks.autonomy.model import bytes_a_label
from plpkg import corpora
from plpkg.autonomy import baselines, evaluate, pretrained, transfer, vocabulary
from plpkg.backbones import load_backbone
from plpkg.corpora import Person, token_examples, word_examples

SPLITS, TEST = corpora.SPLITS, 6_000
WRITERS = {"words": ("matplotlib", "opacus", "peft"), "model": ("opacus",)}
WORDS = {"head": 3e-3, "all": 3e-3}
MODEL = {"head": 1e-3, "norm": 1e-2, "lora": 3e-3, "all": 3e-4}


def limits(examples: int) -> tuple[int, int, int]:
    return examples, examples // 5, TEST


def words():
    model, known = pretrained("words"), vocabulary()
    for name in WRITERS["words"]:
        for examples in (100, 300, 1_000, 3_000, 15_000):
            parts = (corpora.writer(name).split(split) for split in SPLITS)
            person = Person(*(word_examples(p, known, limit=n) for p, n in zip(parts, limits(examples), strict=True)))
            yield from compared(name, person, examples, model, WORDS, dict(steps=200, batch=16, patience=5), 1.0)


def model():
    backbone, tokenizer = load_backbone("plpkg-small")
    for name in WRITERS["model"]:
        parts = [corpora.encode(corpora.writer(name).split(split), tokenizer) for split in SPLITS]
        width = math.log(2) * bytes_a_label(parts[2], TEST)  # nats a token to bits a byte
        for examples in (500, 3_000, 15_000):
            person = Person(*(token_examples(p, limit=n) for p, n in zip(parts, limits(examples), strict=True)))
            yield from compared(name, person, examples, backbone, MODEL, dict(steps=40, batch=4, patience=3), width)


def compared(writer: str, person: Person, examples: int, public, rates: dict, settings: dict, unit: float):
    """Each scope's gain over the public model on the test text, divided by ``unit``."""
    before = evaluate(public, person.test).loss
    for scope in ("own counts", *rates):
        began = time.process_time()
        if scope in rates:
            mine = transfer(public, person.train, person.validation, scope, lr=rates[scope], **settings)
            learnt, values = mine.model, sum(value.numel() for value in mine.state.values())
        else:
            learnt, values = baselines.counts(public, {writer: person})[writer], 0
        seconds = time.process_time() - began
        yield {
            "writer": writer, "case": scope, "examples": examples, "values": values, "cpu_s": round(seconds, 2),
            "gain": round((before - evaluate(learnt, person.test).loss) / unit, 4),
        }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("autonomy.few", {"words": words, "model": model}, __doc__)
