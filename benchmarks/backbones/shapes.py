"""Which shape for plpkg-small? Each learns from the same tokens with the same recipe, and all fit in 16 MiB.

Run: ``python -m benchmarks.backbones.shapes`` (about 3 minutes a shape on 2 idle cores). Not part of ``make bench``.
"""

import dataclasses
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

from benchmarks import record
from plpkg import corpora
from plpkg.pretraining import Recipe, build, pretrain

RECIPE = Recipe(batch=16, steps=100)
SHAPES = {
    "deep": dict(num_layers=9, hidden=256, num_heads=8, num_kv_heads=2, intermediate=768, vocab=4096),
    "middle": dict(num_layers=6, hidden=320, num_heads=5, num_kv_heads=1, intermediate=896, vocab=4096),
    "wide": dict(num_layers=4, hidden=384, num_heads=6, num_kv_heads=2, intermediate=1024, vocab=4096),
    "large vocabulary": dict(num_layers=5, hidden=320, num_heads=5, num_kv_heads=1, intermediate=832, vocab=8192),
}


def measure(name: str) -> dict:
    recipe = dataclasses.replace(RECIPE, **SHAPES[name])
    parameters = sum(p.numel() for p in build(recipe).parameters())
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.perf_counter()
        pretrain(recipe, folder, device="cpu", evaluate_every=recipe.steps, checkpoint_every=recipe.steps)
        last = pd.read_csv(Path(folder, "training.csv")).iloc[-1]
        size = Path(folder, "model.safetensors").stat().st_size
    return {
        "shape": name,
        **SHAPES[name],
        "parameters": parameters,
        "mebibytes": round(size / 2**20, 2),
        "tokens": int(last["tokens"]),
        "validation_bits_per_byte": round(last["validation_bits_per_byte"], 4),
        "cpu_s": round(time.process_time() - cpu),
        "wall_s": round(time.perf_counter() - wall),
    }


if __name__ == "__main__":
    corpora.public("train")  # read before the clock runs
    torch.set_num_threads(2)
    record.write("backbones.shapes", [measure(name) for name in SHAPES], seed=RECIPE.seed)
