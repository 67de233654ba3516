"""Nothing in the tests may reach a network, open a window, or fight for the cores.

Two switches show that no test depends on one machine's luck: ``PLPKG_TEST_THREADS=2`` and ``PLPKG_TEST_SEED=1``.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = os.environ.get("PLPKG_TEST_THREADS", "1")  # two wait for each other on a busy machine

import gc
import random

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


def pytest_collection_finish():
    """What the imports have made stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")
