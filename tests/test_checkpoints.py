import errno
import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from plpkg import checkpoints


def test_several_files_replace_those_that_were_there(tmp_path):
    (tmp_path / "a").write_text("old")

    def write(folder):
        for name in "ab":
            (tmp_path / folder / name).write_text(name)

    checkpoints.replace_files(tmp_path, write)

    def fails(folder):
        (tmp_path / folder / "a").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        checkpoints.replace_files(tmp_path, fails)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "a", "b": "b"}


def test_a_checkpoint_comes_back(tmp_path):
    path = tmp_path / "c.pt"
    assert checkpoints.load(path, {}) is None
    state = {"identity": {"lr": 0.1}, "weights": {"m": torch.arange(3)}, "step": 4}
    checkpoints.save(path, state)
    loaded = checkpoints.load(path, {"lr": 0.1})
    assert torch.equal(loaded["weights"]["m"], torch.arange(3))
    assert loaded["step"] == 4
    with pytest.raises(ValueError, match=r"holds a run with lr=0\.1, now 0\.2: take another folder"):
        checkpoints.load(path, {"lr": 0.2})


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


DAMAGES = {
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all but one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a list": lambda path: torch.save([1, 2], path),
    "no identity": lambda path: torch.save({"weights": 1}, path),
    "evil": lambda path: torch.save({"identity": {}, "object": Evil()}, path),
}


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE")
@pytest.mark.parametrize("setting", ["0", "1"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_checkpoint_is_named_and_never_executed(tmp_path, monkeypatch, damage, setting):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", setting)
    path = tmp_path / "c.pt"
    checkpoints.save(path, {"identity": {}, "weights": torch.zeros(1000)})
    DAMAGES[damage](path)
    with pytest.raises(ValueError, match=r"c\.pt cannot be read \(.+\): remove it to start anew"):
        checkpoints.load(path, {})
    assert os.listdir(tmp_path) == ["c.pt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch, error):
    path, other = tmp_path / "file", tmp_path / "the same file"
    path.write_text("old")
    os.link(path, other)

    def fails(partial):
        partial.write_text("ne")
        raise error("disk full")

    with pytest.raises(error, match="disk full"):
        checkpoints.replace_file(path, fails)
    assert path.read_text() == "old"
    assert set(tmp_path.iterdir()) == {path, other}

    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    checkpoints.replace_file(path, lambda partial: partial.write_text("new"))
    assert (path.read_text(), other.read_text()) == ("new", "old")  # another file has its name now
    assert calls == ["fsync", "replace"]


@pytest.fixture
def umask():
    """Sets the umask for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "private", "mode"), [(0o022, False, 0o644), (0o077, False, 0o600), (0, True, 0o600)])
def test_a_file_is_whose_the_umask_says_or_its_owners_alone(tmp_path, umask, mask, private, mode):
    umask(mask)
    seen = []

    def write(folder):
        save_file({"m": torch.zeros(2)}, os.path.join(folder, "m"))  # which gives its own files 0600
        os.mkdir(os.path.join(folder, "inner"))
        (tmp_path / folder / "inner" / "text").write_text("mine")
        seen.append((tmp_path / folder).stat().st_mode & 0o777)

    def write_one(partial):
        seen.append(partial.stat().st_mode & 0o777)  # before there is a byte in it
        partial.write_text("mine")

    checkpoints.replace_files(tmp_path, write, private=private)
    checkpoints.replace_file(tmp_path / "one", write_one, private=private)
    checkpoints.save(tmp_path / "c.pt", {"identity": {}})
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "m", tmp_path / "inner" / "text", tmp_path / "one")} == {mode}
    assert seen == [0o700, mode]
    assert (tmp_path / "c.pt").stat().st_mode & 0o777 == 0o600
    if private:
        assert (tmp_path / "inner").stat().st_mode & 0o777 == 0o700


def test_what_a_killed_run_left_is_swept_when_the_next_begins(tmp_path):
    checkpoints.save(tmp_path / "c.pt", {"identity": {}})
    (tmp_path / "c.pt.partial").write_text("half")
    (tmp_path / ".partial-abc").mkdir()
    (tmp_path / ".partial-abc" / "m").write_text("half")
    (tmp_path / "mine.partial").write_text("a file of somebody's")
    assert checkpoints.load(tmp_path / "c.pt", {}) == {"identity": {}}
    assert {p.name for p in tmp_path.iterdir()} == {"c.pt", "mine.partial"}


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, OSError(errno.EDQUOT, "quota"), RuntimeError("basic_ios::clear")])
def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch, error):
    (tmp_path / "old").write_text("old")

    def fails(_):
        raise error

    if not isinstance(error, OSError):
        with pytest.raises(RuntimeError, match="basic_ios::clear"):  # there is room: it is something else
            checkpoints.replace_file(tmp_path / "old", fails)
        monkeypatch.setattr(checkpoints.tempfile, "TemporaryFile", lambda **_: fails_with(FULL))
    for write, target in ((checkpoints.replace_file, tmp_path / "old"), (checkpoints.replace_files, tmp_path)):
        with pytest.raises(OSError, match=r"cannot be written, the disk is full: what was there is unchanged$"):
            write(target, fails)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "old")]


def fails_with(error):
    raise error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk: not run in CI where it is not")
def test_a_disk_that_is_full(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        checkpoints.save(tmp_path / "c.pt", {"identity": {}, "weights": torch.zeros(1000)})
        with pytest.raises(OSError, match=r"c\.pt cannot be written, the disk is full: what was there is unchanged$"):
            checkpoints.save(tmp_path / "c.pt", {"identity": {}, "weights": torch.zeros(100_000)})
        with pytest.raises(OSError, match="the disk is full"):
            checkpoints.replace_files(
                tmp_path, lambda to: save_file({"m": torch.zeros(100_000)}, os.path.join(to, "m"))
            )
        assert os.listdir(tmp_path) == ["c.pt"]
        assert checkpoints.load(tmp_path / "c.pt", {})["weights"].shape == (1000,)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
