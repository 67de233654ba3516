"""Exercises that answer back: a verdict with a hint, never a bare assertion.

An answer, or what a learner's function returns, can be any object. Three steps compare it: ``plain_value`` turns arrays
into tensors, ``alike`` says whether it is right, and ``describe_difference`` puts into words how it is wrong. A
learner's object may raise wherever it is touched, so they are called through ``or_none``.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from plpkg.show.comparing import alike, is_whole, or_none, plain_value
from plpkg.show.differences import RESHAPED, brief, describe_difference, listed, not_finite, right_otherwise


@dataclass(frozen=True)
class Verdict:
    """A checker's answer to the learner; true if the learner is right."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        sign = "✔" if self.right else "✎"
        return f"<p>{sign} {escape(self.message)}</p>"


PREFIXES = (1e9, 1e6, 1e3, 1e-3, 1e-6, 1e-9)
SIZES = (*PREFIXES, 8, 1 / 8, 1.024, 1 / 1.024)
SCALES = {
    "per cent": (100, 1e-2),
    **dict.fromkeys(("s", "ms", "µs"), PREFIXES),
    **dict.fromkeys(("bit", "kbit", "Mbit", "Gbit", "B", "kB", "MB", "GB"), SIZES),
}
"""By unit, the factors by which a right answer in another unit is off. A unit that is missing here is a count."""


def check_number(
    answer: object, expected: float, unit: str, tolerance: float, explanation: str, hints: dict[float, str], hint: str
) -> Verdict:
    """Judge a number.

    Parameters
    ----------
    answer
        The learner's answer; ``None`` means not answered yet.
    expected, unit
        The right value and its unit. Only for a unit of ``SCALES`` is an answer in another unit recognised.
    tolerance
        The largest relative error that still counts as right.
    explanation
        The message for a right answer.
    hints
        For each known wrong value, the mistake behind it.
    hint
        The message for any other wrong value.
    """
    if answer is None:
        return Verdict(False, "No answer yet: replace None by your prediction and run the cell again.")
    value = _number(answer)
    if value is None:
        return _no_number(answer, unit)
    if not math.isfinite(value):
        return Verdict(False, f"Not yet: it gives {value:g}, which is no number of {unit}. {hint}")
    if math.isclose(value, expected, rel_tol=tolerance):
        return Verdict(True, f"Right: {explanation}")
    nearest_first = sorted(hints, key=lambda wrong: abs(wrong - value))
    for wrong in nearest_first:
        if math.isclose(value, wrong, rel_tol=tolerance):
            return Verdict(False, f"Not yet: {hints[wrong]}")
    for scale in SCALES.get(unit, ()):
        if math.isclose(value, expected * scale, rel_tol=min(tolerance, 0.01)):
            said = f"the right digits in another unit; {unit} is wanted (prefixes are decimal)."
            return Verdict(False, f"Not yet: {said}")
    size = "too large" if value > expected else "too small"
    return Verdict(False, f"Not yet, {value:g} is {size}. {hint}")


def compare(prediction: object, value: float, unit: str) -> Verdict:
    """Say how far a reader's prediction is from what was computed.

    Parameters
    ----------
    prediction
        The reader's number; ``None`` means that there is none yet.
    value, unit
        The computed number and its unit.

    Returns
    -------
    Verdict
        Right if the prediction is off by a tenth of the value at most.

    Examples
    --------
    >>> compare(40, 20.5, "kB")
    You said 40 kB; it is 20.5 kB: 2 times too much.
    """

    def shown(number: float) -> str:
        return f"{_digits(number)} {unit}".strip()

    value = float(value)
    if prediction is None:
        return Verdict(False, f"It is {shown(value)}. (No prediction yet: put one where None stands, and run again.)")
    said = _number(prediction)
    if said is None or not math.isfinite(said):
        return _no_number(prediction, unit)
    sentence = f"You said {shown(said)}; it is {shown(value)}"
    if abs(said - value) <= (0.1 + 1e-9) * abs(value):  # 1e-9: 1.1 is within a tenth of 1, whatever floats make of it
        precision = "" if shown(said) == shown(value) else " within a tenth"
        return Verdict(True, f"{sentence}: right{precision}.")
    size = "too much" if said > value else "too little"
    if said > 0 and value > 0:
        size = f"{_digits(max(said / value, value / said), 2)} times {size}"
    return Verdict(False, f"{sentence}: {size}.")


def check_function(
    function: object,
    cases: Iterable[tuple[tuple[Any, ...], object]],
    explanation: str,
    hint: Callable[..., str] = lambda got, *arguments: "",
    tolerance: float = 1e-4,
) -> Verdict:
    """Judge a function that the learner has written, by its results.

    Parameters
    ----------
    function
        The learner's function; ``None`` means not written yet.
    cases
        Pairs of arguments and the right result: numbers, tensors, or lists, tuples and dicts of these.
    explanation
        The message for a right function.
    hint
        ``hint(got, *arguments)`` returns the known mistake behind a wrong result, or "". It is called with results of
        any type and shape, arrays being tensors and scalars numbers; if it raises, there is no hint. It is not called
        for a tensor whose shape alone is wrong.
    tolerance
        The largest error of a number, over the largest number of the result; whole numbers have to be equal.
    """
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    for arguments, expected in cases:
        try:
            returned = function(*copy.deepcopy(arguments))  # a copy, as the function may write into its arguments
        except (Exception, SystemExit) as error:
            text = or_none(str, error) or ""
            return Verdict(False, f"Not yet: for {listed(arguments)} it raises {type(error).__name__}: {text}")
        got = or_none(plain_value, returned)
        right = plain_value(expected)
        if not or_none(alike, got, right, tolerance):
            return Verdict(False, _correction(returned, got, right, hint, arguments, tolerance))
    return Verdict(True, f"Right: {explanation}")


def _correction(
    returned: object, got: object, expected: object, hint: Callable[..., str], arguments: tuple, tolerance: float
) -> str:
    """The message about a wrong result: its mistake if that is known, how it differs, and for which arguments.

    ``got`` is ``returned`` as a plain value, or ``None`` if it cannot be one.
    """
    if returned is None:
        mistake = "the function returns nothing"
    else:
        mistake = _mistake(got, expected, hint, arguments, tolerance)
    numbers = 3 if mistake else 6  # beside a mistake, the numbers of a long tensor say little
    difference = None
    if got is not None:
        difference = or_none(describe_difference, got, expected, tolerance, numbers)
    if not difference:
        difference = f"It gives {brief(returned, numbers)}, not {brief(expected, numbers)}"
    opening = f"Not yet: {mistake}" if mistake else "Not yet"
    return f"{opening}. {difference}, for {listed(arguments, numbers)}."


def _number(answer: object) -> float | None:
    """The number that a reader has written; ``None`` if it is none."""
    value = or_none(plain_value, answer)
    if isinstance(value, bool):
        return None
    return or_none(float, value)


def _no_number(answer: object, unit: str) -> Verdict:
    wanted = f"A bare number of {unit}" if unit else "A bare number"
    return Verdict(False, f"{wanted} is wanted here, got {brief(answer)}.")


def _digits(value: float, digits: int = 3) -> str:
    """A number rounded to ``digits`` significant digits; whole numbers up to a million keep all of theirs."""

    def whole(number: float) -> bool:
        return number.is_integer() and abs(number) <= 1e6

    if not whole(value):
        value = float(f"{value:.{digits}g}")
    return f"{value:,.0f}" if whole(value) else f"{value:.{digits}g}"


def _mistake(got: Any, expected: Any, hint: Callable[..., str], arguments: tuple, tolerance: float) -> str:
    """The mistake behind a wrong result: NaN or infinity, or what ``hint`` says; "" if it is unknown."""
    if or_none(right_otherwise, got, expected, tolerance) == RESHAPED:
        return ""  # the message says so, and no hint knows better
    odd = or_none(not_finite, got)
    if odd and odd != not_finite(expected):
        return f"it gives {odd}"
    both_tensors = hasattr(expected, "shape") and type(got) is type(expected)
    if both_tensors and is_whole(got) == is_whole(expected):
        # Hints compare with tensors of the expected format; a result in float64 is no mistake.
        got = or_none(got.to, expected.dtype)
    said = or_none(hint, got, *arguments)
    return said if isinstance(said, str) else ""
