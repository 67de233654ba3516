import inspect
import re

import numpy as np
import pytest
import torch

from plpkg.validation import flag, keywords, number, one_of, shown, whole_number

NONE = np.zeros(0)
"""As a tensor, it has what a number has, and is none."""


@pytest.mark.parametrize("value", [1, 768, np.int64(5)])
def test_whole_number_accepts(value):
    result = whole_number("rank", value, 1, 768, "hidden")
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize("value", [0, -1, 769, 1.0, "8", None, True, torch.tensor(True), int, NONE])
def test_whole_number_names_the_value(value):
    kind, got = "" if type(value) is int else "a whole number ", re.escape(repr(value))
    with pytest.raises(ValueError, match=rf"^rank must be {kind}between 1 and hidden=768, got {got}$"):
        whole_number("rank", value, 1, 768, "hidden")


@pytest.mark.parametrize("value", [0, -3.5, np.nan, np.inf, "fast", "5", None, True, np.True_, float, NONE, 10**400])
def test_number_refuses(value):
    with pytest.raises(ValueError, match=rf"^rate must be greater than 0, got {re.escape(shown(value))}$"):
        number("rate", value, open_low=True)


def test_bounds_are_inclusive_and_named():
    assert number("share", 0, 0, 1) == 0
    assert number("share", 1, 0, 1) == 1
    with pytest.raises(ValueError, match=r"share must be at least 0 and at most 1, got 1.5"):
        number("share", 1.5, 0, 1)
    with pytest.raises(ValueError, match="tokens must be a whole number of at least 1, got 0"):
        whole_number("tokens", 0, 1)
    assert flag("endpoints", False) is False
    with pytest.raises(ValueError, match="endpoints must be True or False, got 'no'"):
        flag("endpoints", "no")


@pytest.mark.parametrize("value", [True, 1.0, "1", 2])
def test_one_of_tells_types_apart(value):
    assert one_of("projections", 3, (1, 3)) == 3
    with pytest.raises(ValueError, match=rf"^projections must be one of 1, 3, got {value!r}$"):
        one_of("projections", value, (1, 3))


def test_keywords_are_those_of_what_takes_them():
    def taker(first: int, rank: int = 3, bits: int = 16) -> None: ...

    @keywords(taker, without=("first",))
    def calculate(model: str, rank: int = 8, **others) -> tuple:
        """What it does."""
        return model, rank, others

    assert str(inspect.signature(calculate)) == "(model: str, rank: int = 8, *, bits: int = 16) -> tuple"
    assert (calculate.__name__, calculate.__doc__) == ("calculate", "What it does.")
    assert calculate("gpt2", bits=4) == ("gpt2", 8, {"bits": 4})
    for name, hint in {"ranks": r"did you mean 'rank'\?", "first": "it takes model, rank, bits"}.items():
        with pytest.raises(TypeError, match=rf"^calculate\(\) got an unexpected keyword argument '{name}': {hint}$"):
            calculate("gpt2", **{name: 1})
