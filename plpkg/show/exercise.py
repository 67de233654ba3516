"""Exercises that answer back: a verdict with a hint, never a bare assertion."""

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
    """What a checker says of an answer; true if it is right."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        return f"<p>{'✔' if self.right else '✎'} {escape(self.message)}</p>"


PREFIXES = (1e9, 1e6, 1e3, 1e-3, 1e-6, 1e-9)
SIZES = (*PREFIXES, 8, 1 / 8, 1.024, 1 / 1.024)
SCALES = {
    "per cent": (100, 1e-2),
    **dict.fromkeys(("s", "ms", "µs"), PREFIXES),
    **dict.fromkeys((prefix + size for prefix in ("", "k", "M", "G") for size in ("bit", "B")), SIZES),
}
"""How far a right answer in another unit is off, by unit: what is not among them is a count, which has no other."""


def check_number(
    answer: object, expected: float, unit: str, tolerance: float, explanation: str, hints: dict[float, str], hint: str
) -> Verdict:
    """Judge a number.

    Parameters
    ----------
    answer
        The learner's; ``None`` means not answered yet.
    expected, unit
        The right value, and what it is measured in. Only an answer in a unit of ``SCALES`` can be one in another unit.
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
    value = _number(answer)
    if value is None:
        return _no_number(answer, unit)
    if not math.isfinite(value):
        return Verdict(False, f"Not yet: it gives {value:g}, which is no number of {unit}. {hint}")
    if math.isclose(value, expected, rel_tol=tolerance):
        return Verdict(True, f"Right: {explanation}")
    for wrong, reason in sorted(hints.items(), key=lambda each: abs(each[0] - value)):  # the nearest first
        if math.isclose(value, wrong, rel_tol=tolerance):
            return Verdict(False, f"Not yet: {reason}")
    if any(math.isclose(value, expected * scale, rel_tol=min(tolerance, 0.01)) for scale in SCALES.get(unit, ())):
        return Verdict(False, f"Not yet: the right digits in another unit; {unit} is wanted (prefixes are decimal).")
    size = "too large" if value > expected else "too small"
    return Verdict(False, f"Not yet, {value:g} is {size}. {hint}")


def compare(prediction: object, value: float, unit: str) -> Verdict:
    """Say how far a reader's prediction is from what was computed.

    Parameters
    ----------
    prediction
        The reader's; ``None`` means that there is none yet.
    value, unit
        What was computed, and what it is measured in.

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
    if abs(said - value) <= (0.1 + 1e-9) * abs(value):
        return Verdict(True, f"{sentence}: right{'' if shown(said) == shown(value) else ' within a tenth'}.")
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
        the length and form of the result, unless the shape of a tensor is all that is wrong, with arrays as tensors and
        scalars as numbers; where it raises, it has nothing to say.
    tolerance
        How far off numbers may be, over the largest number of the result; whole numbers have to be equal.
    """
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    for arguments, expected in cases:
        try:
            returned = function(*copy.deepcopy(arguments))
        except (Exception, SystemExit) as error:
            said = f"for {_listed(arguments)} it raises {type(error).__name__}"
            return Verdict(False, f"Not yet: {said}: {_or_none(str, error) or ''}")
        got, expected = _or_none(_plain, returned), _plain(expected)
        if _or_none(_alike, got, expected, tolerance):
            continue
        reason = (
            "the function returns nothing" if returned is None else _reason(got, expected, hint, arguments, tolerance)
        )
        numbers = 3 if reason else 6  # a hint says more than they do
        wrong = _or_none(_difference, got, expected, tolerance, numbers) if got is not None else None
        wrong = wrong or f"It gives {_brief(returned, numbers)}, not {_brief(expected, numbers)}"
        return Verdict(False, f"Not yet{reason and f': {reason}'}. {wrong}, for {_listed(arguments, numbers)}.")
    return Verdict(True, f"Right: {explanation}")


def _or_none(function: Callable, *arguments: object) -> object:
    """What a call gives, or ``None`` if it raises: a learner's object may raise wherever it is touched."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _number(answer: object) -> float | None:
    """The number that a reader has written, if it is one."""
    value = _or_none(_plain, answer)
    return None if isinstance(value, bool) else _or_none(float, value)


def _no_number(answer: object, unit: str) -> Verdict:
    return Verdict(False, f"A bare number{unit and f' of {unit}'} is wanted here, got {_brief(answer)}.")


def _digits(value: float, digits: int = 3) -> str:
    """A number as a reader compares it: so many significant digits, and a whole one up to a million whole."""

    def whole(number: float) -> bool:
        return number.is_integer() and abs(number) <= 1e6

    if not whole(value):
        value = float(f"{value:.{digits}g}")
    return f"{value:,.0f}" if whole(value) else f"{value:.{digits}g}"


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
    if got.shape != expected.shape or (got.is_complex() and not expected.is_complex()):
        return False
    return bool(_right(got, expected, tolerance).all())


def _right(got, expected, tolerance: float):
    """Which numbers of two tensors of one shape agree."""
    import torch

    if _whole(got) and _whole(expected):
        return got.long() == expected.long()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got, expected, exact = got.to(wide), expected.to(wide), _whole(expected)
    largest = max([1e-30, *expected.abs().nan_to_num(posinf=0).flatten().tolist()])
    return torch.isclose(got, expected, rtol=0, atol=0 if exact else tolerance * largest)


def _reason(got: object, expected: object, hint: Callable[..., str], arguments: tuple, tolerance: float) -> str:
    """Why a result is wrong, where that is known."""
    if _or_none(_still_right, got, expected, tolerance) == RESHAPED:
        return ""  # which is said, and no hint knows better
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
        return next(filter(None, map(_not_finite, _entries(value))), "")
    if hasattr(value, "shape"):
        return "nan" if value.isnan().any() else "inf" if value.isinf().any() else ""
    return "" if not isinstance(value, float) or math.isfinite(value) else "nan" if math.isnan(value) else "inf"


def _entries(value: object) -> Iterable:
    """What a list, a tuple or a dict holds; other values hold nothing."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _holds_tensors(value: object) -> bool:
    return hasattr(value, "shape") or any(map(_holds_tensors, _entries(value)))


def _form(value: object) -> str:
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    return "a number" if isinstance(value, Number) else f"a {type(value).__name__}"


def _difference(got: object, expected: object, tolerance: float, numbers: int) -> str:
    """What two plain values show of their difference: their forms before their numbers."""
    tensors = [hasattr(got, "shape"), hasattr(expected, "shape")]
    if any(tensors) and _form(got) != _form(expected):
        right = tuple(expected.shape) if all(tensors) else _form(expected)
        return f"It gives {_form(got)}, not {right}{_or_none(_still_right, got, expected, tolerance) or ''}"
    if all(tensors) and got.is_complex() and not expected.is_complex():
        return "It gives complex numbers, not real ones"
    shown, right = _brief(got, numbers), _brief(expected, numbers)
    if all(tensors):
        said = f"It gives {shown}, not {right}" if shown != right else _how_far(got, expected, tolerance)
        return said + _still_right(got, expected, tolerance)
    alike = type(got) is type(expected) and len(_entries(got)) == len(_entries(expected))
    if shown != right and not (alike and _holds_tensors(expected)):
        return f"It gives {shown}, not {right}"
    if type(got) is not type(expected):
        return f"It gives the {type(got).__name__} {shown}, not a {type(expected).__name__}"
    if not isinstance(expected, list | tuple | dict):
        return f"It gives {got!r}, not {expected!r}"
    if not alike:
        return f"It gives {len(got)} entries, not {len(expected)}"
    places = expected if isinstance(expected, dict) else range(len(expected))
    place = next(place for place in places if not _alike(got[place], expected[place], tolerance))
    return f"{_difference(got[place], expected[place], tolerance, numbers)}, at place {place!r}"


def _how_far(got, expected, tolerance: float) -> str:
    """How many numbers of a tensor of the right shape are wrong, and by how much if it is one of quantities."""
    right = _right(got, expected, tolerance)
    wrong = int((~right).sum())
    said = f"{wrong} of {right.numel()} numbers {'is' if wrong == 1 else 'are'} wrong"
    return said if _whole(expected) else f"{said}, by up to {float((got.double() - expected.double()).abs().max()):.2g}"


RESHAPED = "; its numbers are right"


def _still_right(got: object, expected: object, tolerance: float) -> str:
    """What is right of a wrong tensor, or of what should be one."""
    import numpy as np
    import torch

    if not (hasattr(got, "shape") or hasattr(expected, "shape")):
        return ""
    got, expected = (each if hasattr(each, "shape") else torch.as_tensor(np.array(each)) for each in (got, expected))
    if _close(got.flatten(), expected.flatten(), tolerance):
        return RESHAPED
    orders = itertools.permutations(range(got.ndim)) if got.ndim == expected.ndim else ()
    turned = any(_close(got.permute(order), expected, tolerance) for order in orders)
    return "; with its axes in another order it is right" if turned else ""


class _Brief(reprlib.Repr):
    """Values as a sentence shows them: numbers with six digits, of a tensor few, and at most twelve of the others."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.maxlist = self.maxtuple = self.maxdict = 12
        self.maxlevel, self.maxstring, self.maxother, self.fillvalue = 4, 200, 200, "…"

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"

    def repr_Tensor(self, tensor, level: int) -> str:  # noqa: N802 - found by the name of the type
        few = math.prod(tensor.shape) <= self.numbers
        return self.repr1(tensor.tolist(), level) if few else _form(tensor)


def _brief(value: object, numbers: int = 6) -> str:
    plain = _or_none(_plain, value)
    said = _or_none(_Brief(numbers).repr, value if plain is None else plain)
    return said or f"an object of type {type(value).__name__}"


def _listed(arguments: tuple, numbers: int = 6) -> str:
    return ", ".join(_brief(each, numbers) for each in arguments)
