"""One store, three places: an S3 server, a directory, memory. What is current changes last, whenever a write dies."""

import asyncio
import time

import obstore
import peft
import pytest
import torch
from safetensors.torch import load_file

from plpkg.adapters import CONFIG, WEIGHTS, InvalidAdapterError
from plpkg.backbones import load_backbone
from plpkg.serving.service.store import AccountFullError, NotFoundError, Store, StoreError


@pytest.fixture(params=["s3", "directory", "memory"])
def location(request, tmp_path):
    """What a Store is made of, twice the same place."""
    if request.param == "s3":
        return request.getfixturevalue("url")
    return tmp_path / "store" if request.param == "directory" else obstore.store.MemoryStore()


def test_put_current_versions_fetch_delete(location, base, writers):
    async def main():
        store, other = Store(location), Store(location)
        assert await store.versions("alice") == {}
        for name in ("a", "ab"):
            assert await store.put("alice", name, writers["numpy"]) == writers["numpy"].digest
        await store.put("bob", "a", writers["torch"])
        for each in (store, other):
            version = await each.current("alice", "a")
            assert version == writers["numpy"].digest
            adapter = await each.fetch(f"alice/a/{version}", base[0])
            assert adapter.files == writers["numpy"].files
            assert await each.versions("alice") == {"a": [version], "ab": [version]}
        await store.delete("alice", "a")
        with pytest.raises(NotFoundError, match="'alice' has no adapter 'a'"):
            await store.current("alice", "a")
        with pytest.raises(NotFoundError):
            await store.fetch(f"alice/a/{version}", base[0])
        with pytest.raises(NotFoundError, match="'alice' has no adapter 'a'"):
            await store.delete("alice", "a")
        assert await store.versions("alice") == {"ab": [version]}
        assert await store.versions("bob") == {"a": [writers["torch"].digest]}
        assert await store.current("alice", "ab") == version

    asyncio.run(main())


def test_the_last_upload_wins_and_the_others_stay(location, base, writers):
    async def main():
        store = Store(location)
        for name in ("numpy", "torch", "numpy"):
            assert await store.put("alice", "mine", writers[name]) == writers[name].digest
            assert await store.current("alice", "mine") == await Store(location).current("alice", "mine")
            assert await store.current("alice", "mine") == writers[name].digest
            await asyncio.sleep(0.01)  # a directory's times may be this coarse
        digests = [writers[name].digest for name in ("numpy", "torch")]
        versions = (await store.versions("alice"))["mine"]
        assert sorted(versions) == sorted(digests)
        if "://" not in str(location):  # S3 knows whole seconds
            assert versions == digests, "the oldest is not the first"
        for name in ("numpy", "torch"):
            assert (await store.fetch(f"alice/mine/{writers[name].digest}", base[0])).digest == writers[name].digest

    asyncio.run(main())


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_put_that_dies(step, replaced, location, base, writers, monkeypatch):
    """The order of the writes is part of it: weights, configuration, current."""
    put, written = obstore.put_async, []

    async def main():
        store = Store(location, max_versions=2)
        if replaced:
            await store.put("alice", "mine", writers["numpy"])

        async def dying(objects, path, *arguments, **options):
            if len(written) == step:
                raise OSError("power cut")
            written.append(path.rpartition("/")[2])
            return await put(objects, path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put_async", dying)
            with pytest.raises(StoreError, match="power cut"):
                await store.put("alice", "mine", writers["torch"])
        assert written == [WEIGHTS, CONFIG, "current"][:step]
        for each in (store, Store(location)):
            if replaced:
                assert await each.current("alice", "mine") == writers["numpy"].digest
            else:
                with pytest.raises(NotFoundError):
                    await each.current("alice", "mine")
            visible = [writers["numpy"].digest] * replaced + [writers["torch"].digest] * (step == 2)
            assert sorted((await each.versions("alice")).get("mine", [])) == sorted(visible)
        if step < 2:
            with pytest.raises(NotFoundError):
                await store.fetch(f"alice/mine/{writers['torch'].digest}", base[0])
        again = Store(location, max_versions=2)
        assert await again.put("alice", "mine", writers["torch"]) == await again.current("alice", "mine")
        assert (await again.fetch(f"alice/mine/{writers['torch'].digest}", base[0])).files == writers["torch"].files

    asyncio.run(main())


@pytest.mark.parametrize("step", [1, 2])
def test_what_a_dead_write_left_can_be_deleted(step, location, writers, monkeypatch):
    """Or it would count against the account for ever."""
    put, written = obstore.put_async, []

    async def dying(*arguments, **options):
        if len(written) == step:
            raise OSError("power cut")
        written.append(arguments[1])
        return await put(*arguments, **options)

    async def main():
        store = Store(location, max_versions=1)
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put_async", dying)
            with pytest.raises(StoreError, match="power cut"):
                await store.put("alice", "mine", writers["torch"])
        await store.delete("alice", "mine")
        assert not obstore.list(store._objects).collect()
        await store.put("alice", "other", writers["numpy"])

    asyncio.run(main())


def test_an_account_has_a_limit(location, writers):
    async def main():
        store, (a, b, c, *_) = Store(location, max_versions=2), writers.values()
        await store.put("alice", "x", a)
        await store.put("alice", "x", b)
        for name in ("x", "y"):
            with pytest.raises(AccountFullError, match="account 'alice' has 2 versions"):
                await store.put("alice", name, c)
        await store.put("alice", "x", a)  # once more the same is no new one
        await store.put("bob", "x", a)
        assert await store.current("alice", "x") == a.digest
        await store.delete("alice", "x")
        tasks = [store.put("alice", f"x{k}", each) for k, each in enumerate((a, b, c))]  # at once
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [str, str, AccountFullError]
        assert sum(map(len, (await store.versions("alice")).values())) == 2

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a b", "é", "a" * 65, "a\n", "%2e", "a@b"])
def test_names_that_are_none(name, tmp_path, writers):
    async def main():
        store = Store(tmp_path / "store")
        for account, adapter in ((name, "a"), ("a", name)):
            for call in (store.put(account, adapter, writers["numpy"]), store.current(account, adapter)):
                with pytest.raises(ValueError, match="a name has up to 64 letters"):
                    await call
            with pytest.raises(ValueError, match="a name has up to 64 letters"):
                await store.delete(account, adapter)
        assert [*tmp_path.rglob("*")] == [tmp_path / "store"]

    asyncio.run(main())


def test_what_is_current_is_asked_again_after_a_while(location, writers):
    async def main():
        cached, eager, other = Store(location, refresh_s=60), Store(location, refresh_s=0), Store(location)
        for store in (cached, eager):
            with pytest.raises(NotFoundError):
                await store.current("alice", "mine")
        await other.put("alice", "mine", writers["numpy"])
        with pytest.raises(NotFoundError):
            await cached.current("alice", "mine")
        assert await eager.current("alice", "mine") == writers["numpy"].digest
        brief = Store(location, refresh_s=0.05)
        assert await brief.current("alice", "mine") == writers["numpy"].digest
        await other.put("alice", "mine", writers["torch"])
        assert await other.current("alice", "mine") == writers["torch"].digest  # its own write, at once
        time.sleep(0.06)
        assert await brief.current("alice", "mine") == writers["torch"].digest
        await cached.put("alice", "mine", writers["numpy"])
        assert await cached.current("alice", "mine") == writers["numpy"].digest

    asyncio.run(main())


@pytest.mark.parametrize("content", [b"", b"numpy", b"g" * 64, b"\xff" * 64, b"a" * 65])
def test_a_current_that_names_no_version(content, location):
    async def main():
        store = Store(location)
        await obstore.put_async(store._objects, "alice/mine/current", content)
        with pytest.raises(StoreError, match="alice/mine/current" if content else "[Rr]ange"):
            await store.current("alice", "mine")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (CONFIG, lambda old: old.replace(b'"LORA"', b'"LOHA"'), "LOHA"),
        (CONFIG, lambda old: old + b" " * 2**20, "bytes, at most"),
        (CONFIG, lambda old: old + b" ", "not the version that it was stored as"),
        (WEIGHTS, lambda old: old[:-1], "bytes"),
        (WEIGHTS, lambda old: old + b"\0", "bytes"),
        (WEIGHTS, lambda old: old[:-4] + b"\0\0\xc0\x7f", "not finite|not the version"),
        (WEIGHTS, lambda old: old[:-1] + bytes([old[-1] ^ 1]), "not finite|not the version"),
        (WEIGHTS, lambda old: b"\xff" * 8 + old[8:], "give their header"),
        (WEIGHTS, lambda old: old[:4], "4 bytes"),
        (WEIGHTS, lambda old: b"", "[Rr]ange"),
    ],
)
def test_what_was_changed_in_the_store(file, change, reason, location, base, writers):
    async def main():
        store = Store(location)
        version = await store.put("alice", "mine", writers["numpy"])
        path = f"alice/mine/{version}"
        content = change(bytes(writers["numpy"].files[file]))
        await obstore.put_async(store._objects, f"{path}/{file}", content)
        with pytest.raises(InvalidAdapterError if content else StoreError, match=reason):
            await store.fetch(path, base[0])

    asyncio.run(main())


def test_plain_peft_loads_what_a_directory_holds(tmp_path, writers, tools):
    version = asyncio.run(Store(tmp_path).put("alice", "mine", writers["numpy"]))
    model = peft.PeftModel.from_pretrained(load_backbone("plpkg-small")[0], tmp_path / "alice/mine" / version)
    stored = load_file(tmp_path / "alice/mine" / version / WEIGHTS)
    for name, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(value, stored[name])
    assert len(stored) == 2 * len(writers["numpy"].factors)


@pytest.mark.parametrize("changes", [dict(timeout_s=0), dict(refresh_s=-1), dict(max_versions=0)])
def test_settings_out_of_range(changes, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        Store(tmp_path, **changes)


def test_a_memory_store_by_its_url(writers):
    assert asyncio.run(Store("memory:///").put("alice", "mine", writers["numpy"])) == writers["numpy"].digest
