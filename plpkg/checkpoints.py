"""Files that are there whole or not at all, and runs that go on where they stopped."""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from plpkg.untrusted import MAX_HEADER_BYTES, Entry, brief, entries, read_header, read_state, shown, strict_json

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

PARTIAL = ".partial"
"""How a file's name ends while it is written, and a folder's begins."""


def private_folder(folder: str | Path) -> Path:
    """Make a folder and those above it, where they are missing, their owner's alone; ``mkdir`` opens the latter.

    NotADirectoryError: a file has the name of one of them.
    """
    for each in reversed([folder := Path(folder), *folder.parents]):
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


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Within it, no other process writes or sweeps here: what one has half written would get the other's name.

    The lock is on the folder itself, so that none is left behind; it ends with the process.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, AttributeError):  # there is no folder yet, or the system has no such locks
            number = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, number)
            fcntl.flock(number, fcntl.LOCK_EX)
        yield


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
    """Write a checkpoint, its owner's alone: one safetensors file, no pickle.

    Parameters
    ----------
    path
        The file.
    state
        Dictionaries, lists and tuples of tensors, numbers, strings, booleans and None. What is no tensor stands in the
        file's metadata as JSON, but for long lists of numbers, and of rows of numbers.

    Raises
    ------
    TypeError
        Something else is in it.
    ValueError
        There is more than half a MiB of what is no tensor, or there are more than 4,096 tensors.
    OSError
        As in :func:`replace_file`.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_packed(state, "", tensors), allow_nan=False)
    if len(json.dumps(text)) > MAX_HEADER_BYTES // 2:  # the other half is for the tensors' names
        raise ValueError(f"{path.name}: a state may have {MAX_HEADER_BYTES // 2:,} bytes of text, got {len(text):,}")
    metadata = {"state": text, "sha256": _digest(text, tensors)}

    def write(partial: Path) -> None:
        save_file(tensors, partial, metadata)
        outline, reasons = entries(*read_header(partial), state=True)
        try:  # else the old one would make way for one that nobody can read
            if reasons:
                raise ValueError(brief(reasons))
            _stated(metadata, outline)
        except ValueError as error:
            raise ValueError(f"{path.name} could not be read again: {error}") from error

    replace_file(path, write, private=True)


LONG, MOST, ROWS = 64, 2**20, 2**16
"""From so many items on a list of numbers becomes a tensor; up to so many numbers, and rows of them, are in a file."""


def _packed(value: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """What stands for a value in the JSON: itself, or a list that begins with its kind; tensors go to ``tensors``."""

    def kept(tensor: torch.Tensor, name: str = name) -> str:
        while name in tensors:  # "a.b" can be two ways down
            name += "_"
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    def inner(key: object, each: object) -> object:
        return _packed(each, f"{name}.{key}" if name else str(key), tensors)

    value = _plain(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else ["number", kept(torch.tensor(value, dtype=torch.float64))]
    if isinstance(value, torch.Tensor):
        return ["tensor", kept(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: inner(key, each) for key, each in value.items()}
    if isinstance(value, Mapping) and all(type(key) is int for key in value):
        return ["dict", *([key, inner(key, each)] for key, each in value.items())]
    if isinstance(value, (list, tuple)):
        if type(value) is list and len(value) >= LONG and len(value) <= MOST:
            if (numbers := _numbers(value)) is not None:
                return ["numbers", kept(numbers)]
            names = list(value[0]) if isinstance(value[0], dict) else []
            if names and len(value) <= ROWS and all(isinstance(row, dict) and list(row) == names for row in value):
                columns = {each: _numbers([row[each] for row in value]) for each in names}
                if all(isinstance(each, str) and column is not None for each, column in columns.items()):
                    return ["rows", {each: kept(column, f"{name}.{each}") for each, column in columns.items()}]
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(inner(i, each) for i, each in enumerate(value))]
    raise TypeError(f"a checkpoint cannot hold {name}={value!r:.60}")


def _plain(value: object) -> object:
    """NumPy's numbers as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _numbers(values: list) -> torch.Tensor | None:
    """Whole numbers or floats as a tensor from which they come back as they were; None if they are not alike."""
    if all(type(value) is float for value in values):
        return torch.tensor(values, dtype=torch.float64)
    if all(type(value) is int and -(2**63) <= value < 2**63 for value in values):
        return torch.tensor(values)
    return None


def _unpacked(value: object, tensors: dict[str, torch.Tensor], room: list[int]) -> object:
    """What :func:`_packed` made something of; each tensor is taken out once. ``room`` is for numbers in lists."""
    if isinstance(value, dict):
        return {key: _unpacked(each, tensors, room) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    kind, *items = value

    def column(name: str) -> list:
        column = tensors.pop(name)
        room[0] -= math.prod(column.shape)
        if len(column.shape) != 1 or room[0] < 0 or (kind == "rows" and column.shape[0] > ROWS):
            raise ValueError(f"a list of shape {tuple(column.shape)}, of {MOST:,} numbers and {ROWS:,} rows in all")
        return column.tolist() if isinstance(column, torch.Tensor) else []

    if kind == "tensor":
        return tensors.pop(items[0])
    if kind == "number":
        number = tensors.pop(items[0])
        return number.item() if isinstance(number, torch.Tensor) else number
    if kind == "numbers":
        return column(items[0])
    if kind == "rows":
        columns = {name: column(each) for name, each in items[0].items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if kind == "dict":
        if len({key for key, _ in items if type(key) is int}) < len(items):
            raise ValueError("the keys of such a dictionary are whole numbers, each once")
        return {key: _unpacked(each, tensors, room) for key, each in items}
    return {"list": list, "tuple": tuple}[kind](_unpacked(each, tensors, room) for each in items)


def read(path: Path, judge: Callable[[dict], object] | None = None) -> dict:
    """What :func:`save` wrote.

    Parameters
    ----------
    path
        The file.
    judge
        Gets the state before the tensors are read: in their places stand their dtype and shape
        (:class:`plpkg.untrusted.Entry`), and long lists are empty. It raises ValueError for what it does not want.

    Raises
    ------
    ValueError
        It is anything else, or damaged; the sentence does not say where the file is.
    """
    metadata: dict[str, str] = {}

    def outlined(tensors: dict, said: dict[str, str]) -> None:
        metadata.update(said)
        outline = _stated(said, tensors)
        if judge is not None:
            try:
                judge(outline)
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"it lacks what is needed here: {shown(str(error))}") from error

    tensors = read_state(path, outlined)
    if _digest(metadata["state"], tensors) != metadata.get("sha256"):
        raise ValueError("it is not as it was written")
    return _stated(metadata, tensors)


def _stated(metadata: dict[str, str], tensors: Mapping) -> dict:
    tensors = dict(tensors)
    try:
        state = dict(_unpacked(strict_json(metadata["state"].encode()), tensors, [MOST]))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its metadata are not a checkpoint's: {shown(str(error))}") from error
    if tensors:
        raise ValueError(f"it has a tensor {shown(next(iter(tensors)))} that belongs nowhere")
    return state


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Of the text, and of each tensor's name, form and bytes: a damaged byte is seen wherever it is."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


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
        The file is damaged, or of another run, or of a version of plpkg that wrote pickles.
    """
    with _alone_in(path.parent):
        for left in (path.with_name(path.name + PARTIAL), *path.parent.glob(f"{PARTIAL}-*")):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    if (older := path.with_suffix(".pt")).exists():
        raise ValueError(f"{older} is a pickle of an earlier version, and is not read: remove it to start anew")
    if not os.path.lexists(path):
        return None

    def same_run(state: dict, outlined: bool = True) -> None:
        if not isinstance(saved := state["identity"], dict):
            raise ValueError("it does not say of which run it is")
        pairs = []
        for name in identity | saved:
            before, now = saved.get(name), identity.get(name)
            unread = outlined and isinstance(now, list) and len(now) >= LONG and before == []
            unread |= outlined and isinstance(now, float) and isinstance(before, Entry)  # one that is not finite
            if (name in saved) != (name in identity) or not (unread or _same(before, now)):
                pairs.append(f"{shown(name)[1:-1]}={shown(before)}, now {shown(now)}")
        if pairs:
            raise OtherRunError(
                f"{path.parent} holds a run with {brief(pairs)}: take another folder, or go on with that"
            )

    try:
        state = read(path, same_run)
        same_run(state, outlined=False)
        return state
    except OtherRunError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it to start anew") from error


class OtherRunError(ValueError):
    """A checkpoint is of another run."""


def _same(saved: object, now: object) -> bool:
    """Whether two settings are the same, of one type: ``True`` is not 1."""
    if type(saved) is not type(now := _plain(now)) or isinstance(now, torch.Tensor):
        return False
    return saved == now or (saved != saved and now != now)  # one NaN is like another
