"""Prompts that begin alike are read once: keys and values are shared by blocks of tokens.

A block is found by what it depends on: the tokens up to its end, the adapter's *content*, and the account. The name of
an adapter would not do (uploaded again, it is another adapter), nor would tokens alone: keys and values of one adapter
are wrong for every other. Between accounts nothing is shared, since the time of an answer would tell what others
have asked. Prompts shorter than a block are never shared.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from plpkg.serving.attention import KeyValues

BLOCK = 16
"""Tokens of a block."""


class Prefixes:
    """Keys and values of the requests served last: ``capacity`` bytes in all, those used longest ago go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._blocks: dict[bytes, KeyValues] = {}
        self._kept: OrderedDict[KeyValues, tuple[tuple[str, str], list[bytes]]] = OrderedDict()

    def find(self, owner: tuple[str, str], ids: Sequence[int]) -> tuple[KeyValues | None, int]:
        """The longest beginning of ``ids`` that is there and ends before the last token, and its tokens."""
        past: KeyValues | None = None
        positions = 0
        for key in _keys(owner, ids[:-1]):
            if key not in self._blocks:
                break
            past = self._blocks[key]
            positions += BLOCK
        if past is not None:
            self._kept.move_to_end(past)
        return past, positions

    def keep(self, owner: tuple[str, str], ids: Sequence[int], past: KeyValues) -> None:
        """Offer what was computed of ``ids``; ``owner`` is the adapter's digest and the account."""
        if past.num_bytes > self.capacity:
            return
        keys = list(_keys(owner, ids))
        if not keys:
            return
        self._kept[past] = (owner, keys)
        self._blocks |= dict.fromkeys(keys, past)
        self.num_bytes += past.num_bytes
        while self.num_bytes > self.capacity:
            self._drop(next(iter(self._kept)))

    def forget(self, owner: tuple[str, str]) -> None:
        """Drop all that is one owner's."""
        theirs = [past for past, (whose, _) in self._kept.items() if whose == owner]
        for past in theirs:
            self._drop(past)

    def _drop(self, past: KeyValues) -> None:
        _, keys = self._kept.pop(past)
        self.num_bytes -= past.num_bytes
        for key in keys:
            if self._blocks.get(key) is past:  # a later one may have the same beginning
                del self._blocks[key]


def _keys(owner: tuple[str, str], ids: Sequence[int]) -> Iterator[bytes]:
    """A key for each whole block, which stands for everything up to its end."""
    key = repr(owner).encode()
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hashlib.sha256(key + array("q", ids[end - BLOCK : end]).tobytes()).digest()
        yield key
