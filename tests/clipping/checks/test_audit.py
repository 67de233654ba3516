"""The audit: the theorem beside brute force, validity where there is no signal and where there is, and its power."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm

from plpkg.clipping.checks.audit import (
    HIGHEST_EPSILON,
    canary_audit,
    epsilon_lower_bound,
    gaussian_audit,
    gaussian_epsilon,
    one_run_audit,
    p_value,
)

from rounding import sampling_error

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


def test_without_a_signal_there_is_no_bound():
    above, runs = 0, 1_000
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        above += one_run_audit(generator.normal(size=100), generator.random(100) < 0.5, DELTA).epsilon > 0
    assert above / runs <= 0.05 + sampling_error(0.05 * 0.95, runs)  # at 95 % confidence
    assert one_run_audit(np.zeros(50), np.arange(50) % 2 == 0, DELTA).epsilon == 0


@pytest.mark.parametrize(("epsilon", "mean", "deviation"), [(0.5, 0.207, 0.126), (2.0, 1.509, 0.181)])
def test_randomised_response_is_not_overestimated(epsilon, mean, deviation):
    """The mechanism that the theorem calls the worst: each bit is right with probability e^ε/(1 + e^ε).

    Mean and deviation of a bound are those of 20,000 other seeds.
    """
    bounds, runs = [], 100
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        included = generator.random(300) < 0.5
        answers = included ^ (generator.random(300) > 1 / (1 + math.exp(-epsilon)))
        bounds.append(one_run_audit(answers + generator.random(300) / 2, included, 0.0).epsilon)
    assert np.mean(np.array(bounds) > epsilon) <= 0.05 + sampling_error(0.05 * 0.95, runs)
    assert np.mean(bounds) == pytest.approx(mean, abs=sampling_error(deviation**2, runs))


POWER = {100: (0.601, 0.298), 400: (1.199, 0.260), 1_000: (1.530, 0.235), 10_000: (2.050, 0.124)}
"""By number of canaries: mean and deviation of a Gaussian mechanism's bound, of 20,000 other seeds (1,000 the last)."""


@pytest.mark.parametrize("canaries", POWER)
def test_the_power_on_a_gaussian_mechanism(canaries):
    true = gaussian_epsilon(1.0, DELTA)
    bounds, runs = [], 20
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        included = generator.random(canaries) < 0.5
        bounds.append(one_run_audit(included + generator.normal(size=canaries), included, DELTA).epsilon)
    mean, deviation = POWER[canaries]
    assert np.mean(bounds) == pytest.approx(mean, abs=sampling_error(deviation**2, runs))
    assert max(bounds) < true


def clipped_sum(rows):
    return C * torch.nn.functional.normalize(rows, dim=1).sum(0)


def test_canaries_in_a_training_step():
    sizes = []

    def step(rows):
        sizes.append(len(rows))
        return {"weight": clipped_sum(rows)}

    audit = canary_audit(step, torch.eye(400), C, 1.0, DELTA, 3)
    assert sizes[0] / 400 == pytest.approx(1 / 2, abs=sampling_error(1 / 4, 400))
    assert sizes[1:] == [1] * 400
    assert audit == canary_audit(step, torch.eye(400), C, 1.0, DELTA, 3)
    audits = [audit, *(canary_audit(step, torch.eye(400), C, 1.0, DELTA, seed) for seed in range(4, 12))]
    assert len(set(audits)) > 1
    bounds, (mean, deviation) = [audit.epsilon for audit in audits], POWER[400]
    assert np.mean(bounds) == pytest.approx(mean, abs=sampling_error(deviation**2, len(bounds)))
    assert max(bounds) < gaussian_epsilon(1.0, DELTA)


def test_a_direction_has_no_length():
    sizes = []

    def step(rows):
        sizes.append(len(rows))
        return clipped_sum(rows)

    lengths = torch.rand(300, generator=torch.Generator().manual_seed(0)) + 0.1
    given = canary_audit(step, torch.eye(300) * lengths[:, None], C, 1.0, DELTA, 0, direction=lambda rows: rows.sum(0))
    assert len(sizes) == 1
    assert given == canary_audit(step, torch.eye(300), C, 1.0, DELTA, 0)


def test_the_noise_is_sigma_times_c():
    """Scaling both changes nothing; without noise each guess is right; with much of it there is nothing to see."""
    rows = torch.eye(300)
    audit = canary_audit(clipped_sum, rows, C, 1.0, DELTA, 0)
    assert audit == canary_audit(lambda part: 1024 * clipped_sum(part), rows, 1024 * C, 1.0, DELTA, 0)
    little, more = (
        sum(canary_audit(clipped_sum, rows, C, s, DELTA, seed).epsilon for seed in range(8)) for s in (1, 2)
    )
    assert little > more
    assert canary_audit(clipped_sum, rows, C, 20.0, DELTA, 0, confidence=1 - 1e-6).epsilon == 0
    silent = canary_audit(clipped_sum, rows, C, 0.0, DELTA, 0)
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
    above, runs = 0, 1_000
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        included = generator.permutation(canaries) < canaries // 3
        audit = gaussian_audit(5 + 2 * (pull * included + generator.normal(size=canaries)), included, DELTA)
        above += audit.mu > pull
    assert above / runs == pytest.approx(0.05, abs=sampling_error(0.05 * 0.95, runs))


def test_canaries_that_pull_unequally_are_not_overestimated():
    """The strongest pulls with C, the others with less: the spread among them widens the bound."""
    above, runs = 0, 200
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        included, pull = generator.random(300) < 0.5, generator.random(300)
        above += gaussian_audit(pull * included + generator.normal(size=300), included, DELTA).mu > 1
    assert above == 0


def test_scores_tell_what_guesses_do_not():
    """Three times the sensitivity, under a claim of 4.38."""
    claimed, missed = gaussian_epsilon(1.0, DELTA), 0
    for seed in range(10):
        guesses, scores = (
            canary_audit(lambda rows: 3 * clipped_sum(rows), torch.eye(400), C, 1.0, DELTA, seed, bound=bound)
            for bound in (one_run_audit, gaussian_audit)
        )
        missed += guesses.epsilon <= claimed
        assert claimed < scores.epsilon
        assert scores.gap / scores.deviation == pytest.approx(3, abs=sampling_error(4, 100) * math.sqrt(1 + 9 / 8))
    assert missed == 10


def test_the_gaussian_audit_of_a_correct_step():
    """200 seeds: above the true ε no more often than one in twenty."""
    true, runs = gaussian_epsilon(1.0, DELTA), 200
    bounds = [
        canary_audit(clipped_sum, torch.eye(100), C, 1.0, DELTA, seed, bound=gaussian_audit).epsilon
        for seed in range(runs)
    ]
    assert np.mean(np.array(bounds) > true) <= 0.05 + sampling_error(0.05 * 0.95, runs)
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
    with pytest.raises(ValueError, match="two canaries must take part and two not, got 1 and 9"):
        gaussian_audit(np.zeros(10), np.arange(10) == 0, DELTA)


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


def test_what_an_audit_shows():
    audit = one_run_audit(np.arange(100.0), np.arange(100) >= 50, DELTA)
    assert repr(audit) == (
        f"Audit(ε ≥ {audit.epsilon:.4g} at δ=1e-05 with 95% confidence: 100 of 100 guesses right, 100 canaries)"
    )
    assert audit.rows()[0] == {"guesses": 1, "correct": 1, "epsilon at least": 0.0}
    assert len(audit.to_frame()) == 7


GOOD = dict(correct=8, guesses=10, canaries=100, delta=DELTA, confidence=0.95)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correct": 11}, "correct must be between 0 and guesses=10, got 11"),
        ({"guesses": 101}, "guesses must be between 0 and canaries=100, got 101"),
        ({"canaries": 0}, "canaries must be a whole number of at least 1, got 0"),
        ({"delta": -0.1}, "delta must be at least 0 and at most 1, got -0.1"),
        ({"confidence": 1.0}, "confidence must be less than 1, got 1"),
        ({"confidence": 0.0}, "confidence must be greater than 0 and at most 1, got 0.0"),
    ],
)
def test_bad_counts(change, message):
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bound(**(GOOD | change))


@pytest.mark.parametrize(
    ("scores", "included", "message"),
    [
        ([1.0, 2.0], [True], r"one number a canary, got \(2,\) and \(1,\)"),
        ([], [], r"one number a canary, got \(0,\)"),
        ([1.0, math.nan], [True, False], "the score of canary 1 is not a number"),
        ([1.0, 2.0], [1, 0], "included must be True or False for each canary, got int64"),
    ],
)
def test_bad_scores(scores, included, message):
    with pytest.raises(ValueError, match=message):
        one_run_audit(scores, included, DELTA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": torch.eye(0)}, "the number of canaries must be a whole number of at least 1, got 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be greater than 0, got 0.0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0, got -1.0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"delta": 2.0}, "delta must be at least 0 and at most 1, got 2.0"),
    ],
)
def test_bad_audits(change, message):
    good = dict(step=clipped_sum, batch=torch.eye(5), max_grad_norm=C, noise_multiplier=1.0, delta=DELTA, seed=0)
    with pytest.raises(ValueError, match=message):
        canary_audit(**(good | change))


def test_bad_noise():
    with pytest.raises(ValueError, match="noise_multiplier must be greater than 0, got 0"):
        gaussian_epsilon(0.0, DELTA)
    with pytest.raises(ValueError, match="delta must be greater than 0 and at most 1, got 0"):
        gaussian_epsilon(1.0, 0.0)
