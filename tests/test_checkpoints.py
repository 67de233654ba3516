import os

import pytest
import torch

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
