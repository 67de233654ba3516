"""The segmented product and its gradients, against a loop over tokens in float64."""

import pytest
import torch

from plpkg.serving.segments import Segments, sgmv

from rounding import assert_close

HIDDEN, OUT = 6, 5
RANKS = (1, 3, 2, 64, 8, 16)
POPULARITY = {
    "distinct": [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 4, 3), (4, 5, 4), (5, 6, 5)],
    "distinct, longer": [(3 * k, 3 * k + 3, k) for k in range(6)],
    "distinct, not from the first": [(2, 4, 2), (4, 6, 3), (6, 8, 4)],
    "uniform": [(0, 2, 0), (2, 5, 3), (5, 6, 1), (6, 10, 5)],
    "skewed": [(0, 9, 2), (9, 10, 0), (10, 12, 4)],
    "identical": [(0, 7, 1)],
    "one, and all others": [(0, 1, 0), (1, 9, 1)],
    "empty": [(0, 0, 0), (0, 2, 1), (2, 2, 2)],
    "nobody": [(0, 4, None), (4, 6, None)],
    "the backbone between": [(0, 2, None), (2, 4, 0), (4, 6, None), (6, 8, 1), (9, 11, 2)],
    "the backbone first": [(0, 2, None), (2, 4, 0), (4, 6, 1), (6, 9, None)],
    "one in two segments": [(0, 2, 1), (2, 4, 0), (4, 6, 1)],
    "not in order": [(0, 2, 1), (2, 4, 0)],
    "mixed up": [(2 * k, 2 * k + 2, index) for k, index in enumerate([4, 0, 5, 2, 1, 3])],
}
EITHER = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def factors(stacked, dtype=torch.float64):
    ranks = (4,) * len(RANKS) if stacked else RANKS
    downs = [normal(rank, HIDDEN, seed=k, dtype=dtype) for k, rank in enumerate(ranks)]
    ups = [normal(OUT, rank, seed=10 + k, dtype=dtype) for k, rank in enumerate(ranks)]
    scales = [8 / rank**0.5 if k % 2 else 8 / rank for k, rank in enumerate(ranks)]  # rsLoRA, LoRA
    return (torch.stack(downs), torch.stack(ups), scales) if stacked else (downs, ups, scales)


def loop(x, downs, ups, scales, segments, absolute=False):
    """Token by token in float64; with ``absolute``, the sum of the terms' sizes."""
    y = torch.zeros(len(x), OUT, dtype=torch.float64)
    for start, stop, index in segments:
        for token in range(start, stop if index is not None else start):
            a, b, row = (each.double() for each in (downs[index], ups[index], x[token]))
            y[token] = scales[index] * (b.abs() @ (a.abs() @ row.abs()) if absolute else b @ (a @ row))
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@EITHER
@pytest.mark.parametrize("popularity", POPULARITY)
def test_it_is_the_loop_over_tokens(popularity, stacked, dtype):
    segments, (downs, ups, scales) = POPULARITY[popularity], factors(stacked, dtype)
    x = normal(20, HIDDEN, seed=99, dtype=dtype)
    # The terms of both sums, and a rounding each of the middle, of the scale's product and of the result.
    terms = HIDDEN + max(len(down) for down in downs) + 3
    size = loop(x, downs, ups, scales, segments, absolute=True).clamp(min=torch.finfo(dtype).tiny)
    assert_close(sgmv(x, downs, ups, scales, segments), loop(x, downs, ups, scales, segments), terms, size)


@EITHER
@pytest.mark.parametrize("popularity", POPULARITY)
def test_gradients(popularity, stacked):
    segments, (downs, ups, scales) = POPULARITY[popularity], factors(stacked)
    leaves = [downs, ups] if stacked else [*(down[:3] for down in downs), *(up[:, :3] for up in ups)]
    leaves = [normal(max(stop for _, stop, _ in segments) + 1, HIDDEN, seed=7), *leaves]
    count = len(downs)
    split = (lambda a: a) if stacked else (lambda a: (a[:count], a[count:]))
    assert torch.autograd.gradcheck(
        lambda x, *a: sgmv(x, *split(a), scales, segments), [leaf.clone().requires_grad_() for leaf in leaves]
    )


@EITHER
@pytest.mark.parametrize("popularity", ["distinct, longer", "uniform", "the backbone between"])
def test_another_adapter_s_weights_are_not_seen(popularity, stacked):
    segments, (downs, ups, scales) = POPULARITY[popularity], factors(stacked, torch.float32)
    x = normal(20, HIDDEN, dtype=torch.float32)
    before = sgmv(x, downs, ups, scales, segments)
    downs[1].mul_(float("inf"))
    after, rows = sgmv(x, downs, ups, scales, segments), torch.ones(20, dtype=torch.bool)
    start, stop, _ = next(segment for segment in segments if segment[2] == 1)
    rows[start:stop] = False
    assert torch.equal(after[rows], before[rows])
    assert not after[~rows].isfinite().any()


@EITHER
def test_b_of_zero_adds_exactly_nothing(stacked):
    downs, ups, scales = factors(stacked, torch.float32)
    ups = torch.zeros_like(ups) if stacked else [torch.zeros_like(up) for up in ups]
    assert not sgmv(normal(18, HIDDEN, dtype=torch.float32), downs, ups, scales, POPULARITY["distinct, longer"]).any()


@pytest.mark.parametrize(
    ("popularity", "blocks"),
    [
        ("distinct, longer", [(0, 18, 0, 6, 3)]),
        ("distinct, not from the first", [(2, 8, 2, 5, 2)]),
        ("the backbone first", [(2, 6, 0, 2, 2)]),
        ("the backbone between", [(2, 4, 0, 1, 2), (6, 8, 1, 2, 2), (9, 11, 2, 3, 2)]),
        ("not in order", [(0, 2, 1, 2, 2), (2, 4, 0, 1, 2)]),
        ("uniform", [(0, 2, 0, 1, 2), (2, 5, 3, 4, 3), (5, 6, 1, 2, 1), (6, 10, 5, 6, 4)]),
        ("empty", [(0, 2, 1, 2, 2)]),
        ("nobody", []),
    ],
)
def test_what_is_one_batched_product(popularity, blocks):
    expected = [(slice(a, b), slice(i, j), length) for a, b, i, j, length in blocks]
    assert Segments(POPULARITY[popularity]).blocks == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(segments=[(0, 3, 0), (2, 4, 1)]), r"segment \(2, 4, 1\) does not fit 20 tokens.* 6 adapters"),
        (dict(segments=[(2, 1, 0)]), r"segment \(2, 1, 0\)"),
        (dict(segments=[(-1, 1, 0)]), r"segment \(-1, 1, 0\)"),
        (dict(segments=[(0, 21, 0)]), r"segment \(0, 21, 0\) does not fit 20"),
        (dict(segments=[(0, 1, 6)]), r"segment \(0, 1, 6\) does not fit .* 6 adapters"),
        (dict(segments=[(0, 1, -1)]), r"segment \(0, 1, -1\)"),
        (dict(scales=[1.0]), "of one length, got 6, 6, 1"),
        (dict(downs=[], ups=[], scales=[]), "of one length, got 0, 0, 0"),
        (dict(downs=[normal(4, HIDDEN + 1)] * 6), r"adapter 0 must .* 6\) .*got \(4, 7\) and"),
        (dict(ups=[normal(OUT, 1), normal(OUT, 2)] * 3), r"adapter 1 must .*got \(3, 6\) and \(5, 2\)"),
        (dict(ups=[normal(OUT, 1), normal(OUT + 1, 3)] * 3), r"adapter 1 must .*\(5, rank\), got .* \(6, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    downs, ups, scales = factors(False)
    arguments = dict(downs=downs, ups=ups, scales=scales, segments=[(0, 1, 0)]) | change
    with pytest.raises(ValueError, match=message):
        sgmv(normal(20, HIDDEN), **arguments)
