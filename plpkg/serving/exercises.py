"""The checkers of notebook 06's exercises."""

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
