"""The JSON files of LEAF (Caldas et al. 2018, https://leaf.cmu.edu), for those who have them.

Each loader reads everything, checks everything, and returns nothing unless all of it is sound; an error names
the file and the place in it. What validation and test texts share with any user's training text is masked;
near-duplicates are not removed. In memory a file may take fifteen times its bytes.

LEAF keeps users in JSON: ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.
Load its ``data/all_data``, the state before LEAF samples and splits: sampling can shuffle a user's text, and
``num_samples`` in Shakespeare's ``data/test`` counts 79 windows more than there are, which is refused here.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Generic, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plpkg.corpora.documents import SPLITS, Document, Writer, cuts
from plpkg.corpora.folder import named, read_utf8
from plpkg.corpora.images import Images
from plpkg.corpora.overlap import mask_scored
from plpkg.validation import shown

SIDE = 28
"""Pixels on each side of a FEMNIST image."""

CLASSES = 62
"""FEMNIST's labels: ten digits, 26 capitals, 26 small letters."""

WINDOW = 80
"""Characters that a Shakespeare sample shows before the one to predict."""

FEW, MARK_EVERY = 2**17, 32
"""Brackets, braces and colons that any file may have, and after how many characters each more: what they mark takes
twenty times its characters in memory. An image has one in at least 1,568, Shakespeare writes one in some hundred."""


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
        Anything malformed, with the file and the place, ``user_data["f0001_41"].x[3]: …``.
    OSError
        The file or folder cannot be read.
    """
    users = {}
    for file, by_user in _leaf(path, _Drawn):
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
    files = _leaf(path, _Spoken)
    return mask_scored([_in_time(file, user, texts) for file, users in files for user, texts in users.items()])


def _in_time(file: Path, user: str, texts: list[str]) -> Writer:
    parts = cuts(f"characters of the user {shown(user)} in {named(file)}", sum(map(len, texts)), (0.8, 0.1, 0.1))
    documents: dict[str, list[Document]] = {split: [] for split in SPLITS}
    start = 0
    for text in texts:
        for split, part in parts.items():
            a, b = max(part.start, start), min(part.stop, start + len(text))
            if a < b:
                documents[split].append(Document(f"{user}[{a}:{b}]", text[a - start : b - start]))
        start += len(text)
    return Writer(user, {split: tuple(documents[split]) for split in SPLITS})


class _Samples(BaseModel):
    """What LEAF has of a user."""

    model_config = ConfigDict(strict=True)
    x: list
    y: list

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.x) != len(self.y) or not self.x:
            raise ValueError(f"{len(self.x)} samples in x, {len(self.y)} in y")
        return self


FIRST = Field(fail_fast=True)
"""Of a list, the first fault is enough: pydantic would collect millions, each of a kilobyte."""
Pixels = Annotated[list[Annotated[float, Field(ge=0, le=255)]], FIRST, Field(min_length=SIDE**2, max_length=SIDE**2)]


class _Drawn(_Samples):
    x: Annotated[list[Pixels], FIRST]
    y: Annotated[list[Annotated[int, Field(ge=0, lt=CLASSES)]], FIRST]

    def converted(self) -> tuple[np.ndarray, list[int]]:
        """The pixels ``(images, 784)`` as they are, float32, and the labels."""
        return np.array(self.x, dtype=np.float32), self.y


class _Spoken(_Samples):
    x: Annotated[list[Annotated[str, Field(min_length=WINDOW, max_length=WINDOW)]], FIRST]
    y: Annotated[list[Annotated[str, Field(min_length=1, max_length=1)]], FIRST]

    def converted(self) -> list[str]:
        """The texts that the samples are windows of."""
        texts: list[list[str]] = []
        awaited = None
        for window, following in zip(self.x, self.y, strict=True):
            if window == awaited:
                texts[-1].append(following)
            else:
                texts.append([window.removeprefix(" " * WINDOW), following])
            awaited = window[1:] + following
        return ["".join(pieces) for pieces in texts]


Kind = TypeVar("Kind", _Drawn, _Spoken)


class _Leaf(BaseModel, Generic[Kind]):
    """A file's outermost object; other keys than these are let be."""

    model_config = ConfigDict(strict=True)
    users: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(min_length=1), FIRST]
    num_samples: Annotated[list[int], FIRST]
    user_data: Annotated[dict[str, Kind], FIRST]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        counts = {user: len(samples.x) for user, samples in self.user_data.items()}
        if len(set(self.users)) < len(self.users):
            raise ValueError(f"users has {_shown(_twice(self.users))} twice")
        if differing := sorted(set(self.users) ^ set(counts)):
            raise ValueError(f"{_shown(differing[0])} is only one of users and of user_data's keys")
        if len(self.num_samples) != len(self.users):
            raise ValueError(f"num_samples has {len(self.num_samples)} entries for {len(self.users)} users")
        for i, (count, user) in enumerate(zip(self.num_samples, self.users, strict=True)):
            if count != counts[user]:
                raise ValueError(
                    f"num_samples[{i}]: {_shown(count)}, but user_data[{_shown(user)}] has {counts[user]} samples"
                )
        return self


def _leaf(path: str | Path, kind: type[_Samples]) -> Iterator[tuple[Path, dict[str, object]]]:
    """Every file with what there is of each user."""
    from tqdm.auto import tqdm

    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no .json file")
    file_of: dict[str, Path] = {}
    for file in tqdm(files, "reading LEAF's files", disable=len(files) == 1):
        content = _read(file, _Leaf[kind])
        for user in content.users:
            if user in file_of:
                raise ValueError(f"the user {shown(user)} is in {named(file_of[user])} and in {named(file)}")
        file_of |= dict.fromkeys(content.users, file)
        yield file, {user: content.user_data[user].converted() for user in content.users}


def _read(file: Path, kind: type[_Leaf]) -> _Leaf:
    text = read_utf8(file)
    marks, most = sum(map(text.count, "[{:")), FEW + len(text) // MARK_EVERY
    if marks > most:
        raise _wrong(file, f"it has {marks:,} brackets, braces and colons, at most {most:,} are allowed in its length")
    try:
        return kind.model_validate(json.loads(text, object_pairs_hook=_once))
    except json.JSONDecodeError as error:
        reason = f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        reason = "lists or objects are nested too deeply"
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        said = first["msg"].removeprefix("Value error, ").partition(" or instance of")[0]
        own = first["type"] == "value_error"  # of this module, which names the value
        reason = _place(first["loc"]) + (said if own else f"{said}, got {_shown(first['input'])}")
    except ValueError as error:  # a number with more digits than Python reads
        reason = str(error)
    raise _wrong(file, reason)


def _wrong(file: Path, reason: str) -> ValueError:
    return ValueError(f"{named(file)}: {reason}"[:300])


class _Twice:
    """In the place of an object of JSON that has a key twice, of which the last would silently be taken."""

    def __init__(self, key: str) -> None:
        self.key = key


def _once(pairs: list[tuple[str, object]]) -> dict[str, object] | _Twice:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _Twice(_twice(name for name, _ in pairs))


def _twice(names: Iterable[str]) -> str:
    """The first name that was there before."""
    known: set[str] = set()
    return next(name for name in names if name in known or known.add(name))


def _place(location: tuple[str | int, ...]) -> str:
    """Where in the file that is: ``user_data["f0001_41"].x[3]: ``."""
    parts = [f"[{_shown(part)}]" if i == 1 or isinstance(part, int) else f".{part}" for i, part in enumerate(location)]
    return "".join(parts).lstrip(".") + ": " * bool(parts)


def _shown(value: object) -> str:
    if isinstance(value, _Twice):
        return f"the key {_shown(value.key)} twice"
    short = isinstance(value, str) and len(value) < 60
    text = json.dumps(value, ensure_ascii=not value.isprintable()) if short else shown(value)
    return text if len(text) < 62 else f"{text[:30]}...{text[-28:]}"


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
        raise _wrong(file, f"{above} beside {between}, expected 0 to 1, or 0 to 255 in whole numbers")
    return 255.0
