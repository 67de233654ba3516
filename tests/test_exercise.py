import sys
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from plpkg.exercise import check_function, check_number


def check(answer):
    return check_number(answer, 10, "fingers", 0.01, "ten.", {20: "that is twice."}, "Count fingers.")


@pytest.mark.parametrize(
    ("answer", "right", "message"),
    [
        (10, True, "Right: ten."),
        ("10.05", True, "Right: ten."),
        (None, False, "No answer yet: replace None by your prediction and run the cell again."),
        (20, False, "Not yet: that is twice."),
        (11, False, "Not yet, 11 is too large. Count fingers."),
        (-10, False, "Not yet, -10 is too small. Count fingers."),
        ("10 ms", False, "A bare number of fingers is wanted here, got '10 ms'."),
        (np.float64(10), True, "Right: ten."),
        (torch.tensor(20), False, "Not yet: that is twice."),
        (True, False, "A bare number of fingers is wanted here, got True."),
        (np.arange(3), False, "A bare number of fingers is wanted here, got [0, 1, 2]."),
        pytest.param(10**5000, False, "A bare number of fingers is wanted here, got an object of type int.", id="huge"),
        (10_000, False, "Not yet: the right digits in another unit; fingers is wanted (prefixes are decimal)."),
        (0.1, False, "Not yet: the right digits in another unit; fingers is wanted (prefixes are decimal)."),
        (1.25, False, "Not yet: the right digits in another unit; fingers is wanted (prefixes are decimal)."),
    ],
)
def test_verdicts(answer, right, message):
    verdict = check(answer)
    assert bool(verdict) is right
    assert repr(verdict) == message


def test_html_is_escaped():
    assert "&lt;b&gt;" in check("<b>")._repr_html_()


def doubled(function):
    cases = [((torch.tensor([1.0, -2.0]), 2), torch.tensor([2.0, -4.0])), ((torch.zeros(13), 3), torch.zeros(13))]
    return check_function(function, cases, "k times.", lambda got, a, k: "that is a" if got.equal(a) else "")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, k: k * a, "Right: k times."),
        (lambda a, k: k * a * (1 + 1e-5), "Right: k times."),
        (None, "No answer yet: write the function, and give it to the checker."),
        (lambda a, k: a, "Not yet: that is a. It gives [1, -2], not [2, -4], for [1, -2], 2."),
        (lambda a, k: k * a + 1e-2, "Not yet. It gives [2.01, -3.99], not [2, -4], for [1, -2], 2."),
        (lambda a, k: a[0], "Not yet. It gives 1, not [2, -4], for [1, -2], 2."),
        (lambda a, k: print(a), "Not yet: the function returns nothing. It gives None, not [2, -4], for [1, -2], 2."),
        (lambda a, k: a.zero_(), "Not yet. It gives [0, 0], not [2, -4], for [1, -2], 2."),
        (
            lambda a, k: a / 0 if k == 2 else a,
            "Not yet: it gives inf. It gives [inf, -inf], not [2, -4], for [1, -2], 2.",
        ),
        (lambda a: a, "Not yet: for [1, -2], 2 it raises TypeError: "),
        (lambda a, k: sys.exit("done"), "Not yet: for [1, -2], 2 it raises SystemExit: done"),
        (lambda a, k: k * a + 0j * a if k == 3 else k * a, "Not yet. It gives complex numbers, not real ones, for a t"),
        (lambda a, k: (k * a).numpy(), "Right: k times."),
        (lambda a, k: (k * a).bfloat16().requires_grad_(), "Right: k times."),
        (lambda a, k: a.numpy().astype(float), "Not yet: that is a. It gives [1, -2], not [2, -4], for [1, -2], 2."),
        (lambda a, k: (k * a).tolist(), "Not yet. It gives the list [2, -4], not a Tensor, for [1, -2], 2."),
        (lambda a, k: a.new_full((20,), torch.nan), "Not yet: it gives nan. It gives a tensor (20,), not [2, -4], for"),
        (lambda a, k: np.array(["2", "-4"]), "Not yet. It gives array(['2', '-4'], "),
        (lambda a, k: (k * a).tolist()[:1], "Not yet. It gives [2], not [2, -4], for [1, -2], 2."),
        (
            lambda a, k: k * a if k < 3 else a - 1,
            "Not yet. The form, a tensor (13,), is right, but the numbers are off by up to 1, for a tensor (13,), 3.",
        ),
    ],
)
def test_functions(function, message):
    verdict = doubled(function)
    assert repr(verdict).startswith(message)
    assert bool(verdict) is message.startswith("Right")


@pytest.mark.parametrize(
    ("got", "expected", "right"),
    [
        ([(0, 2, "a")], [(0, 2, "a")], True),
        ([[0, 2, "a"]], [(0, 2, "a")], False),
        ([(0, 2, "a")], [(0, 2, "b")], False),
        ({"a": 1.0, "b": [2.00001]}, {"a": 1.0, "b": [2.0]}, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        (defaultdict(float, a=1.0), {"a": 1.0}, True),
        (2, 2.0, True),
        (2.0, 2, True),
        (float("nan"), 2.0, False),
        ("two", 2.0, False),
        (np.float32(2), 2.0, True),
        (torch.tensor(2, dtype=torch.bfloat16), 2.0, True),
        (Fraction(2), 2.0, True),
        (np.int64(2), 2, True),
        (2**60, 2**60 + 1, False),
        (2.0 + 0j, 2.0, False),
        (np.array([2.0]), 2.0, False),
        ([np.int64(1), torch.tensor(2)], [1, 2], True),
        ({"a": np.ones(2)}, {"a": torch.ones(2)}, True),
        (pd.Series([1.0, 2.0]), torch.tensor([1.0, 2.0]), True),
        (np.array([20_000, 1]), torch.tensor([20_001, 1]), False),
        (torch.tensor([20_000.5, 1]), torch.tensor([20_001, 1]), False),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([4], dtype=torch.uint8), False),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), False),
        (np.zeros((0, 3)), torch.zeros(0, 3), True),
        ([*range(13), 1], [*range(13), 2], False),
        ([*range(13)], [*range(14)], False),
    ],
)
def test_results_of_functions(got, expected, right):
    assert bool(check_function(lambda: got, [((), expected)], "so it is.")) is right


class Hostile:
    """What a learner may return by accident, at its worst."""

    def fail(self, *arguments):
        raise RuntimeError

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __getitem__ = __getattr__ = fail
    __float__ = __repr__ = __str__ = __abs__ = __sub__ = __rsub__ = __array__ = fail


class Agreeable:
    shape = (2,)

    def __eq__(self, other):
        return np.ones(3, bool)

    __hash__ = None


CYCLE = []
CYCLE.append(CYCLE)
ODD = [10**5000, -(10**400), CYCLE, Hostile(), Agreeable(), Hostile, iter([1]), ..., np.longdouble(1), pd.NA]
ODD += [pd.Series([1, 2]), pd.Timestamp(0), pd.DataFrame({"a": ["b"]}), torch.eye(2).to_sparse()]
LEAVES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    st.integers(0, len(ODD) - 1).map(lambda place: ODD[place]),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)),
    st.tuples(
        st.sampled_from([torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint16, torch.int8]),
        st.sampled_from([(), (0,), (2,), (2, 2), (13,)]),
        st.sampled_from(["cpu", "meta"]),
    ).map(lambda drawn: torch.zeros(drawn[1], dtype=drawn[0], device=drawn[2])),
)
RESULTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=1) | st.integers(), inner, max_size=2)
    ),
    max_leaves=5,
)
EXPECTED = [
    2,
    2.0,
    torch.tensor([1.0, 2.0]),
    torch.tensor([1, 2]),
    [1, 2],
    (1.0, "a"),
    {"a": torch.ones(2), "b": [0.5]},
]


@given(RESULTS, st.sampled_from(EXPECTED))
def test_no_result_makes_a_checker_raise(result, expected):
    hints = []
    verdict = check_function(lambda: result, [((), expected)], "so it is.", lambda got: hints.append(got) or got[0])
    assert verdict.message.startswith(("Right", "Not yet"))
    assert not (verdict and hints)
    assert check(result).message.startswith(("Right", "No answer", "Not yet", "A bare number"))


@pytest.mark.parametrize(
    "result", [float("nan"), [float("nan")] * 20, torch.tensor([1, torch.nan] * 9), np.array(np.nan)]
)
@pytest.mark.parametrize("expected", EXPECTED)
def test_nan_is_said_as_such(result, expected):
    verdict = check_function(lambda: result, [((), expected)], "so it is.", lambda got: "something else")
    assert not verdict
    assert "it gives nan" in verdict.message


@pytest.mark.parametrize("answer", [float("nan"), "nan", np.float32("nan"), torch.tensor(torch.nan), float("-inf")])
def test_no_number_is_no_prediction(answer):
    assert f"it gives {float(answer)}, " in check(answer).message


def test_an_error_without_words():
    class MuteError(Exception):
        __str__ = Hostile.fail

    def function():
        raise MuteError

    assert "raises MuteError" in check_function(function, [((), 1)], "so it is.").message
