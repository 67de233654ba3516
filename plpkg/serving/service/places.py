"""Where a service keeps files: places that must not be one, and a temporary folder that goes with its process."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

try:
    import fcntl
except ModuleNotFoundError:  # on Windows: there, what killed processes leave stays
    fcntl = None

VERSION = "*/" + "[0-9a-f]" * 64
"""Within an account's folder, only what has a version's path: others may be there, which are nobody's to remove."""
PREFIX = "plpkg-adapters-"
"""Of the name of a service's temporary folder."""
LOCK = "lock"
"""The file in it that the service holds locked: who can lock it knows that the service has ended."""


def folder_of(location: object) -> Path | None:
    """The folder that a store's location names, by path or by URL ``file://…``; None if it names none."""
    if isinstance(location, Path):
        return location
    if not isinstance(location, str) or not location:
        return None
    url = urlsplit(location)
    if url.scheme != "file":
        return None if "://" in location else Path(location)
    if url.netloc not in ("", "localhost"):
        raise ValueError(f"{location!r} is no folder of this machine: with its path it is file:///…")
    if not url.path:
        raise ValueError(f"{location!r} names no folder: with its path it is file:///…")
    path = url.path if os.name == "nt" else re.sub("^/+", "/", url.path)  # Python 3.14 takes //name for a machine's
    return Path(url2pathname(path))


def require_apart(emptied: Mapping[str, Path | None], others: Mapping[str, Path] | None = None) -> None:
    """Refuse places of which one is another or inside it, whatever their spelling.

    Parameters
    ----------
    emptied
        Folders from which adapters are removed, by what they are; None where there is none.
    others
        Places that must not be in one of those. The reverse does no harm: a store in ``/tmp``, say.

    Raises
    ------
    ValueError
        With both places.
    """
    folders = {name: place for name, place in emptied.items() if place is not None}
    for name, place in (dict(others or {}) | folders).items():
        for other, outer in folders.items():
            if name != other and _inside(place.resolve(), outer.resolve()):
                raise ValueError(
                    f"{name}={str(place)!r} is the {other}, or in it ({other}={str(outer)!r}): "
                    "what is removed from one would be gone from both"
                )


def _inside(place: Path, outer: Path) -> bool:
    """Whether a place is another one, or in it."""
    above = (place, *place.parents)
    if outer in above:
        return True
    if not outer.exists():
        return False
    # Some file systems ignore case, and a folder may be mounted twice: the same inode is the same place.
    return any(each.exists() and each.samefile(outer) for each in above)


def prune(store: Path, account: str, staged: re.Pattern) -> None:
    """Remove what writes that died have staged in a store, of one account or of ``*``, and empty folders of its own.

    These are their owner's alone; somebody else has made those of another mode.
    """
    for pattern in (f"{account}/{VERSION}", f"{account}/*", account):
        for folder in filter(Path.is_dir, store.glob(pattern)):
            for file in folder.glob("*#*"):
                if staged.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something is in it
                if folder.stat().st_mode & 0o777 == 0o700:
                    folder.rmdir()


def temporary_folders() -> list[Path]:
    """Those of all services on this machine, and what killed ones have left."""
    return [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder until the context ends; those that killed processes have left are removed first."""
    for left in temporary_folders():
        with contextlib.suppress(OSError), _locked(left / LOCK, "r+"):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, _locked(Path(folder, LOCK), "w"):
        yield Path(folder)


@contextlib.contextmanager
def _locked(file: Path, mode: str) -> Iterator[None]:
    """Hold a lock, which ends with the process that has it; OSError if another has it."""
    with file.open(mode) as opened:
        if fcntl:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif mode != "w":
            raise OSError("this system has no such locks")
        yield
