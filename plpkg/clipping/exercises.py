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

    def squared(a, g):
        read = torch.cat([a, torch.ones_like(a[..., :1])], 2)  # a bias reads 1 at every position
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
        gram_g, gram_a = g @ g.mT, a @ a.mT
        weight, bias = (gram_g * gram_a).sum((1, 2)), gram_g.sum((1, 2))
        bias_alone = g.square().sum((1, 2))  # each position alone, without those that it meets
        weight_alone = (g.square().sum(2) * a.square().sum(2)).sum(1)
        crossed = "every position meets every other one: T × T products, not T"
        entries = "the two Gram matrices are multiplied entry by entry, and then added up"
        known = (
            ((weight + bias).sqrt(), "these are the norms, and their squares are asked for"),
            (weight.sqrt() + bias.sqrt(), "squares of norms add up, and not the norms"),
            (weight, "that is the weight alone; a bias is a weight that reads 1 at every position"),
            (bias, "that is the bias alone"),
            (weight + bias_alone, "a bias's gradient is the sum of g over the positions: T × T products, not T"),
            *((weight_alone + more, crossed) for more in (0, bias, bias_alone)),
            (weight + a.shape[1] ** 2, "the bias's 1 is multiplied with g as well: add it to the products of a"),
            *(((gram_g @ gram).sum((1, 2)), entries) for gram in (gram_a, gram_a + 1)),
            *((bias * (gram_a.sum((1, 2)) + more), entries) for more in (0, 1, a.shape[1] ** 2)),
        )
        return next((reason for wrong, reason in known if close(got, wrong)), "")

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
        if any(close(got * count, total(a, g, norms, C)) for count in (len(a), a.shape[1], len(a) * a.shape[1])):
            return "a sum is asked for; what divides it is the expected size of a batch, afterwards"
        inverted = "c is C over the norm, and not the norm over C"
        known = (
            (C / norms, "a gradient whose norm is below C stays as it is: c is at most 1"),
            (torch.ones(len(a)), "nothing is clipped"),
            (norms, "gradients are multiplied with c, and not with their norms"),
            *((wrong, inverted) for wrong in (norms / C, (norms / C).clamp(max=1), (norms / C).clamp(min=1))),
            ((C / norms).clamp(min=1), "c is the smaller of 1 and C over the norm, not the larger"),
            ((1 / norms).clamp(max=1), "a clipped gradient has the norm C, and not 1"),
            ((C / norms).clamp(max=1).square(), "c counts once: scale g or a, not both"),
            *(((C / norms**power).clamp(max=1), "norms are no squares, and need no root") for power in (0.5, 2)),
        )
        for weights, reason in known:
            if close(got, total(a, g, norms, C, weights)):
                return reason
        gradients = torch.einsum("btp,btd->bpd", g, a)
        if close(got, gradients * (C / norms).clamp(max=1)[:, None, None]):
            return "these are the examples' clipped gradients: add them up"
        if close(got, total(a, g, norms, C, (C / gradients.flatten(1).norm(dim=1)).clamp(max=1))):
            return "norms are the examples' over the whole model, and not this layer's alone"
        if close(got, total(a.sum(1, True), g.sum(1, True), norms, C)):
            return "each position's g meets its own a; only their products are added up"
        unclipped = gradients.sum(0)
        if close(got, gradients.clamp(-C, C).sum(0)) or close(got, unclipped.clamp(-C, C)):
            return "a gradient is made shorter as a whole, by one factor; its entries are not cut one by one"
        factor = (got * unclipped).sum() / unclipped.square().sum()
        if factor > 0.01 and close(got, factor * unclipped):
            return "that is one factor for the whole sum; clip each example's gradient by its own c, then add"
        return ""

    cases = []
    for (a, g), C in zip(FACTORS, (2.0, 1.5, 1.2), strict=True):
        norms = torch.linspace(0.5, 6.0, len(a))
        cases.append(((a, g, norms, C), total(a, g, norms, C)))
    explanation = "scale each example's g by its c, and one matrix product adds up: no second pass."
    return check_function(function, cases, explanation, hint)
