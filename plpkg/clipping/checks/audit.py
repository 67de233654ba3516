"""A lower bound on ε from one run of a training: who guesses too well who took part has disproved a smaller ε.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (arXiv 2305.08846): each of m canaries takes
part with probability 1/2; the auditor guesses, for as many as he likes, whether they did. If the training is
(ε, δ)-private, the number of right guesses is hardly above that of a coin that is right with probability e^ε/(1 + e^ε).

The bound holds with the stated confidence, and it is loose: far below the true ε even where nothing is left to
improve in the attack. What it does not contradict, it does not confirm. See :mod:`plpkg.clipping.checks.sensitivity`.

Who knows more assumes more: :func:`gaussian_audit` keeps the scores themselves instead of guesses made of them. With
normal noise on orthogonal canaries they are normal and independent, and two samples of normal numbers bound how far
their means are apart exactly, at any number of canaries. (The scores, not guesses, are also what arXiv 2606.12733
uses, by a limit theorem for their sum over many steps; this bound is not theirs, and needs no limit.)

Left out: the bound of f-DP (arXiv 2410.22235), canaries in a real data set, several steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import binom, nct

from plpkg.clipping.batches import batch_size, examples
from plpkg.clipping.checks.sensitivity import Update, as_vector
from plpkg.clipping.training.accounting import gaussian_epsilon, probability
from plpkg.results import Tabular
from plpkg.validation import number, whole_number

GUESSED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of the canaries that are guessed: few, of which one is sure, or many, for a count that tells more."""
HIGHEST_EPSILON = 64.0
"""Beyond any lower bound: in floating point e^ε/(1 + e^ε) is 1 here, which no guesses contradict."""

HIGHEST_MU = 1_000.0
"""Means farther apart, in standard deviations, count as so far: SciPy's t distribution does not go on for ever."""


@dataclass(frozen=True)
class Attempt:
    """Guesses about so many canaries, and the lower bound on ε that they give, of the corrected confidence."""

    guesses: int
    correct: int
    epsilon: float


@dataclass(frozen=True)
class Audit(Tabular):
    """The guesses about canaries, and the lower bound that they give.

    Attributes
    ----------
    attempts
        By number of guesses.
    canaries
        How many could have been guessed.
    delta, confidence
        δ, and the probability that :attr:`epsilon` is no more than the true ε.
    """

    attempts: tuple[Attempt, ...]
    canaries: int
    delta: float
    confidence: float

    @property
    def best(self) -> Attempt:
        """The attempt with the highest bound; of equal ones that with the fewest guesses."""
        return max(self.attempts, key=lambda attempt: attempt.epsilon)

    @property
    def epsilon(self) -> float:
        """The lower bound on ε that the best attempt gives."""
        return self.best.epsilon

    def rows(self) -> list[dict]:
        return [{"guesses": a.guesses, "correct": a.correct, "epsilon at least": a.epsilon} for a in self.attempts]

    def __repr__(self) -> str:
        return (
            f"Audit(ε ≥ {self.epsilon:.4g} at δ={self.delta:g} with {self.confidence:.0%} confidence: "
            f"{self.best.correct} of {self.best.guesses} guesses right, {self.canaries} canaries)"
        )


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How probable so many right guesses are, at most, if the training is (ε, δ)-private.

    With W ~ Binomial(r, e^ε/(1 + e^ε)), v right of r guesses about m canaries (arXiv 2305.08846, Theorem 5.2 and
    Appendix D)::

        P[W ≥ v] + 2·m·δ · max_{1 ≤ i ≤ v} P[v > W ≥ v − i] / i
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    mass = binom.pmf(np.arange(guesses + 1), guesses, accuracy)
    below = mass[:correct][::-1].cumsum()  # P[v > W ≥ v − i] for i = 1 … v
    alpha = (below / np.arange(1, correct + 1)).max(initial=0)
    return min(1.0, float(mass[correct:].sum() + 2 * canaries * delta * alpha))


def epsilon_lower_bound(correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The smallest ε that so many right guesses do not contradict.

    Parameters
    ----------
    correct, guesses, canaries
        v ≤ r ≤ m. Of the m canaries, each took part with probability 1/2, independently; r was fixed beforehand.
    delta
        δ.
    confidence
        The probability that the result is no more than the true ε.

    Raises
    ------
    ValueError
        Bad arguments.
    """
    whole_number("canaries", canaries, 1)
    whole_number("guesses", guesses, 0, canaries, "canaries")
    whole_number("correct", correct, 0, guesses, "guesses")
    number("delta", delta, 0, 1)
    probability("confidence", confidence)

    def excess(epsilon: float) -> float:
        return p_value(correct, guesses, canaries, epsilon, delta) - (1 - confidence)

    # Whatever the weights of its terms, the p-value crosses a level below 1 only once, upwards: the binomial family
    # is totally positive, and the terms' function of W is first below the level and then above.
    if excess(0.0) >= 0:
        return 0.0
    root: Any = brentq(excess, 0.0, HIGHEST_EPSILON)  # only with full_output is it a tuple
    return float(root)


def one_run_audit(scores, included, delta: float, confidence: float = 0.95) -> Audit:
    """Guess "took part" for the highest scores and "did not" for the lowest.

    Several numbers of guesses are tried, each with the confidence that makes all of them hold together (Bonferroni).

    Parameters
    ----------
    scores
        ``(canaries,)``: high for a canary that seems to have taken part.
    included
        ``(canaries,)`` of bool: whether it did, drawn with probability 1/2.
    delta, confidence
        As for :func:`epsilon_lower_bound`.

    Raises
    ------
    ValueError
        Bad arguments.
    """
    scores, included = _one_number_a_canary(scores, included)
    probability("confidence", confidence)
    count = len(scores)
    order = np.random.default_rng(0).permutation(count)  # equal scores tell nothing, in whatever order they come
    ranked = included[order][np.argsort(-scores[order], kind="stable")]
    numbers = sorted({max(1, round(share * count)) for share in GUESSED})
    corrected = 1 - (1 - confidence) / len(numbers)
    attempts = []
    for guesses in numbers:
        lower_half = guesses // 2
        high = ranked[: guesses - lower_half]
        low = ranked[count - lower_half :]
        correct = int(high.sum() + (~low).sum())
        attempts.append(Attempt(guesses, correct, epsilon_lower_bound(correct, guesses, count, delta, corrected)))
    return Audit(tuple(attempts), count, delta, confidence)


@dataclass(frozen=True)
class GaussianAudit(Tabular):
    """How far the scores of those who took part are from the others', and what it says.

    Attributes
    ----------
    mu
        The lower bound on the distance of the two means, in standard deviations of the scores.
    gap, deviation
        That distance, and the (pooled) standard deviation, as they are in the sample.
    canaries
        How many scores there are.
    delta, confidence
        δ, and the probability that :attr:`epsilon` is no more than the true ε.
    """

    mu: float
    gap: float
    deviation: float
    canaries: int
    delta: float
    confidence: float

    @property
    def epsilon(self) -> float:
        """The lower bound on ε: that of normal noise of 1/``mu`` times what a canary moves."""
        return gaussian_epsilon(1 / self.mu, self.delta) if self.mu else 0.0

    def rows(self) -> list[dict]:
        return [
            {
                "canaries": self.canaries,
                "means apart": self.gap,
                "standard deviation": self.deviation,
                "apart at least (standard deviations)": self.mu,
                "epsilon at least": self.epsilon,
            }
        ]

    def __repr__(self) -> str:
        apart = self.gap / self.deviation if self.deviation else math.inf
        return (
            f"GaussianAudit(ε ≥ {self.epsilon:.4g} at δ={self.delta:g} with confidence {self.confidence:.7g}: "
            f"means {apart:.3g} standard deviations apart, at "
            f"least {self.mu:.3g}, {self.canaries} canaries)"
        )


def gaussian_audit(scores, included, delta: float, confidence: float = 0.95) -> GaussianAudit:
    """Compare the scores of canaries that took part with the others', as two samples of normal numbers.

    Of n canaries that took part and m that did not, the difference of the means over its standard error, with the
    pooled variance, has the noncentral t distribution of n + m − 2 degrees of freedom around μ/√(1/n + 1/m). The
    smallest μ that the scores do not contradict is at most the true one with the stated confidence, exactly.

    It assumes that the scores are normal, of one variance, and independent once it is known who took part: so they are
    if the noise is normal with one variance in all directions, and no canary pulls where another is looked for. If
    canaries pull unequally, the bound is lower still. Where noise is not normal, it proves nothing.

    Parameters
    ----------
    scores, included, delta, confidence
        As for :func:`one_run_audit`.

    Raises
    ------
    ValueError
        Bad arguments, or less than two canaries that took part, or that did not.
    """
    scores, included = _one_number_a_canary(scores, included)
    number("delta", delta, 0, 1, open_low=True)
    probability("confidence", confidence)
    inside = scores[included]
    outside = scores[~included]
    if min(len(inside), len(outside)) < 2:
        raise ValueError(f"two canaries must take part and two not, got {len(inside)} and {len(outside)}")
    freedom = len(scores) - 2
    with np.errstate(all="ignore"):
        gap = float(inside.mean() - outside.mean())
        squares = inside.var() * len(inside) + outside.var() * len(outside)
        deviation = math.sqrt(squares / freedom)
    if not math.isfinite(gap + deviation):
        raise ValueError(f"the scores, from {scores.min():g} to {scores.max():g}, have no finite mean and variance")
    unit = math.sqrt(1 / len(inside) + 1 / len(outside))
    apart = 0.0
    if deviation:
        apart = gap / deviation
    elif gap:
        apart = math.copysign(math.inf, gap)
    statistic = min(apart, HIGHEST_MU) / unit  # a smaller one contradicts less

    def excess(mu: float) -> float:
        return float(nct.sf(statistic, freedom, mu / unit)) - (1 - confidence)

    mu: Any = 0.0
    if excess(0.0) < 0:
        high = statistic * unit
        while excess(high) < 0:
            high *= 2
        mu = brentq(excess, 0.0, high)
    return GaussianAudit(float(mu), gap, deviation, len(scores), delta, confidence)


def _one_number_a_canary(scores, included) -> tuple[np.ndarray, np.ndarray]:
    scores = np.asarray(scores, dtype=float)
    included = np.asarray(included)
    if scores.ndim != 1 or len(scores) == 0 or scores.shape != included.shape:
        raise ValueError(f"scores and included must be one number a canary, got {scores.shape} and {included.shape}")
    if np.isnan(scores).any():
        raise ValueError(f"the score of canary {int(np.isnan(scores).argmax())} is not a number")
    if included.dtype != bool:
        raise ValueError(f"included must be True or False for each canary, got {included.dtype}")
    return scores, included


def canary_audit(
    step: Callable[..., Update],
    batch,
    max_grad_norm: float,
    noise_multiplier: float,
    delta: float,
    seed: int,
    *,
    confidence: float = 0.95,
    direction: Callable[..., Update] | None = None,
    bound: Callable = one_run_audit,
) -> Any:
    """Audit one step of a training, as one who sees the noisy update and knows the canaries.

    Parameters
    ----------
    step
        ``step(batch)`` gives the update before noise. It is called once with the canaries that take part.
    batch
        The canaries. They are told apart best if their gradients are orthogonal.
    max_grad_norm, noise_multiplier
        C and σ: normal noise of standard deviation σ·C is added to every number of the update.
    delta, confidence
        As for :func:`epsilon_lower_bound`.
    seed
        Decides who takes part, and the noise.
    direction
        ``direction(batch)`` gives, for a batch of one canary, where it moves the update; its length does not count.
        By default ``step``. A canary's score is the noisy update's component in that direction.
    bound
        The bound that is made of the scores: :func:`one_run_audit`, or :func:`gaussian_audit` for orthogonal canaries.

    Returns
    -------
    What ``bound`` makes: an :class:`Audit` or a :class:`GaussianAudit`.

    Raises
    ------
    ValueError
        Bad arguments.
    """
    number("max_grad_norm", max_grad_norm, open_low=True)
    number("noise_multiplier", noise_multiplier)
    whole_number("seed", seed, 0)
    count = batch_size(batch)
    whole_number("the number of canaries", count, 1)
    generator = torch.Generator().manual_seed(seed)
    included = torch.rand(count, generator=generator) < 1 / 2
    update = as_vector(step(examples(batch, included)))
    noise = torch.randn(len(update), generator=generator, dtype=update.dtype)
    update = update + noise_multiplier * max_grad_norm * noise.to(update.device)
    scores = np.empty(count)
    pull_of = direction or step
    for place in range(count):
        pull = as_vector(pull_of(examples(batch, slice(place, place + 1))))
        scores[place] = update @ torch.nn.functional.normalize(pull, dim=0)
    return bound(scores, included.numpy(), delta, confidence)
