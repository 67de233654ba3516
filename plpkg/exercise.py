"""Exercises that answer back: a verdict with a hint, never a bare assertion."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape


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
    try:
        value = float(answer)
    except (TypeError, ValueError):
        return Verdict(False, f"A bare number of {unit} is wanted here, got {answer!r}.")
    if math.isclose(value, expected, rel_tol=tolerance):
        return Verdict(True, f"Right: {explanation}")
    for wrong, reason in hints.items():
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
        ``hint(got, *arguments)`` says of a wrong result what a known mistake reveals, or nothing.
    tolerance
        How far off numbers may be, over the largest number of the result.
    """
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    for arguments, expected in cases:
        said = f"for {', '.join(map(_brief, arguments))}"
        try:
            got = function(*copy.deepcopy(arguments))
        except Exception as error:
            return Verdict(False, f"Not yet: {said} it raises {type(error).__name__}: {error}")
        if not _alike(got, expected, tolerance):
            reason = hint(got, *arguments) if _same_form(got, expected) else ""
            wrong = f"It gives {_brief(got)}, not {_brief(expected)}"
            if _brief(got) == _brief(expected):
                off = float(abs(got - expected).max())
                wrong = f"The form, {_brief(got)}, is right, but the numbers are off by up to {off:.2g}"
            return Verdict(False, f"Not yet{reason and f': {reason}'}. {wrong}, {said}.")
    return Verdict(True, f"Right: {explanation}")


def _form(value: object) -> object:
    """What has to agree before numbers are compared: a tensor's shape, a container's type, length and keys."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: _form(each) for key, each in value.items()}
    return (type(value), [_form(each) for each in value]) if isinstance(value, list | tuple) else None


def _same_form(got: object, expected: object) -> bool:
    return got is not None and _form(got) == _form(expected)


def _alike(got: object, expected: object, tolerance: float) -> bool:
    if not _same_form(got, expected):
        return False
    if hasattr(expected, "shape"):
        return bool((abs(got - expected) <= tolerance * max(float(abs(expected).max()), 1e-30)).all())
    if isinstance(expected, dict):
        return all(_alike(got[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list | tuple):
        return all(_alike(one, other, tolerance) for one, other in zip(got, expected, strict=True))
    if isinstance(expected, float):
        return isinstance(got, int | float) and math.isclose(got, expected, rel_tol=tolerance, abs_tol=1e-12)
    return bool(got == expected)


def _brief(value: object) -> str:
    if hasattr(value, "shape"):
        small = value.shape and math.prod(value.shape) <= 12
        return _brief(value.flatten().tolist()) if small else f"a tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_brief, value[:12])) + ", …" * (len(value) > 12)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_brief(each)}" for key, each in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)[:200]
