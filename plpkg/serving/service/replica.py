"""An engine at work: one thread steps it, the event loop fetches adapters meanwhile and talks to clients.

Between two steps the scheduler decides who starts; only then is the engine touched. A request holds its adapter's lease
from its coming to its end, whichever way it ends: answered, cancelled, or failed.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from plpkg.adapters import Adapter
from plpkg.serving.engine import Engine
from plpkg.serving.requests import Request
from plpkg.serving.service.scheduler import Drop, Pause, Scheduler, State, Ticket
from plpkg.serving.service.tiers import Tiers

ENDS = ("stop", "length")


@dataclass(eq=False)
class _Job(Ticket):
    """A request in the service: a ticket, what the engine knows it by, and what its client is told."""

    request: Request = field(kw_only=True)
    weights: Adapter | None = None
    identity: int = -1  # until the engine gives it one
    events: asyncio.Queue = field(default_factory=asyncio.Queue)


class Replica:
    """Serves requests with adapters that come when they are needed.

    Parameters
    ----------
    engine
        Used by nobody else.
    tiers, scheduler
        Where adapters come from, and who runs when; its ``places`` must not be more than the engine's ``max_batch``.
    """

    def __init__(self, engine: Engine, tiers: Tiers, scheduler: Scheduler) -> None:
        if scheduler.places > engine.max_batch:
            raise ValueError(f"the scheduler has places={scheduler.places}, the engine max_batch={engine.max_batch}")
        self.engine = engine
        self.tiers = tiers
        self.scheduler = scheduler
        tiers.on_drop = self._unload
        self._jobs: dict[int, _Job] = {}  # by the engine's number
        self._leaving: list[_Job] = []  # whose clients have gone, until the step is over
        self._unloading: set[str] = set()  # paths that have left the memory, until nobody uses their slot
        self._wake = asyncio.Event()
        self._loop: asyncio.Task | None = None
        self._thread = ThreadPoolExecutor(1, "engine")

    async def stream(self, path: str | None, request: Request) -> AsyncGenerator[tuple, None]:
        """A request's tokens as they are written, the last with the reason for its end, ``"stop"`` or ``"length"``.

        What was scored follows each token and reason; the token is None where none was to be written. ``path`` is the
        adapter's version in the store, or None for the backbone alone. Who stops reading cancels it.

        Raises
        ------
        ValueError
            The engine could not serve it.
        OverloadedError, NotFoundError, StoreError, InvalidAdapterError
            As :meth:`Scheduler.submit` and :meth:`Tiers.lease`.
        RuntimeError
            It ended with an error, or the replica was closed.
        """
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
            self._loop.add_done_callback(self._ended)
        positions = len(self.engine.check(request)) + request.max_new_tokens
        if self._loop.done():
            raise RuntimeError("the service was closed")
        request = dataclasses.replace(request, adapter=path)
        job = _Job(path, positions, time.monotonic(), account=request.account, request=request)
        self.scheduler.submit(job)
        try:
            lease = self.tiers.lease(path) if path else contextlib.nullcontext()
            async with lease as job.weights:
                self.scheduler.fetched(job, time.monotonic())
                self._wake.set()
                reason = None
                while reason is None:
                    token, reason, *scored = await job.events.get()
                    if reason not in (None, *ENDS):
                        raise RuntimeError(reason)
                    yield token, reason, *scored
        finally:
            if job.begun and job.state != State.ENDED:
                self._leaving.append(job)  # the engine may be in a step
            else:
                self.scheduler.end(job, time.monotonic())
            self._wake.set()

    async def _run(self) -> None:
        """Step the engine as long as somebody runs, and hand out what it has written."""
        while True:
            self._between_steps()
            if not self._jobs:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                written = await asyncio.get_running_loop().run_in_executor(self._thread, self.engine.step)
            except Exception as error:  # of all, memory say: none of them is lost in silence
                for identity in [*self._jobs]:
                    self._end(self._jobs[identity], None, f"a step failed: {type(error).__name__}: {error}")
                continue
            last = dict(written)
            for identity, reason in [*self.engine.finished.items()]:
                self._end(self._jobs[identity], last.pop(identity, None), reason)
            for identity, token in last.items():
                self._jobs[identity].events.put_nowait((token, None, *self.engine.scored.pop(identity, ())))

    def _ended(self, loop: asyncio.Task) -> None:
        """No request waits for a loop that is no more."""
        reason = "the service was closed" if loop.cancelled() else f"the engine's loop failed: {loop.exception()}"
        for job in cast(list[_Job], [*self.scheduler.running, *self.scheduler.queued]):
            job.events.put_nowait((None, reason))
        self.tiers.close(reason)

    def _between_steps(self) -> None:
        """Let clients leave who have gone, and carry out what the scheduler decides."""
        for job in self._leaving:
            if job.state != State.ENDED:
                self._end(job, None, "cancelled")
        self._leaving.clear()
        self._unloading = {path for path in self._unloading if not self._emptied(path)}
        for decision in self.scheduler.decide(time.monotonic()):
            job = cast(_Job, decision.ticket)
            if isinstance(decision, Pause):
                self.engine.pause(job.identity)
                continue
            try:
                if isinstance(decision, Drop):
                    self.engine.drop(job.identity)
                else:
                    self._start(job, decision.evicted)
            except Exception as error:  # its own affair
                self._end(job, None, f"it could not start: {error}")

    def _start(self, job: _Job, evicted: str | None) -> None:
        if evicted:
            self._empty(evicted)
        if job.adapter and job.weights and job.adapter not in self.engine.adapters:
            self.engine.load(job.adapter, job.weights)
        if job.identity in self._jobs:
            self.engine.resume(job.identity)
        else:
            job.identity = self.engine.add(job.request)
            self._jobs[job.identity] = job

    def _end(self, job: _Job, token: int | None, reason: str) -> None:
        job.events.put_nowait((token, reason, *self.engine.scored.pop(job.identity, ())))
        self.scheduler.end(job, time.monotonic())
        if self._jobs.pop(job.identity, None):
            self.engine.cancel(job.identity)

    def _emptied(self, path: str) -> bool:
        """Whether an adapter has left its slot, which nobody needs any more."""
        if path in self.tiers.leases:  # who waits would load it again
            return False
        if not self.scheduler.forget(path):
            return False
        self._empty(path)
        account, _, digest = path.split("/")
        self.engine.forget(digest, account)
        return True

    def _empty(self, path: str) -> None:
        with contextlib.suppress(ValueError):  # it had no slot, or could not be loaded
            self.engine.unload(path)

    def _unload(self, path: str) -> None:
        self._unloading.add(path)
        self._wake.set()

    async def drop(self, prefix: str) -> None:
        """Forget a version, or all of ``ACCOUNT/NAME``, in every tier; who uses one now keeps it to the end."""
        await self.tiers.drop(prefix)

    async def gauges(self) -> list[dict[tuple, float]]:
        """Gauges, by the name of a metric and the values of its labels; a list, as several replicas have one each.

        RuntimeError if it can serve nobody any more.
        """
        if self._loop is not None and self._loop.done():
            raise RuntimeError("the service was closed, or its loop failed")
        levels = {"host": [*self.tiers.host.values()], "slot": [*self.engine.adapters.values()]}
        loaded: dict[tuple, float] = {}
        for level, adapters in levels.items():
            for adapter in adapters:
                key = ("lora_adapter_loaded", level, str(adapter.rank))
                loaded[key] = loaded.get(key, 0) + 1
        counts = {
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.queued),
            "kv_cache_usage_perc": self.scheduler.filled / self.scheduler.positions,
            "lora_adapter_leases": self.tiers.leases.total(),
        }
        return [loaded | {(name,): value for name, value in counts.items()}]

    async def close(self) -> None:
        """End all requests with an error, and let go of the model."""
        if self._loop:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)  # after the step, if it is in one
        self.engine.close()
