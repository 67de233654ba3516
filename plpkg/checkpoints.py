"""Files that are there whole or not at all, and runs that go on where they stopped."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PARTIAL = ".partial"
"""How a file's name ends while it is written, and a folder's begins."""


def replace_file(path: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Write a file whole or not at all, whenever the process may be killed.

    Parameters
    ----------
    path
        The file.
    write
        Gets another path in the same folder, and writes the content there.
    private
        Only the owner can read the file, from its first byte on; otherwise it has the default permissions.

    Raises
    ------
    OSError
        The disk is full, or cannot be written; what was there is as it was.
    """
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    try:
        with _room_for(path):
            mode = _created(partial, private)
            write(partial)
            _on_disk(partial, mode)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_files(folder: Path, write: Callable[[str], object], *, private: bool = False) -> None:
    """Write several files of a folder, none of them half: what ``save_pretrained`` does, say.

    They are replaced one after the other: between two of them, the process may be killed.

    Parameters
    ----------
    folder
        The folder where they belong.
    write
        Gets another folder, and writes the files there.
    private
        As in :func:`replace_file`.

    Raises
    ------
    OSError
        As in :func:`replace_file`.
    """
    with _room_for(folder), tempfile.TemporaryDirectory(dir=folder, prefix=f"{PARTIAL}-") as temporary:
        mode = _created(probe := Path(temporary, "mode"), private)
        probe.unlink()
        write(temporary)
        paths = sorted(path for path in Path(temporary).rglob("*") if path.is_file())
        for path in paths:
            _on_disk(path, mode)
        for path in paths:
            final = folder / path.relative_to(temporary)
            final.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
            os.replace(path, final)


def _created(path: Path, private: bool) -> int:
    """The mode of a new file."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        return os.fstat(number).st_mode & 0o777
    finally:
        os.close(number)


def _on_disk(path: Path, mode: int) -> None:
    path.chmod(mode)  # what wrote it may have made a file of its own
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # or a power cut could leave an empty file under the right name


@contextlib.contextmanager
def _room_for(path: Path) -> Iterator[None]:
    """Say in a sentence that the disk is full, whatever error that is to the library that writes."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError):
            try:
                with tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent) as file:
                    file.write(bytes(2**20))
            except OSError as reason:
                error = reason
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(f"{path} cannot be written, the disk is full: what was there is unchanged") from error
        raise


def save(path: Path, state: dict) -> None:
    """Write a checkpoint, its owner's alone: tensors, numbers, strings, lists and dictionaries."""
    replace_file(path, lambda partial: torch.save(state, partial), private=True)


def load(path: Path, identity: dict) -> dict | None:
    """The checkpoint of the run that stopped in this folder, if there is one; what it left half written is removed.

    Parameters
    ----------
    path
        The file.
    identity
        What makes a run this one; the checkpoint has it under ``"identity"``.

    Raises
    ------
    ValueError
        The file is damaged, or of another run.
    """
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
    for left in path.parent.glob(f"{PARTIAL}-*"):
        shutil.rmtree(left, ignore_errors=True)
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["identity"]
    except Exception as error:  # a damaged file can fail in any way
        reason = error if isinstance(error, OSError) else "damaged, or not a checkpoint"
        raise ValueError(f"{path} cannot be read ({reason}): remove it to start anew") from error
    if saved != identity:
        different = "; ".join(f"{k}={saved.get(k)!r}, now {v!r}" for k, v in identity.items() if saved.get(k) != v)
        raise ValueError(f"{path.parent} holds a run with {different}: take another folder, or go on with that")
    return state
