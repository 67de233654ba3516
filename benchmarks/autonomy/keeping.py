"""What personal learning loses, gives away and would gain otherwise: nine writers, the word predictor. One thread.

A person has the words of ``benchmarks.autonomy.text``, and unless a section says otherwise learns with its settings.

* ``nights``: the loss on the person's own test words and on 6,000 public ones, before a night and after it. ``replay``:
  as many public sentences lie among the person's, in batches of twice the size. ``private``: noise of 1.0 on gradients
  of norm 1, 20 steps of 64 sentences, the last state. Two processes.
* ``members``: the night has seen every second training sentence. The share of pairs in which one that it has seen has
  gained more than one that it has not (0.5: chance), and the share of seen ones found at 1 % of the others.
* ``rates``: the last layer by learning rate; loss on validation and test.
* ``nearest``: no training; the words that followed at the 32 places of the own text with the nearest features, mixed
  with the public model (kNN-LM), temperature and share by the validation loss.
* ``prompt``: plpkg-small, no training; the last 384 training tokens stand before each window of 128 test tokens.
* ``online``: 1,500 test words of one writer, then 1,500 of the next: a learner from the public model, one with a guard,
  the night's model as it is, and a learner from the night's model.
* ``three``: the share of test words that stand first, and among the first three, as a keyboard shows them.

Run: ``python -m benchmarks.autonomy.keeping``, about half an hour, or some of the sections.
"""

import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from benchmarks import record
from benchmarks.autonomy.model import bytes_a_label
from benchmarks.autonomy.text import COMMON, LIMITS
from plpkg import corpora
from plpkg.autonomy import HeadSplit, OnlineLearner, baselines, evaluate, pretrained, transfer, vocabulary
from plpkg.autonomy.nets import logits
from plpkg.backbones import load_backbone
from plpkg.clipping import make_private
from plpkg.corpora import Examples, Person, token_examples, word_examples
from plpkg.corpora.examples import IGNORED

HEAD = dict(scope="head", lr=3e-3, **COMMON)
PRIVATE = dict(scope="head", lr=1e-2, steps=20, batch=64)
NOISE = partial(make_private, noise_multiplier=1.0, max_grad_norm=1.0, seed=0)
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
NEAR, WORDS, BEFORE, WINDOW = 32, 1_500, 384, 128


def people(names: list[str] | None = None) -> dict[str, Person]:
    words = vocabulary()
    return {
        name: Person(*(word_examples(corpora.writer(name).split(s), words, limit=n) for s, n in LIMITS.items()))
        for name in names or corpora.writers()
    }


def nights():
    with ProcessPoolExecutor(2) as pool:
        for rows in pool.map(nights_of, corpora.writers()):
            yield from rows


def nights_of(name: str) -> list[dict]:
    torch.set_num_threads(1)
    model, person = pretrained("words"), people([name])[name]
    public = {s: word_examples(corpora.public(s), vocabulary(), limit=LIMITS[s]) for s in ("train", "test")}
    start, before = evaluate(model, public["test"]), evaluate(model, person.test)
    both = Examples.joined([person.train, public["train"][: len(person.train)]])
    ways = {
        "head": (person.train, person.validation, HEAD),
        "head, a tenth of the rate": (person.train, person.validation, HEAD | dict(lr=3e-4)),
        "head, replay": (both, person.validation, HEAD | dict(batch=32)),
        "head, private": (person.train, None, PRIVATE | dict(private=NOISE)),
        "all": (person.train, person.validation, HEAD | dict(scope="all")),
        "all, replay": (both, person.validation, HEAD | dict(scope="all", batch=32)),
    }
    rows = []
    for case, (train, validation, settings) in ways.items():
        mine = transfer(model, train, validation, **settings).model
        rows.append(row(name, case, before, start, mine, person, public["test"]))
    return rows


def row(name: str, case: str, before, start, mine, person: Person, public: Examples) -> dict:
    own, other = evaluate(mine, person.test), evaluate(mine, public)
    return {
        "writer": name, "case": case, "gain": round(before.loss - own.loss, 4),
        "points": round(100 * (own.accuracy - before.accuracy), 3), "lost": round(other.loss - start.loss, 4),
        "points_lost": round(100 * (start.accuracy - other.accuracy), 3), "words": before.labels,
    }  # fmt: skip


@torch.no_grad()
def losses(model, examples: Examples) -> torch.Tensor:
    """The mean loss of each sentence that has a label."""
    found = []
    for batch in examples.chunks():
        each = torch.nn.functional.cross_entropy(
            logits(model, batch.x).transpose(1, 2).float(), batch.y.clone(), ignore_index=IGNORED, reduction="none"
        )
        known = batch.y != IGNORED
        found.append((each.sum(1) / known.sum(1))[known.any(1)])
    return torch.cat(found)


def members():
    model = pretrained("words")
    for name, person in people().items():
        seen, unseen = person.train[0::2], person.train[1::2]
        ways = {
            "head": (person.validation, HEAD),
            "all": (person.validation, HEAD | dict(scope="all")),
            "head, private": (None, PRIVATE | dict(private=NOISE)),
        }
        for case, (validation, settings) in ways.items():
            mine = transfer(model, seen, validation, **settings)
            ours, others = (losses(model, part) - losses(mine.model, part) for part in (seen, unseen))
            above = (ours[:, None] > others).float().mean() + (ours[:, None] == others).float().mean() / 2
            found = (ours > others.quantile(0.99)).float().mean()
            epsilon = mine.epsilon(delta=1e-4) if mine.epsilon else None
            yield {
                "writer": name, "case": case, "told": round(above.item(), 4), "found": round(found.item(), 4),
                "sentences": len(ours), "epsilon": epsilon,
            }  # fmt: skip


def rates():
    model = pretrained("words")
    for name, person in people().items():
        before = evaluate(model, person.test).loss
        for lr in RATES:
            mine = transfer(model, person.train, person.validation, **HEAD | dict(lr=lr)).model
            validation, test = (evaluate(mine, part).loss for part in (person.validation, person.test))
            yield {"writer": name, "lr": lr, "validation": round(validation, 4), "gain": round(before - test, 4)}


@torch.no_grad()
def nearest():
    model = pretrained("words")
    split = HeadSplit(model)

    def places(examples: Examples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, labels, and the public model's probability of the label, of each place that has one."""
        known, h = examples.y != IGNORED, split.features(examples.x)
        h, y = h[known], examples.y[known]
        return h, y, torch.cat([split.head(a).softmax(-1).gather(1, b[:, None])[:, 0] for a, b in parts(h, y)])

    def parts(h, y):
        return zip(h.split(512), y.split(512), strict=True)

    for name, person in people().items():
        keys, next_words, _ = places(person.train)
        found = {}
        for part, examples in (("validation", person.validation), ("test", person.test)):
            h, y, public = places(examples)
            far, which = torch.cdist(h, keys).topk(NEAR, largest=False)
            found[part] = far**2, next_words[which] == y[:, None], public

        def loss(part: tuple, temperature: float, share: float) -> float:
            far, same, public = part
            near = ((-far / temperature).softmax(-1) * same).sum(-1)
            return -(share * near + (1 - share) * public).log().mean().item()

        grid = [(t, share) for t in (0.3, 1.0, 3.0, 10.0, 30.0) for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
        best = min(grid, key=lambda each: loss(found["validation"], *each))
        gain = loss(found["test"], 1.0, 0.0) - loss(found["test"], *best)
        yield {"writer": name, "case": "nearest features", "temperature": best[0], "share": best[1],
               "gain": round(gain, 4)}  # fmt: skip


def prompts():
    model, tokenizer = load_backbone("plpkg-small")
    for name in corpora.writers():
        texts = {s: corpora.encode(corpora.writer(name).split(s), tokenizer) for s in ("train", "test")}
        train, test = (token_examples(texts[s], seq=WINDOW, limit=LIMITS[s]) for s in ("train", "test"))
        own = train.x[train.y != IGNORED][-BEFORE:].expand(len(test), -1)
        asked = Examples(torch.cat([own, test.x], 1), torch.cat([torch.full_like(own, IGNORED), test.y], 1))
        unit = math.log(2) * bytes_a_label(texts["test"], LIMITS["test"])
        gain = evaluate(model, test).loss - evaluate(model, asked).loss
        yield {"writer": name, "case": "own text in the prompt", "gain": round(gain / unit, 4), "words": test.labels}


def online():
    model, everybody = pretrained("words"), people()
    names = list(everybody)
    streams = {name: word_examples(corpora.writer(name).split("test"), vocabulary(), limit=WORDS) for name in names}
    for name, then in zip(names, names[1:] + names[:1], strict=True):
        night = transfer(model, everybody[name].train, everybody[name].validation, **HEAD).model
        learners = {
            "learner": OnlineLearner(model, allowance=None),
            "guarded": OnlineLearner(model),
            "night": OnlineLearner(night, allowance=None),
        }
        ends = []
        for text in (streams[name], streams[then]):
            for ids, labels in zip(text.x, text.y, strict=True):
                for place in (labels != IGNORED).nonzero()[:, 0].tolist():
                    for learner in learners.values():
                        learner.label(learner.predict(ids[None, : place + 1]).ids, labels[place : place + 1])
            ends.append(len(learners["learner"].rows()))
        first, last = ends
        right = {who: [each["shown"] for each in learner.rows()] for who, learner in learners.items()}
        right["public"] = [each["public"] for each in learners["learner"].rows()]
        right["night, then a learner"] = right["night"]
        right["night"] = [each["public"] for each in learners["night"].rows()]
        third = (last - first) // 3
        for who, each in right.items():
            own, early, late = each[:first], each[first : first + third], each[last - third :]
            shares = {key: round(sum(part) / len(part), 5) for key, part in
                      {"own": own, "after": early, "later": late}.items()}  # fmt: skip
            yield {"writer": name, "then": then, "case": who, "words": first} | shares


def three():
    model = pretrained("words")
    for name, person in people().items():
        nights = {
            scope: transfer(model, person.train, person.validation, **HEAD | dict(scope=scope)).model
            for scope in ("head", "all")
        }
        for case, mine in {
            "public": model,
            **nights,
            "own counts": baselines.counts(model, {name: person})[name],
        }.items():
            first, among = (chosen(mine, person.test, k) for k in (1, 3))
            yield {"writer": name, "case": case, "first": round(first, 5), "three": round(among, 5),
                   "words": person.test.labels}  # fmt: skip


@torch.no_grad()
def chosen(model, examples: Examples, k: int) -> float:
    """The share of labels among the model's first ``k`` choices."""
    found = 0
    for batch in examples.chunks():
        known = batch.y != IGNORED
        found += int((logits(model, batch.x)[known].topk(k).indices == batch.y[known][:, None]).sum())
    return found / examples.labels


SECTIONS = {"nights": nights, "members": members, "rates": rates, "nearest": nearest, "prompt": prompts,
            "online": online, "three": three}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("autonomy.keeping", SECTIONS, __doc__)
