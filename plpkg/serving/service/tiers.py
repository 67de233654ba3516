"""Memory for adapters below the store: host memory, and a directory on disk, each with a budget of bytes.

A version's path is its key in every tier, account included: were equal adapters of two accounts kept once, the time of
an answer would tell one of them what the other has. Who needs an adapter leases it, and what is leased stays. However
many wait for one, it is downloaded once, and given up when nobody waits any more. What failed is not tried again for
some seconds, and fails nobody else. What is on disk does not wait for downloads, which a store may leave hanging.
Accounts take turns at downloads: each has at most one in the queue for a place, however many of its own stand behind.
Who gets no place for ``place_s`` is given up, or hundreds of accounts would wait in turn for a store that hangs.
Where memory is ``shared``, an account leases no more of it than it leaves free for the next one.
"""

import asyncio
import contextlib
import copy
import os
import shutil
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch

from plpkg.adapters import CONFIG, Adapter, AdapterLimits, InvalidAdapterError, validate_adapter
from plpkg.files.checkpoints import PARTIAL, private_folder
from plpkg.serving.service.places import VERSION, require_apart
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import NotFoundError, Store, StoreError
from plpkg.validation import number, whole_number

ON_DISK = f"*/{VERSION}"


class Disk:
    """Adapters in a directory, as PEFT saves them; the least recently used go first.

    What a process that died has left unfinished there is removed. Several processes may share a directory.
    """

    def __init__(self, folder: str | Path, num_bytes: int = 2**33) -> None:
        self.folder = Path(folder)
        self.num_bytes = whole_number("num_bytes", num_bytes, 0)
        self._changing = threading.Lock()  # a write that has begun is dropped when it is done
        private_folder(self.folder)
        for version in self.folder.glob(ON_DISK):
            if not (version / CONFIG).exists() or [*version.glob(f"*{PARTIAL}")]:
                shutil.rmtree(version, ignore_errors=True)

    def read(self, path: str, model: torch.nn.Module, limits: AdapterLimits | None) -> Adapter | None:
        """The adapter of that path, if it is there and still what it was."""
        folder = self.folder / path
        with contextlib.suppress(InvalidAdapterError, OSError):
            adapter = validate_adapter(folder, model, limits)
            if adapter.digest == folder.name:
                os.utime(folder)
                return adapter
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def write(self, path: str, adapter: Adapter, wanted: Callable[[], bool] = lambda: True) -> None:
        """Keep an adapter, if it still is wanted, and remove as many others as that takes; a full disk is no error."""
        with self._changing, contextlib.suppress(OSError):
            if not wanted():  # it was dropped before this thread's turn
                return
            sizes = {version: _size(version) for version in self.folder.glob(ON_DISK)}
            total = sum(sizes.values()) + adapter.num_bytes
            for oldest in sorted(sizes, key=lambda each: each.stat().st_mtime):
                if total > self.num_bytes:
                    shutil.rmtree(oldest, ignore_errors=True)
                    total -= sizes[oldest]
            if total <= self.num_bytes:
                adapter.save(self.folder / path)

    def drop(self, prefix: str) -> None:
        """Remove what is under a path."""
        with self._changing:
            shutil.rmtree(self.folder / prefix, ignore_errors=True)


def _size(version: Path) -> int:
    """The bytes of a version's files."""
    return sum(file.stat().st_size for file in version.iterdir())


class Tiers:
    """Leases adapters of a store for one model.

    Parameters
    ----------
    limits
        As of :func:`~plpkg.adapters.reading.validate_adapter`.
    host_bytes
        Of adapters in memory: less where there is little.
    shared
        Whether an account's second adapter, and each further one, may be leased only if all of its own then take no
        more of the memory than nobody leases.
    disk
        None for no such tier.
    downloads
        The most at a time.
    place_s
        For how long one may wait for a place among the downloads: no longer than clients do.
    failed_s
        For how long a failure is remembered: longer where a store must be spared, 0 where it is tried at once again.

    Attributes
    ----------
    leases
        By path, how many need it now.
    on_drop
        Called with a path when its adapter leaves host memory.
    """

    def __init__(
        self, store: Store, model, *, limits=None, host_bytes=2**32, shared=False, disk: Disk | None = None,
        downloads=8, place_s=90.0, failed_s=5.0,
    ) -> None:  # fmt: skip
        require_apart({"disk": disk and disk.folder, "store": getattr(store, "folder", None)})
        self.store = store
        self.model = model
        self.limits = limits
        self.disk = disk
        self.place_s = number("place_s", place_s, 0, open_low=True)
        self.failed_s = failed_s
        self.host_bytes = whole_number("host_bytes", host_bytes, 1)
        self.shared = shared
        self.host: OrderedDict[str, Adapter] = OrderedDict()
        self.leases: Counter[str] = Counter()
        self.on_drop: Callable[[str], object] = lambda path: None
        self._flights: dict[str, asyncio.Task] = {}  # what is on its way, by path
        self._failed: dict[str, tuple[float, Exception]] = {}  # until when an error is remembered, by path
        self._downloads = asyncio.Semaphore(whole_number("downloads", downloads, 1))
        self._closed = ""  # why, if it is
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by account

    @contextlib.asynccontextmanager
    async def lease(self, path: str) -> AsyncIterator[Adapter]:
        """An adapter in host memory, for as long as the context lasts.

        Raises
        ------
        NotFoundError, StoreError, InvalidAdapterError
            As :meth:`Store.fetch`; a StoreError also if no place for the download came free.
        OverloadedError
            All of the memory is leased, or what the account may lease of it.
        """
        self.leases[path] += 1
        try:
            adapter = self.host.get(path)
            if adapter is None:
                adapter = await self._arrival(path)
            elif self.leases[path] == 1:
                self._require_share(path, adapter)
            if path in self.host:
                self.host.move_to_end(path)
            yield adapter
        finally:
            self.leases[path] -= 1
            if not self.leases[path]:
                del self.leases[path]
                if path in self._flights:
                    self._flights.pop(path).cancel()

    async def _arrival(self, path: str) -> Adapter:
        """An adapter that is not in memory yet, when it is; all who wait for it share one flight."""
        if path in self._failed:
            until, error = self._failed[path]
            if time.monotonic() < until:
                raise copy.copy(error)  # each waiter's frames would hang on one
        if path not in self._flights:
            self._flights[path] = asyncio.create_task(self._bring(path))
            self._flights[path].add_done_callback(lambda task: task.cancelled() or task.exception())  # someone may ask
        flight = self._flights[path]
        try:
            return await asyncio.shield(flight)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if flight.cancelled() and this and not this.cancelling():
                if self._closed:
                    raise RuntimeError(self._closed) from None
                raise NotFoundError("the adapter was deleted while it was fetched") from None
            raise

    async def _bring(self, path: str) -> Adapter:
        """Bring an adapter into memory, from the disk or the store: the flight itself."""
        flight = asyncio.current_task()

        def wanted() -> bool:
            return self._flights.get(path) is flight

        try:
            adapter = None
            if self.disk:
                adapter = await asyncio.to_thread(self.disk.read, path, self.model, self.limits)
            if adapter is None:
                async with self._place(_account(path)):
                    adapter = await self.store.fetch(path, self.model, self.limits)
                    if self.disk:
                        await asyncio.to_thread(self.disk.write, path, adapter, wanted)
            self._require_share(path, adapter)
            if self._trim(adapter.num_bytes) > self.host_bytes:
                raise OverloadedError(f"adapters in use fill the {self.host_bytes:,} bytes of memory for them", 1)
            self.host[path] = adapter
            return adapter
        except (NotFoundError, StoreError, InvalidAdapterError) as error:
            now = time.monotonic()
            self._failed = {key: (until, each) for key, (until, each) in self._failed.items() if until > now}
            self._failed[path] = (now + self.failed_s, copy.copy(error))
            error.__traceback__ = None  # its frames hold what was downloaded
            raise
        finally:
            if wanted():
                del self._flights[path]

    @contextlib.asynccontextmanager
    async def _place(self, account: str) -> AsyncIterator[None]:
        """A place among the downloads, for which an account's own stand in turn."""
        try:
            async with asyncio.timeout(self.place_s), self._turns[account]:
                await self._downloads.acquire()
        except TimeoutError:
            raise StoreError(f"other downloads took all places for {self.place_s:g} s") from None
        try:
            yield
        finally:
            self._downloads.release()

    def _require_share(self, path: str, adapter: Adapter) -> None:
        """Refuse a lease with which an account would hold more memory than it leaves free."""
        leased = {each: kept.num_bytes for each, kept in self.host.items() if each in self.leases and each != path}
        account = _account(path)
        theirs = sum(num_bytes for each, num_bytes in leased.items() if _account(each) == account)
        free = self.host_bytes - sum(leased.values()) - adapter.num_bytes
        is_second = theirs > 0  # an account's first adapter may take any part
        if self.shared and is_second and theirs + adapter.num_bytes > free:
            raise OverloadedError("the account's adapters in use would take more memory than they leave to others", 1)

    def _trim(self, more: int) -> int:
        """Drop what nobody leases until there is room for ``more`` bytes; the bytes needed then."""
        needed = more + sum(each.num_bytes for each in self.host.values())
        unused = [path for path in self.host if path not in self.leases]
        for path in unused:
            if needed <= self.host_bytes:
                break
            needed -= self.host[path].num_bytes
            self._leave(path)
        return needed

    def _leave(self, path: str) -> None:
        del self.host[path]
        self.on_drop(path)

    async def drop(self, prefix: str) -> None:
        """Forget a version, or all of ``ACCOUNT/NAME``, also on disk and what failed; who leases one keeps it."""

        def inside(path: str) -> bool:
            return f"{path}/".startswith(f"{prefix}/")

        self._failed = {path: each for path, each in self._failed.items() if not inside(path)}
        for path in [*filter(inside, self._flights)]:
            self._flights.pop(path).cancel()
        for path in [*filter(inside, self.host)]:
            self._leave(path)
        if self.disk:
            await asyncio.to_thread(self.disk.drop, prefix)

    def close(self, reason: str) -> None:
        """Give up all downloads; who waits for one gets a RuntimeError with the reason."""
        self._closed = reason
        for path in [*self._flights]:
            self._flights.pop(path).cancel()


def _account(path: str) -> str:
    """Whose an adapter is."""
    account, _, _ = path.partition("/")
    return account
