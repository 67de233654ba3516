"""Sixteen requests for adapters of rank 16 on all projections, by how popular the adapters are.

Llama's architecture, 12 layers of 576, random weights, greedy: ``NEW`` tokens after prompts of ``PROMPT``. In one
thread, CPU time; the systems take turns within a round, ratios are medians over the rounds.

* ``popularity``: the engine, the same engine without adapters, PEFT's own mixed batch (``adapter_names=``), PEFT
  switching with a batch for each adapter in turn, merging and unmerging each in turn. ``same`` says which share of
  the tokens is PEFT's.

Run alone, as ``python -m benchmarks.serving.popularity``: about six minutes.
"""

import statistics
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load

from benchmarks import record
from benchmarks.serving.adapters import random_adapter
from plpkg.backbones import random_backbone
from plpkg.serving import Adapter, Engine, Request, merge, popularity, unmerge

REQUESTS, PROMPT, NEW, RANK, ROUNDS = 16, 8, 16, 16, 7
SHAPE = dict(num_layers=12, hidden=576, num_heads=9, num_kv_heads=3, intermediate=1536, vocab=8192)


def backbone():
    """The model, which writes on whatever it writes."""
    model = random_backbone("llama", **SHAPE)
    model.generation_config.eos_token_id = None
    return model


def in_peft(model, adapters: list[Adapter]):
    """The same adapters in PEFT, over a model of its own."""
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=adapters[0].config["target_modules"])
    wrapped = get_peft_model(model, config, adapter_name="0")
    for k, adapter in enumerate(adapters):
        if k:
            wrapped.add_adapter(str(k), config)
        set_peft_model_state_dict(wrapped, load(bytes(adapter.files["adapter_model.safetensors"])), adapter_name=str(k))
    return wrapped.eval()


def cpu_seconds(systems: dict[str, Callable], rounds: int = ROUNDS) -> tuple[dict[str, list[float]], dict]:
    """By system, its seconds in each round after one to warm up; and what it answered last."""
    seconds, answers = {name: [] for name in systems}, {}
    for _ in range(rounds + 1):
        for name, system in systems.items():
            began = time.process_time()
            answers[name] = system()
            seconds[name].append(time.process_time() - began)
    return {name: each[1:] for name, each in seconds.items()}, answers


def rows_of(kind: str, model, wrapped, engine: Engine, adapters: list[Adapter], prompts: torch.Tensor) -> list[dict]:
    chosen = popularity.adapters(kind, REQUESTS)
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)

    def ours(names):
        requests = zip(prompts, names, strict=True)
        return engine.generate([Request(ids, adapter=name, max_new_tokens=NEW) for ids, name in requests])

    def generate(model, ids, **more):
        written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options, **more)
        return written[:, PROMPT:].tolist()

    def for_each_adapter(begin, end, model):
        answers = [[]] * REQUESTS
        for k in sorted(set(chosen)):
            places = [i for i, c in enumerate(chosen) if c == k]
            begin(k)
            for i, answer in zip(places, generate(model, prompts[places]), strict=True):
                answers[i] = answer
            end(k)
        return answers

    systems = {
        "no adapters": lambda: ours([None] * REQUESTS),
        "one batch": lambda: ours([str(k) for k in chosen]),
        "PEFT, mixed batch": lambda: generate(wrapped, prompts, adapter_names=[str(k) for k in chosen]),
        "PEFT, switching": lambda: for_each_adapter(lambda k: wrapped.set_adapter(str(k)), lambda k: None, wrapped),
        "merging": lambda: for_each_adapter(
            lambda k: merge(model, adapters[k]), lambda k: unmerge(model, adapters[k]), model
        ),
    }
    with torch.inference_mode():
        seconds, answers = cpu_seconds(systems)
    rows = []
    for name in systems:
        pairs = zip(seconds[name], seconds["one batch"], strict=True)
        same = [a == b for a, b in zip(answers[name], answers["PEFT, mixed batch"], strict=True)]
        rows.append({
            "section": "popularity", "case": kind, "what": name, "adapters": len(set(chosen)),
            "tokens_per_s": round(REQUESTS * NEW / statistics.median(seconds[name]), 1),
            "ratio": round(statistics.median(a / b for a, b in pairs), 3),
            "same": round(statistics.mean(same), 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    model, twin = backbone(), backbone()
    adapters = [random_adapter(model, k, RANK) for k in range(REQUESTS)]
    wrapped = in_peft(twin, adapters)
    engine = Engine(model, shared_bytes=0)
    for k, adapter in enumerate(adapters):
        engine.load(str(k), adapter)
    prompts = torch.randint(1, SHAPE["vocab"], (REQUESTS, PROMPT), generator=torch.Generator().manual_seed(0))
    rows = []
    for kind in popularity.POPULARITIES:
        rows += rows_of(kind, model, wrapped, engine, adapters, prompts)
    record.write("serving.popularity", rows)


if __name__ == "__main__":
    main()
