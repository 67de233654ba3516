"""The text that every installation carries: docstrings, one document a module, read without importing.

Left out: what is not in a docstring (comments, names, signatures), docstrings made at run time or in C,
tests, vendored copies, and the parts of the standard library that distributions split off.
"""

import ast
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SKIPPED = {
    "test", "tests", "testing", "conftest.py", "_vendor", "_vendored", "vendor", "externals", "_distributor_init.py",
}  # fmt: skip
"""Folders and files that hold other people's text, none for readers, or another one on each system."""

SPLIT_OFF = {"tkinter", "idlelib", "turtledemo", "lib2to3", "ensurepip", "distutils", "msilib", "pydoc_data"}
"""Parts of the standard library that some systems lack or ship apart; the topics are read by themselves."""

UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff]")
"""Control characters but the line feed, lone surrogates, byte order marks."""


def read(packages: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """The :func:`modules` of several packages, read by two processes; errors as there."""
    from tqdm.auto import tqdm

    packages = list(packages)
    for package in packages:
        root_of(package)  # what is missing is said by one process
    # This file alone, run as a script, imports in no time; multiprocessing would run the caller's script again.
    command = [sys.executable, "-P", __file__, *packages]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as other:
        first_half = {package: _part(package, 0, 2) for package in tqdm(packages, "reading docstrings")}
        second_half = other.stdout.read()
    if other.returncode:
        raise RuntimeError(f"the second process that reads docstrings ended with exit status {other.returncode}")
    second_half = json.loads(second_half)
    return {package: _all(package, first_half[package] | second_half[package]) for package in packages}


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
    return _all(package, _part(package, 0, 1))


def _part(package: str, first: int, step: int) -> dict[str, list[str]]:
    """Every ``step``-th module from ``first`` on; those without docstrings left out."""
    if package == "topics":
        from pydoc_data.topics import topics

        texts = ((f"topics/{name}", [clean(topics[name])]) for name in sorted(topics)[first::step])
    else:
        texts = ((name, [*filter(None, map(clean, docstrings(path)))]) for path, name in sources(package)[first::step])
    return {name: documented for name, documented in texts if documented}


def _all(package: str, docstrings: dict[str, list[str]]) -> dict[str, list[str]]:
    if not docstrings:
        raise ValueError(
            f"the corpora need the docstrings of {package!r}, but no source file in {root_of(package)} has any"
        )
    return dict(sorted(docstrings.items()))


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
    with warnings.catch_warnings(), collector_off():
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


@contextmanager
def collector_off() -> Iterator[None]:
    """Syntax trees and texts have no circles, but looking for them takes longer than parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def clean(text: str) -> str:
    """One form for the same text: NFC, spaces for tabs, no control characters, no trailing or surplus blank space."""
    text = UNPRINTABLE.sub("", text.replace("\r\n", "\n").expandtabs(4))
    text = re.sub(r" +$", "", unicodedata.normalize("NFC", text), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


if __name__ == "__main__":  # the second process of read()
    json.dump({package: _part(package, 1, 2) for package in sys.argv[1:]}, sys.stdout)
