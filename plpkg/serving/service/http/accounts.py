"""Whose request it is: bearer keys, and the account of each."""

import hashlib
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from plpkg.files.untrusted import read_file
from plpkg.serving.service.store import NAME

LOCAL = "local"
"""The account of everybody where there are no keys."""
KEY = re.compile("[!-~]+")
"""Printable ASCII: what a header can carry, whoever writes it."""
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
                case [account, key] if NAME.fullmatch(account) and len(key) >= 16 and KEY.fullmatch(key):
                    if self._accounts.setdefault(_digest(key), account) != account:
                        raise ValueError(f"line {number} of the keys repeats a key of another account")
                case _:
                    raise ValueError(
                        f"line {number} of the keys is not an account and a key of at least 16 ASCII characters"
                    )
        if not self._accounts:
            raise ValueError("there is no key in the file of keys")

    def knows(self, account: str) -> bool:
        """Whether somebody has a key of this account."""
        return account in self._accounts.values()

    @classmethod
    def read(cls, path: str | Path) -> "Keys":
        """The keys of a regular file in UTF-8, of at most 1 MiB; it warns if others than its owner can read it."""
        path = Path(path)
        try:
            content = bytes(read_file(path, 2**20))
        except ValueError as error:  # which names the file without its folder
            raise ValueError(f"no keys were read from {path}: {error}") from None
        if path.stat().st_mode & 0o077:
            warnings.warn(f"others than its owner can read the keys in {path}: chmod 600 {path}", stacklevel=2)
        try:
            return cls(content.decode().replace("\r\n", "\n").split("\n"))
        except UnicodeDecodeError as error:  # whose message has a part of a key
            line = content.count(b"\n", 0, error.start) + 1
            raise ValueError(f"line {line} of the keys is not UTF-8") from None

    def account(self, authorization: str | None) -> str | None:
        """Whose key a header ``Bearer KEY`` holds, if anybody's: looked up by digest, which no timing tells."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._accounts.get(_digest(key.strip()))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
