"""The checker of notebook 02's exercise."""

from plpkg.exercise import Verdict, check_number


def tokens_until_m(answer: object) -> Verdict:
    """How many tokens must the cloud have seen before it can compute an M of rank 64 exactly?"""
    return check_number(
        answer,
        expected=64,
        unit="tokens",
        tolerance=0.001,
        explanation="64 tokens give 64 equations for each row of M, which has 64 unknowns.",
        hints={
            4096: "that is how many entries M has; each token gives 64 equations, one for each row.",
            63: "63 equations for the 64 unknowns of each row leave one direction open.",
            1: "one token gives M u for a single u.",
        },
        hint="Count unknowns and equations for one row of M: v_i = Σ_j M_ij u_j.",
    )
