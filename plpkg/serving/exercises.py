"""The checkers of notebook 06's exercises."""

from itertools import accumulate, groupby, pairwise
from random import Random

from plpkg.show.exercise import Verdict, check_function, check_number


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
            8 * expected: "the rank is missing: A has 8 rows, and B has 8 columns.",
            2 * expected: "two projections, and each has an A and a B.",
            expected / 2: "q and v only: two projections a layer.",
            expected * 2 / 3: "q and v only: two projections a layer.",
            expected * 8 * 2 / 4096: "that is the whole update, 4,096 × 4,096; an adapter keeps A and B.",
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
        if got == right(owners, lengths)[:-1]:
            return "the last segment counts as well"
        of = {owner for *_, owner in got}
        if of and None in set(owners) - of:
            return "requests without an adapter have a segment as well, with None"
        if of == set(owners) and len(of) == len(got) < len(right(owners, lengths)):
            return "an owner that comes again after another starts a new segment"
        for runs in (right(owners, lengths), each):
            if got == [(start, stop - start, owner) for start, stop, owner in runs]:
                return "a segment says where it stops, and not how long it is"
            if got == [(start, stop - 1, owner) for start, stop, owner in runs]:
                return "stop is the first row that does not belong to it, as in a slice"
            if [(start - 1, owner) for start, _, owner in got] == [(start, owner) for start, _, owner in runs]:
                return "rows are counted from 0"
        return "segments count tokens, not requests" if got[-1][1] == len(owners) != ends[-1] else ""

    def right(owners, lengths) -> list[tuple]:
        ends = list(accumulate(lengths, initial=0))
        runs = [[k for k, _ in group] for _, group in groupby(enumerate(owners), key=lambda pair: pair[1])]
        return [(ends[run[0]], ends[run[-1] + 1], owners[run[0]]) for run in runs]

    random, batches = Random(0), [(["a", "a", None, "b", "a"], [2, 1, 3, 2, 4])]  # each likely slip shows
    for count in (1, 2, *(random.randint(3, 6) for _ in range(20))):
        batches.append((random.choices(("a", "b", None), k=count), [random.randint(1, 5) for _ in range(count)]))
    cases = [(batch, right(*batch)) for batch in batches]
    explanation = "one segment for each run of requests of one owner, as long as all their tokens."
    return check_function(function, cases, explanation, hint)
