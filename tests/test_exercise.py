import pytest
import torch

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
        (lambda a, k: a[0], "Not yet. It gives a tensor (), not [2, -4], for [1, -2], 2."),
        (lambda a, k: print(a), "Not yet. It gives None, not [2, -4], for [1, -2], 2."),
        (lambda a, k: a.zero_(), "Not yet. It gives [0, 0], not [2, -4], for [1, -2], 2."),
        (lambda a, k: a / 0 if k == 2 else a, "Not yet. It gives [inf, -inf], not [2, -4], for [1, -2], 2."),
        (lambda a: a, "Not yet: for [1, -2], 2 it raises TypeError: "),
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
        (2, 2.0, True),
        (2.0, 2, True),
        (float("nan"), 2.0, False),
        ("two", 2.0, False),
    ],
)
def test_results_of_functions(got, expected, right):
    assert bool(check_function(lambda: got, [((), expected)], "so it is.")) is right
