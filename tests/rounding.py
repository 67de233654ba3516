"""How far apart two results of one computation may be: derived, never the figure that one CPU happened to give.

In which order a sum is taken is the machine's choice (its vectors, its threads, its libraries), and every order
rounds otherwise. A sum of n products is off by at most n u Σ|a b|, with u = eps / 2 (Higham, Accuracy and Stability
of Numerical Algorithms, 2002, eq. 3.5), so two orders differ by at most n eps Σ|a b|: :func:`assert_close`. What
passes many layers has no useful bound of that kind; there the distance that one computation has from float64's
tells how much rounding matters, and another order may be some times as far: :func:`assert_as_exact`.

Left alone is what no machine rounds otherwise: figures against half a unit of the last digit that was printed, and
a few operations on Python's floats against pytest.approx's 1e-6.
"""

import math
from collections.abc import Iterable

import torch

TIMES = 16
"""How many times one result's own distance from float64 another order of the same sums may be away from it.

Two independent errors are √2 apart. One order can be worse than another, too: summed one by one, errors of random
sign grow as √n, summed in 16 parts as √(n/16), a fourth. That makes six; the rest is for errors that are not random.
A wrong term, sign or index is thousands of times as far.
"""

STANDARD_ERRORS = 5
"""A sound sampler is further than this from its mean once in 1.7 million runs."""


def relative(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The relative distance of two sums of so many terms of one sign, for ``pytest.approx(…, rel=…)``."""
    return terms * torch.finfo(dtype).eps


def assert_close(actual: torch.Tensor, expected: torch.Tensor, terms: int, size: torch.Tensor | float | None = None):
    """Every element differs by at most ``terms · eps · size``; eps is the coarser dtype's.

    Parameters
    ----------
    actual, expected
        Of one shape.
    terms
        Of the sum that makes an element; where sums follow each other, of all of them together.
    size
        Σ|a b| of an element's terms, or a bound of it; without it the largest of ``expected``.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, expected {tuple(expected.shape)}"
    eps = max(torch.finfo(t.dtype).eps for t in (actual, expected))
    size = expected.abs().max().item() if size is None else size
    torch.testing.assert_close(
        (actual.double() - expected.double()).abs() / size,
        torch.zeros(expected.shape, dtype=torch.float64),
        rtol=0,
        atol=terms * eps,
    )


def assert_as_exact(actual, expected, exact, times: float = TIMES):
    """As one vector, ``actual`` is as near ``expected`` as this is to ``exact``, but for the factor ``times``.

    Parameters
    ----------
    actual, expected
        A tensor each, or as many tensors of the same shapes.
    exact
        What ``expected`` is in float64. A distance below one rounding of each element counts as that.
    """
    actual, expected, exact = map(_vector, (actual, expected, exact))
    distance = max((expected - exact).norm().item(), torch.finfo(torch.float32).eps / 2 * exact.norm().item())
    apart = (actual - expected).norm().item()
    assert apart <= times * distance, f"{apart:.3g} apart, {apart / distance:.1f} times the {distance:.3g} from float64"


def _vector(tensors: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def sampling_error(variance: float, n: int) -> float:
    """Five standard errors of a mean of ``n`` independent draws.

    ``variance`` is a draw's: σ² for a mean, p(1 - p) for a share; 1/2 gives a normal sample's standard deviation
    relative to σ, and 2 its variance relative to σ².
    """
    return STANDARD_ERRORS * math.sqrt(variance / n)
