"""The checkers of notebook 07's exercises."""

from random import Random

from plpkg.show.exercise import Verdict, check_function


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
    """The bound that the service's scheduler states."""
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
