"""A night on SmolLM2-135M-Instruct: three writers and the diary, by the last layer, by LoRA and by PrivateLoRA's M.

A person has 3,000 tokens for training, 600 later ones for validation and at most 3,000 later ones for the test, in
windows of 128; of the diary the first 70 % of the lines are for training, the next 15 % for validation, and the rest
for the test. A night has 80 steps of four windows, and what was best on the validation tokens counts. The last layer is
the public model's, tied to its embedding: it is untied first, and trained on features that are computed once. LoRA has
rank 8 on q and v; M is 64 × 64 at each of the seven projections of every layer. One thread.

* rates: the validation loss of one writer, opacus, by learning rate, in half as many steps. The other sections take
  the best.
* nights: nats a token of the test before and after, what is kept (values, and float16 bytes), and CPU seconds. Words:
  a hundred words of the test, in their contexts; the share that is the first of three suggestions, and among the three.
  A suggestion is one of the three likeliest tokens that begin a word, and what the model greedily puts behind it.
  ``seen`` has three of them as a person would see them: the end of the context, the suggestions, and the word.
* rows: of the last layer's change after a night, the share in rows of tokens that are in the person's text.

Run: ``python -m benchmarks.autonomy.smollm2 --missing`` (three hours on one core): sections that the CSV has are left
out; with ``ship``, four minutes, the diary's night by LoRA is made again and kept in ``data/autonomy/diary``. Not part
of ``make bench``.
"""

import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import pandas as pd
import torch
from peft import LoraConfig
from transformers import DynamicCache

from benchmarks import record
from benchmarks.autonomy.few import latest
from benchmarks.residual.methods import EVERYWHERE
from plpkg import corpora
from plpkg.adapters import Adapter
from plpkg.autonomy import baselines, evaluate, transfer
from plpkg.autonomy.transfer import Transfer
from plpkg.backbones import load_backbone
from plpkg.corpora import Person, token_examples
from plpkg.decoding import cache_argument
from plpkg.residual import PrivateLoraConfig

LIMITS = dict(train=3_000, validation=600, test=3_000)
NIGHT = dict(steps=80, batch=4, evaluate_every=20, patience=3)
PEOPLE = ("opacus", "peft", "matplotlib", "diary")
WORDS, CONTEXT, LONGEST = 100, 96, 5
"""Words that are asked for, tokens before them at most, and tokens of a suggestion at most."""
SCOPES = {
    "head": dict(scope="head"),
    "LoRA": dict(scope="lora", lora=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])),
    "M": dict(scope="lora", lora=PrivateLoraConfig(r_c2d=64, r_d2c=64, target_modules=EVERYWHERE)),
}
RATES = {"head": (1e-4, 3e-4, 1e-3), "LoRA": (3e-4, 1e-3, 3e-3), "M": (3e-4, 1e-3, 3e-3)}
Mix = Callable[[list[int], torch.Tensor], torch.Tensor]
"""The log-probabilities of what comes after some tokens, by the model's own: ``(vocab,)`` to ``(vocab,)``."""


@cache
def model_and_tokenizer():
    return load_backbone("smollm2")


def texts(name: str) -> dict[str, list]:
    """A person's documents by split."""
    if name != "diary":
        return {split: corpora.writer(name).split(split) for split in LIMITS}
    lines = [line for entry in corpora.diary().entries for line in entry.text.splitlines() if line]
    first, second = 7 * len(lines) // 10, 17 * len(lines) // 20
    return dict(train=latest(lines[:first], LIMITS["train"]), validation=lines[first:second], test=lines[second:])


@cache
def person(name: str) -> Person:
    _, tokenizer = model_and_tokenizer()
    split = {part: corpora.encode(documents, tokenizer) for part, documents in texts(name).items()}
    return Person(*(token_examples(split[part], limit=LIMITS[part]) for part in LIMITS))


def night(name: str, case: str, lr: float, **options: int) -> Transfer:
    model, _ = model_and_tokenizer()
    each = person(name)
    return transfer(model, each.train, each.validation, lr=lr, **SCOPES[case], **NIGHT | options)


def chosen_rate(case: str) -> float:
    """The learning rate with the least validation loss in the section ``rates``."""
    rows = pd.read_csv(record.DATA / "autonomy_smollm2.csv").query("section == 'rates' and case == @case")
    return float(rows.loc[rows["loss"].idxmin(), "lr"])


def rows_of_rates(case: str) -> Iterator[dict]:
    for lr in RATES[case]:
        made = night("opacus", case, lr, steps=NIGHT["steps"] // 2)
        yield dict(case=case, writer="opacus", lr=lr, step=made.step, loss=min(row["loss"] for row in made.log))


def rows_of_nights(name: str, case: str) -> Iterator[dict]:
    public, _ = model_and_tokenizer()
    began, mix = time.process_time(), as_it_is
    kept = {}
    if case == "public only":
        mine = model = public
    elif case == "own counts":
        mine = baselines.counts(public, {name: person(name)})[name]
        model, mix = public, lambda ids, values: mine.counts.mix(torch.tensor(ids), values, mine.weight)
    else:
        lr = chosen_rate(case)
        made = night(name, case, lr)
        mine = model = made.model
        values = sum(value.numel() for value in made.state.values())
        kept = dict(lr=lr, step=made.step, values=values, num_bytes=2 * values)
    seconds = time.process_time() - began
    judged, found = evaluate(mine, person(name).test), suggested(name, model, mix)
    yield dict(case=case, writer=name, cpu_s=seconds, nats=judged.loss, tokens=judged.labels) | kept | found


def as_it_is(_: list[int], values: torch.Tensor) -> torch.Tensor:
    return values


def suggested(name: str, model, mix: Mix) -> dict:
    """The share of words that are the first suggestion, and among three; and three places as they are seen."""
    first, three, seen = [], [], []
    for before, word in places(name):
        suggestions = three_words(model, before, mix)
        first.append(suggestions[0] == word)
        three.append(word in suggestions)
        if len(seen) < 3:
            _, tokenizer = model_and_tokenizer()
            said = tokenizer.decode(before[-12:]).replace("\n", " ")
            seen.append(f"…{said} [{', '.join(suggestions)}] {word}")
    return dict(words=len(first), first=sum(first) / len(first), three=sum(three) / len(three), seen=" | ".join(seen))


@cache
def places(name: str) -> list[tuple[list[int], str]]:
    """Words of the test, drawn at random, with the tokens before each."""
    _, tokenizer = model_and_tokenizer()
    found = []
    for document in texts(name)["test"]:
        text = document if isinstance(document, str) else document.text
        for match in re.finditer(r"(?<= )[^\W\d_]{2,}\b", text):
            before = tokenizer(text[: match.start() - 1])["input_ids"][-CONTEXT:]
            if len(before) >= 8:
                found.append((before, match[0]))
    return random.Random(name).sample(found, min(WORDS, len(found)))


@torch.inference_mode()
def three_words(model, before: list[int], mix: Mix) -> list[str]:
    """What a keyboard would show: of the three likeliest tokens that begin a word, the words that they become."""
    _, tokenizer = model_and_tokenizer()
    cached = DynamicCache(config=model.config)
    values = model(input_ids=torch.tensor([before]), **cache_argument(cached)).logits[0, -1].log_softmax(-1)
    likely = mix(before, values).masked_fill(~begins_a_word(), -torch.inf).topk(3).indices.tolist()
    cached.batch_repeat_interleave(3)
    written = [[each] for each in likely]
    for _ in range(LONGEST - 1):
        last = torch.tensor([each[-1:] for each in written])
        values = model(input_ids=last, **cache_argument(cached)).logits[:, -1].log_softmax(-1)
        for each, row in zip(written, values, strict=True):
            each.append(int(mix(before + each, row).argmax()))
    return [re.match(r" ([^\W\d_]+)", tokenizer.decode(each))[1] for each in written]


@cache
def begins_a_word() -> torch.Tensor:
    """Of each token whether it is a space and letters."""
    model, tokenizer = model_and_tokenizer()
    begins = [bool(re.fullmatch(r" [^\W\d_]+", tokenizer.decode([i]))) for i in range(model.config.vocab_size)]
    return torch.tensor(begins)


def rows_of_rows() -> Iterator[dict]:
    public, _ = model_and_tokenizer()
    for name in ("opacus", "diary"):
        (head,) = night(name, "head", chosen_rate("head")).state.values()
        change = (head - public.get_output_embeddings().weight.detach()).square().sum(1)
        own = torch.zeros(len(change), dtype=torch.bool)
        own[person(name).train.x.unique()] = True
        share = float(change[own].sum() / change.sum())
        yield dict(case=name, values=head.numel(), own_rows=int(own.sum()), rows=len(own), share=share)


SECTIONS = {f"rates: {case}": partial(rows_of_rates, case) for case in SCOPES}
SECTIONS |= {
    f"nights: {name}, {case}": partial(rows_of_nights, name, case)
    for name in PEOPLE
    for case in ("public only", "own counts", *SCOPES)
}
SECTIONS |= {"rows": rows_of_rows}


def ship() -> None:
    adapter = night("diary", "LoRA", chosen_rate("LoRA")).adapter()
    half = {m: replace(f, down=f.down.half(), up=f.up.half()) for m, f in adapter.factors.items()}
    Adapter.of(adapter.config, half).save(record.DATA.parent / "autonomy" / "diary")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["ship"]:
        ship()
    else:
        record.sections("autonomy.smollm2", SECTIONS, __doc__)
