"""Tiers over a store that this file holds still: who waits, what is kept, what goes, and what is left behind."""

import asyncio
import contextlib
import os
import threading
from types import SimpleNamespace

import pytest

from plpkg.adapters import CONFIG, WEIGHTS, Adapter, InvalidAdapterError
from plpkg.serving.service import tiers as module
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import NotFoundError, StoreError
from plpkg.serving.service.tiers import Disk, Tiers

from waiting import PATIENCE_S, until


class Shelf:
    """A store in a dict, which answers while ``open`` is set, counts what it is asked for, and can fail."""

    def __init__(self, adapters):
        self.adapters = {f"alice/{name}/{each.digest}": each for name, each in adapters.items()}
        self.open, self.fetched, self.cancelled, self.failures = asyncio.Event(), [], [], {}
        self.open.set()

    async def fetch(self, path, model, limits=None):
        self.fetched.append(path)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(path)
            raise
        if path in self.failures:
            raise self.failures[path]
        if path not in self.adapters:
            raise NotFoundError("there is no such version of the adapter")
        return self.adapters[path]


@pytest.fixture
def shelf(writers):
    """Of five adapters, in the order of their paths; ``a`` is how another's name begins."""
    return Shelf(dict(zip(("a", "ab", "c", "d", "e"), writers.values(), strict=True)))


@pytest.fixture
def make(shelf, base):
    """Makes tiers over the shelf, in which nobody may be left, nor more than fits."""
    made = []

    def tiers(**options):
        made.append(Tiers(shelf, base[0], **options))
        return made[-1]

    yield tiers
    for each in made:
        assert (dict(each.leases), each._flights) == ({}, {})
        assert sum(adapter.num_bytes for adapter in each.host.values()) <= each.host_bytes


async def take(tiers, path):
    async with tiers.lease(path) as adapter:
        return adapter


def begin(tiers, path, count):
    return [asyncio.create_task(take(tiers, path)) for _ in range(count)]


async def test_who_waits_for_the_same_adapter_waits_for_one_download(shelf, make):
    (path, *_), tiers = shelf.adapters, make()
    shelf.open.clear()
    waiting = begin(tiers, path, 100)
    await until(lambda: shelf.fetched)
    assert tiers.leases == {path: 100}
    assert not tiers.host
    waiting[0].cancel()
    shelf.open.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(each is shelf.adapters[path] for each in [*results[1:], await take(tiers, path)])
    assert shelf.fetched == [path]


async def test_who_comes_while_a_download_is_being_given_up(shelf, make):
    (path, *_), tiers = shelf.adapters, make()
    shelf.open.clear()
    (first,) = begin(tiers, path, 1)
    await until(lambda: shelf.fetched)
    first.cancel()
    (second,) = begin(tiers, path, 1)  # runs in the same turn of the loop
    await asyncio.sleep(0)
    shelf.open.set()
    assert await second is shelf.adapters[path]


async def test_memory_has_a_budget_and_who_was_used_least_recently_goes(shelf, make, writers):
    (a, b, c, d, e), dropped = shelf.adapters, []
    tiers = make(host_bytes=3 * writers["numpy"].num_bytes + 2)  # the configurations differ by a byte
    tiers.on_drop = dropped.append
    for path in (a, b, c, a, d):
        await take(tiers, path)
        assert sum(each.num_bytes for each in tiers.host.values()) <= tiers.host_bytes
    assert (list(tiers.host), dropped) == ([c, a, d], [b])
    async with tiers.lease(c), tiers.lease(a):
        await take(tiers, e)
        assert (list(tiers.host), dropped) == ([c, a, e], [b, d])
        async with tiers.lease(e):
            with pytest.raises(OverloadedError, match=f"{tiers.host_bytes:,} bytes"):
                await take(tiers, b)
            assert set(tiers.host) == {a, c, e}
        assert await take(tiers, b) is shelf.adapters[b], "an overload was remembered as a failure"


@pytest.mark.parametrize("known", [False, True])
async def test_a_greedy_account_leaves_room_for_others(known, shelf, make, writers):
    """Of 12 equal adapters, greedy accounts lease 6, then 3, then 1, as they leave 6, 3, 2 free."""
    one = writers["numpy"]
    paths = {account: [f"{account}/a{k}/{one.digest}" for k in range(12)] for account in ("alice", "bob", "carol")}
    shelf.adapters = {path: one for theirs in paths.values() for path in theirs}
    tiers = make(host_bytes=12 * one.num_bytes, shared=True)
    for path in paths["alice"] * known:
        await take(tiers, path)  # in memory, and leased by nobody
    async with contextlib.AsyncExitStack() as stack:
        for account, most in dict(alice=6, bob=3, carol=1).items():
            for path in paths[account][:most]:
                await stack.enter_async_context(tiers.lease(path))
            await stack.enter_async_context(tiers.lease(path))  # once more the same takes nothing
            refused = await asyncio.gather(*begin(tiers, paths[account][most], 3), return_exceptions=True)
            assert {type(each) for each in refused} == {OverloadedError}
    for path in paths["alice"]:
        await take(tiers, path)


@pytest.mark.parametrize("how", ["after a while", "when it is dropped"])
@pytest.mark.parametrize("error", [StoreError("frozen"), NotFoundError("gone"), InvalidAdapterError("one")], ids=repr)
async def test_a_failure_is_remembered_for_a_while_and_fails_nobody_else(error, how, shelf, make, monkeypatch):
    (a, b, *_), tiers, clock = shelf.adapters, make(failed_s=5), SimpleNamespace(now=7.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    shelf.failures[a] = error
    results = await asyncio.gather(*begin(tiers, a, 5), take(tiers, b), return_exceptions=True)
    assert results.pop() is shelf.adapters[b]
    clock.now = 11.9
    results += await asyncio.gather(take(tiers, a), return_exceptions=True)
    assert {(type(each), str(each)) for each in results} == {(type(error), str(error))}
    assert shelf.fetched.count(a) == 1
    assert a not in tiers.host
    del shelf.failures[a]
    if how == "after a while":
        clock.now = 12.0
    else:  # whoever deletes it and puts it back is not told of what failed before
        await tiers.drop("alice/a")
    assert await take(tiers, a) is shelf.adapters[a]


async def test_equal_adapters_of_two_accounts_are_two(tmp_path, shelf, make):
    """Else the time of an answer would tell the one what the other has."""
    (path, *_), tiers = shelf.adapters, make(disk=Disk(tmp_path))
    other = path.replace("alice", "bob")
    shelf.adapters[other] = shelf.adapters[path]
    await take(tiers, path)
    await take(tiers, other)
    assert shelf.fetched == list(tiers.host) == [path, other]
    await tiers.drop("alice/a")
    assert list(tiers.host) == [other]
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*/*")] == [other]


async def test_drop_while_it_is_leased_and_while_it_is_fetched(tmp_path, shelf, make):
    (path, other, *_), tiers, dropped = shelf.adapters, make(disk=Disk(tmp_path)), []
    tiers.on_drop = dropped.append
    await take(tiers, other)
    async with tiers.lease(path) as adapter:
        await tiers.drop("alice/a")
        assert (list(tiers.host), dropped) == ([other], [path])
        assert adapter is shelf.adapters[path]
        assert not (tmp_path / path).exists()
        assert (tmp_path / other).exists()
    shelf.open.clear()
    waiting = begin(tiers, path, 3)
    await until(lambda: len(shelf.fetched) == 3)
    await tiers.drop("alice/a")
    (again,) = begin(tiers, path, 1)  # the same path is another flight
    await asyncio.sleep(0)
    shelf.open.set()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {NotFoundError}
    assert await again is adapter


async def test_drop_while_it_is_written_to_the_disk(tmp_path, shelf, make, monkeypatch):
    """What is deleted must not come back by a write that had begun."""
    (path, *_), disk, save = shelf.adapters, Disk(tmp_path), Adapter.save
    tiers, drop, writing, dropping = make(disk=disk), disk.drop, threading.Event(), threading.Event()

    def slow(adapter, folder):
        writing.set()
        dropping.wait(PATIENCE_S)
        save(adapter, folder)

    monkeypatch.setattr(Adapter, "save", slow)
    monkeypatch.setattr(disk, "drop", lambda prefix: dropping.set() or drop(prefix))
    (waiting,) = begin(tiers, path, 1)
    await until(writing.is_set)
    await tiers.drop("alice/a")
    with pytest.raises(NotFoundError, match="deleted while it was fetched"):
        await waiting
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not [*tmp_path.glob("alice/a/*")]
    assert not tiers.host


async def test_drop_before_the_write_to_the_disk_begins(tmp_path, shelf, make, monkeypatch):
    """Its thread may come to the disk after the drop has."""
    (path, *_), disk = shelf.adapters, Disk(tmp_path)
    tiers, write, dropped, done = make(disk=disk), disk.write, threading.Event(), threading.Event()
    called = threading.Event()

    def late(*arguments):
        called.set()
        dropped.wait(PATIENCE_S)
        write(*arguments)
        done.set()

    monkeypatch.setattr(disk, "write", late)
    (waiting,) = begin(tiers, path, 1)
    await until(called.is_set)
    await tiers.drop("alice/a")
    dropped.set()
    await until(done.is_set)
    assert not [*tmp_path.glob("alice/a/*")]
    with pytest.raises(NotFoundError, match="deleted while it was fetched"):
        await waiting


async def test_what_is_on_disk_does_not_wait_for_a_store_that_hangs(tmp_path, shelf, make):
    a, b, *others = shelf.adapters
    for path in (a, b):
        await take(make(disk=Disk(tmp_path)), path)
    tiers = make(disk=Disk(tmp_path), downloads=2)
    shelf.open.clear()
    hanging = [asyncio.create_task(take(tiers, each)) for each in others]
    await until(lambda: len(shelf.fetched) == 4)
    for path in (a, b):
        assert (await take(tiers, path)).files == shelf.adapters[path].files
    assert not any(each.done() for each in hanging)
    shelf.open.set()
    await asyncio.gather(*hanging)


async def test_the_disk_survives_a_restart_and_rotten_files_are_fetched_again(tmp_path, shelf, make):
    paths = _, b, c, d = [*shelf.adapters][:4]

    async def restart():
        """What is fetched by a new process that takes each."""
        shelf.fetched.clear()
        tiers = make(disk=Disk(tmp_path))
        for path in paths:
            assert (await take(tiers, path)).files == shelf.adapters[path].files
        return [*shelf.fetched]

    assert await restart() == paths
    with open(tmp_path / b / WEIGHTS, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\0")  # another weight, as finite as before
    os.truncate(tmp_path / c / WEIGHTS, 1000)
    os.unlink(tmp_path / d / CONFIG)
    Disk(tmp_path)
    assert not (tmp_path / d).exists(), "what is half written was kept"
    assert await restart() == [b, c, d]
    assert await restart() == []


def test_the_disk_has_a_budget_and_its_folder_may_hold_what_is_no_adapter(tmp_path, base, shelf, writers):
    a, b, c, d, e = shelf.adapters
    papers, dead = tmp_path / "documents/letters/2025/one.txt", tmp_path / f"local/mine/{'0' * 64}/half"
    for each in (papers, dead):
        each.parent.mkdir(parents=True)
        each.write_text("text")
    disk = Disk(tmp_path, 3 * writers["numpy"].num_bytes + 2)
    assert not dead.exists()

    def kept():
        assert sum(file.stat().st_size for file in tmp_path.glob("alice/**/*") if file.is_file()) <= disk.num_bytes
        assert papers.exists()
        return {str(each.relative_to(tmp_path)) for each in tmp_path.glob("alice/*/*")}

    for k, path in enumerate((a, b, c)):
        disk.write(path, shelf.adapters[path])
        os.utime(tmp_path / path, (k, k))
    assert kept() == {a, b, c}
    assert disk.read(a, base[0], None).digest == shelf.adapters[a].digest  # used now
    disk.write(d, shelf.adapters[d])
    assert kept() == {a, c, d}
    small = Disk(tmp_path / "small", 1000)
    small.write(e, shelf.adapters[e])
    assert small.read(e, base[0], None) is None
    assert not [*(tmp_path / "small").rglob("*.safetensors")]


async def test_a_full_disk_is_no_error(tmp_path, base, shelf, make, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    (path, *_), tiers = shelf.adapters, make(disk=Disk(tmp_path))
    monkeypatch.setattr(os, "fsync", full)
    assert await take(tiers, path) is shelf.adapters[path]
    assert Disk(tmp_path).read(path, base[0], None) is None
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


async def test_few_downloads_at_a_time_and_one_that_nobody_waits_for_is_given_up(shelf, make):
    (path, *others), tiers = shelf.adapters, make(downloads=2)
    shelf.open.clear()
    leaving = begin(tiers, path, 3)
    waiting = [asyncio.create_task(take(tiers, each)) for each in others]
    await until(lambda: len(shelf.fetched) == 2)
    for each in leaving:
        each.cancel()
    await until(lambda: len(shelf.fetched) == 3)  # there is room for another one
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(shelf.fetched), shelf.cancelled, path in tiers.leases, path in tiers._flights) == (
        3,
        [path],
        False,
        False,
    )
    shelf.open.set()
    await asyncio.gather(*waiting)
    assert set(tiers.host) == set(others)
    assert await take(tiers, path) is shelf.adapters[path]


async def test_accounts_take_turns_at_downloads(shelf, make, writers):
    shelf.adapters |= {f"{account}/{each.digest}": each for account in ("bob/x", "eve/x") for each in writers.values()}
    shelf.open.clear()
    tiers, waiting = make(downloads=2), []
    for account in ("alice", "bob", "eve"):
        for path in (path for path in shelf.adapters if path.startswith(account)):
            waiting += begin(tiers, path, 1)
            await asyncio.sleep(0)
    await until(lambda: len(shelf.fetched) == 2)
    shelf.open.set()
    await asyncio.gather(*waiting)
    order = [path[0] for path in shelf.fetched]  # two of alice's were there before anybody else
    assert (order[:2], sorted(order[2:5]), sorted(order[5:8]), sorted(order[8:11])) == (["a", "a"], *3 * [[*"abe"]])


async def test_nobody_waits_for_ever_for_a_place_among_downloads_that_hang(shelf, make, writers):
    shelf.adapters |= {f"bob/x/{each.digest}": each for each in writers.values()}
    shelf.open.clear()
    first, *others = shelf.adapters
    tiers = make(downloads=1, place_s=0.05, failed_s=0)
    (hanging,) = begin(tiers, first, 1)
    await until(lambda: shelf.fetched)
    results = await asyncio.gather(*(take(tiers, path) for path in others), return_exceptions=True)
    assert {f"{type(each).__name__}: {each}" for each in results} == {
        "StoreError: other downloads took all places for 0.05 s"
    }
    shelf.open.set()
    assert await hanging is shelf.adapters[first]
    for path in others:  # whoever was given up has left no place taken, and no turn
        assert await take(tiers, path) is shelf.adapters[path]
    assert shelf.fetched == [first, *others]
