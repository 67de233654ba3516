"""Ten minutes of ``plpkg serve`` with thirty adapters: its memory while clients come and go, and its speed.

A real process on plpkg-small with thirty random adapters of rank 8 in its store, a temporary folder.

* ``memory``: 200 clients, in this process, ask one after the other for an adapter or the backbone, with a prompt that
  is one of ten or new; a third of them stream, a third of those leave after the first token. One more client replaces
  and deletes an adapter again and again. Every five seconds what the process has resident, its threads and open files,
  and how many requests were answered, left or refused until then; by ``shared_mib``, what kept keys and values of
  prompts that begin alike may take (1,024 by default). So what grows with it is that.
* ``speed``: tokens a second of eight clients that each ask for 24 tokens, again and again, for a minute: of thirty
  adapters, of the backbone alone; and PEFT with the same adapters in a loop, a request at a time.

Run: ``python -m benchmarks.serving.soak``, 25 minutes.
"""

import asyncio
import collections
import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache, partial
from pathlib import Path

import httpx
import torch
from peft import PeftModel

from benchmarks import record
from benchmarks.serving.adapters import random_adapter
from benchmarks.serving.processes import serving
from plpkg.adapters import CONFIG, WEIGHTS, Adapter
from plpkg.backbones import load_backbone

CLIENTS, ADAPTERS, RANK, SHARED_MIB = 200, 30, 8, (64, 1024)
SECONDS, EVERY_S = 600, 5
QUICK, NEW, SPEED_S = 8, 24, 60
"""Clients of the section ``speed``, tokens of their answers, and for how long."""


@contextlib.contextmanager
def process(shared_mib: int) -> Iterator[tuple[int, str]]:
    """A service with all adapters in its store: the number of its process, and its address."""
    with serving("--shared-mib", str(shared_mib)) as (pid, address):
        for k, adapter in enumerate(adapters()):
            httpx.post(f"{address}/v1/accounts/local/adapters/a{k}", files=files_of(adapter)).raise_for_status()
        yield pid, address


@cache
def adapters() -> list[Adapter]:
    model, _ = load_backbone("plpkg-small")
    return [random_adapter(model, seed, RANK) for seed in range(ADAPTERS)]


def files_of(adapter: Adapter) -> dict[str, tuple[str, bytes]]:
    return {part: (part, bytes(adapter.files[part])) for part in (CONFIG, WEIGHTS)}


async def client(number: int, address: str, counts: collections.Counter) -> None:
    """One who asks until it is cancelled."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        while True:
            prompt = "import os\n" * 4 + f"def function_{rng.randrange(10)}(x):\n"
            prompt = rng.choice([prompt, f"# {rng.random()}\n{prompt}"])
            name = rng.choice(["plpkg-small", *(f"a{k}" for k in range(ADAPTERS))])
            body = dict(model=name, prompt=prompt, max_tokens=rng.choice([4, 16, 32]), stream=rng.random() < 1 / 3)
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                if body["stream"] and rng.random() < 1 / 3:
                    await anext(answer.aiter_lines())
                    counts["left"] += 1
                else:
                    await answer.aread()
                    counts["answered" if answer.status_code == 200 else "refused"] += 1


async def churn(address: str) -> None:
    """Replaces an adapter, and now and then deletes it, until it is cancelled."""
    async with httpx.AsyncClient(base_url=f"{address}/v1/accounts/local/adapters/", timeout=600) as http:
        for k in range(sys.maxsize):
            (await http.post("a0", files=files_of(adapters()[k % ADAPTERS]))).raise_for_status()
            await asyncio.sleep(2)
            if k % 3 == 2:
                (await http.delete("a0")).raise_for_status()


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


async def measured(pid: int, address: str) -> AsyncIterator[dict]:
    counts: collections.Counter = collections.Counter()
    tasks = [asyncio.create_task(client(number, address, counts)) for number in range(CLIENTS)]
    tasks.append(asyncio.create_task(churn(address)))
    began = time.monotonic()
    for second in range(0, SECONDS + 1, EVERY_S):
        await asyncio.sleep(began + second - time.monotonic())
        for failed in (task for task in tasks if task.done()):
            failed.result()
        row = {"second": second, "resident_mib": round(resident_mib(pid), 1)}
        row |= {"threads": len(os.listdir(f"/proc/{pid}/task")), "files": len(os.listdir(f"/proc/{pid}/fd"))}
        yield row | {kind: counts[kind] for kind in ("answered", "left", "refused")}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def listed(rows: AsyncIterator[dict]) -> list[dict]:
    return [row async for row in rows]


def rows_of_memory(shared_mib: int) -> Iterator[dict]:
    with process(shared_mib) as running:
        for row in asyncio.run(listed(measured(*running))):
            yield {"shared_mib": shared_mib} | row


def prompt(number: int) -> str:
    return f"# {number}\ndef function_{number}(x):\n"


async def tokens_per_s(address: str, names: list[str]) -> float:
    """Of eight clients, each of which asks for its next answer when it has one."""
    numbers, end = itertools.count(), time.monotonic() + SPEED_S

    async def ask_on(http: httpx.AsyncClient) -> int:
        tokens = 0
        while time.monotonic() < end:
            k = next(numbers)
            body = dict(model=names[k % len(names)], prompt=prompt(k), max_tokens=NEW)
            answer = await http.post("/v1/completions", json=body)
            tokens += answer.json()["usage"]["completion_tokens"]
        return tokens

    began = time.monotonic()
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        tokens = sum(await asyncio.gather(*(ask_on(http) for _ in range(QUICK))))
    return tokens / (time.monotonic() - began)


def of_peft() -> float:
    """Tokens a second of a loop that sets each request's adapter and generates."""
    model, tokenizer = load_backbone("plpkg-small")
    with tempfile.TemporaryDirectory() as folder:
        for k, adapter in enumerate(adapters()):
            adapter.save(Path(folder, f"a{k}"))
        adapted = PeftModel.from_pretrained(model, Path(folder, "a0"), adapter_name="a0")
        for k in range(1, ADAPTERS):
            adapted.load_adapter(Path(folder, f"a{k}"), adapter_name=f"a{k}")
    tokens, asked, began = 0, 0, time.monotonic()
    while time.monotonic() - began < SPEED_S:
        adapted.set_adapter(f"a{asked % ADAPTERS}")
        ids = tokenizer(prompt(asked), return_tensors="pt")
        tokens += adapted.generate(**ids, max_new_tokens=NEW).shape[1] - ids["input_ids"].shape[1]
        asked += 1
    return tokens / (time.monotonic() - began)


def rows_of_speed() -> Iterator[dict]:
    torch.set_num_threads(1)
    with process(64) as (_, address):
        names = {"thirty adapters": [f"a{k}" for k in range(ADAPTERS)], "the backbone": ["plpkg-small"]}
        rounds = [{case: asyncio.run(tokens_per_s(address, each)) for case, each in names.items()} for _ in range(3)]
    speeds = {case: statistics.median(each[case] for each in rounds) for case in names}
    speeds["PEFT, one at a time"] = of_peft()
    for case, speed in speeds.items():
        yield {"case": case, "tokens_per_s": round(speed, 1), "ratio": round(speed / speeds["the backbone"], 3)}


SECTIONS = {f"memory: {mib} MiB": partial(rows_of_memory, mib) for mib in SHARED_MIB} | {"speed": rows_of_speed}

if __name__ == "__main__":
    record.sections("serving.soak", SECTIONS, __doc__)
