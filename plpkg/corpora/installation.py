"""The text that every installation carries: docstrings, one document a module, read without importing.

Left out: what is not in a docstring (comments, names, signatures), docstrings made at run time or in C,
tests, vendored copies, and the parts of the standard library that distributions split off.
"""

import ast
import importlib.util
import re
import sysconfig
import unicodedata
import warnings
from pathlib import Path

SKIPPED = {"test", "tests", "testing", "conftest.py", "_vendor", "_vendored", "vendor", "externals", "site-packages"}
"""Folders and files that hold other people's text, or none for readers."""

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
    """
    if package == "topics":
        from pydoc_data.topics import topics

        return {f"topics/{name}": [clean(text)] for name, text in sorted(topics.items())}
    root = _root(package)
    found = {}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if SKIPPED.intersection(parts) or (package == "stdlib" and parts[0] in SPLIT_OFF):
            continue
        texts = [text for text in map(clean, docstrings(path)) if text]
        if texts:
            found["/".join((package, *parts))] = texts
    return found


def _root(package: str) -> Path:
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the corpora need the package {package!r}, which is not installed", name=package)
    return Path(next(iter(spec.submodule_search_locations)))


def docstrings(path: Path) -> list[str]:
    """The docstrings of one source file, in source order; none if it is not valid Python (a template, say)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return []
    nodes = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))]
    nodes[1:] = sorted(nodes[1:], key=lambda node: node.lineno)
    return [text for node in nodes if (text := ast.get_docstring(node))]


def clean(text: str) -> str:
    """One form for the same text: NFC, spaces for tabs, no control characters, no trailing or surplus blank space."""
    text = UNPRINTABLE.sub("", text.replace("\r\n", "\n").expandtabs(4))
    text = re.sub(r" +$", "", unicodedata.normalize("NFC", text), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")
