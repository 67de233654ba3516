"""AutLearn's word predictor on nine private writers, its schemes and those that its paper left out. One thread.

A person has 15,000 words for training, 3,000 later ones for validation and 6,000 for the test (whole modules; fewer if
the writer has fewer). All schemes learn from 200 batches of 16 sentences of each person's, and keep what was best on
the validation words. Loss in nats a word and accuracy, of words that the vocabulary has.

* ``words``: each scheme, each writer.
* ``augmented``: AutLearn with each sentence once more: a synonym in it (neighbours in the embedding, which are no
  synonyms), two words swapped, or (the control) unchanged.

Rates of the last layer, of biases and of all layers are those of three each with the least validation loss of seaborn,
opacus and sklearn together; schemes that train all layers share theirs, local learning's was not searched.

Run: ``python -m benchmarks.autonomy.text``, about fifteen minutes. Not part of ``make bench``.
"""

import sys
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn.functional import normalize

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import baselines, eda, evaluate, pretrained, vocabulary
from plpkg.corpora import Examples, Person, word_examples
from plpkg.corpora.examples import BEGIN, IGNORED

LIMITS = dict(train=15_000, validation=3_000, test=6_000)
COMMON = dict(steps=200, batch=16, evaluate_every=20, patience=5)
SCHEMES = {
    "public only": baselines.public_only,
    "local only": partial(baselines.local_only, lr=1e-2, **COMMON),
    "own counts": baselines.counts,
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
    people = {
        name: Person(*(word_examples(text.split(split), words, limit=LIMITS[split]) for split in LIMITS))
        for name, text in ((name, corpora.writer(name)) for name in corpora.writers())
    }
    rows = [row for name, scheme in SCHEMES.items() for row in compared("words", name, scheme, model, people)]
    head, near = SCHEMES["AutLearn: last layer"], cache(neighbours(model.embedding.weight, words.words))
    for name in ("duplicate", "synonym", "swap"):
        more = {who: p._replace(train=augmented(p.train, name, near, words)) for who, p in people.items()}
        rows += compared("augmented", name, head, model, more)
    record.write("autonomy.text", rows)


def compared(section: str, case: str, scheme, model, people: dict[str, Person]) -> list[dict]:
    """Each writer's loss and accuracy under a scheme."""
    began = time.process_time()
    models = scheme(model, people)
    seconds = (time.process_time() - began) / len(people)
    rows = []
    for name, person in people.items():
        judged = evaluate(models[name], person.test)
        rows.append({
            "section": section, "case": case, "writer": name, "words": judged.labels,
            "loss": round(judged.loss, 4), "accuracy": round(judged.accuracy, 5), "cpu_s": round(seconds, 2),
        })  # fmt: skip
    mean = [sum(row[key] for row in rows) / len(rows) for key in ("loss", "accuracy")]
    print(section, case, *mean, f"{seconds:.1f} s a person", file=sys.stderr, flush=True)
    return rows


def neighbours(embedding: torch.Tensor, words: list[str], k: int = 5) -> Callable[[str], list[str]]:
    """Of a word the ``k`` whose rows of an embedding ``(vocab, hidden)`` are nearest to its own by cosine.

    They stand in for synonyms, and are none: what is near is used in like places, an opposite, too.
    """
    unit, rows = normalize(embedding.detach().double(), dim=1), {word: row for row, word in enumerate(words)}

    def nearest(word: str) -> list[str]:
        if word not in rows:
            return []
        cosines = unit @ unit[rows[word]]  # (vocab,)
        cosines[rows[word]] = -torch.inf
        return [words[row] for row in cosines.argsort(descending=True, stable=True)[:k].tolist()]

    return nearest


def augmented(train: Examples, operation: str, near, words) -> Examples:
    """The sentences, and each once more, changed."""
    generator, rows = torch.Generator().manual_seed(0), []
    for x, y in zip(train.x, train.y, strict=True):
        length = int(((y != IGNORED) * torch.arange(1, len(y) + 1)).max())
        ids = [*x[1:length].tolist(), int(y[length - 1])] if length else []
        changed = eda([words.words[i] for i in ids], operation, generator, synonyms=near)
        rows.append(torch.tensor([BEGIN, *words.ids(changed)]))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Examples.joined([train, Examples(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 0, IGNORED))])


if __name__ == "__main__":
    main()
