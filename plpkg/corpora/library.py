"""The corpora themselves: public text and private writers; built once per set of versions, then cached.

Public text is what nobody wrote in private: the standard library and packages that come with this one's
dependencies. A private writer is one of nine packages that this one requires. Modules go to train, validation
or test as a whole; near-duplicate paragraphs stay in one place only; what validation and test text shares
with any training text, anybody's, is masked.
"""

import bisect
import contextlib
import csv
import hashlib
import itertools
import json
import os
import platform
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

from plpkg import catalog
from plpkg.corpora import documents, installation, overlap
from plpkg.corpora.documents import SPLITS, Document, Writer
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
    code = [Path(module.__file__).read_bytes() for module in (documents, installation, overlap)]
    digest = hashlib.sha256(repr((versions(), Path(__file__).read_bytes(), code)).encode())
    for package in PUBLIC + PRIVATE:
        for path, name in installation.sources(package) if package != "topics" else ():
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


def described(versions: dict[str, str]) -> str:
    """Versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


@installation.collector_off()
def build(public: tuple[str, ...] = PUBLIC, private: tuple[str, ...] = PRIVATE) -> dict[str, Writer]:
    """Read installed packages and make the corpora of them: about half a minute of two cores for all."""
    from tqdm.auto import tqdm

    sources = {"public": public} | {name: (name,) for name in private}
    assigned, learnt = {name: {} for name in sources}, _learnt_splits()
    texts = installation.read(itertools.chain(*sources.values()))
    for name, package in ((n, p) for n, packages in sources.items() for p in packages):
        modules = texts[package]
        public_text = name == "public"
        parts = by_name(modules, SHARES["public"], learnt) if public_text else by_size(modules, SHARES["private"])
        for split, modules_of_split in zip(SPLITS, parts, strict=True):
            assigned[name].setdefault(split, {}).update(modules_of_split)

    # Who comes first keeps a shared paragraph: the public before the private, training text before scored text.
    deduplicate = overlap.Deduplicator()
    order = [("public", split) for split in SPLITS] + [(name, split) for split in SPLITS for name in private]
    kept = {name: {} for name in sources}
    for name, split in tqdm(order, "removing duplicates"):
        texts = ((module, deduplicate(paragraphs)) for module, paragraphs in assigned[name][split].items())
        kept[name][split] = tuple(Document(module, text) for module, text in texts if len(text) >= SHORTEST)
    return {w.name: w for w in overlap.mask_scored([Writer(name, documents) for name, documents in kept.items()])}


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
