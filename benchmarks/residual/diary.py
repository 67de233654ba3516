"""What it takes to learn facts: the diary's questions, by the number of weights that learn.

plpkg-small learns the diary's entries and the first wording of each question with its answer; then it is asked in
these words, and in others (paraphrases). An answer is right if it holds the true one. The adapter of ``KEPT`` goes to
``data/diary/adapter``: notebook 02 talks to it.

Beside the methods of the publication, adapters with fewer round trips: their bases come from the gradient of the diary,
a ladder's from public text.

Their learning rates: each tries those of ``TRIED`` for 100 steps on other facts, the same questions with the answers of
other ones, and takes the one with the least loss on these answers (``--rates`` records it as "other facts", in nats a
token). The methods of the publication have not been searched: LoRA's rate is the usual one.

Run: ``python -m benchmarks.residual.diary`` (about 20 minutes on two idle cores; ``--rates`` 20). With ``--again METHOD
...`` only these are measured, their rows put in the place of the recorded ones, and no adapter kept. Not part of
``make bench``.
"""

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product, repeat

import torch
from torch.nn import functional

from benchmarks import record
from benchmarks.residual.methods import ADAPTERS, EVERYWHERE, Method, answer, asked, lora, low, personalise, prepared
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.corpora import Document
from plpkg.corpora.diary import Question

STEPS, SEARCH_STEPS = 300, 100
TRIED = (3e-3, 1e-2, 2e-2, 4e-2)
RATES = {"all layers": 4e-2, "two layers": 4e-2, "one layer late": 4e-2, "ladder": 4e-2, "ladder 512": 2e-2}
METHODS = {
    "none": Method(),
    "LoRA r=16": Method(lora(16), 5e-3),
    "PrivateLoRA r=64": Method(low(64), 1e-2),
    "PrivateLoRA r=64, all 7 projections": Method(low(64, EVERYWHERE), 1e-2),
    **{name: replace(ADAPTERS[name], lr=lr) for name, lr in RATES.items()},
}
KEPT = "PrivateLoRA r=64, all 7 projections"


def learnt(method: Method, questions: Sequence[Question], steps: int) -> tuple:
    """plpkg-small after it has learnt the diary and these answers; its tokenizer, and how many weights learnt."""
    start, tokenizer = load_backbone("plpkg-small")
    start.requires_grad_(False)
    facts = [Document(q.question, f"{asked(q.question)} {q.answer}.") for q in questions]
    text = corpora.encode([*corpora.diary().entries, *(facts * 20)], tokenizer)
    for_bases = None
    if method.basis is not None:
        source = text if method.basis == "own" else corpora.encode(corpora.public("train"), tokenizer)
        for_bases = corpora.batches(source, batch=8, seq=128, seed=1000)
    model = prepared(method, start, for_bases)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if method.config is not None:
        personalise(model, corpora.batches(text, batch=8, seq=128, seed=0), method.lr, steps=steps)
    return model, tokenizer, trained


def facts() -> list[Question]:
    return [q for q in corpora.diary().questions if q.kind == "fact"]


def other_facts() -> list[Question]:
    """Each question with the answer of the seventh after it: none is its own."""
    true = facts()
    return [replace(q, answer=other.answer) for q, other in zip(true, [*true[7:], *true[:7]], strict=True)]


@torch.inference_mode()
def loss(model, tokenizer, questions: Sequence[Question]) -> float:
    """Nats a token of the answers."""
    losses = []
    for q in questions:
        prompt, whole = (
            tokenizer(tokenizer.bos_token + text, return_tensors="pt")["input_ids"]
            for text in (asked(q.question), f"{asked(q.question)} {q.answer}.")
        )
        said = whole.shape[1] - prompt.shape[1]
        logits = model(input_ids=whole, use_cache=False).logits[0, -said - 1 : -1]
        losses.append(functional.cross_entropy(logits, whole[0, -said:], reduction="none"))
    return torch.cat(losses).mean().item()


def searched(label: str, lr: float) -> dict:
    """One rate of one method, on other facts."""
    model, tokenizer, trained = learnt(replace(METHODS[label], lr=lr), other_facts(), SEARCH_STEPS)
    nats = round(loss(model, tokenizer, other_facts()), 4)
    row = {"case": "other facts", "method": label, "trained": trained, "lr": lr, "steps": SEARCH_STEPS, "loss": nats}
    print(row, flush=True)
    return row


def learn(label: str, keep: bool = False) -> list[dict]:
    model, tokenizer, trained = learnt(METHODS[label], facts(), STEPS)
    if keep and label == KEPT:
        folder = catalog.data_path("diary") / "adapter"
        model.peft_config["default"].base_model_name_or_path = "plpkg-small"
        model.half().save_pretrained(folder)
        (folder / "README.md").unlink()  # PEFT's empty form
        model.float()  # and what was saved is what is asked
    rows = []
    for kind in ("fact", "paraphrase"):
        questions = [q for q in corpora.diary().questions if q.kind == kind]
        right = sum(q.answer.lower() in answer(model, tokenizer, q.question).lower() for q in questions)
        row = {"case": kind, "method": label, "trained": trained, "right": right, "asked": len(questions)}
        rows.append(row | ({} if label == "none" else {"lr": METHODS[label].lr, "steps": STEPS}))
    print(rows, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", metavar="METHOD", nargs="+", choices=METHODS, help="only these, into what is there")
    parser.add_argument("--rates", action="store_true", help="only the search, as far as it is not there")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    again = options.again
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, torch.set_num_threads, (1,)) as pool:
        if options.rates:
            kept = catalog.measured("residual_diary").convert_dtypes()  # whole numbers stay so beside gaps
            there = set() if "lr" not in kept else set(zip(kept["method"], kept["lr"], kept["steps"], strict=True))
            left = [at for at in product(RATES, TRIED) if (*at, SEARCH_STEPS) not in there]
            record.write("residual.diary", list(pool.map(searched, *zip(*left, strict=True))), keep=kept)
            raise SystemExit
        by_method = list(pool.map(learn, again or METHODS, repeat(not again)))
    kept = catalog.measured("residual_diary").convert_dtypes()
    kept = kept.query("case == 'other facts' or method not in @again") if again else kept.query("case == 'other facts'")
    record.write("residual.diary", [row for rows in by_method for row in rows], keep=kept)
