"""The checkers of exercises in notebooks 05 and 10."""

from collections.abc import Callable
from functools import partial

import torch

from plpkg.clipping.factors import Outer
from plpkg.show.exercise import Verdict, check_function, check_number

WIDTHS, POSITIONS = (5, 2), 3
FACTORS = [
    tuple(
        torch.randn(batch, POSITIONS, width, generator=torch.Generator().manual_seed(batch * width)) for width in WIDTHS
    )
    for batch in (4, 5, 6)
]
"""A layer's inputs, and its output's gradients: ``(batch, positions, d)`` and ``(batch, positions, p)``."""
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


def membership(function: Callable | None) -> Verdict:
    """``function(own, public)``: how likely each note was learnt, ``(notes,)``, from two models' nats a token.

    Judged on 400 simulated notes: how hard a note is differs much more than what learning it gains.
    """
    random = torch.Generator().manual_seed(0)
    hard = 2 + 3 * torch.rand(400, generator=random)
    gain = 0.05 * torch.randn(400, generator=random) + 0.15 * (torch.arange(400) < 200)
    public, own = hard, hard * (1 - gain.clamp(min=-0.1))
    if function is None:
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    try:
        given = function(own.clone(), public.clone())
        if given is None:
            return Verdict(False, "Not yet: it returns nothing; a score for each note is wanted.")
        scores = torch.as_tensor(given, dtype=torch.float64)
    except Exception as error:
        return Verdict(False, f"Not yet: it raises {type(error).__name__}: {error}")
    if scores.shape != own.shape:
        return Verdict(
            False, f"Not yet: one score for each note is wanted, {tuple(own.shape)}, not {tuple(scores.shape)}."
        )
    if not scores.isfinite().all():
        return Verdict(False, "Not yet: some of its scores are no numbers.")
    auc, bare, compared = (_auc(each) for each in (scores, -own.double(), (public - own).double()))
    if auc >= compared - 0.005:
        return Verdict(
            True, f"Right: of two notes it finds the learnt one {auc:.0%} of the time, the bare loss {bare:.0%}."
        )
    if auc <= 1 - compared + 0.005 or abs(auc - (1 - bare)) < 0.005:
        return Verdict(
            False, "Not yet: a larger score must mean that the note was rather learnt; yours is the other way."
        )
    if abs(auc - bare) < 0.005:
        return Verdict(
            False, "Not yet: that is the bare loss. An easy note is likely for any model: what is it without learning?"
        )
    return Verdict(False, f"Not yet: of two notes it finds the learnt one {auc:.0%} of the time, guessing 50 %.")


def _auc(scores: torch.Tensor) -> float:
    """Of pairs of a learnt note, among the first half, and another: the share in which it has the larger score."""
    learnt, others = scores.chunk(2)
    return ((learnt[:, None] > others).double() + (learnt[:, None] == others).double() / 2).mean().item()
