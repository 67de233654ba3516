"""Adapters that nobody has loaded yet, from a store that is far away, while six requests write.

plpkg-small and the writers' adapters in one process, one thread; the store is an S3 server in another, behind a relay
with a round trip of 250 ms. Three adapters are asked for in turn while six others are in use. Wall time: the question
is who waits for whom. Rounds of three systems are interleaved: ``warm`` (the three are in memory), ``asynchronous``
(the service as it is), ``blocking`` (no step begins while an adapter is on its way).

* ``gaps``: milliseconds between the tokens of the six, from the first of the three requests to the end of the last;
  ``ratio`` is of the 99th percentile to that of ``warm``, the median of the rounds. ``first_s`` is the median time to
  the first token of the three.
* ``slot``: milliseconds to copy an adapter from host memory into a slot, beside a step of the six.
* ``timeline``: when one of the six, and the three, had their tokens in the first round.
* ``sizes``: milliseconds between the tokens of the six for two seconds, in which no newcomer comes, or one whose
  adapter of so many MB lies in a folder of this machine. ``longest_ms`` is the longest of a round, the median of the
  rounds; ``least_ms`` and ``most_ms`` are of the rounds.

Run: ``python -m benchmarks.serving.cold``, about two minutes, and with ``sizes`` that section, as long.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import httpx
import numpy as np
import pandas as pd
import torch
from peft import LoraConfig

from benchmarks import record
from benchmarks.serving.relay import Relay
from plpkg.adapters import validate_adapter
from plpkg.backbones import load_backbone
from plpkg.catalog import Link, data_path
from plpkg.serving import Engine, Request, train_many
from plpkg.serving.service import Replica, Scheduler, Store, Tiers
from plpkg.serving.slots import Pool

ROUNDS, TRIP_S, TOKENS, COLD_TOKENS, EVERY_S = 7, 0.25, 400, 60, 0.6
SYSTEMS = ("warm", "asynchronous", "blocking")
RANKS, WINDOW_S = {"7 MB": 64, "80 MB": 720}, 2.0


def bucket() -> tuple[subprocess.Popen, str]:
    """An S3 server in a process of its own with a bucket, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            httpx.put(f"http://127.0.0.1:{port}/bucket").raise_for_status()
            return server, f"127.0.0.1:{port}"
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError("the S3 server did not answer within 20 s")


def store_at(address: str) -> Store:
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    return Store("s3://bucket/adapters")


async def served(
    model, tokenizer, store: Store, paths: list[str], system: str, new: int = COLD_TOKENS, every_s: float = EVERY_S
) -> dict:
    """Token times, in seconds from the first cold request, of the six and of those whose adapters come after theirs."""
    tiers = Tiers(store, model)
    replica = Replica(Engine(model, tokenizer), tiers, Scheduler())
    if system == "blocking":
        step = replica.engine.step

        def after_downloads():
            while tiers._flights:
                time.sleep(1e-3)
            return step()

        replica.engine.step = after_downloads
    ids = tokenizer("import numpy as np\n\ndef ")["input_ids"]
    times: dict[str, list[float]] = {}

    async def read(name: str, path: str, tokens: int) -> None:
        times[name] = [time.perf_counter()]
        request = Request(ids, max_new_tokens=tokens, temperature=1.0, seed=0)
        async for _ in replica.stream(path, request):
            times[name].append(time.perf_counter())

    known = paths if system == "warm" else paths[:6]
    await asyncio.gather(*(read("", path, 2) for path in known))
    running = [asyncio.create_task(read(f"running {k}", path, TOKENS)) for k, path in enumerate(paths[:6])]
    await asyncio.sleep(0.5)
    began, cold = time.perf_counter(), []
    for k, path in enumerate(paths[6:]):
        cold.append(asyncio.create_task(read(f"cold {k}", path, new)))
        await asyncio.sleep(every_s)
    await asyncio.gather(*running, *cold)
    await replica.close()
    return {name: np.array(each) - began for name, each in times.items() if name}


def sizes(model, tokenizer, adapters: dict) -> list[dict]:
    ids, rows = tokenizer("Returns the", return_tensors="pt")["input_ids"], []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        paths = [f"all/{name}/{asyncio.run(store.put('all', name, each))}" for name, each in adapters.items()]
        cases = {"none": None, "0.17 MB": paths[6]}
        for case, rank in RANKS.items():
            config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
            large = train_many(model, config, {"large": ids}, steps=1, lr=1e-3, progress=False)["large"]
            cases[case] = f"all/large/{asyncio.run(store.put('all', 'large', large))}"
        gaps, firsts = ({case: [] for case in cases} for _ in range(2))
        for case in [*cases] * ROUNDS:
            newcomer = [cases[case]] if cases[case] else []
            all_times = asyncio.run(served(model, tokenizer, store, paths[:6] + newcomer, case, 1, WINDOW_S))
            firsts[case] += [times[1] - times[0] for name, times in all_times.items() if name.startswith("cold")]
            kept = [times[(times >= 0) & (times <= WINDOW_S)] for times in all_times.values()]
            gaps[case].append(1e3 * np.concatenate([np.diff(times) for times in kept if len(times) > 2]))
            print(case, gaps[case][-1].max().round(1), firsts[case][-1:], flush=True)
    for case, rounds in gaps.items():
        longest = [each.max() for each in rounds]
        values = {f"p{q}_ms": statistics.median(np.percentile(each, q) for each in rounds) for q in (50, 99)}
        values |= dict(longest_ms=statistics.median(longest), least_ms=min(longest), most_ms=max(longest))
        values |= dict(first_s=statistics.median(firsts[case])) if firsts[case] else {}
        rows.append({"section": "sizes", "case": case} | {name: round(float(each), 3) for name, each in values.items()})
    return rows


def delays(model, tokenizer, adapters: dict) -> list[dict]:
    server, address = bucket()
    gaps, firsts, rows = {system: [] for system in SYSTEMS}, {system: [] for system in SYSTEMS}, []
    try:
        near = store_at(address)
        paths = [f"all/{name}/{asyncio.run(near.put('all', name, each))}" for name, each in adapters.items()]
        with Relay(address, Link("store", 1e9, 1e9, TRIP_S)) as relay:
            for number in range(ROUNDS):
                for system in SYSTEMS:
                    times = asyncio.run(served(model, tokenizer, store_at(relay.address), paths, system))
                    end = max(each[-1] for name, each in times.items() if name.startswith("cold"))
                    kept = [
                        each[(each >= 0) & (each <= end)] for name, each in times.items() if name.startswith("running")
                    ]
                    gaps[system].append(1e3 * np.concatenate([np.diff(each) for each in kept]))
                    firsts[system] += [each[1] - each[0] for name, each in times.items() if name.startswith("cold")]
                    print(number, system, np.percentile(gaps[system][-1], [50, 99]).round(1), flush=True)
                    for name in ["running 0", "cold 0", "cold 1", "cold 2"] if not number else []:
                        shown = times[name][(times[name] >= -0.3) & (times[name] <= end)]
                        row = {"section": "timeline", "case": "250 ms", "what": system, "request": name}
                        rows += [row | {"token_s": round(float(moment), 4)} for moment in shown]
    finally:
        server.kill()
    for system in SYSTEMS:
        p50, p99 = ([float(np.percentile(each, q)) for each in gaps[system]] for q in (50, 99))
        ratios = [mine / np.percentile(warm, 99) for mine, warm in zip(p99, gaps["warm"], strict=True)]
        medians = dict(p50_ms=p50, p99_ms=p99, ratio=ratios, first_s=firsts[system])
        medians = {name: round(float(statistics.median(values)), 3) for name, values in medians.items()}
        rows.append({"section": "gaps", "case": system} | medians)
    pool, times = Pool(model), []
    for adapter in adapters.values():
        began = time.perf_counter()
        pool.lease(adapter)
        times.append(1e3 * (time.perf_counter() - began))
    rows.append({"section": "slot", "case": "copy", "p50_ms": round(statistics.median(times), 2)})
    return rows


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_backbone("plpkg-small")
    adapters = {path.name: validate_adapter(path, model) for path in sorted(data_path("serving").glob("*/"))}
    before, only_sizes = pd.read_csv(record.DATA / "serving_cold.csv"), sys.argv[1:] == ["sizes"]
    rows = (sizes if only_sizes else delays)(model, tokenizer, adapters)
    record.write("serving.cold", rows, keep=before[(before["section"] == "sizes") != only_sizes])


if __name__ == "__main__":
    main()
