"""The ε that a private training spends, from the noise; and the noise for an ε.

The subsampled Gaussian mechanism: in each step every example takes part with probability q, and normal noise of σ times
the sensitivity is added. ε comes from Opacus's accountants: ``prv`` (Gopi et al., arXiv 2106.02848), tight, or ``rdp``
(Mironov, arXiv 1702.07476). Neighbouring data sets differ by one example that is there or not, or by one user with all
that is theirs. How many there are counts as known.

Shuffled batches are not that mechanism. Under an accountant that assumes Poisson samples they leak up to four times the
ε that it prints (Annamalai et al., arXiv 2411.10614), and what holds for them, an epoch counted as one step without
sampling, asks for far more noise: so :func:`~plpkg.clipping.make_private` samples, and does not shuffle.
"""

import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from opacus.accountants import IAccountant, create_accountant
from scipy.optimize import brentq
from scipy.special import log_ndtr

from plpkg.clipping.clip import Clip
from plpkg.clipping.training.ledger import Spent
from plpkg.validation import number, one_of, whole_number

ACCOUNTANTS = ("prv", "rdp")
HIGHEST_PRV = 100.0
"""The ε beyond which ``prv`` would take minutes and all memory: there the looser bound of ``rdp`` is taken."""
ROUNDING = 2.0**-52
"""How far rounding may move the δ of ``prv`` with each step. It raises the Fourier transform of one step's distribution
to the number of steps, which multiplies a relative error of 2^-53 by that number. In the two settings that were
measured, of 100,000 steps, δ was 0.2 and 0.4 times 100,000 · 2^-53 too small."""
MOST_NOISE = 1e6
"""The σ up to which :func:`noise_for` looks."""


@dataclass(frozen=True)
class Mechanism:
    """The subsampled Gaussian mechanism: in each step an example takes part with probability ``sample_rate``, is
    clipped to ``max_grad_norm``, C, and noise of ``noise_multiplier``·C is added. The ``accountant`` tells the ε.

    C and σ may be functions of the step's number. ``users`` are sampled and clipped instead of examples if there is a
    number of them.
    """

    accountant: str
    noise_multiplier: float | Callable[[int], float]
    sample_rate: float
    max_grad_norm: float | Sequence[float] | Callable[[int], float]
    clipping: str
    users: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.noise_multiplier):  # a float, whatever stood for it
            object.__setattr__(self, "noise_multiplier", number("noise_multiplier", self.noise_multiplier))
        if hasattr(self.max_grad_norm, "__float__"):
            object.__setattr__(self, "max_grad_norm", number("max_grad_norm", self.max_grad_norm, open_low=True))

    def at(self, step: int) -> "Mechanism":
        """The mechanism of a step, with numbers for C and σ.

        Raises
        ------
        ValueError
            A function gave something else.
        """
        if not callable(self.noise_multiplier) and not callable(self.max_grad_norm):
            return self
        sigma = self.noise_multiplier
        norm = self.max_grad_norm
        return replace(
            self,
            noise_multiplier=sigma(step) if callable(sigma) else sigma,
            max_grad_norm=norm(step) if callable(norm) else norm,
        )

    @property
    def sigma(self) -> float:
        """The noise multiplier, of a mechanism that has a number for it: see :meth:`at`."""
        if callable(self.noise_multiplier):
            raise ValueError("σ is a function of the step: ask at(step)")
        return self.noise_multiplier

    @cached_property
    def clip(self) -> Clip:
        if callable(self.max_grad_norm):
            raise ValueError("C is a function of the step: ask at(step)")
        return Clip(self.max_grad_norm, self.clipping)

    def steps_within(self, epsilon: float, delta: float, first: int = 0, before: Sequence[Spent] = ()) -> int:
        """How many steps can be taken, counted from 0, so that no more than ``epsilon`` is spent.

        Parameters
        ----------
        first, before
            The next step's number, and what has been spent.
        """
        number("max_epsilon", epsilon, open_low=True)
        sigma = self.noise_multiplier

        def spends_more(steps: int) -> bool:
            counts = Counter(sigma(step) if callable(sigma) else sigma for step in range(first, steps))
            history = list(before)
            for each, count in counts.items():
                history.append((each, self.sample_rate, count))
            return spent(accountant_of(self.accountant, history), delta) > epsilon

        high = 1
        while not spends_more(first + high):
            high *= 2
        # The first number of steps that spends more; half of `high` did not.
        too_many = bisect_left(range(first + high), True, lo=first + high // 2, key=spends_more)
        return too_many - 1


def epsilon_of(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, *, accountant: str = "prv"
) -> float:
    """The ε of so many steps.

    Parameters
    ----------
    noise_multiplier
        σ; 0 is no privacy.
    sample_rate
        q, the expected batch size over the number of examples.
    steps
        How often the optimizer steps.
    delta
        δ, well below one over the number of examples.
    accountant
        ``prv`` or ``rdp``.

    Raises
    ------
    ValueError
        A value outside its range.
    """
    sigma = number("noise_multiplier", noise_multiplier)
    number("sample_rate", sample_rate, 0, 1, open_low=True)
    whole_number("steps", steps, 0)
    one_of("accountant", accountant, ACCOUNTANTS)
    history = [(sigma, sample_rate, steps)] if steps else []
    return spent(accountant_of(accountant, history), delta)


def accountant_of(name: str, history: Sequence[Spent]) -> IAccountant:
    """Opacus's accountant of this name, after these steps."""
    made = create_accountant(name)
    made.history = list(history)
    return made


def spent(accountant: IAccountant, delta: float) -> float:
    """An upper bound of the ε of what an accountant has in its history; infinite for steps without noise.

    ``prv`` answers where it can: by the closed form where all examples take part in each step, and else by its
    convolution where rounding changes δ by less than a hundredth (:data:`ROUNDING`) and ε is at most
    :data:`HIGHEST_PRV`. Elsewhere the bound is that of ``rdp``, which is looser.
    """
    probability("delta", delta)
    history = accountant.history
    if not history:
        return 0.0
    if any(sigma * sigma == 0 for sigma, _, _ in history):  # accountants divide by the square
        return math.inf
    tight = accountant.mechanism() == "prv"
    if tight and all(rate == 1 for _, rate, _ in history):
        squares = sum(count / sigma / sigma for sigma, _, count in history)  # of one step with the same ε
        return gaussian_epsilon(squares**-0.5, delta)
    with _quiet_bounds() if tight else nullcontext():
        epsilon = float(accountant_of("rdp", history).get_epsilon(delta=delta))
        steps = sum(count for _, _, count in history)
        if tight and epsilon <= HIGHEST_PRV and steps * ROUNDING <= delta / 100:
            with suppress(ValueError, RuntimeError):  # raised where its grid cannot hold the answer
                epsilon = float(accountant.get_epsilon(delta=delta))
    return max(0.0, epsilon)


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The ε of one release with normal noise of σ·C, all examples taking part.

    The root of δ = Φ(1/2σ − εσ) − e^ε·Φ(−1/2σ − εσ) (Balle & Wang, arXiv 1805.06530, Theorem 8).

    Raises
    ------
    ValueError
        Bad arguments.
    """
    sigma = number("noise_multiplier", noise_multiplier, open_low=True)
    number("delta", delta, 0, 1, open_low=True)

    def excess(epsilon: float) -> float:
        half = 1 / (2 * sigma)
        shift = epsilon * sigma
        theirs = min(0.0, epsilon + log_ndtr(-half - shift))  # of large numbers: rounded, and perhaps above 0
        ours = log_ndtr(half - shift)
        return math.exp(ours) - math.exp(theirs) - delta

    if math.isinf(1 / sigma / sigma):  # ε is about half of it
        return math.inf
    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    root: Any = brentq(excess, 0.0, high)  # only with full_output is it a tuple
    return float(root)


def noise_for(
    target_epsilon: float, target_delta: float, sample_rate: float, steps: int, *, accountant: str = "prv"
) -> float:
    """The smallest σ with which so many steps spend no more than ``target_epsilon``, to 0.01 in ε.

    Raises
    ------
    ValueError
        A value outside its range, or a target that no noise reaches.
    """
    number("target_epsilon", target_epsilon, open_low=True)
    probability("target_delta", target_delta)
    number("sample_rate", sample_rate, 0, 1, open_low=True)
    whole_number("steps", steps, 1)
    one_of("accountant", accountant, ACCOUNTANTS)

    def epsilon(sigma: float) -> float:
        return epsilon_of(sigma, sample_rate, steps, target_delta, accountant=accountant)

    low = 0.0
    high = 1.0
    spent_at_high = epsilon(high)
    while spent_at_high > target_epsilon:
        low = high
        high *= 2
        if high > MOST_NOISE:
            raise ValueError(
                f"no noise up to {MOST_NOISE:g} gives target_epsilon={target_epsilon!r} at "
                f"target_delta={target_delta!r}"
            )
        spent_at_high = epsilon(high)
    # Where one bound gives way to another ε jumps, and no σ may come as near as 0.01.
    while target_epsilon - spent_at_high > 0.01 and high - low > 1e-6 * high:
        middle = (low + high) / 2
        spent_in_the_middle = epsilon(middle)
        if spent_in_the_middle > target_epsilon:
            low = middle
        else:
            high, spent_at_high = middle, spent_in_the_middle
    return high


def probability(name: str, value: float) -> float:
    """A probability strictly between 0 and 1, such as a δ.

    Raises
    ------
    ValueError
        It is not.
    """
    if number(name, value, 0, 1, open_low=True) == 1:
        raise ValueError(f"{name} must be less than 1, got {value!r}")
    return float(value)


@contextmanager
def _quiet_bounds() -> Iterator[None]:
    """The tight accountant bounds its grid by a coarse one, whose advice on orders does not concern the result."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        # Steps that all examples take part in, among others: it takes log(1 - 1), whose -inf is right.
        warnings.filterwarnings("ignore", message="divide by zero encountered in log", category=RuntimeWarning)
        yield
