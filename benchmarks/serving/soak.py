"""Memory of ``plpkg serve`` while 200 clients come and go: until it is flat, or 300 seconds.

A real process on plpkg-small with a folder as its store and 16 random adapters, of which eight have slots. The clients,
in this process, ask one after the other for an adapter or the backbone, with a prompt that is one of ten or new; a
third of them stream, a third of those leave after the first token. One more client replaces and deletes an adapter
again and again. Kept keys and values may take 64 MiB.

* ``memory``: every five seconds what the process has resident, its threads and open files, and how many requests were
  answered, left or refused until then. Flat: the highest of a minute with 500 answers is less than 1 % above the
  minute before.

Run: ``python -m benchmarks.serving.soak``, up to six minutes; a number of seconds behind it is the most to take.
"""

import asyncio
import collections
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

from benchmarks import record
from benchmarks.serving.adapters import random_adapter
from plpkg.adapters import CONFIG, WEIGHTS
from plpkg.backbones import load_backbone

CLIENTS, ADAPTERS, SLOTS, RANK, SHARED_MIB = 200, 16, 8, 8, 64
MOST_S, EVERY_S, WINDOW_S = 300, 5, 60


def process(folder: str) -> tuple[subprocess.Popen, str]:
    """A service whose store is in the folder, and its address."""
    options = ["--store", f"{folder}/store", "--listen", "127.0.0.1:0", "--slots", SLOTS, "--shared-mib", SHARED_MIB]
    command = [sys.executable, "-c", "from plpkg.cli import app; app()", "serve", *map(str, options)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return started, re.search(r"http://\S+", started.stdout.readline())[0]


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


async def churn(address: str, adapters: list) -> None:
    """Replaces an adapter, and now and then deletes it, until it is cancelled."""
    async with httpx.AsyncClient(base_url=f"{address}/v1/accounts/local/adapters/", timeout=600) as http:
        for k in range(sys.maxsize):
            files = {part: (part, bytes(adapters[k % len(adapters)].files[part])) for part in (CONFIG, WEIGHTS)}
            (await http.post("a0", files=files)).raise_for_status()
            await asyncio.sleep(2)
            if k % 3 == 2:
                (await http.delete("a0")).raise_for_status()


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


async def measured(pid: int, address: str, adapters: list, most_s: float) -> list[dict]:
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        for k, adapter in enumerate(adapters):
            files = {part: (part, bytes(adapter.files[part])) for part in (CONFIG, WEIGHTS)}
            (await http.post(f"/v1/accounts/local/adapters/a{k}", files=files)).raise_for_status()
    counts: collections.Counter = collections.Counter()
    tasks = [asyncio.create_task(client(number, address, counts)) for number in range(CLIENTS)]
    tasks.append(asyncio.create_task(churn(address, adapters)))
    rows, began, window = [], time.monotonic(), WINDOW_S // EVERY_S
    while (now := time.monotonic() - began) < most_s:
        if failed := next((task for task in tasks if task.done()), None):
            failed.result()
        row = {"section": "memory", "second": round(now), "resident_mib": round(resident_mib(pid), 1)}
        row |= {"threads": len(os.listdir(f"/proc/{pid}/task")), "files": len(os.listdir(f"/proc/{pid}/fd"))}
        rows.append(row | {kind: counts[kind] for kind in ("answered", "left", "refused")})
        print(rows[-1], flush=True)
        before, last = rows[-2 * window : -window], rows[-window:]
        busy = last[-1]["answered"] - last[0]["answered"] >= 500
        if busy and len(before) == window and peak(last) < 1.01 * peak(before):
            break
        await asyncio.sleep(EVERY_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rows


def peak(rows: list[dict]) -> float:
    return max(row["resident_mib"] for row in rows)


def main() -> None:
    torch.set_num_threads(1)
    model, _ = load_backbone("plpkg-small")
    adapters = [random_adapter(model, seed, RANK) for seed in range(ADAPTERS)]
    with tempfile.TemporaryDirectory() as folder:
        service, address = process(folder)
        try:
            most_s = float(sys.argv[1]) if len(sys.argv) > 1 else MOST_S
            rows = asyncio.run(measured(service.pid, address, adapters, most_s))
        finally:
            service.terminate()
            service.wait()
    record.write("serving.soak", rows)


if __name__ == "__main__":
    main()
