"""Online learning: what keeping the features saves, and how often a learner is right along a stream. One thread.

* ``cache``: a step of the last layer on 16 samples, CPU ms, medians. ``repeat in a batch``: the forward pass once more
  for all 16, then the last layer's gradient. ``one by one``: forward and backward pass for each sample. ``16 graphs``:
  what autograd kept of the 16 predictions, backward. ``features``: plpkg's, from kept features. ``and logits``: from
  kept features and logits, which are right only if none of the 16 was predicted before the last step. ``saved`` is
  against the first.
* ``stream``: nine writers, 1,500 words each, predicted one after the other, each label told at once; the share that
  was right, of all and of the second half: public model, learner, learner with a guard.
* ``rash``: the same with a learning rate of 10, twenty times as high.

Run: ``python -m benchmarks.autonomy.online``, about four minutes.
"""

import sys
import time

import torch
from torch.nn.functional import cross_entropy

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import HeadSplit, MobileNet, OnlineLearner, WordLSTM, nets, pretrained, vocabulary
from plpkg.autonomy.online import head_gradient
from plpkg.corpora import Examples, word_examples
from plpkg.corpora.examples import IGNORED

BATCH, WORDS = 16, 1_500
CASES = {
    "LSTM, 12 words": (WordLSTM, (BATCH, 12), 10_000),
    "LSTM, 24 words": (WordLSTM, (BATCH, 24), 10_000),
    "CNN, 8 × 8": (MobileNet, (BATCH, 1, 8, 8), 10),
    "CNN, 28 × 28": (lambda: MobileNet(62), (BATCH, 1, 28, 28), 62),
}


def main() -> None:
    torch.set_num_threads(1)
    rows = [row for case in CASES for row in cache(case)]
    model, words = pretrained("words"), vocabulary()
    for name in corpora.writers():
        text = word_examples(corpora.writer(name).split("test"), words, limit=WORDS)
        rows += [stream(section, name, model, text, lr) for section, lr in (("stream", 0.5), ("rash", 10.0))]
        print(*rows[-2:], sep="\n", file=sys.stderr, flush=True)
    record.write("autonomy.online", rows)


def cache(case: str) -> list[dict]:
    """The CPU time of a step on 16 samples, by what was kept of their predictions."""
    build, shape, classes = CASES[case]
    torch.manual_seed(0)
    model = nets.untrained(build()).eval().requires_grad_(False)
    split = HeadSplit(model)
    head = split.head.requires_grad_()
    x = torch.randint(2, classes, shape) if len(shape) == 2 else torch.rand(shape)
    y = torch.randint(classes, (BATCH,))

    def last(features: torch.Tensor) -> torch.Tensor:
        return features[:, -1] if features.dim() == 3 else features

    def batch() -> None:
        with torch.no_grad():
            features = last(split.features(x))
        cross_entropy(head(features), y).backward()
        head.zero_grad()

    def one_by_one() -> None:
        for sample, label in zip(x, y, strict=True):
            with torch.no_grad():
                features = last(split.features(sample[None]))
            (cross_entropy(head(features), label[None]) / BATCH).backward()
        head.zero_grad()

    def graphs() -> None:
        (sum(cross_entropy(each, label[None]) for each, label in zip(kept_graphs, y, strict=True)) / BATCH).backward()
        head.zero_grad()

    with torch.no_grad():
        features = last(split.features(x))
        logits = head(features)

    @torch.no_grad()
    def of_features() -> None:
        head_gradient(head, features, y)

    @torch.no_grad()
    def of_logits() -> None:
        error = logits.softmax(-1)
        error[torch.arange(BATCH), y] -= 1
        error /= BATCH
        _ = error.T @ features, error.sum(0)

    def seconds(step, setup=lambda: None, times: int = 25) -> float:
        measured = []
        for _ in range(times):
            setup()
            began = time.process_time()
            step()
            measured.append(time.process_time() - began)
        return sorted(measured[3:])[len(measured[3:]) // 2]

    def keep() -> None:
        kept_graphs[:] = [head(h[None]) for h in features]

    kept_graphs: list[torch.Tensor] = []
    ways = {
        "repeat in a batch": seconds(batch), "one by one": seconds(one_by_one), "16 graphs": seconds(graphs, keep),
        "features": seconds(of_features), "features and logits": seconds(of_logits),
    }  # fmt: skip
    kept = {"features": features.nbytes, "features and logits": features.nbytes + logits.nbytes}
    base = ways["repeat in a batch"]
    return [
        {"section": "cache", "case": case, "kept": way, "ms": round(1e3 * s, 4), "saved": round(1 - s / base, 4),
         "bytes": kept.get(way)}
        for way, s in ways.items()
    ]  # fmt: skip


def stream(section: str, name: str, model: torch.nn.Module, text: Examples, lr: float) -> dict:
    """How often the public model, a learner and a guarded learner are right, word after word."""
    learners = {who: OnlineLearner(model, lr=lr, allowance=a) for who, a in (("learner", None), ("guarded", 10))}
    for ids, labels in zip(text.x, text.y, strict=True):
        for place in (labels != IGNORED).nonzero()[:, 0].tolist():
            for learner in learners.values():
                learner.label(learner.predict(ids[None, : place + 1]).ids, labels[place : place + 1])
    total = text.labels
    row, half = {"section": section, "case": name, "words": total}, total // 2
    for who, outcomes in (("public", "public"), ("learner", "shown"), ("guarded", "shown")):
        right = [each[outcomes] for each in learners["guarded" if who == "public" else who].rows()]
        row[who] = round(sum(right) / total, 5)
        row[f"{who}_second_half"] = round(sum(right[half:]) / (total - half), 5)
    return row


if __name__ == "__main__":
    main()
