"""An adapter that reads: plpkg-small learns to answer questions about a text in its prompt.

LoRA of rank 64 on every linear layer, trained on invented people's notes (``benchmarks.notes.generator``). A sequence
is a text and several questions, each with its answer. The loss is that of the answers, that of their first tokens once
more, a part of that of the text, and that of where the model looks for what it answers
(``benchmarks.backbones.pointing``).
On public text the model is held to what plpkg-small says there (the divergence of their next tokens), so that it
forgets little. Matrices are multiplied in bfloat16: a step takes little more than half the time where the processor
has instructions for it.

Which texts come when decides what is learnt. In texts of different facts the kind of the value tells most answers: a
model that learns from them alone finds the date that was asked for, and never whose. So there are four stages:

* short texts of plain facts of common relations, all of them asked for: what a question and an answer are;
* texts whose facts are all of one relation, so that only the entity tells them apart, the value last: finding a fact.
  At first no more than four of them: it began to be learnt within 300 steps, and with up to nine not in 550;
* all wordings, kinds of questions and voices, longer and longer texts; some of the second stage's still;
* with a higher rate once more, shorter texts of all stages, of which alike and plain ones also leave questions open:
  a model that meets "the notes do not say" in long texts alone says it at random.

After 1.5 CPU hours of the first and the third stage alone, the model found one of four facts that are alike in 18 % of
100 questions; 750 steps of the second stage later, in 52 %. What the whole recipe came to is in ``data/reader`` and, by
sets of questions, in ``data/measured/backbones_answers.csv``. The third stage's last steps bring little. In the fourth,
of 1.6 CPU hours, open questions are recognised twice to three times as often, and nothing else is found more often.
What is left are values of several tokens that are written wrongly, and other facts of the same kind.

The passages of a step depend on the seed and the step alone: a run that was stopped goes on as if it had not been.

Run: ``python -m benchmarks.backbones.reader DIR``; ``--steps`` ends it earlier, and the same command goes on. DIR gets
the adapter in half precision, ``log.csv`` with the losses of each ten steps, ``curve.csv`` with what it answers
meanwhile, and ``recipe.json``. Not part of ``make bench``.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, kl_div

from benchmarks.backbones import reading
from benchmarks.backbones.pointing import Pointing
from benchmarks.backbones.reading import COMMON, PLAIN
from benchmarks.notes import generator
from plpkg import corpora, learning, questions
from plpkg.backbones import READER_POSITIONS, load_backbone
from plpkg.corpora import Passage

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PADDING, TEXT, ANSWER = 0, 1, 2
WEIGHTS = {"answers": 1.0, "first": 1.0, "text": 0.5, "pointing": 0.5, "first pointing": 0.5}
LOOKING = (3, 4)
"""The layers that are told where to look: the last two of five, which can know what a sentence is about."""


@dataclass(frozen=True)
class Recipe:
    """``tokens`` are those of a step's passages, ``public`` those of its public text. The rate falls twice: in
    ``steps`` from ``lr``, then in ``further_steps`` from ``further_lr``.
    """

    rank: int = 64
    alpha: int = 32
    lr: float = 1.2e-3
    warmup: int = 100
    steps: int = 11_000
    further_lr: float = 8e-4
    further_steps: int = 3_600
    tokens: int = 2048
    questions: int = 16
    public: int = 512
    seed: int = 0


STAGES = {0.1: (0.0, 1.0, 0.0), 0.35: (0.8, 0.2, 0.0), 1.0: (0.25, 0.15, 0.6), 2.0: (0.35, 0.1, 0.55)}
"""Until which part of the steps: how often a text's facts are alike, plain, or of all kinds."""


def passages(recipe: Recipe, step: int, documents) -> Iterator[list]:
    """The readings of a step, all of about one length, which is drawn so that each octave comes alike often."""
    rng, done = random.Random(f"{recipe.seed} {step}"), step / recipe.steps
    stage, shares = next((until, shares) for until, shares in STAGES.items() if done < until)
    kind = rng.choices(("alike", "plain", "all"), shares)[0]
    longest = 120 if kind != "all" else 200 if done < 0.5 else 900 if done < 0.9 else 2500 if done < 1 else 500
    length = round(30 * (longest / 30) ** rng.random())
    most = COMMON * 20 ** min(1, done / 0.4)  # relations; at the end all
    if kind == "all":
        options, asked = dict(tokens=length, documents=documents), 1 + length // 25
    else:
        asked = max(2, length // 13)
        options = PLAIN if done < 1 else PLAIN | {"kinds": ("fact", "absent")}
        if kind == "alike":
            asked = rng.randint(2, min(9, round(4 + 20 * max(0, done - 0.2))) if done < 1 else 14)
            options = options | dict(alike=True, value_last=stage < 1)
        length, options = 13 * asked, options | dict(facts=asked)
    asked = min(asked, recipe.questions)
    for _ in range(max(1, int(recipe.tokens // (1.2 * length + 20 * asked)))):
        relations = round(COMMON * (most / COMMON) ** rng.random())
        yield generator.readings(rng, asked, relations=relations, **options)


def batch(readings: list[list], tokenizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids; whether each is of the text, of an answer, or padding; and for an answer's tokens where the text has
    them, if it has them once, else -1. All of one shape ``(passages, seq)``.
    """
    rows = []
    for each in readings:
        pieces = []
        for i, passage in enumerate(each):
            pieces.append(questions.prompt("" if i else passage.text, passage.question, tokenizer))
            pieces.append(f" {passage.answer}\n")
        encoded = tokenizer(pieces, add_special_tokens=False, return_offsets_mapping=True)
        ids, roles, sources = [tokenizer.bos_token_id], [TEXT], [-1]
        for i, piece in enumerate(encoded["input_ids"]):
            ids += piece
            roles += [ANSWER if i % 2 else TEXT] * len(piece)
            found = _found(each[i // 2], encoded["offset_mapping"][0]) if i % 2 else []
            sources += (found + [-1] * len(piece))[: len(piece)]
        rows.append((ids, roles, sources))
    seq = max(len(ids) for ids, _, _ in rows)
    filled = torch.stack([torch.full((len(rows), seq), value) for value in (0, PADDING, -1)])
    for i, row in enumerate(rows):
        filled[:, i, : len(row[0])] = torch.tensor(row)
    return tuple(filled)


def _found(passage: Passage, offsets: list[tuple[int, int]]) -> list[int]:
    """The places of the answer's tokens in the sequence, whose text begins at 1; none if it has them not once."""
    if passage.text.count(passage.answer) != 1:
        return []
    begin = passage.text.index(passage.answer)
    end = begin + len(passage.answer)
    return [i for i, (first, last) in enumerate(offsets, 1) if first < end and last > begin]


def logits(model, ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What a model predicts for the chosen tokens, a mask of the shape of ``ids``: ``(tokens, vocabulary)``.

    The head is a third of so small a model's weights, so logits are made for no other tokens. The first token of a row
    has nothing before it, and is never chosen.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (batch, seq, hidden)
        return model.lm_head(hidden[:, :-1][chosen[:, 1:]]).float()


def train(recipe: Recipe, out: Path, until: int) -> None:
    """Up to ``until`` steps of the recipe; then the adapter and the logs are in ``out``."""
    (small, tokenizer), (model, _) = load_backbone("plpkg-small"), load_backbone("plpkg-small")
    model.config.max_position_embeddings = READER_POSITIONS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        config = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=LINEAR, task_type="CAUSAL_LM")
        model = get_peft_model(model, config).train()
    documents = corpora.public("train")
    base = model.get_base_model()
    pointing = Pointing(base, LOOKING)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    run = learning.TrainingRun(min(until, recipe.steps + recipe.further_steps), out, asdict(recipe))
    encoded = corpora.encode(documents, tokenizer)
    public = corpora.batches(encoded, batch=2, seq=recipe.public // 2, seed=recipe.seed, start=run.done)
    adapter = SimpleNamespace(
        state_dict=partial(get_peft_model_state_dict, model), load_state_dict=partial(set_peft_model_state_dict, model)
    )
    run.begin("reading", True, adapter=adapter, optimizer=optimizer)
    curve = run.facts.setdefault("curve", [])
    began = time.process_time() - run.facts.get("cpu_s", 0.0)

    def gradient(step: int) -> float:
        ids, roles, sources = batch(list(passages(recipe, step, documents)), tokenizer)
        some = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < 0.25
        chosen = (roles == ANSWER) | ((roles == TEXT) & some)
        first = (roles[:, 1:] == ANSWER) & (roles[:, :-1] == TEXT)
        copied, writing = (sources[:, 1:] >= 0).nonzero(as_tuple=True)  # the token before writes it
        with pointing.ask(copied, writing, sources[copied, writing + 1]):
            nats = cross_entropy(logits(base, ids, chosen), ids[:, 1:][chosen[:, 1:]], reduction="none")
        roles, looking = roles[:, 1:][chosen[:, 1:]], pointing.nats()
        parts = {
            "answers": nats[roles == ANSWER].mean(),
            "first": nats[first[chosen[:, 1:]]].mean(),
            "text": nats[roles == TEXT].mean(),
            "pointing": looking.sum() / max(1, len(looking)),  # all answers of a step may be absent
            "first pointing": looking[first[copied, writing]].sum() / max(1, first[copied, writing].sum()),
        }
        plain = next(public)
        everywhere = torch.ones_like(plain, dtype=torch.bool)
        with torch.no_grad():
            expected = logits(small, plain, everywhere).log_softmax(-1)
        found = logits(base, plain, everywhere).log_softmax(-1)
        parts["divergence"] = kl_div(found, expected, log_target=True, reduction="batchmean")
        held = min(6, 2 + 4 * step / recipe.steps)  # first it learns to read, then it is held the closer
        sum((WEIGHTS | {"divergence": held})[name] * part for name, part in parts.items()).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        run.facts["cpu_s"] = time.process_time() - began
        run.log.append({"step": step + 1} | {name: round(part.item(), 5) for name, part in parts.items()})
        return run.log[-1]["answers"] if torch.isfinite(norm) else norm.item()

    def rate(step: int) -> float:
        if step < recipe.steps:
            return recipe.lr * learning.rising_and_falling(step, recipe.warmup, recipe.steps)
        return recipe.further_lr * learning.rising_and_falling(step - recipe.steps, recipe.warmup, recipe.further_steps)

    for done, _ in run.learn(gradient, [optimizer], rate):
        last = run.log[-100:]
        run.bar.set_postfix(answers=f"{sum(row['answers'] for row in last) / len(last):.3f}")
        if done % 1000 == 0 or done in (recipe.steps, recipe.steps + recipe.further_steps):
            cpu_hours = round(run.facts["cpu_s"] / 3600, 2)
            curve.append({"step": done, "cpu_hours": cpu_hours} | reading.shares(model, tokenizer, questions_a_set=50))
            run.bar.write(str(curve[-1]))
    ship(model, recipe, run, out)


def ship(model, recipe: Recipe, run: learning.TrainingRun, out: Path) -> None:
    """Write what comes with the package: the adapter in half precision, the logs, and what it was made from."""
    half = {name: value.half() for name, value in get_peft_model_state_dict(model).items()}
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = "plpkg-small", True
    config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    config.save_pretrained(out)
    save_file(half, out / "adapter_model.safetensors")
    text = corpora.writer("public").fingerprint("train")
    facts = asdict(recipe) | {"cpu_s": round(run.facts["cpu_s"]), "public_text": text, "versions": corpora.versions()}
    (out / "recipe.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    log = pd.DataFrame(run.log)
    by_tens = log.groupby((log["step"] - 1) // 10)
    tens = by_tens.mean().round(5).assign(step=by_tens["step"].max())
    for name, rows in (("log.csv", tens), ("curve.csv", pd.DataFrame(run.facts["curve"]))):
        rows.to_csv(out / name, index=False, lineterminator="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe.steps + Recipe.further_steps, help="stop after so many")
    arguments = parser.parse_args()
    train(Recipe(), arguments.out, arguments.steps)
