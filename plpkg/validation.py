"""Checks of arguments: a wrong value gets a sentence that names it."""

import math


def whole_number(name: str, value: object, low: int, high: int | None = None, limit: str = "") -> int:
    """Return ``value`` if it is a whole number from ``low`` to ``high``.

    Parameters
    ----------
    name
        What the argument is called, for the message.
    value
        What the caller gave.
    low, high
        The allowed range, both ends included; ``high=None`` leaves it open.
    limit
        Where ``high`` comes from, for the message: ``"hidden"`` prints ``hidden=768``.

    Raises
    ------
    ValueError
        The value is out of range or not whole.
    """
    # bool is an int in Python, and True is nobody's rank; NumPy integers pass through __index__.
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if whole and value >= low and (high is None or value <= high):
        return int(value)
    if high is None:
        expected = f"a whole number of at least {low}"
    else:
        expected = f"between {low} and {limit + '=' if limit else ''}{high}"
    raise ValueError(f"{name} must be {expected}, got {value!r}")


def number(name: str, value: object, low: float = 0.0, high: float = math.inf, *, open_low: bool = False) -> float:
    """Return ``value`` as a float if it is a finite number from ``low`` to ``high``.

    ``open_low`` excludes ``low`` itself: a bandwidth may be tiny, never zero.

    Raises
    ------
    ValueError
        The value is out of range, infinite, or not a number.
    """
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if math.isfinite(result) and result <= high and (result > low if open_low else result >= low):
        return result
    bound = f"greater than {low:g}" if open_low else f"at least {low:g}"
    if math.isfinite(high):
        bound += f" and at most {high:g}"
    raise ValueError(f"{name} must be {bound}, got {value!r}")


def one_of(name: str, value: object, allowed: tuple) -> object:
    """Return ``value`` if it is one of ``allowed``.

    Raises
    ------
    ValueError
        It is not; the message lists what is.
    """
    if value in allowed:
        return value
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
