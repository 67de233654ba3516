"""What it takes to learn facts: the diary's questions, by the number of weights that learn.

plpkg-small learns the diary's entries and the first wording of each question with its answer; then it is asked in
these words, and in others (paraphrases). An answer is right if it holds the true one. The adapter of ``KEPT`` goes to
``data/diary/adapter``: notebook 02 talks to it.

Beside the methods of the publication, adapters with fewer round trips: their bases come from the gradient of the diary,
a ladder's from public text.

Run: ``python -m benchmarks.residual.diary`` (about 20 minutes on two idle cores). With ``--again METHOD ...`` only
these are measured, their rows put in the place of the recorded ones, and no adapter kept. Not part of ``make bench``.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat

import torch

from benchmarks import record
from benchmarks.residual.methods import ADAPTERS, EVERYWHERE, Method, answer, asked, lora, low, personalise, prepared
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.corpora import Document

STEPS = 300
RATES = {"all layers": 1e-2, "two layers": 1e-2, "one layer late": 1e-2, "ladder": 2e-2, "ladder 512": 1e-2}
"""A ladder's: after 100 steps it had learnt 3 facts at 2e-2 and 1 at 1e-2, one of 512 units 8 at 1e-2 and 1 at 3e-3."""
METHODS = {
    "none": Method(),
    "LoRA r=16": Method(lora(16), 5e-3),
    "PrivateLoRA r=64": Method(low(64), 1e-2),
    "PrivateLoRA r=64, all 7 projections": Method(low(64, EVERYWHERE), 1e-2),
    **{name: replace(ADAPTERS[name], lr=lr) for name, lr in RATES.items()},
}
KEPT = "PrivateLoRA r=64, all 7 projections"


def learn(label: str, keep: bool = False) -> list[dict]:
    method, (start, tokenizer) = METHODS[label], load_backbone("plpkg-small")
    start.requires_grad_(False)
    diary = corpora.diary()
    facts = [Document(q.question, f"{asked(q.question)} {q.answer}.") for q in diary.questions if q.kind == "fact"]
    text = corpora.encode([*diary.entries, *(facts * 20)], tokenizer)
    for_bases = None
    if method.basis is not None:
        source = text if method.basis == "own" else corpora.encode(corpora.public("train"), tokenizer)
        for_bases = corpora.batches(source, batch=8, seq=128, seed=1000)
    model = prepared(method, start, for_bases)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if method.config is not None:
        personalise(model, corpora.batches(text, batch=8, seq=128, seed=0), method.lr, steps=STEPS)
    if keep and label == KEPT:
        folder = catalog.data_path("diary") / "adapter"
        model.peft_config["default"].base_model_name_or_path = "plpkg-small"
        model.half().save_pretrained(folder)
        (folder / "README.md").unlink()  # PEFT's empty form
        model.float()  # and what was saved is what is asked
    rows = []
    for kind in ("fact", "paraphrase"):
        questions = [q for q in diary.questions if q.kind == kind]
        right = sum(q.answer.lower() in answer(model, tokenizer, q.question).lower() for q in questions)
        rows.append({"case": kind, "method": label, "trained": trained, "right": right, "asked": len(questions)})
    print(rows, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", metavar="METHOD", nargs="+", choices=METHODS, help="only these, into what is there")
    again = parser.parse_args().again
    torch.set_num_threads(1)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        by_method = list(pool.map(learn, again or METHODS, repeat(not again)))
    kept = catalog.measured("residual_diary").query("method not in @again") if again else None
    record.write("residual.diary", [row for rows in by_method for row in rows], keep=kept)
