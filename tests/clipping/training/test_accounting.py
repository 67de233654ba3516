"""ε and noise beside Opacus's accountants, and at their edges."""

import math

import numpy as np
import pytest
import torch
from opacus.accountants import create_accountant

from plpkg.clipping.training.accounting import (
    ROUNDING,
    Mechanism,
    accountant_of,
    epsilon_of,
    gaussian_epsilon,
    noise_for,
    spent,
)

from saddle_point import exact_epsilon

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order is the")  # rdp's advice


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epsilon_is_the_accountant_s_and_the_noise_for_it_is_hardly_too_much(accountant):
    made = create_accountant(accountant)
    for _ in range(20):
        made.step(noise_multiplier=1.1, sample_rate=0.05)
    assert epsilon_of(1.1, 0.05, 20, 1e-5, accountant=accountant) == pytest.approx(made.get_epsilon(delta=1e-5))
    sigma = noise_for(3.0, 1e-5, 0.05, 40, accountant=accountant)
    assert 3.0 - 0.01 <= epsilon_of(sigma, 0.05, 40, 1e-5, accountant=accountant) <= 3.0  # the search's own tolerance


def test_more_noise_and_fewer_steps_spend_less():
    base = epsilon_of(1.0, 0.05, 20, 1e-5)
    assert epsilon_of(1.5, 0.05, 20, 1e-5) < base
    assert epsilon_of(1.0, 0.02, 20, 1e-5) < base
    assert epsilon_of(1.0, 0.05, 10, 1e-5) < base
    assert epsilon_of(1.0, 0.05, 20, 1e-3) < base


def test_edges():
    assert epsilon_of(0.0, 0.1, 1, 1e-5) == math.inf
    assert epsilon_of(1.0, 0.1, 0, 1e-5) == 0
    assert epsilon_of(5.0, 0.1, 10, 0.5) == 0  # the formula alone would go below
    assert 999 < epsilon_of(noise_for(1000.0, 1e-5, 0.1, 20), 0.1, 20, 1e-5) <= 1000
    assert epsilon_of(1e-200, 0.1, 1, 1e-5) == math.inf
    # what the tight accountant has no memory, or no digits, for
    for sigma, delta in ((0.05, 1e-5), (1e-8, 1e-5), (1.0, 1e-15), (1.0, 0.999)):
        assert epsilon_of(sigma, 0.9, 2, delta) == epsilon_of(sigma, 0.9, 2, delta, accountant="rdp") < math.inf


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-14])
def test_where_all_take_part_epsilon_is_that_of_one_release(delta):
    """Steps of normal noise compose to one: twelve of σ = 6 and one of σ = 2 are as good as one of σ = 6 / √21."""
    made = accountant_of("prv", [(6.0, 1.0, 12), (2.0, 1.0, 1)])
    assert spent(made, delta) == pytest.approx(gaussian_epsilon(6 / math.sqrt(21), delta))
    assert spent(accountant_of("rdp", made.history), delta) > spent(made, delta)


@pytest.mark.parametrize(
    ("sample_rate", "noise_multiplier", "steps", "delta"),
    [
        (0.01, 2.0, 100_000, 1e-11),  # where prv's δ is a fifth too small
        (0.01, 2.0, 100_000, 1e-12),
        (0.01, 2.0, 100_000, 2.3e-9),  # and the rule's border: above it
        (0.01, 2.0, 100_000, 2.1e-9),  # and below
        (1 / 300, 4.0, 1_000, 1e-13),
        (0.05, 1.5, 300, 1e-8),
        (0.3, 6.0, 40, 1e-4),
        (0.005, 0.8, 300, 1e-6),
    ],
)
def test_epsilon_is_never_below_the_exact_one(sample_rate, noise_multiplier, steps, delta):
    ours = epsilon_of(noise_multiplier, sample_rate, steps, delta)
    exact = exact_epsilon(sample_rate, noise_multiplier, steps, delta, near=ours)
    assert 0 < exact <= ours
    if steps * ROUNDING <= delta / 100:
        assert ours - exact < 0.02  # prv's own error, on both sides of its estimate
    else:
        assert ours == epsilon_of(noise_multiplier, sample_rate, steps, delta, accountant="rdp")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epsilon_of(-1.0, 0.1, 1, 1e-5), "noise_multiplier must be at least 0, got -1.0"),
        (
            lambda: epsilon_of(np.ones(2), 0.1, 1, 1e-5),
            r"noise_multiplier must be at least 0, got array\(\[1\., 1\.\]\)",
        ),
        (lambda: epsilon_of(1.0, 0.0, 1, 1e-5), "sample_rate must be .*, got 0.0"),
        (lambda: epsilon_of(1.0, 1.5, 1, 1e-5), "sample_rate must be .*, got 1.5"),
        (lambda: epsilon_of(1.0, 0.1, -1, 1e-5), "steps must be .*, got -1"),
        (lambda: epsilon_of(1.0, 0.1, 1, 1.0), "delta must be less than 1, got 1.0"),
        (lambda: noise_for(1e-4, 1e-5, 0.1, 20), r"no noise up to 1e\+06 gives target_epsilon=0\.0001"),
        (lambda: noise_for(1.0, 1e-5, 0.1, 20, accountant="gdp"), "accountant must be one of 'prv', 'rdp', got 'gdp'"),
    ],
)
def test_what_makes_no_sense_or_is_out_of_reach(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("given", [np.float32(1.5), torch.tensor(1.5), "schedule"])
def test_what_is_accounted_is_a_float(given):
    sigma = (lambda step: np.float32(1.5)) if given == "schedule" else given
    mechanism = Mechanism("rdp", sigma, 0.1, sigma, "flat")
    for step in (0, 3):
        assert type(mechanism.at(step).max_grad_norm) is float
        assert type(mechanism.at(step).noise_multiplier) is float
