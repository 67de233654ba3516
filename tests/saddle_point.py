"""The exact ε of the Poisson-subsampled Gaussian mechanism, by another way than an accountant's.

δ(ε) is an inverse Laplace transform of the privacy loss's moments. On the line through the saddle point nothing large
is subtracted, so that δ has digits however small it is. The neighbour that has one example less is the worse one.
"""

import math

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import logsumexp

CHUNK, CHUNKS = 500, 200


class Loss:
    """The privacy loss of one step, on a grid of the noisy sum."""

    def __init__(self, rate: float, sigma: float, most: float) -> None:
        x = np.arange(-16 * sigma, 16 * sigma + most + 2, sigma / 25)  # the noisy sum, C = 1
        self._log_density = -x * x / (2 * sigma * sigma) - math.log(math.sqrt(2 * math.pi) * 25)
        self._log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma * sigma))

    def tilted(self, t: float) -> np.ndarray:
        return (t + 1) * self._log_ratio + self._log_density

    def log_moment(self, t: float) -> float:
        return float(logsumexp(self.tilted(t)))

    def characteristic(self, t: float, u: np.ndarray) -> np.ndarray:
        """Of the loss under the measure that is tilted by t."""
        weights = np.exp(self.tilted(t) - self.log_moment(t))
        return np.exp(1j * u[:, None] * self._log_ratio) @ weights


def exact_delta(epsilon: float, rate: float, sigma: float, steps: int) -> float:
    """NaN where the integral takes too many points."""
    loss = Loss(rate, sigma, 400.0)

    def height(t: float) -> float:
        return steps * loss.log_moment(t) - t * epsilon - math.log(t) - math.log(t + 1)

    saddle = float(minimize_scalar(height, bounds=(1e-3, 380), method="bounded").x)
    near = 1e-3 * saddle
    curvature = (height(saddle + near) - 2 * height(saddle) + height(saddle - near)) / near**2
    spacing = min(1 / math.sqrt(max(curvature, 1e-12)) / 15, 0.1)
    total = 0.0
    for chunk in range(CHUNKS):
        u = spacing * (chunk * CHUNK + np.arange(CHUNK))
        t = saddle + 1j * u
        values = loss.characteristic(saddle, u) ** steps * np.exp(-1j * u * epsilon)
        values *= saddle * (saddle + 1) / (t * (t + 1))
        total += float(values.real.sum()) - (0.5 if chunk == 0 else 0.0)
        if np.abs(values).max() < 1e-9:
            return math.exp(height(saddle)) * total * spacing / math.pi
    return math.nan


def exact_epsilon(rate: float, sigma: float, steps: int, delta: float, near: float) -> float:
    """The ε at which δ is ``delta``, between 1/100 and twice ``near``; 0 if it is below that, NaN if unknown."""

    def excess(epsilon: float) -> float:
        found = exact_delta(epsilon, rate, sigma, steps)
        return math.nan if math.isnan(found) else math.log(max(found, 1e-300) / delta)

    low, high = near / 100, 2 * near
    first, last = excess(low), excess(high)
    if math.isnan(first + last):
        return math.nan
    return 0.0 if first <= 0 else float(brentq(excess, low, high, xtol=1e-5))
