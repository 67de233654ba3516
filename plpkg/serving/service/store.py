"""Where adapters are kept: an S3-compatible store, a directory, or memory, through obstore; the files are plain PEFT's.

``ACCOUNT/NAME/SHA256/`` holds both files of a version, which is named by its content and never changes: the weights are
written first, the configuration last. ``ACCOUNT/NAME/current`` names the version that the name alone means; the last
upload wins. ``ACCOUNT/NAME/SHA256/unfinished`` is there from before the first of an upload's writes until after the
last. A version that has it and is not current does not count: its upload has died, and the next one removes it.

Left out: locks between processes. Of two that upload under one account at once, one may have to try again.
"""

import asyncio
import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import torch
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from plpkg.adapters import (
    CONFIG,
    WEIGHTS,
    Adapter,
    AdapterLimits,
    InvalidAdapterError,
    inspect,
    read_adapter,
)
from plpkg.files.checkpoints import private_folder
from plpkg.files.untrusted import MAX_CONFIG_BYTES, header_length
from plpkg.serving.service.known import DamagedError, Known, StoreError
from plpkg.serving.service.places import folder_of, prune
from plpkg.validation import number, whole_number

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION = re.compile("[0-9a-f]{64}")
UNFINISHED = "unfinished"
OF_VERSION = re.compile(f"({NAME.pattern}/{NAME.pattern})/({VERSION.pattern})/[^/]+")
STAGED = re.compile(rf"({re.escape(WEIGHTS)}|{re.escape(CONFIG)}|{UNFINISHED}|current)#\d+")
"""How obstore names a file of ours while it writes it."""
START_BYTES = 2**17
"""Read of the weights at first: the header of most, that of a 13B adapted everywhere among them (73 kB)."""


class NotFoundError(LookupError):
    """There is no such adapter, or version of it, in the account."""


class AccountFullError(RuntimeError):
    """The account has as many versions of adapters as it may."""


class Store:
    """Adapters by account and name.

    Parameters
    ----------
    location
        A URL that obstore knows (``s3://bucket/prefix``, ``memory:///``), whose settings come from the environment
        (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, …), a directory, or one of obstore's stores.
    timeout_s
        Of a request to the store at a URL, body included. obstore tries it three times, also where a body breaks off.
    refresh_s
        For how long it is known which version is current; what this object writes, it knows at once.
    stale_s
        For how long it is taken to be still that one, while the store does not answer. A change by another process
        is seen after ``refresh_s`` if the store answers, and after ``stale_s`` at the latest.
    max_versions
        Of an account; Workers AI began with 30.
    """

    def __init__(self, location, *, timeout_s=30.0, refresh_s=5.0, stale_s=300.0, max_versions=30) -> None:
        number("timeout_s", timeout_s, 0, open_low=True)
        self._known = Known(refresh_s, stale_s)
        self.max_versions = whole_number("max_versions", max_versions, 1)
        self._objects = _objects(location, timeout_s)
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def put(self, account: str, name: str, adapter: Adapter) -> str:
        """Keep an adapter under a name, which may be taken; its version.

        Where the account has as many versions as it may, the name's oldest one goes.

        Raises
        ------
        ValueError
            The name is none.
        AccountFullError
            The account has as many versions as it may, and none of this name.
        StoreError
            The store does not answer; what was current still is.
        """
        place = _place(account, name)
        under = f"{place}/{adapter.digest}"
        async with self._writing[account]:
            swept = await self.sweep(account)
            versions = swept.get(account, {})
            is_new = adapter.digest not in versions.get(name, ())
            is_full = is_new and sum(map(len, versions.values())) >= self.max_versions
            if is_full and name not in versions:
                raise AccountFullError(
                    f"account {account!r} has {self.max_versions} versions of adapters, the most it may: delete one, "
                    "NAME@SHA256, or a name with all of them"
                )
            await self._write(under, adapter, marked=is_new)
            await _call(self._put(f"{place}/current", adapter.digest.encode()))
            self._known.change(under, adapter.digest)
            self._known.change(place, adapter.digest)
            if is_new:
                with contextlib.suppress(StoreError):  # the next upload removes it
                    await _call(obstore.delete_async(self._objects, f"{under}/{UNFINISHED}"))
            if is_full:
                oldest = versions[name][0]
                with contextlib.suppress(StoreError):  # the next upload does it
                    await self._remove(account, f"{place}/{oldest}", CONFIG)
        return adapter.digest

    async def _write(self, under: str, adapter: Adapter, *, marked: bool) -> None:
        """Write both files of a version, the weights first; one that is ``marked`` does not count meanwhile."""
        mark = f"{under}/{UNFINISHED}"
        try:
            if marked:
                await _call(self._put(mark, b""))
            for file in (WEIGHTS, CONFIG):
                path = f"{under}/{file}"
                content = bytes(adapter.files[file])
                try:
                    await _call(self._put(path, content, mode="create"))
                except AlreadyExistsError:  # of this content, as its path says, unless it was cut off
                    there = await _call(obstore.head_async(self._objects, path))
                    if there["size"] != len(content):
                        await _call(self._put(path, content))
            if marked:
                await _call(obstore.head_async(self._objects, mark))
        except NotFoundError:
            raise StoreError("another process has removed the upload, as one that had died") from None

    async def current(self, account: str, name: str, version: str | None = None) -> str:
        """The version that a name means, or the one asked for. NotFoundError if there is no such adapter or version."""
        place = _place(account, name)
        current = await self._known.get(place, lambda: self._named(place))
        if current is None:
            raise NotFoundError(f"account {account!r} has no adapter {name!r}")
        if version in (None, current):
            return current
        under = f"{place}/{stored_version(version)}"
        if await self._known.get(under, lambda: self._there(under)) is None:
            raise NotFoundError(f"account {account!r} has no such version of {name!r}")
        return version

    async def _there(self, under: str) -> str | None:
        """A version's path, if the version is in the store."""
        try:
            await self._range(f"{under}/{CONFIG}", 1)
        except NotFoundError:
            return None
        return under

    async def _named(self, place: str) -> str | None:
        """The version that a name means, as the store says."""
        try:
            _, content = await self._range(f"{place}/current", 65)
        except NotFoundError:
            return None
        version = content.decode("ascii", "replace")
        if not VERSION.fullmatch(version):
            raise DamagedError(f"{place}/current names no version, but {version!r}")
        return version

    async def versions(self, account: str) -> Mapping[str, list[str]]:
        """All versions that an account has, by name, the oldest first."""
        found, _ = await self._listed(_place(account))
        return found.get(account, {})

    async def _listed(self, account: str | None) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
        """The versions that count, by account and name, and the objects of those that do not."""
        objects = await _call(obstore.list(self._objects, prefix=account).collect_async())
        paths = [each["path"] for each in sorted(objects, key=lambda each: each["last_modified"])]
        files: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for path in paths:
            match = OF_VERSION.fullmatch(path)
            if match:
                place, version = match.groups()
                files[place, version].append(path)
        there = set(paths)
        found: dict[str, dict[str, list[str]]] = {}
        left: list[str] = []
        for (place, version), theirs in files.items():
            mark = f"{place}/{version}/{UNFINISHED}"
            counts = {f"{place}/{version}/{CONFIG}", f"{place}/current"} <= there
            if counts and mark in there:  # its upload has died, unless only the mark is left
                counts = await self._named(place) == version
            if not counts:
                left += theirs
                continue
            account, name = place.split("/")
            found.setdefault(account, {}).setdefault(name, []).append(version)
            if mark in there:
                left.append(mark)
        return found, left

    async def sweep(self, account: str | None = None) -> Mapping[str, Mapping[str, list[str]]]:
        """Remove what uploads and deletions that died have left, of one account or of all; the versions there are.

        No upload may be under way.
        """
        found, left = await self._listed(account)
        if left:
            with contextlib.suppress(NotFoundError):  # another process removes them, too
                await _call(obstore.delete_async(self._objects, left))
        if self.folder:
            await asyncio.to_thread(prune, self.folder, account or "*", STAGED)
        return found

    async def delete(self, account: str, name: str, version: str | None = None) -> None:
        """Remove a name and all its versions, or one version that is not its current one.

        Raises
        ------
        NotFoundError
            There is no such adapter, or version of it.
        ValueError
            The name means this version.
        """
        place = _place(account, name)
        if version is None:
            under, first = place, "current"
        else:
            under, first = f"{place}/{stored_version(version)}", CONFIG
        async with self._writing[account]:
            if version is not None and version == await self._named(place):
                raise ValueError(
                    f"{version} is the current version of {name!r}: upload another one, or delete the name"
                )
            if not await self._remove(account, under, first):
                raise NotFoundError(f"account {account!r} has no adapter {name!r}, or no such version of it")

    async def _remove(self, account: str, under: str, first: str) -> bool:
        """Remove what is under a path; whether something was. ``first`` goes first: without it the others count not."""
        objects = await _call(obstore.list(self._objects, prefix=under).collect_async())
        paths = {each["path"] for each in objects}
        head = {f"{under}/{first}"} & paths
        for some in (head, paths - head):
            if some:
                await _call(obstore.delete_async(self._objects, sorted(some)))
                self._known.change(under, None)
        if self.folder:
            await asyncio.to_thread(prune, self.folder, account, STAGED)
        return bool(paths)

    async def fetch(self, path: str, model: torch.nn.Module, limits: str | AdapterLimits | None = None) -> Adapter:
        """Download a version, ``ACCOUNT/NAME/SHA256``, that fits a model.

        What can be known from the configuration and the weights' header is checked before the rest is read.

        Raises
        ------
        NotFoundError, StoreError
            It is not there; the store does not answer.
        InvalidAdapterError
            It is no adapter of this model, or not the one that its path names.
        """
        try:
            config, (size, header) = await asyncio.gather(
                self._read(f"{path}/{CONFIG}", MAX_CONFIG_BYTES), self._header(f"{path}/{WEIGHTS}")
            )
        except ValueError as error:
            raise InvalidAdapterError(str(error)) from None
        await asyncio.to_thread(inspect, config, header, size, model, limits)
        weights = await self._read(f"{path}/{WEIGHTS}", size)
        adapter = await asyncio.to_thread(read_adapter, config, weights, model, limits)
        if adapter.digest != path.rpartition("/")[2]:
            raise InvalidAdapterError(f"its content is {adapter.digest}, not the version that it was stored as")
        return adapter

    async def _header(self, path: str) -> tuple[int, bytes]:
        """The size of the weights, and their first 8 + N bytes."""
        size, start = await self._range(path, START_BYTES)
        length = 8 + header_length(start)
        if length > len(start):
            _, start = await self._range(path, length)
        return size, start[:length]

    async def _range(self, path: str, end: int) -> tuple[int, bytes]:
        """The size of an object, and its bytes up to ``end``."""
        result = await self._get(path, options={"range": (0, end)})
        return result.meta["size"], bytes(await _call(result.bytes_async()))

    async def _read(self, path: str, most: int) -> bytearray:
        """A whole object, and never more than ``most`` bytes of it."""
        result = await self._get(path)
        size = result.meta["size"]
        if size > most:
            raise InvalidAdapterError(f"{Path(path).name} has {size:,} bytes, at most {most:,} are allowed")
        return bytearray(await _call(result.bytes_async()))

    async def _get(self, path: str, **options):
        file = self._file(path)
        if file and os.path.exists(file) and not os.path.isfile(file):  # a pipe would never end
            raise DamagedError(f"{path} is not a regular file")
        return await _call(obstore.get_async(self._objects, path, **options))

    async def _put(self, path: str, content: bytes, **options) -> None:
        """Write an object. As a file it is its owner's alone, and so is each folder that is made for it."""
        file = self._file(path)
        if file:
            private_folder(file.parent)
        await obstore.put_async(self._objects, path, content, **options)
        if file:
            file.chmod(0o600)

    def _file(self, path: str) -> Path | None:
        """Where an object is, if the store is a directory."""
        return None if self.folder is None else self.folder / path

    @property
    def folder(self) -> Path | None:
        """Where it is, if it is a directory."""
        if not isinstance(self._objects, LocalStore):
            return None
        return Path(self._objects.prefix or "/")


def _objects(location, timeout_s: float):
    """The obstore at a location."""
    folder = folder_of(location)
    if folder is not None:
        # Its errors name the folder, obstore's do not; what is in it is its owner's alone.
        try:
            return LocalStore(private_folder(folder))
        except ValueError as error:  # no file system has such a name
            raise ValueError(f"{location!r} is no store: {error}") from None
    if isinstance(location, str):
        retries: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=3 * timeout_s)}
        client: Any = {"timeout": timedelta(seconds=timeout_s)}
        client["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "false")  # obstore would forget it
        try:
            return from_url(location, retry_config=retries, client_options=client)
        except (BaseError, ValueError) as error:
            raise ValueError(f"{location!r} is no store: {error}".split("\n")[0]) from None
    if not hasattr(obstore.store, type(location).__name__):
        raise ValueError(f"location must be a URL, a folder or one of obstore's stores, got {location!r}")
    return location


async def _call(operation: Awaitable):
    """The result of an operation of obstore, whose errors are told as this module's."""
    try:
        return await operation
    except AlreadyExistsError:
        raise
    except FileNotFoundError:
        raise NotFoundError("there is no such version of the adapter") from None
    except (OSError, BaseError) as error:
        told = StoreError(f"the store does not answer: {type(error).__name__}: {error}".split("\n")[0])
        os_error = re.search(r"\(os error (\d+)\)", str(error))  # so obstore says it
        told.errno = int(os_error[1]) if os_error else getattr(error, "errno", None)
        raise told from error


def stored_version(version: str) -> str:
    """The version, if a store can have it."""
    if not VERSION.fullmatch(version):
        raise NotFoundError(f"a version is a SHA-256 in hex, got {version!r}")
    return version


def _place(*parts: str) -> str:
    """The path ``ACCOUNT`` or ``ACCOUNT/NAME``; ValueError if a part is no name."""
    for part in parts:
        if not NAME.fullmatch(part):
            raise ValueError(f"a name has up to 64 letters, digits, dots, dashes or underscores, got {part!r}")
    return "/".join(parts)
