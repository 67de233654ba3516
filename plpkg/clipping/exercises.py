"""The checkers of notebook 05's exercises."""

import tracemalloc
from functools import partial

import torch

from plpkg.clipping.factors import Outer, norms_squared
from plpkg.exercise import Verdict, check_function, check_number
from plpkg.memory import MIB, MemoryTimeline

WIDTHS, POSITIONS = (5, 2), 3
FACTORS = [
    tuple(
        torch.randn(batch, POSITIONS, width, generator=torch.Generator().manual_seed(batch * width)) for width in WIDTHS
    )
    for batch in (4, 5, 6)
]
"""What a layer read, and its output's gradients: ``(batch, positions, d)`` and ``(batch, positions, p)``."""
WIDE = [torch.ones(2, POSITIONS, 512) for _ in range(2)]
"""Few positions of a wide layer: one gradient, a MiB, is far larger than everything that its norm needs."""
close = partial(torch.allclose, rtol=1e-4, atol=1e-6)


def crossover_positions(answer: object) -> Verdict:
    """From how many positions on the Gram matrices of a 768 → 768 layer take more operations than the gradient."""
    return check_number(
        answer,
        expected=384,
        unit="positions",
        tolerance=0.01,
        explanation="2·T²·(p + d) against 2·T·p·d: T = p·d / (p + d) = 768² / 1,536.",
        hints={
            543: "that is the rule of bytes, 2·T² = p·d; operations are asked for.",
            768: "both Gram matrices cost: T² times p and T² times d.",
            192: "a multiply-add counts two operations on both sides.",
        },
        hint="Set T²·(p + d) equal to T·p·d.",
    )


def gram_norm(function: object) -> Verdict:
    """``function(a, g)``: squared norms, ``(batch,)``, of a linear layer's gradient, that of weight and bias together.

    ``a`` ``(batch, positions, d)`` is what the layer read, ``g`` ``(batch, positions, p)`` its output's gradient.
    """

    def squared(a, g, bias: bool = True, crossed: bool = True):
        read = torch.cat([a, torch.ones_like(a[..., :1])], 2) if bias else a  # a bias reads 1 at every position
        if not crossed:
            return (read.square().sum(2) * g.square().sum(2)).sum(1)
        size = torch.Size((g.shape[2], read.shape[2]))
        return norms_squared([Outer(g[:, None], read[:, None], size)], "gram")

    def peak_bytes() -> int:  # of torch's tensors, or of NumPy's arrays
        a, g = (each.clone() for each in WIDE)
        with MemoryTimeline(label_saved=False) as memory:
            function(a, g)
        tracemalloc.start()
        try:
            function(a, g)
            return max(memory.peak_bytes, tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    def hint(got, a, g) -> str:
        if close(got, squared(a, g).sqrt()):
            return "these are the norms, and their squares are asked for"
        if close(got, squared(a, g, bias=False)):
            return "that is the weight alone; a bias is a weight that reads 1 at every position"
        if any(close(got, squared(a, g, bias, crossed=False)) for bias in (True, False)):
            return "every position meets every other one: T × T products, not T"
        return ""

    cases = [(factors, squared(*factors)) for factors in FACTORS]
    explanation = "the Gram matrix of g, times that of a and 1, summed: B·T² numbers, and no gradient."
    verdict = check_function(function, [*cases, (WIDE, squared(*WIDE))], explanation, hint)
    try:
        peak = peak_bytes() if verdict else 0
    except Exception as error:
        return Verdict(False, f"Not yet: the norms are right, but called again it raises {type(error).__name__}")
    if peak >= MIB:
        return Verdict(
            False,
            f"Not yet: the norms are right, but for 512 × 512 weights the function holds {peak / MIB:.1f} MiB at once. "
            "One gradient takes 1 of them: leave it unbuilt, and multiply Gram matrices, T × T each.",
        )
    return verdict


def clipped_sum(function: object) -> Verdict:
    """``function(a, g, norms, C)``: a weight's sum of clipped gradients, ``(p, d)``; ``norms`` are the examples'."""

    def total(a, g, norms, C, weights=None):
        weights = (C / norms).clamp(max=1) if weights is None else weights
        return Outer(g[:, None], a[:, None], torch.Size((g.shape[2], a.shape[2]))).weighted_sum(weights)

    def hint(got, a, g, norms, C) -> str:
        if got.shape[0] == a.shape[2] and close(got.mT, total(a, g, norms, C)):
            return "it is transposed: a weight has a row for each output, (p, d)"
        if close(got, total(a, g, norms, C, C / norms)):
            return "a gradient whose norm is below C stays as it is: c is at most 1"
        if close(got, total(a, g, norms, C, torch.ones(len(a)))):
            return "nothing is clipped"
        if close(got * len(a), total(a, g, norms, C)):
            return "a sum is asked for; what divides it is the expected size of a batch, afterwards"
        if close(got, total(a, g, norms, C, norms)):
            return "gradients are multiplied with c, and not with their norms"
        return ""

    cases = []
    for a, g in FACTORS:
        norms = torch.linspace(0.5, 4.0, len(a))
        cases.append(((a, g, norms, 1.0), total(a, g, norms, 1.0)))
    explanation = "scale each example's g by its c, and one matrix product adds up: no second pass."
    return check_function(function, cases, explanation, hint)
