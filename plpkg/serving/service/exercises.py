"""The checkers of notebook 07's exercises."""

from operator import eq, gt
from random import Random

from plpkg.exercise import Verdict, check_function, check_number


def share_in_slots(answer: object) -> Verdict:
    """Which share of the requests, in per cent, is for the 16 most popular of 200 adapters (power law, exponent 1)?"""
    expected = 100 * sum(1 / k for k in range(1, 17)) / sum(1 / k for k in range(1, 201))
    return check_number(
        answer,
        expected=expected,
        unit="per cent",
        tolerance=0.01,
        explanation="(1 + 1/2 + … + 1/16) / (1 + 1/2 + … + 1/200) = 3.38 / 5.88: no 16 slots could do better for long.",
        hints={
            8.0: "16 of 200 would be right if all adapters were asked for alike.",
            100.0: "that would be all of them, but 184 adapters have no slot.",
            100 - expected: "that is the share of all the others.",
            100 * (1 - 1.5**-16): "that is Punica's geometric law; here the k-th has 1/k of the first's requests.",
        },
        hint="Add 1/k over the first 16 adapters, and divide by the same sum over all 200.",
    )


def bound(function: object) -> Verdict:
    """``bound(waiting, i, patience_s, longest_s)``: the seconds within which the request ``waiting[i]`` starts.

    ``waiting`` are the accounts of the requests whose adapters are there, oldest first; no further account comes.
    """
    random, queues = Random(0), [(list("ABBABBAACD"), 6, 2.0, 10.0)]  # each likely slip gives another number
    for _ in range(30):
        waiting = [random.choice("ABC") for _ in range(random.randint(2, 8))]
        queues.append((waiting, random.randrange(len(waiting)), random.choice([0.5, 5.0]), random.choice([3.0, 10.0])))
    cases = [(queue, _latest(*queue)) for queue in queues]
    return check_function(function, cases, "patience, and a turn of every account for each of one's own.", _of_bound)


def _latest(waiting: list, i: int, patience_s: float, longest_s: float) -> float:
    """What the service's scheduler states."""
    return patience_s + waiting[: i + 1].count(waiting[i]) * len(set(waiting)) * longest_s


def _of_bound(got, waiting: list, i: int, patience_s: float, longest_s: float) -> str:
    own, accounts = waiting[: i + 1].count(waiting[i]), len(set(waiting))
    each = accounts * longest_s
    mistakes = (
        (own * each, "nothing is reserved before patience is over: add it"),
        (own * (patience_s + each), "patience counts once"),
        (patience_s + each, "in a turn an account starts one request: its k-th needs k turns"),
        (patience_s + waiting.count(waiting[i]) * each, "of its own account only the requests before it count, and it"),
        (patience_s + (own - 1) * each, "the oldest of an account is its first, not its zeroth"),
        (patience_s + (i + 1) * each, "only requests of its own account count as before it"),
        (patience_s + own * len(waiting) * longest_s, "n counts accounts, not requests"),
        (patience_s + own * (accounts - 1) * longest_s, "its own account takes its turn, too"),
        (patience_s + own * len(set(waiting[: i + 1])) * longest_s, "accounts that asked later take their turns, too"),
        (patience_s + (i + 1) * longest_s, "that is one queue: accounts take turns"),
    )
    return next((said for value, said in mistakes if abs(got - value) <= 1e-9), "")


def leak(function: object) -> Verdict:
    """``leak(members, others)``: how likely a text of the training data falls more than another text (ROC AUC).

    Each list has a text's two losses, ``(with the adapter, without)``; where both texts fall alike, a half counts.
    """
    cases = [(case, _auc(*case)) for case in _losses()]
    explanation = "0.5 tells nothing, 1 tells every text of the training data from every other."
    return check_function(function, cases, explanation, _of_leak, 1e-9)


def _losses():
    """Losses of texts; with the first, each likely slip gives another number."""
    random = Random(0)
    yield [(3, 5), (7, 8), (2, 4), (4, 6), (1, 4)], [(7, 7), (5, 7), (6, 7), (8, 9), (5, 7), (5, 5), (2, 4)]
    for _ in range(20):
        before = [random.randint(4, 9) for _ in range(12)]  # whole numbers, so that some are equal
        texts = [(loss - random.randint(0, 2) - (k < 5), loss) for k, loss in enumerate(before)]
        yield texts[:5], texts[5:]


def _auc(members: list, others: list, ties: float = 0.5) -> float:
    pairs = [(a[1] - a[0], b[1] - b[0]) for a in members for b in others]
    return sum(gt(a, b) + ties * eq(a, b) for a, b in pairs) / len(pairs)


def _of_leak(got, members: list, others: list) -> str:
    expected, plain = _auc(members, others), [[(with_it, 0) for with_it, _ in texts] for texts in (members, others)]
    ratios = [[(with_it / without, 1) for with_it, without in texts] for texts in (members, others)]
    falls = [sum(without - with_it for with_it, without in texts) / len(texts) for texts in (members, others)]
    matched = [_auc([a], [b]) for a, b in zip(members, others, strict=False)]
    alike, hard = "where both fall alike, a half counts", "a hard text stays hard: compare its two losses"
    mistakes = (
        (1 - expected, "learned texts fall more"),
        (_auc(members, others, ties=0.0), alike),
        (_auc(members, others, ties=1.0), alike),
        (_auc(*plain), hard),
        (1 - _auc(*plain), hard),
        (expected * len(members) * len(others), "divide by the number of pairs"),
        (sum(matched) / len(matched), "compare all pairs, each member with each other text"),
        (_auc(*ratios), "a fall is a difference, not a ratio"),
        (falls[0] - falls[1], "a share of pairs is wanted, not a difference of means"),
    )
    return next((said for value, said in mistakes if abs(got - value) <= 1e-9), "")
