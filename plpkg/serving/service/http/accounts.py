"""Whose request it is: bearer keys, and the account of each."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from plpkg.serving.service.store import NAME

LOCAL = "local"
"""The account of everybody where there are no keys."""
OPERATOR = "operator"
"""The account that may read the metrics, which are of all."""


class Keys:
    """Keys of accounts, from lines ``ACCOUNT KEY``; an account may have several. They are kept as SHA-256 only.

    Raises
    ------
    ValueError
        A line that is none, or a key of two accounts; it is named by its number, never by its content.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._accounts: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            match line.split():
                case []:
                    continue
                case [account, key] if NAME.fullmatch(account) and len(key) >= 16:
                    if self._accounts.setdefault(_digest(key), account) != account:
                        raise ValueError(f"line {number} of the keys repeats a key of another account")
                case _:
                    raise ValueError(f"line {number} of the keys is not an account and a key of at least 16 characters")
        if not self._accounts:
            raise ValueError("there is no key in the file of keys")

    @classmethod
    def read(cls, path: str | Path) -> "Keys":
        """The keys of a file."""
        return cls(Path(path).read_text(encoding="utf-8").splitlines())

    def account(self, authorization: str | None) -> str | None:
        """Whose key a header ``Bearer KEY`` holds, if anybody's: looked up by digest, which no timing tells."""
        scheme, _, key = (authorization or "").partition(" ")
        return self._accounts.get(_digest(key.strip())) if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
