"""Checkers of notebook 03's exercises."""

import math

from plpkg import catalog
from plpkg.show.exercise import Verdict, check_function, check_number
from plpkg.throughput.estimate import decode
from plpkg.throughput.latency import break_even_rtt_s


def rtt_for_half(answer: object) -> Verdict:
    """At which round-trip time, in ms, has the 7B split lost half of its speed (rank 64, literal)?"""
    at_zero = decode("llama-2-7b", 64).tokens_per_s
    return check_number(
        answer,
        expected=1e3 * break_even_rtt_s("llama-2-7b", at_zero / 2),
        unit="ms",
        tolerance=0.02,
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


def break_even(function: object) -> Verdict:
    """``function(tokens_per_s, num_layers, phone_tokens_per_s)``: the round-trip time, in s, that makes both as fast.

    ``tokens_per_s`` is the split's speed without delay, with one round trip a layer and one for the end points.
    """
    cases = []
    for name, phone in (("llama-2-7b", 8.1), ("llama-2-7b", 5.7), ("llama-30b", 2.0), ("llama-2-7b", 30.0)):
        arguments = decode(name).tokens_per_s, catalog.model(name).num_layers, phone
        cases.append((arguments, break_even_rtt_s(name, phone)))

    def hint(got, tokens_per_s, num_layers, phone_tokens_per_s) -> str:
        left = 1 / phone_tokens_per_s - 1 / tokens_per_s
        trips = 1 + num_layers
        known = {
            left / num_layers: "the end points make one more round trip",
            left: "that is for one round trip a token",
            left / (2 * trips): "a round trip is there and back already",
            -left / trips: "the split waits for what the phone's token takes longer, not the other way round",
            1e3 * left / trips: "seconds are wanted, not milliseconds",
            1 / phone_tokens_per_s / trips: "the split needs its own time as well",
            max(0.0, left / trips): "where the phone is faster at any delay, leave the result negative: it says so",
        }
        for speed in (tokens_per_s - phone_tokens_per_s, tokens_per_s + phone_tokens_per_s):
            for wrong in (speed / trips, 1 / speed / trips, 1 / speed):
                if math.isclose(abs(got), wrong, rel_tol=1e-4):
                    return "times add up, not speeds: a token's time is one over the speed"
        for wrong, mistake in known.items():
            if math.isclose(got, wrong, rel_tol=1e-4):
                return mistake
        return ""

    return check_function(
        function, cases, "what the phone's token takes longer is what the round trips may cost.", hint
    )
