import contextlib
import errno
import math
import os
import subprocess
import threading
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from plpkg.files import checkpoints


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


def same(one, other):
    """Alike in types, order of names, dtypes, shapes and bits; one NaN is like another."""
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.isnan(), other.isnan())
            and (
                torch.equal(one.nan_to_num(7), other.nan_to_num(7))
                if one.is_floating_point()
                else torch.equal(one, other)
            )
        )
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


TENSORS = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
).flatmap(
    lambda dtype: st.sampled_from([(), (0,), (3,), (2, 0), (2, 3)]).map(lambda shape: torch.ones(shape).to(dtype))
)
SCALARS = st.none() | st.booleans() | st.integers(-(10**38), 10**38) | st.floats() | st.text(max_size=5)
STATES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$tensor", "$tuple"]), inner, max_size=3)
        | st.dictionaries(st.integers(-3, 99), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(STATES)
def test_a_state_comes_back_as_it_was(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("state") / "c.safetensors"
    state = {
        "identity": {"lr": 0.1, "betas": (0.9, 0.95)},
        "value": value,
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }
    checkpoints.save(path, state)
    assert same(checkpoints.read(path), state)


RUN = {"identity": {"lr": 0.1, "layers": [1, 2]}, "step": 3, "log": [{"loss": 1.5}] * 70}


def saved(folder):
    """A run's checkpoint: text, numbers, and tensors of which one has a single byte an item."""
    path = folder / "c.safetensors"
    checkpoints.save(path, RUN | {"weights": torch.arange(4.0), "flags": torch.ones(3) > 0})
    return path


def test_a_run_finds_its_own_checkpoint(tmp_path):
    assert checkpoints.load(tmp_path / "new" / "c.safetensors", {}) is None
    path = saved(tmp_path / "new")
    assert checkpoints.load(path, RUN["identity"])["step"] == 3
    again = tmp_path / "again"
    assert saved(again).read_bytes() == path.read_bytes()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def cut(share):
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def flipped(place):
    """One bit of the byte there is another: counted from the end, if it is negative."""

    def damage(path):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return damage


def replaced(old, new):
    def damage(path):
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))

    return damage


DAMAGES = {
    "cut to nothing": cut(0),
    "cut within its header": cut(0.3),
    "cut within its tensors": cut(0.999),
    "a bit of its header's length": flipped(1),
    "a bit of its header": flipped(1000),
    "a bit of a float": flipped(-5),
    "a bit of a flag": flipped(-1),
    "a number of its text": replaced(rb"\"step\": 3", rb"\"step\": 4"),
    "another version": replaced(b'"plpkg":"1 ', b'"plpkg":"0 '),
    "an earlier version": lambda path: save_file({"a": torch.zeros(1)}, path, {"state": "{}", "sha256": "0" * 64}),
    "somebody's weights": lambda path: save_file({"a": torch.zeros(1)}, path),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a pickle": lambda path: torch.save({"identity": {}, "object": Evil()}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_as_it_was_written_is_refused_and_never_executed(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path)
    DAMAGES[damage](path)
    for read in (checkpoints.read, lambda path: checkpoints.load(path, RUN["identity"])):
        with pytest.raises(
            ValueError, match=r"c\.safetensors (cannot be read: .+|is (damaged|of another version).+)"
        ) as said:
            read(path)
        assert "\n" not in str(said.value)
        assert len(str(said.value)) < 300 + len(str(path))
    assert str(said.value).endswith(": remove it to start anew")
    assert os.listdir(tmp_path) == ["c.safetensors"]


@given(st.data())
def test_a_damaged_byte_is_refused_or_changes_nothing(tmp_path_factory, data):
    path = saved(tmp_path_factory.mktemp("damaged"))
    before = checkpoints.read(path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        assert same(checkpoints.read(path), before)


def test_a_pickle_of_an_earlier_version_is_refused(tmp_path):
    torch.save({"identity": {}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c\.pt is a pickle of an earlier version, and is not read: remove it"):
        checkpoints.load(tmp_path / "c.safetensors", {})


def test_a_file_that_is_missing_or_of_another_kind_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks c\.safetensors$"):
        checkpoints.read(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"c\.safetensors is another kind of file: it has no positions$"):
        checkpoints.read(saved(tmp_path), ("step", "positions"))


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"lr": 0.2, "layers": [1, 2]}, r"lr=0\.1, now 0\.2: take another folder"),
        ({"lr": 0.1, "layers": (1, 2)}, r"layers=\[1, 2\], now \(1, 2\): "),
        ({"lr": 0.1, "layers": [True, 2]}, r"layers=\[1, 2\], now \[True, 2\]: "),
        ({"lr": math.nan}, r"lr=0\.1, now nan; layers=\[1, 2\], now None: "),
        (RUN["identity"] | {"more": list(range(10**5))}, r"more=None, now \[0, 1, 2, 3, \.\.\.\]: "),
        ({}, r"lr=0\.1, now None; "),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, identity, message):
    with pytest.raises(ValueError, match=f"holds a run with {message}"):
        checkpoints.load(saved(tmp_path), identity)


@pytest.mark.parametrize("setting", [np.float64(0.1), np.int64(3), np.bool_(True), math.nan, -math.inf])
def test_a_run_with_such_a_setting_is_its_own(tmp_path, setting):
    checkpoints.save(tmp_path / "c.safetensors", {"identity": {"lr": setting}})
    assert checkpoints.load(tmp_path / "c.safetensors", {"lr": setting})


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a": {"b": object()}}, TypeError, "cannot hold a.b=<object"),
        ({"a": "x" * 2**26}, ValueError, "a state may have 33,554,432 characters of text, got 67,1"),
    ],
)
def test_what_a_file_cannot_hold_is_named_and_the_old_one_stays(tmp_path, state, error, message):
    checkpoints.save(tmp_path / "c", {"identity": {}})
    with pytest.raises(error, match=message):
        checkpoints.save(tmp_path / "c", state)
    assert checkpoints.read(tmp_path / "c") == {"identity": {}}


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_module_and_its_optimizer_are_restored(tmp_path, kind):
    module, here = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    optimizer, mine = kind(module.parameters(), lr=0.1), kind(here.parameters(), lr=0.2)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoints.save(tmp_path / "c", states)
    checkpoints.restore({"module": here, "optimizer": mine}, checkpoints.read(tmp_path / "c"))
    assert same(dict(here.state_dict()), dict(module.state_dict()))
    assert same(mine.state_dict()["state"], optimizer.state_dict()["state"])
    assert [group["lr"] for group in mine.param_groups] == [0.2]  # the rate of a step is the run's to say


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
    checkpoints.save(tmp_path / "c.safetensors", {"identity": {}})
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "m", tmp_path / "inner" / "text", tmp_path / "one")} == {mode}
    assert seen == [0o700, mode]
    assert (tmp_path / "c.safetensors").stat().st_mode & 0o777 == 0o600
    if private:
        assert (tmp_path / "inner").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(NotADirectoryError, match=r"file.* is not a folder$"):
            checkpoints.private_folder(folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_a_killed_run_left_is_swept_when_the_next_begins(tmp_path):
    checkpoints.save(tmp_path / "c.safetensors", {"identity": {}})
    (tmp_path / "c.safetensors.partial").mkdir()  # nobody's, but where a file will have to be
    (tmp_path / ".partial-abc").mkdir()
    (tmp_path / ".partial-abc" / "m").write_text("half")
    (tmp_path / "mine.partial").write_text("a file of somebody's")
    assert checkpoints.load(tmp_path / "c.safetensors", {}) == {"identity": {}}
    assert {p.name for p in tmp_path.iterdir()} == {"c.safetensors", "mine.partial"}


def looked_for(path):
    with contextlib.suppress(ValueError):  # it is no checkpoint
        checkpoints.load(path, {})


@pytest.mark.parametrize(
    "other",
    [
        lambda path: checkpoints.replace_file(path, lambda partial: partial.write_text("second")),
        looked_for,
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_two_at_once_wait_for_each_other(tmp_path, other, several):
    begun, path = threading.Event(), tmp_path / "file"

    def meanwhile():
        other(path)
        begun.set()

    thread = threading.Thread(target=meanwhile)

    def write(where):
        file = tmp_path / where / "file" if several else where
        file.write_text("fi")
        thread.start()
        begun.wait(0.3)
        with file.open("r+") as half:
            half.write("first")

    (checkpoints.replace_files if several else checkpoints.replace_file)(tmp_path if several else path, write)
    thread.join()
    assert path.read_text() in ("first", "second")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


FULL = OSError(errno.ENOSPC, "No space left on device")


FULL_TOO = RuntimeError("I/O error: No space left on device (os error 28)")  # safetensors', tokenizers'


@pytest.mark.parametrize("error", [FULL, OSError(errno.EDQUOT, "quota"), FULL_TOO])
def test_a_full_disk_is_a_sentence(tmp_path, error):
    (tmp_path / "old").write_text("old")

    def fails(_):
        raise error

    for write, target in ((checkpoints.replace_file, tmp_path / "old"), (checkpoints.replace_files, tmp_path)):
        with pytest.raises(OSError, match=r"cannot be written, the disk is full: what was there is unchanged$"):
            write(target, fails)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "old")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk: not run in CI where it is not")
def test_a_disk_that_is_full(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        checkpoints.save(tmp_path / "c.safetensors", {"identity": {}, "weights": torch.zeros(1000)})
        with pytest.raises(
            OSError, match=r"c\.safetensors cannot be written, the disk is full: what was there is unchanged$"
        ):
            checkpoints.save(tmp_path / "c.safetensors", {"identity": {}, "weights": torch.zeros(100_000)})
        with pytest.raises(OSError, match="the disk is full"):
            checkpoints.replace_files(
                tmp_path, lambda to: save_file({"m": torch.zeros(100_000)}, os.path.join(to, "m"))
            )
        assert os.listdir(tmp_path) == ["c.safetensors"]
        assert checkpoints.load(tmp_path / "c.safetensors", {})["weights"].shape == (1000,)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
