"""Pruning of both pre-trained networks within a budget, and what it costs. One thread.

Three seeds. The pruned network gets short training in the search (10 steps a trial) and then 1,000 steps on public
data; the unpruned one gets as many steps on the same data, those of the search included.

* ``words``: budgets of 60, 30 and 20 % of the multiplications that predict a word from twelve; accuracy on public
  test words.
* ``digits``: budgets of 70 and 40 %; accuracy on the images of the private writers, who nobody has learnt from.
* ``steps``: of the networks of the first seed, CPU ms of a training step of all layers and of the last layer, 16
  samples of 12 words or of 8 × 8 pixels; medians.

Run: ``python -m benchmarks.autonomy.pruning``, about ten minutes.
"""

import statistics
import sys
import time
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import HeadSplit, evaluate, pretrained, transfer, vocabulary
from plpkg.autonomy.prune import macs, prune
from plpkg.corpora import Examples, word_examples

SEEDS, SEARCH, RETRAINING, ROUNDS = 3, 10, 1000, 60
WHAT = ("all_ms", "last_ms")
BUDGETS = {"words": (0.6, 0.3, 0.2), "digits": (0.7, 0.4)}
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
        for s, n in zip(corpora.SPLITS, (None, 4_000, 20_000), strict=True)
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

    resource = partial(work, example=example)
    whole = resource(model)
    family = prune(
        model, example, budgets=[share * whole for share in BUDGETS[case]], step=0.2, tune=tune, resource=resource,
        score=lambda each: evaluate(each, validation).accuracy,
    )  # fmt: skip
    learn(model, RETRAINING + min(len(trials) * SEARCH, RETRAINING), seed)
    shares = [f"{share:.0%} of the work" for share in BUDGETS[case]]
    models, rows = {"unpruned": model, **dict(zip(shares, (p.model for p in family), strict=True))}, []
    for name, each in models.items():
        before = evaluate(each, test).accuracy
        if name != "unpruned":
            learn(each, RETRAINING, seed)
        rows.append({
            "section": case, "case": name, "run": seed, "macs": resource(each),
            "macs_share": round(resource(each) / whole, 4), "parameters": sum(p.numel() for p in each.parameters()),
            "accuracy_before": round(before, 5), "accuracy": round(evaluate(each, test).accuracy, 5),
            "trials": len(trials),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows + steps(case, models, example) * (not seed)


def work(model: torch.nn.Module, example: torch.Tensor) -> int:
    """The multiplications of a prediction for each sample: of words, after the last one only."""
    head = HeadSplit(model).head.weight.numel() if example.dim() == 2 else 0
    return macs(model, example) - (example.numel() - len(example)) * head


def steps(case: str, models: dict[str, torch.nn.Module], x: torch.Tensor) -> list[dict]:
    """The CPU ms of a training step of all layers, and of the last layer, features computed in it."""
    y = torch.randint(10, x.shape[:1], generator=torch.Generator().manual_seed(0))
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):  # one after the other, so that a noisy machine is noisy for all
        for name, model in models.items():
            split = HeadSplit(model.eval())
            for what, trained in (("all_ms", model), ("last_ms", split.head)):
                model.requires_grad_(False)
                trained.requires_grad_()
                began = time.process_time()
                features = split.features(x)  # (samples, ..., features)
                features = features[:, -1] if x.dim() == 2 else features
                cross_entropy(split.head(features), y).backward()
                taken.setdefault((name, what), []).append(1e3 * (time.process_time() - began))
                model.zero_grad()
    ms = {key: statistics.median(values) for key, values in taken.items()}
    first = next(iter(models))
    return [
        {"section": "steps", "network": case, "case": name, **{what: round(ms[name, what], 4) for what in WHAT},
         **{f"{what[:-3]}_saved": round(1 - ms[name, what] / ms[first, what], 4) for what in WHAT}}
        for name in models
    ]  # fmt: skip


if __name__ == "__main__":
    main()
