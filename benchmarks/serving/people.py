"""Sixteen people's adapters trained in one step, beside sixteen steps of the same code.

plpkg-small, LoRA of rank 8 on q, k, v and o, one sample each; CPU time of a step in one thread, the two take turns
within a round, ratios are medians.

* ``people``: by the tokens of a sample. ``backbone`` is the time of the backbone's own forward and backward pass in
  one batch, relative to sixteen: where that ratio ends, the gain ends.

Run: ``python -m benchmarks.serving.people``, about five minutes.
"""

import statistics
import time

import torch
from peft import LoraConfig

from benchmarks import record
from plpkg.backbones import load_backbone
from plpkg.serving import train_many

PEOPLE, LENGTHS, ROUNDS, STEPS = 16, (4, 8, 16, 32, 64, 128, 256), 7, 4
CONFIG = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")


def step_seconds(run) -> float:
    """CPU seconds of one step: those of ``STEPS`` more, so that what a run begins and ends with does not count."""
    times = []
    for steps in (1, 1 + STEPS):
        began = time.process_time()
        run(steps)
        times.append(time.process_time() - began)
    return (times[1] - times[0]) / STEPS


def rows_of(model, seq: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seq)
    texts = [torch.randint(8192, (1, seq), generator=generator) for _ in range(PEOPLE)]
    embeddings = [model.get_input_embeddings()(text).detach() for text in texts]

    def train(people):
        def run(steps):
            batches = {str(k): [texts[k]] for k in people}
            train_many(model, CONFIG, batches, steps=steps, lr=1e-3, progress=False)

        return run

    def together(steps):
        train(range(PEOPLE))(steps)

    def apart(steps):
        for k in range(PEOPLE):
            train([k])(steps)

    def backbone(batches):
        def run(steps):
            for _ in range(steps):
                for batch in batches:
                    x = batch.clone().requires_grad_()
                    model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()

        return run

    per_pass = max(1, 512 // seq)  # as train_many groups people
    joined = [torch.cat(embeddings[i : i + per_pass]) for i in range(0, PEOPLE, per_pass)]
    systems = {"together": together, "apart": apart, "b together": backbone(joined), "b apart": backbone(embeddings)}
    seconds = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, run in systems.items():
            seconds[name].append(step_seconds(run))
    ratio = {
        pre: statistics.median(a / b for a, b in zip(seconds[f"{pre}apart"], seconds[f"{pre}together"], strict=True))
        for pre in ("", "b ")
    }
    row = {
        "section": "people", "case": f"{PEOPLE} people", "tokens": seq, "ratio": round(ratio[""], 2),
        "backbone": round(ratio["b "], 2), "together_ms": round(1e3 * statistics.median(seconds["together"]), 1),
        "apart_ms": round(1e3 * statistics.median(seconds["apart"]), 1),
    }  # fmt: skip
    print(row, flush=True)
    return [row]


def main() -> None:
    torch.set_num_threads(1)
    model = load_backbone("plpkg-small")[0].requires_grad_(False)
    record.write("serving.people", [row for seq in LENGTHS for row in rows_of(model, seq)])


if __name__ == "__main__":
    main()
