"""PrivateLoRA beside its like: LoRA at the same projections, and counts of the same text. Nine writers, plpkg-small.

``benchmarks.residual.quality`` compares M at down_proj with LoRA at q, k and v, on three writers. Here each stands
beside the other at both places, with a learning rate of its own, for every writer. Counts (``plpkg.ngrams``) take no
gradient and send nothing; they are mixed with the model as it is, and with the model that M at down_proj has changed.

* rates: the gain on the first 40 kB of numpy's and seaborn's validation text for each learning rate; the rate with the
  largest mean gain is taken. Counts take their weight from each writer's own validation text.
* gain: bits per byte of the first 40 kB of the writer's test text, less than untuned. Two seeds: of the order of the
  text, and of random A and B. ``cpu_s`` is what learning took.
* difference: of each pair of methods, the mean over the nine writers (each the mean of its two seeds) and the half
  width of its interval of 95 %, by Student's t. Where it contains 0 the two are not distinguishable.

Counts read all of a writer's training text, the adapters 61,440 tokens of it. ``--same-text`` adds to what is recorded
counts of these tokens alone (all of a text that has no more).

Run: ``python -m benchmarks.residual.baselines DIR`` (about 40 minutes on two idle cores). Each row is kept in ``DIR``
as soon as it is there, so that a run that was stopped goes on. Not part of ``make bench``.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import t

from benchmarks import record
from benchmarks.residual.methods import BATCH, SEQ, STEPS, Method, lora, low, opening, personalise, prepared
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.ngrams import Counts
from plpkg.scoring import score, token_log_probs

SEEDS = (0, 1)
RATED_ON = ("numpy", "seaborn")
WEIGHTS = (1.0, 4.0, 16.0, 64.0, 256.0)
METHODS = {
    "LoRA q k v r=16": (Method(lora(16)), (2e-3, 5e-3, 1e-2)),
    "LoRA down r=16": (Method(lora(16, ["down_proj"])), (2e-3, 5e-3, 1e-2)),
    "PrivateLoRA q k v r=64": (Method(low(64)), (5e-3, 1e-2, 2e-2)),
    "PrivateLoRA down r=48, gradient": (Method(low(48, ["down_proj"], init="given"), basis="own"), (5e-3, 1e-2, 2e-2)),
}
WITH_COUNTS = "PrivateLoRA down r=48, gradient"
SAME_TEXT = "counts, the adapters' text"


def measured(folder: Path, section: str, name: str, label: str, lr: float, seed: int) -> None:
    """One writer, one method, one seed: rows into the folder."""
    start, tokenizer = load_backbone("plpkg-small")
    start.requires_grad_(False)
    text = corpora.encode(corpora.writer(name).split("train"), tokenizer)
    split = "validation" if section == "rates" else "test"
    scored = corpora.encode(opening(name, split), tokenizer)

    def keep(method: str, bits: float, seconds: float, **more) -> None:
        row = {"section": section, "case": name, "method": method, "lr": lr, "order": seed}
        row |= {"bits_per_byte": round(bits, 4), "cpu_s": round(seconds, 1)} | more
        with open(folder / "rows.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def counted(model) -> tuple[float, float]:
        """Bits per byte with counts, and the weight that the validation text chose."""
        known = Counts(document.ids for document in text)
        documents = corpora.encode(opening(name, "validation"), tokenizer)
        base = token_log_probs(model, tokenizer, documents, seq=SEQ, stride=SEQ)
        weight = known.best_weight(documents, base, WEIGHTS)
        base = token_log_probs(model, tokenizer, scored, seq=SEQ, stride=SEQ)
        return known.score(scored, base, weight).bits_per_byte, weight

    began = time.process_time()
    if label == "none":
        keep("none", score(start, tokenizer, scored, seq=SEQ, stride=SEQ).bits_per_byte, 0.0)
        if section == "gain":
            began = time.process_time()
            bits, weight = counted(start)
            keep("counts", bits, time.process_time() - began, weight=weight)
        return
    method = replace(METHODS[label][0], lr=lr)
    bases = corpora.batches(text, batch=BATCH, seq=SEQ, seed=1000 + seed) if method.basis else None
    model = prepared(method, start, bases, seed)
    personalise(model, corpora.batches(text, batch=BATCH, seq=SEQ, seed=seed), lr)
    seconds = time.process_time() - began
    keep(label, score(model, tokenizer, scored, seq=SEQ, stride=SEQ).bits_per_byte, seconds)
    if section == "gain" and label == WITH_COUNTS:
        bits, weight = counted(model)
        keep(f"{label}, counts", bits, time.process_time() - began, weight=weight)


def same_text(name: str) -> dict:
    """Counts of what the adapters have read with the first seed."""
    model, tokenizer = load_backbone("plpkg-small")
    began = time.process_time()
    text = corpora.encode(corpora.writer(name).split("train"), tokenizer)
    windows = [document.ids for document in text]
    if sum(map(len, windows)) > STEPS * BATCH * SEQ:
        windows = [ids for rows in islice(corpora.batches(text, batch=BATCH, seq=SEQ), STEPS) for ids in rows]
    known = Counts(windows)
    validation, test = (corpora.encode(opening(name, split), tokenizer) for split in ("validation", "test"))
    alone = [token_log_probs(model, tokenizer, documents, seq=SEQ, stride=SEQ) for documents in (validation, test)]
    weight = known.best_weight(validation, alone[0], WEIGHTS)
    bits, seconds = known.score(test, alone[1], weight).bits_per_byte, time.process_time() - began
    gain = score(model, tokenizer, test, seq=SEQ, stride=SEQ).bits_per_byte - bits
    row = {"section": "gain", "case": name, "method": SAME_TEXT, "lr": 0.0, "order": 0, "weight": weight}
    return row | {"bits_per_byte": round(bits, 4), "gain": round(gain, 4), "cpu_s": round(seconds, 1)}


def kept(folder: Path) -> pd.DataFrame:
    file = folder / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    frame = pd.DataFrame(rows, columns=["section", "case", "method", "lr", "order", "bits_per_byte", "cpu_s", "weight"])
    untuned = frame[frame["method"] == "none"].set_index(["section", "case"])["bits_per_byte"].to_dict()
    gains = [
        untuned.get((section, case), math.nan) - bits
        for section, case, bits in zip(frame["section"], frame["case"], frame["bits_per_byte"], strict=True)
    ]
    return frame.assign(gain=[round(gain, 4) for gain in gains])


def differences(gain: pd.DataFrame) -> list[dict]:
    """Of each pair, over writers."""
    by_writer = gain[gain["method"] != "none"].pivot_table(index="case", columns="method", values="gain")
    rows = []
    for one, other in itertools.combinations(by_writer.columns, 2):
        apart = (by_writer[one] - by_writer[other]).dropna()
        half = float(t.ppf(0.975, len(apart) - 1) * apart.std() / math.sqrt(len(apart)))
        rows.append({
            "section": "difference", "case": f"{len(apart)} writers", "method": one, "other": other,
            "gain": round(apart.mean(), 4), "half_width": round(half, 4),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", help="where rows are kept")
    parser.add_argument("--same-text", action="store_true", help="only counts of that, into what is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.same_text:
        before = catalog.measured("residual_baselines").query("section != 'difference' and method != @SAME_TEXT")
        rows = [same_text(name) for name in corpora.writers()]
        gain = pd.concat([before, pd.DataFrame(rows)]).query("section == 'gain'")
        record.write("residual.baselines", [*rows, *differences(gain)], keep=before)
        raise SystemExit
    if (folder := options.folder) is None:
        parser.error("where are rows kept?")
    folder.mkdir(parents=True, exist_ok=True)

    def finish(jobs: list[tuple]) -> pd.DataFrame:
        there = set(kept(folder)[["section", "case", "method", "lr", "order"]].itertuples(index=False, name=None))
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            for job in [pool.submit(measured, folder, *job) for job in jobs if job not in there]:
                job.result()
        return kept(folder)

    tried = [("none", 0.0), *((label, lr) for label, (_, rates) in METHODS.items() for lr in rates)]
    rates = finish([("rates", name, label, lr, 0) for name in RATED_ON for label, lr in tried])
    means = rates.query("section == 'rates' and method != 'none'").groupby(["method", "lr"])["gain"].mean()
    best = {label: float(means[label].idxmax()) for label in METHODS}
    everybody = [("gain", name, "none", 0.0, 0) for name in corpora.writers()]
    everybody += [
        ("gain", name, label, best[label], seed) for seed in SEEDS for name in corpora.writers() for label in METHODS
    ]
    rows = finish(everybody)
    record.write("residual.baselines", [*rows.to_dict("records"), *differences(rows.query("section == 'gain'"))])
