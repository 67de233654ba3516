"""Places of a service: under whatever name, one is not another; and a temporary folder goes, or is taken away."""

import os
import tempfile

import pytest

from plpkg.serving.service.places import LOCK, PREFIX, folder_of, require_apart, temporary_folder, temporary_folders
from plpkg.serving.service.store import Store
from plpkg.serving.service.tiers import Disk, Tiers

from preloaded import Process
from waiting import line_of


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """``a b`` with a folder in it, ``link`` to it, and ``other``; the working directory is their own."""
    for name in ("a b/inner", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Pairs of which the first is the second or in it, HERE standing for the folder of all.
SAME = [
    ("a b", "a b"),
    ("a b", "HERE/a b"),
    ("HERE/a b/", "./other/../a b"),
    ("link", "a b"),
    ("file://HERE/a%20b", "a b"),
    ("file://localhost/HERE/a%20b/", "link"),
    ("FILE:HERE/link", "a b"),
    ("a b/inner", "a b"),
    ("link/inner", "file://HERE/a%20b"),
    ("a b/not/yet/there", "link"),
    ("not/yet/there", "not/./yet"),
]


@pytest.mark.parametrize(("inner", "outer"), SAME)
def test_one_place_under_two_names(inner, outer, folders):
    place, above = (folder_of(name.replace("HERE", str(folders))) for name in (inner, outer))
    for emptied, *others in (
        [{"disk": place, "store": above}],
        [{"store": place, "disk": above}],
        [{"disk": None, "store": above}, {"TMPDIR": place}],
    ):
        with pytest.raises(ValueError, match="what is removed from one would be gone from both"):
            require_apart(emptied, *others)
    # A store in the temporary folder does no harm.
    require_apart({"store": place, "disk": folders / "other"}, {"TMPDIR": folders})
    assert sorted(os.listdir(folders)) == ["a b", "link", "other"]


def test_one_place_by_its_inode(folders, monkeypatch):
    """As on a file system that ignores case."""
    monkeypatch.setattr("pathlib.Path.samefile", lambda self, other: str(self).lower() == str(other).lower())
    monkeypatch.setattr("pathlib.Path.exists", lambda self: True)
    with pytest.raises(ValueError, match="is the store, or in it"):
        require_apart({"store": folders / "other", "disk": folders / "OTHER/inner"})


@pytest.mark.parametrize("location", ["s3://bucket/a", "memory:///", object(), None])
def test_a_store_that_is_no_folder(location, folders):
    assert folder_of(location) is None
    require_apart({"store": None, "disk": folders})


def test_a_url_of_another_machine():
    with pytest.raises(ValueError, match="file:///"):
        folder_of("file://folder/store")


def test_a_url_of_a_folder_is_that_folder(folders, base):
    assert Store(f"file://{folders}/a%20b/new").folder == folders / "a b/new"
    assert (folders / "a b/new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match="is the store"):
        Tiers(Store(folders / "other"), base[0], disk=Disk(folders / "other/disk"))


def test_a_temporary_folder_of_a_killed_process_is_removed_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
    code += "from plpkg.serving.service.places import temporary_folder\n"
    code += "with temporary_folder() as folder: print(folder, flush=True); time.sleep(1000)"
    (tmp_path / f"{PREFIX}somebodys").mkdir()  # it has the name only
    with Process(code, str(tmp_path)) as process:
        left = line_of(process.stdout, f"^({tmp_path}/{PREFIX}.*)$")[1]
        with temporary_folder() as other:
            assert os.path.exists(left)
            assert (other / LOCK).exists()
        process.kill()
        assert os.path.exists(left)
        with temporary_folder():
            assert not os.path.exists(left)
    assert temporary_folders() == [tmp_path / f"{PREFIX}somebodys"]
