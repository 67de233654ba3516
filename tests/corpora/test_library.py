"""The corpora of this installation, and how they are made, kept and found again."""

import errno
import os
import re

import pytest

from plpkg import catalog, corpora
from plpkg.corpora import SPLITS, library
from plpkg.corpora.overlap import SPAN

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
    assert all(len(d.text) >= library.SHORTEST for writer in everything for s in SPLITS for d in writer.split(s))
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
    if set(recorded["built_with"]) != {library.described(library.versions())}:
        pytest.skip("recorded with other versions")
    rows = [row for name in recorded["writer"].unique() for row in corpora.writer(name).rows()]
    assert list(recorded["sha256"]) == [row["sha256"] for row in rows]


@pytest.fixture(scope="module")
def built():
    return library.build(*SMALL)


def test_building_again_in_another_process_gives_the_same(built):
    code = (
        f"from plpkg.corpora import library\nfor w in library.build(*{SMALL!r}).values():\n"
        "    for row in w.rows(): print(row['sha256'])"
    )
    here = [row["sha256"] for writer in built.values() for row in writer.rows()]
    with Process(code) as process:  # which has another order of a set of strings
        assert re.findall(r"\b[0-9a-f]{64}\b", process.stdout.read()) == here  # beside progress bars
    assert len(here) == 9


def test_the_public_keeps_what_it_shares_with_private_writers(built):
    alone = library.build(SMALL[0], ())["public"]
    for split in SPLITS:
        assert [d.text for d in alone.split(split)] == [d.text for d in built["public"].split(split)]


@pytest.fixture
def small(built, tmp_path, monkeypatch):
    """A library of few packages with a cache of its own; gives the cache's path and a function that reads anew."""
    calls = []

    def build():
        calls.append(1)
        return built

    monkeypatch.setattr(library, "PRIVATE", SMALL[1])
    monkeypatch.setattr(library, "build", build)
    monkeypatch.setattr(library, "_cache_path", lambda: tmp_path / "cache" / "corpora-new.json")

    def read():
        library._library.cache_clear()
        return library._library()

    yield tmp_path / "cache" / "corpora-new.json", read, calls
    library._library.cache_clear()


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

    monkeypatch.setattr(library.Path, "write_text", half)
    with pytest.warns(UserWarning, match="the corpora cannot be kept in .*No space left"):
        read()
    assert not [*path.parent.iterdir()]


def test_another_installation_has_a_cache_of_its_own(monkeypatch, tmp_path):
    source = tmp_path / "a.py"
    source.write_text('"""Text."""')
    monkeypatch.setattr(library.installation, "sources", lambda package: [(source, f"{package}/a.py")])
    first = library._cache_path()
    assert library._cache_path() == first
    source.write_text('"""Other text."""')
    second = library._cache_path()
    monkeypatch.setattr(library, "versions", lambda: {"python": "3.99"})
    assert len({first, second, library._cache_path()}) == 3


def test_versions_name_no_build_and_a_missing_package(monkeypatch):
    assert not any("+" in version for version in library.versions().values())
    monkeypatch.setattr(library, "PRIVATE", ("no_such_package",))
    with pytest.raises(ModuleNotFoundError, match="need the package 'no_such_package'"):
        library.versions()


SHARES = (0.8, 0.1, 0.1)


def unequal(count):
    """Modules of which one in ten is a hundred times as large."""
    return {f"m{i}": ["x" * (100 if i % 10 else 10_000)] for i in range(count)}


def size(part):
    return sum(len(t) for texts in part.values() for t in texts)


@pytest.mark.parametrize("split_by", [library.by_size, lambda m, s: library.by_name(m, s, {})])
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
    shares = [size(part) / size(modules) for part in library.by_size(modules, SHARES)]
    assert shares == pytest.approx(SHARES, abs=0.04)


def test_a_public_module_has_the_same_part_under_every_version_and_stays_where_it_is_fixed():
    modules = unequal(300)
    before = library.by_name(modules, SHARES, {})
    after = library.by_name({name: [*texts, "more"] for name, texts in modules.items()} | {"new": ["x"]}, SHARES, {})
    for first, second in zip(before, after, strict=True):
        assert first.keys() == second.keys() - {"new"}
    parts = library.by_name(unequal(50), SHARES, {"m7": 2, "m8": 0, "gone": 1})
    assert "m7" in parts[2]
    assert "m8" in parts[0]
    assert sum(map(len, parts)) == 50


def test_what_the_shipped_model_learnt_is_never_held_out(built):
    """Dealt out anew, the modules of few packages, or of other versions, would be in other splits."""
    learnt = {d.name for d in corpora.public("train")}
    assert not learnt & {d.name for split in SPLITS[1:] for d in built["public"].split(split)}
    modules = library.installation.modules("jinja2") | library.installation.modules("topics")
    anew = library.by_name(modules, library.SHARES["public"], {})
    assert learnt & (anew[1].keys() | anew[2].keys())
