"""Answers in words from a part of the cache: plpkg-reader, texts of about 900 tokens, and retaining heads for it.

* heads: trained on reading. The label of a unit is what the tokens of a question and its answer pay it.
* words: exact match by method, budget, and when the question is known: *after* the text was read and cut; *last*, as
  the end of the prompt, cut with it; or *first*, before the text, and repeated at its end. Only *after* can many
  questions be put to one reading. Half of the budget is for the latest units with every method but Locret and the
  oracle, whose labels come from the question and the right answer.

Run: ``python -m benchmarks.retention.words``, or some sections by name. It also writes
``data/retention/plpkg-reader``. Not part of ``make bench``.
"""

import argparse
import random
import time
from collections.abc import Iterator

import torch

from benchmarks import record
from plpkg import corpora, questions
from plpkg.backbones import load_backbone
from plpkg.corpora import Passage
from plpkg.questions import Answered
from plpkg.retention import RetainingHeads, chunked_prefill, cis_labels
from plpkg.retention.scorers import H2O, KeyNorm, Locret, Random, SinkRecent, SirLlm, SnapKv, Static
from plpkg.retention.train import train_heads

SHIPPED = record.DATA.parent / "retention" / "plpkg-reader"
BUDGETS = (16, 32, 64, 128, 256)
TOKENS, CHUNK = 900, 64
KINDS = ("fact", "pronoun", "bridge", "event")
NAMES = ("Locret", "oracle", "SnapKV", "H2O", "SirLLM", "key norm", "sink + recent", "random")


def parts(tokenizer, passage: Passage, first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids ``(1, seq)`` of a text, its beginning mark included, and ``(1, n)`` of the question after it.

    With ``first`` the question stands before the text as well.
    """
    text = f"Question: {passage.question}\n\n{passage.text}" if first else passage.text
    whole = tokenizer(questions.prompt(text, passage.question), return_offsets_mapping=True)
    cut = sum(end <= len(text) for _, end in whole["offset_mapping"])
    ids = torch.tensor([whole["input_ids"]])
    return torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids[:, :cut]], 1), ids[:, cut:]


def answer_ids(tokenizer, passage: Passage) -> torch.Tensor:
    return torch.tensor([tokenizer(f" {passage.answer}\n", add_special_tokens=False)["input_ids"]])


def texts(count: int, asked: int, seed: str) -> Iterator[list[Passage]]:
    """So many texts with up to ``asked`` questions each."""
    rng = random.Random(seed)
    for _ in range(count):
        yield corpora.readings(rng, asked, tokens=TOKENS, kinds=KINDS)


def examples(tokenizer, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A text, or a question and a text, and what is asked and answered then: what the heads learn from."""
    for i, each in enumerate(texts(count, 1, "heads")):
        prompt, question = parts(tokenizer, each[0], first=i % 2 == 1)
        yield prompt, torch.cat([question, answer_ids(tokenizer, each[0])], 1)


def rows_of_heads(steps: int = 600) -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads, began = RetainingHeads.attach(model), time.process_time()
    log = train_heads(model, heads, examples(tokenizer, steps), steps=steps, lr=2e-3, warmup=50, progress=False)
    heads.save_pretrained(SHIPPED)
    last = log.to_frame().tail(60).mean()
    yield dict(case="heads", overlap=last["overlap"], loss=last["loss"], cpu_s=time.process_time() - began)


def scorer_of(name: str, heads: RetainingHeads, labels: torch.Tensor | None, budget: int):
    """Half of the budget for the latest units, or none: Locret's own rule."""
    half = dict(recent=budget // 2)
    if name in ("Locret", "oracle"):
        return Locret(heads) if name == "Locret" else Static(labels)
    if name == "sink + recent":
        return SinkRecent()
    kinds = {"SnapKV": SnapKv, "H2O": H2O, "SirLLM": SirLlm, "key norm": KeyNorm, "random": Random}
    return kinds[name](**half)


@torch.no_grad()
def answers(model, tokenizer, heads, name: str, budget: int, asked: list[Passage], when: str) -> list[str]:
    """What is answered to the questions of one text."""
    options = dict(max_new_tokens=questions.LONGEST, do_sample=False, stop_strings="\n", tokenizer=tokenizer)
    found, read = [], None
    for passage in asked:
        prompt, question = parts(tokenizer, passage, first=when == "first")
        labels = None
        if name == "oracle":
            whole = torch.cat([prompt, question, answer_ids(tokenizer, passage)], 1)
            labels = cis_labels(model, whole, prompt.shape[1])
        if name == "full cache":
            budget, scorer = prompt.shape[1] + question.shape[1], SinkRecent()
        else:
            scorer = scorer_of(name, heads, labels, budget)
        if when == "last":
            prompt, question = torch.cat([prompt, question[:, :-1]], 1), question[:, -1:]
        if read is None or when != "after" or name == "oracle":
            read = chunked_prefill(model, prompt, scorer, budget, CHUNK)
        written = read.ask(model, question, **options)[0]
        found.append(tokenizer.decode(written, skip_special_tokens=True).lstrip(" ").partition("\n")[0].strip())
    return found


def rows_of_words(count: int = 25) -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-reader")
    heads = RetainingHeads.from_pretrained(SHIPPED, model)
    drawn = list(texts(count, 10, "words"))
    passages = tuple(passage for each in drawn for passage in each)
    for when in ("after", "last", "first"):
        for name, budget in [("full cache", 0)] + [(name, budget) for name in NAMES for budget in BUDGETS]:
            given = [a for each in drawn for a in answers(model, tokenizer, heads, name, budget, each, when)]
            judged = Answered(passages, tuple(given))
            low, high = judged.interval
            yield dict(
                case=name, when=when, budget=budget, questions=len(given), right=judged.share, low=low, high=high
            )


SECTIONS = {"heads": rows_of_heads, "words": rows_of_words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    chosen = parser.parse_args().sections
    torch.set_num_threads(1)
    record.write("retention.words", [{"section": name} | row for name in chosen for row in SECTIONS[name]()])


if __name__ == "__main__":
    main()
