"""What an account calls adapters: names in the store, with or without a version, and names that vLLM's clients load."""

import asyncio

from plpkg.serving.service.store import NAME, AccountFullError, NotFoundError, Store, StoreError

MOST_LOADED = 1000
"""Names that an account has loaded at a time."""


class Names:
    """Of all accounts; ``base`` is the model's name, which no adapter can have."""

    def __init__(self, store: Store, base: str) -> None:
        self._store, self._base = store, base
        self._named: dict[tuple[str, str], str] = {}  # by account and loaded name: NAME@SHA256

    async def path(self, account: str, wanted: str) -> str:
        """Where the store has what an account calls ``NAME`` or ``NAME@SHA256``."""
        adapter, _, version = self._named.get((account, wanted), wanted).partition("@")
        version = await self._store.current(account, stored_name(adapter), version or None)
        return f"{account}/{adapter}/{version}"

    async def existing(self, account: str, wanted: str) -> tuple[str, str]:
        """The adapter and the version that are meant, if they are in the store."""
        _, adapter, version = (await self.path(account, wanted)).split("/")
        if version not in (await self._store.versions(account)).get(adapter, ()):
            raise NotFoundError("there is no such version of the adapter")
        return adapter, version

    async def stored(self, account: str) -> list[dict]:
        """An account's adapters; one without a current version is being written, or deleted."""
        versions = await self._store.versions(account)
        current = await asyncio.gather(
            *(self._store.current(account, each) for each in versions), return_exceptions=True
        )
        for error in current:
            if isinstance(error, StoreError):
                raise error
        pairs = zip(versions, current, strict=True)
        return [{"id": each, "version": now, "versions": versions[each]} for each, now in pairs if isinstance(now, str)]

    def loaded(self, account: str) -> dict[str, str]:
        """By the name that was loaded: NAME@SHA256."""
        return {name: meant for (owner, name), meant in self._named.items() if owner == account}

    async def load(self, account: str, name: str, wanted: str, replace: bool) -> None:
        """Give an adapter of the account's store another name, as long as the service runs."""
        self.require_possible(name)
        stored, loaded = name in await self._store.versions(account), self.loaded(account)
        if (stored and wanted != name) or (name in loaded and not replace):
            raise ValueError(f"there is an adapter with the name {name!r}")
        if len(loaded) >= MOST_LOADED:
            raise AccountFullError(f"an account may load {MOST_LOADED} names")
        adapter, version = await self.existing(account, wanted)
        if not stored:
            self._named[account, name] = f"{adapter}@{version}"

    def forget(self, account: str, name: str) -> bool:
        """Drop a loaded name; whether it was one."""
        return self._named.pop((account, name), None) is not None

    def deleted(self, account: str, gone: str) -> None:
        """Drop the names that were loaded for an adapter, or a version, NAME@SHA256, which the store has no more."""
        for name, meant in self.loaded(account).items():
            if gone in (meant, meant.partition("@")[0]):
                self.forget(account, name)

    def require_possible(self, name: str) -> None:
        """Raise ValueError if no adapter can have this name."""
        if name == self._base or not NAME.fullmatch(name):
            raise ValueError(f"no adapter can have the name {name!r}")


def stored_name(name: str) -> str:
    """The name, if the store can have it."""
    if not NAME.fullmatch(name):
        raise NotFoundError(f"no adapter has the name {name!r}")
    return name
