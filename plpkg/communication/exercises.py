"""Checkers of notebook 01's exercises."""

from plpkg.communication.formulas import low_rank
from plpkg.exercise import Verdict, check_number


def kv_heads(answer: object) -> Verdict:
    """How many kbit does a token of Llama-3.1-8B send up as ``actual`` full activations (q, k, v, no end points)?"""
    return check_number(
        answer,
        expected=3145.728,
        unit="kbit",
        tolerance=0.005,
        explanation="(4096 + 2·1024) values · 32 layers · 16 bit: only 8 of the 32 heads have keys and values.",
        hints={
            6291.456: "that is three projections of full width; keys and values have only 8 heads of 128.",
            2097.152: "that is the query projection alone; keys and values come up as well.",
            5242.88: "that is both directions; the question is what goes up.",
        },
        hint="Add the widths of q, k and v, times the layers, times 16 bit.",
    )


def half_from_endpoints(answer: object) -> Verdict:
    """At which rank do LLaMA-7B's residuals weigh as much as its end points (three projections)?"""
    return check_number(
        answer,
        expected=128 / 3,
        unit="rank",
        tolerance=0.02,
        explanation="2·hidden = 2·layers·projections·rank gives rank = 4096/(32·3) ≈ 42.7.",
        hints={
            128: "that counts one projection; q, k and v each send a residual.",
            85.33: "that compares both end points with one direction of the residuals.",
        },
        hint="Set the two parts of the formula equal and solve for the rank.",
    )


def round_trips(answer: object) -> Verdict:
    """How many round trips does one decoded token of LLaMA-13B (40 layers) need, end points included?"""
    return check_number(
        answer,
        expected=low_rank("llama-13b", 64).round_trips,
        unit="round trips",
        tolerance=0,
        explanation="one for the end points and one for each of the 40 layers.",
        hints={
            40: "one for each layer; and the embedding has to go up before the first layer can answer.",
            33: "that is LLaMA-7B, with 32 layers.",
            80: "down and up again is one round trip.",
        },
        hint="One for the end points, and one for each layer.",
    )
