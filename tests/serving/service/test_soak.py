"""Two thousand requests of all kinds, many of which go before their end: all is given back, and nothing grows."""

import asyncio
import collections
import contextlib
import gc
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from plpkg.adapters import Adapter
from plpkg.backbones import random_backbone
from plpkg.serving.attention import KeyValues
from plpkg.serving.engine import Engine
from plpkg.serving.prefixes import Prefixes
from plpkg.serving.requests import Request, Running
from plpkg.serving.service.replica import Replica, _Job
from plpkg.serving.service.scheduler import OverloadedError, Scheduler
from plpkg.serving.service.store import NotFoundError, Store
from plpkg.serving.service.tiers import Disk, Tiers

from served import served
from waiting import wait_until

NAMES, ABSENT = [f"adapter-{n}" for n in range(6)], f"local/absent/{'0' * 64}"
KINDS = (Running, KeyValues, Adapter, _Job, asyncio.Task, torch.Tensor)


@pytest.fixture(scope="module")
def model(base):
    sizes = dict(num_layers=1, hidden=16, num_heads=2, intermediate=24, vocab=len(base[1]), max_positions=64)
    return random_backbone("llama", **sizes)


@pytest.fixture(scope="module")
def adapters(model, tools):
    return {name: tools.adapted(model, 1 + n % 3, seed=n)[1] for n, name in enumerate(NAMES)}


def alive():
    """How many objects of each kind there are."""
    gc.collect()
    counts = collections.Counter(type(each) for each in gc.get_objects())
    return {kind.__name__: sum(n for each, n in counts.items() if issubclass(each, kind)) for kind in KINDS}


def test_two_thousand_requests_leave_nothing_behind(base, model, adapters, tmp_path):
    """More adapters than slots and than host memory holds; whether any is still alive is counted object by object.

    Each 500 requests are the same ones, so that what is alive after them must be the same.
    """
    size = max(adapter.num_bytes for adapter in adapters.values())
    outcomes = collections.Counter()

    async def one(replica, paths, rng):
        path = rng.choice([None, *paths, *paths, ABSENT])
        ids = [rng.randrange(8000) for _ in range(rng.choice((1, 5, 40, 70)))]  # the last are too many
        if rng.random() < 0.5:
            ids = [*range(20), *ids][:66]  # begins as others do
        options = dict(temperature=rng.choice((0, 1.0)), seed=rng.choice((None, 3)), stop=rng.choice(((), ("e",))))
        request = Request(ids, max_new_tokens=rng.choice((1, 4, 8)), account=rng.choice("ab"), **options)
        most, patience_s = rng.choice((1, 99, 99)), rng.choice((0.0, 0.002, 0.05, 60, 60, 60))
        try:
            async with asyncio.timeout(patience_s):  # cancelled wherever it is
                async with contextlib.aclosing(replica.stream(path, request)) as tokens:
                    async for _, reason in tokens:
                        most -= 1
                        if reason or not most:
                            outcomes[reason or "left"] += 1
                            return
        except (TimeoutError, OverloadedError, NotFoundError, ValueError) as error:
            outcomes[type(error).__name__] += 1

    async def soak():
        store = Store(tmp_path / "store")
        tiers = Tiers(store, model, host_bytes=4 * size, disk=Disk(tmp_path / "disk", 3 * size), failed_s=0.01)
        scheduler = Scheduler(slots=3, places=6, positions=256, max_queued=24)
        replica = Replica(
            Engine(model, base[1], max_batch=6, max_step_tokens=48, shared_positions=256), tiers, scheduler
        )
        counts = []
        for _ in range(4):
            rng, waiting = random.Random(0), set()
            paths = [f"local/{name}/{await store.put('local', name, adapter)}" for name, adapter in adapters.items()]
            for n in range(500):
                waiting.add(asyncio.create_task(one(replica, paths, rng)))
                if n % 100 == 50:
                    await replica.drop(f"local/{rng.choice(NAMES)}")
                if len(waiting) >= 28:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
            await asyncio.gather(*waiting)
            for name in NAMES:  # what is kept for later goes as well, so that the counts are exact
                await replica.drop(f"local/{name}")
            _ = [token async for token in replica.stream(None, Request([1], max_new_tokens=1))]  # who has left is gone
            while scheduler.running or replica._leaving or replica._unloading:
                await asyncio.sleep(0.001)
            assert not scheduler.queued
            assert not replica._jobs
            assert not tiers.leases
            assert not tiers.host
            assert not tiers._flights
            assert not scheduler.slots
            assert not replica.engine.adapters
            assert not replica.engine._running
            assert not replica.engine._waiting
            replica.engine._prefixes = Prefixes(256)
            tiers._failed.clear()  # the errors that it remembers have tracebacks
            done = waiting = None
            counts.append(alive())
        await replica.close()
        assert {asyncio.current_task()} == asyncio.all_tasks()
        return counts

    first, *later = asyncio.run(soak())
    assert later[-1] == first, later
    assert sum(outcomes.values()) == 2000
    assert all(outcomes[kind] > 20 for kind in ("length", "left", "TimeoutError", "NotFoundError", "ValueError")), (
        outcomes
    )
    assert outcomes["length"] + outcomes["stop"] > 100
    assert first["Running"] == first["_Job"] == 0


def test_hundreds_of_clients_that_come_and_go(base, model, adapters, tmp_path):
    """Over HTTP: streams that are left, answers that nobody waits for, adapters replaced and deleted meanwhile."""
    statuses = collections.Counter()
    scheduler = Scheduler(slots=2, places=4, max_queued=16)
    with served(model, base[1], Store(tmp_path), scheduler=scheduler) as service, ThreadPoolExecutor(6) as pool:
        for name, adapter in adapters.items():
            assert service.upload(name, adapter).status_code == 201

        def one(seed):
            rng = random.Random(seed)
            body = dict(
                model=rng.choice(["base", "absent", *NAMES]), prompt=rng.choice(["a", ["a", "b c"], [[1], [2]]])
            )
            body |= dict(max_tokens=rng.choice((1, 5, 40, 90)), stream=rng.random() < 0.5, stop=rng.choice(("e", None)))
            match rng.randrange(8):
                case 0:
                    return service.upload(rng.choice(NAMES), adapters[rng.choice(NAMES)]).status_code
                case 1:
                    return service.client.delete(f"/v1/accounts/local/adapters/{rng.choice(NAMES)}").status_code
                case 2 | 3:
                    _leave(service, body, rng.choice((0, 0.001, 0.02)))
                    return "left"
                case 4:
                    with service.client.stream("POST", "/v1/completions", json=body | dict(stream=True)) as response:
                        next(response.iter_lines())
                    return "left"
                case _:
                    return service.client.post("/v1/completions", json=body).status_code

        statuses.update(pool.map(one, range(300)))
        wait_until(lambda: service.inside == (0, 0, 0))
        assert not service.replica._jobs
        assert not service.replica.tiers._flights
        assert service.complete("base").status_code == 200
    assert {*statuses} <= {"left", 200, 201, 400, 404, 429}, statuses
    assert all(statuses[kind] > 5 for kind in ("left", 200, 201, 400, 404)), statuses


def _leave(service, body, after_s):
    """Ask, and go."""
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(service.url).port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        connection.settimeout(after_s or None)
        if after_s:
            with contextlib.suppress(TimeoutError):
                connection.recv(1)
