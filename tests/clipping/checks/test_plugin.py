"""The pytest plugin: what it collects, what it prints, and that it costs nothing without its option."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = "plpkg.clipping.checks.plugin"

MY_TRAIN = """
from dataclasses import replace

from trainings import by_hand
from plpkg.clipping.checks.ordinary import ordinary

train = by_hand()  # defined elsewhere: not collected

def train_right(*arguments, **options):
    by_hand()(*arguments, **options)

def train_quietly(*arguments, **options):
    by_hand("quiet bias")(*arguments, **options)

def train_never(model, *arguments, **options):
    raise RuntimeError(f"no {type(model).__name__}")

def test_as_ever():
    pass

def training():
    raise AssertionError

def cases():
    return [replace(ordinary()[0], name="perceptron of mine", lesson="Each number needs noise.")]
"""
USUAL = """
def train(*arguments, **options):
    from trainings import by_hand

    by_hand()(*arguments, **options)
"""


def run(folder, call):
    """What a process prints, and its exit status."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing the others takes seconds
    command = [sys.executable, "-c", f"import sys, pytest; {call}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr, done.returncode


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """A run of two files, one with cases of its own and one without; of those, what has to do with perceptrons."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_train.py").write_text(MY_TRAIN)
    (folder / "usual.py").write_text(USUAL)
    options = ["-p", "no:cacheprovider", "-p", PLUGIN, "--dp-conformance", "-v", "-rs", "-k", "perceptron or ever"]
    out, status = run(folder, f"sys.exit(pytest.main({[*options, 'my_train.py', 'usual.py']}))")
    assert status == 1, out
    return out


def test_a_test_a_case(printed):
    assert "my_train.py::train_right[perceptron of mine] PASSED" in printed
    assert "my_train.py::train_quietly[perceptron of mine] FAILED" in printed
    assert "my_train.py::train_never[perceptron of mine] SKIPPED" in printed
    assert "usual.py::train[perceptron] PASSED" in printed
    assert "my_train.py::test_as_ever PASSED" in printed
    assert "1 failed, 3 passed, 1 skipped, 14 deselected" in printed  # of the 15 usual cases


def test_a_breach_is_a_sentence(printed):
    said = printed.partition("_ train_quietly[perceptron of mine] _")[2].splitlines()[1:3]
    noise = "noise: the noise of 0.bias has the standard deviation 0 σC instead of σC"
    assert said == [noise, "(Each number needs noise.)"]
    assert "learns: refuses: no Sequential" in printed
    assert not any(ours in printed for ours in ("Traceback", "conformance.py", "Error:"))


def test_cases_that_are_none(tmp_path):
    (tmp_path / "mine.py").write_text(f"{USUAL}\ncases = ['perceptron']\n")
    options = ["-p", "no:cacheprovider", "-p", PLUGIN, "--dp-conformance", "mine.py"]
    out, _ = run(tmp_path, f"sys.exit(pytest.main({options}))")
    assert "mine.py: cases must be a function that gives cases, got ['perceptron']" in out


def test_without_the_option_nothing_is_collected_or_imported(tmp_path):
    (tmp_path / "test_plain.py").write_text("def train():\n    raise AssertionError\n\n\ndef test_plain():\n    pass\n")
    options = ["-p", "no:cacheprovider", "-p", PLUGIN, "-q", "test_plain.py"]
    seen = f"'torch' in sys.modules, {PLUGIN!r} in sys.modules"
    out, status = run(tmp_path, f"status = pytest.main({options}); print({seen}); sys.exit(status)")
    assert (status, out.splitlines()[-1]) == (0, "False True"), out
    assert "1 passed" in out


def test_pytest_finds_it():
    """Named like the module, so that it may be named with -p before it is installed, and is not taken for another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
