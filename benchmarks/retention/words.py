"""Answers in words from a cache under a budget: plpkg-reader reads fourteen notes and is asked for one of them.

Fourteen plain notes of common relations are about 320 tokens. In longer texts there is little to lose: with a full
cache plpkg-reader answers too few questions about 900 tokens (``benchmarks.backbones.answers``, "length").

* heads: retaining heads for plpkg-reader, trained on texts with questions; they come with the package.
* long: the same notes in texts of up to 60, some 1,400 tokens, under a budget of 64. In "the right note" a span holds
  the units of the sentence with the answer, in "another note" those of another sentence, and the rest is a sink and the
  latest: what a choice would be worth that knew the question. Everything else here chooses without it.
* budget: right answers by budget and method. The question comes after the text, when the cuts are made (``after``); or
  it is the end of what is read, so that methods that score by the last queries see it (``last``); or it stands before
  the text as well (``first``). Every method keeps the latest eighth of its budget, and what it protects by itself.
* oracle: the texts of ``budget``, asked after, under a choice by the labels of that very question and its right answer;
  nothing is protected. Do units exist that would do, and does a choice of single tokens find them?
* rounded: the texts of ``budget``, asked after, with every unit kept in 4 or 2 bits, in groups of 32 numbers.
* wrong: of the answers to the texts of ``budget``, put once the text is read, which are right, which are "the notes do
  not say" and which are something else; and how well the answer's probability tells right from something else (the
  share of pairs in which the right one is likelier).
* transfer: how much of what an answer looks at most the shipped heads still predict on texts unlike those that they
  learnt from: longer ones, relations never seen, and how documentation and Python code go on.

Run: ``python -m benchmarks.retention.words`` (about half an hour), or one of the sections. Not part of ``make bench``.
"""

import itertools
import random
import re
import time
from collections.abc import Iterator

import pandas as pd
import torch

from benchmarks import record
from benchmarks.backbones.reading import COMMON, PLAIN
from benchmarks.notes import generator
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.corpora import Passage
from plpkg.corpora.docstrings import sources
from plpkg.questions import LONGEST, Answered, prompt, same
from plpkg.recorded import half_width
from plpkg.retention import RetainingHeads, chunked_prefill, cis_labels
from plpkg.retention.cache import UnitStore
from plpkg.retention.labels import labels_and_states
from plpkg.retention.quantize import quantized
from plpkg.retention.scorers import H2O, KeyNorm, Locret, Random, Scorer, SinkRecent, SnapKv, Static
from plpkg.retention.train import overlap, train_heads
from plpkg.retention.trials.text import continuations

HEADS = record.DATA.parent / "retention" / "plpkg-reader"
NOTES = dict(relations=COMMON, **PLAIN)
FACTS, CHUNK, ALL = 14, 32, 2048
BUDGETS = (256, 192, 128)
STEPS, COUNT = 2000, 80
"""Texts that the heads learn from, and questions of the test, each with a text of its own."""
LENGTHS, SMALL, LONG_COUNT = (14, 28, 60), 64, 60
"""Notes of a longer text, the budget for it, and how many texts there are of each length."""


def encoded(tokenizer, text: str, start: bool = True) -> torch.Tensor:
    """Ids ``(1, seq)``."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([[tokenizer.bos_token_id] * start + ids])


def parts(passage: Passage, question: str, tokenizer) -> tuple[str, str]:
    """What is read under the budget, and what is put to it afterwards."""
    asked = prompt("", passage.question, tokenizer)
    if question == "last":
        return passage.text + asked, asked
    if question == "first":
        return f"Question: {passage.question}\n\n{passage.text}", asked
    return passage.text, asked


def examples(
    tokenizer, count: int, seed: str = "retaining heads", **options
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Texts of four to twenty notes, each with up to eight questions and their answers."""
    rng = random.Random(seed)
    for _ in range(count):
        passages = generator.readings(rng, 8, **NOTES | {"facts": rng.randint(4, 20)} | options)
        asked = "".join(f"{prompt('', each.question, tokenizer)} {each.answer}\n" for each in passages)
        yield encoded(tokenizer, passages[0].text), encoded(tokenizer, asked, start=False)


def rows_of_heads() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads, began = RetainingHeads.attach(model), time.process_time()
    log = train_heads(model, heads, examples(tokenizer, STEPS), steps=STEPS, lr=2e-3, warmup=50, progress=False)
    heads.save_pretrained(HEADS)
    last = log.to_frame().tail(60).mean()
    yield dict(
        case="plpkg-reader", x=STEPS, loss=last["loss"], overlap=last["overlap"], cpu_s=time.process_time() - began
    )


def scorers(heads: RetainingHeads, recent: int) -> dict:
    """The methods; each protects the latest units, ``recent`` of them or as it does by itself."""
    return {
        "Locret": Locret(heads, recent=recent),
        "SnapKV": SnapKv(recent=recent),
        "H2O": H2O(recent=recent),
        "key norm": KeyNorm(recent=recent),
        "random": Random(recent=recent),
        "sink + recent": SinkRecent(),
    }


@torch.no_grad()
def asked_of(model, tokenizer, read, asked: str) -> tuple[str, float]:
    """What is answered to a question, and the mean log-probability of the answer's tokens."""
    ids = encoded(tokenizer, asked, start=False)
    options = dict(max_new_tokens=LONGEST, do_sample=False, stop_strings="\n", tokenizer=tokenizer)
    tokens = read.ask(model, ids, pad_token_id=tokenizer.pad_token_id, **options)
    nats = read.score(model, torch.cat([ids, tokens], dim=1))[0, ids.shape[1] :].mean().item()
    return tokenizer.decode(tokens[0], skip_special_tokens=True).partition("\n")[0].strip(), nats


@torch.no_grad()
def answered(
    model, tokenizer, passages: list[Passage], question: str, scorer, budget: int, keep=None, store=UnitStore
) -> Answered:
    """Each passage read in chunks under a budget, with its spans to ``keep``, then asked.

    ``scorer`` is one for all passages, or makes one of a passage.
    """
    given = []
    for passage, spans in zip(passages, keep or [()] * len(passages), strict=True):
        text, asked = parts(passage, question, tokenizer)
        chosen = scorer if isinstance(scorer, Scorer) else scorer(passage)
        read = chunked_prefill(model, encoded(tokenizer, text), chosen, budget, CHUNK, keep=spans, store=store)
        given.append(asked_of(model, tokenizer, read, asked)[0])
    return Answered(tuple(passages), tuple(given))


def rows_of_budget() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads, rng = RetainingHeads.from_pretrained(HEADS, model), random.Random("retention on words")
    passages = [generator.reading(rng, facts=FACTS, **NOTES) for _ in range(COUNT)]
    for question in ("after", "last", "first"):
        runs = [("full cache", None, SinkRecent())]
        for budget in BUDGETS:
            runs += [(name, budget, scorer) for name, scorer in scorers(heads, budget // 8).items()]
        for name, budget, scorer in runs:
            found = answered(model, tokenizer, passages, question, scorer, budget or ALL)
            low, high = found.interval
            yield dict(case=name, question=question, x=budget, share=found.share, low=low, high=high)


def rows_of_oracle() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    rng = random.Random("retention on words")
    passages = [generator.reading(rng, facts=FACTS, **NOTES) for _ in range(COUNT)]

    def labelled(passage: Passage) -> Static:
        text, asked = encoded(tokenizer, passage.text), prompt("", passage.question, tokenizer)
        ids = torch.cat([text, encoded(tokenizer, f"{asked} {passage.answer}\n", start=False)], dim=1)
        return Static(cis_labels(model, ids, text.shape[1]))

    for budget in (*BUDGETS, SMALL):
        found = answered(model, tokenizer, passages, "after", labelled, budget)
        low, high = found.interval
        yield dict(case="oracle", question="after", x=budget, share=found.share, low=low, high=high)


def rows_of_rounded() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    rng = random.Random("retention on words")
    passages = [generator.reading(rng, facts=FACTS, **NOTES) for _ in range(COUNT)]
    for bits, scheme in itertools.product((4, 2), ("token", "kivi")):
        found = answered(model, tokenizer, passages, "after", SinkRecent(), ALL, store=quantized(bits, scheme, 32))
        low, high = found.interval
        yield dict(case=f"{bits} bit, {scheme}", question="after", share=found.share, low=low, high=high)


def span(tokenizer, text: str, sentence: str) -> tuple[int, int]:
    """Which units a sentence of the text is, with the start token in front."""
    found = tokenizer(text, add_special_tokens=False)
    start = text.index(sentence)
    return found.char_to_token(start) + 1, found.char_to_token(start + len(sentence) - 1) + 2


def rows_of_long() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads, rng = RetainingHeads.from_pretrained(HEADS, model), random.Random("retention on long texts")
    for facts in LENGTHS:
        passages = [generator.reading(rng, facts=facts, **NOTES) for _ in range(LONG_COUNT)]
        lengths = [encoded(tokenizer, passage.text).shape[1] for passage in passages]
        right, wrong = [], []
        for passage in passages:
            notes = re.split(r"(?<=[.!?])\s+", passage.text)
            for spans, holds in ((right, True), (wrong, False)):
                some = [note for note in notes if (passage.answer in note) == holds]
                spans.append([span(tokenizer, passage.text, rng.choice(some) if not holds else some[0])])
        runs = {
            "full cache": (None, SinkRecent(), None),
            "the right note": (SMALL, SinkRecent(), right),
            "another note": (SMALL, SinkRecent(), wrong),
            "sink + recent": (SMALL, SinkRecent(), None),
            "Locret": (SMALL, Locret(heads, recent=SMALL // 8), None),
        }
        if facts == LENGTHS[-1]:
            del runs["Locret"]  # in the shorter texts it answers one question of 60
        for name, (budget, scorer, keep) in runs.items():
            found = answered(model, tokenizer, passages, "after", scorer, budget or ALL, keep)
            low, high = found.interval
            yield dict(
                case=name, question="after", x=budget, tokens=sum(lengths) / len(lengths), share=found.share, low=low,
                high=high,
            )  # fmt: skip


def rows_of_wrong() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads, rng = RetainingHeads.from_pretrained(HEADS, model), random.Random("retention on words")
    passages = [generator.reading(rng, facts=FACTS, **NOTES) for _ in range(COUNT)]
    small = BUDGETS[-1]
    methods = scorers(heads, small // 8)
    runs = {"full cache": (ALL, SinkRecent())}
    runs |= {name: (small, methods[name]) for name in ("sink + recent", "Locret", "random")}
    for name, (budget, scorer) in runs.items():
        kinds = {"right": [], "silent": [], "else": []}
        for passage in passages:
            text, asked = parts(passage, "after", tokenizer)
            read = chunked_prefill(model, encoded(tokenizer, text), scorer, budget, CHUNK)
            given, nats = asked_of(model, tokenizer, read, asked)
            silent = "silent" if same(given, corpora.ABSENT) else "else"
            kinds["right" if same(given, passage.answer) else silent].append(nats)
        told = [one > other for one in kinds["right"] for other in kinds["else"]]
        shares = {kind: len(kinds[kind]) / COUNT for kind in kinds}
        yield dict(case=name, question="after", x=budget, **shares, told=sum(told) / len(told) if told else None)


def code(tokenizer, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The beginnings of Python files and how they go on, as long as :func:`continuations`."""
    files = random.Random("code").sample(sources("sklearn"), 4 * count)
    ids = (encoded(tokenizer, path.read_text(encoding="utf-8"), start=False) for path, _ in files)
    long = (each for each in ids if each.shape[1] >= 512)
    yield from ((each[:, :384], each[:, 384:512]) for each in itertools.islice(long, count))


@torch.no_grad()
def rows_of_transfer() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads, few = RetainingHeads.from_pretrained(HEADS, model), COUNT // 2
    texts = {
        "14 notes, as learnt": examples(tokenizer, few, "transfer", facts=FACTS),
        "28 notes": examples(tokenizer, few, "transfer", facts=2 * FACTS),
        "14 notes, relations never seen": examples(tokenizer, few, "transfer", facts=FACTS, side="relations"),
        "documentation": continuations(tokenizer, "test", few),
        "Python code": code(tokenizer, few),
    }
    for case, pairs in texts.items():
        found, lengths = [], []
        for read, rest in pairs:
            labels, states = labels_and_states(model, torch.cat([read, rest], dim=1), read.shape[1])
            predicted = torch.stack([heads.score(layer, each) for layer, each in enumerate(states)])
            found.append(overlap(predicted, labels))
            lengths.append(read.shape[1])
        found, tokens = pd.Series(found), sum(lengths) / len(lengths)
        yield dict(case=case, x=len(found), tokens=tokens, overlap=found.mean(), half_width=half_width(found))


SECTIONS = {
    "heads": rows_of_heads,
    "budget": rows_of_budget,
    "oracle": rows_of_oracle,
    "rounded": rows_of_rounded,
    "long": rows_of_long,
    "wrong": rows_of_wrong,
    "transfer": rows_of_transfer,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("retention.words", SECTIONS, __doc__)
