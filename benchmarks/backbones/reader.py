"""An adapter that reads: plpkg-small learns to answer questions about a text in its prompt.

LoRA of rank 32 on every linear layer, trained on invented people's notes (``plpkg.corpora.readings``) and, so that it
forgets little, on the public training text. A sequence is a text and several questions, each with its answer; the loss
is that of the answers, plus a tenth of that of the text, plus half of that of the public text.

The passages of a step depend on the seed and the step alone: a run that was stopped goes on as if it had not been.

Run: ``python -m benchmarks.backbones.reader DIR`` (six CPU hours, reckoned from six steps of 6 s); ``--steps``
ends it earlier, and the same command goes on. Not part of ``make bench``.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from plpkg import checkpoints, corpora, learning
from plpkg.backbones import load_backbone

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNSCORED = -100
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Recipe:
    """``tokens`` are those of a step's passages; texts have 20 to ``longest`` of them, at first no more than 200."""

    rank: int = 32
    lr: float = 2e-3
    warmup: int = 100
    steps: int = 3500
    tokens: int = 4096
    longest: int = 900
    questions: int = 8
    public: int = 512
    seed: int = 0


def prompt(text: str, question: str) -> str:
    """How a text and a question are put to the model. It writes a space, the answer, and a newline."""
    return f"{text}\n\nQuestion: {question}\nAnswer:"


def passages(recipe: Recipe, step: int, documents) -> Iterator[list]:
    """The readings of a step, all of about one length, which is drawn so that each octave comes alike often."""
    rng = random.Random(f"{recipe.seed} {step}")
    longest = 200 if step < 0.2 * recipe.steps else recipe.longest
    length = round(20 * (longest / 20) ** rng.random())
    for _ in range(max(1, recipe.tokens // (length + 60))):
        yield corpora.readings(rng, 1 + min(recipe.questions - 1, length // 80), tokens=length, documents=documents)


def batch(readings: list[list], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and, of the same shape ``(passages, seq)``, which of them belong to an answer."""
    rows = []
    for reading in readings:
        pieces, answers = [reading[0].text], []
        for each in reading:
            pieces[-1] += prompt("", each.question)
            answers.append(f" {each.answer}\n")
            pieces += [answers[-1], ""]
        encoded = tokenizer([piece for piece in pieces if piece], add_special_tokens=False)["input_ids"]
        ids = [tokenizer.bos_token_id, *(token for piece in encoded for token in piece)]
        marks = [False, *(i % 2 == 1 for i, piece in enumerate(encoded) for _ in piece)]
        rows.append((ids, marks))
    seq = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), seq), UNSCORED)
    marks = torch.zeros(len(rows), seq, dtype=torch.bool)
    for i, (row, marked) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        marks[i, : len(row)] = torch.tensor(marked)
    return ids, marks


def loss_of(model, ids: torch.Tensor, marks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of the marked tokens, and that of all others, in nats a token."""
    base = model.get_base_model()
    logits = base(input_ids=ids.clamp(min=0), use_cache=False).logits[:, :-1]  # (batch, seq - 1, vocab)
    truth, marks = ids[:, 1:].flatten(), marks[:, 1:].flatten()
    nats = cross_entropy(logits.flatten(0, 1), truth, reduction="none", ignore_index=UNSCORED)
    return nats[marks].mean(), nats[(truth != UNSCORED) & ~marks].mean()


def train(recipe: Recipe, out: Path, until: int) -> None:
    """Up to ``until`` steps of the recipe; the adapter and the log are in ``out`` after each checkpoint."""
    model, tokenizer = load_backbone("plpkg-small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        config = LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=LINEAR, task_type="CAUSAL_LM")
        model = get_peft_model(model, config).train()
    documents = corpora.public("train")
    encoded = corpora.encode(documents, tokenizer)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    state = checkpoints.load(out / CHECKPOINT, asdict(recipe)) or {"step": 0, "log": [], "seconds": 0.0}
    if state["step"]:
        with torch.no_grad():
            for weight, saved in zip(weights, state["weights"], strict=True):
                weight.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
    public = corpora.batches(encoded, batch=2, seq=recipe.public // 2, seed=recipe.seed, start=state["step"])
    began, log = time.process_time() - state["seconds"], state["log"]
    out.mkdir(parents=True, exist_ok=True)

    def gradient(step: int) -> float:
        ids, marks = batch(list(passages(recipe, step, documents)), tokenizer)
        answers, text = loss_of(model, ids, marks)
        plain = next(public)
        forgotten = loss_of(model, plain, torch.zeros_like(plain, dtype=torch.bool))[1]
        (answers + 0.1 * text + 0.5 * forgotten).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        log.append({"step": step + 1, "answers": answers.item(), "text": text.item(), "public": forgotten.item()})
        return answers.item() if torch.isfinite(norm) else norm.item()

    def save(done: int) -> None:
        state = {"identity": asdict(recipe), "step": done, "log": log, "seconds": time.process_time() - began}
        state |= {"weights": [weight.detach() for weight in weights], "optimizer": optimizer.state_dict()}
        checkpoints.save(out / CHECKPOINT, state)
        checkpoints.replace_files(out, model.save_pretrained)

    steps = tqdm(range(state["step"], min(until, recipe.steps)), initial=state["step"], total=min(until, recipe.steps))

    def rate(step: int) -> float:
        return recipe.lr * learning.rising_and_falling(step, recipe.warmup, recipe.steps)

    for _ in learning.learn(steps, gradient, [optimizer], rate, save=save, checkpoint_every=50):
        last = log[-100:]
        steps.set_postfix(answers=f"{sum(row['answers'] for row in last) / len(last):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="stop after so many")
    arguments = parser.parse_args()
    train(Recipe(), arguments.out, arguments.steps)
