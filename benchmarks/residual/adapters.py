"""What adapters with fewer round trips keep of an adapter's gain: every private writer, on plpkg-small.

An adapter in each of the five down_proj takes six round trips a token. In fewer: two layers instead of five, those with
the largest gradient; every answer added one layer late, so that two exchanges are under way at once; a ladder, whose M
is behind all layers. 480 numbers of the adapter cross for each token, 192 with two layers; the end points come on top.
Bases come from the writer's own text or from public text, the same for everybody.

* rates: the gain on numpy's and seaborn's validation text (the first 40 kB, as of the test text) for each learning rate
  of ``RATES``, one order of the text. "all layers" keeps the rate of ``benchmarks.residual.quality``.
* quality: the gain on the writer's test text, in bits per byte less than untuned, with the rate whose mean gain there
  is the largest ("ladder, own bases" and the like take that of "ladder"). Two seeds: of the order of the text, of the
  text that the bases come from, and of the ladder's random A.

Run: ``python -m benchmarks.residual.adapters`` (about 40 minutes on two idle cores, one thread for each writer).
``--adapters`` keeps what was learnt in the first order, and each row as soon as it is there: a run that was stopped
goes on. With ``--writers`` or ``--steps`` nothing is recorded. Not part of ``make bench``.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pandas as pd
import torch

from benchmarks import record
from benchmarks.residual.methods import ADAPTERS, BATCH, SEQ, STEPS, Method, ladder, opening, personalise, prepared
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.residual.adapter import layers
from plpkg.residual.ladder import taps
from plpkg.residual.methods import LadderConfig
from plpkg.scoring import score

SEEDS = (0, 1)
RATES = (3e-3, 1e-2, 2e-2)
RATED_ON = ("numpy", "seaborn")

METHODS = ADAPTERS | {
    "all layers, public bases": replace(ADAPTERS["all layers"], basis="public"),
    "two layers, public": replace(ADAPTERS["two layers"], basis="public"),
    "ladder, own bases": replace(ADAPTERS["ladder"], basis="own"),
    "ladder, random A": Method(ladder()),
}
RATED = ("two layers", "one layer late", "ladder", "ladder 512")
"""Each has a learning rate of its own, for all methods whose name begins like it."""
FEW = ("all layers, public bases", "two layers, public", "ladder, own bases", "ladder, random A")
FEW_WRITERS = ("numpy", "seaborn", "sklearn")


def bytes_per_token(method: Method, adapted: int, hidden: int) -> tuple[float, float]:
    """Up and down, 16 bit, word embedding and final hidden state included."""
    config = method.config
    if config is None:
        return 0, 0
    up, down = (0, config.r) if isinstance(config, LadderConfig) else (config.r_d2c, config.r_c2d)
    return 2 * (hidden + adapted * up), 2 * (hidden + adapted * down)


@dataclass(frozen=True)
class Bench:
    """What every process is told.

    ``public`` are the batches of public text that bases come from, by seed; ``folder`` is where adapters and rows go.
    """

    public: dict[int, list[torch.Tensor]]
    steps: int = STEPS
    folder: Path | None = None

    def rows(self, section: str, name: str, seed: int, methods: Sequence[tuple[str, Method]]) -> list[dict]:
        """One writer, some methods, one seed; before them the model as it is."""
        start, tokenizer = load_backbone("plpkg-small")
        start.requires_grad_(False)
        text = corpora.encode(corpora.writer(name).split("train"), tokenizer)
        scored = {split: corpora.encode(opening(name, split), tokenizer) for split in ("validation", "test")}
        untuned, rows, before = {}, [], self.kept()
        for label, method in [("none", Method()), *methods]:
            if label != "none" and (row := before.get((section, name, label, seed, method.lr, self.steps))):
                rows.append(row)
                continue
            began = time.process_time()
            batches = {
                "own": corpora.batches(text, batch=BATCH, seq=SEQ, seed=1000 + seed),
                "public": iter(self.public[seed]),
            }
            model = prepared(method, start, batches.get(method.basis), seed)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            if trained:
                stream = corpora.batches(text, batch=BATCH, seq=SEQ, seed=seed)
                personalise(model, stream, method.lr, self.steps)
            bits = {split: score(model, tokenizer, t, seq=SEQ, stride=SEQ).bits_per_byte for split, t in scored.items()}
            untuned = untuned or bits
            adapted = [layer.module.split(".")[2] for layer in (*layers(model).values(), *taps(model))]
            up, down = bytes_per_token(method, len(adapted), start.config.hidden_size)
            row = {
                "section": section, "case": name, "method": label, "order": seed,
                "bits_per_byte": round(bits["test"], 4), "gain": round(untuned["test"] - bits["test"], 4),
                "validation_gain": round(untuned["validation"] - bits["validation"], 4), "trained": trained,
                "lr": method.lr, "steps": self.steps if trained else 0, "layers": " ".join(adapted),
                "up_bytes": up, "down_bytes": down, "cpu_s": round(time.process_time() - began, 1),
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
            if self.folder is not None:
                self.keep(row, model)
        return rows

    def kept(self) -> dict[tuple, dict]:
        """The rows of a run that was stopped, by what they measured."""
        file = None if self.folder is None else self.folder / "rows.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
        return {tuple(row[key] for key in ("section", "case", "method", "order", "lr", "steps")): row for row in rows}

    def keep(self, row: dict, model) -> None:
        """Write a row down, and the adapter if others use it."""
        with open(self.folder / "rows.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        if row["section"] == "quality" and row["order"] == 0 and row["method"] in ADAPTERS:
            adapter = self.folder / row["case"] / row["method"]
            model.peft_config["default"].base_model_name_or_path = "plpkg-small"
            model.save_pretrained(adapter, save_embedding_layers=False)
            (adapter / "README.md").unlink()  # PEFT's empty form


def best_rates(rates: pd.DataFrame) -> dict[str, float]:
    """Of each adapter the learning rate with the largest mean gain on validation text."""
    means = rates[rates["method"] != "none"].groupby(["method", "lr"])["validation_gain"].mean()
    return {method: float(gains.idxmax()[1]) for method, gains in means.groupby(level="method")}


def with_rates(rates: dict[str, float]) -> list[tuple[str, Method]]:
    """The methods, each with its adapter's learning rate."""
    return [(label, replace(m, lr=rates.get(label.partition(",")[0], m.lr))) for label, m in METHODS.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=Path, help="a folder for adapters and rows")
    parser.add_argument("--writers", nargs="+", choices=corpora.writers(), help="only these; nothing is recorded")
    parser.add_argument("--steps", type=int, help="another number of steps; nothing is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.adapters is not None:
        options.adapters.mkdir(parents=True, exist_ok=True)
    text = corpora.encode(corpora.public("train"), load_backbone("plpkg-small")[1])
    public = {s: list(islice(corpora.batches(text, batch=BATCH, seq=SEQ, seed=1000 + s), 8)) for s in SEEDS}
    bench = Bench(public, options.steps or STEPS, options.adapters)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:

        def measured(section: str, jobs: list[tuple]) -> list[dict]:
            under_way = [pool.submit(bench.rows, section, *job) for job in jobs]
            return [row for job in under_way for row in job.result()]

        tried = [(name, replace(METHODS[name], lr=lr)) for name in RATED for lr in RATES]
        rates = measured("rates", [(name, 0, tried) for name in options.writers or RATED_ON])
        methods = dict(with_rates(best_rates(pd.DataFrame(rates))))

        def of(name: str, seed: int) -> list[tuple[str, Method]]:
            few = name in FEW_WRITERS and seed == 0
            return [(label, method) for label, method in methods.items() if few or label not in FEW]

        writers = options.writers or corpora.writers()
        rows = rates + measured("quality", [(name, seed, of(name, seed)) for seed in SEEDS for name in writers])
    if options.writers or options.steps:
        print(pd.DataFrame(rows).to_string(index=False))
    else:
        record.write("residual.adapters", rows)
