"""Locret's table on a CPU: what smollm2-reader still finds in long texts of which its cache keeps a part.

Ten sentences about ten people are hidden in a text (:func:`benchmarks.retention.hidden.facts`); nothing has learnt from
them. The text is documentation, where they stand out, or a diary, where all else is about people, too. It is read in
chunks of 256 tokens under a budget, before any question is known. Then each sentence is asked for in two forms: a
question and the sentence's beginning as that of the answer (``right``), and the question alone (``right_alone``). An
answer is right by :func:`plpkg.questions.right`. A sentence has more words beside its answer than a right answer may:
to repeat it is wrong.

* task: what the full cache answers, and smollm2 itself; and what needs no cache: an answer without the text, and the
  sentence that shares most words with the question, repeated.
* answers: right answers, and nats on the expected one, by text, length, method and budget. The oracle keeps by the
  labels of these ten answers; ``Locret, first four`` protects the first four units as well.
* asked: SnapKV as published. It reads text and question in one chunk, once a question.
* rounded: units in 4 or 2 bits (KIVI's scheme): all at 1k, and a quarter kept by Locret at 4k.
* nats: how well the next 128 tokens of documentation that nothing has learnt from are predicted, by length; five texts
  of 8k.
* folder: questions about twelve notes of a person, all read at once, by two hands of which nothing was chosen.
* whole diary: 60 questions, read within an eighth once, saved, and asked in another process.
* cost: CPU seconds of a prefill and of a token, and the bytes that stay, by method, at 1k and 4k; medians.

Stabilizers are a quarter of the budget for every method; positions are reassigned. ``±`` is the 95 % interval of the
mean over texts.

Run: ``python -m benchmarks.retention.smollm2 --missing`` (nine hours on one core): sections that the CSV has are left
out, so it goes on where it stopped. Not part of ``make bench``.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import median

import pandas as pd
import torch

from benchmarks import record
from benchmarks.backbones import hands
from benchmarks.retention import hidden
from benchmarks.retention.smollm2_heads import SHIPPED, encoded
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.questions import first_line, parts, right, words
from plpkg.recorded import half_width
from plpkg.retention import RetainingHeads, chunked_prefill, cis_labels, load
from plpkg.retention.cache.quantize import quantized
from plpkg.retention.cache.store import UnitStore
from plpkg.retention.reading import PrefillResult
from plpkg.retention.scorers import H2O, KeyNorm, Locret, Random, Scorer, SinkRecent, SnapKv, Static

TEXTS, CHUNK, ANSWER, NEXT = 10, 256, 12, 128
"""Texts of each length, tokens of a chunk, of an answer at most, and of a continuation."""
SHARES = (4, 16)
"""Of how many units one is kept."""
LENGTHS = {"1k": 1000, "4k": 4000, "8k": 8000}


@cache
def model_and_tokenizer(name: str = "smollm2-reader"):
    return load_backbone(name)


@cache
def heads() -> RetainingHeads:
    return RetainingHeads.from_pretrained(SHIPPED, model_and_tokenizer()[0])


@cache
def ends() -> list[int]:
    """The token that ends an answer, and those that end a line: smollm2 and its reader have one tokenizer.

    ``stop_strings`` would look at each word of the vocabulary anew in each call, longer than an answer takes.
    """
    _, tokenizer = model_and_tokenizer()
    return [tokenizer.eos_token_id, *(i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i]))]


def read(ids: torch.Tensor, scorer: Scorer, share: int, store=UnitStore) -> PrefillResult:
    model, _ = model_and_tokenizer()
    budget = ids.shape[1] // share
    return chunked_prefill(model, ids, scorer, budget, CHUNK, stabilizers=budget // 4 if share > 1 else 0, store=store)


def asked(fact: hidden.Fact, begun: bool = True) -> torch.Tensor:
    """The tokens after a text that was read."""
    _, tokenizer = model_and_tokenizer()
    _, after = parts("", fact.question, tokenizer)
    return encoded(tokenizer, after + fact.beginning * begun)


def answer(reading: PrefillResult, ids: torch.Tensor, name: str = "smollm2-reader") -> str:
    model, tokenizer = model_and_tokenizer(name)
    tokens = reading.ask(
        model, ids, max_new_tokens=ANSWER, do_sample=False, eos_token_id=ends(), pad_token_id=tokenizer.pad_token_id
    )
    return first_line(tokenizer.decode(tokens[0], skip_special_tokens=True))


def nats(reading: PrefillResult, fact: hidden.Fact) -> float:
    """On the expected answer, a token."""
    model, tokenizer = model_and_tokenizer()
    question, expected = asked(fact), encoded(tokenizer, f" {fact.answer}")
    return -float(reading.score(model, torch.cat([question, expected], dim=1))[0, question.shape[1] :].mean())


def summary(**shares: list[float]) -> dict:
    """The mean over texts, and its 95 % interval."""
    row = {}
    for name, each in shares.items():
        row |= {name: sum(each) / len(each), f"{name}_half_width": half_width(pd.Series(each))}
    return row


def text_ids(text: str) -> torch.Tensor:
    _, tokenizer = model_and_tokenizer()
    return encoded(tokenizer, parts(text, "", tokenizer)[0])


def rows_of_task() -> Iterator[dict]:
    _, tokenizer = model_and_tokenizer()
    for name, length in list(LENGTHS.items())[:2]:
        counted: dict[str, list[float]] = {}
        for seed in range(TEXTS):
            drawn = hidden.facts(tokenizer, length, seed=seed)
            found: dict[str, list[bool]] = {}

            def count(case: str, said: str, fact: hidden.Fact, found=found) -> None:
                found.setdefault(case, []).append(right(said, fact.answer))

            whole = {case: whole_reading(case, drawn.text) for case in ("smollm2-reader", "smollm2")}
            empty = whole_reading("smollm2-reader", "")
            for fact in drawn.facts:
                for case, reading in whole.items():
                    count(f"{case}, begun", answer(reading, asked(fact), case), fact)
                    count(f"{case}, question alone", answer(reading, asked(fact, False), case), fact)
                count("without the text", answer(empty, asked(fact)), fact)
                count("the sentence that shares most words", most_shared(drawn.text, fact.question), fact)
            for case, each in found.items():
                counted.setdefault(case, []).append(sum(each) / len(each))
        for case, shares in counted.items():
            yield dict(case=case, length=name, share=1, **summary(right=shares))


def whole_reading(name: str, text: str) -> PrefillResult:
    model, tokenizer = model_and_tokenizer(name)
    ids = encoded(tokenizer, parts(text, "", tokenizer)[0])
    return chunked_prefill(model, ids, SinkRecent(), ids.shape[1], CHUNK)


def most_shared(text: str, question: str) -> str:
    """The line that has most of a question's words."""
    return max(text.split("\n"), key=lambda line: len(set(words(line)) & set(words(question))))


def oracle(drawn: hidden.Hidden) -> Static:
    """Labels of the answers to the very questions that will be asked."""
    model, tokenizer = model_and_tokenizer()
    ids = text_ids(drawn.text)
    said = hidden.turns(tokenizer, [(fact.question, f"{fact.beginning} {fact.answer}") for fact in drawn.facts])
    return Static(cis_labels(model, torch.cat([ids, encoded(tokenizer, said)], dim=1), ids.shape[1]))


METHODS: dict[str, Callable[[hidden.Hidden], Scorer]] = {
    "Locret": lambda _: Locret(heads()),
    "Locret, first four": lambda _: Locret(heads(), sink=4),
    "SnapKV": lambda _: SnapKv(),
    "sink + recent": lambda _: SinkRecent(),
    "key norm": lambda _: KeyNorm(),
    "random": lambda _: Random(),
    "H2O": lambda _: H2O(),
    "oracle": oracle,
}


def case_of(among: str, length: str, case: str, make: Callable, share: int, store=UnitStore) -> dict:
    """All texts of a length, read by one method under one budget."""
    _, tokenizer = model_and_tokenizer()
    begun, alone, all_nats, kept, num_bytes = [], [], [], [], []
    for seed in range(TEXTS):
        drawn = hidden.facts(tokenizer, LENGTHS[length], seed=seed, among=among)
        reading = read(text_ids(drawn.text), make(drawn), share, store)
        kept.append(reading.cache.kept)
        num_bytes.append(reading.cache.num_bytes)
        for shares, with_beginning in ((begun, True), (alone, False)):
            found = [right(answer(reading, asked(fact, with_beginning)), fact.answer) for fact in drawn.facts]
            shares.append(sum(found) / len(found))
        all_nats.append(sum(nats(reading, fact) for fact in drawn.facts) / len(drawn.facts))
    size = dict(kept=sum(kept) / TEXTS, mib=sum(num_bytes) / TEXTS / 2**20)
    found = summary(right=begun, right_alone=alone, nats=all_nats)
    return dict(case=case, among=among, length=length, share=share) | size | found


def rows_of_answers(among: str, length: str, name: str) -> Iterator[dict]:
    if name == "full cache":
        yield case_of(among, length, name, METHODS["sink + recent"], 1)
        return
    for share in SHARES:
        yield case_of(among, length, name, METHODS[name], share)


def rows_of_asked(length: str) -> Iterator[dict]:
    """SnapKV as published: the question is the end of what is read, and all of it one chunk."""
    model, tokenizer = model_and_tokenizer()
    for share in SHARES:
        shares = []
        for seed in range(TEXTS):
            drawn, found = hidden.facts(tokenizer, LENGTHS[length], seed=seed), []
            for fact in drawn.facts:
                text, question = text_ids(drawn.text), asked(fact)
                ids = torch.cat([text, question[:, :-1]], dim=1)
                reading = chunked_prefill(model, ids, SnapKv(), text.shape[1] // share, ids.shape[1])
                found.append(right(answer(reading, question[:, -1:]), fact.answer))
            shares.append(sum(found) / len(found))
        yield dict(case="SnapKV, asked", among="documentation", length=length, share=share, **summary(right=shares))


def rows_of_rounded() -> Iterator[dict]:
    for bits in (4, 2):
        store = quantized(bits, "kivi", 32)
        for among in ("documentation", "diary"):
            yield case_of(among, "1k", f"full cache, {bits} bit", METHODS["sink + recent"], 1, store)
        yield case_of("documentation", "4k", f"Locret, {bits} bit", METHODS["Locret"], 4, store)


def rows_of_nats(length: str, cases: dict[str, tuple[int, ...]]) -> Iterator[dict]:
    model, tokenizer = model_and_tokenizer()
    examples = []
    for seed in range(TEXTS if length != "8k" else TEXTS // 2):
        text = hidden.documentation(tokenizer, LENGTHS[length] + NEXT, hidden.random.Random(f"nats {seed}"), "test")
        ids = encoded(tokenizer, text)[:, : LENGTHS[length] + NEXT]
        examples.append((ids[:, :-NEXT], ids[:, -NEXT:]))
    for name, shares in cases.items():
        for share in shares:
            scorer = METHODS["sink + recent" if name == "full cache" else name](None)
            found = [-float(read(before, scorer, share).score(model, after).mean()) for before, after in examples]
            yield dict(case=name, length=length, share=share, **summary(nats=found))


def rows_of_diary() -> Iterator[dict]:
    """Read once and asked sixty times, beside reading the whole diary anew for each question."""
    text = "\n\n".join(entry.text for entry in corpora.diary().entries)
    ids, began = text_ids(text), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        read(ids, METHODS["Locret"](None), 8).save(folder)
        read_s, size = time.process_time() - began, sum(path.stat().st_size for path in Path(folder).iterdir())
        arguments = [sys.executable, "-c", f"from benchmarks.retention.smollm2 import ask_diary; ask_diary({folder!r})"]
        said = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    right_answers, asked_s = said.split()[-2:]
    common = dict(length="diary", tokens=ids.shape[1])
    yield dict(
        case="Locret, read once", share=8, right=float(right_answers), prefill_s=read_s, answer_s=float(asked_s),
        mib=size / 2**20, **common,
    )  # fmt: skip
    began = time.process_time()
    full = read(ids, SinkRecent(), 1)
    full_s, began = time.process_time() - began, time.process_time()
    share = diary_answers(full)
    seconds = (time.process_time() - began) / len(corpora.diary().questions)
    yield dict(
        case="full cache", share=1, right=share, prefill_s=full_s, answer_s=seconds,
        mib=full.cache.num_bytes / 2**20, **common,
    )  # fmt: skip


def diary_answers(reading: PrefillResult) -> float:
    """Right answers to the questions of the diary."""
    _, tokenizer = model_and_tokenizer()
    found = []
    for each in corpora.diary().questions:
        said = answer(reading, encoded(tokenizer, parts("", each.question, tokenizer)[1]))
        found.append(right(said, each.answer))
    return sum(found) / len(found)


def ask_diary(folder: str) -> None:
    """In a process that has not read: right answers, and CPU seconds an answer, loading the model not counted."""
    torch.set_num_threads(1)
    model, _ = model_and_tokenizer()
    began = time.process_time()
    share = diary_answers(load(folder, model))
    print(share, (time.process_time() - began) / len(corpora.diary().questions))


def rows_of_folder() -> Iterator[dict]:
    _, tokenizer = model_and_tokenizer()
    for hand in hands.REPORTING:
        for name, share in (("full cache", 1), ("Locret", 4), ("sink + recent", 4)):
            shares = []
            for some in hands.collections(hand):
                reading = read(
                    text_ids("\n\n".join(some.notes)), METHODS["sink + recent" if share == 1 else name](None), share
                )
                found = [
                    right(answer(reading, encoded(tokenizer, parts("", each.question, tokenizer)[1])), each.answers)
                    for each in some.answerable
                ]
                shares.append(sum(found) / len(found))
            yield dict(case=name, among=hand, share=share, **summary(right=shares))


def rows_of_cost() -> Iterator[dict]:
    """Runs take turns; a token is one of 32 after the text."""
    model, tokenizer = model_and_tokenizer()
    for length in ("1k", "4k"):
        ids = text_ids(hidden.facts(tokenizer, LENGTHS[length]).text)
        cases = {("full cache", 1): SinkRecent()}
        names = (
            [name for name in METHODS if name != "oracle"] if length == "1k" else ["Locret", "SnapKV", "sink + recent"]
        )
        cases |= {(name, share): METHODS[name](None) for name in names for share in SHARES}
        seconds: dict[tuple, list[tuple[float, float]]] = {case: [] for case in cases}
        sizes = {}
        for _ in range(3):
            for (name, share), scorer in cases.items():
                began = time.process_time()
                reading = read(ids, scorer, share)
                read_s, began = time.process_time() - began, time.process_time()
                reading.ask(model, ids[:, :1], min_new_tokens=32, max_new_tokens=32, do_sample=False)
                seconds[name, share].append((read_s, (time.process_time() - began) / 32))
                sizes[name, share] = reading.cache.num_bytes / 2**20, reading.log.peak
        for (name, share), runs in seconds.items():
            mib, peak = sizes[name, share]
            prefill_s, token_s = (median(each) for each in zip(*runs, strict=True))
            yield dict(
                case=name, length=length, share=share, prefill_s=prefill_s, token_s=token_s, mib=mib, peak=peak
            )  # fmt: skip


ANSWERS = {
    ("documentation", "1k"): tuple(METHODS),
    ("documentation", "4k"): ("Locret", "SnapKV", "sink + recent", "key norm", "random"),
    ("diary", "1k"): ("Locret", "SnapKV", "sink + recent", "random", "oracle"),
    ("diary", "4k"): ("Locret", "sink + recent"),
}
"""Which methods read which texts."""
PREDICTED = {
    "1k": ("Locret", "SnapKV", "sink + recent", "key norm", "random", "H2O"),
    "4k": ("Locret", "SnapKV", "sink + recent", "random"),
    "8k": ("Locret", "sink + recent"),
}
SECTIONS = {"task": rows_of_task}
SECTIONS |= {
    f"answers: {among}, {length}, {name}": partial(rows_of_answers, among, length, name)
    for (among, length), names in ANSWERS.items()
    for name in ("full cache", *names)
}
SECTIONS |= {
    f"nats: {length}, {name}": partial(rows_of_nats, length, {name: SHARES if name != "full cache" else (1,)})
    for length, names in PREDICTED.items()
    for name in ("full cache", *names)
}
SECTIONS |= {"asked": partial(rows_of_asked, "1k"), "rounded": rows_of_rounded, "folder": rows_of_folder}
SECTIONS |= {"whole diary": rows_of_diary, "cost": rows_of_cost}

if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("retention.smollm2", SECTIONS, __doc__)
