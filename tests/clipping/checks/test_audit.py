"""The audit: the theorem beside brute force, validity where there is no signal and where there is, and its power."""

import itertools
import math
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import beta, binomtest, norm

from plpkg.clipping.checks.audit import (
    HIGHEST_EPSILON,
    canary_audit,
    epsilon_lower_bound,
    gaussian_audit,
    gaussian_epsilon,
    one_run_audit,
    p_value,
)

from rounding import STANDARD_ERRORS, sampling_error

DELTA = 1e-5
C = 0.1


def brute_force(correct, guesses, canaries, epsilon, delta):
    """The theorem over all outcomes of the guesses, each counted by itself."""
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    chance = [0.0] * (guesses + 1)
    for outcome in itertools.product([0, 1], repeat=guesses):
        chance[sum(outcome)] += math.prod(right if hit else 1 - right for hit in outcome)
    reached = sum(chance[correct:])
    nearly = [sum(chance[correct - i : correct]) / i for i in range(1, correct + 1)]
    return min(1.0, reached + 2 * canaries * delta * max(nearly, default=0.0))


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
def test_the_p_value_by_brute_force(epsilon, delta):
    for guesses in (0, 1, 4, 9):
        for correct in range(guesses + 1):
            wanted = brute_force(correct, guesses, 12, epsilon, delta)
            assert p_value(correct, guesses, 12, epsilon, delta) == pytest.approx(wanted)


@pytest.mark.parametrize(("correct", "guesses"), [(60, 60), (80, 100), (600, 1000), (7, 9)])
def test_without_delta_it_is_clopper_and_pearson_s_interval(correct, guesses):
    lowest = beta.ppf(0.05, correct, guesses - correct + 1)
    wanted = max(0.0, math.log(lowest / (1 - lowest)))
    assert epsilon_lower_bound(correct, guesses, guesses, 0.0) == pytest.approx(wanted)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3, 0.02])
def test_the_bound_is_where_the_p_value_crosses_and_it_does_so_once(delta):
    bound = epsilon_lower_bound(190, 200, 1000, delta)
    grid = np.linspace(0, 8, 400)
    contradicted = np.array([p_value(190, 200, 1000, epsilon, delta) < 0.05 for epsilon in grid])
    np.testing.assert_array_equal(contradicted, grid < bound)
    assert (bound > 1) == (delta < 0.02)


def test_more_right_guesses_say_more_and_delta_says_less():
    bounds = [epsilon_lower_bound(correct, 100, 1000, DELTA) for correct in range(101)]
    assert bounds == sorted(bounds)
    assert bounds[0] == bounds[50] == 0
    assert bounds[100] > bounds[90] > 1
    assert epsilon_lower_bound(95, 100, 1000, 1e-3) < epsilon_lower_bound(95, 100, 1000, DELTA)
    assert epsilon_lower_bound(95, 100, 1000, DELTA, 0.999) < epsilon_lower_bound(95, 100, 1000, DELTA)
    assert epsilon_lower_bound(9, 9, 9, 0.0, confidence=1e-300) == HIGHEST_EPSILON  # no confidence: the ceiling


def test_the_guesses_are_the_extremes():
    scores = np.arange(100.0)
    included = scores >= 50
    audit = one_run_audit(scores, included, DELTA)
    assert [attempt.guesses for attempt in audit.attempts] == [1, 2, 5, 10, 20, 50, 100]
    assert all(attempt.correct == attempt.guesses for attempt in audit.attempts)
    assert audit.best.guesses == audit.best.correct == 100
    corrected = 1 - 0.05 / 7
    assert audit.epsilon == epsilon_lower_bound(100, 100, 100, DELTA, corrected)
    wrong = one_run_audit(-scores, included, DELTA)
    assert wrong.best.correct == 0
    assert wrong.epsilon == 0
    mixed = np.where(scores < 5, True, included)  # the five lowest took part
    assert [a.correct for a in one_run_audit(scores, mixed, DELTA).attempts] == [1, 1, 3, 5, 15, 45, 95]


def over_seeds(runs, audit):
    """What an audit gives with each of so many generators."""
    return np.array([audit(np.random.default_rng(seed)) for seed in range(runs)])


def assert_seldom(wrong, alternative="greater"):
    """At 95 % confidence: no more often than in one of twenty runs, by the binomial distribution itself."""
    assert binomtest(int(sum(wrong)), len(wrong), 0.05, alternative).pvalue > norm.sf(STANDARD_ERRORS)


def test_without_a_signal_there_is_no_bound():
    def audit(rng):
        return one_run_audit(rng.normal(size=100), rng.random(100) < 0.5, DELTA).epsilon

    assert_seldom(over_seeds(200, audit) > 0)
    for included in (np.arange(50) % 2 == 0, np.arange(50) < 25, np.arange(50) >= 25):
        assert one_run_audit(np.zeros(50), included, DELTA).epsilon == 0


@pytest.mark.parametrize(("epsilon", "mean", "deviation"), [(0.5, 0.207, 0.126), (2.0, 1.509, 0.181)])
def test_randomised_response_is_not_overestimated(epsilon, mean, deviation):
    """The mechanism that the theorem calls the worst: each bit is right with probability e^ε/(1 + e^ε).

    Mean and deviation of a bound are those of 20,000 other seeds.
    """

    def audit(rng):
        included = rng.random(300) < 0.5
        answers = included ^ (rng.random(300) > 1 / (1 + math.exp(-epsilon)))
        return one_run_audit(answers + rng.random(300) / 2, included, 0.0).epsilon

    bounds = over_seeds(100, audit)
    assert_seldom(bounds > epsilon)
    assert np.mean(bounds) == pytest.approx(mean, abs=sampling_error(deviation**2, 100))


POWER = {100: (0.601, 0.298), 400: (1.199, 0.260), 1_000: (1.530, 0.235), 10_000: (2.050, 0.124)}
"""By number of canaries: mean and deviation of a Gaussian mechanism's bound, of 20,000 other seeds (1,000 the last)."""


def assert_power(canaries, bounds):
    mean, deviation = POWER[canaries]
    assert np.mean(bounds) == pytest.approx(mean, abs=sampling_error(deviation**2, len(bounds)))
    assert max(bounds) < gaussian_epsilon(1.0, DELTA)


@pytest.mark.parametrize("canaries", POWER)
def test_the_power_on_a_gaussian_mechanism(canaries):
    def audit(rng):
        included = rng.random(canaries) < 0.5
        return one_run_audit(included + rng.normal(size=canaries), included, DELTA).epsilon

    assert_power(canaries, over_seeds(20, audit))


def clipped_sum(rows):
    return C * torch.nn.functional.normalize(rows, dim=1).sum(0)


def audited(step=clipped_sum, canaries=300, seed=0, *, sigma=1.0, **options):
    """The audit of a step of orthogonal canaries."""
    return canary_audit(step, torch.eye(canaries), C, sigma, DELTA, seed, **options)


def test_canaries_in_a_training_step():
    step = Mock(side_effect=lambda rows: {"weight": clipped_sum(rows)})
    audit = audited(step, 400, 3)
    first, *rest = [len(call.args[0]) for call in step.call_args_list]
    assert first / 400 == pytest.approx(1 / 2, abs=sampling_error(1 / 4, 400))
    assert rest == [1] * 400
    assert audit == audited(step, 400, 3)
    audits = [audit, *(audited(step, 400, seed) for seed in range(4, 12))]
    assert len(set(audits)) > 1
    assert_power(400, [audit.epsilon for audit in audits])


def test_a_direction_has_no_length():
    step = Mock(side_effect=clipped_sum)
    lengths = torch.rand(300, generator=torch.Generator().manual_seed(0)) + 0.1
    given = canary_audit(step, torch.eye(300) * lengths[:, None], C, 1.0, DELTA, 0, direction=lambda rows: rows.sum(0))
    step.assert_called_once()
    assert given == audited()


def test_the_noise_is_sigma_times_c():
    """Scaling both changes nothing; without noise each guess is right; with much of it there is nothing to see."""
    larger = canary_audit(lambda rows: 1024 * clipped_sum(rows), torch.eye(300), 1024 * C, 1.0, DELTA, 0)
    assert larger == audited()
    little, more = (sum(audited(seed=seed, sigma=sigma).epsilon for seed in range(8)) for sigma in (1, 2))
    assert little > more
    assert audited(sigma=20.0, confidence=1 - 1e-6).epsilon == 0
    silent = audited(sigma=0.0)
    assert silent.attempts[-2].correct == silent.attempts[-2].guesses == 150
    assert silent.epsilon > 3


def test_the_noise_is_in_every_coordinate_with_its_deviation():
    """Scored by a coordinate each, canaries that do nothing show the noise."""
    seen, axes = [], iter(torch.eye(500))

    def spy(scores, included, *rest):
        seen.extend(scores)
        return one_run_audit(scores, included, *rest)

    canary_audit(
        lambda rows: torch.zeros(500), torch.eye(500), 0.5, 3.0, DELTA, 0, direction=lambda rows: next(axes), bound=spy
    )
    assert np.mean(seen) == pytest.approx(0, abs=sampling_error(1.5**2, 500))
    assert np.std(seen) == pytest.approx(1.5, rel=sampling_error(1 / 2, 500))


@pytest.mark.parametrize(("canaries", "pull"), [(20, 0.0), (20, 1.0), (300, 1.0), (300, 3.0)])
def test_the_gaussian_audit_is_right_as_often_as_it_says(canaries, pull):
    """Exactly, at any number of canaries: above the true distance in one of twenty runs, neither more nor fewer."""

    def audit(rng):
        included = rng.permutation(canaries) < canaries // 3
        return gaussian_audit(5 + 2 * (pull * included + rng.normal(size=canaries)), included, DELTA).mu

    assert_seldom(over_seeds(300, audit) > pull, "two-sided")


def test_canaries_that_pull_unequally_are_not_overestimated():
    """The strongest pulls with C, the others with less: the spread among them widens the bound."""

    def audit(rng):
        included, pull = rng.random(300) < 0.5, rng.random(300)
        return gaussian_audit(pull * included + rng.normal(size=300), included, DELTA).mu

    assert max(over_seeds(100, audit)) <= 1


def test_scores_tell_what_guesses_do_not():
    """Three times the sensitivity, under a claim of 4.38."""
    claimed = gaussian_epsilon(1.0, DELTA)
    for seed in range(10):
        guesses, scores = (
            audited(lambda rows: 3 * clipped_sum(rows), 400, seed, bound=bound)
            for bound in (one_run_audit, gaussian_audit)
        )
        assert guesses.epsilon <= claimed < scores.epsilon
        assert scores.gap / scores.deviation == pytest.approx(3, abs=sampling_error(4, 100) * math.sqrt(1 + 9 / 8))


def test_the_gaussian_audit_of_a_correct_step():
    bounds = np.array([audited(canaries=100, seed=seed, bound=gaussian_audit).epsilon for seed in range(100)])
    assert_seldom(bounds > gaussian_epsilon(1.0, DELTA))
    assert np.mean(bounds) > 2


def test_the_gaussian_audit_at_its_ends():
    included = np.arange(10) < 5
    silent = gaussian_audit(included * 1.0, included, DELTA)
    assert 500 < silent.mu < 1e3
    assert silent.mu == pytest.approx(gaussian_audit(included + 1e-9 * np.arange(10), included, DELTA).mu)
    assert gaussian_audit(1.0 - included, included, DELTA).epsilon == 0
    assert gaussian_audit(np.zeros(10), included, DELTA).epsilon == 0
    far = gaussian_audit(included * 1e3 + np.random.default_rng(0).normal(size=10), included, DELTA)
    assert 400 < far.mu < 1e3
    assert repr(gaussian_audit(np.arange(10.0), ~included, DELTA, 0.9)) == (
        "GaussianAudit(ε ≥ 8.752 at δ=1e-05 with confidence 0.9: means 3.16 standard deviations apart, at least 1.79, "
        "10 canaries)"
    )


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_the_epsilon_of_normal_noise_by_integration(sigma, delta):
    """δ is the mass by which one outcome's density exceeds e^ε times the other's."""
    epsilon = gaussian_epsilon(sigma, delta)
    x = np.linspace(-20 * sigma, 20 * sigma + 1, 2_000_001)
    excess = norm.pdf(x, 1, sigma) - math.exp(epsilon) * norm.pdf(x, 0, sigma)
    assert np.trapezoid(excess.clip(min=0), x) == pytest.approx(delta)


def test_the_epsilon_of_normal_noise_at_its_ends():
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.377, abs=5e-4)
    assert gaussian_epsilon(100.0, 0.1) == 0
    assert 200 < gaussian_epsilon(0.05, DELTA) < 400
    assert gaussian_epsilon(1e-10, DELTA) == pytest.approx(5e19)  # 1/2σ², and little more
    assert gaussian_epsilon(1e-300, DELTA) == math.inf


def test_what_an_audit_shows():
    audit = one_run_audit(np.arange(100.0), np.arange(100) >= 50, DELTA)
    assert repr(audit) == (
        f"Audit(ε ≥ {audit.epsilon:.4g} at δ=1e-05 with 95% confidence: 100 of 100 guesses right, 100 canaries)"
    )
    assert audit.rows()[0] == {"guesses": 1, "correct": 1, "epsilon at least": 0.0}
    assert len(audit.to_frame()) == 7


BAD = [
    (lambda: gaussian_audit([math.inf, 0.0] * 2, [True, False] * 2, DELTA), "from 0 to inf, have no finite mean"),
    (lambda: gaussian_audit([1e300, 0.0, 0.0, 0.0], [True, False] * 2, DELTA), "from 0 to 1e+300, have no finite mean"),
    (lambda: epsilon_lower_bound(11, 10, 100, DELTA), "correct must be between 0 and guesses=10, got 11"),
    (lambda: epsilon_lower_bound(8, 101, 100, DELTA), "guesses must be between 0 and canaries=100, got 101"),
    (lambda: epsilon_lower_bound(8, 10, 0, DELTA), "canaries must be a whole number of at least 1, got 0"),
    (lambda: epsilon_lower_bound(8, 10, 100, -0.1), "delta must be at least 0 and at most 1, got -0.1"),
    (lambda: epsilon_lower_bound(8, 10, 100, DELTA, 1.0), "confidence must be less than 1, got 1"),
    (lambda: epsilon_lower_bound(8, 10, 100, DELTA, 0.0), "confidence must be greater than 0 and at most 1, got 0.0"),
    (lambda: one_run_audit([1.0, 2.0], [True], DELTA), "one number a canary, got (2,) and (1,)"),
    (lambda: one_run_audit([], [], DELTA), "one number a canary, got (0,)"),
    (lambda: one_run_audit([1.0, math.nan], [True, False], DELTA), "the score of canary 1 is not a number"),
    (lambda: one_run_audit([1.0, 2.0], [1, 0], DELTA), "included must be True or False for each canary, got int64"),
    (lambda: gaussian_audit(np.zeros(10), np.arange(10) == 0, DELTA),
     "two canaries must take part and two not, got 1 and 9"),
    (lambda: audited(canaries=0), "the number of canaries must be a whole number of at least 1, got 0"),
    (lambda: canary_audit(clipped_sum, torch.eye(5), 0.0, 1.0, DELTA, 0),
     "max_grad_norm must be greater than 0, got 0.0"),
    (lambda: audited(sigma=-1.0), "noise_multiplier must be at least 0, got -1.0"),
    (lambda: audited(seed=-1), "seed must be a whole number of at least 0, got -1"),
    (lambda: canary_audit(clipped_sum, torch.eye(5), C, 1.0, 2.0, 0),
     "delta must be at least 0 and at most 1, got 2.0"),
    (lambda: gaussian_epsilon(0.0, DELTA), "noise_multiplier must be greater than 0, got 0"),
    (lambda: gaussian_epsilon(1.0, 0.0), "delta must be greater than 0 and at most 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_arguments_get_a_sentence(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
