"""The corpora of this installation, and how they are read, made, kept and found again."""

import errno
import os
import re
import sys

import pytest

from plpkg import catalog, corpora
from plpkg.corpora import SPLITS, docstrings, installed
from plpkg.corpora.documents import SPAN
from plpkg.corpora.duplicates import Deduplicator
from plpkg.corpora.installed import clean, modules

from preloaded import Process

SMALL = (("topics", "jinja2"), ("opacus", "seaborn"))


@pytest.fixture(scope="module")
def everything():
    return [corpora.writer(name) for name in ("public", *corpora.writers())]


def test_front_door():
    assert corpora.writers() == sorted(corpora.writers())
    assert {"numpy", "scipy", "matplotlib", "pandas", "sklearn", "torch"} <= set(corpora.writers())
    assert corpora.public("test") == corpora.writer("public").split("test")
    with pytest.raises(ValueError, match=r"writer must be one of 'public', 'matplotlib', .*, got 'shakespeare'"):
        corpora.writer("shakespeare")
    with pytest.raises(ValueError, match="split must be one of"):
        corpora.public("dev")


def test_no_module_is_in_two_splits_and_masking_takes_a_small_share(everything):
    names = [d.name for writer in everything for split in SPLITS for d in writer.split(split)]
    assert len(names) == len(set(names))
    assert all(writer.split(split) for writer in everything for split in SPLITS)
    assert all(len(d.text) >= docstrings.SHORTEST for writer in everything for s in SPLITS for d in writer.split(s))
    for writer in everything:
        assert writer.masked_share("train") == 0
        for split in SPLITS[1:]:
            assert 0 < writer.masked_share(split) < 0.25, (writer.name, split)


def test_no_scored_window_stands_in_any_training_text(everything):
    """Each window covers a half that begins at a multiple of ``step``: it is sought around known halves alone."""
    scored = [p for writer in everything for s in SPLITS[1:] for d in writer.split(s) for p in d.unmasked()]
    half, step = SPAN // 2, SPAN - SPAN // 2 + 1
    windows, halves = ({hash(p[i : i + n]) for p in scored for i in range(len(p) - n + 1)} for n in (SPAN, half))
    assert len(windows) > 1_000_000

    def shared(text):
        near = (i for i in range(0, len(text), step) if hash(text[i : i + half]) in halves)
        starts = (start for i in near for start in range(max(0, i - step + 1), i + 1))
        return [text[i : i + SPAN] for i in starts if hash(text[i : i + SPAN]) in windows]

    page = max(scored, key=len)
    assert all(shared("x" * i + page[:SPAN] + "x") for i in range(step))
    for writer in everything:
        for document in writer.split("train"):
            assert not shared(document.text), document.name


def test_no_long_paragraph_is_kept_twice(everything):
    seen = {}
    for writer in everything:
        for split in SPLITS:
            for document in writer.split(split):
                for paragraph in document.text.split("\n\n"):
                    words = tuple(re.findall(r"[^\W\d_]+|0", re.sub(r"\d+", "0", paragraph.lower())))
                    if len(words) >= 12:
                        assert words not in seen, (document.name, seen[words], paragraph)
                        seen[words] = document.name


def test_this_text_is_the_recorded_one():
    recorded = catalog.measured("corpora")
    if set(recorded["built_with"]) != {docstrings.described(docstrings.versions())}:
        pytest.skip("recorded with other versions")
    rows = [row for name in recorded["writer"].unique() for row in corpora.writer(name).rows()]
    assert list(recorded["sha256"]) == [row["sha256"] for row in rows]


@pytest.fixture(scope="module")
def built():
    return docstrings.build(*SMALL)


def test_building_again_in_another_process_gives_the_same(built):
    code = (
        f"from plpkg.corpora import docstrings\nfor w in docstrings.build(*{SMALL!r}).values():\n"
        "    for row in w.rows(): print(row['sha256'])"
    )
    here = [row["sha256"] for writer in built.values() for row in writer.rows()]
    with Process(code) as process:  # which has another order of a set of strings
        assert re.findall(r"\b[0-9a-f]{64}\b", process.stdout.read()) == here  # beside progress bars
    assert len(here) == 9


def test_the_public_keeps_what_it_shares_with_private_writers(built):
    alone = docstrings.build(SMALL[0], ())["public"]
    for split in SPLITS:
        assert [d.text for d in alone.split(split)] == [d.text for d in built["public"].split(split)]


@pytest.fixture
def small(built, tmp_path, monkeypatch):
    """A library of few packages with a cache of its own; gives the cache's path and a function that reads anew."""
    calls = []

    def build():
        calls.append(1)
        return built

    monkeypatch.setattr(docstrings, "PRIVATE", SMALL[1])
    monkeypatch.setattr(docstrings, "build", build)
    monkeypatch.setattr(docstrings, "_cache_path", lambda: tmp_path / "cache" / "corpora-new.json")

    def read():
        docstrings._library.cache_clear()
        return docstrings._library()

    yield tmp_path / "cache" / "corpora-new.json", read, calls
    docstrings._library.cache_clear()


def test_the_second_reading_comes_from_the_cache_and_old_caches_go(small):
    path, read, calls = small
    path.parent.mkdir()
    for i in range(5):
        old = path.with_name(f"corpora-{i}.json")
        old.write_text("{}")
        os.utime(old, (i, i))
    first, second = read(), read()
    assert first == second
    assert len(calls) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["corpora-3.json", "corpora-4.json", "corpora-new.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"public": {"train": [{}]}}', "half"])
def test_a_damaged_cache_is_built_anew_with_a_warning(small, damage):
    path, read, calls = small
    whole = read()
    path.write_text(path.read_text()[: path.stat().st_size // 2] if damage == "half" else damage)
    with pytest.warns(UserWarning, match=r"corpora-new\.json cannot be read"):
        assert read() == whole
    assert read() == whole
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_is_done_without(small):
    path, read, _ = small
    path.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="the corpora cannot be kept in"):
        assert set(read()) == {"public", *SMALL[1]}


def test_a_full_disk_keeps_no_half_of_a_cache(small, monkeypatch):
    path, read, _ = small

    def half(partial, text, encoding):
        partial.write_bytes(text[:99].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(docstrings.Path, "write_text", half)
    with pytest.warns(UserWarning, match="the corpora cannot be kept in .*No space left"):
        read()
    assert not [*path.parent.iterdir()]


def test_another_installation_has_a_cache_of_its_own(monkeypatch, tmp_path):
    source = tmp_path / "a.py"
    source.write_text('"""Text."""')
    monkeypatch.setattr(docstrings, "sources", lambda package: [(source, f"{package}/a.py")])
    first = docstrings._cache_path()
    assert docstrings._cache_path() == first
    source.write_text('"""Other text."""')
    second = docstrings._cache_path()
    monkeypatch.setattr(docstrings, "versions", lambda: {"python": "3.99"})
    assert len({first, second, docstrings._cache_path()}) == 3


def test_versions_name_no_build_and_a_missing_package(monkeypatch):
    assert not any("+" in version for version in docstrings.versions().values())
    monkeypatch.setattr(docstrings, "PRIVATE", ("no_such_package",))
    with pytest.raises(ModuleNotFoundError, match="need the package 'no_such_package'"):
        docstrings.versions()


def test_changed_names_what_a_record_was_not_read_with():
    here = docstrings.versions()
    assert docstrings.changed(docstrings.described(here)) == []
    other = docstrings.described({name: v for name, v in here.items() if name != "torch"} | {"numpy": "0.1"})
    assert docstrings.changed(other) == [f"numpy {here['numpy']}, not 0.1", f"torch {here['torch']}, not None"]


SHARES = (0.8, 0.1, 0.1)


def unequal(count):
    """Modules of which one in ten is a hundred times as large."""
    return {f"m{i}": ["x" * (100 if i % 10 else 10_000)] for i in range(count)}


def size(part):
    return sum(len(t) for texts in part.values() for t in texts)


@pytest.mark.parametrize("split_by", [docstrings.by_size, lambda m, s: docstrings.by_name(m, s, {})])
def test_held_out_modules_are_as_large_as_the_others(split_by):
    """Choosing after measuring would send every large module to train."""
    modules = unequal(6000)
    parts = split_by(modules, SHARES)
    assert sorted(name for part in parts for name in part) == sorted(modules)
    assert all(list(part) == sorted(part) for part in parts)
    for part in parts:
        assert size(part) / len(part) == pytest.approx(size(modules) / len(modules), rel=0.25)
    assert [len(part) / len(modules) for part in parts] == pytest.approx(SHARES, abs=0.03)


def test_few_modules_still_get_about_their_shares():
    modules = {f"m{i}": ["x" * (1000 + 37 * i % 500)] for i in range(40)}
    shares = [size(part) / size(modules) for part in docstrings.by_size(modules, SHARES)]
    assert shares == pytest.approx(SHARES, abs=0.04)


def test_a_public_module_has_the_same_part_under_every_version_and_stays_where_it_is_fixed():
    modules = unequal(300)
    before = docstrings.by_name(modules, SHARES, {})
    after = docstrings.by_name({name: [*texts, "more"] for name, texts in modules.items()} | {"new": ["x"]}, SHARES, {})
    for first, second in zip(before, after, strict=True):
        assert first.keys() == second.keys() - {"new"}
    parts = docstrings.by_name(unequal(50), SHARES, {"m7": 2, "m8": 0, "gone": 1})
    assert "m7" in parts[2]
    assert "m8" in parts[0]
    assert sum(map(len, parts)) == 50


def test_what_the_shipped_model_learnt_is_never_held_out(built):
    """Dealt out anew, the modules of few packages, or of other versions, would be in other splits."""
    learnt = {d.name for d in corpora.public("train")}
    assert not learnt & {d.name for split in SPLITS[1:] for d in built["public"].split(split)}
    texts = modules("jinja2") | modules("topics")
    anew = docstrings.by_name(texts, docstrings.SHARES["public"], {})
    assert learnt & (anew[1].keys() | anew[2].keys())


# Read


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
    assert installed.docstrings(path) == [str(n) for n in range(1, 12)]
    path = tmp_path / "a.py"
    path.write_text('"""A \\d pattern."""\nx = 1 is 1')
    assert installed.docstrings(path) == ["A \\d pattern."]


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
    monkeypatch.setattr(installed.sysconfig, "get_path", lambda name: str(tmp_path))
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
    with pytest.raises(ModuleNotFoundError, match="the corpora need the package 'no_such_package'"):
        modules("no_such_package")


# Without what was there before


SENTENCE = "The quick brown fox jumps over the lazy dog near the old stone bridge at noon."
LONGER = f"{SENTENCE} And then it rests for a while in the shade."
HEADED = f"{SENTENCE}\n\nSee also"
NEW = "Something entirely different is told in this other paragraph here."
HALF = "The quick brown fox jumps over every fence that our neighbours put up last year."


@pytest.mark.parametrize(
    ("earlier", "texts", "kept"),
    [
        ([], [SENTENCE], SENTENCE),
        ([SENTENCE], [SENTENCE], ""),
        ([SENTENCE], [f"{SENTENCE.upper()}\n\n{NEW}"], NEW),
        ([SENTENCE], [HALF], HALF),  # half new is new
        ([SENTENCE], ["quick brown fox jumps over the lazy dog near"], ""),  # a part of an earlier paragraph
        ([SENTENCE], [LONGER], ""),
        ([LONGER], [SENTENCE], ""),
        (["Added in version 3.11, changed in 3.12 of it."], ["Added in version 2.7, changed in 3.0 of it."], ""),
        ([], [HEADED], HEADED),  # a heading stays beside something longer
        ([HEADED], [HEADED], ""),
        ([HEADED], ["See also"], "See also"),
        ([HEADED, "See also"], ["See also", "See Also."], ""),
    ],
)
def test_only_paragraphs_that_are_new_are_kept(earlier, texts, kept):
    keep = Deduplicator()
    for text in earlier:
        assert keep([text]) == text
    assert keep(texts) == kept
