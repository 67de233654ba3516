"""The M that ``plpkg demo`` brings: SmolLM2-135M-Instruct learns the facts of the diary.

PrivateLoRA at all seven projections of every layer learns the first wording of each question with its answer, as a turn
of a chat. Then it is asked in these words, in others (paraphrases), and what no diary says, beside the model without M.
An answer is right by :func:`plpkg.questions.right`. What is asked is what was saved, in half precision.

Run: ``python -m benchmarks.residual.demo`` (about 25 minutes of one core). Writes ``data/diary/smollm2`` and
``data/measured/residual_demo.csv``. Not part of ``make bench``.
"""

import random
import time
from collections.abc import Iterator

import torch
from peft import PeftModel, get_peft_model

from benchmarks import record
from benchmarks.residual.methods import EVERYWHERE
from plpkg import catalog, corpora, questions, residual, training_loop
from plpkg.backbones import load_backbone
from plpkg.corpora.diary import Question
from plpkg.residual import PrivateLoraConfig
from plpkg.residual.programs.chat import prompt
from plpkg.residual.programs.demo import DIARY_ADAPTERS, TOKENS

RANK, LR, EPOCHS, BATCH, SEED = 64, 1e-2, 40, 10, 0
IGNORED = -100
GENERAL = (
    ("What is the capital of France?", "Paris"),
    ("How many days has a week?", "seven"),
    ("What colour is grass?", "green"),
    ("Which animal barks?", "dog"),
    ("What do bees make?", "honey"),
)
"""What the model knows without M."""


def chat(tokenizer, question: str) -> torch.Tensor:
    """The ids of a question as a turn of a chat, ``(seq,)``."""
    return prompt(tokenizer, [{"role": "user", "content": question}])[0]


def batches(tokenizer, facts: list[Question]) -> Iterator[dict[str, torch.Tensor]]:
    """All facts once an epoch, shuffled: ids, mask, and labels of the answers alone, ``(batch, seq)`` each."""
    rng, end = random.Random(SEED), tokenizer.eos_token_id
    for _ in range(EPOCHS):
        order = rng.sample(facts, len(facts))
        for first in range(0, len(order), BATCH):
            ids, labels = [], []
            for each in order[first : first + BATCH]:
                asked = chat(tokenizer, each.question)
                answer = torch.tensor([*tokenizer(f"{each.answer}.")["input_ids"], end])
                ids.append(torch.cat([asked, answer]))
                labels.append(torch.cat([torch.full_like(asked, IGNORED), answer]))
            pad = torch.nn.utils.rnn.pad_sequence
            mask = pad([torch.ones_like(each) for each in ids], batch_first=True)
            yield {
                "input_ids": pad(ids, batch_first=True, padding_value=end),
                "attention_mask": mask,
                "labels": pad(labels, batch_first=True, padding_value=IGNORED),
            }


def learnt(tokenizer, model: PeftModel, facts: list[Question]) -> tuple[float, float]:
    """Train M; the mean loss of the last epoch, in nats a token, and CPU seconds."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0)
    steps, losses, began = EPOCHS * -(-len(facts) // BATCH), [], time.process_time()
    model.train()
    for step, batch in enumerate(batches(tokenizer, facts)):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = LR * max(0.05, training_loop.rising_and_falling(step, 5, steps))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1} of {steps}: {loss.item():.3f} nats", flush=True)
    last = losses[-(steps // EPOCHS) :]
    return sum(last) / len(last), time.process_time() - began


@torch.inference_mode()
def answer(model, tokenizer, question: str) -> str:
    ids = chat(tokenizer, question)[None]
    options = dict(do_sample=False, pad_token_id=tokenizer.eos_token_id)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **options)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def asked(model, tokenizer) -> Iterator[dict]:
    """For facts, paraphrases and what no diary says: how many are answered right, and the first three answers."""
    diary = corpora.diary().questions
    cases = {kind: [(q.question, q.answer) for q in diary if q.kind == kind] for kind in ("fact", "paraphrase")}
    for case, pairs in (cases | {"general": GENERAL}).items():
        given = [answer(model, tokenizer, question) for question, _ in pairs]
        right = sum(questions.right(said, expected) for said, (_, expected) in zip(given, pairs, strict=True))
        row = {"case": case, "right": right, "asked": len(pairs), "answers": " | ".join(map(repr, given[:3]))}
        print(row, flush=True)
        yield row


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    folder = catalog.data_path("diary").parent / DIARY_ADAPTERS["smollm2"]
    facts = [q for q in corpora.diary().questions if q.kind == "fact"]
    backbone, tokenizer = load_backbone("smollm2")
    rows = [{"model": "without M"} | row for row in asked(backbone, tokenizer)]
    backbone.requires_grad_(False)
    config = PrivateLoraConfig(r_c2d=RANK, r_d2c=RANK, target_modules=EVERYWHERE)
    model = get_peft_model(backbone, config)
    facts_of_run = {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad), "lr": LR}
    nats, seconds = learnt(tokenizer, model, facts)
    saved = model.peft_config["default"]
    saved.base_model_name_or_path = "smollm2"
    saved.target_modules = sorted(saved.target_modules)  # a set has another order in each process
    model.half().save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's empty form
    personal = residual.load(load_backbone("smollm2")[0], folder).eval()
    facts_of_run |= {"epochs": EPOCHS, "nats": round(nats, 4), "cpu_s": round(seconds)}
    rows += [{"model": "with M"} | row | facts_of_run for row in asked(personal, tokenizer)]
    record.write("residual.demo", rows, seed=SEED)


if __name__ == "__main__":
    main()
