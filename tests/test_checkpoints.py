import contextlib
import copy
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

from plpkg import checkpoints, restoring


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
LONG_LISTS = st.one_of(
    st.lists(st.floats(), min_size=64, max_size=70),
    st.lists(st.integers(-(2**64), 2**64), min_size=64, max_size=70),
    st.lists(st.fixed_dictionaries({"step": st.integers(0, 9), "loss": st.floats()}), min_size=64, max_size=66),
)
STATES = st.recursive(
    SCALARS | TENSORS | LONG_LISTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
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


def test_a_run_finds_its_own_checkpoint_and_no_other(tmp_path):
    path = tmp_path / "c.safetensors"
    assert checkpoints.load(path, {}) is None
    checkpoints.save(path, {"identity": {"lr": 0.1, "old": 1}})
    assert checkpoints.load(path, {"lr": 0.1, "old": 1}) == {"identity": {"lr": 0.1, "old": 1}}
    with pytest.raises(ValueError, match=r"holds a run with lr=0\.1, now 0\.2; old=1, now None: take another folder"):
        checkpoints.load(path, {"lr": 0.2})
    torch.save({"identity": {}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c\.pt is a pickle of an earlier version, and is not read: remove it"):
        checkpoints.load(path, {})


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a": {"b": object()}}, TypeError, "cannot hold a.b=<object"),
        ({"a": {1: 0, "b": 0}}, TypeError, "cannot hold a={1: 0"),
        ({"a": [torch.ones(1)] * 5000}, ValueError, "c could not be read again: .*5,000 tensors, at most 4,096"),
        ({"a": "x" * 2**20}, ValueError, "a state may have 524,288 bytes of text, got 1,0"),
        ({"name": "n\ud800"}, ValueError, "c could not be read again: .*half a character, .*ud800"),
        ({"seed": 10**50}, ValueError, "c could not be read again: .* at most 40 characters"),
        ({"a": [0.5] * 2**19, "b": [1] * (2**19 + 1)}, ValueError, "again: .*a list of shape .524289"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_and_the_old_one_stays(tmp_path, state, error, message):
    checkpoints.save(tmp_path / "c", {"identity": {}})
    with pytest.raises(error, match=message):
        checkpoints.save(tmp_path / "c", state)
    assert checkpoints.read(tmp_path / "c") == {"identity": {}}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def stored(text, **tensors):
    """Sound as a safetensors file, with the digest of what is in it."""
    return lambda path: save_file(tensors, path, {"state": text, "sha256": checkpoints._digest(text, tensors)})


DAMAGES = {
    "text": lambda path: path.write_text("not a checkpoint"),
    "a pickle": lambda path: torch.save({"identity": {}, "object": Evil()}, path),
    "no state": lambda path: save_file({"a": torch.zeros(1)}, path),
    "another digest": lambda path: save_file({}, path, {"state": '{"identity": {}}', "sha256": "0" * 64}),
    "no digest": lambda path: save_file({}, path, {"state": '{"identity": {}}'}),
    "no identity": stored('{"a": 1}'),
    "an identity that is a list": stored('{"identity": ["list"]}'),
    "a list": stored('["list", 1]'),
    "a name twice": stored('{"identity": {}, "identity": {}}'),
    "a number that is none": stored('{"identity": {}, "a": NaN}'),
    "a deep state": stored('{"identity": {}, "a": ' + '["list", ' * 10**5),
    "an unknown kind": stored('{"identity": {}, "a": ["object", "os.system"]}'),
    "an empty list": stored('{"identity": {}, "a": []}'),
    "a tensor that is missing": stored('{"identity": {}, "a": ["tensor", "a"]}'),
    "a tensor too many": stored('{"identity": {}}', a=torch.zeros(1)),
    "a tensor twice": stored('{"identity": {}, "a": ["list", ["tensor", "a"], ["tensor", "a"]]}', a=torch.zeros(1)),
    "a tensor that is no number": stored('{"identity": {}, "a": ["number", "a"]}', a=torch.zeros(2)),
    "rows of two lengths": stored(
        '{"identity": {}, "a": ["rows", {"x": "x", "y": "y"}]}', x=torch.zeros(2), y=torch.zeros(3)
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_checkpoint_is_named_and_never_executed(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c"
    checkpoints.save(path, {"identity": {}, "weights": torch.zeros(1000)})
    DAMAGES[damage](path)
    with pytest.raises(ValueError, match=r"c cannot be read \(.+\): remove it to start anew") as refusal:
        checkpoints.load(path, {})
    assert len(str(refusal.value)) < 300 + len(str(path))
    assert os.listdir(tmp_path) == ["c"]


@given(st.data())
def test_a_damaged_byte_is_refused_or_changes_nothing(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "c"
    state = {
        "identity": {"lr": 0.1},
        "step": 3,
        "log": [{"loss": 1.5}] * 70,
        "weights": torch.ones(4),
        "flag": torch.ones(2) > 0,
    }
    checkpoints.save(path, state)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        assert same(checkpoints.read(path), state)


def linear(width=3):
    return torch.nn.Linear(2, width)


def stepped(module, optimizer):
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


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
def test_a_module_and_its_optimizer_are_restored(kind):
    module, here = linear(), linear()
    optimizer, mine = stepped(module, kind(module.parameters(), lr=0.1)), kind(here.parameters(), lr=0.2)
    states = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    restoring.restore("it", {"module": here, "optimizer": mine}, states, 1)
    assert same(dict(here.state_dict()), dict(module.state_dict()))
    assert same(mine.state_dict()["state"], optimizer.state_dict()["state"])
    assert [group["lr"] for group in mine.param_groups] == [0.2]  # the rate of a step is the run's to say


def row(**changes):
    """Another state of the first parameter."""
    return lambda state: state["state"][0].update(changes)


def without(name):
    return lambda state: state["state"][0].pop(name)


def group(**changes):
    return lambda state: state["param_groups"][0].update(changes)


def tensor(value, shape=(3, 2), dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (row(step=tensor(float("nan"), ())), "step of parameter 0 is not finite"),
        (row(step=tensor(-5.0, ())), r"step of parameter 0 is -5\.0, after 1 steps"),
        (row(step=tensor(1e30, ())), r"step of parameter 0 is 1\..*, after 1 steps"),
        (row(step=tensor(0.5, ())), r"step of parameter 0 is 0\.5, after 1 steps"),
        (row(step=tensor(1.0)), r"step of parameter 0 has shape \(3, 2\)"),
        (row(step=True), "step of parameter 0 is torch.bool"),
        (row(exp_avg=tensor(float("inf"))), "exp_avg of parameter 0 is not finite"),
        (row(exp_avg=tensor(0.0, ())), r"exp_avg of parameter 0 has shape \(\)"),
        (row(exp_avg=0), r"exp_avg of parameter 0 has shape \(\)"),
        (row(exp_avg=None), "exp_avg of parameter 0"),
        (row(exp_avg=tensor(1, dtype=torch.int64)), "exp_avg of parameter 0 is torch.int64"),
        (row(exp_avg_sq=tensor(-1.0)), "exp_avg_sq of parameter 0 has negative squares"),
        (row(odd=tensor(0.0)), "parameter 0 has .*'odd', and must have step, exp_avg, exp_avg_sq"),
        (without("exp_avg"), "parameter 0 has 'step', 'exp_avg_sq', and must have step, exp_avg, exp_avg_sq"),
        (lambda state: state["state"].clear(), "it has no state after 1 steps"),
        (lambda state: state["state"].update({7: state["state"][0]}), "it is of another form"),
        (lambda state: state["state"].update({0: 5}), "it is of another form"),
        (group(betas=(5.0, -3.0)), r"betas=\(5\.0, -3\.0\), here \(0\.9, 0\.999\)"),
        (group(eps=float("nan")), "eps=nan, here 1e-08"),
        (group(weight_decay=True), "weight_decay=True, here 0"),
        (group(maximize=True), "maximize=True, here False"),
        (group(odd=1), "it is of another form: .*odd"),
        (lambda state: state["param_groups"].clear(), "it is of another form"),
        (lambda state: state.pop("state"), "it is of another form: .*state"),
    ],
)
def test_an_optimizer_s_state_is_one_that_it_could_have(change, message):
    module, here = linear(), linear()
    optimizer, mine = (torch.optim.Adam(each.parameters()) for each in (module, here))
    state = copy.deepcopy(stepped(module, optimizer).state_dict())
    change(state)
    parts, states = {"module": here, "optimizer": mine}, {"module": module.state_dict(), "optimizer": state}
    before = copy.deepcopy({name: dict(part.state_dict()) for name, part in parts.items()})
    with pytest.raises(ValueError, match=f"^it: optimizer cannot be restored: .*{message}") as error:
        restoring.restore("it", parts, states, 1)
    assert len(str(error.value)) <= 300
    assert same({name: dict(part.state_dict()) for name, part in parts.items()}, before)  # the module neither


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("count", torch.tensor(2))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (dict(weight=tensor(0.0, (1, 2)), count=torch.tensor(2)), r"'weight': has shape \(1, 2\)"),
        (dict(weight=tensor(0.0)), "'count': is missing"),
        (dict(weight=tensor(0.0), count=torch.tensor(2), odd=tensor(0.0)), "'odd': does not belong here"),
        (dict(weight=tensor(float("nan")), count=torch.tensor(2)), "'weight' has values that are not finite"),
        (dict(weight=tensor(1e300, dtype=torch.float64), count=torch.tensor(2)), "'weight' is torch.float64, and must"),
        (dict(weight=tensor(True, dtype=torch.bool), count=torch.tensor(2)), "'weight' is torch.bool"),
        (dict(weight=tensor(0.0), count=torch.tensor(-5)), "'count' has -5, and counts from 0"),
        (dict(weight=tensor(0.0), count=torch.tensor(2.0)), "'count' is torch.float32"),
        (dict(weight=1, count=2), "it is of another form"),
        (None, "it is of another form"),
    ],
)
def test_a_module_s_state_is_one_that_it_could_have(state, message):
    part = Counting()
    with pytest.raises(ValueError, match=f"^it: part cannot be restored: .*{message}"):
        restoring.restore("it", {"part": part}, {"part": state}, 1)
    assert same(dict(part.state_dict()), dict(Counting().state_dict()))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"lr": True}, "lr=True, now 1"),
        ({"lr": 1.0}, r"lr=1\.0, now 1"),
        ({"lr": torch.tensor(1)}, "lr="),
        ({"lr": 1, "odd": None}, "odd=None, now None"),
        ({}, "lr=None, now 1"),
    ],
)
def test_a_run_is_the_same_if_its_settings_are_of_value_and_type(tmp_path, saved, message):
    checkpoints.save(tmp_path / "c.safetensors", {"identity": saved, "weights": torch.zeros(2)})
    with pytest.raises(checkpoints.OtherRunError, match=f"holds a run with {message}"):
        checkpoints.load(tmp_path / "c.safetensors", {"lr": 1})


@pytest.mark.parametrize(
    "setting", [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), math.nan, math.inf, -math.inf]
)
def test_a_run_with_such_a_setting_is_its_own(tmp_path, setting):
    checkpoints.save(tmp_path / "c.safetensors", {"identity": {"lr": setting}})
    assert checkpoints.load(tmp_path / "c.safetensors", {"lr": setting})
    for other in (0.25, math.nan, -math.inf):
        if same(other, getattr(setting, "item", lambda: setting)()):
            continue
        with pytest.raises(checkpoints.OtherRunError, match=r"holds a run with lr=.*, now"):
            checkpoints.load(tmp_path / "c.safetensors", {"lr": other})


def test_long_settings_are_compared_too(tmp_path):
    long = list(range(100))
    checkpoints.save(tmp_path / "c.safetensors", {"identity": {"layers": long}})
    assert checkpoints.load(tmp_path / "c.safetensors", {"layers": long})["identity"] == {"layers": long}
    with pytest.raises(checkpoints.OtherRunError, match=r"layers=\[0, 1, 2, 3, \.\.\.\], now"):
        checkpoints.load(tmp_path / "c.safetensors", {"layers": long[::-1]})


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
