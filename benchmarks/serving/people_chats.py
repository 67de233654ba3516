"""Three people's adapters for chats, which ``plpkg serve`` answers with: what each has learnt, and of whom.

Twelve things about each of three invented people, as short chats: three wordings of a question are learnt, and a fourth
is asked. SmolLM2-135M-Instruct, LoRA of rank 8 on q and v, all three in one run; only the answers' tokens count.

* training: chats, steps and CPU seconds of the whole run.
* answers: right answers of twelve, by whose adapter and by whose facts; ``learnt`` is a wording that was learnt,
  ``another`` the one that was not. Right has the expected word in at most twelve tokens.

Run: ``python -m benchmarks.serving.people_chats`` (ten minutes of one core), then ``make checksums``. Writes
``data/people`` and ``data/measured/serving_people_chats.csv``. Not part of ``make bench``.
"""

import json
import random
import time
from dataclasses import replace

import torch
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence

from benchmarks import record
from plpkg import catalog
from plpkg.backbones import load_backbone
from plpkg.inputs import IGNORED
from plpkg.questions import right
from plpkg.serving import Adapter, Engine, Request, train_many

FOLDER = catalog.data_path() / "people"
LORA = LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", base_model_name_or_path="smollm2"
)
EPOCHS, BATCH, LR, WRITTEN = 16, 6, 4e-3, 12


def chat(tokenizer, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of one turn each, of which the answer is learnt."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids = torch.tensor(tokenizer.apply_chat_template(turns, return_dict=False))
    labels = ids.clone()
    labels[: len(prompt(tokenizer, question))] = IGNORED
    return ids, labels


def prompt(tokenizer, question: str) -> list[int]:
    turn = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)


def batches(tokenizer, told: dict, person: str) -> list[dict]:
    """Each epoch's chats in an order of its own."""
    chats = [
        chat(tokenizer, wording, told["answers"][person][thing][0])
        for thing, wordings in told["questions"].items()
        for wording in wordings[:3]
    ]
    made = []
    for epoch in range(EPOCHS):
        random.Random(f"{person} {epoch}").shuffle(chats)
        for some in (chats[i : i + BATCH] for i in range(0, len(chats), BATCH)):
            ids, labels = zip(*some, strict=True)
            made.append({"input_ids": padded(ids, 0), "labels": padded(labels, IGNORED)})
    return made


def padded(rows: tuple[torch.Tensor, ...], fill: int) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=fill)


def answered(engine: Engine, tokenizer, questions: list[str], adapter: str | None) -> list[str]:
    requests = [Request(prompt(tokenizer, each), adapter=adapter, max_new_tokens=WRITTEN) for each in questions]
    return [tokenizer.decode(each, skip_special_tokens=True).strip() for each in engine.generate(requests)]


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_backbone("smollm2")
    told = json.loads((FOLDER / "people.json").read_text())
    people = list(told["answers"])
    learnt = {person: batches(tokenizer, told, person) for person in people}
    steps, began = len(learnt["ann"]), time.process_time()
    adapters = train_many(model, LORA, learnt, steps=steps, lr=LR, max_grad_norm=1.0)
    seconds = time.process_time() - began
    engine = Engine(model, tokenizer)
    for person, adapter in adapters.items():
        half = {m: replace(f, down=f.down.half(), up=f.up.half()) for m, f in adapter.factors.items()}
        kept = Adapter.of(adapter.config, half)
        kept.save(FOLDER / person)
        engine.load(person, kept)
    rows = [{"section": "training", "case": "three people", "steps": steps, "cpu_s": round(seconds, 1)}]
    for adapter in (None, *people):
        for wording, place in (("learnt", 0), ("another", 3)):
            said = answered(engine, tokenizer, [each[place] for each in told["questions"].values()], adapter)
            print(adapter, said, flush=True)
            for person in people:
                expected = [value for _, value in told["answers"][person].values()]
                found = sum(right(*each) for each in zip(said, expected, strict=True))
                row = {"section": "answers", "case": person, "adapter": adapter or "none", "wording": wording}
                rows.append(row | {"right": found, "asked": len(expected)})
    record.write("serving.people_chats", rows)


if __name__ == "__main__":
    main()
