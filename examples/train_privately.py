"""Train a language model on a column of a CSV file with differential privacy, and save a LoRA adapter of PEFT.

    python examples/train_privately.py --epsilon 8 --out private_adapter

--csv FILE --column NAME take the first 400 characters of your own texts; without them it learns 32 invented sentences,
in two minutes. Epsilon is about one row that is there or not. It does not cover the held-out tenth of the rows.
"""

import argparse
import sys

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model

from plpkg import catalog, clipping, corpora, scoring
from plpkg.backbones import load_backbone


def main(csv: str, column: str, epsilon: float, delta: float | None, epochs: int, out: str, model: str) -> None:
    table = pd.read_csv(csv, dtype=str, keep_default_na=False)
    if column not in table:
        raise ValueError(f"{csv} has no column {column!r}; it has {', '.join(table)}")
    if empty := [row for row, text in enumerate(table[column], start=1) if not text.strip()]:
        raise ValueError(f"{csv} has empty cells in the column {column!r}: {len(empty)}, the first in row {empty[0]}")
    if len(table) < 20:
        raise ValueError(f"{csv} has {len(table)} rows, and at least 20 are needed")
    learner, tokenizer = load_backbone(model)
    rows = corpora.encode((text[:400] for text in table[column]), tokenizer)  # longer texts are cut off
    held_out, learnt = rows[::10], [row for number, row in enumerate(rows) if number % 10]
    delta = delta or min(1e-3, 1 / len(learnt) ** 1.1)
    learner = get_peft_model(learner, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    before = scoring.score(learner, tokenizer, held_out)
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=5e-3)
    loader = torch.utils.data.DataLoader(learnt, max(8, len(learnt) // 20), collate_fn=corpora.batch)
    promise = dict(target_epsilon=epsilon, target_delta=delta, epochs=epochs, max_grad_norm=0.1)
    private = clipping.make_private(learner.train(), optimizer, loader, max_physical_batch_size=8, **promise)
    for sample in private:
        private.step(sample)
    after = scoring.score(learner.eval(), tokenizer, held_out)
    learner.save_pretrained(out, save_embedding_layers=False)
    print(f"held-out bits per byte: {before.bits_per_byte:.3f} before, {after.bits_per_byte:.3f} after (measured)")
    print(f"{private.steps} steps, {len(learnt)} rows learnt, noise multiplier {private.noise_multiplier:.6g}")
    print(f"epsilon {private.epsilon(delta):.4f} spent at delta {delta:.4g} (computed); adapter saved in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default=catalog.data_path("clipping", "notes.csv"))
    parser.add_argument("--column", default="text")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, help="by default 1 / n^1.1 of n rows, at most 0.001")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="private_adapter")
    parser.add_argument("--model", default="smollm2")
    try:
        main(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
