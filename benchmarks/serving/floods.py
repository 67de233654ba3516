"""What one account's clients do to another's: plpkg-small by ``plpkg serve``, with keys.

One client of an account asks for twelve tokens, again and again, alone (``quiet``) and beside three clients of another
account, in a process of their own, that send the same body as fast as it is answered. Quiet and flood take turns, each
for at least 40 requests and ten seconds; wall time on two cores that all share.

* ``ratio``: the flood's 99th percentile over that of all quiet requests of the run. ``answered``: the statuses of the
  flood's bodies.
* The bodies are full of one thing, and as large as the service takes (1 MiB), but for ``fewer messages`` (32 KiB) and
  ``small`` (4 KiB). Those of ``work`` are legal, 64 prompts of 60 tokens each: they take places in the batch.

Run as ``python -m benchmarks.serving.floods``: about eight minutes.
"""

import collections
import http.client
import json
import math
import multiprocessing
import sys
import threading
import time
from urllib.parse import urlsplit

from benchmarks import record
from benchmarks.serving.processes import serving
from plpkg.serving.service.http.door import MAX_BODY_BYTES

CLIENTS, REQUESTS, SECONDS, NEW = 3, 40, 10, 12
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def filled(head: str, item: str, tail: str, num_bytes: int = MAX_BODY_BYTES) -> bytes:
    """A body with one item as often as there is room."""
    count = (num_bytes - len(head) - len(tail) - 2) // (len(item) + 1)
    return f"{head}{','.join([item] * count)}{tail}".encode()


BASE, MESSAGE = '{"model": "plpkg-small", ', '{"role":"user","content":""}'
FLOODS = {
    "messages": (CHAT, filled(BASE + '"messages": [', MESSAGE, "]}")),
    "parts": (CHAT, filled(BASE + '"messages": [{"role":"user","content":[', '{"type":"text","text":""}', "]}]}")),
    "prompts": (COMPLETIONS, filled(BASE + '"prompt": [', '""', "]}")),
    "ids": (COMPLETIONS, filled(BASE + '"prompt": [', "1", "]}")),
    "lists": (COMPLETIONS, filled(BASE + '"prompt": [', "[]", "]}")),
    "stop strings": (COMPLETIONS, filled(BASE + '"prompt": "a", "stop": [', '"\\""', "]}")),
    "tools": (CHAT, filled(BASE + '"messages": [], "tools": [', "{}", "]}")),
    "fewer messages": (CHAT, filled(BASE + '"messages": [', MESSAGE, "]}", 2**15)),
    "small": (COMPLETIONS, filled(BASE + '"prompt": [', "[]", "]}", 2**12)),
    "one text": (COMPLETIONS, filled(BASE + '"prompt": "', "a", '"}')),
    "work": (COMPLETIONS, json.dumps(dict(model="plpkg-small", prompt=["a"] * 64, max_tokens=60)).encode()),
}


def asked(connection, key: str, path: str, body: bytes) -> int:
    """Send a body, and read the answer; its status."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def flood(port: int, name: str, begun, stop, statuses) -> None:
    """The hostile process: three clients, until it is told to stop."""
    counts = collections.Counter()

    def client() -> None:
        while not stop.is_set():
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                while not stop.is_set():
                    begun.set()
                    counts[asked(connection, "hostile-" * 3, *FLOODS[name])] += 1
            except (OSError, http.client.HTTPException):
                counts["broken off"] += 1

    for thread in [threading.Thread(target=client, daemon=True) for _ in range(CLIENTS)]:
        thread.start()
    stop.wait()
    statuses.put(dict(counts))


def times(port: int) -> list[float]:
    """What the good client waits for each of its answers."""
    body, seconds = json.dumps(dict(model="plpkg-small", prompt="def", max_tokens=NEW, temperature=0)).encode(), []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    end = time.perf_counter() + SECONDS
    while len(seconds) < REQUESTS or time.perf_counter() < end:
        began = time.perf_counter()
        assert asked(connection, "good-" * 4, COMPLETIONS, body) == 200
        seconds.append(time.perf_counter() - began)
    return seconds


def percentile(seconds: list[float], share: float) -> float:
    return round(sorted(seconds)[math.ceil(share * len(seconds)) - 1], 3)


def beside(name: str, port: int) -> tuple[list[float], dict]:
    """The good client's times beside a flood, and what the flood was answered."""
    spawn = multiprocessing.get_context("spawn")
    begun, stop, statuses = spawn.Event(), spawn.Event(), spawn.Queue()
    process = spawn.Process(target=flood, args=(port, name, begun, stop, statuses))
    process.start()
    assert begun.wait(120)
    seconds = times(port)
    stop.set()
    answered = statuses.get(timeout=300)
    process.terminate()
    process.join()
    return seconds, answered


def rows_of(port: int, names) -> list[dict]:
    times(port)  # the first ones are slower
    quiet, measured = [], []
    for name in names:
        quiet += times(port)
        measured.append((name, *beside(name, port)))
        print(name, measured[-1][2], flush=True)
    p99 = percentile(quiet, 0.99)
    rows = [
        {
            "case": "quiet",
            "requests": len(quiet),
            "p50_s": percentile(quiet, 0.5),
            "p99_s": p99,
            "ratio": 1.0,
            "answered": "",
        }
    ]
    for name, seconds, answered in measured:
        row = {
            "case": name,
            "requests": len(seconds),
            "p50_s": percentile(seconds, 0.5),
            "p99_s": percentile(seconds, 0.99),
        }
        said = ", ".join(f"{count} of {status}" for status, count in answered.items())
        rows.append(row | {"ratio": round(row["p99_s"] / p99, 2), "answered": said})
    return [{"section": "floods"} | row for row in rows]


def main() -> None:
    with serving(keys={"good": "good-" * 4, "hostile": "hostile-" * 3}) as (_, address):
        rows = rows_of(urlsplit(address).port, sys.argv[1:] or FLOODS)
    record.write("serving.floods", rows)


if __name__ == "__main__":
    main()
