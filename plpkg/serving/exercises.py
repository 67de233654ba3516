"""The checkers of notebook 06's exercises."""

from itertools import accumulate, groupby, pairwise
from random import Random

from plpkg.exercise import Verdict, check_function, check_number


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
    """``segments(owners, lengths)``: tuples ``(start, stop, owner)`` of neighbours that have one owner, or none."""

    def hint(got, owners, lengths) -> str:
        ends = list(accumulate(lengths, initial=0))
        each = [(start, stop, owner) for (start, stop), owner in zip(pairwise(ends), owners, strict=True)]
        got = [tuple(segment) for segment in got]
        if got == right(owners, lengths):
            return "a list of tuples is wanted"
        if got == each:
            return "neighbours of one owner are one segment"
        for runs in (right(owners, lengths), each):
            if got == [(start, stop - start, owner) for start, stop, owner in runs]:
                return "a segment says where it stops, and not how long it is"
            if got == [(start, stop - 1, owner) for start, stop, owner in runs]:
                return "stop is the first row that does not belong to it, as in a slice"
        return "segments count tokens, not requests" if got[-1][1] == len(owners) != ends[-1] else ""

    def right(owners, lengths) -> list[tuple]:
        ends = list(accumulate(lengths, initial=0))
        runs = [[k for k, _ in group] for _, group in groupby(enumerate(owners), key=lambda pair: pair[1])]
        return [(ends[run[0]], ends[run[-1] + 1], owners[run[0]]) for run in runs]

    random, cases = Random(0), []
    for count in (1, 2, *(random.randint(3, 6) for _ in range(20))):
        batch = random.choices(("a", "b", None), k=count), [random.randint(1, 5) for _ in range(count)]
        cases.append((batch, right(*batch)))
    explanation = "one segment for each adapter, as long as all tokens of its requests."
    return check_function(function, cases, explanation, hint)


def gradient_of_x(function: object) -> Verdict:
    """``gradient_of_x(g, downs, ups, scales, segments)``: ∂L/∂x from g = ∂L/∂y of a segmented product."""
    import torch

    from plpkg.serving.segments import sgmv

    def right(g, downs, ups, scales, runs) -> torch.Tensor:
        x = torch.zeros(len(g), downs[0].shape[1], requires_grad=True)
        return torch.autograd.grad(sgmv(x, downs, ups, scales, runs), x, g)[0]

    def careful(*arguments) -> object:
        try:
            return function(*arguments)
        except Exception as error:
            if any(i is None for *_, i in arguments[-1]):  # it has not raised without such a segment
                reason = "a segment with None has no adapter, and its rows stay zero"
                raise type(error)(f"{error} ({reason})") from error
            raise

    def hint(got, g, downs, ups, scales, runs) -> str:
        if torch.allclose(got, right(g, downs, ups, [1.0] * len(scales), runs), atol=1e-4):
            return "the scale belongs into the gradient as well"
        rows = ~torch.isclose(got, right(g, downs, ups, scales, runs), atol=1e-4).all(1)
        wrong = {i for start, stop, i in runs if rows[start:stop].any()}
        if wrong == {None}:
            return "rows whose segment has no adapter stay zero"
        return "adapter 0 is one as well, and only None is none" if wrong == {0} and not got[rows].any() else ""

    generator = torch.Generator().manual_seed(0)
    g, downs, ups = (torch.randn(*size, generator=generator) for size in ((6, 7), (2, 3, 5), (2, 7, 3)))
    given = g, list(downs), list(ups), [0.5, 2.0]
    cases = [
        ((*given, runs), right(*given, runs)) for runs in ([(0, 3, 1), (3, 6, 0)], [(0, 2, 1), (2, 3, None), (3, 6, 0)])
    ]
    explanation = "the same product with B and A in each other's places."
    return check_function(careful if callable(function) else function, cases, explanation, hint)
