"""AutLearn's word predictor on nine private writers, its schemes and those that its paper left out. One thread.

A person has 15,000 words for training, 3,000 later ones for validation and 6,000 for the test (whole modules; fewer if
the writer has fewer). All schemes learn from 200 batches of 16 sentences of each person's, and keep what was best on
the validation words. Loss in nats a word and accuracy, of words that the vocabulary has.

* ``words``: each scheme, each writer, two seeds (of order, and of local learning's first weights).
* ``harm``: AutLearn with no early stopping, ten times the steps.
* ``augmented``: AutLearn with each sentence once more: a synonym in it (neighbours in the embedding, which are no
  synonyms), two words swapped, or (the control) unchanged.
* ``model``: plpkg-small, bits a byte of 6,000 test tokens: its head, norms or LoRA trained on 15,000 tokens in 100
  steps of 4 windows, or counts of the same text.
* ``factors``: LoRA of plpkg-small in three people from one start, ‖mean(B) mean(A) - mean(BA)‖ / ‖mean(BA)‖.

Run: ``python -m benchmarks.autonomy.text``, about half an hour.
"""

import math
import sys
import time
from functools import partial

import torch

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import Examples, Person, baselines, eda, evaluate, pretrained, token_examples, transfer, vocabulary
from plpkg.autonomy.augment import neighbours
from plpkg.autonomy.examples import BEGIN, IGNORED, word_examples
from plpkg.backbones import load_backbone

LIMITS = dict(train=15_000, validation=3_000, test=6_000)
COMMON = dict(steps=200, batch=16, evaluate_every=20, patience=5)
SCHEMES = {
    "public only": lambda model, people, seed: baselines.public_only(model, people),
    "local only": partial(baselines.local_only, lr=1e-2, **COMMON),
    "own counts": lambda model, people, seed: baselines.counts(model, people),
    "all biases": partial(baselines.personal, scope="bias", lr=3e-2, **COMMON),
    "FedAvg": partial(baselines.fed_avg, rounds=5, lr=3e-3, **COMMON),
    "FedAvg, tuned": partial(baselines.fed_avg_tuned, rounds=5, lr=3e-3, **COMMON),
    "CloudTrain": partial(baselines.cloud_train, lr=3e-3, **COMMON),
    "AutLearn: last layer": partial(baselines.personal, lr=3e-3, **COMMON),
    "all layers": partial(baselines.personal, scope="all", lr=3e-3, **COMMON),
    "CloudCustomize": partial(baselines.cloud_customize, lr=3e-3, **COMMON),
}


def main() -> None:
    torch.set_num_threads(1)
    model, words = pretrained("words"), vocabulary()
    texts = {name: corpora.writer(name) for name in corpora.writers()}
    people = {
        name: Person(*(word_examples(text.split(split), words, limit=LIMITS[split]) for split in LIMITS))
        for name, text in texts.items()
    }
    rows = [
        row for seed in range(2) for name, scheme in SCHEMES.items()
        for row in compared("words", name, partial(scheme, seed=seed), model, people, seed)
    ]  # fmt: skip
    long = partial(baselines.personal, lr=3e-3, **COMMON | dict(steps=2000, patience=None))
    rows += compared("harm", "2,000 steps", long, model, people, 0)
    head, near = SCHEMES["AutLearn: last layer"], neighbours(model.embedding.weight, words.words)
    for name in ("duplicate", "synonym", "swap"):
        more = {who: p._replace(train=augmented(p.train, name, near, words)) for who, p in people.items()}
        rows += compared("augmented", name, partial(head, seed=0), model, more, 0)
    rows += language_model(texts)
    record.write("autonomy.text", rows)


def compared(section: str, case: str, scheme, model, people: dict[str, Person], seed: int) -> list[dict]:
    """Each writer's loss and accuracy under a scheme."""
    began = time.process_time()
    models = scheme(model, people)
    seconds = (time.process_time() - began) / len(people)
    rows = []
    for name, person in people.items():
        judged = evaluate(models[name], person.test)
        rows.append({
            "section": section, "case": case, "run": seed, "writer": name, "words": judged.labels,
            "loss": round(judged.loss, 4), "accuracy": round(judged.accuracy, 5), "cpu_s": round(seconds, 2),
        })  # fmt: skip
    mean = [sum(row[key] for row in rows) / len(rows) for key in ("loss", "accuracy")]
    print(section, case, seed, *mean, f"{seconds:.1f} s a person", file=sys.stderr, flush=True)
    return rows


def augmented(train: Examples, operation: str, near, words) -> Examples:
    """The sentences, and each once more, changed."""
    generator, rows = torch.Generator().manual_seed(0), []
    for x, y in zip(train.x, train.y, strict=True):
        length = int((y != IGNORED).nonzero().max()) + 1
        ids = [*x[1:length].tolist(), int(y[length - 1])]
        changed = eda([words.words[i] for i in ids], operation, generator, synonyms=near)
        rows.append(torch.tensor([BEGIN, *words.ids(changed)]))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Examples.joined([train, Examples(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 0, IGNORED))])


def language_model(texts: dict) -> list[dict]:
    """plpkg-small by what is trained, in bits a byte."""
    model, tokenizer = load_backbone("plpkg-small")
    rows, states = [], []
    settings = dict(steps=100, batch=4, evaluate_every=20, patience=3)
    ways = {"head": dict(lr=1e-3), "norm": dict(lr=1e-2), "lora": dict(lr=3e-3)}
    for name, text in texts.items():
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
                "section": "model", "case": case, "writer": name, "words": judged.labels, "cpu_s": round(seconds, 2),
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
    return [*rows, {"section": "factors", "case": "three people", "error": round(sum(errors) / len(errors), 4)}]


def bytes_a_label(documents: list, limit: int) -> float:
    """The bytes of text for each label that ``token_examples`` makes with this limit."""
    examples, total, left = token_examples(documents, limit=limit), 0, None
    left = examples.labels
    for document in documents:
        scored = document.scored[1:].nonzero()[:left, 0]
        total += int(document.num_bytes[1:][scored].sum())
        left -= len(scored)
        if not left:
            break
    return total / examples.labels


if __name__ == "__main__":
    main()
