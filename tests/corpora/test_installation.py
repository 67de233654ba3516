import sys

import pytest

from plpkg.corpora import installation
from plpkg.corpora.installation import clean, docstrings, modules, read


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package that must not be imported."""
    folder = tmp_path / "crashes"
    for name, text in {
        "__init__.py": '"""The front door."""\nraise SystemExit("imported")',
        "later.py": 'class A:\n    """First."""\n    def f(self):\n        """Second."""\ndef g():\n    """Third."""',
        "empty.py": "x = 1  # not a docstring",
        "template.py": "{{ cookiecutter }} :",
        "latin.py": b'# coding: latin-1\n"""caf\xe9"""',
        "tests/test_a.py": '"""Test."""',
        "_distributor_init.py": '"""Another on Windows."""',
        "deep/_vendor/b.py": '"""Somebody else\'s."""',
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_docstrings_are_read_in_source_order_without_importing(package):
    assert modules("crashes") == {
        "crashes/__init__.py": ["The front door."],
        "crashes/latin.py": ["café"],
        "crashes/later.py": ["First.", "Second.", "Third."],
    }
    assert "crashes" not in sys.modules


def test_two_processes_read_what_one_reads(package):
    packages = ("crashes", "topics", "opacus", "jinja2")
    docstrings = read(packages)
    assert [(name, list(texts.items())) for name, texts in docstrings.items()] == [
        (name, list(modules(name).items())) for name in packages
    ]
    with pytest.raises(ModuleNotFoundError, match="the corpora need the package 'no_such_package'"):
        read(["opacus", "no_such_package"])


def test_a_second_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(installation, "__file__", "/no/such/file.py")
    with pytest.raises(RuntimeError, match="the second process that reads docstrings ended with exit status 2"):
        read(["opacus"])


BLOCKS = """
try:
    def a(): "1"
except ValueError:
    class B:
        if True:
            async def c(): "2"
        elif False:
            def d(): "3"
        else:
            def e(): "4"
else:
    for i in x:
        def f(): "5"
    else:
        while y:
            def g(): "6"
finally:
    with z, (lambda: 0):
        match w:
            case 1:
                def h(): "7"
            case _:
                @decorated(lambda: "no docstring")
                class K:
                    "8"
                    value = [lambda: 0]
                    def m(self):
                        "9"
                        def n(): "10"
try:
    pass
except* OSError:
    def o(): "11"
"""


def test_definitions_are_found_in_every_kind_of_block_and_invalid_escapes_stay_silent(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(BLOCKS)
    assert docstrings(path) == [str(n) for n in range(1, 12)]
    path = tmp_path / "a.py"
    path.write_text('"""A \\d pattern."""\nx = 1 is 1')
    assert docstrings(path) == ["A \\d pattern."]


def test_standard_library_and_topics_have_their_texts():
    stdlib = modules("stdlib")
    assert "Return the mean" in " ".join(stdlib["stdlib/statistics.py"]) or "mean" in stdlib["stdlib/statistics.py"][0]
    assert not [name for name in stdlib if "/test/" in name or "tkinter" in name or "site-packages" in name]
    topics = modules("topics")
    assert "Lambda expressions" in topics["topics/lambda"][0]
    assert len(topics) > 70


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb", "a\nb"),
        ("a\tb", "a   b"),
        ("a  \n\n\n\n\n b ", "a\n\n b"),
        ("\n\na\n", "a"),
        ("e\u0301\u0000\u001b[1m\ufeff", "é[1m"),
        ("\ud800x", "x"),
        ("\n \n", ""),
    ],
)
def test_clean(text, expected):
    assert clean(text) == expected
    assert clean(expected) == expected


def test_what_a_site_adds_to_the_standard_library_is_not_read(tmp_path, monkeypatch):
    added = ("dist-packages/x.py", "sitecustomize.py", "tkinter/x.py", "lib-old/y.py")
    for name in ("json/decoder.py", "heapq.py", *added):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('"""Text."""')
    monkeypatch.setattr(installation.sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(modules("stdlib")) == ["stdlib/heapq.py", "stdlib/json/decoder.py"]


def test_a_package_that_cannot_be_read_whole_is_refused(tmp_path, monkeypatch):
    for folder in ("one", "two", "three"):
        (tmp_path / folder / "spread").mkdir(parents=True)
    (tmp_path / "three" / "silent").mkdir()
    (tmp_path / "three" / "silent" / "__init__.py").write_text("x = 1")
    for folder in ("one", "two", "three"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    with pytest.raises(ValueError, match=r"need the package 'spread' in one folder, it is in .*two/spread"):
        modules("spread")
    with pytest.raises(ValueError, match=r"need the docstrings of 'silent', but no source file in .* has any"):
        modules("silent")
