"""The pytest plugin: what it collects, what it prints, and that it costs nothing without its option."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trainings  # noqa: F401 (pytester forgets what is imported first in a run of its own, and torch cannot load twice)

pytest_plugins = ["pytester"]

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


@pytest.fixture
def run(pytester):
    """Runs pytest on a file: what it prints, and its exit status."""

    def on(text, *options):
        path = pytester.makepyfile(my_train=text)
        done = pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "-rs", *options, path)
        return done.stdout.str(), done.ret

    return on


def test_a_test_a_case(run):
    out, status = run(MY_TRAIN + CASES, "--dp-conformance")
    assert status == 1
    assert "1 failed, 2 passed, 1 skipped" in out
    assert "_ train_quietly[perceptron] _" in out
    failure = out.partition("_ train_quietly[perceptron] _")[2].splitlines()[1]
    assert failure == "noise: the noise of 0.bias has the standard deviation 0 σC instead of σC"
    assert "learns: refuses: no Sequential" in out
    assert "Traceback" not in out
    assert "conformance.py" not in out


def test_one_case_by_name(run):
    out, status = run(MY_TRAIN + CASES, "--dp-conformance", "-k", "right")
    assert (status, "1 passed, 3 deselected" in out) == (0, True)


def test_the_usual_cases(run):
    out, status = run(MY_TRAIN, "--dp-conformance", "--collect-only", "-q")
    assert status == 0
    assert out.count("::train_right[") == out.count("::train_never[") == 14
    assert "::train_right[Gram cancellation]" in out
    assert "::train[" not in out


def test_a_lesson_stands_below(run):
    text = """
def cases():
    from plpkg.clipping.checks.specimens import specimens

    return specimens(5)[5:6]


def train(model, *arguments, **options):
    raise KeyError
"""
    out, _ = run(text, "--dp-conformance")
    assert "(The padding's row does not learn, but is in the norm: everybody is clipped too much.)" in out


def test_without_the_option_nothing_is_collected(run):
    out, status = run(MY_TRAIN)
    assert (status, "1 passed" in out) == (0, True)


def test_without_the_option_nothing_is_imported(tmp_path):
    path = tmp_path / "test_plain.py"
    path.write_text("def train():\n    raise AssertionError\n\n\ndef test_plain():\n    pass\n")
    arguments = ["-p", "no:cacheprovider", "-p", PLUGIN, "-q", str(path)]
    code = (
        f"import sys, pytest; status = pytest.main({arguments}); "
        f"print('torch' in sys.modules, {PLUGIN!r} in sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False True"), done.stderr
    assert "1 passed" in done.stdout


def test_pytest_finds_it():
    """Named like the module, so that it may be named with -p before it is installed, and is not taken for another."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
