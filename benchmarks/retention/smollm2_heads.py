"""Retaining heads for smollm2-reader, trained as Locret's paper does (arXiv 2410.01805, appendix A.1).

A text has 500 to 4,000 tokens. Of three, one is documentation in which a person's notes are hidden, one is notes alone,
both followed by questions with their answers, turn by turn; and one is documentation and how it goes on. Labels, loss,
AdamW and clipping are the publication's. In place of its 3,000 steps with a rate of 5e-4 there are 400 with 4e-3, and
heads are 64 wide, not a quarter of the model.

Run: ``python -m benchmarks.retention.smollm2_heads DIR`` (about an hour on one core); the same command goes on after
a stop. It writes ``data/retention/smollm2-reader``: the heads in half precision, and ``log.csv`` with each step's loss.
"""

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.backbones import hands
from benchmarks.retention import hidden
from plpkg.backbones import load_backbone
from plpkg.questions import parts
from plpkg.retention import RetainingHeads, train_heads

SHIPPED = record.DATA.parent / "retention" / "smollm2-reader"
STEPS, HIDDEN, LR, WARMUP = 400, 64, 4e-3, 50
SHORTEST, LONGEST = 500, 4000
CONTINUED = 128
"""Tokens by which documentation goes on."""


def encoded(tokenizer, text: str) -> torch.Tensor:
    """Ids ``(1, seq)``."""
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


def examples(tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is read, and what follows: the same for every run."""
    rng = random.Random("retaining heads for smollm2-reader")
    people = [some for hand in hands.training_hands() for some in hands.collections(hand)]
    while True:
        length = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        kind = rng.choice(("hidden", "notes", "documentation"))
        if kind == "documentation":
            ids = encoded(tokenizer, hidden.documentation(tokenizer, length + CONTINUED, rng, "train"))
            yield ids[:, :-CONTINUED], ids[:, -CONTINUED:]
            continue
        if kind == "hidden":
            text, asked = hidden.noted(tokenizer, length, rng.choice(people), rng)
        else:
            text, asked = hidden.notes_alone(tokenizer, length, people, rng)
        read, _ = parts(text, "", tokenizer)
        yield encoded(tokenizer, read), encoded(tokenizer, hidden.turns(tokenizer, asked))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_backbone("smollm2-reader")
    heads = RetainingHeads.attach(model, HIDDEN)
    log = train_heads(
        model, heads, examples(tokenizer), steps=STEPS, lr=LR, warmup=WARMUP, out=folder, checkpoint_every=20
    )
    heads.half().save_pretrained(SHIPPED)
    log.to_frame().to_csv(SHIPPED / "log.csv", index=False, float_format="%.5g", lineterminator="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
