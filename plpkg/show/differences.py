"""The difference between two values in words, as a sentence for a learner."""

import itertools
import math
import reprlib
from collections.abc import Collection
from numbers import Number
from typing import Any

from plpkg.show.comparing import alike, as_tensor, close, is_whole, or_none, plain_value, right_entries


def describe_difference(got: Any, expected: Any, tolerance: float, numbers: int) -> str:
    """Say how two plain values differ: by their forms if these differ, else by their numbers."""
    if hasattr(got, "shape") or hasattr(expected, "shape"):
        return _tensor_difference(got, expected, tolerance, numbers)
    shown = brief(got, numbers)
    right = brief(expected, numbers)
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
    place = next(place for place in places if not alike(got[place], expected[place], tolerance))
    return f"{describe_difference(got[place], expected[place], tolerance, numbers)}, at place {place!r}"


def _tensor_difference(got: Any, expected: Any, tolerance: float, numbers: int) -> str:
    """Say how two plain values differ, at least one of which is a tensor."""
    if _form(got) != _form(expected):
        both_tensors = hasattr(got, "shape") and hasattr(expected, "shape")
        wanted = tuple(expected.shape) if both_tensors else _form(expected)
        still_right = or_none(right_otherwise, got, expected, tolerance) or ""
        return f"It gives {_form(got)}, not {wanted}{still_right}"
    if got.is_complex() and not expected.is_complex():
        return "It gives complex numbers, not real ones"
    shown = brief(got, numbers)
    right = brief(expected, numbers)
    said = f"It gives {shown}, not {right}"
    if shown == right:  # two long tensors are both shown by their shape
        said = _how_far(got, expected, tolerance)
    return said + right_otherwise(got, expected, tolerance)


def _how_far(got, expected, tolerance: float) -> str:
    """Say how many entries of a tensor of the right shape are wrong and, unless they are whole numbers, by how much."""
    right = right_entries(got, expected, tolerance)
    wrong = int((~right).sum())
    verb = "is" if wrong == 1 else "are"
    said = f"{wrong} of {right.numel()} numbers {verb} wrong"
    if is_whole(expected):
        return said
    largest_error = float((got.double() - expected.double()).abs().max())
    return f"{said}, by up to {largest_error:.2g}"


RESHAPED = "; its numbers are right"


def right_otherwise(got: Any, expected: Any, tolerance: float) -> str:
    """The end of a sentence about a wrong result: its numbers are right, or its axes are in another order; or ""."""
    if not (hasattr(got, "shape") or hasattr(expected, "shape")):
        return ""
    got = as_tensor(got)
    expected = as_tensor(expected)
    if close(got.flatten(), expected.flatten(), tolerance):
        return RESHAPED
    if got.ndim != expected.ndim:
        return ""
    for axes in itertools.permutations(range(got.ndim)):
        if close(got.permute(axes), expected, tolerance):
            return "; with its axes in another order it is right"
    return ""


def not_finite(value: Any) -> str:
    """``nan`` or ``inf`` if the value is one or holds one, else ""."""
    if isinstance(value, list | tuple | dict):
        return next(filter(None, map(not_finite, _entries(value))), "")
    if hasattr(value, "shape"):
        if value.isnan().any():
            return "nan"
        return "inf" if value.isinf().any() else ""
    if not isinstance(value, float) or math.isfinite(value):
        return ""
    return "nan" if math.isnan(value) else "inf"


def _entries(value: Any) -> Collection:
    """The entries of a list, a tuple or a dict; other values have none."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return ()


def _holds_tensors(value: Any) -> bool:
    return hasattr(value, "shape") or any(map(_holds_tensors, _entries(value)))


def _form(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Number):
        return "a number"
    return f"a {type(value).__name__}"


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

    def repr_int(self, value: int, level: int) -> str:
        repr(value)  # ValueError for thousands of digits: reprlib itself says the address of such a number in 3.14
        return super().repr_int(value, level)

    def repr_Tensor(self, tensor, level: int) -> str:  # noqa: N802 - found by the name of the type
        if math.prod(tensor.shape) > self.numbers:
            return _form(tensor)
        return self.repr1(tensor.tolist(), level)


def brief(value: Any, numbers: int = 6) -> str:
    plain = or_none(plain_value, value)
    if plain is None:
        plain = value
    shown = or_none(_Brief(numbers).repr, plain)
    return shown or f"an object of type {type(value).__name__}"


def listed(arguments: tuple, numbers: int = 6) -> str:
    return ", ".join(brief(each, numbers) for each in arguments)
