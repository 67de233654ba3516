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

import ast
import bisect
import contextlib
import csv
import gc
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

from plpkg import catalog
from plpkg.corpora import documents
from plpkg.corpora.documents import SPLITS, Document, Writer, mask_scored
from plpkg.untrusted import read_file, shown
from plpkg.validation import one_of

PUBLIC = (
    "topics", "stdlib", "accelerate", "fontTools", "fsspec", "huggingface_hub", "jinja2", "mpmath", "networkx",
    "PIL", "pyparsing", "rich", "sympy", "transformers",
)  # fmt: skip
"""Where the public text comes from."""

PRIVATE = ("matplotlib", "numpy", "opacus", "pandas", "peft", "scipy", "seaborn", "sklearn", "torch")
"""The private writers."""

SHARES = {"public": (0.92, 0.04, 0.04), "private": (0.8, 0.1, 0.1)}
"""What train, validation and test get of the public text, and of each private writer's."""

SHORTEST = 200
"""Characters in the shortest document that is kept."""

KEPT, MAX_CACHE_BYTES = 3, 2**26
"""Cache files that stay, each of about 26 MB: the newest, of as many installations; and the most that one may have."""

SKIPPED = {
    "test", "tests", "testing", "conftest.py", "_vendor", "_vendored", "vendor", "externals", "_distributor_init.py",
}  # fmt: skip
"""Folders and files that hold other people's text, none for readers, or another one on each system."""

SPLIT_OFF = {"tkinter", "idlelib", "turtledemo", "lib2to3", "ensurepip", "distutils", "msilib", "pydoc_data"}
"""Parts of the standard library that some systems lack or ship apart; the topics are read by themselves."""

UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff]")
"""Control characters but the line feed, lone surrogates, byte order marks."""

SHINGLE = 5
"""Words in a shingle."""

SEEN_SHARE = 0.5
"""A paragraph with at least this share of its shingles seen before is a near-duplicate."""


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
    packed = {
        name: {split: [vars(d) for d in writer.documents[split]] for split in SPLITS}
        for name, writer in library.items()
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(packed), encoding="utf-8")
        partial.replace(path)  # never half a file, even with two processes at it
        for old in sorted(path.parent.glob("corpora-*.json"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # on a full disk, half a file
        warnings.warn(f"the corpora cannot be kept in {path.parent} ({error})", stacklevel=2)
    return library


def _unpack(packed: dict) -> dict[str, Writer]:
    def document(fields: dict) -> Document:
        return Document(fields["name"], fields["text"], tuple((start, end) for start, end in fields["masked"]))

    return {
        name: Writer(name, {split: tuple(map(document, packed[name][split])) for split in SPLITS})
        for name in ("public", *PRIVATE)
    }


def _cache_path() -> Path:
    """A file of its own for each state of the source files, as sizes and times tell it, and of this code."""
    code = [Path(path).read_bytes() for path in (__file__, documents.__file__)]
    digest = hashlib.sha256(repr((versions(), code)).encode())
    for package in PUBLIC + PRIVATE:
        for path, name in sources(package) if package != "topics" else ():
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
    # What stands after the plus names a build (+cpu), not another text.
    of_packages = {name: version(distributions[name][0]).partition("+")[0] for name in packages}
    return {"python": platform.python_version()} | of_packages


def described(versions: Mapping[str, str]) -> str:
    """Versions in one line, as a record keeps them."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def changed(built_with: str) -> list[str]:
    """Which versions are other ones than those of a record: ``["numpy 2.5.0, not 2.4.1"]``.

    Parameters
    ----------
    built_with
        The record's versions, as :func:`described` wrote them.
    """
    before = dict(item.rpartition(" ")[::2] for item in built_with.split(", "))
    return [f"{name} {now}, not {before.get(name)}" for name, now in versions().items() if before.get(name) != now]


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
    assigned, learnt = {name: {} for name in names}, _learnt_splits()
    packages = [("public", package) for package in public] + [(name, name) for name in private]
    for name, package in tqdm(packages, "reading docstrings"):
        texts = modules(package)
        parts = by_name(texts, SHARES["public"], learnt) if name == "public" else by_size(texts, SHARES["private"])
        for split, part in zip(SPLITS, parts, strict=True):
            assigned[name].setdefault(split, {}).update(part)

    # Who comes first keeps a shared paragraph: the public before the private, training text before scored text.
    deduplicate = Deduplicator()
    order = [("public", split) for split in SPLITS] + [(name, split) for split in SPLITS for name in private]
    kept = {name: {} for name in names}
    for name, split in tqdm(order, "removing duplicates"):
        texts = ((module, deduplicate(paragraphs)) for module, paragraphs in assigned[name][split].items())
        kept[name][split] = tuple(Document(module, text) for module, text in texts if len(text) >= SHORTEST)
    return {w.name: w for w in mask_scored([Writer(name, documents) for name, documents in kept.items()])}


def _learnt_splits() -> dict[str, int]:
    """Where each public module was when ``plpkg-small`` learnt: there it stays, whatever the versions."""
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
    parts, edges = [{} for _ in shares], list(itertools.accumulate(shares))[:-1]
    for name in sorted(modules):
        at = bisect.bisect(edges, int.from_bytes(_digest(name)[:8], "big") / 2**64)
        parts[fixed.get(name, at)][name] = modules[name]
    return parts


def by_size(modules: dict[str, list[str]], shares: tuple[float, ...]) -> list[dict[str, list[str]]]:
    """Deal modules out, in the order of their names' sha256, each to the part that lacks most characters.

    A writer with few modules gets its shares more evenly than by :func:`by_name`. The part is chosen
    before the module is measured: large modules are as likely to be held out as small ones.
    """
    parts, sizes = [{} for _ in shares], [0] * len(shares)
    for name in sorted(modules, key=_digest):
        at = max(range(len(shares)), key=lambda i: shares[i] * sum(sizes) - sizes[i])
        parts[at][name] = modules[name]
        sizes[at] += sum(map(len, modules[name]))
    return [dict(sorted(part.items())) for part in parts]


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def modules(package: str) -> dict[str, list[str]]:
    """The docstrings of every module of a package, by the module's path.

    Parameters
    ----------
    package
        A package's import name; ``"stdlib"`` for the standard library, ``"topics"`` for the language
        reference that ``help()`` shows.

    Returns
    -------
    dict
        ``"numpy/linalg/_linalg.py"``: its docstrings in source order, cleaned; modules without any left out.

    Raises
    ------
    ModuleNotFoundError
        The package is not installed.
    ValueError
        It is in several folders, or has no source files with docstrings (a zip file, say).
    """
    if package == "topics":
        from pydoc_data.topics import topics

        found = {f"topics/{name}": [clean(topics[name])] for name in sorted(topics)}
    else:
        found = {name: [*filter(None, map(clean, docstrings(path)))] for path, name in sources(package)}
    documented = {name: texts for name, texts in found.items() if texts}
    if not documented:
        raise ValueError(
            f"the corpora need the docstrings of {package!r}, but no source file in {root_of(package)} has any"
        )
    return documented


def sources(package: str) -> list[tuple[Path, str]]:
    """Every source file that is read, with its module's path, sorted by this; errors as in :func:`modules`."""
    root, python_files = root_of(package), []
    for folder, folders, files in os.walk(root):
        parts = Path(folder).relative_to(root).parts
        wanted = (lambda name: True) if parts or package != "stdlib" else _standard
        folders[:] = [name for name in folders if name not in SKIPPED and wanted(name)]
        python_files += [
            (Path(folder, name), "/".join((package, *parts, name)))
            for name in files
            if name.endswith(".py") and name not in SKIPPED and wanted(name)
        ]
    return sorted(python_files, key=lambda source: source[1])


def root_of(package: str) -> Path:
    """The folder of a package's source files; errors as in :func:`modules`."""
    if package in ("stdlib", "topics"):
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the corpora need the package {package!r}, which is not installed", name=package)
    locations = list(spec.submodule_search_locations)
    if len(locations) > 1:
        raise ValueError(f"the corpora need the package {package!r} in one folder, it is in {', '.join(locations)}")
    return Path(locations[0])


def _standard(top: str) -> bool:
    """Whether a name in the standard library's folder belongs to it: others are a site's own, or installed there."""
    name = top.removesuffix(".py")
    return name in sys.stdlib_module_names and name not in SPLIT_OFF


def docstrings(path: Path) -> list[str]:
    """The docstrings of one source file, in source order; none if it is not valid Python (a template, say)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return []
        return [text for node in (tree, *_definitions(tree)) if (text := ast.get_docstring(node))]


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Classes and functions in source order. Only statements hold any: expressions, most of a tree, are passed by."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from _definitions(child)


def clean(text: str) -> str:
    """One form for the same text: NFC, spaces for tabs, no control characters, no trailing or surplus blank space."""
    text = UNPRINTABLE.sub("", text.replace("\r\n", "\n").expandtabs(4))
    text = re.sub(r" +$", "", unicodedata.normalize("NFC", text), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


class Deduplicator:
    """Keeps what is new. It remembers all that it has kept, so the order of the calls decides who keeps a text.

    A paragraph counts as a near-duplicate if most of its five-word shingles have been seen before
    (Broder 1997; the share of the paragraph, not of the union, so that a part of an earlier text counts too).
    """

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self._seen: set[int] = set()

    def __call__(self, docstrings: Iterable[str]) -> str:
        """The docstrings without near-duplicate paragraphs, joined by blank lines.

        Paragraphs of fewer than :data:`SHINGLE` words (headings, say) stay with a docstring of which
        something longer stays, or that is short as a whole and new.
        """
        return "\n\n".join(filter(None, map(self._keep, docstrings)))

    def _keep(self, docstring: str) -> str:
        kept, lost, fresh = [], False, False
        for paragraph in re.split(r"\n\s*\n", docstring):
            shingles = self._shingles(paragraph)
            if len(shingles) and sum(s in self._seen for s in shingles) >= SEEN_SHARE * len(shingles):
                lost = True
                continue
            self._seen.update(shingles)
            fresh |= bool(shingles)
            kept.append(paragraph)
        if fresh:
            return "\n\n".join(kept)
        if lost:
            return ""
        whole = hash((-1, *self._ids(docstring)))
        if whole in self._seen:
            return ""
        self._seen.add(whole)
        return docstring

    def _ids(self, text: str) -> list[int]:
        # Numbers are all alike: two paragraphs that differ in them alone are duplicates.
        # Word numbers, not words, are hashed: Python's hash of a string changes from process to process.
        words = re.findall(r"[^\W\d_]+|\d+", text.lower())
        return [self._words.setdefault("0" if word.isdigit() else word, len(self._words)) for word in words]

    def _shingles(self, paragraph: str) -> list[int]:
        ids = self._ids(paragraph)
        return [hash(tuple(ids[i : i + SHINGLE])) for i in range(len(ids) - SHINGLE + 1)]
