"""Files that are there whole or not at all, and runs that go on where they stopped."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all, whenever the process may be killed.

    Parameters
    ----------
    path
        The file.
    write
        Gets another path in the same folder, and writes the content there.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())  # or a power cut could leave an empty file under the right name
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_files(folder: Path, write: Callable[[str], object]) -> None:
    """Write several files of a folder, none of them half: what ``save_pretrained`` does, say.

    Parameters
    ----------
    folder
        The folder where they belong.
    write
        Gets another folder, and writes the files there.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        write(temporary)
        for path in sorted(path for path in Path(temporary).rglob("*") if path.is_file()):
            path.chmod(0o644)
            final = folder / path.relative_to(temporary)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)


def save(path: Path, state: dict) -> None:
    """Write a checkpoint: tensors, numbers, strings, lists and dictionaries."""
    replace_file(path, lambda partial: torch.save(state, partial))


def load(path: Path, identity: dict) -> dict | None:
    """The checkpoint of the run that stopped in this folder, if there is one.

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
