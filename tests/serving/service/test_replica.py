"""A replica against the engine alone; whatever state a request is in when it ends, nothing of it stays."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import obstore
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from plpkg.adapters import WEIGHTS, AdapterLimits, InvalidAdapterError
from plpkg.serving.engine import Engine, Request
from plpkg.serving.service.replica import Replica
from plpkg.serving.service.scheduler import OverloadedError, Scheduler
from plpkg.serving.service.store import AccountFullError, NotFoundError, Store, StoreError
from plpkg.serving.service.tiers import Tiers

from waiting import until

NAMES = "abcde"


class Gated(Store):
    """A store whose downloads wait for a gate, by path; those without one go through."""

    def __init__(self, **options):
        super().__init__(obstore.store.MemoryStore(), **options)
        self.gates, self.asked = {}, []

    async def fetch(self, path, model, limits=None):
        self.asked.append(path)
        if path in self.gates:
            await self.gates[path].wait()
        return await super().fetch(path, model, limits)


@pytest.fixture(scope="module")
def world(tools):
    """A tiny model, and adapters of it by name."""
    model = tools.backbone()
    return model, {name: tools.adapted(model, 2 + 2 * (k % 2), k)[1] for k, name in enumerate(NAMES)}


@pytest.fixture
def serve(world):
    """Runs a test with a replica, on which nothing may be left."""

    def run(test, *, slots=2, batch=4, host_bytes=2**32, closed=False, **options):
        async def main():
            store = Gated()
            paths = {name: f"alice/{name}/{await store.put('alice', name, each)}" for name, each in world[1].items()}
            engine = Engine(world[0], max_batch=batch, max_step_tokens=8)
            tiers = Tiers(store, world[0], host_bytes=host_bytes)
            replica = Replica(engine, tiers, Scheduler(slots, batch, **dict(positions=4096) | options))
            try:
                await test(replica, store, paths)
                if not closed:  # by the test, and the engine's state with it
                    await at_rest(replica)
            finally:
                await replica.close()

        asyncio.run(main())

    return run


def left(replica):
    engine, scheduler = replica.engine, replica.scheduler
    used = [users for users in scheduler.slots.values() if users]
    pools = [pool.users for pool in engine._pools.values() if pool.users]
    return [*engine._waiting, *engine._running, *scheduler.running, *scheduler.queued, *used, *pools, *replica._jobs,
            *replica._leaving, *engine.finished, *replica.tiers.leases, *replica.tiers._flights]  # fmt: skip


async def at_rest(replica):
    with contextlib.suppress(AssertionError):
        await until(lambda: not left(replica))
    assert left(replica) == []
    assert set(replica.engine.adapters) == set(replica.scheduler.slots)


async def tokens(replica, path, ids, new=5, **options):
    """What a request writes; its last reason must be the number of its tokens."""
    out, reason = [], None
    async for token, reason in replica.stream(path, Request(ids, max_new_tokens=new, **options)):
        assert reason in (None, "length")
        out.append(token)
    assert (len(out), reason) == (new, "length")
    return out


async def loaded(replica, level):
    (gauges,) = await replica.gauges()
    return sum(value for key, value in gauges.items() if key[:2] == ("lora_adapter_loaded", level))


def test_a_mixed_crowd_with_fewer_slots_than_adapters(world, serve, tools):
    names = [None, *NAMES] * 3
    texts = tools.texts(*(3 + 5 * k % 11 for k in range(len(names))))
    engine = Engine(world[0], max_batch=len(names), max_step_tokens=64)
    for name, adapter in world[1].items():
        engine.load(name, adapter)
    expected = engine.generate([Request(ids, name, 6) for ids, name in zip(texts, names, strict=True)])
    engine.close()
    assert len({tuple(each) for each in expected}) == len(names)

    async def test(replica, store, paths):
        calls = [tokens(replica, paths.get(name), ids, 6) for name, ids in zip(names, texts, strict=True)]
        assert await asyncio.gather(*calls) == expected
        assert sorted(store.asked) == sorted(paths.values())
        assert await loaded(replica, "host") == len(NAMES)
        assert await loaded(replica, "slot") == 2

    serve(test)


@pytest.mark.parametrize("state", ["fetching", "waiting", "running"])
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_who_leaves_leaves_nothing(state, how, serve, tools):
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        if state == "fetching":
            store.gates[paths["a"]] = asyncio.Event()
        runs = [asyncio.create_task(tokens(replica, paths["b"], ids, 60))] if state == "waiting" else []
        await until(lambda: len(replica.scheduler.running) == len(runs))
        before, step, steps = len(replica.scheduler.queued), replica.engine.step, []
        replica.engine.step = lambda: steps.append(0) or step()
        stream = replica.stream(paths["a"], Request(ids, max_new_tokens=60))
        first = asyncio.create_task(anext(stream))
        tickets = replica.scheduler.queued if state != "running" else replica.scheduler.running
        await until(lambda: any((each.adapter, each.state) == (paths["a"], state) for each in tickets))
        assert len(replica.scheduler.queued) == before + (state != "running")
        if how == "close" and state == "running":  # a reader that stops reading
            await first
            await stream.aclose()
        else:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        steps.clear()
        await until(lambda: not any(each.adapter == paths["a"] for each in replica.scheduler.running))
        assert len(steps) <= 2  # the one that it was in, and one that another began meanwhile
        assert paths["a"] not in replica.tiers.leases
        await asyncio.gather(*runs)

    serve(test, batch=1 if state == "waiting" else 4)


def test_a_step_that_raises_fails_those_in_it_only(world, serve, tools):
    texts, (ids,) = tools.texts(4, 5), tools.texts(7, seed=1)

    async def test(replica, store, paths):
        step, failing = replica.engine.step, True

        def broken():
            if failing:
                raise MemoryError("no memory left")
            return step()

        replica.engine.step = broken
        calls = [tokens(replica, path, text) for path, text in zip((paths["a"], None), texts, strict=True)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, RuntimeError)
            assert "a step failed: MemoryError: no memory left" in str(error)
        failing = False
        assert await tokens(replica, paths["a"], ids) == expected
        held = weakref.ref(replica.tiers.host[paths["a"]])
        await replica.drop("alice/a")
        await until(lambda: gc.collect() >= 0 and held() is None)  # what failed holds it no more

    engine = Engine(world[0])
    engine.load("a", world[1]["a"])
    expected = engine.generate([Request(ids, "a", 5)])[0]
    engine.close()
    serve(test)


def test_an_adapter_that_cannot_be_loaded_fails_its_own_request(serve, tools):
    """And its slot can be another's afterwards: with two slots, three more adapters have to give theirs up."""
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        load = replica.engine.load

        def broken(name, adapter):
            if name == paths["a"]:
                raise MemoryError("no memory left")
            load(name, adapter)

        replica.engine.load = broken
        calls = [tokens(replica, paths[name], ids) for name in "ab"]
        failed, _ = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed, RuntimeError)
        assert "could not start: no memory left" in str(failed)
        for name in "bcde":
            await asyncio.wait_for(tokens(replica, paths[name], ids), 20)

    serve(test)


def test_when_the_loop_fails_all_are_told(serve, tools):
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        running = asyncio.create_task(tokens(replica, paths["a"], ids, 60))
        await until(lambda: replica.scheduler.running)
        waiting = [asyncio.create_task(tokens(replica, paths[name], ids)) for name in "bc"]
        await until(lambda: len(replica.scheduler.queued) == 2)

        def broken(now_s):
            raise ZeroDivisionError("a defect")

        replica.scheduler.decide = broken
        for error in await asyncio.gather(running, *waiting, return_exceptions=True):
            assert isinstance(error, RuntimeError)
            assert "a defect" in str(error)
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(tokens(replica, None, ids), 5)
        with pytest.raises(RuntimeError):  # and so is whoever asks for its health
            await replica.gauges()
        assert not replica.tiers.leases
        assert not replica.scheduler.queued

    serve(test, batch=1, closed=True)


def test_drop_unloads(world, serve, tools):
    """The weights are gone from every tier, whatever else goes on with the same shapes (vLLM #54839)."""
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        await asyncio.gather(*(tokens(replica, paths[name], ids) for name in "ab"))
        held = weakref.ref(replica.tiers.host[paths["a"]])
        before = await loaded(replica, "host"), await loaded(replica, "slot")
        await store.delete("alice", "a")
        await replica.drop("alice/a")
        await until(lambda: paths["a"] not in replica.engine.adapters)
        gc.collect()
        assert held() is None
        assert (
            (await loaded(replica, "host"), await loaded(replica, "slot")) == (before[0] - 1, before[1] - 1) == (1, 1)
        )
        with pytest.raises(NotFoundError):
            await tokens(replica, paths["a"], ids)

    serve(test)


def test_who_uses_a_dropped_adapter_keeps_it_to_the_end(serve, tools):
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        expected = await tokens(replica, paths["a"], ids, 60)
        running = asyncio.create_task(tokens(replica, paths["a"], ids, 60))
        await until(lambda: replica.scheduler.running)
        held = weakref.ref(replica.tiers.host[paths["a"]])
        await store.delete("alice", "a")
        await replica.drop("alice/a")
        assert await loaded(replica, "host") == 0
        assert await running == expected
        await until(lambda: paths["a"] not in replica.engine.adapters)
        gc.collect()
        assert held() is None

    serve(test)


def test_who_waits_with_a_dropped_adapter_leaves_it_in_no_slot(serve, tools):
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        expected = await tokens(replica, paths["a"], ids)
        running = asyncio.create_task(tokens(replica, paths["b"], ids, 80))
        await until(lambda: replica.scheduler.running)
        waiting = asyncio.create_task(tokens(replica, paths["a"], ids))
        await until(lambda: any(each.state == "waiting" for each in replica.scheduler.queued))
        await store.delete("alice", "a")
        await replica.drop("alice/a")
        await running
        assert await waiting == expected
        await until(lambda: paths["a"] not in replica.engine.adapters)

    serve(test, batch=1)


def test_the_same_name_uploaded_again(world, serve, tools):
    (ids,) = tools.texts(9)

    async def test(replica, store, paths):
        old = await tokens(replica, f"alice/a/{await store.current('alice', 'a')}", ids)
        version = await store.put("alice", "a", world[1]["b"])
        assert await store.current("alice", "a") == version
        new = await tokens(replica, f"alice/a/{version}", ids)
        assert new == await tokens(replica, paths["b"], ids) != old
        assert await tokens(replica, paths["a"], ids) == old

    serve(test)


def test_closing_ends_all_with_an_error(serve, tools):
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        store.gates[paths["c"]] = asyncio.Event()
        calls = [asyncio.create_task(tokens(replica, paths[name], ids, 80)) for name in "abc"]
        await until(lambda: replica.scheduler.running and len(replica.scheduler.queued) == 2)
        await replica.close()
        results = asyncio.gather(*calls, return_exceptions=True)
        for error in await asyncio.wait_for(results, 5):
            assert isinstance(error, RuntimeError)
            assert "the service was closed" in str(error)
        assert not replica.tiers.leases
        assert not [each for each in threading.enumerate() if each.name.startswith("engine")]

    serve(test, batch=1, closed=True)


def test_closing_before_the_first_request(serve):
    async def test(replica, store, paths):
        await replica.close()

    serve(test, closed=True)


def test_an_adapter_comes_while_others_write(serve, tools):
    """Tokens go on arriving for as long as the store takes: it waits here until a hundred have."""
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        gate, arrived = asyncio.Event(), []
        store.gates[paths["b"]] = gate
        cold = asyncio.create_task(tokens(replica, paths["b"], ids))
        await until(lambda: paths["b"] in store.asked)
        while len(arrived) < 100:
            arrived += await tokens(replica, paths["a"], ids, 80)
        assert not cold.done()
        gate.set()
        await cold

    serve(test)


def test_too_many_and_impossible_requests(serve, tools):
    (ids,) = tools.texts(4)

    async def test(replica, store, paths):
        store.gates[paths["a"]] = asyncio.Event()
        waiting = [asyncio.create_task(tokens(replica, paths["a"], ids)) for _ in range(2)]
        await until(lambda: len(replica.scheduler.queued) == 2)
        with pytest.raises(OverloadedError, match="2 requests are waiting"):
            await tokens(replica, paths["b"], ids)
        store.gates[paths["a"]].set()
        await asyncio.gather(*waiting)
        with pytest.raises(ValueError, match="do not fit"):
            await tokens(replica, paths["a"], ids, 1000)
        with pytest.raises(ValueError, match="may fill 54 positions, 50 are there"):
            await tokens(replica, paths["a"], ids, 50)

    serve(test, max_queued=2, positions=50)


def test_places_fit_the_engine(world):
    engine = Engine(world[0], max_batch=2, max_step_tokens=8)
    with pytest.raises(ValueError, match="places=3, the engine max_batch=2"):
        Replica(engine, Tiers(None, world[0]), Scheduler(2, 3))
    engine.close()


def test_memory_for_one_adapter_serves_many_in_turn(world, serve, tools):
    """What leaves memory leaves its slot, and comes again when it is needed."""
    (ids,) = tools.texts(4)
    most = max(each.num_bytes for each in world[1].values())

    async def test(replica, store, paths):
        first = [await tokens(replica, paths[name], ids) for name in "abc"]
        assert [await tokens(replica, paths[name], ids) for name in "abc"] == first
        assert len(store.asked) == 6
        await until(lambda: len(replica.engine.adapters) == 1)
        assert await loaded(replica, "host") == 1

    serve(test, host_bytes=most)


def words(adapter, count):
    """What the engine below writes with an adapter, by its digest; or without."""
    return [int(adapter.digest[k % 60 : k % 60 + 4], 16) if adapter else k for k in range(count)]


class Typewriter:
    """An engine that writes :func:`words`, as strict as the real one about what is loaded."""

    max_batch = 3

    def __init__(self):
        self.adapters, self.finished, self.failing = {}, {}, None
        self._waiting, self._running, self._pools, self._next = [], {}, {}, 0

    def check(self, request):
        return [*request.input_ids]

    def fail(self, where):
        if self.failing == where:
            self.failing = None
            raise MemoryError("as was asked for")

    def load(self, name, adapter):
        self.fail("load")
        self.adapters[name] = adapter

    def unload(self, name):
        if name not in self.adapters:
            raise ValueError(f"no adapter {name!r} is loaded")
        del self.adapters[name]

    def add(self, request):
        adapter = None
        if request.adapter is not None:
            adapter = self.adapters[request.adapter]
        self._next += 1
        self._running[self._next] = adapter, request.max_new_tokens, []
        return self._next

    def step(self):
        self.fail("step")
        time.sleep(0.0005)
        written = []
        for identity, (adapter, most, done) in [*self._running.items()]:
            done.append(words(adapter, len(done) + 1)[-1])
            written.append((identity, done[-1]))
            if len(done) == most:
                self.finished[identity] = "length"
                del self._running[identity]
        return written

    def cancel(self, identity):
        self.finished.pop(identity, None)
        self._running.pop(identity, None)

    def close(self):
        self._running.clear()


class Changing(Gated):
    """Whose weights become another's between the range read and the download, where it is told so."""

    def __init__(self, **options):
        super().__init__(**options)
        self.changes = {}

    async def _read(self, path, most):
        if path in self.changes:
            obstore.put(self._objects, path, self.changes[path])  # at once: who gives up leaves no write under way
        return await super()._read(path, most)


SPOILS = {
    "missing": None,
    "truncated": lambda old: old[: len(old) // 2],
    "oversized": lambda old: old + b"\0" * 2**20,
    "not finite": lambda old: old[:-8] + b"\0\0\0\0\0\0\xf8\x7f",
    "another": lambda old: old[:-8] + b"\0" * 8,
    "changing": None,
}
USERS = ["alice/x", "alice/y", "bob/x", "bob/y"]


class Service(RuleBasedStateMachine):
    """Uploads, deletions, requests, those that leave, and every fault of a store, in any order."""

    def __init__(self):
        super().__init__()
        (self.model, self.adapters), self.runner = self.world, asyncio.Runner()
        self.store, self.engine = Changing(max_versions=4), Typewriter()
        budget = 2 * max(each.num_bytes for each in self.adapters.values())
        limits = AdapterLimits(max_bytes=2**19)
        self.tiers = Tiers(self.store, self.model, limits=limits, host_bytes=budget, downloads=2, failed_s=0)
        scheduler = Scheduler(slots=2, places=3, positions=100, max_queued=8, patience_s=0.01)
        self.replica = Replica(self.engine, self.tiers, scheduler)
        self.versions, self.current, self.calls = {}, {}, []  # what the store has, by path and by name
        self.spoiled, self.failed = set(), False
        for user, which in zip(USERS, NAMES, strict=False):
            self.put(user, which)

    def run(self, work):
        async def timed():
            return await asyncio.wait_for(work, 20)

        return self.runner.run(timed())

    @rule(user=st.sampled_from(USERS), which=st.sampled_from(NAMES))
    def put(self, user, which):
        account, name = user.split("/")
        path = f"{user}/{self.adapters[which].digest}"
        full = sum(each.startswith(f"{account}/") for each in self.versions) >= 4 and path not in self.versions
        try:
            self.run(self.store.put(account, name, self.adapters[which]))
        except AccountFullError:
            assert full
        else:
            assert not full
            self.versions[path] = self.current[user] = self.adapters[which]

    @rule(user=st.sampled_from(USERS))
    def delete(self, user):
        async def work():
            await self.store.delete(*user.split("/"))
            await self.replica.drop(user)

        for path in [path for path in self.store.changes if path.startswith(f"{user}/")]:
            del self.store.changes[path]  # or a download that goes on could write it back
        if user in self.current:
            self.run(work())
        else:
            with pytest.raises(NotFoundError):
                self.run(work())
        self.current.pop(user, None)
        for path in [path for path in self.versions if path.startswith(f"{user}/")]:
            del self.versions[path]
            self.spoiled.discard(path)
            self.excuse(path, NotFoundError)
        assert not any(path.startswith(f"{user}/") for path in self.tiers.host)

    def excuse(self, path, *kinds):
        for call in self.calls:
            if call["path"] == path:
                call["kinds"] |= {*kinds}

    @rule(wanted=st.lists(st.tuples(st.sampled_from([*USERS, None]), st.integers(1, 12)), min_size=1, max_size=6))
    def requests(self, wanted):
        for user, new in wanted:
            self.request(user, new)

    def request(self, user, new):
        adapter, path = None, None
        if user:
            try:
                version = self.run(self.store.current(*user.split("/")))
            except NotFoundError:
                assert user not in self.current
                return
            adapter, path = self.current[user], f"{user}/{version}"
            assert version == adapter.digest
        kinds = {OverloadedError} | (
            {InvalidAdapterError, NotFoundError, StoreError} if path in self.spoiled else set()
        )
        call = dict(path=path, adapter=adapter, new=new, kinds=kinds, cancelled=False)

        async def work():
            call["task"] = asyncio.create_task(tokens(self.replica, path, [1, 2], new))
            await asyncio.sleep(0)

        self.calls.append(call)
        self.run(work())

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

    @precondition(lambda self: not self.failed)
    @rule(where=st.sampled_from(["load", "step"]))
    def the_engine_fails(self, where):
        self.engine.failing, self.failed = where, True

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
                failed = type(error) is RuntimeError and "as was asked for" in str(error)
                assert (failed and self.failed) or type(error) in call["kinds"], repr(error)
            else:
                assert call["task"].result() == words(call["adapter"], call["new"])

    def teardown(self):
        async def end():
            await asyncio.gather(*(call["task"] for call in self.calls), return_exceptions=True)
            await until(lambda: not left(self.replica))
            for user in {path.rpartition("/")[0] for path in [*self.tiers.host]}:
                await self.replica.drop(user)
            await until(lambda: not self.engine.adapters)
            assert not self.tiers.host
            assert await self.replica.gauges() == [gauges]
            await self.replica.close()

        counts = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "lora_adapter_leases")
        gauges = {(name,): 0 for name in counts}
        self.the_slow_go_on()
        try:
            self.run(end())
            self.who_was_answered_was_answered_by_his_adapter()
        finally:
            self.runner.close()


def test_whatever_happens(world):
    Service.world = world
    run_state_machine_as_test(Service, settings=settings(max_examples=30, stateful_step_count=30))
