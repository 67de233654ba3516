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
    """Keys and values of the requests served last: ``capacity`` positions in all, those used longest ago go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: dict[bytes, KeyValues] = {}
        self._kept: OrderedDict[KeyValues, list[bytes]] = OrderedDict()

    def __len__(self) -> int:
        """The positions that are kept."""
        return sum(past.capacity for past in self._kept)

    def find(self, owner: tuple[str, str], ids: Sequence[int]) -> tuple[KeyValues | None, int]:
        """The longest beginning of ``ids`` that is there and ends before the last token, and its tokens."""
        past, positions = None, 0
        for key in _keys(owner, ids[:-1]):
            if key not in self._blocks:
                break
            past, positions = self._blocks[key], positions + BLOCK
        if past is not None:
            self._kept.move_to_end(past)
        return past, positions

    def keep(self, owner: tuple[str, str], ids: Sequence[int], past: KeyValues) -> None:
        """Offer what was computed of ``ids``; ``owner`` is the adapter's digest and the account."""
        if past.capacity <= self.capacity and (keys := list(_keys(owner, ids))):
            self._kept[past] = keys
            self._blocks |= dict.fromkeys(keys, past)
        while len(self) > self.capacity:
            oldest, _ = self._kept.popitem(last=False)
            self._blocks = {key: past for key, past in self._blocks.items() if past is not oldest}


def _keys(owner: tuple[str, str], ids: Sequence[int]) -> Iterator[bytes]:
    """A key for each whole block, which stands for everything up to its end."""
    key = repr(owner).encode()
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hashlib.sha256(key + array("q", ids[end - BLOCK : end]).tobytes()).digest()
        yield key
