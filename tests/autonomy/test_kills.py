"""Killed twenty times (SIGKILL), a run ends with the bits of one that was not.

The kills are drawn over the whole length of a run. Each falls at a random call of a Python or C function: half of them
anywhere within the step that was drawn, half within the writing of the first checkpoint after it.
"""

import functools
import json
import random
import signal

import pytest
import torch

from plpkg.autonomy.online import OnlineLearner
from plpkg.autonomy.transfer import transfer
from plpkg.clipping import make_private
from tests.autonomy.conftest import learner, same, samples

from preloaded import Process

KILLS = 20

START = """
import functools, json, os, signal, sys
import torch
from plpkg.files import checkpoints

folder, first, where, fatal = json.loads(sys.argv[1])
torch.set_num_threads(1)
parts, save = torch.load(f"{folder}/parts.pt", weights_only=False), checkpoints.save
calls, writing, armed = 0, [], False

def called(*_):
    global calls
    calls += 1
    if calls == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

def at(step):
    global armed
    armed = step >= first
    if armed and where == "a step":
        sys.setprofile(called)

def saved(path, state):
    before = calls
    if armed and where == "a checkpoint":
        sys.setprofile(called)
    save(path, state)
    if where == "a checkpoint":
        sys.setprofile(None)
    writing.append(calls - before)

def end(result):
    sys.setprofile(None)
    torch.save((calls, min(writing, default=0), result), f"{folder}/result.pt")

checkpoints.save = saved
"""
WINDOWS = """
from plpkg.autonomy.transfer import Task
from plpkg.autonomy.windows import learn_in_windows

*data, scope, settings = parts
task = Task(*data, scope, **settings)

def window():
    while True:
        at(task.made)
        yield

result = learn_in_windows(task, [window()], f"{folder}/run", checkpoint_every=2)
end((result.state, result.log, result.step))
"""
ONLINE = """
from plpkg.autonomy.online import OnlineLearner

model, x, y, events, settings = parts
learner = OnlineLearner(model, **settings)
learner.resume(f"{folder}/run")
made = len(learner.open) + 2 * len(learner.rows())  # who has a label was predicted before
for number, (what, sample) in list(enumerate(events))[made:]:
    at(number)
    if what == "predict":
        learner.predict(x[sample, None])
    else:
        learner.label([sample], y[sample, None])
    if number % 3 == 0:
        learner.save(f"{folder}/run")
end((list(learner.head.parameters()), learner.rows(), learner.open, learner.predict(x[:8]).classes))
"""
FLEET = """
from plpkg.autonomy.fleet import fleet

people, steps = parts

def learn(name, data):
    weight = torch.zeros(3, requires_grad=True)
    for step in range(steps):
        at(steps * list(people).index(name) + step)
        (gradient,) = torch.autograd.grad((data @ weight - 1).square().mean(), weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    return {"weight": weight.detach()}

end(fleet(people, learn, folder=f"{folder}/run", chunk=2, identity={"steps": steps}, progress=False))
"""


def ended(code, folder, first=0, where="a step", fatal=0):
    """How a process ended: 0, or that it was killed, by the ``fatal``-th call in what is named from a step on."""
    with Process(START + code, json.dumps([str(folder), first, where, fatal])) as process:
        said = process.stdout.read()
        assert process.wait() in (0, -signal.SIGKILL), said
        return process.wait()


def killed(code, parts, steps, folder, seed):
    """The result of a run without a kill, and that of one that was killed :data:`KILLS` times."""
    whole, often = folder / "whole", folder / "often"
    for each in (whole, often):
        each.mkdir()
        torch.save(parts, each / "parts.pt")
    assert ended(code, whole) == 0
    calls, writing, expected = torch.load(whole / "result.pt")
    chance, most = random.Random(seed), {"a step": calls // steps, "a checkpoint": writing}
    # As many calls as a step has on average may reach into the next steps, but not to the end
    firsts = sorted(chance.sample(range(steps - 3), KILLS))
    places = chance.sample([*most] * (KILLS // 2), KILLS)
    for first, where in zip(firsts, places, strict=True):
        assert ended(code, often, first, where, chance.randint(1, most[where])) == -signal.SIGKILL
        assert not (often / "result.pt").exists()
    assert ended(code, often) == 0
    files = [sorted(path.name for path in (each / "run").iterdir()) for each in (whole, often)]
    assert files[0] == files[1]  # nothing half written is left
    return expected, torch.load(often / "result.pt")[2]


PRIVATE = functools.partial(make_private, noise_multiplier=1.0, max_grad_norm=1.0, seed=5)
TASKS = {
    "all, with BatchNorm": ("mobile", "all", {"batch_norm": True, "patience": None}),
    "private head of sequences": ("lstm", "head", {"private": PRIVATE}),
}


@pytest.mark.parametrize("case", TASKS)
def test_learning_in_windows(case, tmp_path):
    name, scope, options = TASKS[case]
    data = learner(name, torch.float32), *(samples(name, 14, seed, torch.float32) for seed in (0, 1))
    settings = dict(steps=40, lr=0.1, batch=4, evaluate_every=4, seed=1003) | options  # a seed that no switch shifts
    expected, (state, *rest) = killed(WINDOWS, (*data, scope, settings), 40, tmp_path, seed=0)
    assert same(state, expected[0])
    assert rest == list(expected[1:])
    whole = transfer(*data, scope, **settings)
    assert same(state, whole.state)
    assert rest == [whole.log, whole.step]


def test_online_learning_with_late_labels(tmp_path):
    model, data = learner("mobile", torch.float32), samples("mobile", 30, dtype=torch.float32)
    x, y = data.x, torch.where(torch.arange(30) % 4 == 0, data.y, 3)  # what can be learnt
    chance = random.Random(3)
    when = [(sample, "predict", sample) for sample in range(30)]
    when += [(sample + chance.uniform(0, 9), "label", sample) for sample in range(30)]
    events, settings = [each[1:] for each in sorted(when)], dict(lr=0.3, batch=4, allowance=2)
    events += [("predict", 0)] * 5  # whose labels never come
    (head, *rest), (found, *others) = killed(ONLINE, (model, x, y, events, settings), len(events), tmp_path, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(head, found, strict=True))
    assert torch.equal(rest.pop(), others.pop())
    assert rest == others
    rows, waiting = rest
    assert waiting == list(range(30, 35))
    alone = OnlineLearner(model, **settings)
    for what, sample in events:
        alone.predict(x[sample, None]) if what == "predict" else alone.label([sample], y[sample, None])
    assert rows == alone.rows()
    assert same(dict(enumerate(alone.head.parameters())), dict(enumerate(found)))
    assert not torch.equal(found[0], model.head.weight)
    assert any(row["shown"] != row["public"] for row in rows)  # the guard has let some of the personal ones through


def test_a_fleet(tmp_path):
    generator = torch.Generator().manual_seed(0)
    people = {f"person {k}": torch.randn(40, 3, generator=generator) for k in range(8)}
    expected, found = killed(FLEET, (people, 5), 40, tmp_path, seed=2)
    assert list(found) == list(people)
    assert all(same(found[name], expected[name]) for name in people)
    assert len({float(each["weight"][0]) for each in found.values()}) == 8
