"""Nothing in the tests may reach a network, open a window, or fight for the cores.

Two switches show that no test depends on one machine's luck: ``PLPKG_TEST_THREADS=2`` and ``PLPKG_TEST_SEED=1``. A
third, ``PLPKG_TEST_PRODUCTS=1``, runs the whole products of parameters, and kills Ray's processes twenty times.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = os.environ.get("PLPKG_TEST_THREADS", "1")  # two wait for each other on a busy machine

import gc
import math
import random
from collections import defaultdict

import hypothesis
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile(  # a busy machine is slow, and that is no defect of the code
    "plpkg", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("plpkg")

SHIFT = 1000 * int(os.environ.get("PLPKG_TEST_SEED", "0"))


def _shifted(seed):
    """Another seed for each one that was written down; those made by a hash differ by what was hashed."""
    return seed + SHIFT if isinstance(seed, int | np.integer) and 0 <= seed < 1000 else seed


class _Generator(torch.Generator):
    def manual_seed(self, seed):
        return super().manual_seed(_shifted(seed))


class _Random(random.Random):
    def __init__(self, seed=None):
        super().__init__(_shifted(seed))


if SHIFT:  # here, so that what test modules make while they are collected begins elsewhere as well
    _manual_seed, _default_rng = torch.manual_seed, np.random.default_rng
    torch.Generator, random.Random = _Generator, _Random
    torch.manual_seed = lambda seed: _manual_seed(_shifted(seed))
    np.random.default_rng = lambda seed=None: _default_rng(_shifted(seed))


def pytest_collection_modifyitems(config, items):
    """Of a product of parameters: one value of the longest list with all of the others, each other value with one."""
    if os.environ.get("PLPKG_TEST_PRODUCTS"):
        return
    functions = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for tests in functions.values() for item in _off_the_diagonal(tests)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _off_the_diagonal(tests):
    together = [_names(mark.args[0]) for mark in tests[0].iter_markers("parametrize")]
    values = tests[0].callspec.params
    fixtures = [[name] for name in values if not any(name in names for names in together)]
    places = []  # of each list of values, that of each test's
    for names in together + fixtures:
        known = {}
        places.append(
            [known.setdefault(tuple(id(test.callspec.params[name]) for name in names), len(known)) for test in tests]
        )
    lengths = [max(column) + 1 for column in places]
    if len(lengths) < 2 or math.prod(lengths) != len(tests):
        return  # no product
    longest = places.pop(lengths.index(max(lengths)))
    combinations = sorted(set(zip(*places, strict=True)))
    for test, place, others in zip(tests, longest, zip(*places, strict=True), strict=True):
        if place and combinations.index(others) != place % len(combinations):
            yield test


def _names(argnames):
    return [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else argnames


def pytest_collection_finish():
    """What the imports have made stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Triton would report as leaks what is not collected at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")
