"""Tiers over a store that this file holds still: who waits, what is kept, what goes, and what is left behind."""

import asyncio
import contextlib
import gc
import os
import time
import weakref

import pytest

from plpkg.adapters import CONFIG, WEIGHTS, InvalidAdapterError
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import NotFoundError, Store, StoreError
from plpkg.serving.service.tiers import Disk, Tiers

from waiting import until


class Shelf:
    """A store in a dict, which answers while ``open`` is set, counts what it is asked for, and can fail."""

    def __init__(self, **adapters):
        self.adapters = {f"alice/{name}/{each.digest}": each for name, each in adapters.items()}
        self.open, self.fetched, self.cancelled = asyncio.Event(), [], []
        self.failures = {}
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


async def take(tiers, path):
    async with tiers.lease(path) as adapter:
        return adapter


def at_rest(tiers):
    assert (dict(tiers.leases), tiers._flights) == ({}, {})
    assert sum(each.num_bytes for each in tiers.host.values()) <= tiers.host_bytes


def test_who_waits_for_the_same_adapter_waits_for_one_download(writers):
    async def main():
        shelf = Shelf(a=writers["numpy"])
        (path,), tiers = shelf.adapters, Tiers(shelf, None)
        shelf.open.clear()
        waiting = [asyncio.create_task(take(tiers, path)) for _ in range(100)]
        await until(lambda: shelf.fetched)
        assert tiers.leases == {path: 100}
        assert not tiers.host
        waiting[0].cancel()
        shelf.open.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(each is writers["numpy"] for each in results[1:])
        assert await take(tiers, path) is writers["numpy"]
        assert shelf.fetched == [path]
        at_rest(tiers)

    asyncio.run(main())


def test_when_all_have_gone_the_download_is_given_up(writers):
    async def main():
        shelf = Shelf(a=writers["numpy"])
        (path,), tiers = shelf.adapters, Tiers(shelf, None, downloads=1)
        shelf.open.clear()
        waiting = [asyncio.create_task(take(tiers, path)) for _ in range(3)]
        await until(lambda: shelf.fetched)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: shelf.cancelled)
        at_rest(tiers)
        assert not tiers.host
        shelf.open.set()
        assert await take(tiers, path) is writers["numpy"], "the one place for downloads was not given back"

    asyncio.run(main())


def test_who_comes_while_a_download_is_being_given_up(writers):
    async def main():
        shelf = Shelf(a=writers["numpy"])
        (path,), tiers = shelf.adapters, Tiers(shelf, None)
        shelf.open.clear()
        first = asyncio.create_task(take(tiers, path))
        await until(lambda: shelf.fetched)
        first.cancel()
        second = asyncio.create_task(take(tiers, path))  # runs in the same turn of the loop
        await asyncio.sleep(0)
        shelf.open.set()
        assert await second is writers["numpy"]
        at_rest(tiers)

    asyncio.run(main())


def test_memory_has_a_budget_and_who_was_used_least_recently_goes(writers):
    async def main():
        shelf, dropped = Shelf(**writers), []
        a, b, c, d, e = shelf.adapters
        tiers = Tiers(shelf, None, host_bytes=3 * writers["numpy"].num_bytes + 2)  # the configurations differ by a byte
        tiers.on_drop = dropped.append
        for path in (a, b, c, a, d):
            await take(tiers, path)
            at_rest(tiers)
        assert (list(tiers.host), dropped) == ([c, a, d], [b])
        async with tiers.lease(c), tiers.lease(a):
            await take(tiers, e)
            assert (list(tiers.host), dropped) == ([c, a, e], [b, d])
            async with tiers.lease(e):
                with pytest.raises(OverloadedError, match=f"{tiers.host_bytes:,} bytes"):
                    await take(tiers, b)
                assert set(tiers.host) == {a, c, e}
            assert await take(tiers, b) is shelf.adapters[b], "an overload was remembered as a failure"
        at_rest(tiers)

    asyncio.run(main())


def test_a_failure_is_remembered_for_a_while_and_fails_nobody_else(writers):
    async def main():
        shelf = Shelf(a=writers["numpy"], b=writers["torch"])
        (a, b), tiers = shelf.adapters, Tiers(shelf, None, failed_s=0.1)
        for error in (StoreError("frozen"), NotFoundError("gone"), InvalidAdapterError(["one", "two"])):
            shelf.failures[a] = error
            shelf.fetched.clear()
            results = await asyncio.gather(*(take(tiers, a) for _ in range(5)), take(tiers, b), return_exceptions=True)
            assert results.pop() is writers["torch"]
            results.append((await asyncio.gather(take(tiers, a), return_exceptions=True))[0])
            assert {(type(each), str(each), str(getattr(each, "reasons", 0))) for each in results} == {
                (type(error), str(error), str(getattr(error, "reasons", 0)))
            }
            assert shelf.fetched.count(a) == 1
            at_rest(tiers)
            assert a not in tiers.host
            del shelf.failures[a]
            await asyncio.sleep(0.1)
            assert await take(tiers, a) is writers["numpy"]
            await tiers.drop("alice/a")
        shelf.failures[a] = StoreError("frozen")
        with pytest.raises(StoreError):
            await take(tiers, a)
        del shelf.failures[a]
        await tiers.drop("alice/a")  # whoever deletes it and puts it back is not told of what failed before
        assert await take(tiers, a) is writers["numpy"]

    asyncio.run(main())


def test_what_was_refused_is_not_kept_in_memory(base, writers):
    """A traceback holds its frames, and they the bytes of the download."""

    class Bytes(bytearray):
        pass

    async def main():
        store, held = Store("memory:///"), []
        path = f"alice/a/{await store.put('alice', 'a', writers['numpy'])}"
        read = store._read

        async def spoiled(path, most):
            content = Bytes(await read(path, most))
            content[-4:] = b"\0\0\xc0\x7f"  # NaN
            held.append(weakref.ref(content))
            return content if path.endswith(WEIGHTS) else bytes(await read(path, most))

        store._read = spoiled
        tiers = Tiers(store, base[0], failed_s=60)
        for _ in range(2):
            with pytest.raises(InvalidAdapterError, match="not finite"):
                await take(tiers, path)
            gc.collect()
            assert held
            assert not any(each() is not None for each in held)

    asyncio.run(main())


def test_equal_adapters_of_two_accounts_are_two(tmp_path, base, writers):
    """Else the time of an answer would tell the one what the other has."""

    async def main():
        shelf = Shelf(a=writers["numpy"])
        (path,) = shelf.adapters
        other = path.replace("alice", "bob")
        shelf.adapters[other] = writers["numpy"]
        tiers = Tiers(shelf, base[0], disk=Disk(tmp_path))
        await take(tiers, path)
        await take(tiers, other)
        assert shelf.fetched == [path, other]
        assert list(tiers.host) == [path, other]
        await tiers.drop("alice/a")
        assert list(tiers.host) == [other]
        assert [str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*/*")] == [other]

    asyncio.run(main())


def test_drop_while_it_is_leased_and_while_it_is_fetched(tmp_path, base, writers):
    async def main():
        shelf, dropped = Shelf(a=writers["numpy"], ab=writers["torch"]), []
        (path, other), tiers = shelf.adapters, Tiers(shelf, base[0], disk=Disk(tmp_path))
        tiers.on_drop = dropped.append
        await take(tiers, other)
        async with tiers.lease(path) as adapter:
            await tiers.drop("alice/a")
            assert (list(tiers.host), dropped) == ([other], [path])
            assert adapter is writers["numpy"]
            assert not (tmp_path / path).exists()
            assert (tmp_path / other).exists()
        at_rest(tiers)
        shelf.open.clear()
        waiting = [asyncio.create_task(take(tiers, path)) for _ in range(3)]
        await until(lambda: len(shelf.fetched) == 3)
        await tiers.drop("alice/a")
        again = asyncio.create_task(take(tiers, path))  # the same path is another flight
        await asyncio.sleep(0)
        shelf.open.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in results} == {NotFoundError}
        assert await again is writers["numpy"]
        at_rest(tiers)

    asyncio.run(main())


def test_drop_while_it_is_written_to_the_disk(tmp_path, base, writers):
    """What is deleted must not come back by a write that had begun."""

    async def main():
        shelf = Shelf(a=writers["numpy"])
        (path,), disk = shelf.adapters, Disk(tmp_path)
        save, begun = type(writers["numpy"]).save, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(adapter, folder):
            loop.call_soon_threadsafe(begun.set)
            time.sleep(0.1)
            save(adapter, folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(writers["numpy"]), "save", slow)
            tiers = Tiers(shelf, base[0], disk=disk)
            waiting = asyncio.create_task(take(tiers, path))
            await asyncio.wait_for(begun.wait(), 10)
            await tiers.drop("alice/a")
            with pytest.raises(NotFoundError, match="deleted while it was fetched"):
                await waiting
        await asyncio.get_running_loop().shutdown_default_executor()
        assert not [*tmp_path.glob("alice/a/*")]
        assert not tiers.host
        at_rest(tiers)

    asyncio.run(main())


def test_the_disk_survives_a_restart_and_rotten_files_are_fetched_again(tmp_path, base, writers):
    async def main():
        shelf = Shelf(**writers)
        a, b, c, d, _ = shelf.adapters
        for path in (a, b, c, d):
            await take(Tiers(shelf, base[0], disk=Disk(tmp_path)), path)
        assert shelf.fetched == [a, b, c, d]
        with open(tmp_path / b / WEIGHTS, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\0")  # another weight, as finite as before
        os.truncate(tmp_path / c / WEIGHTS, 1000)
        os.unlink(tmp_path / d / CONFIG)
        shelf.fetched.clear()
        tiers = Tiers(shelf, base[0], disk=Disk(tmp_path))
        assert not (tmp_path / d).exists(), "what is half written was kept"
        for path in (a, b, c, d):
            adapter = await take(tiers, path)
            assert adapter.files == shelf.adapters[path].files
        assert shelf.fetched == [b, c, d]
        shelf.fetched.clear()
        tiers = Tiers(shelf, base[0], disk=Disk(tmp_path))
        assert [(await take(tiers, path)).digest for path in (a, b, c, d)] == [
            shelf.adapters[path].digest for path in (a, b, c, d)
        ]
        assert shelf.fetched == []

    asyncio.run(main())


def test_the_disk_has_a_budget(tmp_path, base, writers):
    adapters = {f"alice/a/{each.digest}": each for each in writers.values()}
    a, b, c, d, e = adapters
    disk = Disk(tmp_path, 3 * writers["numpy"].num_bytes + 2)

    def kept():
        sizes = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert sizes <= disk.num_bytes
        return {str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*/*")}

    for k, path in enumerate((a, b, c)):
        disk.write(path, adapters[path])
        os.utime(tmp_path / path, (k, k))
    assert kept() == {a, b, c}
    assert disk.read(a, base[0], None).digest == adapters[a].digest  # used now
    disk.write(d, adapters[d])
    assert kept() == {a, c, d}
    small = Disk(tmp_path / "small", 1000)
    small.write(e, adapters[e])
    assert small.read(e, base[0], None) is None
    assert not [*(tmp_path / "small").rglob("*.safetensors")]


def test_a_full_disk_is_no_error(tmp_path, base, writers, monkeypatch):
    async def main():
        shelf = Shelf(a=writers["numpy"])
        (path,), tiers = shelf.adapters, Tiers(shelf, base[0], disk=Disk(tmp_path))

        def full(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        assert await take(tiers, path) is writers["numpy"]
        assert Disk(tmp_path).read(path, base[0], None) is None
        assert not [each for each in tmp_path.rglob("*") if each.is_file()]

    asyncio.run(main())


def test_few_downloads_at_a_time(writers):
    async def main():
        shelf = Shelf(**writers)
        tiers = Tiers(shelf, None, downloads=2)
        shelf.open.clear()
        waiting = [asyncio.create_task(take(tiers, path)) for path in shelf.adapters]
        await until(lambda: len(shelf.fetched) == 2)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waiting[:1]), 0.02)
        assert len(shelf.fetched) <= 3  # the first was cancelled, and made room
        shelf.open.set()
        await asyncio.gather(*waiting[1:])
        assert len(tiers.host) == len(writers) - 1
        at_rest(tiers)

    asyncio.run(main())
