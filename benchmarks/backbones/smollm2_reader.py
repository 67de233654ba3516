"""An adapter that reads: SmolLM2-135M-Instruct learns to answer questions about notes in a few words.

LoRA on every linear layer, trained on notes by many hands (``benchmarks.backbones.hands``). A sequence is a text of one
to five notes and all questions about them that are due, each with its answer. Questions do not see each other: each
attends to the text and to itself, at the positions that follow the text, so that one pass is as good as one pass for
each question, at half the cost. The other notes of a text are those nearest to its first question by meaning, or any.
The loss is that of the answers' tokens. Matrices are multiplied in bfloat16.

It learns in two runs: first answers, from up to five notes at once; then also that a note does not say, from notes
that mostly stand alone and are those that search would find. What a step learns from depends on the seed and the step
alone: a run that was stopped goes on as if it had not been.

Run: ``python -m benchmarks.backbones.smollm2_reader FIRST``, then ``… DIR --set begin=FIRST --set seed=1 --set
alone=0.7 --set absent=0.7 --set absent_from=0 --set epochs=0.9 --set lr=1e-4``; the same command goes on after a stop.
DIR gets the adapter in half precision, ``log.csv`` with the loss of each ten steps of both runs, and ``recipe.json``.
Not part of ``make bench``.
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from benchmarks.backbones import hands
from benchmarks.backbones.hands import Collection, Question
from plpkg import questions, training_loop
from plpkg.backbones import UNKNOWN, load_backbone
from plpkg.search import Embedder

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_NOTES = {2: 2, 3: 11, 5: 2}
"""How many notes a text has that has more than one, and how often."""
NEAREST = 0.6
"""How often the other notes of a text are those nearest to the question."""
IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """``questions`` are those of a step. ``alone`` is the share of texts of one note, ``absent`` that of texts that
    also leave a question open, and ``absent_from`` the part of the steps after which they do. ``begin`` is the folder
    of an adapter to go on from.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    lr: float = 3e-4
    warmup: int = 10
    epochs: float = 2.5
    questions: int = 14
    alone: float = 0.25
    absent: float = 0.0
    absent_from: float = 0.7
    seed: int = 0
    begin: str = ""


@dataclass(frozen=True)
class Sequence:
    """A text, and questions about it; one that nothing in it answers has no ``note``."""

    notes: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.notes)


def neighbours(some: Collection, embed: Embedder) -> list[list[int]]:
    """For each question of a collection, all its notes by meaning, the nearest first."""
    nearness = embed([each.question for each in some.questions]) @ embed(some.notes).T  # (questions, notes)
    return (-nearness).argsort(1).tolist()


def epoch(recipe: Recipe, number: int, everything: list[Collection], nearest: dict) -> list[Sequence]:
    """Sequences in which each answerable question comes once."""
    rng = random.Random(f"{recipe.seed} {number}")
    several = [(1 - recipe.alone) * each / sum(NUM_NOTES.values()) for each in NUM_NOTES.values()]
    sequences = []
    for some in everything:
        due = list(some.answerable)
        rng.shuffle(due)
        while due:
            first = due[0]
            near = [i for i in nearest[some.who, first.question] if i != first.note]
            count = rng.choices([1, *NUM_NOTES], [recipe.alone, *several])[0]
            others = near[: count - 1] if rng.random() < NEAREST else rng.sample(near, count - 1)
            chosen = [first.note, *others]
            rng.shuffle(chosen)
            asked = [each for each in due if each.note in chosen]
            due = [each for each in due if each.note not in chosen]
            if rng.random() < recipe.absent:
                asked += left_open(some, chosen, nearest, rng)
            sequences.append(Sequence(tuple(some.notes[i] for i in chosen), tuple(asked)))
    rng.shuffle(sequences)
    return sequences


def left_open(some: Collection, chosen: list[int], nearest: dict, rng: random.Random) -> list[Question]:
    """A question that no chosen note answers, though one of them is the nearest to it that does not; none, rarely."""

    def nearest_wrong(each: Question) -> int:
        return next(i for i in nearest[some.who, each.question] if i != each.note)

    candidates = [each for each in some.questions if each.note not in chosen and nearest_wrong(each) in chosen]
    return [replace(rng.choice(candidates), note=None)] if candidates else []


def packed(sequence: Sequence, tokenizer, with_absent: bool) -> dict[str, torch.Tensor]:
    """Ids, positions and labels ``(1, seq)``, and what is added to the attention scores ``(1, 1, seq, seq)``."""
    ids, positions, labels, groups = [], [], [], []

    def add(tokens: list[int], begin: int, group: int, learnt: bool) -> None:
        ids.extend(tokens)
        positions.extend(range(begin, begin + len(tokens)))
        labels.extend(tokens if learnt else [IGNORED] * len(tokens))
        groups.extend([group] * len(tokens))

    before, _ = questions.parts(sequence.text, "", tokenizer)
    add(tokenizer(before)["input_ids"], 0, 0, False)
    length = len(ids)
    for number, each in enumerate(sequence.questions, 1):
        if each.note is None and not with_absent:
            continue
        _, after = questions.parts(sequence.text, each.question, tokenizer)
        asked = tokenizer(after, add_special_tokens=False)["input_ids"]
        answer = UNKNOWN if each.note is None else each.answers[0]
        add(asked, length, number, False)
        add([*tokenizer(answer)["input_ids"], tokenizer.eos_token_id], length + len(asked), number, True)
    group = torch.tensor(groups)
    seen = (group[None, :] == 0) | (group[None, :] == group[:, None])
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    return {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([positions]),
        "labels": torch.tensor([labels]),
        "attention_mask": torch.where(seen & causal, 0.0, torch.finfo(torch.bfloat16).min)[None, None],
    }


def loss(base, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum over the answers' tokens, in nats; logits are made for them alone."""
    labels = batch["labels"][:, 1:]
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    with torch.autocast("cpu", torch.bfloat16):
        hidden = base.model(**inputs, use_cache=False).last_hidden_state[:, :-1]  # (1, seq - 1, hidden)
        logits = base.lm_head(hidden[labels != IGNORED])
    return cross_entropy(logits.float(), labels[labels != IGNORED], reduction="sum")


def schedule(recipe: Recipe, everything: list[Collection], nearest: dict) -> list[list[Sequence]]:
    """The sequences of each step."""
    answerable = sum(len(some.answerable) for some in everything)
    steps, waiting, number = [], [], 0
    total = round(recipe.epochs * answerable / recipe.questions)
    while len(steps) < total:
        for sequence in epoch(recipe, number, everything, nearest):
            waiting.append(sequence)
            if sum(each.note is not None for s in waiting for each in s.questions) >= recipe.questions:
                steps.append(waiting)
                waiting = []
        number += 1
    return steps[:total]


def train(recipe: Recipe, out: Path) -> None:
    """All steps of the recipe; then the adapter and the log are in ``out``."""
    model, tokenizer = load_backbone("smollm2", attn_implementation="eager")  # faster on so short texts
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":  # which shares the embedding's weights
            module.to(torch.bfloat16)  # they are multiplied in it: cast once, and not in each pass; nothing is rounded
    everything = [some for hand in hands.training_hands() for some in hands.collections(hand)]
    embed = Embedder()
    nearest = {
        (some.who, each.question): order
        for some in everything
        for each, order in zip(some.questions, neighbours(some, embed), strict=True)
    }
    steps = schedule(recipe, everything, nearest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        config = LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            lora_dropout=recipe.dropout,
            target_modules=LINEAR,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config).train()
    if recipe.begin:
        set_peft_model_state_dict(model, load_file(Path(recipe.begin, "adapter_model.safetensors")))
    base = model.get_base_model()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.01)
    run = training_loop.TrainingRun(
        len(steps), out, asdict(recipe) | {"hands": len(hands.training_hands())}, checkpoint_every=20
    )
    adapter = SimpleNamespace(
        state_dict=partial(get_peft_model_state_dict, model), load_state_dict=partial(set_peft_model_state_dict, model)
    )
    run.begin("reading", True, adapter=adapter, optimizer=optimizer)
    began = time.process_time() - run.facts.get("cpu_s", 0.0)

    def gradient(step: int) -> float:
        torch.manual_seed(recipe.seed * 100_000 + step)  # of the dropout
        with_absent = step >= recipe.absent_from * len(steps)
        batches = [packed(sequence, tokenizer, with_absent) for sequence in steps[step]]
        tokens = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            part = loss(base, batch) / tokens
            part.backward()
            total += part.item()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        run.facts["cpu_s"] = time.process_time() - began
        run.log.append({"step": step + 1, "nats": round(total, 5)})
        return total

    def rate(step: int) -> float:
        return recipe.lr * max(0.05, training_loop.rising_and_falling(step, recipe.warmup, len(steps)))

    for done, _ in run.learn(gradient, [optimizer], rate):
        last = run.log[-20:]
        run.bar.set_postfix(nats=f"{sum(row['nats'] for row in last) / len(last):.3f}")
        if done % 100 == 0:
            ship(model, recipe, run, out)
    ship(model, recipe, run, out)


def ship(model, recipe: Recipe, run: training_loop.TrainingRun, out: Path) -> None:
    """Write what comes with the package: the adapter in half precision, the log, and what it was made by."""
    half = {name: value.detach().half() for name, value in get_peft_model_state_dict(model).items()}
    config = replace(model.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = "smollm2", True
    config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    config.save_pretrained(out)
    save_file(half, out / "adapter_model.safetensors")
    facts = asdict(recipe) | {"steps": run.log[-1]["step"], "cpu_s": round(run.facts["cpu_s"])}
    facts |= {"hands": hands.training_hands(), "torch": torch.__version__}
    log = pd.DataFrame(run.log)
    by_tens = log.groupby((log["step"] - 1) // 10)
    tens = by_tens.mean().round(4).assign(step=by_tens["step"].max())
    if recipe.begin:
        facts["begin"] = json.loads(Path(recipe.begin, "recipe.json").read_text(encoding="utf-8"))
        before = pd.read_csv(Path(recipe.begin, "log.csv"))
        tens = pd.concat([before, tens.assign(step=tens["step"] + before["step"].max())])
    (out / "recipe.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    tens.to_csv(out / "log.csv", index=False, lineterminator="\n")


def changed(changes: list[str]) -> Recipe:
    """The recipe with some fields as ``NAME=VALUE`` says."""
    kinds = {field.name: field.type for field in fields(Recipe)}
    given = dict(change.split("=", 1) for change in changes)
    return replace(Recipe(), **{name: kinds[name](value) for name, value in given.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(changed(arguments.set), arguments.out)
