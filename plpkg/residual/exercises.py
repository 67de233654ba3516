"""Checkers of notebook 02's exercises."""

from plpkg.exercise import Verdict, check_number


def tokens_until_m(answer: object) -> Verdict:
    """How many tokens must the cloud have seen before it can compute an M of rank 64 exactly?"""
    return check_number(
        answer,
        expected=64,
        unit="tokens",
        tolerance=0.001,
        explanation="64 tokens give 64 equations v = M u for each row of M, which has 64 unknowns.",
        hints={
            4096: "that is how many entries M has; each token gives 64 equations, one for each row.",
            63: "63 equations for the 64 unknowns of each row leave one direction open.",
            1: "one token gives M u for a single u.",
        },
        hint="Count unknowns and equations for one row of M: v_i = Σ_j M_ij u_j.",
    )


def rank_for_a_quarter(answer: object) -> Verdict:
    """Which rank, both ways, keeps a token of plpkg-small at a quarter of full activations' bytes?

    One adapted projection in each of 5 layers of hidden size 320, keys and values 64 wide; both end points count.
    """
    ends, layers = 2 * 320, 5
    full = ends + layers * (320 + 320 + 64 + 64)
    return check_number(
        answer,
        expected=(full / 4 - ends) / (2 * layers),
        unit="values",
        tolerance=0.001,
        explanation="a quarter of 640 + 5·768 = 4480 values is 1120; less 640 for the ends, 480 = 5·2·48 are left.",
        hints={
            16: "that is right for three projections a layer; here one is adapted.",
            112: "the end points cross as well: 640 of the 1120 values are theirs.",
            96: "the rank is sent in both directions.",
        },
        hint="Write down the values of a token with full activations, take a quarter, and subtract the end points.",
    )
