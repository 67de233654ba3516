"""The checkers of notebook 07's exercises."""

from operator import eq, gt
from random import Random

from plpkg.exercise import Verdict, check_function, check_number
from plpkg.serving.service.scheduler import Scheduler, Ticket


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
            100 - expected: "that is the share of all the others.",
            100 * (1 - 1.5**-16): "that is Punica's geometric law; here the k-th has 1/k of the first's requests.",
        },
        hint="Add 1/k over the first 16 adapters, and divide by the same sum over all 200.",
    )


def admit(function: object) -> Verdict:
    """``admit(waiting, slots, num_slots, places)``: which requests start, as indices into ``waiting`` in that order.

    ``waiting`` are pairs ``(account, adapter)``, longest waiting first. Accounts take turns, first the one that waits
    longest, each with its oldest request that can start. ``slots`` says by adapter how many running requests use it,
    and idle ones give way; ``places`` more requests may run.
    """
    explanation = "in turn, whoever has an adapter in a slot, or finds one that nobody uses, starts."
    return check_function(function, [(case, _decided(*case)) for case in _queues()], explanation, _of_admit)


def _queues():
    random = Random(0)
    for _ in range(200):
        num_slots, places = random.randint(1, 4), random.randint(1, 5)
        slots = {name: random.randint(0, 2) for name in random.sample("abcdef", random.randint(0, num_slots))}
        waiting = [(random.choice("AB"), random.choice("abcdef")) for _ in range(random.randint(1, 7))]
        yield waiting, slots, num_slots, places


def _decided(waiting: list, slots: dict, num_slots: int, places: int) -> list[int]:
    """What the service's scheduler starts."""
    scheduler = Scheduler(num_slots, places)
    tickets = [Ticket(adapter, 1, 0.0, account=account) for account, adapter in waiting]
    scheduler.slots.update(slots)
    for ticket in tickets:
        scheduler.submit(ticket)
        scheduler.fetched(ticket, 0.0)
    return [tickets.index(start.ticket) for start in scheduler.decide(0.0)]


def _of_admit(got, waiting: list, slots: dict, num_slots: int, places: int) -> str:
    expected = _decided(waiting, slots, num_slots, places)
    if not isinstance(got, list) or any(type(k) is not int or not 0 <= k < len(waiting) for k in got):
        return "a list of indices into waiting is wanted"
    if len(set(got)) < len(got):
        return "a request starts once"
    if len(got) > places:
        return f"only {places} may start"
    if len({name for name, users in slots.items() if users} | {waiting[k][1] for k in got}) > num_slots:
        return "who is in use keeps its slot"
    if sorted(got) == sorted(expected):
        return "these start, but accounts take turns, and who has started one goes behind the others"
    return "who cannot start holds up nobody behind, and a slot that nobody uses may be taken" * (
        got == expected[: len(got)]
    )


def leak(function: object) -> Verdict:
    """``leak(members, others)``: how likely a text of the training data falls more than another text (ROC AUC).

    Each list has a text's two losses, ``(with the adapter, without)``; where both texts fall alike, a half counts.
    """
    cases = [(case, _auc(*case)) for case in _losses()]
    explanation = "0.5 tells nothing, 1 tells every text of the training data from every other."
    return check_function(function, cases, explanation, _of_leak, 1e-9)


def _losses():
    random = Random(0)
    for _ in range(20):
        before = [random.randint(2, 9) for _ in range(12)]  # whole numbers, so that some are equal
        texts = [(loss - random.randint(0, 2) - (k < 5), loss) for k, loss in enumerate(before)]
        yield texts[:5], texts[5:]


def _auc(members: list, others: list, ties: float = 0.5) -> float:
    pairs = [(a[1] - a[0], b[1] - b[0]) for a in members for b in others]
    return sum(gt(a, b) + ties * eq(a, b) for a, b in pairs) / len(pairs)


def _of_leak(got, members: list, others: list) -> str:
    expected, plain = _auc(members, others), [[(with_it, 0) for with_it, _ in texts] for texts in (members, others)]
    hints = {
        1 - expected: "learned texts fall more",
        _auc(members, others, ties=0.0): "where both fall alike, a half counts",
        _auc(members, others, ties=1.0): "where both fall alike, a half counts",
        _auc(*plain): "a hard text stays hard: compare its two losses",
        expected * len(members) * len(others): "divide by the number of pairs",
    }
    return next((said for value, said in hints.items() if abs(got - value) <= 1e-9), "compare all pairs")
