"""Checkers of the exercises of notebooks 00 and 01."""

from itertools import pairwise

from plpkg.communication import onlookers
from plpkg.communication.formulas import low_rank
from plpkg.communication.schedule import Message, count, low_rank_messages
from plpkg.show.exercise import Verdict, check_function, check_number


def round_trips(answer: object) -> Verdict:
    """How many round trips until LLaMA-13B (40 layers) has read a prompt in one pass and written 20 tokens?"""
    return check_number(
        answer,
        expected=low_rank("llama-13b", 64, tokens=20).round_trips,
        unit="round trips",
        tolerance=0,
        explanation="20 passes, the first of which reads the prompt, of 40 + 1 round trips each.",
        hints={
            41: "that is one pass.",
            20: "that is the passes; each has a round trip a layer, and one more.",
            801: "embedding and last hidden state cross in every pass.",
            800: "each pass has one more: the embedding up, the last hidden state down.",
            861: "the pass that reads the prompt already gives the first new token.",
            840: "the pass that reads the prompt already gives the first new token, and messages 1 and 4 are missing.",
            4920: "the prompt crosses in one pass, however long it is.",
            1640: "down and up again is one round trip.",
        },
        hint="How many passes are there, and how often does one side of the drawing wait for the other in each?",
    )


def turns(function: object) -> Verdict:
    """``function(directions)``: the round trips of messages ``"up"`` and ``"down"``, in the order of their sending.

    Messages that follow each other in one direction are under way at once.
    """
    schedules = (
        low_rank_messages("gpt2", 8, adapted_layers=3),
        low_rank_messages("gpt2", 8, adapted_layers=5, late=True),
        low_rank_messages("gpt2", 8, adapted_layers=2, phase="training"),
        (Message("", direction, (1,)) for direction in ("up", "up", "down", "down", "up", "down")),
        (Message("", direction, (1,)) for direction in ("up", "up", "down", "up", "up")),
    )
    cases = []
    for schedule in schedules:
        messages = list(schedule)
        directions = [message.direction for message in messages]
        cases.append(((directions,), count(messages).round_trips))

    def hint(got, directions) -> str:
        turns = sum(before != after for before, after in pairwise(directions))
        if got == turns // 2 + 1:
            return "an up that no down answers is no round trip"
        if got == directions.count("up") or got == directions.count("down"):
            return "two messages that follow each other in one direction wait only once"
        if got == turns // 2:
            return "the first message begins a round trip as well"
        if got > len(directions) // 2:
            return "one turn and the turn back are one round trip"
        return ""

    return check_function(function, cases, "the package's count does the same.", hint)


def follows(function: object) -> Verdict:
    """``function(received, rules)``: all that can be known, as a set; ``rules`` are pairs (needed, conclusion)."""
    a_chain = [({"c"}, "d"), ({"b"}, "c"), ({"a"}, "b")]  # one pass in this order finds b alone
    cases = []
    for received, rules in (
        ({"a"}, a_chain),
        ({"a"}, [({"a", "b"}, "c")]),
        ({"A x", "M A x"}, list(onlookers.RULES)),
        (set(), [(set(), "what is public"), ({"a"}, "b")]),
    ):
        cases.append(((received, rules), onlookers.follows(received, rules)))

    def hint(got, received, rules) -> str:
        if not isinstance(got, set):
            return "a set is wanted"
        if not received <= got:
            return "what was received is known, too"
        one_pass = received | {conclusion for needed, conclusion in rules if received.issuperset(needed)}
        any_needed = received | {conclusion for needed, conclusion in rules if received.intersection(needed)}
        if got == received:
            return "a conclusion follows where all of its rule's first part is known"
        if got == one_pass:
            return "a conclusion may be what another rule needs: go on until nothing new follows"
        if got == any_needed:
            return "a rule needs all of its first part, not one of it"
        if received < got < onlookers.follows(received, rules):
            return "more follows: go on until nothing new does"
        return ""

    return check_function(function, cases, "what can be computed counts as seen.", hint)
