"""Docstrings of installed packages as texts to learn from: the public's, and nine packages that play people.

Public text is what nobody wrote in private: the standard library and packages that come with this one's
dependencies. A private writer is one of nine packages that this one requires. Source files are parsed, not imported;
a module is a document. Modules go to train, validation or test as a whole; near-duplicate paragraphs stay in one place
only; what validation and test text shares with any training text, anybody's, is masked. The texts are built once per
set of versions, then cached.

Left out: what is not in a docstring (comments, names, signatures), docstrings made at run time or in C,
tests, vendored copies, and the parts of the standard library that distributions split off.

Other versions have other texts, hence other figures: :func:`versions` says which were read, :func:`changed` which of
them are not those of a record.
"""

import bisect
import contextlib
import csv
import gc
import hashlib
import itertools
import json
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

from plpkg import catalog
from plpkg.corpora import documents, duplicates, installed
from plpkg.corpora.documents import SPLITS, Document, Writer, mask_scored
from plpkg.corpora.duplicates import Deduplicator
from plpkg.corpora.installed import modules, sources
from plpkg.files.untrusted import read_file, shown
from plpkg.validation import one_of

PUBLIC = (
    "topics", "stdlib", "accelerate", "fontTools", "fsspec", "huggingface_hub", "jinja2", "mpmath", "networkx",
    "PIL", "pyparsing", "rich", "sympy", "transformers",
)  # fmt: skip
"""Where the public text comes from."""

PRIVATE = ("matplotlib", "numpy", "opacus", "pandas", "peft", "scipy", "seaborn", "sklearn", "torch")
"""The private writers."""

SHARES = {"public": (0.92, 0.04, 0.04), "private": (0.8, 0.1, 0.1)}
"""The shares of train, validation and test, of the public text and of each private writer's."""

SHORTEST = 200
"""Characters in the shortest document that is kept."""

KEPT = 3
"""Cache files that stay: the newest, of as many installations."""

MAX_CACHE_BYTES = 2**26
"""The most that a cache file may have; it has about 26 MB."""


def public(split: str) -> list[Document]:
    """The public text: ``"train"``, ``"validation"`` or ``"test"``.

    Raises
    ------
    ValueError
        Another split.
    """
    return _library()["public"].split(split)


def writers() -> list[str]:
    """The names of the private writers."""
    return list(PRIVATE)


def writer(name: str) -> Writer:
    """One private writer, or ``"public"``.

    Raises
    ------
    ValueError
        No such writer.
    """
    return _library()[one_of("writer", name, ("public", *PRIVATE))]


@cache
def _library() -> dict[str, Writer]:
    """Every writer by name, from the cache or built anew."""
    path = _cache_path()
    if os.path.lexists(path):  # if the folder is at fault, writing will say so
        try:
            return _unpack(json.loads(read_file(path, MAX_CACHE_BYTES).decode()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(f"{path} cannot be read ({shown(str(error))}): the corpora are built anew", stacklevel=2)
    library = build()
    _keep(library, path)
    return library


def _keep(library: Mapping[str, Writer], path: Path) -> None:
    """Write the cache file, and delete the oldest ones beside it; a warning if that cannot be done."""
    packed = {}
    for name, writer in library.items():
        packed[name] = {split: [vars(document) for document in writer.documents[split]] for split in SPLITS}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(packed), encoding="utf-8")
        partial.replace(path)  # never half a file, even with two processes at it
        by_age = sorted(path.parent.glob("corpora-*.json"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # on a full disk, half a file
        warnings.warn(f"the corpora cannot be kept in {path.parent} ({error})", stacklevel=3)


def _unpack(packed: dict) -> dict[str, Writer]:
    """The writers in a cache file's JSON; ValueError, KeyError, TypeError or AttributeError if they are not there."""

    def document(fields: dict) -> Document:
        masked = tuple((start, end) for start, end in fields["masked"])  # JSON has lists
        return Document(fields["name"], fields["text"], masked)

    library = {}
    for name in ("public", *PRIVATE):
        splits = {split: tuple(map(document, packed[name][split])) for split in SPLITS}
        library[name] = Writer(name, splits)
    return library


def _cache_path() -> Path:
    """A file of its own for each state of the source files, as sizes and times tell it, and of this code."""
    files = (__file__, documents.__file__, duplicates.__file__, installed.__file__)
    code = [Path(file).read_bytes() for file in files]
    digest = hashlib.sha256(repr((versions(), code)).encode())
    for package in PUBLIC + PRIVATE:
        if package == "topics":  # a part of the standard library, whose version has been counted
            continue
        for path, name in sources(package):
            stat = path.stat()
            digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return catalog.cache_path(f"corpora-{digest.hexdigest()[:16]}.json")


def versions() -> dict[str, str]:
    """The versions that decide the text: Python's, and each package's."""
    distributions = packages_distributions()
    packages = [name for name in PUBLIC + PRIVATE if name not in ("topics", "stdlib")]
    missing = [name for name in packages if name not in distributions]
    if missing:
        raise ModuleNotFoundError(f"the corpora need the package {missing[0]!r}, which is not installed")
    found = {"python": platform.python_version()}
    for name in packages:
        distribution = distributions[name][0]
        found[name] = version(distribution).partition("+")[0]  # after the plus is a build (+cpu), not another text
    return found


def described(versions: Mapping[str, str]) -> str:
    """Versions in one line, as a record keeps them."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def changed(built_with: str) -> list[str]:
    """List the versions that are not those of a record: ``["numpy 2.5.0, not 2.4.1"]``.

    Parameters
    ----------
    built_with
        The record's versions, as :func:`described` wrote them.
    """
    recorded = {}
    for item in built_with.split(", "):
        name, _, then = item.rpartition(" ")
        recorded[name] = then
    return [f"{name} {now}, not {recorded.get(name)}" for name, now in versions().items() if recorded.get(name) != now]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Syntax trees and texts have no circles, but looking for them takes longer than parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collector_off()
def build(public: tuple[str, ...] = PUBLIC, private: tuple[str, ...] = PRIVATE) -> dict[str, Writer]:
    """Read installed packages and make the corpora of them: about 40 seconds for all."""
    from tqdm.auto import tqdm

    names = ("public", *private)
    assigned = {name: {split: {} for split in SPLITS} for name in names}  # writer, split, module: its docstrings
    learnt = _learnt_splits()
    packages = [("public", package) for package in public] + [(name, name) for name in private]
    for name, package in tqdm(packages, "reading docstrings"):
        texts = modules(package)
        parts = by_name(texts, SHARES["public"], learnt) if name == "public" else by_size(texts, SHARES["private"])
        for split, part in zip(SPLITS, parts, strict=True):
            assigned[name][split] |= part

    # Who comes first keeps a shared paragraph: the public before the private, training text before scored text.
    order = [("public", split) for split in SPLITS]
    for split in SPLITS:
        order += [(name, split) for name in private]
    deduplicate = Deduplicator()
    kept = {name: {} for name in names}  # writer, split: its documents
    for name, split in tqdm(order, "removing duplicates"):
        documents = []
        for module, docstrings in assigned[name][split].items():
            text = deduplicate(docstrings)
            if len(text) >= SHORTEST:
                documents.append(Document(module, text))
        kept[name][split] = tuple(documents)
    writers = [Writer(name, documents) for name, documents in kept.items()]
    return {writer.name: writer for writer in mask_scored(writers)}


def _learnt_splits() -> dict[str, int]:
    """The number of the split in which each public module was when ``plpkg-small`` learnt: there it stays."""
    with catalog.data_path("backbone", "modules.csv").open(encoding="utf-8", newline="") as file:
        return {row["module"]: SPLITS.index(row["split"]) for row in csv.DictReader(file)}


def by_name(
    modules: dict[str, list[str]], shares: tuple[float, ...], fixed: Mapping[str, int]
) -> list[dict[str, list[str]]]:
    """Split modules by the sha256 of each one's name alone: a module has the same part under every version.

    Parameters
    ----------
    modules
        Docstrings by module.
    shares
        The shares of the parts, in modules; they add up to 1.
    fixed
        Modules whose part is given by its number.
    """
    parts = [{} for _ in shares]
    edges = list(itertools.accumulate(shares))[:-1]
    for name in sorted(modules):
        drawn = int.from_bytes(_digest(name)[:8], "big") / 2**64  # from 0 to 1
        part = fixed.get(name, bisect.bisect(edges, drawn))
        parts[part][name] = modules[name]
    return parts


def by_size(modules: dict[str, list[str]], shares: tuple[float, ...]) -> list[dict[str, list[str]]]:
    """Deal modules out, in the order of their names' sha256, each to the part that lacks most characters.

    A writer with few modules gets its shares more evenly than by :func:`by_name`. The part is chosen
    before the module is measured: large modules are as likely to be held out as small ones.
    """
    parts = [{} for _ in shares]
    sizes = [0] * len(shares)  # in characters
    for name in sorted(modules, key=_digest):
        lacking = [share * sum(sizes) - size for share, size in zip(shares, sizes, strict=True)]
        at = lacking.index(max(lacking))
        parts[at][name] = modules[name]
        sizes[at] += sum(map(len, modules[name]))
    return [dict(sorted(part.items())) for part in parts]


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
