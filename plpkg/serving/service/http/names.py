"""Names of adapters, as an account has them: in its part of the store, with or without a version."""

import asyncio

from plpkg.serving.service.store import NAME, NotFoundError, Store, StoreError


class Names:
    """Of all accounts; ``base`` is the model's name, which no adapter can have."""

    def __init__(self, store: Store, base: str) -> None:
        self._store = store
        self.base = base

    async def path(self, account: str, wanted: str) -> str:
        """Where the store has what an account calls ``NAME`` or ``NAME@SHA256``."""
        adapter, _, version = wanted.partition("@")
        version = await self._store.current(account, stored_name(adapter), version or None)
        return f"{account}/{adapter}/{version}"

    async def existing(self, account: str, wanted: str) -> tuple[str, str]:
        """The adapter and the version that are meant, if they are in the store."""
        path = await self.path(account, wanted)
        _, adapter, version = path.split("/")
        versions = await self._store.versions(account)
        if version not in versions.get(adapter, ()):
            raise NotFoundError("there is no such version of the adapter")
        return adapter, version

    async def stored(self, account: str) -> list[dict]:
        """An account's adapters; one without a current version is being written, or deleted."""
        versions = await self._store.versions(account)
        asked = (self._store.current(account, name) for name in versions)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, StoreError):
                raise answer
        stored = []
        for name, answer in zip(versions, answers, strict=True):
            if isinstance(answer, str):
                stored.append({"id": name, "version": answer, "versions": versions[name]})
        return stored

    def require_possible(self, name: str) -> None:
        """Raise ValueError if no adapter can have this name."""
        if name == self.base or not NAME.fullmatch(name):
            raise ValueError(f"no adapter can have the name {name!r}")


def stored_name(name: str) -> str:
    """The name, if the store can have it."""
    if not NAME.fullmatch(name):
        raise NotFoundError(f"no adapter has the name {name!r}")
    return name
