"""The pytest plugin, each time in a process of its own."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = "plpkg.clipping.checks.plugin"

MY_TRAIN = """
import torch

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
"""
CASES = """

def cases():
    return ordinary()[:1]
"""


def run(path, *options, code=None):
    """What pytest prints about a file, and its exit status."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    arguments = ["-p", "no:cacheprovider", "-p", PLUGIN, "-rs", *options, str(path)]
    call = code or f"import sys, pytest; sys.exit(pytest.main({arguments}))"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=path.parent, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr, done.returncode


@pytest.fixture
def my_train(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text(MY_TRAIN + CASES)
    return path


def test_a_test_a_case(my_train):
    out, status = run(my_train, "--dp-conformance")
    assert status == 1
    assert "1 failed, 2 passed, 1 skipped" in out
    assert "_ train_quietly[perceptron] _" in out
    failure = out.partition("train_quietly[perceptron]")[2].splitlines()[1]
    assert failure == "noise: the noise of 0.bias has the standard deviation 0 σC instead of σC"
    assert "learns: refuses: no Sequential" in out
    assert "Traceback" not in out
    assert "conformance.py" not in out


def test_one_case_by_name(my_train):
    out, status = run(my_train, "--dp-conformance", "-k", "right")
    assert (status, "1 passed, 3 deselected" in out) == (0, True)


def test_the_usual_cases(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text(MY_TRAIN)
    out, status = run(path, "--dp-conformance", "--collect-only", "-q")
    assert status == 0
    assert out.count("::train_right[") == out.count("::train_never[") == 14
    assert "::train_right[Gram cancellation]" in out
    assert "::train[" not in out


def test_without_the_option_nothing_is_imported(tmp_path):
    path = tmp_path / "test_plain.py"
    path.write_text("def train():\n    raise AssertionError\n\n\ndef test_plain():\n    pass\n")
    arguments = ["-p", "no:cacheprovider", "-p", PLUGIN, "-q", str(path)]
    code = (
        f"import sys, pytest; status = pytest.main({arguments}); print('torch' in sys.modules, {PLUGIN!r} in sys.modules)"
        "; sys.exit(status)"
    )
    out, status = run(path, code=code)
    assert (status, out.splitlines()[-1]) == (0, "False True")
    assert "1 passed" in out


def test_pytest_finds_it():
    """Named like the module, so that it may be named with -p before it is installed, and is not taken for another."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
