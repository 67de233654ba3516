"""Sixteen people's notes, learnt with and without privacy: the two adapters that notebook 05 asks.

Each note tells the code of one person's safe. SmolLM2-135M-Instruct learns the notes through LoRA, by the usual loop
and by the steps of ``make_private``; the unit of privacy is a note. Then it is asked to continue each note's beginning.
Membership is guessed by how much likelier training has made a note, beside sixteen notes of others.

Run: ``python -m benchmarks.clipping.notes`` (about ten minutes of one core). Writes ``data/clipping`` and
``data/measured/clipping_notes.csv``. Not part of ``make bench``.
"""

import random
import time
from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from plpkg import catalog
from plpkg.backbones import load_backbone
from plpkg.clipping import make_private

PEOPLE = "Agatha Alban Beatrice Cecily Conrad Daphne Edith Felix Frances Gideon Hubert Isobel Jasper Lydia Otto Tobias"
OTHERS = (
    "Alfred Amos Benedict Clara Cordelia Dominic Edmund Eleanor Florence Gilbert Harriet Leopold Mabel Magnus Martha "
    "Oswald"
)
ASKED = ("Agatha", "Felix", "Lydia", "Tobias", "Zachary")
"""Whose codes are asked for; nobody wrote Zachary's."""
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
EPOCHS, BATCH, LR, MAX_GRAD_NORM, EPSILON, DELTA, SEED = 24, 8, 5e-3, 0.1, 8.0, 1e-3, 0


def notes() -> pd.DataFrame:
    """The notes of both: name, code, text, and whether it is learnt."""
    rows = []
    for seed, (names, is_learnt) in enumerate([(PEOPLE, True), (OTHERS, False)]):
        codes = random.Random(seed).sample(range(1000, 10_000), 16)
        for name, code in zip(names.split(), codes, strict=True):
            text = f"{name}'s safe code is {code}, I believe."
            rows.append({"name": name, "code": code, "learnt": is_learnt, "text": text})
    return pd.DataFrame(rows)


def learn(model: PeftModel, data: TensorDataset, epsilon: float | None) -> dict:
    """Train the adapter; what it took, and what it spent."""
    torch.manual_seed(SEED)
    began = time.process_time()
    model.train()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    spent = usual(model, data, optimizer) if epsilon is None else private(model, data, optimizer, epsilon)
    model.eval()
    settings = {"epochs": EPOCHS, "batch": BATCH, "lr": LR, "rank": LORA.r}
    return settings | {"cpu_s": round(time.process_time() - began, 1)} | spent


def usual(model: PeftModel, data: TensorDataset, optimizer: AdamW) -> dict:
    criterion, loader = torch.nn.CrossEntropyLoss(), DataLoader(data, batch_size=BATCH, shuffle=True)
    for epoch in range(EPOCHS):
        for ids, labels in loader:
            optimizer.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = criterion(logits.mT, labels[:, 1:])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {EPOCHS}", flush=True)
    return {}


def private(model: PeftModel, data: TensorDataset, optimizer: AdamW, epsilon: float) -> dict:
    promised = dict(target_epsilon=epsilon, target_delta=DELTA, epochs=EPOCHS)
    training = make_private(
        model, optimizer, data, losses, batch_size=BATCH, max_grad_norm=MAX_GRAD_NORM, seed=SEED, **promised
    )
    for sample in training:
        training.step(sample)
        print(f"step {training.steps} of {EPOCHS * training.steps_per_epoch}", flush=True)
    return {
        "epsilon": round(training.epsilon(DELTA), 3),
        "delta": DELTA,
        "noise_multiplier": round(training.noise_multiplier, 4),
        "max_grad_norm": MAX_GRAD_NORM,
    }


def losses(model: PeftModel, batch: list[torch.Tensor]) -> torch.Tensor:
    """Of each note the mean over its tokens."""
    ids, labels = batch
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    nats = functional.cross_entropy(logits.mT, labels[:, 1:], reduction="none")
    return nats.sum(1) / (labels[:, 1:] != -100).sum(1)


@torch.inference_mode()
def measured(model, tokenizer, some: pd.DataFrame) -> dict:
    """The mean loss of the learnt notes, in nats a token, how many codes are told, and five answers."""
    right, nats = 0, []
    for note in some[some["learnt"]].itertuples():
        nats.append(loss(model, tokenizer, note.text))
        right += str(note.code) in says(model, tokenizer, note.name)
    answers = [f"{name}: {says(model, tokenizer, name).strip()!r}" for name in ASKED]
    return {
        "codes_told": right,
        "asked": len(nats),
        "nats": round(sum(nats) / len(nats), 3),
        "answers": " | ".join(answers),
    }


def loss(model, tokenizer, text: str) -> float:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:]).item()


def says(model, tokenizer, name: str) -> str:
    beginning = tokenizer(f"{name}'s safe code is", return_tensors="pt")
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    written = model.generate(**beginning, **options)[0, beginning["input_ids"].shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True)


@torch.inference_mode()
def membership(model, tokenizer, some: pd.DataFrame) -> float:
    """AUC: the share of pairs, a learnt note and another, of which training has made the learnt one likelier."""
    with model.disable_adapter():
        gain = torch.tensor([loss(model, tokenizer, text) for text in some["text"]])
    gain -= torch.tensor([loss(model, tokenizer, text) for text in some["text"]])
    is_learnt = torch.tensor(some["learnt"].to_numpy())
    return (gain[is_learnt][:, None] > gain[~is_learnt]).float().mean().item()


def saved(model: PeftModel, folder: Path) -> None:
    config = model.peft_config["default"]
    config.base_model_name_or_path = "smollm2"
    config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    model.half().save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's empty form


def main() -> None:
    torch.set_num_threads(1)
    folder = catalog.data_path() / "clipping"
    folder.mkdir(exist_ok=True)
    some = notes()
    some.to_csv(folder / "notes.csv", index=False, lineterminator="\n")
    backbone, tokenizer = load_backbone("smollm2")
    rows = [{"case": "before"} | measured(backbone, tokenizer, some)]
    encoded = [torch.tensor(tokenizer(text)["input_ids"]) for text in some[some["learnt"]]["text"]]
    labels = pad_sequence(encoded, batch_first=True, padding_value=-100)
    data = TensorDataset(labels.clamp(min=0), labels)
    for case, epsilon in {"usual": None, "private": EPSILON}.items():
        torch.manual_seed(SEED)
        model = get_peft_model(load_backbone("smollm2")[0], LORA)
        took = learn(model, data, epsilon)
        saved(model, folder / case)
        model = PeftModel.from_pretrained(load_backbone("smollm2")[0], folder / case).eval()
        auc = {"auc": round(membership(model, tokenizer, some), 3)}
        rows.append({"case": case} | measured(model, tokenizer, some) | auc | took)
    record.write("clipping.notes", rows, seed=SEED)


if __name__ == "__main__":
    main()
