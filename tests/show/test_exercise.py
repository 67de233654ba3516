import math
import sys
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from plpkg.show.exercise import check_function, check_number, compare


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
        (10_000, False, "Not yet, 10000 is too large. Count fingers."),
        (0.1, False, "Not yet, 0.1 is too small. Count fingers."),
        (1.25, False, "Not yet, 1.25 is too small. Count fingers."),
    ],
)
def test_verdicts(answer, right, message):
    verdict = check(answer)
    assert bool(verdict) is right
    assert repr(verdict) == message


def test_html_is_escaped():
    assert "&lt;b&gt;" in check("<b>")._repr_html_()


@pytest.mark.parametrize(
    ("answer", "unit", "other"),
    [
        (10_000, "ms", True),
        (0.01, "s", True),
        (0.1, "per cent", True),
        (1.25, "kB", True),
        (80, "GB", True),
        (10.24, "Mbit", True),
        (80, "ms", False),
        (80, "per cent", False),
        (1000, "rank", False),
        (80, "tokens", False),
        (0.1, "round trips", False),
    ],
)
def test_only_a_quantity_has_another_unit(answer, unit, other):
    message = check_number(answer, 10, unit, 0.01, "ten.", {}, "Count.").message
    assert message.startswith(f"Not yet: the right digits in another unit; {unit} is wanted" if other else "Not yet, ")


@pytest.mark.parametrize(
    ("prediction", "value", "unit", "message"),
    [
        (None, 20.5, "kB", "It is 20.5 kB. (No prediction yet: put one where None stands, and run again.)"),
        (40, 20.5, "kB", "You said 40 kB; it is 20.5 kB: 2 times too much."),
        (20, 20.5, "kB", "You said 20 kB; it is 20.5 kB: right within a tenth."),
        ("20", 20.5, "kB", "You said 20 kB; it is 20.5 kB: right within a tenth."),
        (1.1, 1, "s", "You said 1.1 s; it is 1 s: right within a tenth."),
        (1.12, 1, "s", "You said 1.12 s; it is 1 s: 1.1 times too much."),
        (0.9, 1, "s", "You said 0.9 s; it is 1 s: right within a tenth."),
        (0.89, 1, "s", "You said 0.89 s; it is 1 s: 1.1 times too little."),
        (3, 1000.0, "notes", "You said 3 notes; it is 1,000 notes: 330 times too little."),
        (10**6, 123_456, "bytes", "You said 1,000,000 bytes; it is 123,456 bytes: 8.1 times too much."),
        (1, 6_738_415_616, "weights", "You said 1 weights; it is 6.74e+09 weights: 6.7e+09 times too little."),
        (1234.5, 1234.5, "", "You said 1,230; it is 1,230: right."),
        (0, 0, "nats", "You said 0 nats; it is 0 nats: right."),
        (1e-9, 0, "nats", "You said 1e-09 nats; it is 0 nats: too much."),
        (0, 2, "nats", "You said 0 nats; it is 2 nats: too little."),
        (-2.1, -2, "nats", "You said -2.1 nats; it is -2 nats: right within a tenth."),
        (-4, 2, "nats", "You said -4 nats; it is 2 nats: too little."),
        (torch.tensor(2.0), np.float32(2.0), "s", "You said 2 s; it is 2 s: right."),
        (True, 1, "s", "A bare number of s is wanted here, got True."),
        ("40 kB", 20.5, "kB", "A bare number of kB is wanted here, got '40 kB'."),
        (math.nan, 20.5, "kB", "A bare number of kB is wanted here, got nan."),
        (-math.inf, 20.5, "", "A bare number is wanted here, got -inf."),
        ([20.5], 20.5, "kB", "A bare number of kB is wanted here, got [20.5]."),
    ],
)
def test_a_prediction_is_compared(prediction, value, unit, message):
    verdict = compare(prediction, value, unit)
    assert repr(verdict) == message
    assert bool(verdict) is (": right" in message)


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
        (lambda a, k: a[0], "Not yet. It gives a number, not a tensor of shape (2,), for [1, -2], 2."),
        (lambda a, k: print(a), "Not yet: the function returns nothing. It gives None, not [2, -4], for [1, -2], 2."),
        (lambda a, k: a.zero_(), "Not yet. It gives [0, 0], not [2, -4], for [1, -2], 2."),
        (
            lambda a, k: a / 0 if k == 2 else a,
            "Not yet: it gives inf. It gives [inf, -inf], not [2, -4], for [1, -2], 2.",
        ),
        (lambda a: a, "Not yet: for [1, -2], 2 it raises TypeError: "),
        (lambda a, k: sys.exit("done"), "Not yet: for [1, -2], 2 it raises SystemExit: done"),
        (lambda a, k: k * a + 0j * a, "Not yet. It gives complex numbers, not real ones, for [1, -2], 2."),
        (lambda a, k: (k * a).numpy(), "Right: k times."),
        (lambda a, k: (k * a).bfloat16().requires_grad_(), "Right: k times."),
        (lambda a, k: a.numpy().astype(float), "Not yet: that is a. It gives [1, -2], not [2, -4], for [1, -2], 2."),
        (
            lambda a, k: (k * a).tolist(),
            "Not yet. It gives a list, not a tensor of shape (2,); its numbers are right, for",
        ),
        (
            lambda a, k: a.new_full((20,), torch.nan),
            "Not yet: it gives nan. It gives a tensor of shape (20,), not (2,), for",
        ),
        (lambda a, k: np.array(["2", "-4"]), "Not yet. It gives array(['2', '-4'], "),
        (lambda a, k: (k * a).tolist()[:1], "Not yet. It gives a list, not a tensor of shape (2,), for [1, -2], 2."),
        (
            lambda a, k: k * a if k < 3 else a - 1,
            "Not yet. 13 of 13 numbers are wrong, by up to 1, for a tensor of shape (13,), 3.",
        ),
        (
            lambda a, k: a if k == 3 else k * a.repeat(10),
            "Not yet. It gives a tensor of shape (20,), not (2,), for [1, -2], 2.",
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


SMALL, LARGE = torch.arange(6.0).reshape(2, 3), torch.arange(60.0).reshape(3, 4, 5)


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (SMALL[0][:, None], SMALL[0], "a tensor of shape (3, 1), not (3,); its numbers are right"),
        (SMALL[:1], SMALL[0], "a tensor of shape (1, 3), not (3,); its numbers are right"),
        (SMALL.flatten(), SMALL, "a tensor of shape (6,), not (2, 3); its numbers are right"),
        (SMALL.reshape(3, 2), SMALL, "a tensor of shape (3, 2), not (2, 3); its numbers are right"),
        (SMALL.T, SMALL, "a tensor of shape (3, 2), not (2, 3); with its axes in another order it is right"),
        (SMALL.T + 1, SMALL, "a tensor of shape (3, 2), not (2, 3), for"),
        (
            SMALL[:, 1:].T,
            SMALL[:, 1:],
            "[[1, 4], [2, 5]], not [[1, 2], [4, 5]]; with its axes in another order it is r",
        ),
        (LARGE.flatten(), LARGE, "a tensor of shape (60,), not (3, 4, 5); its numbers are right"),
        (LARGE.mT, LARGE, "a tensor of shape (3, 5, 4), not (3, 4, 5); with its axes in another order it is right"),
        (LARGE.permute(2, 0, 1), LARGE, "a tensor of shape (5, 3, 4), not (3, 4, 5); with its axes in another order"),
        (LARGE[:, :3].transpose(0, 1), LARGE[:, :3], "30 of 45 numbers are wrong, by up to 30; with its axes in anot"),
        (LARGE[:2], LARGE, "a tensor of shape (2, 4, 5), not (3, 4, 5), for"),
        (LARGE.tolist(), LARGE, "a list, not a tensor of shape (3, 4, 5); its numbers are right"),
        (torch.zeros(0), torch.zeros(0, 3), "a tensor of shape (0,), not (0, 3); its numbers are right"),
        (torch.tensor([2.0]), 2.0, "a tensor of shape (1,), not a number; its numbers are right"),
        (np.array([[2]]), 2, "a tensor of shape (1, 1), not a number; its numbers are right"),
        (torch.tensor([3.0]), 2.0, "a tensor of shape (1,), not a number, for"),
        (2.0, torch.tensor([2.0]), "a number, not a tensor of shape (1,); its numbers are right"),
        (np.array([1, 2]), [1, 2], "a tensor of shape (2,), not a list; its numbers are right"),
        (
            (SMALL, SMALL.T),
            (SMALL, SMALL),
            "(3, 2), not (2, 3); with its axes in another order it is right, at place 1",
        ),
        ([[SMALL[:, None]]], [[SMALL]], "(2, 1, 3), not (2, 3); its numbers are right, at place 0, at place 0"),
        ({"a": LARGE[None]}, {"a": LARGE}, "(1, 3, 4, 5), not (3, 4, 5); its numbers are right, at place 'a'"),
        ([SMALL, LARGE], [LARGE, SMALL], "a tensor of shape (2, 3), not (3, 4, 5), at place 0"),
        ({"a": SMALL}, {"b": SMALL}, "It gives {'a': [[0, 1, 2], [3, 4, 5]]}, not {'b': [[0, 1, 2], [3, 4, 5]]}"),
        (
            [SMALL],
            [SMALL, SMALL],
            "It gives [[[0, 1, 2], [3, 4, 5]]], not [[[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, ",
        ),
        (torch.arange(8) + (torch.arange(8) == 3), torch.arange(8), "1 of 8 numbers is wrong, for"),
    ],
)
def test_shapes_come_before_numbers(got, expected, message):
    verdict = check_function(lambda a: got, [((0,), expected)], "so it is.")
    assert not verdict
    assert message in verdict.message


def test_a_wrong_shape_of_right_numbers_gets_no_hint():
    said = check_function(lambda: [2.0], [((), torch.tensor([2.0]))], "so it is.", lambda got: "divide by two").message
    assert "divide by two" not in said
    said = check_function(lambda: [2.0], [((), torch.tensor([1.0]))], "so it is.", lambda got: "divide by two").message
    assert "divide by two" in said


def test_numbers_are_few_beside_a_hint():
    cases = [((torch.arange(5.0),), torch.arange(5.0))]
    assert check_function(torch.neg, cases, "so it is.").message == (
        "Not yet. It gives [-0, -1, -2, -3, -4], not [0, 1, 2, 3, 4], for [0, 1, 2, 3, 4]."
    )
    assert check_function(torch.neg, cases, "so it is.", lambda got, a: "the sign").message == (
        "Not yet: the sign. 4 of 5 numbers are wrong, by up to 8, for a tensor of shape (5,)."
    )


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
    assert compare(result, 2.5, "kB").message.startswith(("You said", "It is", "A bare number"))


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
