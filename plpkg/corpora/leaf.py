"""The JSON files of LEAF (Caldas et al. 2018, https://leaf.cmu.edu), for those who have them.

Each loader reads everything, checks everything, and returns nothing unless all of it is sound; an error names
the file and the place in it. What validation and test texts share with any user's training text is masked;
near-duplicates are not removed.

LEAF keeps users in JSON: ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.
Load its ``data/all_data``, the state before LEAF samples and splits: sampling can shuffle a user's text, and
``num_samples`` in Shakespeare's ``data/test`` counts 79 windows more than there are, which is refused here.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from plpkg.corpora.documents import SPLITS, Document, Writer, cuts
from plpkg.corpora.folder import read_utf8
from plpkg.corpora.images import Images
from plpkg.corpora.overlap import mask_scored

SIDE = 28
"""Pixels on each side of a FEMNIST image."""

CLASSES = 62
"""FEMNIST's labels: ten digits, 26 capitals, 26 small letters."""

WINDOW = 80
"""Characters that a Shakespeare sample shows before the one to predict."""


def leaf_femnist(path: str | Path) -> dict[str, Images]:
    """Read LEAF's FEMNIST: the images of each user, in the file's order.

    Images are ``(images, 1, 28, 28)``, labels 0 to 61. As LEAF writes them, paper is 1 and ink 0: the reverse of
    :func:`plpkg.corpora.images.digits`. A file with any pixel above 1 must hold whole numbers from 0 to 255 alone;
    all its pixels are then divided by 255.

    Parameters
    ----------
    path
        A JSON file, or a folder of ``*.json`` files with different users in each.

    Raises
    ------
    ValueError
        Anything malformed, with the file and the place: ``user_data["f0001_41"].x[3]: 783 numbers, expected 784``.
    OSError
        The file or folder cannot be read.
    """
    users = {}
    for file, by_user in _leaf(path, _pixels):
        scale = _scale(file, by_user)
        for user, (pixels, labels) in by_user.items():
            pixels /= scale  # in place: two copies of every image may not fit where one does
            users[user] = Images(torch.from_numpy(pixels).view(-1, 1, SIDE, SIDE), torch.tensor(labels))
    return users


def leaf_shakespeare(path: str | Path) -> list[Writer]:
    """Read LEAF's Shakespeare: each user's text, rebuilt from its samples, in the file's order of time.

    A sample shows 80 characters and the next one. Where samples follow each other by one character their text is
    joined; where they do not, a new document begins. Blanks with which early versions of LEAF filled a line's first
    windows are removed. The first 80 % of a user's characters are for training, the next 10 % for validation, the
    last 10 % for testing; a document on the border is cut. Documents are named by their place in the user's whole
    text, ``ROMEO[0:8000]``. Path and errors are those of :func:`leaf_femnist`.
    """
    files = _leaf(path, _texts)
    return mask_scored([_in_time(file, user, texts) for file, users in files for user, texts in users.items()])


def _in_time(file: Path, user: str, texts: list[str]) -> Writer:
    parts = cuts(f"characters of the user {user!r} in {file}", sum(map(len, texts)), (0.8, 0.1, 0.1))
    documents: dict[str, list[Document]] = {split: [] for split in SPLITS}
    start = 0
    for text in texts:
        for split, part in parts.items():
            a, b = max(part.start, start), min(part.stop, start + len(text))
            if a < b:
                documents[split].append(Document(f"{user}[{a}:{b}]", text[a - start : b - start]))
        start += len(text)
    return Writer(user, {split: tuple(documents[split]) for split in SPLITS})


class _LeafError(ValueError):
    """What is wrong in a JSON object; the text begins with where in it: ``.x[3]: 783 numbers, expected 784``."""


@dataclass(frozen=True)
class _Samples:
    """A user's ``x`` and ``y`` after their check."""

    count: int
    data: object


def _leaf(path: str | Path, convert: Callable[[list, list], object]) -> Iterator[tuple[Path, dict[str, object]]]:
    """Every file with what ``convert`` makes of each user's ``x`` and ``y``."""
    from tqdm.auto import tqdm

    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no .json file")
    file_of: dict[str, Path] = {}
    for file in tqdm(files, "reading LEAF's files", disable=len(files) == 1):
        users = _leaf_file(file, convert)
        for user in users:
            if user in file_of:
                raise ValueError(f"the user {user!r} is in {file_of[user]} and in {file}")
        file_of |= dict.fromkeys(users, file)
        yield file, users


def _leaf_file(file: Path, convert: Callable[[list, list], object]) -> dict[str, object]:
    def close(pairs: list[tuple[str, object]]) -> object:
        # Samples are converted when their user's object closes, not at the end: a pixel as a Python number takes
        # 32 bytes. Where in the file this is will be known to _users only, so it gets the fault to raise.
        fields = dict(pairs)
        try:
            if len(fields) < len(pairs):
                names = [name for name, _ in pairs]
                twice = next(name for i, name in enumerate(names) if name in names[:i])
                raise _LeafError(f': the key "{twice}" occurs twice')
            if isinstance(fields.get("x"), list) and isinstance(fields.get("y"), list):
                return _samples(fields["x"], fields["y"], convert)
        except _LeafError as fault:
            return fault
        return fields

    text = read_utf8(file)
    try:
        return _users(json.loads(text, object_pairs_hook=close))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{file} is not JSON: {place}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{file} is not LEAF's JSON: lists or objects are nested too deeply") from None
    except ValueError as error:  # a fault, or a number with more digits than Python reads
        raise ValueError(f"{file}: {error}") from None


def _users(content: object) -> dict[str, object]:
    """The users of a file in its order, after the check that its parts agree."""
    users, num_samples, user_data = _fields(content, "the outermost object", "users", "num_samples", "user_data")
    if not _list("users", users):
        raise _LeafError("users is empty")
    if len(_list("num_samples", num_samples)) != len(users):
        raise _LeafError(f"num_samples has {len(num_samples)} entries for {len(users)} users")
    _fields(user_data, "user_data")
    first: dict[str, int] = {}
    for i, user in enumerate(users):
        if not isinstance(user, str):
            raise _LeafError(f"users[{i}]: {_shown(user)}, expected a string")
        if first.setdefault(user, i) != i:
            raise _LeafError(f"users[{i}]: {_shown(user)} again, after users[{first[user]}]")
        if user not in user_data:
            raise _LeafError(f"users[{i}]: {_shown(user)} has no entry in user_data")
    for user, samples in user_data.items():
        place = f"user_data[{_shown(user)}]"
        if user not in first:
            raise _LeafError(f"{place}: not among users")
        if not isinstance(samples, _Samples):
            x, y = _fields(samples, place, "x", "y")
            _list(f"{place}.x", x)
            _list(f"{place}.y", y)
        i = first[user]
        if type(num_samples[i]) is not int or num_samples[i] != samples.count:
            raise _LeafError(f"num_samples[{i}]: {_shown(num_samples[i])}, but {place}.x has {samples.count} samples")
    return {user: user_data[user].data for user in users}


def _fields(value: object, place: str, *names: str) -> list:
    if isinstance(value, _LeafError):
        raise _LeafError(f"{place}{value}")
    if not isinstance(value, dict):
        raise _LeafError(f"{place}: {_shown(value)}, expected an object")
    for name in names:
        if name not in value:
            raise _LeafError(f'{place}: the key "{name}" is missing')
    return [value[name] for name in names]


def _list(place: str, value: object) -> list:
    if not isinstance(value, list):
        raise _LeafError(f"{place}: {_shown(value)}, expected a list")
    return value


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and len(value) < 60 else reprlib.repr(value)


def _samples(x: list, y: list, convert: Callable[[list, list], object]) -> _Samples:
    if len(x) != len(y):
        raise _LeafError(f": {len(x)} samples in x, {len(y)} in y")
    if not x:
        raise _LeafError(": no samples")
    return _Samples(len(x), convert(x, y))


def _pixels(x: list, y: list) -> tuple[np.ndarray, list[int]]:
    """The pixels ``(images, 784)`` as they are, float32, and the labels."""
    for i, row in enumerate(x):
        if not isinstance(row, list):
            raise _LeafError(f".x[{i}]: {_shown(row)}, expected a list of {SIDE**2} numbers")
        if len(row) != SIDE**2:
            raise _LeafError(f".x[{i}]: {len(row)} numbers, expected {SIDE**2}")
        if not set(map(type, row)) <= {int, float}:  # NumPy would take True for 1 and "0.5" for text
            j = next(j for j, value in enumerate(row) if type(value) not in (int, float))
            raise _LeafError(f".x[{i}][{j}]: {_shown(row[j])}, expected a number")
    pixels = np.array(x)  # (images, 784)
    inside = (pixels >= 0) & (pixels <= 255)  # false for NaN
    if not inside.all():
        i, j = np.argwhere(~inside)[0]
        raise _LeafError(f".x[{i}][{j}]: {_shown(x[i][j])}, expected 0 to 1, or 0 to 255 in whole numbers")
    for i, label in enumerate(y):
        if type(label) is not int or not 0 <= label < CLASSES:
            raise _LeafError(f".y[{i}]: {_shown(label)}, expected a whole number from 0 to {CLASSES - 1}")
    return pixels.astype(np.float32), y


def _scale(file: Path, users: dict[str, tuple[np.ndarray, list[int]]]) -> float:
    """What 1 is in the file's pixels: 1 or 255."""

    def first(condition: Callable[[np.ndarray], np.ndarray]) -> str | None:
        for user, (pixels, _) in users.items():
            for i, j in np.argwhere(condition(pixels))[:1]:
                return f"user_data[{_shown(user)}].x[{i}][{j}]: {pixels[i, j]:g}"
        return None

    above = first(lambda pixels: pixels > 1)
    if above is None:
        return 1.0
    if between := first(lambda pixels: pixels % 1 != 0):
        raise ValueError(f"{file}: {above} beside {between}, expected 0 to 1, or 0 to 255 in whole numbers")
    return 255.0


def _texts(x: list, y: list) -> list[str]:
    """The texts that the samples are windows of."""
    texts: list[list[str]] = []
    awaited = None
    for i, (window, following) in enumerate(zip(x, y, strict=True)):
        _string(".x", i, window, WINDOW)
        _string(".y", i, following, 1)
        if window == awaited:
            texts[-1].append(following)
        else:
            texts.append([window.removeprefix(" " * WINDOW), following])
        awaited = window[1:] + following
    return ["".join(pieces) for pieces in texts]


def _string(place: str, i: int, value: object, length: int) -> None:
    if not isinstance(value, str):
        raise _LeafError(f"{place}[{i}]: {_shown(value)}, expected a string of length {length}")
    if len(value) != length:
        raise _LeafError(f"{place}[{i}]: {len(value)} characters, expected {length}")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise _LeafError(f"{place}[{i}]: {value!r} has half a surrogate pair, which is no character")
