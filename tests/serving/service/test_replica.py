"""A replica against the engine alone; whatever state a request is in when it ends, nothing of it stays."""

import asyncio
import collections
import contextlib
import functools
import gc
import tempfile
import threading
import weakref

import obstore
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from plpkg.adapters import WEIGHTS, Adapter, AdapterLimits, InvalidAdapterError
from plpkg.serving.attention import KeyValues
from plpkg.serving.engine import Engine
from plpkg.serving.requests import Request, Running
from plpkg.serving.service.replica import Replica, _Job
from plpkg.serving.service.scheduler import OverloadedError, Scheduler
from plpkg.serving.service.store import AccountFullError, NotFoundError, Store, StoreError
from plpkg.serving.service.tiers import Disk, Tiers

from waiting import PATIENCE_S, until

NAMES, IDS = "abcde", [5, 17, 3, 40]


class Bytes(bytearray):
    __hash__ = object.__hash__


class Gated(Store):
    """Downloads wait where their path has a gate; weights become others before they are read, where it is told so.

    ``given`` has the adapters, and the bytes of weights, that somebody still holds.
    """

    def __init__(self, **options):
        super().__init__(obstore.store.MemoryStore(), **options)
        self.gates, self.changes, self.asked, self.given = {}, {}, [], weakref.WeakSet()

    async def fetch(self, path, model, limits=None):
        self.asked.append(path)
        if path in self.gates:
            await self.gates[path].wait()
        adapter = await super().fetch(path, model, limits)
        self.given.add(adapter)
        return adapter

    async def _read(self, path, most):
        if path in self.changes:
            obstore.put(self._objects, path, self.changes[path])  # at once: who gives up leaves no write under way
        content = Bytes(await super()._read(path, most))
        self.given.add(content)
        return content


@pytest.fixture(scope="module")
def world(tools):
    """A tiny model, adapters of it by name, and what an engine alone writes after ``IDS``, by the adapter's digest."""
    model = tools.backbone()
    adapters = {name: tools.adapted(model, 2 + 2 * (k % 2), k)[1] for k, name in enumerate(NAMES)}
    engine = Engine(model)
    for adapter in adapters.values():
        engine.load(adapter.digest, adapter)
    names = [None, *engine.adapters]
    written = dict(zip(names, engine.generate([Request(IDS, name, 80) for name in names]), strict=True))
    engine.close()
    assert len({tuple(each[:5]) for each in written.values()}) == len(names)
    return model, adapters, written


@pytest.fixture
def serving(world):
    """A context that gives a replica, its store, and the adapters' paths; nothing may be left when it ends."""

    @contextlib.asynccontextmanager
    async def serve(*, batch=4, closed=False, positions=4096):
        store = Gated()
        paths = {name: f"alice/{name}/{await store.put('alice', name, each)}" for name, each in world[1].items()}
        engine = Engine(world[0], max_batch=batch, max_step_tokens=8)
        replica = Replica(engine, Tiers(store, world[0]), Scheduler(2, batch, positions=positions))
        try:
            yield replica, store, paths
            if not closed:  # by the test, and the engine's state with it
                with contextlib.suppress(AssertionError):
                    await until(lambda: not left(replica))
                assert left(replica) == []
                assert set(engine.adapters) == set(replica.scheduler.slots)
        finally:
            await replica.close()

    return serve


def left(replica):
    engine, scheduler = replica.engine, replica.scheduler
    used = [users for users in scheduler.slots.values() if users]
    pools = [pool.users for pool in engine._pools.values() if pool.users]
    of_engine = [*engine._waiting, *engine._running, *engine._paused, *engine.finished]
    return [*of_engine, *scheduler.running, *scheduler.queued, *used, *pools, *replica._jobs,
            *replica._leaving, *replica.tiers.leases, *replica.tiers._flights]  # fmt: skip


def states(replica, path):
    """Of the requests for an adapter."""
    return [each.state for each in [*replica.scheduler.running, *replica.scheduler.queued] if each.adapter == path]


async def tokens(replica, path, new=5, account=""):
    """What a request writes; its last reason must be the number of its tokens."""
    out, reason = [], None
    async for token, reason in replica.stream(path, Request(IDS, max_new_tokens=new, account=account)):
        assert reason in (None, "length")
        out.append(token)
    assert (len(out), reason) == (new, "length")
    return out


async def loaded(replica, level):
    (gauges,) = await replica.gauges()
    return sum(value for key, value in gauges.items() if key[:2] == ("lora_adapter_loaded", level))


@pytest.mark.parametrize("positions", [4096, 400])
async def test_a_quiet_account_does_not_wait_for_a_flood(serving, world, positions):
    """Its answer begins in the next steps, and what is paused for it is written as if nothing had been."""
    _, _, written = world
    async with serving(positions=positions) as (replica, _, paths):
        steps, step = [0], replica.engine.step

        def counted():
            steps[0] += 1
            return step()

        replica.engine.step = counted
        path, digest = paths[NAMES[0]], paths[NAMES[0]].rpartition("/")[2]
        flood = [asyncio.create_task(tokens(replica, path, 80, account="mallory")) for _ in range(9)]
        await until(lambda: steps[0] > 20)
        for _ in range(3):
            began, first, out, paused = steps[0], None, [], False
            async for token, _ in replica.stream(None, Request(IDS, max_new_tokens=6, account="bob")):
                first = first or steps[0]
                out.append(token)
                paused |= bool(replica.engine._paused)
            assert out == written[None][:6]
            assert paused
            assert first - began <= 3  # the step that ran, the one that reads, and one that was counted before it told
            assert steps[0] - first <= 6
        assert await asyncio.gather(*flood) == [written[digest][:80]] * 9


async def test_what_is_paused_may_leave(serving, world):
    async with serving() as (replica, _, paths):
        path = paths[NAMES[0]]
        flood = [asyncio.create_task(tokens(replica, path, 80, account="mallory")) for _ in range(4)]
        await until(lambda: len(replica.scheduler.running) == 4)
        quiet = asyncio.create_task(tokens(replica, None, 60, account="bob"))
        await until(lambda: replica.engine._paused)
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert await quiet == world[2][None][:60]


async def test_a_dropped_adapter_leaves_nothing_of_what_was_read_with_it(serving, world):
    async with serving() as (replica, _, paths):
        request = Request([*range(20)], max_new_tokens=30, account="alice")
        streams = [replica.stream(paths[name], request) for name in ("a", "b")]
        for stream in streams:
            await anext(stream)
        await replica.drop("alice/a")
        for stream in streams:  # who uses it keeps it to the end
            assert len([each async for each in stream]) == 29
        kept = replica.engine._prefixes._kept
        await until(lambda: [owner for owner, _ in kept.values()] == [(world[1]["b"].digest, "alice")])


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_who_leaves_while_it_runs_is_out_of_the_next_steps(how, serving):
    """In every other state it leaves nothing either: :class:`Service`."""
    async with serving() as (replica, _, paths):
        step, steps, left = replica.engine.step, [], threading.Event()

        def counted():
            steps.append(0)
            left.wait(PATIENCE_S)
            return step()

        replica.engine.step = counted
        stream = replica.stream(paths["a"], Request(IDS, max_new_tokens=60))
        first = asyncio.create_task(anext(stream))
        await until(lambda: states(replica, paths["a"]) == ["running"])
        if how == "closed":  # by a reader that stops reading
            left.set()
            await first
            await stream.aclose()
        else:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            left.set()  # not before: a first token would be there
        steps.clear()
        await until(lambda: not states(replica, paths["a"]))
        assert len(steps) <= 2  # the one that it was in, and one that another began meanwhile
        assert paths["a"] not in replica.tiers.leases


@pytest.mark.parametrize("said", ["the service was closed", "division by zero"])
async def test_when_the_loop_ends_all_are_told(said, serving):
    async with serving(batch=1, closed=True) as (replica, store, paths):
        store.gates[paths["c"]] = asyncio.Event()
        calls = [asyncio.create_task(tokens(replica, paths[name], 80)) for name in "abc"]
        await until(lambda: replica.scheduler.running and len(replica.scheduler.queued) == 2)
        if said == "division by zero":  # a defect
            replica.scheduler.decide = lambda now_s: now_s / 0
        else:
            await replica.close()
        results = asyncio.gather(*calls, return_exceptions=True)
        for error in await asyncio.wait_for(results, PATIENCE_S):
            assert isinstance(error, RuntimeError)
            assert said in str(error)
        for call in (tokens(replica, None), replica.gauges()):  # who comes later, and who asks for its health
            with pytest.raises(RuntimeError):
                await asyncio.wait_for(call, PATIENCE_S)
        assert not replica.tiers.leases
        assert not replica.scheduler.queued
        await replica.close()
        assert not [each for each in threading.enumerate() if each.name.startswith("engine")]


@pytest.mark.parametrize("state", ["idle", "waiting", "running"])
async def test_who_uses_a_dropped_adapter_keeps_it_to_the_end_and_then_it_is_gone(state, serving):
    """From every tier, whatever else goes on with the same shapes (vLLM #54839)."""
    async with serving(batch=1) as (replica, store, paths):
        expected = await tokens(replica, paths["a"], 60)
        await tokens(replica, paths["b"])
        calls = []
        if state == "waiting":
            calls.append(asyncio.create_task(tokens(replica, paths["b"], 80)))
            await until(lambda: replica.scheduler.running)
        if state != "idle":
            calls.append(asyncio.create_task(tokens(replica, paths["a"], 60)))
            await until(lambda: states(replica, paths["a"]) == [state])
        await store.delete("alice", "a")
        await replica.drop("alice/a")
        assert await loaded(replica, "host") == 1
        assert state == "idle" or (await asyncio.gather(*calls))[-1] == expected
        await until(lambda: paths["a"] not in replica.engine.adapters)
        assert (await loaded(replica, "host"), await loaded(replica, "slot")) == (1, 1)
        gc.collect()
        assert [each.digest for each in store.given if isinstance(each, Adapter)] == [paths["b"].rpartition("/")[2]]
        with pytest.raises(NotFoundError):
            await tokens(replica, paths["a"])


async def test_an_adapter_comes_while_others_write(serving):
    """Tokens go on arriving for as long as the store takes: it waits here until a hundred have."""
    async with serving() as (replica, store, paths):
        gate = store.gates[paths["b"]] = asyncio.Event()
        cold, arrived = asyncio.create_task(tokens(replica, paths["b"])), []
        await until(lambda: paths["b"] in store.asked)
        while len(arrived) < 100:
            arrived += await tokens(replica, paths["a"], 80)
        assert not cold.done()
        gate.set()
        await cold


async def test_places_fit_the_engine_and_it_can_be_closed_before_the_first_request(world):
    engine, tiers = Engine(world[0], max_batch=2, max_step_tokens=8), Tiers(None, world[0])
    with pytest.raises(ValueError, match="places=3, the engine max_batch=2"):
        Replica(engine, tiers, Scheduler(2, 3))
    await Replica(engine, tiers, Scheduler(2, 2)).close()


KINDS = (Running, KeyValues, Adapter, _Job, asyncio.Task, torch.Tensor)


def alive():
    """How many objects of each kind there are."""
    gc.collect()
    counts = collections.Counter(type(each) for each in gc.get_objects())
    return {kind.__name__: sum(n for each, n in counts.items() if issubclass(each, kind)) for kind in KINDS}


SPOILS = {
    "missing": None,
    "truncated": lambda old: old[: len(old) // 2],
    "oversized": lambda old: old + b"\0" * 2**20,
    "not finite": lambda old: old[:-8] + b"\0\0\0\0\0\0\xf8\x7f",
    "another": lambda old: old[:-8] + b"\0" * 8,
    "changing": None,
}
FAILURES = {"load": "it could not start: as was asked for", "step": "a step failed: MemoryError: as was asked for"}
USERS = ["alice/x", "alice/y", "bob/x", "bob/y"]


class Service(RuleBasedStateMachine):
    """Uploads, deletions, requests, those that leave, and every fault of a store, in any order."""

    def __init__(self):
        super().__init__()
        (self.model, self.adapters, self.written), self.runner = self.world, asyncio.Runner()
        self.store, self.engine = Gated(max_versions=4), Engine(self.model, max_batch=3, max_step_tokens=8)
        self.failing, self.fails_next, self.failed = None, None, 0  # where the engine fails, and how many by that
        for name in FAILURES:
            setattr(self.engine, name, functools.partial(self.fail_or, name, getattr(self.engine, name)))
        budget, self.folder = 2 * max(each.num_bytes for each in self.adapters.values()), tempfile.TemporaryDirectory()
        options = dict(limits=AdapterLimits(max_bytes=2**19), disk=Disk(self.folder.name, budget), failed_s=0)
        self.tiers = Tiers(self.store, self.model, host_bytes=budget, downloads=2, **options)
        scheduler = Scheduler(slots=2, places=3, positions=40, max_queued=8, patience_s=0.01)
        self.replica = Replica(self.engine, self.tiers, scheduler)
        self.versions, self.current, self.calls, self.spoiled = {}, {}, [], set()  # in the store, by path and by name
        for user, which in zip(USERS, NAMES, strict=False):
            self.put(user, which)

    def fail_or(self, name, method, *arguments):
        if self.fails_next == name:
            self.fails_next = None
            raise MemoryError("as was asked for")
        return method(*arguments)

    def words(self, adapter, new):
        return self.written[adapter and adapter.digest][:new]

    def run(self, work):
        async def timed():
            return await asyncio.wait_for(work, PATIENCE_S)

        return self.runner.run(timed())

    @rule(user=st.sampled_from(USERS), which=st.sampled_from(NAMES))
    def put(self, user, which):
        account, name = user.split("/")
        path = f"{user}/{self.adapters[which].digest}"
        full = sum(each.startswith(f"{account}/") for each in self.versions) >= 4 and path not in self.versions
        of_name = {each for each in self.versions if each.startswith(f"{user}/")}
        refused = full and not of_name
        with pytest.raises(AccountFullError) if refused else contextlib.nullcontext():
            self.run(self.store.put(account, name, self.adapters[which]))
        if refused:
            return
        self.versions[path] = self.current[user] = self.adapters[which]
        if full:  # the oldest of the name has gone
            there = {f"{user}/{digest}" for digest in self.run(self.store.versions(account))[name]}
            (gone,) = of_name - there
            del self.versions[gone]
            self.spoiled.discard(gone)

    @rule(user=st.sampled_from(USERS))
    def delete(self, user):
        async def work():
            await self.store.delete(*user.split("/"))
            await self.replica.drop(user)

        for path in [path for path in self.store.changes if path.startswith(f"{user}/")]:
            del self.store.changes[path]  # or a download that goes on could write it back
        with contextlib.nullcontext() if user in self.current else pytest.raises(NotFoundError):
            self.run(work())
        self.current.pop(user, None)
        for path in [path for path in self.versions if path.startswith(f"{user}/")]:
            del self.versions[path]
            self.spoiled.discard(path)
            self.excuse(path, NotFoundError)
        assert not any(path.startswith(f"{user}/") for path in self.tiers.host)

    @rule(user=st.sampled_from(USERS))
    def delete_superseded(self, user):
        async def work():
            await self.store.delete(*path.split("/"))
            await self.replica.drop(path)

        theirs = sorted(path for path in self.versions if path.startswith(f"{user}/"))
        for path in [path for path in theirs if self.versions[path] is not self.current[user]][:1]:
            for file in [file for file in self.store.changes if file.startswith(f"{path}/")]:
                del self.store.changes[file]
            self.run(work())
            del self.versions[path]
            self.spoiled.discard(path)
            self.excuse(path, NotFoundError)
            assert path not in self.tiers.host

    def excuse(self, path, *kinds):
        for call in self.calls:
            if call["path"] == path:
                call["kinds"] |= {*kinds}

    @rule(wanted=st.lists(st.tuples(st.sampled_from([*USERS, None]), st.integers(1, 12)), min_size=1, max_size=6))
    def requests(self, wanted):
        for user, new in wanted:
            self.request(user, new)

    def request(self, user, new):
        adapter, path = self.current.get(user), None
        if user:
            with contextlib.nullcontext() if adapter else pytest.raises(NotFoundError):
                version = self.run(self.store.current(*user.split("/")))
            if not adapter:
                return
            assert version == adapter.digest
            path = f"{user}/{version}"
        kinds = {InvalidAdapterError, NotFoundError, StoreError} if path in self.spoiled else set()
        call = dict(path=path, adapter=adapter, new=new, kinds=kinds | {OverloadedError}, cancelled=False)

        async def work():
            call["task"] = asyncio.create_task(tokens(self.replica, path, new))
            await asyncio.sleep(0)

        self.calls.append(call)
        self.run(work())

    @rule()
    def impossible(self):
        for new, said in ((80, "may fill 84 positions, 40 are there"), (100, "4 ids and 100 new ones do not fit")):
            with pytest.raises(ValueError, match=said):
                self.run(tokens(self.replica, None, new))

    @rule(which=st.integers(0, 7))
    def leave(self, which):
        for call in self.calls[which : which + 1]:  # what is drawn must not depend on what has ended, which is a race
            call["cancelled"] = call["task"].cancel() or call["cancelled"]

    @rule(milliseconds=st.integers(1, 30))
    def time_goes_by(self, milliseconds):
        self.run(asyncio.sleep(milliseconds / 1000))

    @precondition(lambda self: self.versions and len(self.spoiled) < 2)
    @rule(data=st.data(), how=st.sampled_from([*SPOILS]))
    def spoil(self, data, how):
        path = data.draw(st.sampled_from(sorted(self.versions)))
        file, old = f"{path}/{WEIGHTS}", bytes(self.versions[path].files[WEIGHTS])
        if how == "missing":
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self.store._objects, file)
        elif how == "changing":
            self.store.changes[file] = SPOILS["another"](old)
        else:
            obstore.put(self.store._objects, file, SPOILS[how](old))
        self.spoiled.add(path)
        self.excuse(path, InvalidAdapterError, NotFoundError, StoreError)

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def slow(self, data):
        self.store.gates.setdefault(data.draw(st.sampled_from(sorted(self.versions))), asyncio.Event())

    @rule()
    def the_slow_go_on(self):
        for gate in self.store.gates.values():
            gate.set()
        self.store.gates.clear()

    @precondition(lambda self: not self.failing)
    @rule(where=st.sampled_from([*FAILURES]))
    def the_engine_fails(self, where):
        self.fails_next = self.failing = where

    @invariant()
    def what_is_there_is_what_its_path_says(self):
        for held in (self.tiers.host, self.engine.adapters):
            assert all(path.endswith(f"/{each.digest}") for path, each in held.items())
        assert len(self.engine.adapters) <= 2
        assert len(self.replica.scheduler.running) <= 3
        assert sum(each.num_bytes for each in self.tiers.host.values()) <= self.tiers.host_bytes
        waiting = [call for call in self.calls if not call["task"].done()]
        assert self.tiers.leases.total() <= sum(call["path"] is not None for call in waiting)

    @invariant()
    def who_was_answered_was_answered_by_his_adapter(self):
        done = [call for call in self.calls if call["task"].done()]
        self.calls = [call for call in self.calls if not call["task"].done()]
        for call in done:
            if call["task"].cancelled():
                assert call["cancelled"]
            elif error := call["task"].exception():
                failed = type(error) is RuntimeError and str(error) == FAILURES.get(self.failing)
                self.failed += failed
                assert failed or type(error) in call["kinds"], repr(error)
                assert self.failed <= (1 if self.failing == "load" else 3), "more than those in it have failed"
            else:
                assert call["task"].result() == self.words(call["adapter"], call["new"])

    def teardown(self):
        async def end():
            await asyncio.gather(*(call["task"] for call in self.calls), return_exceptions=True)
            await self.replica.gauges()  # or an error, if its loop has ended
            await until(lambda: not left(self.replica))
            self.fails_next = None
            for user, adapter in self.current.items():  # whatever happened, each is served, in another's slot
                if (path := f"{user}/{adapter.digest}") not in self.spoiled:
                    assert await tokens(self.replica, path) == self.words(adapter, 5)
            await until(lambda: self.engine.adapters.keys() <= self.tiers.host.keys())  # out of memory, out of its slot
            for user in {path.rpartition("/")[0] for path in [*self.tiers.host]}:
                await self.replica.drop(user)
            await until(lambda: not self.engine.adapters)
            assert not self.tiers.host
            assert await self.replica.gauges() == [gauges]
            await self.replica.close()

        async def tasks():
            return asyncio.all_tasks() - {asyncio.current_task()}

        counts = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "lora_adapter_leases")
        gauges = {(name,): 0 for name in counts}
        self.the_slow_go_on()
        try:
            self.run(end())
            self.who_was_answered_was_answered_by_his_adapter()
            assert not self.runner.run(tasks())
            if self.store.given:  # in a cycle
                gc.collect()
            assert not self.store.given, "somebody holds what no tier has"
        finally:
            self.runner.close()
            self.folder.cleanup()


def test_whatever_happens(world):
    Service.world = world
    before = alive()
    run_state_machine_as_test(Service, settings=settings(max_examples=40, stateful_step_count=30))
    assert alive() == before
