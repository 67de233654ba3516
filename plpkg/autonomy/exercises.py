"""The checkers of notebook 08's exercises."""

from random import Random

from plpkg.exercise import Verdict, check_number

BODY, HEAD, WORDS = 4 * (64 * 128 + 128 * 128 + 128 * 96 + 96 * 96), 96 * 10_000, 12
"""Multiply-adds of the word predictor: of its body a word, of its head, and how many words a sample has."""


def cached_share(answer: object) -> Verdict:
    """Which share of a step's multiplications do kept features save, in per cent?"""
    body, forward = WORDS * BODY, HEAD
    return check_number(
        answer,
        expected=100 * body / (body + 2 * forward),
        unit="per cent",
        tolerance=0.02,
        explanation="12 words through the body are 2.21 million, the head's output and gradient 1.92 million.",
        hints={
            100 * BODY / (BODY + 2 * forward): "the body reads twelve words, the head predicts after the last only.",
            100 * body / (body + 3 * forward): "the head's input needs no gradient: two products, not three.",
            200 * forward / (body + 2 * forward): "that is the share that stays.",
            100 * body / (body + forward): "the head is needed twice: for its output, and for its gradient.",
        },
        hint="Divide the body's products by the sum of the body's and twice the head's.",
    )


def averaged(function: object) -> Verdict:
    """``averaged(states, labels)``: FedAvg's mean of dicts of numbers, weighted by how many labels each has."""
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    random = Random(0)
    for _ in range(20):
        labels = [random.randint(1, 9) for _ in range(random.randint(1, 4))]
        states = [{key: random.uniform(-1, 1) for key in "ab"} for _ in labels]
        expected = {key: sum(n * s[key] for n, s in zip(labels, states, strict=True)) / sum(labels) for key in "ab"}
        got = function([dict(state) for state in states], list(labels))
        if not isinstance(got, dict) or set(got) != set(expected):
            return Verdict(False, f"Not yet: a dict with the keys of the states is wanted, got {got!r}.")
        if any(got[key] is None or abs(got[key] - expected[key]) > 1e-5 for key in "ab"):
            plain = all(got[key] == sum(s[key] for s in states) / len(states) for key in "ab")
            hint = ": who has more labels counts for more" if plain else ""
            return Verdict(False, f"Not yet{hint}. For {states} with {labels} labels: {expected}, got {got}.")
    return Verdict(True, "Right: the mean, weighted by labels.")


def guarded(function: object) -> Verdict:
    """``guarded(public, personal, right, allowance)``: what the guard shows, each label being told at once."""
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    random = Random(0)
    for _ in range(40):
        length, allowance = random.randint(1, 12), random.randint(0, 2)
        public, personal, right = ([random.randint(0, 1) for _ in range(length)] for _ in range(3))
        expected, lead, spent = [], 0, 0
        for one, other, truth in zip(public, personal, right, strict=True):
            expected.append(other if lead > 0 and spent < allowance else one)
            lead += (other == truth) - (one == truth)
            spent += (one == truth) - (expected[-1] == truth)
        got = function(list(public), list(personal), list(right), allowance)
        if not isinstance(got, list) or len(got) != length:
            return Verdict(False, f"Not yet: a list of {length} predictions is wanted, got {got!r}.")
        if got != expected:
            excess = sum(g != r for g, r in zip(got, right, strict=True)) - sum(
                p != r for p, r in zip(public, right, strict=True)
            )
            hint = f": {excess} errors more than the public model's, {allowance} allowed" if excess > allowance else ""
            case = f"public {public}, personal {personal}, right {right}, allowance {allowance}"
            return Verdict(False, f"Not yet{hint}. For {case}: {expected}, got {got}.")
    return Verdict(True, "Right: the personal head speaks while it leads and while what it may lose is not spent.")
