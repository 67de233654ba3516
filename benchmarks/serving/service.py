"""The service beside the engine alone: 200 clients at once, over real sockets.

The same 200 requests, sixteen adapters of rank 16 by Punica's skewed popularity and the backbone, 32 new tokens each,
greedy; the engine in one thread, clients in a process of their own, two cores. Wall time. ``engine`` has all requests
in a list; ``stream`` and ``whole`` have them by HTTP. Rounds are interleaved, ratios medians over them; ``lost`` counts
answers that are missing, late by the client's patience, or not the engine's.

* ``sustained``: by model: plpkg-small, whose steps are short, and 12 layers of 576 of the same architecture.

Run: ``python -m benchmarks.serving.service``, about six minutes.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time

import httpx
import torch

from benchmarks import record
from benchmarks.serving.adapters import random_adapter
from plpkg.backbones import load_backbone, random_backbone
from plpkg.serving import Engine, Request, popularity
from plpkg.serving.service import Listener, Replica, Scheduler, Store, Tiers, app

CLIENTS, TENANTS, NEW, RANK, ROUNDS = 200, 16, 32, 16, 3
SHAPE = dict(num_layers=12, hidden=576, num_heads=9, num_kv_heads=3, intermediate=1536, vocab=8192)


async def asked(address: str, bodies: list[dict]) -> list[str]:
    """All at once, what each client is told."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def one(body: dict) -> str:
            if not body["stream"]:
                return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            text = ""
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            return text

        return await asyncio.gather(*map(one, bodies), return_exceptions=True)


def clients() -> None:
    """The process of the clients: bodies in, seconds and texts out, a line each."""
    for line in sys.stdin:
        address, bodies = json.loads(line)
        began = time.perf_counter()
        texts = asyncio.run(asked(address, bodies))
        print(json.dumps([time.perf_counter() - began, [str(text) for text in texts]]), flush=True)


def rows_of(name: str, model, tokenizer) -> list[dict]:
    model.generation_config.eos_token_id = None  # it writes on whatever it writes
    adapters = [random_adapter(model, seed, RANK) for seed in range(TENANTS)]
    chosen = [None if k == TENANTS - 1 else k for k in popularity.adapters("skewed", CLIENTS, TENANTS)]
    prompts = [f"def function_{k % 50}(x):\n" for k in range(CLIENTS)]
    store = Store("memory:///", max_versions=TENANTS)
    alone = Engine(model, tokenizer)
    for k, adapter in enumerate(adapters):
        asyncio.run(store.put("local", f"a{k}", alone.load(f"a{k}", adapter)))
    replica = Replica(Engine(model, tokenizer), Tiers(store, model), Scheduler(slots=TENANTS))
    listener = Listener(app(replica, store, model, tokenizer, name=name))
    process = subprocess.Popen(
        [sys.executable, "-c", "from benchmarks.serving.service import clients; clients()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip

    def engine() -> tuple[float, list[str]]:
        began = time.perf_counter()
        named = [None if k is None else f"a{k}" for k in chosen]
        ids = tokenizer(prompts)["input_ids"]
        made = [Request(i, adapter=a, max_new_tokens=NEW) for i, a in zip(ids, named, strict=True)]
        texts = tokenizer.batch_decode(alone.generate(made), skip_special_tokens=True)
        return time.perf_counter() - began, [text.rstrip("\ufffd") for text in texts]  # an unfinished character

    def by_http(stream: bool) -> tuple[float, list[str]]:
        names = [name if k is None else f"a{k}" for k in chosen]
        bodies = [
            dict(model=m, prompt=p, max_tokens=NEW, temperature=0, stream=stream)
            for m, p in zip(names, prompts, strict=True)
        ]
        process.stdin.write(json.dumps([listener.address, bodies]) + "\n")
        seconds, texts = json.loads(process.stdout.readline())
        return seconds, texts

    systems = {"engine": engine, "stream": lambda: by_http(True), "whole": lambda: by_http(False)}
    seconds, lost, answers = {each: [] for each in systems}, dict.fromkeys(systems, 0), {}
    for number in range(ROUNDS + 1):
        for system, run in systems.items():
            took, answers[system] = run()
            lost[system] += sum(a != b for a, b in zip(answers[system], answers["engine"], strict=True))
            if number:
                seconds[system].append(took)
    process.stdin.close()
    process.wait()
    listener.close()
    rows = []
    for system, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["engine"], times, strict=True))
        speed = CLIENTS * NEW / statistics.median(times)
        row = {"section": "sustained", "case": name, "what": system, "tokens_per_s": round(speed, 1)}
        rows.append(row | {"ratio": round(ratio, 3), "clients": CLIENTS, "lost": lost[system]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_backbone("plpkg-small")
    rows = rows_of("12 x 576", random_backbone("llama", **SHAPE), tokenizer)
    record.write("serving.service", rows + rows_of("plpkg-small", model, tokenizer))


if __name__ == "__main__":
    main()
