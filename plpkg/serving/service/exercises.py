"""The checkers of notebook 07's exercises."""

from operator import eq, gt
from random import Random

from plpkg.exercise import Verdict, check_number
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
            100.0: "that would be all of them, but 184 adapters have no slot.",
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
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    random = Random(0)
    for _ in range(200):
        num_slots, places = random.randint(1, 4), random.randint(1, 5)
        slots = {name: random.randint(0, 2) for name in random.sample("abcdef", random.randint(0, num_slots))}
        waiting = [(random.choice("AB"), random.choice("abcdef")) for _ in range(random.randint(1, 7))]
        scheduler = Scheduler(num_slots, places)
        tickets = [Ticket(adapter, 1, 0.0, account=account) for account, adapter in waiting]
        scheduler.slots.update(slots)
        for ticket in tickets:
            scheduler.submit(ticket)
            scheduler.fetched(ticket, 0.0)
        expected = [tickets.index(start.ticket) for start in scheduler.decide(0.0)]
        got, hint = function(list(waiting), dict(slots), num_slots, places), ""
        if got == expected:
            continue
        if isinstance(got, list) and set(got) <= set(range(len(waiting))):
            used = {name for name, users in slots.items() if users} | {waiting[k][1] for k in got}
            if len(got) > places:
                hint = f": only {places} may start"
            elif len(used) > num_slots:
                hint = ": who is in use keeps its slot"
            elif sorted(got) == sorted(expected):
                hint = ": these start, but accounts take turns, and who has started one goes behind the others"
            elif got == expected[: len(got)]:
                hint = ": who cannot start holds up nobody behind, and a slot that nobody uses may be taken"
        return Verdict(False, f"Not yet{hint}. For {waiting}, {slots}, {num_slots}, {places}: {expected}, got {got!r}.")
    return Verdict(True, "Right: in turn, whoever has an adapter in a slot, or finds one that nobody uses, starts.")


def leak(function: object) -> Verdict:
    """``leak(members, others)``: how likely a text of the training data falls more than another text (ROC AUC).

    Each list has a text's two losses, ``(with the adapter, without)``; where both texts fall alike, a half counts.
    """
    if not callable(function):
        return Verdict(False, "No answer yet: write the function, and give it to the checker.")
    random = Random(0)
    for _ in range(20):
        before = [random.randint(2, 9) for _ in range(12)]  # whole numbers, so that some are equal
        texts = [(loss - random.randint(0, 2) - (k < 5), loss) for k, loss in enumerate(before)]
        members, others = texts[:5], texts[5:]
        pairs = [(a[1] - a[0], b[1] - b[0]) for a in members for b in others]
        more, alike = (sum(test(a, b) for a, b in pairs) / len(pairs) for test in (gt, eq))
        got, expected = function(list(members), list(others)), more + alike / 2
        try:
            got = float(got)
        except (TypeError, ValueError):
            return Verdict(False, f"Not yet: one number from 0 to 1 is wanted, got {got!r}.")
        if not abs(got - expected) <= 1e-9:
            plain = sum((a[0] < b[0]) + (a[0] == b[0]) / 2 for a in members for b in others) / len(pairs)
            hints = {1 - expected: "learned texts fall more", more: "where both fall alike, a half counts"}
            hints[plain] = "a hard text stays hard: compare its two losses"
            hint = next((said for value, said in hints.items() if abs(got - value) <= 1e-9), "compare all pairs")
            return Verdict(False, f"Not yet: {hint}. For {members} and {others}: {expected:.3f}, got {got:.3f}.")
    return Verdict(True, "Right: 0.5 tells nothing, 1 tells every text of the training data from every other.")
