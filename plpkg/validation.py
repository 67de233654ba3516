"""Checks of arguments: a wrong value gets a sentence that names it, a mistyped name the one that was meant."""

import contextlib
import difflib
import inspect
import math
import reprlib
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
Arguments = ParamSpec("Arguments")

_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxlist, _brief.maxdict, _brief.maxother = 2, 100, 4, 4, 60


def shown(value: object) -> str:
    """``repr`` on one line, cut: nobody's megabyte comes back in a message."""
    return " ".join(_brief.repr(value)[:300].split())


def whole_number(name: str, value: Any, low: int, high: int | None = None, limit: str = "") -> int:
    """Return ``value`` if it is a whole number from ``low`` to ``high``.

    Parameters
    ----------
    name
        The name of the argument in the message.
    value
        The caller's value.
    low, high
        The allowed range, both ends included; ``high=None`` leaves it open.
    limit
        Where ``high`` comes from, for the message: ``"hidden"`` prints ``hidden=768``.

    Raises
    ------
    ValueError
        The value is out of range or not whole.
    """
    count = None
    if not _is_flag(value):  # an int in Python, and True is nobody's rank
        with contextlib.suppress(AttributeError, TypeError):  # NumPy's integers have it, a tensor of several does not
            count = value.__index__()
    if count is not None and count >= low and (high is None or count <= high):
        return count
    if high is None:
        expected = f"a whole number of at least {low}"
    else:
        kind = "a whole number " if count is None else ""
        expected = f"{kind}between {low} and {limit + '=' if limit else ''}{high}"
    raise ValueError(f"{name} must be {expected}, got {shown(value)}")


def _is_flag(value: object) -> bool:
    """Whether it is True or False, NumPy's and torch's among them."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def number(name: str, value: Any, low: float = 0.0, high: float = math.inf, *, open_low: bool = False) -> float:
    """Return ``value`` as a float if it is a finite number from ``low`` to ``high``.

    ``open_low`` excludes ``low`` itself: a bandwidth may be tiny, never zero.

    Raises
    ------
    ValueError
        The value is out of range, infinite, or not a number.
    """
    # A string is a slip even if it can be read as a number, and so is True.
    result = math.nan
    if not _is_flag(value):
        with contextlib.suppress(AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError):
            result = value.__float__()
    if math.isfinite(result) and result <= high and (result > low if open_low else result >= low):
        return result
    bound = f"greater than {low:g}" if open_low else f"at least {low:g}"
    if math.isfinite(high):
        bound += f" and at most {high:g}"
    raise ValueError(f"{name} must be {bound}, got {shown(value)}")


def one_of(name: str, value: object, allowed: tuple[T, ...]) -> T:
    """Return ``value`` if it is one of ``allowed``.

    Raises
    ------
    ValueError
        It is not; the message lists what is.
    """
    for known in allowed:
        if type(value) is type(known) and value == known:  # 1 is neither True nor 1.0
            return known
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False.

    Raises
    ------
    ValueError
        It is something else: a string such as ``"no"`` would count as true.
    """
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, got {shown(value)}")


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of ``host:port``; an IPv6 address stands in brackets.

    Raises
    ------
    ValueError
        It is not that.
    """
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"an address must be host:port, got {address!r}")
    return bare, int(port)


def keywords(
    *takers: Callable[..., Any], without: tuple[str, ...] = ()
) -> Callable[[Callable[Arguments, T]], Callable[Arguments, T]]:
    """Decorate a function so that its signature has every keyword, and a mistyped one names the near one.

    Parameters
    ----------
    takers
        The functions to which its ``**`` goes on; their parameters become the signature's last.
    without
        Those of them that the function sets itself.

    Raises
    ------
    TypeError
        By the decorated function, for a keyword that neither it nor a taker has.
    """

    def decorate(function: Callable[Arguments, T]) -> Callable[Arguments, T]:
        signature = inspect.signature(function)
        known = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        for taker in takers:
            for name, p in inspect.signature(taker).parameters.items():
                if name not in known and name not in without:
                    known[name] = p.replace(kind=p.KEYWORD_ONLY)

        @wraps(function)
        def checked(*args: Arguments.args, **given: Arguments.kwargs) -> T:
            for name in given:
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}: {hint}")
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=list(known.values()))  # pyright: ignore[reportAttributeAccessIssue] (what inspect reads)
        return checked

    return decorate
