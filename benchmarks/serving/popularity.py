"""Sixteen requests for adapters of rank 16 on all projections, by how popular the adapters are.

Llama's architecture, 12 layers of 576, random weights, greedy: ``NEW`` tokens after prompts of ``PROMPT``. In one
thread, CPU time; the systems take turns within a round, ratios are medians over the rounds.

* ``popularity``: the engine, the same engine without adapters, PEFT's own mixed batch (``adapter_names=``), PEFT
  switching with a batch for each adapter in turn, merging and unmerging each in turn. ``same`` says which share of
  the tokens is PEFT's.
* ``mixed``: the engine beside PEFT's mixed batch on plpkg-small, rank 8, by the number of requests and of adapters, on
  PEFT's own choice of projections for Llama and on all; ``ratio`` is PEFT's time over the engine's. All prompts are
  as long, which a batch of PEFT's needs or pads.

Run alone, as ``python -m benchmarks.serving.popularity``: about six minutes, and three.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load

from benchmarks import record
from benchmarks.serving.adapters import random_adapter
from plpkg.backbones import load_backbone, random_backbone
from plpkg.serving import Adapter, Engine, Request, merge, popularity, unmerge

REQUESTS, PROMPT, NEW, RANK, ROUNDS = 16, 8, 16, 16, 7
SHAPE = dict(num_layers=12, hidden=576, num_heads=9, num_kv_heads=3, intermediate=1536, vocab=8192)


MIXED = [(1, 1), (4, 1), (4, 4), (16, 1), (16, 4), (16, 16), (64, 1), (64, 4), (64, 16), (64, 64)]
"""Requests and adapters of the section ``mixed``."""


def backbone():
    """The model, which writes on whatever it writes."""
    model = random_backbone("llama", **SHAPE)
    model.generation_config.eos_token_id = None
    return model


def in_peft(model, adapters: list[Adapter]):
    """The same adapters in PEFT, over a model of its own."""
    given = adapters[0].config
    config = LoraConfig(r=given["r"], lora_alpha=given["lora_alpha"], target_modules=given["target_modules"])
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
            "case": kind, "what": name, "adapters": len(set(chosen)),
            "tokens_per_s": round(REQUESTS * NEW / statistics.median(seconds[name]), 1),
            "ratio": round(statistics.median(a / b for a, b in pairs), 3),
            "same": round(statistics.mean(same), 3),
        })  # fmt: skip
    return rows


def by_popularity() -> Iterator[dict]:
    model, twin = backbone(), backbone()
    adapters = [random_adapter(model, k, RANK) for k in range(REQUESTS)]
    wrapped = in_peft(twin, adapters)
    engine = Engine(model, shared_bytes=0)
    for k, adapter in enumerate(adapters):
        engine.load(str(k), adapter)
    prompts = torch.randint(1, SHAPE["vocab"], (REQUESTS, PROMPT), generator=torch.Generator().manual_seed(0))
    for kind in popularity.POPULARITIES:
        yield from rows_of(kind, model, wrapped, engine, adapters, prompts)


def mixed(prompt: int = 32, new: int = 12, rank: int = 8) -> Iterator[dict]:
    for case, projections in (("q and v", ("q_proj", "v_proj")), ("all projections", None)):
        (model, _), (twin, _) = load_backbone("plpkg-small"), load_backbone("plpkg-small")
        model.generation_config.eos_token_id = twin.generation_config.eos_token_id = None
        adapters = [random_adapter(model, k, rank, projections) for k in range(64)]
        wrapped, engine = in_peft(twin, adapters), Engine(model, max_batch=64, shared_bytes=0)
        for k, adapter in enumerate(adapters):
            engine.load(str(k), adapter)
        prompts = torch.randint(1, 8192, (64, prompt), generator=torch.Generator().manual_seed(0))
        for requests, people in MIXED:
            ids, names = prompts[:requests], [str(k % people) for k in range(requests)]
            options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, adapter_names=names)
            systems = {
                "engine": partial(engine.generate, [Request(*pair, new) for pair in zip(ids, names, strict=True)]),
                "PEFT": partial(wrapped.generate, input_ids=ids, attention_mask=torch.ones_like(ids), **options),
            }
            with torch.inference_mode():
                seconds, answers = cpu_seconds(systems, rounds=5 * max(1, 8 // requests))
            same = [a == b for a, b in zip(answers["engine"], answers["PEFT"][:, prompt:].tolist(), strict=True)]
            pairs = zip(seconds["engine"], seconds["PEFT"], strict=True)
            yield {
                "case": case, "what": "engine, PEFT's mixed batch", "requests": requests, "adapters": people,
                "tokens_per_s": round(requests * new / statistics.median(seconds["engine"]), 1),
                "ratio": round(statistics.median(peft / ours for ours, peft in pairs), 3),
                "same": round(statistics.mean(same), 3),
            }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    record.sections("serving.popularity", {"popularity": by_popularity, "mixed": mixed}, __doc__)


if __name__ == "__main__":
    main()
