"""The docstrings of one installed package, or of the standard library, read without importing any of it."""

import ast
import importlib.util
import os
import re
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {
    "test", "tests", "testing", "conftest.py", "_vendor", "_vendored", "vendor", "externals", "_distributor_init.py",
}  # fmt: skip
"""Folders and files that hold other people's text, none for readers, or another one on each system."""

SPLIT_OFF = {"tkinter", "idlelib", "turtledemo", "lib2to3", "ensurepip", "distutils", "msilib", "pydoc_data"}
"""Parts of the standard library that some systems lack or ship apart; the topics are read by themselves."""

UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff]")
"""Control characters but the line feed, lone surrogates, byte order marks."""


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
        found = {}
        for path, name in sources(package):
            cleaned = map(clean, docstrings(path))
            found[name] = [text for text in cleaned if text]
    documented = {name: texts for name, texts in found.items() if texts}
    if not documented:
        raise ValueError(
            f"the corpora need the docstrings of {package!r}, but no source file in {root_of(package)} has any"
        )
    return documented


def sources(package: str) -> list[tuple[Path, str]]:
    """Every source file that is read, with its module's path, sorted by this; errors as in :func:`modules`."""
    root = root_of(package)
    found = []
    for folder, folders, files in os.walk(root):
        parts = Path(folder).relative_to(root).parts
        folders[:] = [name for name in folders if name not in SKIPPED]
        python_files = [name for name in files if name.endswith(".py") and name not in SKIPPED]
        if package == "stdlib" and not parts:  # where a site's own files and packages are as well
            folders[:] = filter(_standard, folders)
            python_files = filter(_standard, python_files)
        for name in python_files:
            module = "/".join((package, *parts, name))
            found.append((Path(folder, name), module))
    return sorted(found, key=lambda source: source[1])


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
        found = [ast.get_docstring(node) for node in (tree, *_definitions(tree))]
    return [text for text in found if text]


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
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
