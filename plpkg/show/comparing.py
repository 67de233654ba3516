"""Two values compared, of which a learner's may be any object and raise wherever it is touched."""

import math
from collections.abc import Callable
from numbers import Number
from typing import Any


def or_none(function: Callable, *arguments: Any) -> Any:
    """Call ``function``; ``None`` if it raises, as a learner's object may wherever it is touched."""
    try:
        return function(*arguments)
    except Exception:
        return None


def plain_value(value: Any) -> Any:
    """The value with its arrays as tensors on the CPU, and its scalar arrays as Python's numbers."""
    if type(value) in (list, tuple):
        return type(value)(map(plain_value, value))
    if isinstance(value, dict):  # a defaultdict or an OrderedDict is one
        return {key: plain_value(each) for key, each in value.items()}
    if not hasattr(value, "shape"):
        return value
    if tuple(value.shape) == ():
        return value.item()
    import torch

    return as_tensor(value).detach().cpu().to_dense().as_subclass(torch.Tensor)


def alike(got: Any, expected: Any, tolerance: float) -> bool:
    """Whether two plain values agree; the type of ``expected`` decides how, so no method of the learner's does."""
    if isinstance(expected, int | float):
        return _alike_number(got, expected, tolerance)
    if type(got) is not type(expected):
        return False
    if isinstance(expected, dict):
        if got.keys() != expected.keys():
            return False
        return all(alike(got[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return False
        return all(alike(one, other, tolerance) for one, other in zip(got, expected, strict=True))
    if hasattr(expected, "shape"):
        return close(got, expected, tolerance)
    return bool(got == expected)


def _alike_number(got: Any, expected: int | float, tolerance: float) -> bool:
    if type(got) is int and isinstance(expected, int):
        return got == expected  # as floats, 2**60 and 2**60 + 1 would be equal
    if not isinstance(got, Number):
        return False
    relative = 0 if isinstance(expected, int) else tolerance
    return math.isclose(float(got), expected, rel_tol=relative, abs_tol=1e-12)  # pyright: ignore[reportArgumentType] (a number, by then)


def close(got, expected, tolerance: float) -> bool:
    """Whether two tensors agree, whatever their number formats."""
    if got.shape != expected.shape:
        return False
    if got.is_complex() and not expected.is_complex():
        return False
    return bool(right_entries(got, expected, tolerance).all())


def right_entries(got, expected, tolerance: float):
    """For two tensors of one shape, a tensor of booleans: which entries agree."""
    import torch

    if is_whole(got) and is_whole(expected):
        return got.long() == expected.long()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got = got.to(wide)
    if is_whole(expected):
        return torch.isclose(got, expected.to(wide), rtol=0, atol=0)
    expected = expected.to(wide)
    sizes = expected.abs().nan_to_num(posinf=0).flatten().tolist()
    largest = max([1e-30, *sizes])
    return torch.isclose(got, expected, rtol=0, atol=tolerance * largest)


def is_whole(tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def as_tensor(value: Any):
    """A number, a list or an array as a tensor; a tensor as it is."""
    import numpy as np
    import torch

    return value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
