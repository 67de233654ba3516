"""A pytest plugin: ``pytest --dp-conformance my_train.py`` tries the training functions of a file, a test a case.

A training function is called ``train``, or its name begins with ``train_``; what it is given stands in
:func:`plpkg.clipping.checks.conformance.conformance`. With Opacus's hooks::

    def train(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size):
        model, optimizer, _ = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader([0]), poisson_sampling=False,
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,
        )
        optimizer.expected_batch_size = expected_batch_size
        for step in steps:
            for place, (inputs, target) in enumerate(step, start=1):
                optimizer.signal_skip_step(do_skip=place < len(step))
                criterion(model(*inputs), target).backward()
                optimizer.step()
                optimizer.zero_grad()

If the file has a function ``cases``, its cases are tried instead of the usual ones. A case fails with what is wrong, in
a sentence a check, and is skipped with what was refused. Without the option nothing is collected, and nothing imported.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import pytest

OPTION = "--dp-conformance"


class BreachError(Exception):
    """A breach, a sentence a check."""


class ConformanceItem(pytest.Item):
    """One training function, on one case."""

    def __init__(self, *, train, case, **options) -> None:
        super().__init__(**options)
        self.train = train
        self.case = case

    def runtest(self) -> None:
        from plpkg.clipping.checks.conformance import conformance

        (outcome,) = conformance(self.train, [self.case]).outcomes
        if outcome.breaches:
            lines = list(outcome.sentences)
            if self.case.lesson:
                lines.append(f"({self.case.lesson})")
            raise BreachError("\n".join(lines))
        if outcome.verdict == "refuses":
            pytest.skip(outcome.sentences[0])

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, BreachError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, self.train.__code__.co_firstlineno - 1, self.name


def pytest_addoption(parser) -> None:
    what = "try the functions train and train_* of the given files: does a private training do what its ε claims?"
    parser.getgroup("differential privacy").addoption(OPTION, action="store_true", help=what)


def pytest_pycollect_makeitem(collector, name: str, obj: object):
    """A test for each case, of a function that is defined in the collected file."""
    if not collector.config.getoption(OPTION) or not isinstance(collector, pytest.Module):
        return None
    if not (name == "train" or name.startswith("train_")) or not inspect.isfunction(obj):
        return None
    if obj.__module__ != collector.obj.__name__:
        return None
    from plpkg.clipping.checks import conformance
    from plpkg.clipping.checks.cases import Case

    given = getattr(collector.obj, "cases", conformance.cases)
    cases: Any = given() if callable(given) else given
    cases = list(cases) if isinstance(cases, Iterable) else [cases]
    if not callable(given) or not all(isinstance(case, Case) for case in cases):
        raise collector.CollectError(f"{collector.path.name}: cases must be a function that gives cases, got {given!r}")
    return [ConformanceItem.from_parent(collector, name=f"{name}[{case.name}]", train=obj, case=case) for case in cases]
