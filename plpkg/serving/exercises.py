"""The checkers of notebook 06's exercises."""

from itertools import accumulate, groupby, pairwise
from random import Random

from plpkg.exercise import Verdict, check_number


def adapters_per_backbone(answer: object) -> Verdict:
    """How many adapters of rank 8 on q and v of Llama-2-7B take as much memory as the backbone itself?"""
    expected = 6_738_415_616 / (32 * 2 * 8 * (4096 + 4096))
    return check_number(
        answer,
        expected=expected,
        unit="adapters",
        tolerance=0.01,
        explanation="each has 32 layers × 2 projections × 8 × (4,096 + 4,096) = 4.2 million numbers of 6.74 billion.",
        hints={
            2 * expected: "each projection has an A and a B.",
            expected / 2: "q and v only: two projections a layer.",
            32 * expected: "there are 32 layers.",
        },
        hint="Divide 6.74 billion by the numbers of one adapter: layers × projections × rank × (in + out).",
    )


def segments(function: object) -> Verdict:
    """``segments(owners, lengths)``: tuples ``(start, stop, owner)`` of a batch that is sorted by owner."""
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    random = Random(0)
    for _ in range(20):
        owners = sorted(random.choices("abc", k=random.randint(1, 6)))
        lengths = [random.randint(1, 5) for _ in owners]
        ends = list(accumulate(lengths, initial=0))
        runs = [[k for k, _ in group] for _, group in groupby(enumerate(owners), key=lambda pair: pair[1])]
        expected = [(ends[run[0]], ends[run[-1] + 1], owners[run[0]]) for run in runs]
        got = function(owners, lengths)
        if not isinstance(got, list) or not all(isinstance(segment, tuple) for segment in got):
            return Verdict(False, f"Not yet: a list of tuples is wanted, got {got!r}.")
        if got != expected:
            hint = ""
            if got == [(start, stop, owner) for (start, stop), owner in zip(pairwise(ends), owners, strict=True)]:
                hint = ": neighbours of one owner are one segment"
            elif got and got[-1][1] == len(owners) != ends[-1]:
                hint = ": segments count tokens, not requests"
            return Verdict(False, f"Not yet{hint}. For {owners} with {lengths} tokens: {expected}, got {got}.")
    return Verdict(True, "Right: one segment for each adapter, as long as all tokens of its requests.")


def gradient_of_x(function: object) -> Verdict:
    """``gradient_of_x(g, downs, ups, scales, segments)``: ∂L/∂x from g = ∂L/∂y of a segmented product."""
    import torch

    from plpkg.serving.segments import sgmv

    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    generator = torch.Generator().manual_seed(0)
    x, g, downs, ups = (torch.randn(*size, generator=generator) for size in ((6, 5), (6, 7), (2, 3, 5), (2, 7, 3)))
    scales, runs = [0.5, 2.0], [(0, 2, 1), (2, 3, None), (3, 6, 0)]
    sgmv(x.requires_grad_(), downs, ups, scales, runs).backward(g)
    got = function(g, list(downs), list(ups), scales, runs)
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        shape = tuple(got.shape) if isinstance(got, torch.Tensor) else got
        return Verdict(False, f"Not yet: a tensor of as many rows and columns as x, {tuple(x.shape)}; got {shape!r}.")
    wrong = ~((got - x.grad).abs() <= 1e-4).all(1)
    if not wrong.any():
        return Verdict(True, "Right: the same product with B and A in each other's places.")
    if torch.allclose(got[:2] * 2, x.grad[:2], atol=1e-4):
        return Verdict(False, "Not yet: the scale belongs into the gradient as well.")
    rows = wrong.nonzero().flatten().tolist()
    hint = ": it has no adapter" if rows == [2] else ""
    return Verdict(False, f"Not yet: rows {rows} differ from autograd's{hint}.")
