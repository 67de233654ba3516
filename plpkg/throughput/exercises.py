"""Checkers of notebook 03's exercises."""

from plpkg.exercise import Verdict, check_number
from plpkg.throughput.estimate import decode
from plpkg.throughput.latency import break_even_rtt_s


def lm_head_share(answer: object) -> Verdict:
    """Which share, in per cent, of a token's time does the phone's LM head take (7B, rank 64, literal)?"""
    estimate = decode("llama-2-7b", 64)
    share = 100 * estimate.breakdown()["lm_head"] * estimate.tokens_per_s
    return check_number(
        answer,
        expected=share,
        unit="per cent",
        tolerance=0.05,
        explanation="262 MB at 42.7 GB/s are 6.1 ms of 37.0 ms: more than everything the network does.",
        hints={
            23.2: "that is its share of the decoder's time, not of the whole token's.",
            6.14: "that is its time in ms; which share of the token's 37.0 ms is it?",
            71.4: "that is the decoder's share, the largest.",
        },
        hint="Read the LM head's 2·vocabulary·hidden bytes at the phone's 42.7 GB/s and divide by the token's time.",
    )


def rtt_for_half(answer: object) -> Verdict:
    """At which round-trip time, in ms, has the 7B split lost half of its speed (rank 64, literal)?"""
    at_zero = decode("llama-2-7b", 64).tokens_per_s
    return check_number(
        answer,
        expected=1e3 * break_even_rtt_s("llama-2-7b", at_zero / 2),
        unit="ms",
        tolerance=0.012,
        explanation="a token of 37.0 ms makes 33 round trips, so 37.0/33 ≈ 1.12 ms each double it.",
        hints={
            37.0: "that would be right with one round trip a token; there are 1 + 32.",
            37.0 / 32: "close: the end points make one more round trip.",
            36.0 / 33: "close: that is the figure accounting; its token takes 36.0 ms.",
            37.0 / 66: "half the speed means twice the time: the round trips may cost as much as all the rest.",
            1.0: "close; now compute it.",
        },
        hint="The speed halves when the round trips take as long as everything else together.",
    )
