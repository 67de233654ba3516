"""Hundreds of requests of all kinds over HTTP, many of which go before their end: all is given back."""

import collections
import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.store import Store

from served import served
from waiting import wait_until


def test_hundreds_of_clients_that_come_and_go(base, tiny, tmp_path, asked):
    """Over HTTP: streams that are left, answers that nobody waits for, adapters replaced and deleted meanwhile."""
    (model, adapters), statuses = tiny, collections.Counter()
    scheduler = Scheduler(slots=2, places=4, max_queued=16)
    with served(model, base[1], Store(tmp_path), scheduler=scheduler) as service, ThreadPoolExecutor(6) as pool:
        for name, adapter in adapters.items():
            assert service.upload(name, adapter).status_code == 201

        def one(seed):
            rng = random.Random(seed)
            body = dict(model=rng.choice(["base", "absent", *adapters]), max_tokens=rng.choice((1, 5, 40, 90)))
            body |= dict(stream=rng.random() < 0.5, stop=rng.choice(("e", None)))
            body |= dict(prompt=rng.choice(["a", ["a", "b c"], [[1], [2]]]))
            match rng.randrange(8):
                case 0:
                    return service.upload(rng.choice([*adapters]), adapters[rng.choice([*adapters])]).status_code
                case 1:
                    return service.client.delete(f"/v1/accounts/local/adapters/{rng.choice([*adapters])}").status_code
                case 2 | 3:
                    with asked(service, **body) as connection, contextlib.suppress(BlockingIOError, TimeoutError):
                        connection.settimeout(rng.choice((0, 0.001, 0.02)))
                        connection.recv(1)
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
