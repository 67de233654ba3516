"""Answers of a store: it is asked again after a while, and believed for longer only while it does not answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from plpkg.validation import number

HANGING_S = 1.0
"""How long to wait for the store when an earlier answer is known; then that answer is used."""


class StoreError(OSError):
    """The store does not answer, or not as a store does; later it may."""


class DamagedError(StoreError):
    """The store has answered, and what it holds is not what a store holds."""


class _Said(NamedTuple):
    """An answer, when it was asked for, and until when it is taken without asking again."""

    version: str | None
    at_s: float
    until_s: float


class Known:
    """Which version is current, by ``ACCOUNT/NAME``.

    Parameters
    ----------
    refresh_s
        For how long the store is not asked again.
    stale_s
        For how long after it has answered what it said is taken, while it does not answer.
    """

    def __init__(self, refresh_s: float, stale_s: float) -> None:
        self.refresh_s = number("refresh_s", refresh_s, 0)
        self.stale_s = number("stale_s", stale_s, 0)
        self._said: dict[str, _Said] = {}
        self._changes = 0  # what was asked before one is not what is current

    def change(self, place: str, version: str | None) -> None:
        """This process has written that version, or deleted them all."""
        self._changes += 1
        if version is None:
            self._said.pop(place, None)
        else:
            now = time.monotonic()
            self._said[place] = _Said(version, now, now + self.refresh_s)

    async def get(self, place: str, ask: Callable[[], Awaitable[str | None]]) -> str | None:
        """The version that ``ask`` gives, now or lately; None if there is none. Its OSError, if nothing is known."""
        now = time.monotonic()
        changes = self._changes
        said = self._said.get(place, _Said(None, 0.0, 0.0))
        if now < said.until_s:
            return said.version
        self._said = {key: each for key, each in self._said.items() if now < max(each.until_s, self._end(each))}
        longest_s = HANGING_S if now < self._end(said) else None
        try:
            async with asyncio.timeout(longest_s):
                said = _Said(await ask(), now, time.monotonic() + self.refresh_s)
        except OSError as error:  # TimeoutError is one
            if longest_s is None or isinstance(error, DamagedError):  # there is no answer to fall back on
                raise
            if changes != self._changes:
                return await self.get(place, ask)
            said = said._replace(until_s=min(time.monotonic() + self.refresh_s, self._end(said)))
        if changes == self._changes:
            self._said[place] = said
        return said.version

    def _end(self, said: _Said) -> float:
        """Until when it may be taken. Nobody is told for long that there is no adapter."""
        return 0.0 if said.version is None else said.at_s + self.stale_s
