"""A fleet's results are those of a loop, whoever computes them and whatever is killed. A minute, most of it Ray's."""

import os
import random
import re
import sys
import time
from collections.abc import Mapping

import pytest
import torch

from plpkg.autonomy.fleet import fleet

from preloaded import Process
from waiting import patient_ray

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # on importing ray 2.60

NAMES = ["zoë", "../up", "a/b", "", "CON", "line\nbreak", "b", "a"]
KILLS = dict.fromkeys(NAMES, 0) | {"a/b": 1}  # of Ray's processes, by the person who is learning
if os.environ.get("PLPKG_TEST_PRODUCTS"):  # Ray tries a task again three times; each kill takes seconds
    KILLS = dict(zip(NAMES, [3, 3, 3, 3, 3, 3, 1, 1], strict=True))


@pytest.fixture
def people():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(40, 3, generator=generator) for name in NAMES}


def device():
    """What a device does; a function inside, which Ray's processes get by value, as they do not have this module."""

    def learn(name, data):
        weight = torch.zeros(3, requires_grad=True)
        for _ in range(20):
            (gradient,) = torch.autograd.grad((data @ weight - 1).square().mean(), weight)
            weight = (weight - 0.1 * gradient).detach().requires_grad_()
        return {"weight": weight.detach(), "name": name, "threads": [torch.get_num_threads()], "pid": os.getpid()}

    return learn


COST = (
    r"8 tasks of 1 people, 2 at a time, each in a process with one core: a process gets 0\.\d\d\d MB .*,"
    r" a task 0\.001 MB of data\. Ray starts first, which may take half a minute\."
)


def assert_same(results, expected):
    assert list(results) == list(expected)
    for name, result in expected.items():
        assert torch.equal(results[name]["weight"], result["weight"])
        assert [results[name][key] for key in ("name", "threads")] == [name, [1]]


def test_results_are_each_persons_alone_on_one_thread(people, capsys):
    torch.set_num_threads(2)
    try:
        results = fleet(people, device(), chunk=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert_same(results, {name: device()(name, data) for name, data in people.items()})
    assert "8/8" in capsys.readouterr().err  # a bar counts people


class Read(dict):
    """People whose data are counted when they are read."""

    def __init__(self, people):
        super().__init__(people)
        self.read = []

    def __getitem__(self, name):
        self.read.append(name)
        return super().__getitem__(name)


def test_ray_gives_the_same_bits_survives_kills_and_names_who_fails(people, tmp_path, monkeypatch, capsys):
    ray = patient_ray(monkeypatch)
    learn, failures, over = device(), tmp_path / "failures", tmp_path / "over"
    chance = random.Random(0)
    fatal = {name: [chance.randint(1, 200) for _ in range(kills)] for name, kills in KILLS.items()}  # calls in learn
    deaths = tmp_path / "deaths"
    deaths.mkdir()

    def killed(name, data):
        calls, number = 0, NAMES.index(name)
        before = len([*deaths.glob(f"{number}-*")])

        def called(*_):
            nonlocal calls
            calls += 1
            if calls == fatal[name][before]:
                (deaths / f"{number}-{before}").touch()
                os.kill(os.getpid(), 9)

        if before < KILLS[name]:
            sys.setprofile(called)
        return learn(name, data)

    def fails(name, data):
        if name == "CON":
            with failures.open("a") as file:
                file.write("once")
            raise KeyError("no such text")
        while name in NAMES[NAMES.index("CON") + 1 :] and not over.exists():  # whose turn comes later ends later
            time.sleep(0.01)
        return learn(name, data)

    def crashes(reference):
        raise ray.exceptions.WorkerCrashedError

    expected, ends = fleet(people, learn, progress=False), []
    settings = dict(engine="ray", chunk=1, progress=False)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ray, "shutdown", lambda: ends.append(ray.is_initialized()))  # starts take half a minute each
            results = fleet(people, killed, workers=2, folder=tmp_path / "run", **settings | {"progress": True})
            said = capsys.readouterr().err
            assert re.search(COST, said), said
            assert ends == [True]
            assert len([*deaths.iterdir()]) == sum(KILLS.values())
            assert_same(results, expected)
            assert os.getpid() not in {result["pid"] for result in results.values()}

            lazy = Read(people)  # and a Ray that was there before the call is there after it
            with pytest.raises(RuntimeError, match="the device of 'CON' failed: KeyError"):
                fleet(lazy, fails, workers=1, **settings)
            over.touch()
            assert failures.read_text() == "once"
            asked = NAMES.index("CON") + 1  # and one that waits, unless the one before has not ended
            assert lazy.read in (NAMES[:asked], NAMES[: asked + 1])
            patch.setattr(ray, "get", crashes)
            either = r"'zoë', '\.\./up'|'a/b', ''"  # two tasks run: either may end first
            with pytest.raises(RuntimeError, match=rf"the process of ({either}) died again and again"):
                fleet(people, learn, workers=1, **settings | {"chunk": 2})
            assert ends == [True]
    finally:
        ray.shutdown()
    assert_same(fleet(people, None, folder=tmp_path / "run", **settings), expected)  # all is there: nothing starts
    assert not ray.is_initialized()


def test_an_error_names_the_person_and_has_its_cause(people):
    message = re.escape(r"the device of 'line\nbreak' failed: ZeroDivisionError")
    with pytest.raises(RuntimeError, match=message) as error:
        fleet(people, lambda name, data: 1 / (name != "line\nbreak"), progress=False)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


KILLED = """
import os, sys, torch
from plpkg.autonomy.fleet import fleet

def learn(name, data):
    if name == "g":
        os.kill(os.getpid(), 9)
    return {"data": data}

people = {name: torch.tensor([ord(name)]) for name in "abcdefghij"}
fleet(people, learn, folder=sys.argv[1], chunk=2, identity={"lr": 0.1}, progress=False)
"""


def test_a_run_that_was_killed_goes_on_and_learns_nobody_twice(tmp_path):
    with Process(KILLED, str(tmp_path)) as process:
        assert process.wait() == -9, process.stdout.read()
    people, learned = {name: torch.tensor([ord(name)]) for name in "abcdefghij"}, []

    def run(people=people, chunk=1, lr=0.1):
        learned.clear()
        learn = lambda name, data: learned.append(name) or {"data": data}  # noqa: E731 (an argument)
        return fleet(people, learn, folder=tmp_path, chunk=chunk, identity={"lr": lr}, progress=False)

    for left in ("ghij", ""):
        results = run(chunk=3)
        assert list(results) == list(people)
        assert all(torch.equal(results[name]["data"], data) for name, data in people.items())
        assert "".join(learned) == left
    (tmp_path / "000002.safetensors").unlink()  # what is damaged can be removed, and comes anew
    for left in ("cd", ""):
        assert run() == results
        assert "".join(learned) == left
    with pytest.raises(ValueError, match=r"holds a run with lr=0\.1, now 0\.2"):
        run(lr=0.2)
    with pytest.raises(ValueError, match="holds a run with people="):
        run(people | {"k": 1})
    (tmp_path / "000000.safetensors").write_text("half")
    with pytest.raises(ValueError, match=r"000000\.safetensors cannot be read"):
        run()


class Named(Mapping):
    """People read from a table, which may have a name twice."""

    def __init__(self, names):
        self.names = names

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, name):
        return torch.ones(2)


def test_what_a_folder_cannot_keep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="learn must make a dict, and made 3 for 'ann'"):
        fleet({"ann": 3}, lambda name, data: data, folder=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(people={}), r"len\(people\) must be a whole number of at least 1, got 0"),
        (dict(engine="thread"), "engine must be one of 'process', 'ray', got 'thread'"),
        (dict(workers=0), "workers must be a whole number of at least 1, got 0"),
        (dict(people=Named(["ann", "bob", "ann"])), "2 people have the name 'ann'"),
        (dict(identity={"people": 3}), "identity has people=3, where the hash of all names stands"),
        (dict(chunk=0.5), "chunk must be a whole number of at least 1, got 0.5"),
    ],
)
def test_bad_settings_are_named(people, settings, message):
    with pytest.raises(ValueError, match=message):
        fleet(**dict(people=people, learn=device()) | settings)


def test_without_ray_a_sentence_says_what_to_install(people, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"engine='ray' needs Ray: pip install 'plpkg\[scale\]'"):
        fleet(people, device(), engine="ray")
