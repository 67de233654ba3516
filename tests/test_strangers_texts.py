"""Strangers' texts, and folders with a pipe in them: refused cheaply, in a sentence. What is one person's is private.

What is written for one person is its owner's alone whatever the umask, and old or new whenever the process is killed.
"""

import asyncio
import contextlib
import json
import os
import re
import time
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from plpkg import residual
from plpkg.adapters import CONFIG, WEIGHTS, validate_adapter
from plpkg.corpora import SPLITS, docstrings, text_folder
from plpkg.corpora.documents import Document, Writer
from plpkg.corpora.folder import MAX_TEXT_BYTES
from plpkg.serving.service.store import Store, StoreError
from plpkg.serving.service.tiers import Disk
from tests.residual.conftest import adapted_backbone, backbone

from preloaded import Process

MIB = 2**20


def memory(name):
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


@contextlib.contextmanager
def refused(folder: Path, message: str):
    """Within, a ValueError is raised, cheaply, with a sentence that has at most 300 characters besides the folder."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, began = memory("VmRSS"), time.process_time()
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        yield
    assert time.process_time() - began < 2
    assert memory("VmHWM") - before < 100 * MIB
    said = str(raised.value)
    assert len(said.replace(str(folder), "")) <= 300
    assert said.isprintable()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * (MAX_TEXT_BYTES + 1), "x.txt has 16,777,217 bytes, at most 16,777,216 are allowed"),
        ("😀".encode() + b"a" * (MAX_TEXT_BYTES - 5) + b"\xff", "x.txt is not UTF-8: byte 16777215, in line 1"),
        (b"", "1 text files of the writer 'wwww"),
    ],
)
def test_a_hostile_text_is_refused_cheaply_and_in_a_sentence(tmp_path, content, message):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("Sound.")
    folder = tmp_path / ("w" * 250)
    folder.mkdir()
    (folder / "a.txt").write_text("The only one.")
    if content:
        folder = Path(folder, *["deep"] * 50, "of\ntwo lines")
        folder.mkdir(parents=True)
        (folder / "x.txt").write_bytes(content)
    with refused(tmp_path, message):
        text_folder(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text('{"public":' + "[" * 100_000),
        lambda path: path.write_text(
            json.dumps({"public": {"train": [{"name": "a", "text": "b", "masked": [[9] * 9]}]}})
        ),
        lambda path: path.write_bytes(b"\xff"),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: (path.touch(), os.truncate(path, docstrings.MAX_CACHE_BYTES + 1)),
    ],
    ids=["deep", "odd", "not UTF-8", "a pipe", "a device", "a link to itself", "64 MiB and more"],
)
def test_a_cache_that_is_none_is_made_anew(tmp_path, monkeypatch, damage):
    made = {name: Writer(name, dict.fromkeys(SPLITS, (Document("a", "text"),))) for name in ("public", "torch")}
    path = tmp_path / "corpora-new.json"
    monkeypatch.setattr(docstrings, "PRIVATE", ("torch",))
    monkeypatch.setattr(docstrings, "build", lambda: made)
    monkeypatch.setattr(docstrings, "_cache_path", lambda: path)
    damage(path)
    read = docstrings._library.__wrapped__
    with pytest.warns(UserWarning, match=r"corpora-new\.json cannot be read \(.{,150}\): the corpora are built anew"):
        assert read() == made
    assert path.is_file()
    assert not path.is_symlink()
    monkeypatch.setattr(docstrings, "build", None)
    assert read() == made


# What is written for one person


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    get_peft_model(backbone(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    return validate_adapter(folder, backbone())


PLACES = {"directory": str, "URL": lambda folder: f"file://{folder}"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("damage", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("file", ["current", CONFIG, WEIGHTS])
def test_what_is_no_file_of_a_store_is_refused_at_once(tmp_path, adapter, place, file, damage):
    store = Store(PLACES[place](tmp_path), refresh_s=0)
    version = asyncio.run(store.put("ann", "x", adapter))
    path = tmp_path / "ann" / "x" / (file if file == "current" else f"{version}/{file}")
    path.unlink()
    damage(path)

    async def read():
        return await store.fetch(f"ann/x/{await store.current('ann', 'x')}", backbone())

    with pytest.raises(StoreError, match=f"^ann/x/.*{file} is not a regular file$"):
        asyncio.run(asyncio.wait_for(read(), 20))
    if file == "current" and not path.is_dir():
        asyncio.run(store.put("ann", "x", adapter))
        assert asyncio.run(read()).digest == version


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def stored(place):
    def save(folder, adapter):
        if place == "URL":
            folder.mkdir(mode=0o700)  # a URL is of a folder that is there
        asyncio.run(Store(PLACES[place](folder)).put("ann", "x", adapter))

    return save


WRITERS = {
    "a store": stored("directory"),
    "a store at a URL": stored("URL"),
    "the disk tier": lambda folder, adapter: Disk(folder).write(f"ann/x/{'0' * 64}", adapter),
    "an adapter": lambda folder, adapter: adapter.save(folder / "ann" / "x"),
    "PrivateLoRA": lambda folder, _: adapted_backbone().save_pretrained(folder / "ann" / "x"),
    "a ladder": lambda folder, _: adapted_backbone(ladder=dict(r=5, width=16)).save_pretrained(folder / "ann" / "x"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_new_files_and_folders_are_their_owners_alone_whatever_the_umask(tmp_path, no_umask, adapter, writer):
    WRITERS[writer](tmp_path / "new", adapter)
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert any(path.is_file() for path in paths)
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths} == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("writer", sorted(set(WRITERS) - {"a store at a URL"}))
def test_a_folder_that_is_there_keeps_its_mode(tmp_path, no_umask, adapter, writer):
    folders = [tmp_path / "old", tmp_path / "old" / "ann", tmp_path / "old" / "ann" / "x"]
    for folder in folders:
        folder.mkdir(mode=0o755)
    WRITERS[writer](tmp_path / "old", adapter)
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o755] * 3
    files = [path for path in folders[0].rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


SAVE = """
import os, sys
import peft.config, peft.peft_model, torch
from tests.residual.conftest import adapted_backbone

folder, ladder, death = sys.argv[1], sys.argv[2], sys.argv[3]
model = adapted_backbone(**({"ladder": dict(r=5, width=16)} if ladder else {}))
with torch.no_grad():
    for name, each in model.named_parameters():
        if "privatelora_M" in name or "ladder_M" in name:
            each.mul_(2)
module, name = {
    "weights": (peft.peft_model, "safe_save_file"),
    "configuration": (peft.config.PeftConfigMixin, "save_pretrained"),
    "flush": (os, "fsync"),
    "replacement": (os, "replace"),
    "never": (sys, "exit"),
}[death]
setattr(module, name, lambda *_, **__: os._exit(9))
model.save_pretrained(folder)
"""


@pytest.mark.parametrize("death", ["weights", "configuration", "flush", "replacement", "never"])
@pytest.mark.parametrize("ladder", ["", "ladder"])
def test_an_adapter_whose_save_is_killed_is_still_the_old_one(tmp_path, ladder, death):
    old = adapted_backbone(**({"ladder": dict(r=5, width=16)} if ladder else {}))
    old.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags: []\n---\nMine.")
    before = (tmp_path / WEIGHTS).read_bytes()
    with Process(SAVE, str(tmp_path), ladder, death) as process:
        assert process.wait() == (0 if death == "never" else 9), process.stdout.read()
    assert ((tmp_path / WEIGHTS).read_bytes() == before) == (death != "never")
    assert "Mine." in (tmp_path / "README.md").read_text()
    residual.load(backbone(), tmp_path)
    old.save_pretrained(tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == before


def test_an_adapter_by_another_name_and_one_of_pefts_own(tmp_path):
    model = get_peft_model(backbone(), residual.PrivateLoraConfig(r_c2d=5, r_d2c=3), adapter_name="ann")
    model.save_pretrained(tmp_path)
    residual.load(backbone(), tmp_path / "ann")
    lora = get_peft_model(backbone(), LoraConfig(r=2, target_modules=["q_proj"]))
    lora.save_pretrained(str(tmp_path / "lora"), safe_serialization=True)
    validate_adapter(tmp_path / "lora", backbone())


@pytest.mark.parametrize(
    ("field", "value"),
    [("init", "x" * 60_000), ("layers_to_transform", "y" * 60_000), ("projection_seed", [7] * 20_000)],
)
def test_a_long_value_of_privatelora_is_shortened(tmp_path, field, value):
    adapted_backbone().save_pretrained(tmp_path)
    given = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(given | {field: value}))
    with refused(tmp_path, field):
        residual.load(backbone(), tmp_path)
