"""Pruning of both pre-trained networks within a budget, and what it costs. One thread.

Three seeds. The pruned network gets short training in the search (10 steps a trial) and then 400 steps on public data;
the unpruned one gets as many steps on the same data, those of the search included.

* ``words``: budgets of 60 and 35 % of the multiplications; accuracy on public test words.
* ``digits``: budgets of 70 and 40 %; accuracy on the images of the private writers, who nobody has learnt from.
* ``steps``: of the networks of the first seed, CPU ms of a training step of all layers and of the last layer, 16
  samples of 12 words or of 8 × 8 pixels; medians.

Run: ``python -m benchmarks.autonomy.pruning``, about six minutes.
"""

import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.benchmark import Timer

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import Split, evaluate, pretrained, transfer, vocabulary
from plpkg.autonomy.prune import macs, parameters, prune
from plpkg.corpora import Examples, word_examples

SEEDS, SEARCH, RETRAINING = 3, 10, 400
BUDGETS = {"words": (0.6, 0.35), "digits": (0.7, 0.4)}
SETTINGS = {"words": dict(lr=2e-3, batch=32), "digits": dict(lr=3e-3, batch=32, batch_norm=True)}


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for case, (train, validation, test, example) in data().items():
        for seed in range(SEEDS):
            rows += pruned(case, seed, train, validation, test, example)
    record.write("autonomy.pruning", rows)


def data() -> dict[str, tuple[Examples, Examples, Examples, torch.Tensor]]:
    """By network: what it learns from, what the search is scored on, what it is tested on, a step's input."""
    words = vocabulary()
    text = [
        word_examples(corpora.public(s), words, limit=n)
        for s, n in zip(corpora.SPLITS, (300_000, 4_000, 20_000), strict=True)
    ]
    blocks = [corpora.digits().block(i) for i in range(14)]
    known = Examples.joined(Examples(b.images, b.labels) for b in blocks[:7])
    unknown = Examples.joined(Examples(b.images, b.labels) for b in blocks[7:])
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    images = known[order[100:]], known[order[:100]], unknown
    return {"words": (*text, text[2].x[:16, :12]), "digits": (*images, unknown.x[:16])}


def pruned(case: str, seed: int, train, validation, test, example) -> list[dict]:
    """The family of one search, retrained, beside the unpruned network after as many steps."""
    model, trials = pretrained(case), []

    def learn(model: torch.nn.Module, steps: int, seed: int) -> None:
        result = transfer(model, train, None, "all", steps=steps, seed=seed, patience=None, **SETTINGS[case])
        model.load_state_dict(result.model.state_dict())

    def tune(model: torch.nn.Module) -> None:
        trials.append(1)
        learn(model, SEARCH, 1000 * seed + len(trials))

    whole = macs(model, example)
    family = prune(
        model, example, budgets=[share * whole for share in BUDGETS[case]], step=0.2, tune=tune,
        score=lambda each: evaluate(each, validation).accuracy,
    )  # fmt: skip
    learn(model, RETRAINING + min(len(trials) * SEARCH, RETRAINING), seed)
    rows, shares = [], [f"{share:.0%} of the work" for share in BUDGETS[case]]
    for name, each in {"unpruned": model, **dict(zip(shares, (p.model for p in family), strict=True))}.items():
        before = evaluate(each, test).accuracy
        if name != "unpruned":
            learn(each, RETRAINING, seed)
        work, accuracy = macs(each, example), evaluate(each, test).accuracy
        rows.append({
            "section": case, "case": name, "run": seed, "macs": work, "macs_share": round(work / whole, 4),
            "parameters": parameters(each), "accuracy_before": round(before, 5), "accuracy": round(accuracy, 5),
            "trials": len(trials),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        if not seed:
            rows += steps(case, name, each, example)
    return rows


def steps(case: str, name: str, model: torch.nn.Module, x: torch.Tensor) -> list[dict]:
    """The CPU ms of a training step of all layers, and of the last layer, features computed in it."""
    split, model = Split(model), model.eval().requires_grad_()
    shape = x.shape if x.dim() == 2 else x.shape[:1]
    y = torch.randint(10, shape, generator=torch.Generator().manual_seed(0))

    def full() -> None:
        cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        model.zero_grad()

    def last() -> None:
        with torch.no_grad():
            features = split.features(x)
        cross_entropy(split.head(features).flatten(0, -2), y.flatten()).backward()
        model.zero_grad()

    def ms(step) -> float:
        return (
            1e3
            * Timer("step()", globals={"step": step}, timer=time.process_time)
            .blocked_autorange(min_run_time=1.0)
            .median
        )

    return [
        {"section": "steps", "network": case, "case": name, "all_ms": round(ms(full), 4), "last_ms": round(ms(last), 4)}
    ]


if __name__ == "__main__":
    main()
