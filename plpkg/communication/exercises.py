"""Checkers of the exercises of notebooks 00 and 01."""

from plpkg import catalog
from plpkg.communication import onlookers
from plpkg.communication.formulas import low_rank
from plpkg.communication.schedule import Message, count, low_rank_messages
from plpkg.exercise import Verdict, check_function, check_number


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
            1048.576: "those are keys and values alone; the query comes up as well.",
            98.304: "that is one layer; there are 32.",
            196.608: "those are thousands of values, of 16 bit each.",
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
            21.33: "that compares one end point with both directions of the residuals.",
        },
        hint="Set the two parts of the formula equal and solve for the rank.",
    )


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


def token_bytes(function: object) -> Verdict:
    """``function(hidden, num_layers, rank, bits)``: a decoded token's bytes ``(up, down)`` by low-rank residuals.

    With end points, and q, k and v in every layer.
    """
    cases = []
    for name, rank, bits in (("llama-7b", 16, 16), ("llama-3.1-8b", 8, 32), ("gemma-2-2b", 48, 8), ("gpt2", 1, 16)):
        model, traffic = catalog.model(name), low_rank(name, rank, bits=bits)
        arguments = model.hidden, model.num_layers, rank, bits
        cases.append((arguments, (traffic.uplink_bits / 8, traffic.downlink_bits / 8)))

    def hint(got, hidden, num_layers, rank, bits) -> str:
        residuals, endpoint = num_layers * rank * bits / 8, hidden * bits / 8
        known = {
            3 * residuals: "the embedding goes up and the last hidden state comes down, too",
            residuals + endpoint: "q, k and v each have a residual",
            8 * (3 * residuals + endpoint): "those are bits",
            2 * (3 * residuals + endpoint): "that is both directions together",
            (3 * residuals + endpoint) * 8 / bits: "a value has bits / 8 bytes",
            3 * num_layers * endpoint + endpoint: "a residual has rank values, and not hidden ones",
            3 * num_layers * endpoint: "a residual has rank values, and not hidden ones",
            3 * residuals + num_layers * endpoint: "the end points cross once a token, and not in every layer",
            3 * residuals + 2 * endpoint: "each way has one end point: the embedding up, the last hidden state down",
            3 * residuals + endpoint: "a tuple (up, down) is wanted",
        }
        return known.get(got[0] if isinstance(got, list | tuple) else got, "")

    return check_function(function, cases, "hidden + 3 · layers · rank values each way, bits/8 bytes each.", hint)


def turns(function: object) -> Verdict:
    """``function(directions)``: the round trips of messages ``"up"`` and ``"down"``, in the order of their sending.

    What follows each other in one direction is under way at once.
    """
    schedules = (
        low_rank_messages("gpt2", 8, adapted_layers=3),
        low_rank_messages("gpt2", 8, adapted_layers=5, late=True),
        low_rank_messages("gpt2", 8, adapted_layers=2, phase="training"),
        (Message("", direction, (1,)) for direction in ("up", "up", "down", "down", "up", "down")),
    )
    cases = []
    for messages in map(list, schedules):
        cases.append((([message.direction for message in messages],), count(messages).round_trips))

    def hint(got, directions) -> str:
        if got == directions.count("up") or got == directions.count("down"):
            return "two messages that follow each other in one direction wait only once"
        if got == sum(map(str.__ne__, directions, directions[1:])) // 2:
            return "the first message begins a round trip as well"
        return "one turn and the turn back are one round trip" if got > len(directions) // 2 else ""

    return check_function(function, cases, "the package's count does the same.", hint)


def follows(function: object) -> Verdict:
    """``function(received, rules)``: all that can be known, as a set; ``rules`` are pairs (needed, conclusion)."""
    a_chain = [({"c"}, "d"), ({"b"}, "c"), ({"a"}, "b")]  # one pass in this order finds b alone
    cases = []
    for received, rules in (
        ({"A x", "M A x"}, list(onlookers.RULES)),
        ({"a"}, a_chain),
        ({"a"}, [({"a", "b"}, "c")]),
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
        if got == one_pass:
            return "a conclusion may be what another rule needs: go on until nothing new follows"
        if got == any_needed:
            return "a rule needs all of its first part, not one of it"
        return ""

    return check_function(function, cases, "what can be computed counts as seen.", hint)
