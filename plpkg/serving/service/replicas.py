"""The same service over several replicas: Ray Serve starts them and keeps an adapter's requests where it already is.

Each replica is a process with a model, tiers and a scheduler of its own. Requests enter through this process, which
tells Ray whose adapter each needs (Ray's model multiplexing): it goes to who has had it, else to who has the fewest,
and to another one where that replica is full.

Left out: more machines (Ray could join them, with a store that all reach), GPUs, waiting that is fair across replicas.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError

from plpkg.serving.requests import Request
from plpkg.serving.service.replica import Replica
from plpkg.serving.service.scheduler import OverloadedError


class _Process:
    """A replica in its process, as Ray calls it."""

    def __init__(self, build: Callable[[], Replica], threads: int) -> None:
        torch.set_num_threads(threads)
        self._replica = build()

    @serve.multiplexed(max_num_models_per_replica=1024)
    async def _note(self, path: str) -> str:
        """Ray counts the adapter among this replica's. It is not loaded in here, where Ray lets one in at a time."""
        return path

    async def stream(self, path: str | None, request: Request) -> AsyncIterator[tuple[int, str | None]]:
        if path:
            await self._note(path)  # pyright: ignore[reportCallIssue] (Ray's decorator has lost its type)
        async with contextlib.aclosing(self._replica.stream(path, request)) as tokens:
            async for each in tokens:
                yield each

    async def call(self, method: str, *arguments):
        return await getattr(self._replica, method)(*arguments)


class Replicas:
    """Stands where a :class:`~plpkg.serving.service.replica.Replica` does, with the same methods, for several."""

    def __init__(self, handle) -> None:
        self._handle = handle

    async def stream(self, path: str | None, request: Request) -> AsyncIterator[tuple[int, str | None]]:
        call = self._handle.options(stream=True, multiplexed_model_id=path or "").stream.remote(path, request)
        try:
            async for each in call:
                yield each
        except RayTaskError as error:
            raise error.cause from None
        except BackPressureError:
            raise OverloadedError("all replicas are full", 1) from None
        except RayError as error:
            logging.getLogger(__name__).warning("a replica's process failed: %s", error)
            raise RuntimeError("a replica's process failed") from error  # Ray's words name machines and processes
        except (GeneratorExit, asyncio.CancelledError):
            call.cancel()
            raise

    async def drop(self, prefix: str) -> None:
        await self._handle.broadcast("call", "drop", prefix).results_async()

    async def gauges(self) -> list[dict[tuple, float]]:
        replicas = await self._handle.broadcast("call", "gauges").results_async()
        return [*itertools.chain.from_iterable(replicas)]

    async def close(self) -> None:
        """End all requests with an error, where Ray still can; with :func:`replicated`'s context the processes end."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(1):
                await self._handle.broadcast("call", "close").results_async()


def _wait(replicas: int, start_s: float, say: Callable[[str], None]) -> None:
    """Until all replicas run."""
    began = time.monotonic()
    told = 0
    while True:
        (application,) = serve.status().applications.values()
        (deployment,) = application.deployments.values() or [None]
        states: Any = deployment.replica_states if deployment else {}  # an enumeration of strings has their names
        running = states.get("RUNNING", 0)
        for number in range(told + 1, running + 1):
            say(f"replica {number} of {replicas} runs")
        told = max(told, running)
        if application.status == "RUNNING":
            return
        if application.status == "DEPLOY_FAILED":
            reason = deployment.message if deployment else application.message
            raise ValueError(f"the replicas do not start: {reason.strip().splitlines()[-1]}")
        if time.monotonic() > began + start_s:
            raise ValueError(f"{running} of {replicas} replicas run after {start_s:.0f} s: {application.message}")
        time.sleep(0.2)


@contextlib.contextmanager
def replicated(
    build: Callable[[], Replica],
    replicas: int,
    *,
    ongoing: int = 64,
    start_s: float = 600,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Replicas]:
    """Replicas on this machine, which share its cores, until the context ends.

    ``build`` makes one in its process, to which it is pickled. Each has at most ``ongoing`` requests (twice the
    engine's batch leaves its scheduler a choice); 1,024 more wait for one of them. ``say`` is told how far they are.

    Raises
    ------
    ValueError
        They did not start: not within ``start_s`` seconds once Ray runs, which has no limit itself, or for a reason
        that Ray gives.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    say(f"starting Ray, and {replicas} replicas in processes of their own")
    ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=replicas, object_store_memory=2**27)
    try:
        serve.start(proxy_location="Disabled")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # or a line for each refused request
        process = serve.deployment(
            _Process, name="replica", num_replicas=replicas, max_ongoing_requests=ongoing, max_queued_requests=1024
        )
        threads = max(1, (os.cpu_count() or 1) // replicas)
        target = serve.RunTarget(process.bind(build, threads), route_prefix=None)
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        _wait(replicas, start_s, say)
        yield Replicas(handle)
    finally:
        serve.shutdown()
        ray.shutdown()
