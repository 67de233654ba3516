"""One store, three places: an S3 server, a directory, memory. What is current changes last, whenever a write dies."""

import asyncio
import contextlib
import errno
import time
from types import SimpleNamespace

import obstore
import peft
import pytest
import torch
from safetensors.torch import load_file

from plpkg.adapters import CONFIG, WEIGHTS, AdapterLimits, InvalidAdapterError
from plpkg.backbones import load_backbone
from plpkg.files.checkpoints import private_folder
from plpkg.serving.service import known as module
from plpkg.serving.service.http.names import Names
from plpkg.serving.service.store import UNFINISHED, AccountFullError, NotFoundError, Store, StoreError


@pytest.fixture(params=["s3", "directory", "memory"])
def location(request, tmp_path):
    """What a Store is made of, twice the same place."""
    if request.param == "s3":
        return request.getfixturevalue("url")
    return tmp_path / "store" if request.param == "directory" else obstore.store.MemoryStore()


async def test_put_current_versions_fetch_delete(location, base, writers):
    store, other, version = Store(location), Store(location), writers["numpy"].digest
    assert await store.versions("alice") == {}
    for name in ("a", "ab"):
        assert await store.put("alice", name, writers["numpy"]) == version
    await store.put("bob", "a", writers["torch"])
    for each in (store, other):
        assert await each.current("alice", "a") == version
        assert (await each.fetch(f"alice/a/{version}", base[0])).files == writers["numpy"].files
        assert await each.versions("alice") == {"a": [version], "ab": [version]}
    await store.delete("alice", "a")
    for call in (store.current, store.delete):
        with pytest.raises(NotFoundError, match="'alice' has no adapter 'a'"):
            await call("alice", "a")
    with pytest.raises(NotFoundError):
        await store.fetch(f"alice/a/{version}", base[0])
    assert await store.versions("alice") == {"ab": [version]}
    assert await store.versions("bob") == {"a": [writers["torch"].digest]}
    assert await store.current("alice", "ab") == version


async def test_the_last_upload_wins_and_the_others_stay(location, base, writers):
    store = Store(location)
    for name in ("numpy", "torch", "numpy"):
        assert await store.put("alice", "mine", writers[name]) == writers[name].digest
        for each in (store, Store(location)):
            assert await each.current("alice", "mine") == writers[name].digest
        await asyncio.sleep(0.01)  # a directory's times may be this coarse
    digests = [writers[name].digest for name in ("numpy", "torch")]
    versions = (await store.versions("alice"))["mine"]
    assert sorted(versions) == sorted(digests)
    if "://" not in str(location):  # S3 knows whole seconds
        assert versions == digests, "the oldest is not the first"
    for digest in digests:
        assert (await store.fetch(f"alice/mine/{digest}", base[0])).digest == digest


WRITES = [UNFINISHED, WEIGHTS, CONFIG, "current"]


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("replaced", [True, False])
async def test_a_put_that_dies(step, replaced, location, base, writers, monkeypatch):
    """Between any two writes, whose order is part of it. The next upload or start removes what is left."""
    put, old, new, other = obstore.put_async, *(writers[name] for name in ("numpy", "torch", "scipy"))
    for account in ("alice", "bob", "carol"):
        store, written = Store(location, max_versions=2), []
        if replaced:
            await store.put(account, "mine", old)

        async def dying(objects, path, *arguments, written=written, **options):
            if len(written) == step:
                raise KeyboardInterrupt
            written.append(path.rpartition("/")[2])
            return await put(objects, path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put_async", dying)
            patch.setattr(obstore, "delete_async", dying)  # of the mark, the last of all
            with pytest.raises(KeyboardInterrupt):
                await store.put(account, "mine", new)
        assert written == WRITES[:step]
    visible = [old.digest] * replaced + [new.digest] * (step == 4)
    for each in (store, store := Store(location, max_versions=2)):
        assert sorted((await each.versions("alice")).get("mine", [])) == sorted(visible)
        with contextlib.nullcontext() if visible else pytest.raises(NotFoundError):
            assert await Store(location).current("alice", "mine") == visible[-1]
    if len(visible) < 2:  # what does not count leaves room
        await store.put("alice", "other", other)
    else:
        with pytest.raises(AccountFullError):
            await store.put("alice", "other", other)
    if replaced or step == 4:
        await store.delete("bob", "mine")
    await store.sweep()
    kept = {"alice": {"mine": {*visible}} if visible else {}, "carol": {"mine": {*visible}} if visible else {}}
    if len(visible) < 2:
        kept["alice"]["other"] = {other.digest}
    names = ((account, *pair) for account, theirs in kept.items() for pair in theirs.items())
    expected = {
        f"{account}/{name}/{file}"
        for account, name, digests in names
        for file in ("current", *(f"{digest}/{part}" for digest in digests for part in (CONFIG, WEIGHTS)))
    }
    assert {each["path"] for each in obstore.list(store._objects).collect()} == expected
    assert await store.put("carol", "mine", new) == await Store(location).current("carol", "mine")
    assert (await store.fetch(f"carol/mine/{new.digest}", base[0])).files == new.files


async def test_an_upload_that_another_process_takes_for_dead(location, base, writers, monkeypatch):
    store, put = Store(location), obstore.put_async
    await store.put("alice", "mine", writers["numpy"])

    async def late(objects, path, *arguments, **options):
        result = await put(objects, path, *arguments, **options)
        if path.endswith(CONFIG):
            await Store(location).sweep()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put_async", late)
        with pytest.raises(StoreError, match="another process has removed"):
            await store.put("alice", "mine", writers["torch"])
    assert await Store(location).current("alice", "mine") == writers["numpy"].digest
    assert await store.put("alice", "mine", writers["torch"]) == writers["torch"].digest


async def test_another_process_may_sweep_at_the_same_time(location, monkeypatch):
    store, delete = Store(location), obstore.delete_async
    await obstore.put_async(store._objects, f"alice/mine/{'0' * 64}/{CONFIG}", b"left")

    async def late(objects, paths):
        await delete(objects, paths)
        await delete(objects, paths)

    monkeypatch.setattr(obstore, "delete_async", late)
    assert await store.sweep() == {}


async def test_a_directory_keeps_neither_what_was_staged_nor_empty_folders(tmp_path, writers):
    """obstore writes a file under another name first, and lists no such names."""
    store, digest = Store(tmp_path), writers["numpy"].digest
    for name in ("dead", "staged", "mine"):
        await store.put("alice", name, writers["numpy"])
        (tmp_path / f"alice/{name}/current#1").write_text(digest)
        (tmp_path / f"alice/{name}/{digest}/{WEIGHTS}#12").write_bytes(b"half")
    (tmp_path / "alice/dead/current").unlink()
    foreign = tmp_path / "letters/to/ann#1"
    private_folder(tmp_path / f"carol/first/{'0' * 64}")
    foreign.parent.mkdir(parents=True)
    foreign.write_text("Dear")
    await store.delete("alice", "staged")
    assert not (tmp_path / "alice/staged").exists()
    await store.put("alice", "mine", writers["numpy"])
    assert sorted(each.name for each in tmp_path.glob("alice/**/*")) == sorted(
        ["mine", "current", digest, CONFIG, WEIGHTS]
    )
    await store.delete("alice", "mine")
    await Store(tmp_path).sweep()
    assert [*tmp_path.rglob("*")] == [tmp_path / "letters", foreign.parent, foreign]


async def test_a_directory_that_takes_no_more_says_why_and_is_as_it_was(tmp_path, writers):
    resource = pytest.importorskip("resource")  # Windows has none
    store, (soft, hard) = Store(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    await store.put("alice", "mine", writers["numpy"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(writers["torch"].files[WEIGHTS]) - 1, hard))
    try:
        with pytest.raises(StoreError, match="does not answer") as refused:
            await store.put("alice", "mine", writers["torch"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG
    assert await Store(tmp_path).current("alice", "mine") == writers["numpy"].digest
    assert await store.sweep() == {"alice": {"mine": [writers["numpy"].digest]}}
    assert not [*tmp_path.glob(f"alice/mine/{writers['torch'].digest}")]


async def test_a_name_of_a_full_account_gives_up_its_oldest_version(location, writers):
    store, (a, b, c, *_) = Store(location, max_versions=2), writers.values()
    for name, adapter in (("x", a), ("y", b)):
        await store.put("alice", name, adapter)
    for new in (b, c):  # the only version of its name, each time
        old = await store.current("alice", "x")
        await store.put("alice", "x", new)
        assert await Store(location).versions("alice") == {"x": [new.digest], "y": [b.digest]}
        with pytest.raises(NotFoundError):
            await store.current("alice", "x", old)
    assert await store.current("alice", "y") == b.digest


async def test_an_account_has_a_limit(location, writers):
    store, (a, b, c, *_) = Store(location, max_versions=2), writers.values()
    await store.put("alice", "x", a)
    await store.put("alice", "x", b)
    with pytest.raises(AccountFullError, match="account 'alice' has 2 versions"):
        await store.put("alice", "y", c)
    await store.put("alice", "x", a)  # once more the same is no new one
    await store.put("bob", "x", a)
    assert await store.current("alice", "x") == a.digest
    with pytest.raises(ValueError, match=f"{a.digest} is the current version of 'x'"):
        await store.delete("alice", "x", a.digest)
    for version in ("", "..", "0" * 64, c.digest):
        with pytest.raises(NotFoundError):
            await store.delete("alice", "x", version)
    await store.delete("alice", "x", b.digest)  # one of a name's versions makes room
    await store.put("alice", "x", c)
    assert sorted((await Store(location).versions("alice"))["x"]) == sorted([a.digest, c.digest])
    await store.delete("alice", "x")
    tasks = [store.put("alice", f"x{k}", each) for k, each in enumerate((a, b, c))]  # at once
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in results] == [str, str, AccountFullError]
    assert sum(map(len, (await store.versions("alice")).values())) == 2


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a b", "é", "a" * 65, "a\n", "%2e", "a@b"])
async def test_names_that_are_none(name, tmp_path, writers):
    store = Store(tmp_path / "store")
    for names in ((name, "a"), ("a", name)):
        for call in (store.put(*names, writers["numpy"]), store.current(*names), store.delete(*names)):
            with pytest.raises(ValueError, match="a name has up to 64 letters"):
                await call
    assert [*tmp_path.rglob("*")] == [tmp_path / "store"]


async def test_what_is_current_is_asked_again_after_a_while(location, writers, monkeypatch):
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    cached, eager, brief, other = (Store(location, refresh_s=seconds) for seconds in (60, 0, 5, 5))
    for store in (cached, eager):
        with pytest.raises(NotFoundError):
            await store.current("alice", "mine")
    await other.put("alice", "mine", writers["numpy"])
    with pytest.raises(NotFoundError):
        await cached.current("alice", "mine")
    for store in (eager, brief):
        assert await store.current("alice", "mine") == writers["numpy"].digest
    await other.put("alice", "mine", writers["torch"])
    assert await other.current("alice", "mine") == writers["torch"].digest  # its own write, at once
    clock.now += 4.9
    assert await brief.current("alice", "mine") == writers["numpy"].digest
    clock.now += 0.2
    assert await brief.current("alice", "mine") == writers["torch"].digest
    await cached.put("alice", "mine", writers["numpy"])
    assert await cached.current("alice", "mine") == writers["numpy"].digest


@pytest.mark.parametrize("how", ["the version", "the name", "the name, which is uploaded again"])
async def test_a_version_that_another_process_deletes(how, location, writers, monkeypatch):
    """It may be in memory here, or on disk, and would be served for ever."""
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store, other, absent = Store(location, refresh_s=60), Store(location), f"mine@{'0' * 64}"
    names, (old, new) = Names(store, "base"), (writers["numpy"], writers["torch"])
    for adapter in (old, new):
        await other.put("alice", "mine", adapter)
    wanted = f"mine@{old.digest}"
    for _ in range(2):
        assert await names.path("alice", wanted) == f"alice/mine/{old.digest}"
    await other.delete("alice", "mine", old.digest if how == "the version" else None)
    if how.endswith("again"):
        await other.put("alice", "mine", new)
    clock.now += 59
    assert await names.path("alice", wanted) == f"alice/mine/{old.digest}"
    clock.now += 2
    for each in (wanted, absent):
        with pytest.raises(NotFoundError):
            await names.path("alice", each)
    for adapter in (old, new):  # what this process writes, it knows at once
        await store.put("alice", "mine", adapter)
    assert await names.path("alice", wanted) == f"alice/mine/{old.digest}"
    await store.delete("alice", "mine", old.digest)
    with pytest.raises(NotFoundError):
        await names.path("alice", wanted)


@pytest.mark.parametrize("then", ["uploaded", "deleted"])
async def test_what_was_read_before_a_write_is_not_current(then, tmp_path, writers, monkeypatch):
    store, gate, has_read = Store(tmp_path), asyncio.Event(), asyncio.Event()
    await store.put("local", "mine", writers["numpy"])
    store._known._said.clear()  # as after refresh_s
    read = store._range

    async def held(*arguments):
        result = await read(*arguments)
        has_read.set()
        await gate.wait()
        return result

    monkeypatch.setattr(store, "_range", held)
    slow = asyncio.create_task(store.current("local", "mine"))
    await has_read.wait()
    await (store.put("local", "mine", writers["torch"]) if then == "uploaded" else store.delete("local", "mine"))
    gate.set()
    await slow
    with pytest.raises(NotFoundError) if then == "deleted" else contextlib.nullcontext():
        assert await store.current("local", "mine") == writers["torch"].digest


@pytest.mark.parametrize("content", [b"", b"numpy", b"g" * 64, b"\xff" * 64, b"a" * 65])
async def test_a_current_that_names_no_version(content, location):
    store = Store(location)
    await obstore.put_async(store._objects, "alice/mine/current", content)
    with pytest.raises(StoreError, match="alice/mine/current" if content else "[Rr]ange"):
        await store.current("alice", "mine")


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (CONFIG, lambda old: old.replace(b'"LORA"', b'"LOHA"'), "LOHA"),
        (CONFIG, lambda old: old + b" " * 2**20, "bytes, at most"),
        (CONFIG, lambda old: old + b" ", "not the version that it was stored as"),
        (WEIGHTS, lambda old: old[:-1], "bytes"),
        (WEIGHTS, lambda old: old + b"\0", "bytes"),
        (WEIGHTS, lambda old: old + b"\0" * 200_000, "368,976 bytes, at most 300,000"),
        (WEIGHTS, lambda old: old[:-4] + b"\0\0\xc0\x7f", "not finite"),
        (WEIGHTS, lambda old: old[:-4] + b"\0\0\0\0", "not the version that it was stored as"),
        (WEIGHTS, lambda old: old[:-1] + bytes([old[-1] ^ 1]), "not finite|not the version"),
        (WEIGHTS, lambda old: b"\xff" * 8 + old[8:], "give their header"),
        (WEIGHTS, lambda old: old[:4], "4 bytes"),
        (WEIGHTS, lambda old: b"", "[Rr]ange"),
    ],
)
async def test_what_was_changed_in_the_store(file, change, reason, location, base, writers):
    store = Store(location)
    path = f"alice/mine/{await store.put('alice', 'mine', writers['numpy'])}"
    content = change(bytes(writers["numpy"].files[file]))
    await obstore.put_async(store._objects, f"{path}/{file}", content)
    with pytest.raises(InvalidAdapterError if content else StoreError, match=reason):
        await store.fetch(path, base[0], AdapterLimits(max_bytes=300_000))


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("part", [0, 0.5])
async def test_an_upload_mends_what_is_cut_off_in_the_store(part, file, location, base, writers):
    """By a power cut, which leaves a directory's newest files empty, or by a copy that was interrupted."""
    store, adapter = Store(location), writers["numpy"]
    path = f"alice/mine/{await store.put('alice', 'mine', adapter)}"
    content = bytes(adapter.files[file])
    await obstore.put_async(store._objects, f"{path}/{file}", content[: int(part * len(content))])
    await store.put("alice", "mine", adapter)
    assert (await store.fetch(path, base[0])).files == adapter.files


def test_plain_peft_loads_what_a_directory_holds(tmp_path, writers):
    version = asyncio.run(Store(tmp_path).put("alice", "mine", writers["numpy"]))
    model = peft.PeftModel.from_pretrained(load_backbone("plpkg-small")[0], tmp_path / "alice/mine" / version)
    stored = load_file(tmp_path / "alice/mine" / version / WEIGHTS)
    for name, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(value, stored[name])
    assert len(stored) == 2 * len(writers["numpy"].factors)


@pytest.mark.parametrize("changes", [dict(timeout_s=0), dict(refresh_s=-1), dict(stale_s=-1), dict(max_versions=0)])
def test_settings_out_of_range(changes, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        Store(tmp_path, **changes)


@pytest.mark.parametrize("location", ["http://", "s3://", "ftp://host/a", "file://", "a\0b", "\ud800", None, 5])
def test_what_is_no_store(location):
    with pytest.raises(ValueError, match=r"no store|no folder|must be a URL") as refused:
        Store(location)
    assert repr(location) in str(refused.value)


async def test_a_memory_store_by_its_url(writers):
    assert await Store("memory:///").put("alice", "mine", writers["numpy"]) == writers["numpy"].digest
