"""The checkers of notebook 05's exercises."""

from plpkg.exercise import Verdict, check_number


def per_sample_gib(answer: object) -> Verdict:
    """GiB of all per-sample gradients of 7.6 million trained parameters for 1,024 examples in float32."""
    return check_number(
        answer,
        expected=7_600_000 * 4 * 1024 / 2**30,
        unit="GiB",
        tolerance=0.05,
        explanation="7.6 million numbers of 4 bytes for each of 1,024 examples: more than the 16 GiB of a P100.",
        hints={
            7_600_000 * 4 / 2**30: "that is one gradient; each of the 1,024 examples has its own.",
            7_600_000 * 2 * 1024 / 2**30: "float32 has 4 bytes a number.",
            7_600_000 * 1024 / 2**30: "that counts the numbers; each has 4 bytes.",
        },
        hint="Per-sample gradients take batch × trained parameters × 4 bytes.",
    )


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
