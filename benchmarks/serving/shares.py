"""One account's long answers fill the batch of ``plpkg serve``: when another account's first token comes.

plpkg-small, 32 places. ``good`` asks for eight tokens as a stream, again and again: alone, and beside forty clients of
``hostile``, in a process of their own, each of which reads an answer of 200 tokens to a prompt of 300 words, and asks
anew. Wall time on cores that all share.

* ``first``: seconds to the first token, and between two tokens, of ``good``. ``step_s`` is the median time between two
  tokens of ``hostile`` while nobody else asks: a step of the full batch.
* ``throughput``: tokens a second of ``hostile`` alone.

Run: ``python -m benchmarks.serving.shares``, about three minutes.
"""

import http.client
import itertools
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from benchmarks import record
from benchmarks.serving.floods import percentile
from benchmarks.serving.processes import serving

CLIENTS, REQUESTS, ALONE_S = 40, 100, 30
LONG = dict(prompt="the array of " * 100, max_tokens=200)
SHORT = dict(prompt="def", max_tokens=8)


def stream(port: int, account: str, body: dict) -> Iterator[float]:
    """When each token of an answer comes, by the clock."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"Authorization": f"Bearer {account * 16}", "Content-Type": "application/json"}
    body = body | dict(model="plpkg-small", temperature=1, stream=True)
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b'data: {"id"'):
            yield time.perf_counter()
    connection.close()


def hostile(port: int, begun, stop, told) -> None:
    """A process: forty clients until it is told to stop; what is told are its tokens, and the times between them."""
    times, lock = [], threading.Lock()

    def client() -> None:
        while not stop.is_set():
            last = None
            for now in stream(port, "h", LONG):
                begun.set()
                with lock:
                    times.append((now, last))
                last = now
                if stop.is_set():
                    return

    for _ in range(CLIENTS):
        threading.Thread(target=client, daemon=True).start()
    stop.wait()
    with lock:
        told.put((len(times), statistics.median(now - last for now, last in times if last is not None)))


def beside_the_hostile(port: int, run) -> tuple:
    """What a function gives, and the hostile account's tokens a second and median time between two of them."""
    spawn = multiprocessing.get_context("spawn")
    begun, stop, told = spawn.Event(), spawn.Event(), spawn.Queue()
    process = spawn.Process(target=hostile, args=(port, begun, stop, told))
    process.start()
    assert begun.wait(300)
    began = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    stop.set()
    tokens, gap = told.get(timeout=300)
    process.kill()
    process.join()
    return result, tokens / seconds, gap


def good(port: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and between two."""
    first, between = [], []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        times = list(stream(port, "g", SHORT))
        first.append(times[0] - began)
        between += [b - a for a, b in itertools.pairwise(times)]
    return first, between


def main() -> None:
    with serving(keys={"good": "g" * 16, "hostile": "h" * 16}) as (_, address):
        port = urlsplit(address).port
        good(port)  # the first ones are slower
        alone = good(port)
        _, per_s, step = beside_the_hostile(port, lambda: time.sleep(ALONE_S))
        flooded, *_ = beside_the_hostile(port, lambda: good(port))
    rows = []
    for case, (first, between) in {"alone": alone, "beside forty long answers": flooded}.items():
        row = {"section": "first", "case": case, "requests": REQUESTS}
        row |= {"first_p50_s": percentile(first, 0.5), "first_p99_s": percentile(first, 0.99)}
        rows.append(row | {"between_p50_s": percentile(between, 0.5), "between_p99_s": percentile(between, 0.99)})
    rows[-1]["step_s"] = round(step, 3)
    rows.append({"section": "throughput", "case": "one account", "tokens_per_s": round(per_s, 1)})
    record.write("serving.shares", rows)


if __name__ == "__main__":
    main()
