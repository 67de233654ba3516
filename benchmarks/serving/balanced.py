"""Two processes of ``plpkg serve`` behind HAProxy beside ``plpkg serve --replicas 2``, which Ray Serve runs.

plpkg-small with thirty random adapters of rank 8 in a folder that all processes share. Sixteen clients in this process
ask for 24 tokens, again and again, each time of the next adapter. All share two cores, and each model has one thread.

* ``cases``: seconds from the start until a request is answered; MiB that all processes have together, shared pages
  divided among them (PSS), after the requests; tokens a second, and seconds for an answer. Medians of three rounds.
* ``killed``: one process that has a model is killed (SIGKILL) while the clients ask: how many requests were refused or
  cut off, and after how many seconds there are two models again. Nobody starts HAProxy's servers again here; systemd or
  Kubernetes would.

"by adapter": HAProxy reads ``model`` from the body and keeps an adapter's requests at one process, as Ray does; "in
turn" is its ``roundrobin``. Debian's ``haproxy`` 2.6.

Run: ``python -m benchmarks.serving.balanced``, about twelve minutes.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks import record
from benchmarks.serving.floods import percentile
from benchmarks.serving.processes import serving
from benchmarks.serving.soak import ADAPTERS, adapters, files_of, prompt

CLIENTS, NEW, SECONDS, ROUNDS = 16, 24, 30, 3
NAMES = [f"a{k}" for k in range(ADAPTERS)]
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  timeout http-request 10s
frontend clients
  bind 127.0.0.1:{port}
  option http-buffer-request
  http-request set-header X-Adapter %[req.body,json_query('$.model')]
  default_backend services
backend services
  balance {balance}
  hash-type consistent
  option httpchk GET /health
  option redispatch
  retry-on conn-failure
{servers}
"""


@dataclass
class Running:
    address: str
    processes: list[int]
    """All that were started; their children count as well."""


@contextlib.contextmanager
def one(store: str) -> Iterator[Running]:
    with serving("--store", store) as (pid, address):
        yield Running(address, [pid])


@contextlib.contextmanager
def ray(store: str) -> Iterator[Running]:
    with serving("--store", store, "--replicas", "2") as (pid, address):
        yield Running(address, [pid])


@contextlib.contextmanager
def behind_haproxy(balance: str, store: str) -> Iterator[Running]:
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(serving("--store", store)) for _ in range(2)]
        port = free_port()
        servers = "\n".join(
            f"  server s{k} {address.removeprefix('http://')} check inter 1s" for k, (_, address) in enumerate(started)
        )
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder, "haproxy.cfg")
        file.write_text(HAPROXY.format(port=port, balance=balance, servers=servers))
        proxy = stack.enter_context(subprocess.Popen(["haproxy", "-db", "-f", str(file)], stderr=subprocess.DEVNULL))
        stack.callback(proxy.terminate)
        yield Running(f"http://127.0.0.1:{port}", [proxy.pid, *(pid for pid, _ in started)])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


CASES = {
    "one process": one,
    "two behind HAProxy, in turn": lambda store: behind_haproxy("roundrobin", store),
    "two behind HAProxy, by adapter": lambda store: behind_haproxy("hdr(X-Adapter)", store),
    "--replicas 2 (Ray)": ray,
}


def answered(address: str) -> bool:
    body = dict(model="plpkg-small", prompt="def", max_tokens=1)
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
    return False


async def ask(address: str, seconds: float) -> dict:
    """What sixteen clients see until then: tokens a second, seconds for an answer, and how many had none."""
    numbers, took, tokens, failed = itertools.count(), [], 0, 0
    end = time.monotonic() + seconds

    async def client() -> None:
        nonlocal tokens, failed
        async with httpx.AsyncClient(base_url=address, timeout=600) as http:
            while time.monotonic() < end:
                k = next(numbers)
                body = dict(model=NAMES[k % ADAPTERS], prompt=prompt(k), max_tokens=NEW)
                began = time.monotonic()
                try:
                    answer = await http.post("/v1/completions", json=body)
                    tokens += answer.raise_for_status().json()["usage"]["completion_tokens"]
                except httpx.HTTPError:
                    failed += 1
                    await asyncio.sleep(0.1)
                else:
                    took.append(time.monotonic() - began)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    speed = tokens / (time.monotonic() - began)
    row = {"tokens_per_s": round(speed, 1), "p50_s": percentile(took, 0.5), "p99_s": percentile(took, 0.99)}
    return row | {"failed": failed}


def family(processes: list[int]) -> list[int]:
    """These processes and all that they started."""
    found = list(processes)
    for pid in found:  # grows as it goes
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
    return found


def proportional_mib(processes: list[int]) -> float:
    total = 0
    for pid in family(processes):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def with_a_model(processes: list[int]) -> list[int]:
    """Those of a family that compute: Ray's replicas, or the servers behind the proxy."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(processes)}
    replicas = [pid for pid, name in names.items() if b"ServeReplica" in name]
    return replicas or [pid for pid, name in names.items() if b"serve" in name and b"haproxy" not in name]


async def killed(running: Running) -> dict:
    """Requests that fail when one of two models is killed, and when there are two again."""
    before = with_a_model(running.processes)
    load = asyncio.create_task(ask(running.address, SECONDS))
    await asyncio.sleep(SECONDS / 6)
    os.kill(before[-1], signal.SIGKILL)
    began, back = time.monotonic(), None
    while not load.done():
        await asyncio.sleep(0.2)
        alive = with_a_model(running.processes)
        if back is None and len(set(alive) - set(before[-1:])) == len(before):
            back = round(time.monotonic() - began, 1)
    seen = await load
    return {"failed": seen["failed"], "tokens_per_s": seen["tokens_per_s"], "two_again_s": back}


def main() -> None:
    rows, seen = [], {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as store:
        with one(store) as running:
            for name, adapter in zip(NAMES, adapters(), strict=True):
                url = f"{running.address}/v1/accounts/local/adapters/{name}"
                httpx.post(url, files=files_of(adapter), timeout=60).raise_for_status()
        for turn in range(ROUNDS):
            for case, start in CASES.items():
                began = time.monotonic()
                with start(store) as running:
                    while not answered(running.address):
                        time.sleep(0.1)
                    start_s = time.monotonic() - began
                    asyncio.run(ask(running.address, SECONDS / 6))  # adapters are fetched
                    row = asyncio.run(ask(running.address, SECONDS))
                    row |= {"start_s": start_s, "pss_mib": proportional_mib(running.processes)}
                    seen[case].append(row)
                    print(case, row, flush=True)
                    if turn == ROUNDS - 1 and case != "one process":
                        rows.append({"section": "killed", "case": case} | asyncio.run(killed(running)))
                        print(rows[-1], flush=True)
    for case, turns in reversed(seen.items()):
        middle = {key: round(statistics.median(row[key] for row in turns), 3) for key in turns[0]}
        rows.insert(0, {"section": "cases", "case": case} | middle)
    record.write("serving.balanced", rows)


if __name__ == "__main__":
    main()
