"""Exercises that answer back: a verdict with a hint, never a bare assertion.

An answer, or what a learner's function returns, can be any object. Three steps compare it: ``_plain`` turns arrays
into tensors, ``_alike`` says whether it is right, and ``_difference`` puts into words how it is wrong. A
learner's object may raise wherever it is touched, so they are called through ``_or_none``.
"""

import copy
import itertools
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from numbers import Number


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
    cases: Iterable[tuple[tuple, object]],
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
            text = _or_none(str, error) or ""
            return Verdict(False, f"Not yet: for {_listed(arguments)} it raises {type(error).__name__}: {text}")
        got = _or_none(_plain, returned)
        right = _plain(expected)
        if not _or_none(_alike, got, right, tolerance):
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
        difference = _or_none(_difference, got, expected, tolerance, numbers)
    if not difference:
        difference = f"It gives {_brief(returned, numbers)}, not {_brief(expected, numbers)}"
    opening = f"Not yet: {mistake}" if mistake else "Not yet"
    return f"{opening}. {difference}, for {_listed(arguments, numbers)}."


def _or_none(function: Callable, *arguments: object) -> object:
    """Call ``function``; ``None`` if it raises, as a learner's object may wherever it is touched."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _number(answer: object) -> float | None:
    """The number that a reader has written; ``None`` if it is none."""
    value = _or_none(_plain, answer)
    if isinstance(value, bool):
        return None
    return _or_none(float, value)


def _no_number(answer: object, unit: str) -> Verdict:
    wanted = f"A bare number of {unit}" if unit else "A bare number"
    return Verdict(False, f"{wanted} is wanted here, got {_brief(answer)}.")


def _digits(value: float, digits: int = 3) -> str:
    """A number rounded to ``digits`` significant digits; whole numbers up to a million keep all of theirs."""

    def whole(number: float) -> bool:
        return number.is_integer() and abs(number) <= 1e6

    if not whole(value):
        value = float(f"{value:.{digits}g}")
    return f"{value:,.0f}" if whole(value) else f"{value:.{digits}g}"


def _plain(value: object) -> object:
    """The value with its arrays as tensors on the CPU, and its scalar arrays as Python's numbers."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):  # a defaultdict or an OrderedDict is one
        return {key: _plain(each) for key, each in value.items()}
    if not hasattr(value, "shape"):
        return value
    if tuple(value.shape) == ():
        return value.item()
    import torch

    return _as_tensor(value).detach().cpu().to_dense().as_subclass(torch.Tensor)


def _alike(got: object, expected: object, tolerance: float) -> bool:
    """Whether two plain values agree; the type of ``expected`` decides how, so no method of the learner's does."""
    if isinstance(expected, int | float):
        return _alike_number(got, expected, tolerance)
    if type(got) is not type(expected):
        return False
    if isinstance(expected, dict):
        if got.keys() != expected.keys():
            return False
        return all(_alike(got[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return False
        return all(_alike(one, other, tolerance) for one, other in zip(got, expected, strict=True))
    if hasattr(expected, "shape"):
        return _close(got, expected, tolerance)
    return bool(got == expected)


def _alike_number(got: object, expected: int | float, tolerance: float) -> bool:
    if type(got) is int and isinstance(expected, int):
        return got == expected  # as floats, 2**60 and 2**60 + 1 would be equal
    if not isinstance(got, Number):
        return False
    relative = 0 if isinstance(expected, int) else tolerance
    return math.isclose(float(got), expected, rel_tol=relative, abs_tol=1e-12)


def _whole(tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _close(got, expected, tolerance: float) -> bool:
    """Whether two tensors agree, whatever their number formats."""
    if got.shape != expected.shape:
        return False
    if got.is_complex() and not expected.is_complex():
        return False
    return bool(_right_entries(got, expected, tolerance).all())


def _right_entries(got, expected, tolerance: float):
    """For two tensors of one shape, a tensor of booleans: which entries agree."""
    import torch

    if _whole(got) and _whole(expected):
        return got.long() == expected.long()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got = got.to(wide)
    if _whole(expected):
        return torch.isclose(got, expected.to(wide), rtol=0, atol=0)
    expected = expected.to(wide)
    sizes = expected.abs().nan_to_num(posinf=0).flatten().tolist()
    largest = max([1e-30, *sizes])
    return torch.isclose(got, expected, rtol=0, atol=tolerance * largest)


def _mistake(got: object, expected: object, hint: Callable[..., str], arguments: tuple, tolerance: float) -> str:
    """The mistake behind a wrong result: NaN or infinity, or what ``hint`` says; "" if it is unknown."""
    if _or_none(_still_right, got, expected, tolerance) == RESHAPED:
        return ""  # the message says so, and no hint knows better
    odd = _or_none(_not_finite, got)
    if odd and odd != _not_finite(expected):
        return f"it gives {odd}"
    both_tensors = hasattr(expected, "shape") and type(got) is type(expected)
    if both_tensors and _whole(got) == _whole(expected):
        # Hints compare with tensors of the expected format; a result in float64 is no mistake.
        got = _or_none(got.to, expected.dtype)
    said = _or_none(hint, got, *arguments)
    return said if isinstance(said, str) else ""


def _not_finite(value: object) -> str:
    """``nan`` or ``inf`` if the value is one or holds one, else ""."""
    if isinstance(value, list | tuple | dict):
        return next(filter(None, map(_not_finite, _entries(value))), "")
    if hasattr(value, "shape"):
        if value.isnan().any():
            return "nan"
        return "inf" if value.isinf().any() else ""
    if not isinstance(value, float) or math.isfinite(value):
        return ""
    return "nan" if math.isnan(value) else "inf"


def _entries(value: object) -> Iterable:
    """The entries of a list, a tuple or a dict; other values have none."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return ()


def _holds_tensors(value: object) -> bool:
    return hasattr(value, "shape") or any(map(_holds_tensors, _entries(value)))


def _form(value: object) -> str:
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Number):
        return "a number"
    return f"a {type(value).__name__}"


def _difference(got: object, expected: object, tolerance: float, numbers: int) -> str:
    """Say how two plain values differ: by their forms if these differ, else by their numbers."""
    if hasattr(got, "shape") or hasattr(expected, "shape"):
        return _tensor_difference(got, expected, tolerance, numbers)
    shown = _brief(got, numbers)
    right = _brief(expected, numbers)
    same_type = type(got) is type(expected)
    same_length = same_type and len(_entries(got)) == len(_entries(expected))
    # Of a list of tensors, the first tensor that differs says more than the whole list.
    entry_says_more = same_length and _holds_tensors(expected)
    if shown != right and not entry_says_more:
        return f"It gives {shown}, not {right}"
    if not same_type:
        return f"It gives the {type(got).__name__} {shown}, not a {type(expected).__name__}"
    if not isinstance(expected, list | tuple | dict):
        return f"It gives {got!r}, not {expected!r}"
    if not same_length:
        return f"It gives {len(got)} entries, not {len(expected)}"
    places = expected if isinstance(expected, dict) else range(len(expected))
    place = next(place for place in places if not _alike(got[place], expected[place], tolerance))
    return f"{_difference(got[place], expected[place], tolerance, numbers)}, at place {place!r}"


def _tensor_difference(got: object, expected: object, tolerance: float, numbers: int) -> str:
    """Say how two plain values differ, at least one of which is a tensor."""
    if _form(got) != _form(expected):
        both_tensors = hasattr(got, "shape") and hasattr(expected, "shape")
        wanted = tuple(expected.shape) if both_tensors else _form(expected)
        still_right = _or_none(_still_right, got, expected, tolerance) or ""
        return f"It gives {_form(got)}, not {wanted}{still_right}"
    if got.is_complex() and not expected.is_complex():
        return "It gives complex numbers, not real ones"
    shown = _brief(got, numbers)
    right = _brief(expected, numbers)
    said = f"It gives {shown}, not {right}"
    if shown == right:  # two long tensors are both shown by their shape
        said = _how_far(got, expected, tolerance)
    return said + _still_right(got, expected, tolerance)


def _how_far(got, expected, tolerance: float) -> str:
    """Say how many entries of a tensor of the right shape are wrong and, unless they are whole numbers, by how much."""
    right = _right_entries(got, expected, tolerance)
    wrong = int((~right).sum())
    verb = "is" if wrong == 1 else "are"
    said = f"{wrong} of {right.numel()} numbers {verb} wrong"
    if _whole(expected):
        return said
    largest_error = float((got.double() - expected.double()).abs().max())
    return f"{said}, by up to {largest_error:.2g}"


RESHAPED = "; its numbers are right"


def _still_right(got: object, expected: object, tolerance: float) -> str:
    """The end of a sentence about a wrong result: its numbers are right, or its axes are in another order; or ""."""
    if not (hasattr(got, "shape") or hasattr(expected, "shape")):
        return ""
    got = _as_tensor(got)
    expected = _as_tensor(expected)
    if _close(got.flatten(), expected.flatten(), tolerance):
        return RESHAPED
    if got.ndim != expected.ndim:
        return ""
    for axes in itertools.permutations(range(got.ndim)):
        if _close(got.permute(axes), expected, tolerance):
            return "; with its axes in another order it is right"
    return ""


def _as_tensor(value: object):
    """A number, a list or an array as a tensor; a tensor as it is."""
    import numpy as np
    import torch

    return value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))


class _Brief(reprlib.Repr):
    """Values as a sentence shows them: floats with six digits, the first twelve entries of a list, a tuple or a dict.

    A tensor of more than ``numbers`` entries is shown by its shape.
    """

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.maxlist = self.maxtuple = self.maxdict = 12
        self.maxlevel = 4
        self.maxstring = self.maxother = 200
        self.fillvalue = "…"

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"

    def repr_Tensor(self, tensor, level: int) -> str:  # noqa: N802 - found by the name of the type
        if math.prod(tensor.shape) > self.numbers:
            return _form(tensor)
        return self.repr1(tensor.tolist(), level)


def _brief(value: object, numbers: int = 6) -> str:
    plain = _or_none(_plain, value)
    if plain is None:
        plain = value
    shown = _or_none(_Brief(numbers).repr, plain)
    return shown or f"an object of type {type(value).__name__}"


def _listed(arguments: tuple, numbers: int = 6) -> str:
    return ", ".join(_brief(each, numbers) for each in arguments)
