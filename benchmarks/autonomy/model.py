"""plpkg-small made personal by its head, its norms, LoRA, or counts, for nine writers. One thread.

A person has 15,000 tokens for training, 3,000 later ones for validation and 6,000 for the test; 80 steps of 4 windows
of 128 tokens, and what was best on the validation tokens. The head is untied from the embedding first.
Rates were not searched.

* ``model``: bits a byte of the test tokens, each window read alone; CPU seconds of learning.
* ``factors``: LoRA of three people from one start, ‖mean(B) mean(A) - mean(BA)‖ / ‖mean(BA)‖, the mean of all layers.

Run: ``python -m benchmarks.autonomy.model``, about twelve minutes. Not part of ``make bench``.
"""

import math
import sys
import time

import torch

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import baselines, evaluate, transfer
from plpkg.backbones import load_backbone
from plpkg.corpora import Person, token_examples

LIMITS = dict(train=15_000, validation=3_000, test=6_000)


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_backbone("plpkg-small")
    rows, states = [], []
    settings = dict(steps=80, batch=4, evaluate_every=20, patience=3)
    ways = {"head": dict(lr=1e-3), "norm": dict(lr=1e-2), "lora": dict(lr=3e-3)}
    for name in corpora.writers():
        text = corpora.writer(name)
        tokens = {split: corpora.encode(text.split(split), tokenizer) for split in LIMITS}
        person = Person(*(token_examples(tokens[split], limit=LIMITS[split]) for split in LIMITS))
        width = bytes_a_label(tokens["test"], LIMITS["test"])
        for case in ("public only", "own counts", *ways):
            began = time.process_time()
            if case in ways:
                result = transfer(model, person.train, person.validation, case, **ways[case], **settings)
                mine, states = result.model, states + [result.state] * (case == "lora")
            else:
                mine = {"public only": model, "own counts": None}[case] or baselines.counts(model, {name: person})[name]
            seconds, judged = time.process_time() - began, evaluate(mine, person.test)
            rows.append({
                "section": "model", "case": case, "writer": name, "tokens": judged.labels, "cpu_s": round(seconds, 2),
                "bits_per_byte": round(judged.loss / math.log(2) / width, 4),
            })  # fmt: skip
        print(*rows[-5:], sep="\n", file=sys.stderr, flush=True)
    downs = [key for key in states[0] if "lora_A" in key]
    errors = []
    for key in downs:
        up = key.replace("lora_A", "lora_B")
        whole = sum(state[up] @ state[key] for state in states[:3]) / 3
        apart = (sum(state[up] for state in states[:3]) / 3) @ (sum(state[key] for state in states[:3]) / 3)
        errors.append(float((apart - whole).norm() / whole.norm()))
    rows.append({"section": "factors", "case": "three people", "error": round(sum(errors) / len(errors), 4)})
    record.write("autonomy.model", rows)


def bytes_a_label(documents: list, limit: int) -> float:
    """The bytes of text for each label that ``token_examples`` makes with this limit."""
    labels = token_examples(documents, limit=limit).labels
    total, left = 0, labels
    for document in documents:
        scored = document.scored[1:].nonzero()[:left, 0]
        total += int(document.num_bytes[1:][scored].sum())
        left -= len(scored)
        if not left:
            break
    return total / labels


if __name__ == "__main__":
    main()
