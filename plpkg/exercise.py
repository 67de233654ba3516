"""Exercises that answer back: a verdict with a hint, never a bare assertion."""

import math
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
