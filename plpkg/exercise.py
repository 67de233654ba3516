"""Exercises that answer back: a verdict with a hint, never a bare assertion."""

import copy
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from numbers import Number


@dataclass(frozen=True)
class Verdict:
    """What a checker says of an answer; true if it is right."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        return f"<p>{'✔' if self.right else '✎'} {escape(self.message)}</p>"


SCALES = (1e9, 1e6, 1e3, 100, 8, 1.024, 1 / 1.024, 1 / 8, 1e-2, 1e-3, 1e-6, 1e-9)
"""How far a right answer in another unit is off: prefixes, per cent, bits and bytes, 1024 for 1000."""


def check_number(
    answer: object, expected: float, unit: str, tolerance: float, explanation: str, hints: dict[float, str], hint: str
) -> Verdict:
    """Judge a number.

    Parameters
    ----------
    answer
        The learner's; ``None`` means not answered yet.
    expected, unit
        The right value, and what it is measured in.
    tolerance
        How far off, relatively, still counts.
    explanation
        Said when it is right.
    hints
        What a known wrong value reveals, by that value.
    hint
        Said of any other wrong value.
    """
    if answer is None:
        return Verdict(False, "No answer yet: replace None by your prediction and run the cell again.")
    value = _or_none(_plain, answer)
    value = None if isinstance(value, bool) else _or_none(float, value)
    if value is None:
        return Verdict(False, f"A bare number of {unit} is wanted here, got {_brief(answer)}.")
    if not math.isfinite(value):
        return Verdict(False, f"Not yet: it gives {value:g}, which is no number of {unit}. {hint}")
    if math.isclose(value, expected, rel_tol=tolerance):
        return Verdict(True, f"Right: {explanation}")
    for wrong, reason in sorted(hints.items(), key=lambda each: abs(each[0] - value)):  # the nearest first
        if math.isclose(value, wrong, rel_tol=tolerance):
            return Verdict(False, f"Not yet: {reason}")
    if any(math.isclose(value, expected * scale, rel_tol=min(tolerance, 0.01)) for scale in SCALES):
        return Verdict(False, f"Not yet: the right digits in another unit; {unit} is wanted (prefixes are decimal).")
    size = "too large" if value > expected else "too small"
    return Verdict(False, f"Not yet, {value:g} is {size}. {hint}")


def check_function(
    function: object,
    cases: Iterable[tuple[tuple, object]],
    explanation: str,
    hint: Callable[..., str] = lambda got, *arguments: "",
    tolerance: float = 1e-4,
) -> Verdict:
    """Judge a function that the learner has written, by what it returns.

    Parameters
    ----------
    function
        The learner's; ``None`` means not written yet.
    cases
        Arguments, and what the package returns for them: numbers, tensors, or lists, tuples and dicts of these.
    explanation
        Said when it is right.
    hint
        ``hint(got, *arguments)`` says of a wrong result what a known mistake reveals, or nothing. It is asked whatever
        the length and form of the result, with arrays as tensors and scalars as numbers; where it raises, it has
        nothing to say.
    tolerance
        How far off numbers may be, over the largest number of the result; whole numbers have to be equal.
    """
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    for arguments, expected in cases:
        said = f"for {', '.join(map(_brief, arguments))}"
        try:
            returned = function(*copy.deepcopy(arguments))
        except (Exception, SystemExit) as error:
            return Verdict(False, f"Not yet: {said} it raises {type(error).__name__}: {_or_none(str, error) or ''}")
        got, expected = _or_none(_plain, returned), _plain(expected)
        if _or_none(_alike, got, expected, tolerance):
            continue
        reason = "the function returns nothing" if returned is None else _reason(got, expected, hint, arguments)
        wrong = _or_none(_difference, got, expected, tolerance) if got is not None else None
        wrong = wrong or f"It gives {_brief(returned)}, not {_brief(expected)}"
        return Verdict(False, f"Not yet{reason and f': {reason}'}. {wrong}, {said}.")
    return Verdict(True, f"Right: {explanation}")


def _or_none(function: Callable, *arguments: object) -> object:
    """What a call gives, or ``None`` if it raises: a learner's object may raise wherever it is touched."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _plain(value: object) -> object:
    """The same with arrays as tensors on the CPU, and their scalars as Python's numbers."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):  # a defaultdict or an OrderedDict is one
        return {key: _plain(each) for key, each in value.items()}
    if not hasattr(value, "shape"):
        return value
    if tuple(value.shape) == ():
        return value.item()
    import numpy as np
    import torch

    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
    return tensor.detach().cpu().to_dense().as_subclass(torch.Tensor)


def _alike(got: object, expected: object, tolerance: float) -> bool:
    """Whether two plain values agree; ``expected`` says how they are compared, never an object of the learner's."""
    if isinstance(expected, int | float):
        if type(got) is int and isinstance(expected, int):
            return got == expected  # a float could not tell large ones apart
        number = float(got) if isinstance(got, Number) else math.nan
        return math.isclose(number, expected, rel_tol=0 if isinstance(expected, int) else tolerance, abs_tol=1e-12)
    if type(got) is not type(expected):
        return False
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_alike(got[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(
            _alike(one, other, tolerance) for one, other in zip(got, expected, strict=True)
        )
    return _close(got, expected, tolerance) if hasattr(expected, "shape") else bool(got == expected)


def _whole(tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _close(got, expected, tolerance: float) -> bool:
    """Whether two tensors agree, whatever their number formats."""
    import torch

    if got.shape != expected.shape or (got.is_complex() and not expected.is_complex()):
        return False
    if _whole(got) and _whole(expected):
        return torch.equal(got.long(), expected.long())
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got, expected, exact = got.to(wide), expected.to(wide), _whole(expected)
    largest = max([1e-30, *expected.abs().nan_to_num(posinf=0).flatten().tolist()])
    return bool(torch.isclose(got, expected, rtol=0, atol=0 if exact else tolerance * largest).all())


def _reason(got: object, expected: object, hint: Callable[..., str], arguments: tuple) -> str:
    """Why a result is wrong, where that is known."""
    odd = _or_none(_not_finite, got)
    if odd and odd != _not_finite(expected):
        return f"it gives {odd}"
    if hasattr(expected, "shape") and type(got) is type(expected) and _whole(got) == _whole(expected):
        got = _or_none(got.to, expected.dtype)  # as a hint compares it, and float64 is no mistake
    reason = _or_none(hint, got, *arguments)
    return reason if isinstance(reason, str) else ""


def _not_finite(value: object) -> str:
    """``nan`` or ``inf`` where a value has any."""
    if isinstance(value, list | tuple | dict):
        return next(filter(None, map(_not_finite, value.values() if isinstance(value, dict) else value)), "")
    if hasattr(value, "shape"):
        return "nan" if value.isnan().any() else "inf" if value.isinf().any() else ""
    return "" if not isinstance(value, float) or math.isfinite(value) else "nan" if math.isnan(value) else "inf"


def _difference(got: object, expected: object, tolerance: float) -> str:
    """What two plain values show of their difference."""
    shown, right = _brief(got), _brief(expected)
    if shown != right:
        return f"It gives {shown}, not {right}"
    if type(got) is not type(expected):
        return f"It gives the {type(got).__name__} {shown}, not a {type(expected).__name__}"
    if hasattr(expected, "shape"):
        if got.is_complex() and not expected.is_complex():
            return "It gives complex numbers, not real ones"
        off = float((got.double() - expected.double()).abs().max())
        return f"The form, {shown}, is right, but the numbers are off by up to {off:.2g}"
    if not isinstance(expected, list | tuple | dict):
        return f"It gives {got!r}, not {expected!r}"
    if len(got) != len(expected):
        return f"It gives {len(got)} entries, not {len(expected)}"
    places = expected if isinstance(expected, dict) else range(len(expected))
    place = next(place for place in places if not _alike(got[place], expected[place], tolerance))
    return f"{_difference(got[place], expected[place], tolerance)} at place {place!r}"


class _Brief(reprlib.Repr):
    """Values as a sentence shows them: numbers with six digits, and at most twelve of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 12
        self.maxlevel, self.maxstring, self.maxother, self.fillvalue = 4, 200, 200, "…"

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"

    def repr_Tensor(self, tensor, level: int) -> str:  # noqa: N802 - found by the name of the type
        few = math.prod(tensor.shape) <= 12
        return self.repr1(tensor.flatten().tolist(), level) if few else f"a tensor {tuple(tensor.shape)}"


def _brief(value: object) -> str:
    plain = _or_none(_plain, value)
    return _or_none(_Brief().repr, value if plain is None else plain) or f"an object of type {type(value).__name__}"
