"""Your own texts: a folder, whose sub-folders are writers.

Everything is read and checked before anything is returned. What validation and test texts share with any
writer's training text is masked; near-duplicates are not removed, unlike in the corpora that come with this package.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plpkg.corpora.documents import SPLITS, Document, Writer, cuts, mask_scored
from plpkg.files.untrusted import MAX_BYTES, read_file, shown
from plpkg.validation import whole_number

MAX_TEXT_BYTES = 2**24
"""Of a document: a shelf of novels."""


def text_folder(
    path: str | Path, *, seed: int = 0, shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
) -> list[Writer]:
    """Read ``.txt`` and ``.md`` files: each sub-folder is a writer, each file in it, however deep, a document.

    Files directly in the folder belong to one more writer, named after the folder. Whole files go to the splits
    at random; what one writer gets depends neither on the other writers nor on the file system's order.
    Left out are symbolic links, hidden files and folders (``.git``), files of nothing but white space, and
    sub-folders without any text.

    Parameters
    ----------
    path
        The folder. Files are UTF-8, of at most 16 MiB; documents are named by their path in it, ``anna/2024/may.md``.
    seed
        The seed of the order in which files are dealt out.
    shares
        The shares of each writer's files for train, validation and test; each split whose share is not 0 gets at least
        one file. With ``(1, 0, 0)`` all of them are to be learnt.

    Raises
    ------
    ValueError
        A file that is not UTF-8 (with the byte and the line), too large, no regular file or not to be opened, a writer
        with fewer files than splits that get one, a folder without any text, a sub-folder with the folder's own name
        beside files directly in it, or bad shares or seed.
    OSError
        A folder that does not exist, or a folder that cannot be read.
    """
    whole_number("seed", seed, 0)
    root = _printable(Path(path).resolve().name)
    by_folder: dict[str, list[Document]] = defaultdict(list)
    for document in text_files(path):
        folder, inside, _ = document.name.partition("/")
        by_folder[folder if inside else ""].append(document)
    if "" in by_folder and root in by_folder:
        raise ValueError(f"{path} holds files and a sub-folder {root!r}: two writers of one name")
    writers = []
    for folder, documents in by_folder.items():
        name = folder or root
        parts = cuts(f"text files of the writer {shown(name)} in {path}", len(documents), shares)
        order = np.random.default_rng((seed, *folder.encode())).permutation(len(documents))
        dealt = {}
        for split in SPLITS:
            chosen = sorted(order[parts[split]])
            dealt[split] = tuple(documents[i] for i in chosen)
        writers.append(Writer(name, dealt))
    return mask_scored(sorted(writers, key=lambda writer: writer.name))


def text_files(path: str | Path) -> list[Document]:
    """The texts in a folder, as :func:`text_folder` finds them, in the order of their names: one is enough.

    Raises
    ------
    ValueError, OSError
        As :func:`text_folder`.
    """
    root = Path(path).resolve()
    documents = []
    for file in _text_files(root):
        name = "/".join(map(_printable, file.relative_to(root).parts))
        text = read_utf8(file, MAX_TEXT_BYTES)
        if text.strip():
            documents.append(Document(name, text))
    if not documents:
        raise ValueError(f"{path} holds no .txt or .md file with text in it")
    return sorted(documents, key=lambda document: document.name)


def _printable(name: str) -> str:
    """A name that is not UTF-8 could be read, but not hashed or printed later: its odd bytes as ``\\xe9``."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _text_files(root: Path) -> Iterator[Path]:
    """Files that end like a text, in no order; no hidden ones, and no links."""

    def stop(error: OSError) -> None:
        raise error  # os.walk would pass over a folder that it cannot read

    for folder, subfolders, names in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            is_text = file.suffix.lower() in (".txt", ".md") and not name.startswith(".")
            if is_text and not file.is_symlink():
                yield file


def named(file: Path) -> str:
    """A file's path on one line, the end of it where it is long."""
    path = repr(str(file))[1:-1]
    return path if len(path) <= 80 else f"…{path[-80:]}"


def read_utf8(file: Path, most_bytes: int = MAX_BYTES) -> str:
    """A regular file's text without a byte order mark.

    Raises
    ------
    ValueError
        It is not UTF-8, with the byte and the line; no regular file (a pipe would make us wait); or too large.
    OSError
        There is no such file.
    """
    os.stat(file)  # an OSError if there is none, where read_file has a ValueError
    try:
        content = read_file(file, most_bytes)
    except ValueError as error:
        raise ValueError(f"{named(file)}{str(error).removeprefix(file.name)}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{named(file)} is not UTF-8: byte {error.start}, in line {line}, {error.reason}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
