import os

import pytest
import torch

from plpkg import checkpoints


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fails(partial):
        partial.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.replace_file(path, fails)
    assert path.read_text() == "old"
    checkpoints.replace_file(path, lambda partial: partial.write_text("new"))
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_several_files_replace_those_that_were_there(tmp_path):
    (tmp_path / "a").write_text("old")

    def write(folder):
        for name in "ab":
            (tmp_path / folder / name).write_text(name)

    checkpoints.replace_files(tmp_path, write)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "a", "b": "b"}

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


@pytest.mark.parametrize("damage", ["empty", "half", "text", "no identity", "evil"])
def test_a_file_that_is_no_checkpoint_is_named_and_never_executed(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    checkpoints.save(path, {"identity": {}, "weights": torch.zeros(1000)})
    whole = path.read_bytes()
    if damage == "no identity":
        checkpoints.save(path, {"weights": 1})
    elif damage == "evil":
        torch.save({"identity": {}, "object": Evil()}, path)
    else:
        path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"hello"}[damage])
    with pytest.raises(
        ValueError, match=r"c\.pt cannot be read \(damaged, or not a checkpoint\): remove it to start anew"
    ):
        checkpoints.load(path, {})
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_file_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, other = tmp_path / "file", tmp_path / "the same file"
    path.write_text("old")
    os.link(path, other)

    def half(path):
        path.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.replace_file(path, half)
    assert path.read_text() == "old"

    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    checkpoints.replace_file(path, lambda path: path.write_text("new"))
    assert (path.read_text(), other.read_text()) == ("new", "old")  # another file has its name now
    assert calls == ["fsync", "replace"]
