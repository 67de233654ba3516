"""A run that was killed, wherever it was, ends with the bits of one that was not."""

import copy
import itertools
import json
import random
import signal
import time

import peft
import pytest
import torch
from hypothesis import given, settings, strategies as st

from plpkg import checkpoints
from plpkg.autonomy.transfer import Task, transfer
from plpkg.autonomy.windows import CHECKPOINT, learn_in_windows

from preloaded import Process

SETTINGS = dict(steps=40, lr=0.1, batch=4, evaluate_every=4, patience=None, seed=1003)  # which no switch shifts
LORA = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
CASES = {
    "head": ("mobile", "head", {}),
    "head of sequences": ("lstm", "head", {"patience": 6, "lr": 0.3}),
    "norm": ("mobile", "norm", {}),
    "all": ("mobile", "all", {"patience": 9, "batch_norm": True}),
    "lora": ("llama", "lora", {}),
}

SCRIPT = """
import json, os, signal, sys
import torch
from plpkg import checkpoints
from plpkg.autonomy.transfer import Task
from plpkg.autonomy.windows import learn_in_windows

folder, scope, settings, moment, at, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model, train, validation, lora = torch.load(f"{folder}/parts.pt", weights_only=False)
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
task = Task(model, train, validation, scope, lora=lora, **settings)
result = learn_in_windows(task, [range(5), [], range(9), range(100)], f"{folder}/run", checkpoint_every=2)
torch.save((result.state, result.log, result.step), f"{folder}/result.pt")
"""
MOMENTS = [("within a checkpoint", 2), ("before a checkpoint", 3), ("after a checkpoint", 1), ("after an update", 4),
           ("within a checkpoint", 1), ("before an update", 7)]  # fmt: skip


def parts(name, tools):
    return tools.learner(name, torch.float32), *(tools.samples(name, 14, seed, torch.float32) for seed in (0, 1))


def assert_same(one, other):
    (state, log, step), (their_state, their_log, their_step) = one, other
    assert (log, step) == (their_log, their_step)
    assert state.keys() == their_state.keys()
    assert all(torch.equal(value, their_state[key]) for key, value in state.items())


@pytest.mark.parametrize("case", CASES)
def test_killed_at_any_moment_it_ends_with_the_same_bits(case, tools, tmp_path):
    name, scope, options = CASES[case]
    model, train, validation = parts(name, tools)
    lora, chosen, draw = LORA if scope == "lora" else None, SETTINGS | options, random.Random(case)
    torch.save((model, train, validation, lora), tmp_path / "parts.pt")
    script = lambda *moment: Process(  # noqa: E731 (with what does not change)
        SCRIPT, json.dumps([str(tmp_path), scope, chosen, *moment, torch.get_num_threads()])
    )
    checkpoint = tmp_path / "run" / CHECKPOINT
    for moment in MOMENTS:
        with script(*moment) as process:
            assert process.wait() == -signal.SIGKILL, process.stdout.read()
    for _ in range(2):
        before = checkpoint.stat().st_mtime_ns
        with script("never", 0) as process:
            while process.poll() is None and checkpoint.stat().st_mtime_ns == before:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.03))
    with script("never", 0) as process:
        errors = process.stdout.read()
        assert process.wait() == 0, errors
    whole = transfer(model, train, validation, scope, lora=lora, **chosen)
    assert_same(torch.load(tmp_path / "result.pt"), (whole.state, whole.log, whole.step))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [CHECKPOINT]


@pytest.fixture(scope="module")
def whole(tools):
    """What is learnt in one go, and how to begin the task."""
    made = {name: parts(name, tools) for name in ("mobile", "lstm")}
    begin = lambda name, scope, **options: Task(*made[name], scope, **SETTINGS | options)  # noqa: E731 (with what is made)

    def result(task):
        while not task.done:
            task.step()
        result = task.result()
        return result.state, result.log, result.step

    cases = [("mobile", "head"), ("mobile", "norm"), ("lstm", "head"), ("lstm", "all")]
    return begin, {case: result(begin(*case)) for case in cases}


@settings(max_examples=12)
@given(st.data())
def test_however_the_windows_lie(whole, tmp_path_factory, data):
    begin, expected = whole
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
    assert_same((result.state, result.log, result.step), expected[case])


def test_windows_that_end_too_early_give_nothing_and_keep_what_was_done(whole, tmp_path):
    begin, expected = whole
    for windows in ([], [[]], [range(0), []]):
        assert learn_in_windows(begin("mobile", "head"), windows, tmp_path / "run") is None
        assert not (tmp_path / "run" / CHECKPOINT).exists()
    assert learn_in_windows(begin("mobile", "head"), [range(7), range(4)], tmp_path / "run") is None
    task = begin("mobile", "head")
    state = checkpoints.load(tmp_path / "run" / CHECKPOINT, task.identity)
    assert state["task"]["made"] == 11
    assert learn_in_windows(task, [], str(tmp_path / "run")) is None
    result = learn_in_windows(begin("mobile", "head"), itertools.repeat(range(3)), tmp_path / "run")
    assert_same((result.state, result.log, result.step), expected["mobile", "head"])
    task = begin("mobile", "head")
    again = learn_in_windows(task, [], tmp_path / "run")
    assert_same((again.state, again.log, again.step), expected["mobile", "head"])


def test_no_more_leave_is_asked_for_than_is_needed(whole, tmp_path):
    asked = iter(range(1000))
    assert learn_in_windows(whole[0]("mobile", "head", steps=6), [asked], tmp_path)
    assert next(asked) <= 7


def test_a_kill_costs_at_most_checkpoint_every_steps(whole, tmp_path, monkeypatch):
    begin, _ = whole
    written = []
    monkeypatch.setattr(checkpoints, "save", lambda path, state: written.append(state["task"]["made"]))
    learn_in_windows(begin("mobile", "head", steps=20), [range(7), range(2), range(90)], tmp_path, checkpoint_every=3)
    assert written == [3, 6, 7, 9, 12, 15, 18, 20]


@pytest.mark.parametrize(
    "change",
    [dict(seed=4), dict(steps=41), dict(lr=0.2), dict(batch=5), dict(patience=2), dict(evaluate_every=5),
     dict(batch_norm=True)],
    ids=str,
)  # fmt: skip
def test_the_folder_of_another_task_is_refused(change, whole, tmp_path):
    begin, _ = whole
    learn_in_windows(begin("mobile", "norm"), [range(3)], tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    (name, value), = change.items()  # fmt: skip
    with pytest.raises(ValueError, match=f"{tmp_path} holds a run with {name}=.*, now {value}.*: take another folder"):
        learn_in_windows(begin("mobile", "norm", **change), [range(3)], tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_other_data_a_newer_model_and_another_scope_are_another_task(whole, tools, tmp_path):
    begin, _ = whole
    learn_in_windows(begin("mobile", "norm"), [range(3)], tmp_path)
    model, train, validation = parts("mobile", tools)
    newer = tools.learner("mobile", torch.float32)
    with torch.no_grad():
        newer.body[0].weight[0, 0, 0, 0] += 1
    for other in [
        (newer, train, validation),
        (model, train[:13], validation),
        (model, train, train),
        (model, train, None),
    ]:
        with pytest.raises(ValueError, match="holds a run with sha256="):
            learn_in_windows(Task(*other, "norm", **SETTINGS), [range(3)], tmp_path)
    with pytest.raises(ValueError, match="holds a run with scope='norm', now 'head'"):
        learn_in_windows(begin("mobile", "head"), [range(3)], tmp_path)


STATES = {
    "no task": lambda state: state.clear(),
    "a task that is a list": lambda state: state.update(task=[1]),
    "no kept values": lambda state: state["task"].update(kept={}),
    "a kept value of another shape": lambda state: state["task"]["kept"].update({"head.bias": torch.zeros(1)}),
    "a best value that belongs nowhere": lambda state: state["task"]["best"].update(more=torch.zeros(1)),
    "steps before the first": lambda state: state["task"].update(made=-5),
    "more steps than all": lambda state: state["task"].update(made=10**9),
    "half a step": lambda state: state["task"].update(made=2.5),
    "a sample that is not there": lambda state: state["task"].update(left=torch.tensor([10**6]), sizes=[1]),
    "batches of other sizes": lambda state: state["task"].update(sizes=[1]),
    "a row of a later step": lambda state: state["task"]["log"].append({"step": 9, "loss": 1.0, "accuracy": 0.5}),
    "a loss that is not finite": lambda state: state["task"]["log"][0].update(loss=float("nan")),
    "a log of nothing": lambda state: state["task"].update(log=[1]),
    "no optimizer": lambda state: state["task"].update(optimizer=None),
    "an optimizer's moments of another shape": lambda state: state["task"]["optimizer"]["state"][0].update(
        exp_avg=torch.zeros(2)
    ),
    "a generator of three bytes": lambda state: state["task"].update(generator=torch.zeros(3, dtype=torch.uint8)),
    "a generator of floats": lambda state: state["task"].update(generator=torch.zeros(5056)),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_not_this_tasks_is_refused_and_changes_nothing(name, whole, tmp_path):
    begin, path = whole[0], tmp_path / CHECKPOINT
    learn_in_windows(begin("mobile", "head"), [range(3)], tmp_path)
    state = checkpoints.read(path)
    identity = state["identity"]
    STATES[name](state)
    checkpoints.save(path, state | {"identity": identity})
    task = begin("mobile", "head")
    before = copy.deepcopy((task.state_dict()["kept"], task.state_dict()["generator"], task.made))
    with pytest.raises(ValueError, match=f"{path} cannot be read .*: remove it to start anew") as refusal:
        learn_in_windows(task, [range(3)], tmp_path)
    assert len(str(refusal.value)) < 400 + len(str(path))
    after = task.state_dict()["kept"], task.state_dict()["generator"], task.made
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]


def test_a_checkpoint_on_every_no_step_is_refused(whole, tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every must be a whole number of at least 1, got 0"):
        learn_in_windows(whole[0]("mobile", "head"), [], tmp_path, checkpoint_every=0)
