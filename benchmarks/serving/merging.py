"""Merging an adapter into the weights: what a thousand swaps do to them, and when it pays.

plpkg-small and random adapters of rank 8 on all projections, in one thread.

* ``drift``: the relative distance of the weights (Frobenius, all adapted modules) from what they were, after swaps
  that each merge and unmerge one of four adapters in turn; and how many of a float32 model's greedy next tokens on
  64 random texts differ.
* ``when``: one request's CPU time by the tokens it writes, merged (with merging and unmerging) relative to the engine.

Run: ``python -m benchmarks.serving.merging``, three minutes.
"""

import copy
import statistics
import time

import torch

from benchmarks import record
from benchmarks.serving.adapters import random_adapter
from plpkg.backbones import load_backbone
from plpkg.serving import Engine, Request, merge, targets, unmerge

RANK, SWAPS, ROUNDS = 8, (1, 10, 100, 1000), 7


@torch.no_grad()
def drift(dtype: torch.dtype) -> list[dict]:
    model = load_backbone("plpkg-small", dtype=dtype)[0]
    adapters, before = [random_adapter(model, k, RANK) for k in range(4)], copy.deepcopy(model)
    ids = torch.randint(8192, (64, 32), generator=torch.Generator().manual_seed(0))
    chosen = before.float()(input_ids=ids).logits[:, -1].argmax(-1)
    weights = [(before.get_submodule(name).weight, model.get_submodule(name).weight) for name in targets(model)]
    rows = []
    for swap in range(1, max(SWAPS) + 1):
        merge(model, adapters[swap % 4])
        unmerge(model, adapters[swap % 4])
        if swap in SWAPS:
            squares = [((a - b.float()).square().sum(), a.square().sum()) for a, b in weights]
            distance = (sum(moved for moved, _ in squares) / sum(all_ for _, all_ in squares)) ** 0.5
            other = copy.deepcopy(model).float()(input_ids=ids).logits[:, -1].argmax(-1)
            name = str(dtype).removeprefix("torch.")
            rows.append({
                "section": "drift", "case": name, "swaps": swap, "drift": float(f"{distance:.2e}"),
                "changed": round((other != chosen).float().mean().item(), 3),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def when() -> list[dict]:
    model = load_backbone("plpkg-small")[0]
    model.generation_config.eos_token_id = None
    adapter, engine = random_adapter(model, 0, RANK), Engine(model, shared_bytes=0)
    engine.load("a", adapter)
    ids = torch.randint(1, 8192, (16,), generator=torch.Generator().manual_seed(0))
    rows = []
    for new in (1, 2, 4, 8, 16, 32, 64, 128):

        def served(name, new=new):
            return engine.generate([Request(ids, adapter=name, max_new_tokens=new)])

        def merged(new=new):
            merge(model, adapter)
            answer = served(None, new)
            unmerge(model, adapter)
            return answer

        seconds = {"merged": [], "served": []}
        for _ in range(ROUNDS):
            for name, run in (("merged", merged), ("served", lambda: served("a"))):
                began = time.process_time()
                run()
                seconds[name].append(time.process_time() - began)
        ratio = statistics.median(a / b for a, b in zip(seconds["merged"], seconds["served"], strict=True))
        rows.append({
            "section": "when", "case": "one request alone", "tokens": new, "ratio": round(ratio, 3),
            "served_ms": round(1e3 * statistics.median(seconds["served"]), 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    record.write("serving.merging", [*drift(torch.bfloat16), *drift(torch.float16), *drift(torch.float32), *when()])


if __name__ == "__main__":
    main()
