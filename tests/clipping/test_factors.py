"""Norms and sums of outer products against the gradients themselves."""

import pytest
import torch

from plpkg.clipping import factors
from plpkg.clipping.factors import Outer

from rounding import assert_as_exact, assert_close


def outer(batch=3, groups=1, positions=5, rows=4, cols=6, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(batch, groups, positions, rows, generator=generator, dtype=dtype)
    c = torch.randn(batch, groups, positions, cols, generator=generator, dtype=dtype)
    return Outer(r, c, torch.Size((groups * rows, cols)))


def table(batch=3, positions=5, rows=4, cols=6, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (batch, positions), generator=generator)
    c = torch.randn(batch, 1, positions, cols, generator=generator, dtype=torch.float64)
    return Outer(ids, c, torch.Size((rows, cols)))


def by_hand(use):
    rows = torch.nn.functional.one_hot(use.rows, use.num_rows).double()[:, None] if use.one_hot else use.rows
    return torch.einsum("bgtr,bgtc->bgrc", rows, use.cols).reshape(-1, *use.shape)


def in_dtype(use, dtype):
    return Outer(use.rows.to(dtype), use.cols.to(dtype), use.shape)


def absolute(use):
    return Outer(use.rows if use.one_hot else use.rows.abs(), use.cols.abs(), use.shape)


def rounding(*uses):
    """Terms of a squared norm (or an inner product) by either rule, and an example's sum of their absolute values."""
    positions, size = sum(use.positions for use in uses), sum(by_hand(absolute(use)) for use in uses)
    return dict(terms=positions**2 + size[0].numel(), size=size.flatten(1).square().sum(1))


USES = {
    "matrix": [outer()],
    "one position": [outer(positions=1)],
    "groups": [outer(groups=2)],
    "one position in groups": [outer(groups=2, positions=1)],
    "embedding": [table(positions=9)],
    "used twice": [outer(), outer(positions=3, seed=1)],
    "embedding used twice": [table(), table(positions=7, seed=1)],
    "tied": [table(), outer(seed=1)],
    "tied, everything twice": [table(), outer(seed=1), table(positions=2, seed=2), outer(positions=1, seed=3)],
}


@pytest.mark.parametrize("name", USES)
def test_norms_and_sums_are_those_of_the_gradients(name):
    uses = USES[name]
    gradient = sum(by_hand(use) for use in uses)
    positions = sum(use.positions for use in uses)
    assert_close(factors.instantiate(uses), gradient, terms=positions)
    for rule in ("gram", "instantiate"):
        assert_close(factors.norms_squared(uses, rule), gradient.flatten(1).square().sum(1), **rounding(*uses))
    weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    total = sum(use.weighted_sum(weights) for use in uses)
    assert_close(total, torch.tensordot(weights, gradient, dims=1), terms=len(weights) * positions)


def test_inner_products_in_both_orders():
    for one, other in ((table(), outer(seed=1)), (outer(), outer(seed=1)), (table(), table(seed=1))):
        wanted = (by_hand(one) * by_hand(other)).flatten(1).sum(1)
        for product, mass in (one.inner(other), other.inner(one)):
            assert_close(product, wanted, **rounding(one, other))
            assert (mass >= product.abs()).all()


@pytest.mark.parametrize("name", ["matrix", "embedding", "tied", "groups"])
@pytest.mark.parametrize("rule", ["gram", "instantiate"])
def test_chunks_change_nothing(name, rule, monkeypatch):
    whole = factors.norms_squared(USES[name], rule)
    monkeypatch.setattr(factors, "CHUNK_BYTES", 1)
    assert_close(factors.norms_squared(USES[name], rule), whole, **rounding(*USES[name]))


def cancelling():
    """Columns that add up to nearly nothing over equal rows: the first example's gradient is all rounding for gram.

    In any order: beside the squares of ±2¹⁵ float32 has no room for the products of what is left.
    """
    use = outer(positions=16, dtype=torch.float32)
    use.rows[0] = use.cols[0] = 1
    use.cols[0, :, :, 0] = 2.0**15 * (-1.0) ** torch.arange(16)
    return use


def test_gram_notices_when_it_cancels():
    use = cancelling()
    exact, mass = in_dtype(use, torch.float64).norms_squared("gram")
    careful, (forced, _) = factors.norms_squared([use], "gram"), use.norms_squared("gram")
    assert exact[0] == 4 * 5 * 16**2
    assert_close(careful[0], exact[0], terms=4 * 6)  # each number is exact, their squares are added up
    assert forced[0] == 0
    for norms in (careful, forced):
        assert_close(norms[1:], exact[1:], terms=16**2 + 4 + 6, size=mass[1:])


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0, 3.0])
def test_six_digits_whatever_the_activations_have_in_common(mean):
    use = outer(batch=50, positions=64, rows=32, cols=32, dtype=torch.float32)
    use.rows.add_(mean)
    exact = in_dtype(use, torch.float64).norms_squared("instantiate")[0].sqrt()
    norms = factors.norms_squared([use], "gram").double().sqrt()
    assert ((norms - exact).abs() / exact).max() < 1e-6  # what CANCELLATION promises


def test_half_precision_is_added_up_in_float32():
    use = outer(positions=400, rows=8, cols=8)
    half = in_dtype(use, torch.bfloat16)
    for rule in ("gram", "instantiate"):
        norms = factors.norms_squared([half], rule)
        assert norms.dtype == torch.float32
        single, whole = (in_dtype(half, dtype).norms_squared(rule)[0] for dtype in (torch.float32, torch.float64))
        assert_as_exact(norms / whole, single / whole, torch.ones_like(whole))
    assert half.weighted_sum(torch.ones(3)).dtype == torch.float32


def test_no_samples():
    for use in (outer(batch=0), table(batch=0)):
        for rule in ("gram", "instantiate"):
            assert factors.norms_squared([use], rule).shape == (0,)
        assert torch.equal(use.weighted_sum(torch.zeros(0)), torch.zeros(use.shape, dtype=torch.float64))


def test_a_misspelt_rule_is_refused():
    with pytest.raises(ValueError, match="is not a valid Norm"):
        factors.norms_squared([outer()], "grams")
