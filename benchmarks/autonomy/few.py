"""How few of a person's own examples suffice, and which part of a model to train on them. One thread.

A person has ``examples`` words or tokens, and keeps a fifth as many later ones for validation: who has little has
little to judge by, too. The test is later text again. The state counts that was best on the validation data, which may
be the public model's. Rates are those of ``benchmarks.autonomy.text`` and ``benchmarks.autonomy.model``; that of all
layers of plpkg-small is the better of two on opacus's validation text.

* ``words``: the word predictor, three writers; its head, all of it, and counts of one's own words.
* ``diary``: the invented diary, whose words are far from the public text, three orders of the samples. The latest lines
  of the first 70 % that have so many words together, a fifth as many for validation from the next 15 %, and the last
  15 % as the test. ``first`` and ``three``: points of right words more, by the first choice and among three.
* ``model``: plpkg-small, one writer; each scope that it has (a Llama has no biases), and counts.

Run: ``python -m benchmarks.autonomy.few [words] [diary] [model]``, about three minutes each.
"""

import math
import time

import torch

from benchmarks import record
from benchmarks.autonomy.keeping import chosen
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


def latest(lines: list[str], words: int) -> list[str]:
    """The latest lines that have at least so many words, or all."""
    start, count = len(lines), 0
    while start and count < words:
        start -= 1
        count += len(lines[start].split())
    return lines[start:]


def diary():
    model, known = pretrained("words"), vocabulary()
    lines = [line for entry in corpora.diary().entries for line in entry.text.splitlines() if line]
    first, second = 7 * len(lines) // 10, 17 * len(lines) // 20
    test = word_examples(lines[second:], known)
    before = evaluate(model, test).loss, chosen(model, test, 1), chosen(model, test, 3)
    for examples in (100, 300, 1_000, 3_000):
        own = latest(lines[:first], examples), latest(lines[first:second], examples // 5)
        person = Person(*(word_examples(part, known) for part in own), test)
        nights = [
            ("head", seed, transfer(model, person.train, person.validation, steps=200, lr=3e-3, seed=seed).model)
            for seed in range(3)
        ]
        for case, seed, mine in [*nights, ("own counts", 0, baselines.counts(model, {"me": person})["me"])]:
            after = evaluate(mine, test).loss, chosen(mine, test, 1), chosen(mine, test, 3)
            yield {
                "writer": "diary", "case": case, "order": seed, "examples": examples,
                "gain": round(before[0] - after[0], 4), "first": round(100 * (after[1] - before[1]), 3),
                "three": round(100 * (after[2] - before[2]), 3),
            }  # fmt: skip


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
    record.sections("autonomy.few", {"words": words, "diary": diary, "model": model}, __doc__)
