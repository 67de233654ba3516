"""Files that are there whole or not at all, and runs that go on where they stopped.

One's own files are safetensors with a JSON header: checkpoints, readings, heads. A digest over both
says whether a file is as it was written; what it says is then believed.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from plpkg.validation import shown

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

PARTIAL = ".partial"
"""How a file's name ends while it is written, and a folder's begins."""

VERSION = "1"
"""Of the files that :func:`save` writes."""

MOST_TEXT = 2**25
"""Characters of a state's JSON: safetensors reads no header of more than 100 MB."""


def private_folder(folder: str | Path) -> Path:
    """Make a folder and those above it, where they are missing, their owner's alone; ``mkdir`` opens the latter.

    NotADirectoryError: a file has the name of one of them.
    """
    folder = Path(folder)
    from_the_top = reversed([folder, *folder.parents])
    for each in from_the_top:
        try:
            each.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(f"{each} is not a folder") from None
    return folder


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
    with _alone_in(path.parent):
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
    with (
        _alone_in(folder),
        _room_for(folder),
        tempfile.TemporaryDirectory(dir=folder, prefix=f"{PARTIAL}-") as temporary,
    ):
        probe = Path(temporary, "mode")
        mode = _created(probe, private)
        probe.unlink()
        write(temporary)
        paths = sorted(path for path in Path(temporary).rglob("*") if path.is_file())
        for path in paths:
            _on_disk(path, mode)
        for path in paths:
            final = folder / path.relative_to(temporary)
            folder_mode = 0o700 if private else 0o777
            final.parent.mkdir(parents=True, exist_ok=True, mode=folder_mode)
            os.replace(path, final)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Within it, no other process writes or sweeps here: what one has half written would get the other's name.

    The lock is on the folder itself, so that none is left behind; it ends with the process.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is no folder yet, or its file system has no such locks
            number = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, number)
            if fcntl is not None:
                fcntl.flock(number, fcntl.LOCK_EX)
        yield


def _created(path: Path, private: bool) -> int:
    """Make an empty file; its mode is the one that its content shall have, and depends on the user's umask."""
    wanted = 0o600 if private else 0o666
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, wanted)
    try:
        return os.fstat(number).st_mode & 0o777
    finally:
        os.close(number)


def _on_disk(path: Path, mode: int) -> None:
    """Have a written file's content on the disk, under its mode."""
    path.chmod(mode)  # what wrote it may have made a file of its own
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # or a power cut could leave an empty file under the right name


@contextlib.contextmanager
def _room_for(path: Path) -> Iterator[None]:
    """Say in a sentence that the disk is full, whatever error that is to the library that writes."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or os.strerror(errno.ENOSPC) in str(error):
            raise OSError(f"{path} cannot be written, the disk is full: what was there is unchanged") from error
        raise


def save(path: Path, state: dict) -> None:
    """Write a state, its owner's alone: one safetensors file, no pickle. Its folder is made where it is missing.

    Parameters
    ----------
    path
        The file.
    state
        Dictionaries, lists and tuples of tensors, numbers, strings, booleans and None. What is no tensor stands in the
        file's metadata as JSON.

    Raises
    ------
    TypeError
        Something else is in it.
    ValueError
        There are more than 33,554,432 characters of what is no tensor.
    OSError
        As in :func:`replace_file`.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_packed(state, "", tensors))
    if len(text) > MOST_TEXT:  # else the old one would make way for one that nobody can read
        raise ValueError(f"{path.name}: a state may have {MOST_TEXT:,} characters of text, got {len(text):,}")
    metadata = {"plpkg": f"{VERSION} {_digest(text, tensors)} {text}"}  # several would stand there in any order
    private_folder(path.parent)
    replace_file(path, lambda partial: save_file(tensors, partial, metadata), private=True)


def _packed(value: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """A value as JSON has it; what JSON has not is an object with one name, ``$tensor``, ``$tuple`` or ``$dict``."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        own = f"{len(tensors)}{name}"
        tensors[own] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": own}
    if isinstance(value, (list, tuple)):
        items = [_packed(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = []
        for key, each in value.items():
            packed_key = _packed(key, name, tensors)
            pairs.append((packed_key, _packed(each, f"{name}.{key}", tensors)))
        as_json = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if as_json else {"$dict": pairs}
    raise TypeError(f"a file cannot hold {name.removeprefix('.')}={value!r:.60}")


def _unpacked(text: str, tensors: Mapping[str, torch.Tensor]) -> dict:
    """The state of which :func:`_packed` has made a text and tensors."""

    def unpacked(value: dict) -> object:
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(value["$tuple"])
        if "$dict" in value:
            return dict(value["$dict"])
        return value

    return json.loads(text, object_hook=unpacked)


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of the text and of each tensor's name, form and bytes: no damaged byte is overlooked."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read(path: Path, needed: Sequence[str] = ()) -> dict:
    """Read a state that :func:`save` wrote.

    Parameters
    ----------
    path
        The file.
    needed
        Names that the state must have.

    Raises
    ------
    FileNotFoundError
        It is missing.
    ValueError
        It is damaged, cut short, of another version, or another kind of file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{str(path.parent)!r} lacks {path.name}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    version, _, rest = metadata.get("plpkg", "").partition(" ")
    digest, _, text = rest.partition(" ")
    if version != VERSION:
        raise ValueError(f"{path} is of another version of plpkg, or no file of it")
    if _digest(text, tensors) != digest:
        raise ValueError(f"{path} is damaged: it is not as it was written")
    state = _unpacked(text, tensors)
    for name in needed:
        if name not in state:
            raise ValueError(f"{path} is another kind of file: it has no {name}")
    return state


def load(path: Path, identity: Mapping[str, object]) -> dict | None:
    """The checkpoint of the run that stopped in this folder, if there is one; what it left half written is removed.

    Parameters
    ----------
    path
        The file.
    identity
        The settings that make a run this one, without tensors; the checkpoint has it under ``"identity"``.

    Raises
    ------
    ValueError
        The file cannot be read, or is of another run, or of a version of plpkg that wrote pickles.
    """
    with _alone_in(path.parent):
        half_written = [path.with_name(path.name + PARTIAL), *path.parent.glob(f"{PARTIAL}-*")]
        for left in half_written:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    older = path.with_suffix(".pt")
    if older.exists():
        raise ValueError(f"{older} is a pickle of an earlier version, and is not read: remove it to start anew")
    if not path.exists():
        return None
    try:
        state = read(path)
    except ValueError as error:
        raise ValueError(f"{error}: remove it to start anew") from error
    others = _differences(state.get("identity", {}), identity)
    if others:
        said = "; ".join(others)[:280]
        raise ValueError(f"{path.parent} holds a run with {said}: take another folder, or go on with that")
    return state


def _differences(saved: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """The fields of a run's identity that differ from those in its file, each as ``name=before, now after``."""
    found = []
    for name in {**here, **saved}:
        before = saved.get(name)
        now = here.get(name)
        # As JSON, in which NumPy's numbers and Python's are the same.
        if json.dumps(_packed(before, "", {})) != json.dumps(_packed(now, "", {})):
            found.append(f"{name}={shown(before)}, now {shown(now)}")
    return found


def restore(parts: Mapping[str, Any], states: Mapping[str, dict]) -> None:
    """Load states into modules, optimizers, and whatever has ``load_state_dict``, by their names.

    An optimizer's settings stay those that it has here.
    """
    for name, part in parts.items():
        state = states[name]
        if isinstance(part, torch.optim.Optimizer):
            state = {**state, "param_groups": part.state_dict()["param_groups"]}
        part.load_state_dict(state)
