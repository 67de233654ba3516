"""A run that was killed, wherever it was, ends with the bits of one that was not."""

import functools
import itertools
import json
import math
import signal

import peft
import pytest
import torch
from hypothesis import given, settings, strategies as st

from plpkg.autonomy.transfer import Task, Transfer, transfer
from plpkg.autonomy.windows import CHECKPOINT, learn_in_windows
from plpkg.clipping import make_private
from plpkg.clipping.training.accounting import epsilon_of
from plpkg.files import checkpoints
from tests.autonomy.conftest import learner, same, samples

from preloaded import Process

SETTINGS = dict(steps=40, lr=0.1, batch=4, evaluate_every=4, patience=None, seed=1003)  # which no switch shifts
LORA = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
CASES = {
    "head of sequences": ("lstm", "head", {"patience": 6, "lr": 0.3}),
    "norm": ("mobile", "norm", {}),
    "all": ("mobile", "all", {"patience": 9, "batch_norm": True}),
    "lora": ("llama", "lora", {}),
    "private head, many samples of nobody": ("mobile", "head", {"batch": 1, "private": {}}),
    "private head of sequences, by users": ("lstm", "head", {"private": {"users": [n // 2 for n in range(14)]}}),
    "private bias": ("gpt2", "bias", {"private": {"execution": "ghost", "accountant": "rdp"}}),
    "all private, in pieces": ("mobile", "all", {"private": {"max_physical_batch_size": 2, "clipping": "automatic"}}),
}
PRIVATE = functools.partial(make_private, noise_multiplier=1.0, max_grad_norm=1.0, seed=5)

SCRIPT = """
import json, os, signal, sys
import torch
from plpkg.files import checkpoints
from plpkg.autonomy.transfer import Task
from plpkg.autonomy.windows import learn_in_windows

folder, scope, settings, moment, at, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model, train, validation, lora, private = torch.load(f"{folder}/parts.pt", weights_only=False)
save, replace, step, count = checkpoints.save_file, os.replace, torch.optim.AdamW.step, 0

def die(now):
    global count
    count += now == moment
    if now == moment and count == at:
        os.kill(os.getpid(), signal.SIGKILL)

def saved(tensors, path, metadata):
    save(tensors, path, metadata)
    if moment == "within a checkpoint" and count == at - 1:
        os.truncate(path, path.stat().st_size // 2)
    die("within a checkpoint")

def replaced(old, new):
    die("before a checkpoint")
    replace(old, new)
    die("after a checkpoint")

def stepped(optimizer):
    die("before an update")
    step(optimizer)
    die("after an update")

checkpoints.save_file, os.replace, torch.optim.AdamW.step = saved, replaced, stepped
task = Task(model, train, validation, scope, lora=lora, private=private, **settings)
result = learn_in_windows(task, [range(5), [], range(9), range(100)], f"{folder}/run", checkpoint_every=2)
spent = result.epsilon and result.epsilon(0.01)
torch.save((result.state, result.log, result.step, spent), f"{folder}/result.pt")
"""
MOMENTS = [("within a checkpoint", 2), ("before a checkpoint", 3), ("after a checkpoint", 1), ("after an update", 4),
           ("within a checkpoint", 1), ("before an update", 7)]  # fmt: skip


def parts(name):
    return learner(name, torch.float32), *(samples(name, 14, seed, torch.float32) for seed in (0, 1))


def assert_same(result, expected):
    """A result is what was learnt in one go: values, log and step."""
    assert (result.log, result.step) == (expected.log, expected.step)
    assert same(result.state, expected.state)


@pytest.mark.parametrize("case", CASES)
def test_killed_six_times_it_ends_with_the_same_bits(case, tmp_path):
    name, scope, options = CASES[case]
    model, train, validation = parts(name)
    lora, chosen = LORA if scope == "lora" else None, SETTINGS | options
    how = chosen.pop("private", None)
    private = None if how is None else functools.partial(PRIVATE, **how)
    torch.save((model, train, validation, lora, private), tmp_path / "parts.pt")
    for moment in (*MOMENTS, ("never", 0)):
        with Process(SCRIPT, json.dumps([str(tmp_path), scope, chosen, *moment, torch.get_num_threads()])) as process:
            said = process.stdout.read()
            assert process.wait() == (0 if moment[0] == "never" else -signal.SIGKILL), said
    *result, spent = torch.load(tmp_path / "result.pt")
    expected = transfer(model, train, validation, scope, lora=lora, private=private, **chosen)
    assert_same(Transfer(None, *result), expected)
    assert spent == (private and expected.epsilon(0.01))
    if private:
        rate = 1 / math.ceil(14 / chosen["batch"])
        assert spent == epsilon_of(1.0, rate, 40, 0.01, accountant=how.get("accountant", "prv"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [CHECKPOINT]


@pytest.fixture(scope="module")
def begin():
    """Makes the same task each time."""
    made = {name: parts(name) for name in ("mobile", "lstm")}
    return lambda name="mobile", scope="head", **options: Task(*made[name], scope, **SETTINGS | options)


@pytest.fixture(scope="module")
def expected(begin):
    """What is learnt in one go."""

    def learnt(task):
        while not task.done:
            task.step()
        return task.result()

    cases = [("mobile", "head"), ("mobile", "norm"), ("lstm", "head"), ("lstm", "all")]
    return {case: learnt(begin(*case)) for case in cases}


@settings(max_examples=12)
@given(st.data())
def test_however_the_windows_lie(begin, expected, tmp_path_factory, data):
    case = data.draw(st.sampled_from(sorted(expected)))
    calls = data.draw(st.lists(st.lists(st.integers(0, 17), max_size=3), max_size=5))
    every, folder, made = data.draw(st.integers(1, 50)), tmp_path_factory.mktemp("run"), 0
    for windows in calls:
        task = begin(*case)
        result = learn_in_windows(task, map(range, windows), folder, checkpoint_every=every)
        made = min(SETTINGS["steps"], made + sum(windows))
        assert task.made == made
        assert (result is None) == (made < SETTINGS["steps"])
    result = learn_in_windows(begin(*case), [range(20), range(20)], folder, checkpoint_every=every)
    assert_same(result, expected[case])


def test_windows_that_end_too_early_give_nothing_and_keep_what_was_done(begin, expected, tmp_path):
    for windows in ([], [[]], [range(0), []]):
        assert learn_in_windows(begin(), windows, tmp_path / "run") is None
        assert not (tmp_path / "run" / CHECKPOINT).exists()
    assert learn_in_windows(begin(), [range(7), range(4)], tmp_path / "run") is None
    state = checkpoints.load(tmp_path / "run" / CHECKPOINT, begin().identity)
    assert state["task"]["made"] == 11
    assert learn_in_windows(begin(), [], str(tmp_path / "run")) is None
    for windows in (itertools.repeat(range(3)), []):  # the second time all is done
        assert_same(learn_in_windows(begin(), windows, tmp_path / "run"), expected["mobile", "head"])


def test_no_more_leave_is_asked_for_than_is_needed(begin, tmp_path):
    asked = iter(range(1000))
    assert learn_in_windows(begin(steps=6), [asked], tmp_path)
    assert next(asked) <= 7


def test_a_kill_costs_at_most_checkpoint_every_steps(begin, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(checkpoints, "save", lambda path, state: written.append(state["task"]["made"]))
    learn_in_windows(begin(steps=20), [range(7), range(2), range(90)], tmp_path, checkpoint_every=3)
    assert written == [3, 6, 7, 9, 12, 15, 18, 20]


def test_the_folder_of_another_task_is_refused(begin, tmp_path):
    """Which tasks are others, test_transfer says."""
    learn_in_windows(begin(scope="norm"), [range(3)], tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    newer, *data = parts("mobile")
    with torch.no_grad():
        newer.body[0].weight[0, 0, 0, 0] += 1
    for task, told in (
        (begin(scope="norm", lr=0.2), "lr=0.1, now 0.2"),
        (begin(scope="head"), "scope='norm', now 'head'"),
        (begin(scope="norm", private=PRIVATE), "private=None, now True"),
        (Task(newer, *data, "norm", **SETTINGS), "sha256=.*, now .*"),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path} holds a run with {told}: take another folder"):
            learn_in_windows(task, [range(3)], tmp_path)
        assert (tmp_path / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-9] + bytes([7] * 9)])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage, begin, tmp_path):
    path, task = tmp_path / CHECKPOINT, begin()
    learn_in_windows(begin(), [range(3)], tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path} (cannot be read|is damaged): .*: remove it to start anew"):
        learn_in_windows(task, [range(3)], tmp_path)
    assert task.made == 0


def test_a_checkpoint_on_every_no_step_is_refused(begin, tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every must be a whole number of at least 1, got 0"):
        learn_in_windows(begin(), [], tmp_path, checkpoint_every=0)
