"""Whatever comes, fails, ends or leaves in whatever order: the scheduler's promises hold, and its bound on waiting."""

import contextlib
import heapq
import math
import weakref
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st

from plpkg.serving.service.scheduler import Drop, OverloadedError, Pause, Scheduler, Ticket


class Job(NamedTuple):
    """A request to come, in whole seconds, so that nothing is rounded; it may leave in any state."""

    arrives: int
    fetch: int
    adapter: str | None
    positions: int
    runs: int
    leaves: float = math.inf
    account: str = "A"


def drive(jobs, scheduler, forgotten=(), one_queue=False):
    """By job that has started, its wait since its adapter came, and what the scheduler's docstring allows.

    ``forgotten`` are ``(time, adapter)``; with ``one_queue`` the scheduler knows of no accounts. The scheduler's books
    are kept here a second time, by the jobs' numbers.
    """
    tickets = [Ticket(j.adapter, j.positions, j.arrives, account="" if one_queue else j.account) for j in jobs]
    alone = len({ticket.account for ticket in tickets}) == 1
    live, fetched, started, ended = [], {}, {}, {}  # live in the order of their coming
    on, left_s, ends_at = [], {k: job.runs for k, job in enumerate(jobs)}, {}  # what runs, how long yet, and until when
    waits = {}  # by job, from when to when it waited; an end of None is not yet
    events = [(job.arrives, 1, k) for k, job in enumerate(jobs)] + [(at, 3, adapter) for at, adapter in forgotten]
    heapq.heapify(events)

    def could_start(k):
        slots, job, filled = scheduler.slots, jobs[k], sum(jobs[other].positions for other in on)
        room = job.adapter is None or job.adapter in slots or len(slots) < scheduler.num_slots or 0 in slots.values()
        return room and len(on) < scheduler.places and filled + job.positions <= scheduler.positions

    def used(some):
        adapters = {jobs[k].adapter for k in some} - {None}
        return len(some), sum(jobs[k].positions for k in some), len(adapters)

    def shares(accounts):
        places, slots = (max(1, whole / accounts) for whole in (scheduler.places, scheduler.num_slots))
        return places, scheduler.positions / accounts, slots

    def within(k, accounts):
        reserved = [other for other in live if tickets[other] is scheduler._reserved and other != k]
        mine = [other for other in [*on, *reserved] if tickets[other].account == tickets[k].account]
        return all(count <= share for count, share in zip(used([*mine, k]), shares(accounts), strict=True))

    def decide():
        queue = sorted((k for k in live if k in fetched and k not in on), key=fetched.get)
        accounts = len({tickets[k].account for k in (*queue, *on)})
        overdue = [k for k in queue if now - waits[k][-1][0] >= scheduler.patience_s]
        must, before, left = [k for k in overdue[:1] if alone and could_start(k)], dict(scheduler.slots), [*queue]
        for decision in scheduler.decide(now):
            k = tickets.index(decision.ticket)
            if isinstance(decision, Drop):
                assert k not in on
                continue
            if isinstance(decision, Pause):
                theirs = [other for other in on if tickets[other].account == tickets[k].account]
                beyond = zip(used(theirs), shares(accounts), strict=True)
                # An adapter's requests are paused together, for its slot.
                alike = any(tickets[other].adapter == tickets[k].adapter is not None for other in paused)
                beyond = any(count > share for count, share in beyond) or scheduler.patience_s < math.inf
                assert alike or beyond, "it was within its share"  # a reservation counts as well
                paused.append(k)
                left.append(k)
                on.remove(k)
                before[jobs[k].adapter] = before.get(jobs[k].adapter, 0) - 1
                left_s[k] = ends_at.pop(k) - now
                waits[k].append([now, None])
                continue
            assert decision.evicted is None or before.get(decision.evicted, 0) == 0
            before[jobs[k].adapter] = before.get(jobs[k].adapter, 0) + 1
            for other in left[: left.index(k)]:  # first come, first served where nothing else speaks against it
                same = [(tickets[o].adapter, tickets[o].positions, tickets[o].account) for o in (other, k)]
                assert same[0] != same[1] or {k, other} & started.keys()
            paused.clear()
            left.remove(k)
            started.setdefault(k, now)
            on.append(k)
            waits[k][-1][1] = now
            ends_at[k] = now + left_s[k]
            heapq.heappush(events, (ends_at[k], 0, k))
        assert on or not left, "something can always run alone"
        assert set(must).isdisjoint(left)
        if not (set(overdue) & set(left) if alone else overdue):
            assert not any(map(could_start, left)), "somebody waits for nothing"
        reserved = scheduler._reserved
        if accounts <= min(scheduler.places, scheduler.num_slots) and (
            reserved is None or reserved.positions <= scheduler.positions / accounts
        ):
            assert accounts == 1 or not any(within(k, accounts) for k in left), "its share is somebody else's"

    paused = []
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, what, k = heapq.heappop(events)
            if what == 1 and len(live) - len(on) == scheduler.max_queued:
                with pytest.raises(OverloadedError) as caught:
                    scheduler.submit(tickets[k])
                assert caught.value.retry_after_s >= 1
            elif what == 1:
                scheduler.submit(tickets[k])
                live.append(k)
                heapq.heappush(events, (now + jobs[k].fetch, 2, k))
                if jobs[k].leaves < math.inf:
                    heapq.heappush(events, (now + jobs[k].leaves, -1, k))
            elif what == 2:
                scheduler.fetched(tickets[k], now)
                fetched[k] = now
                waits[k] = [[now, None]]
            elif what == 3:
                in_use = k in {jobs[other].adapter for other in on}
                assert scheduler.forget(k) is not in_use
                assert (k in scheduler.slots) is in_use
            elif what == -1 or ends_at.get(k) == now:
                scheduler.end(tickets[k], now)
                live, on = [other for other in live if other != k], [other for other in on if other != k]
                ended.setdefault(k, now)
                ends_at.pop(k, None)
                if k in waits and waits[k][-1][1] is None:
                    waits[k][-1][1] = now
        decide()
        users = Counter(jobs[k].adapter for k in on if jobs[k].adapter)
        assert {name: count for name, count in scheduler.slots.items() if count} == dict(users)
        assert scheduler.running == [tickets[k] for k in on]
        assert {*scheduler.queued} == {tickets[k] for k in live if k not in on}
        new = [ticket for ticket in scheduler.queued if not ticket.begun]
        assert new == [tickets[k] for k in live if k not in started]
        assert len(on) <= scheduler.places
        assert len(scheduler.slots) <= scheduler.num_slots
        held = [k for k in live if tickets[k].held]
        assert not {*held} & {*on}
        assert scheduler.filled == sum(jobs[k].positions for k in [*on, *held]) <= scheduler.positions
        assert all(tickets[k].state == "ended" for k in ended)
    assert not live
    order, found = {k: (at, jobs[k].arrives, k) for k, at in fetched.items()}, {}
    waits = {k: [(start, ended[k] if stop is None else stop) for start, stop in each] for k, each in waits.items()}
    for k in started:
        begin, end = waits[k][0]
        beside = [o for o in order if any(stop > begin and start <= end for start, stop in waits[o])]
        again = [o for o in beside if any(stop > begin and start <= end for start, stop in waits[o][1:])]
        of_account = [o for o in beside if jobs[o].account == jobs[k].account and o != k]
        place = 1 + sum(order[o] < order[k] or o in again for o in of_account)
        active = len({jobs[o].account for o in beside} | {jobs[k].account})
        found[k] = end - begin, place * active * max(job.runs for job in jobs)
    return found


ADAPTERS, LEAVES = st.sampled_from([None, *"abcd"]), st.just(math.inf) | st.integers(0, 40)
TIMES = (st.integers(0, 40), st.integers(0, 30))
SIZES = (st.integers(1, 10), st.integers(1, 9), LEAVES)


def jobs_of(accounts):
    return st.lists(st.builds(Job, *TIMES, ADAPTERS, *SIZES, st.sampled_from(accounts)), min_size=1, max_size=40)


# In the order of their coming the first would take what is kept for the second, and run before it.
FETCHED_LATE = [Job(0, 9, "a", 10, 10), Job(1, 0, "b", 1, 10), Job(1, 0, "c", 5, 10)]
FETCHED_LATE += [Job(k, 0, None, 1, 10) for k in range(1, 40)]


@settings(max_examples=750, derandomize=True)
@example(jobs=FETCHED_LATE, slots=1, places=9, max_queued=1024, patience_s=2, forgotten=[])
@given(
    jobs=jobs_of("A") | jobs_of("ABC"),
    slots=st.integers(1, 3),
    places=st.integers(1, 5),
    max_queued=st.sampled_from([3, 6, 1024]),
    patience_s=st.integers(0, 8) | st.just(math.inf),
    forgotten=st.lists(st.tuples(st.integers(0, 80), st.sampled_from("abcd")), max_size=4),
)
def test_its_promises_hold_and_nobody_waits_beyond_the_stated_bound(
    jobs, slots, places, max_queued, patience_s, forgotten
):
    scheduler = Scheduler(slots, places, positions=10, max_queued=max_queued, patience_s=patience_s)
    for wait, bound in drive(jobs, scheduler, forgotten).values():
        assert wait <= patience_s + bound


CROWDS = st.lists(
    st.builds(Job, st.integers(0, 12), st.integers(0, 3), ADAPTERS, st.integers(1, 3), st.integers(1, 20), LEAVES,
              st.sampled_from("AAAB") | st.sampled_from("ABC")),
    min_size=5, max_size=40,
)  # fmt: skip


@settings(max_examples=750, derandomize=True)
@given(jobs=CROWDS, slots=st.integers(2, 5), places=st.integers(2, 8), patience_s=st.integers(0, 8) | st.just(math.inf))
def test_nobody_waits_for_what_others_have_beyond_their_shares(jobs, slots, places, patience_s):
    for wait, bound in drive(jobs, Scheduler(slots, places, positions=14, patience_s=patience_s)).values():
        assert wait <= patience_s + bound


POPULAR = [Job(k, 0, "popular", 1, 5) for k in range(100)]
RARE = Job(2, 0, "rare", 1, 5)
LARGE = Job(2, 0, "popular", 12, 5)
LATE = Job(0, 50, "late", 1, 5)


@pytest.mark.parametrize("other", [RARE, LARGE, LATE], ids=["another adapter", "all positions", "fetched late"])
@pytest.mark.parametrize(("patience_s", "kept"), [(4, True), (math.inf, False)])
def test_without_patience_the_popular_pass_for_ever(other, patience_s, kept):
    wait, bound = drive([other, *POPULAR], Scheduler(slots=1, places=8, positions=12, patience_s=patience_s))[0]
    assert (wait <= 4 + bound) is kept


def flood(count, account="A", adapter=None, at=0, every=0, runs=10, leaves=math.inf):
    """Requests of one account that come at once, or one after the other."""
    return [Job(at + k * every, 0, adapter, 1, runs, leaves, account) for k in range(count)]


ALL = flood(32)
ONE = Job(0, 0, None, 1, 10, account="B")
HOSTILE = {
    "who came first has 288": [*flood(288), ONE],
    "three who came first": [*flood(100), *flood(100, "C"), *flood(100, "D"), *flood(3, "B")],
    "all that runs at a time": [*ALL, *(job._replace(positions=32) for job in flood(30)), ONE._replace(positions=32)],
    "each for another adapter": [*(flood(1, adapter=f"a{k}")[0] for k in range(150)), ONE._replace(adapter="b")],
    "who leaves before the turn is used": [
        *flood(60, adapter="a", every=1),
        *(flood(1, adapter=f"c{k}", leaves=9 + 9 * k)[0] for k in range(40)),
        ONE._replace(adapter="b"),
    ],
    "who has many small ones beside a large one": [
        *flood(200, "B", every=1), ONE._replace(adapter="b"),
        *(flood(1, account, adapter=f"{account}{k}")[0] for account in "CD" for k in range(20)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("jobs", HOSTILE.values(), ids=HOSTILE)
def test_no_account_is_held_up_by_anothers_queue(jobs, one_queue):
    scheduler = Scheduler(slots=1, places=32, positions=32)
    beyond = [wait - bound for wait, bound in drive(jobs, scheduler, one_queue=one_queue).values()]
    assert (max(beyond) > scheduler.patience_s) is one_queue


BESIDE_MANY = {
    "a large one": [*flood(100, "A", every=1), *flood(100, "C", every=1), Job(3, 0, None, 32, 10, account="B")],
    "one that needs a slot": [
        *flood(100, "A", adapter="a", every=2, runs=5), *flood(100, "C", every=1), ONE._replace(adapter="b", arrives=3),
    ],
}  # fmt: skip


@pytest.mark.parametrize("jobs", BESIDE_MANY.values(), ids=BESIDE_MANY)
def test_who_keeps_within_a_share_passes_no_reservation(jobs):
    scheduler = Scheduler(slots=1, places=32, positions=32)
    assert all(wait <= scheduler.patience_s + bound for wait, bound in drive(jobs, scheduler).values())


def test_accounts_take_turns_and_one_that_cannot_start_keeps_its_own():
    scheduler = Scheduler(slots=1, places=1, patience_s=math.inf)
    made = {}
    for name in ("A1", "A2", "A3", "A4", "B1", "B2", "C1"):
        made[name] = come(scheduler, None, 0, account=name[0])
    order = []
    for now in range(7):
        [(ticket, _)] = scheduler.decide(now)
        order.append(next(name for name, each in made.items() if each is ticket))
        scheduler.end(ticket, now)
    assert order == ["A1", "B1", "C1", "A2", "B2", "A3", "A4"]


def come(scheduler, adapter, now, account=""):
    """A request whose adapter is in memory."""
    ticket = Ticket(adapter, 1, now, account=account)
    scheduler.submit(ticket)
    scheduler.fetched(ticket, now)
    return ticket


def test_one_slot_and_one_place_at_a_time_are_kept_for_those_who_wait():
    scheduler = Scheduler(slots=3, places=6, patience_s=1)
    first = [come(scheduler, name, 0) for name in "abc"]
    assert [start.ticket for start in scheduler.decide(0)] == first
    waiting = [come(scheduler, name, 1) for name in "de"]
    more = [come(scheduler, name, 2) for name in "abc"]
    assert [start.ticket for start in scheduler.decide(2)] == more[1:], "a is to leave, b and c go on"
    scheduler.end(first[0], 3)
    assert [tuple(start) for start in scheduler.decide(3)] == [(waiting[0], "a")]
    assert scheduler.decide(3) == [], "b is to leave, a has no slot"
    assert list(scheduler.slots) == ["b", "c", "d"]


@pytest.mark.parametrize("starts", [True, False])
def test_who_had_a_reservation_and_is_gone_is_held_by_nobody(starts):
    """With it would stay its adapter, in the memory of whoever serves, until another has a reservation."""
    scheduler = Scheduler(slots=1, places=1, patience_s=1)
    first, waiting = (come(scheduler, None, now) for now in (0, 1))
    assert [start.ticket for start in scheduler.decide(1)] == [first]
    assert scheduler.decide(3) == []  # it is overdue: the next place is reserved for it
    if starts:
        scheduler.end(first, 4)
        assert [start.ticket for start in scheduler.decide(4)] == [waiting]
    scheduler.end(waiting, 5)
    gone = weakref.ref(waiting)
    del waiting
    assert gone() is None


def test_the_slot_that_was_used_least_recently_goes():
    scheduler = Scheduler(slots=2)
    for now, (name, evicted) in enumerate([("a", None), ("b", None), ("a", None), ("c", "b"), ("b", "a")]):
        ticket = come(scheduler, name, now)
        assert [tuple(start) for start in scheduler.decide(now)] == [(ticket, evicted)]
        scheduler.end(ticket, now)


def test_what_could_never_run_is_refused():
    scheduler = Scheduler(positions=10)
    with pytest.raises(ValueError, match="may fill 11 positions, 10 are there"):
        scheduler.submit(Ticket(None, 11, 0.0))
    assert not scheduler.queued


def test_the_queue_is_bounded_and_says_when_to_come_again():
    scheduler = Scheduler(places=1, max_queued=4)
    first = come(scheduler, None, 0.0)
    scheduler.decide(0.0)
    for _ in range(4):
        scheduler.submit(Ticket(None, 1, 0.0))
    with pytest.raises(OverloadedError, match=r"4 requests are waiting; try again in 4 s") as caught:
        scheduler.submit(Ticket(None, 1, 0.0))
    assert caught.value.retry_after_s == 4
    scheduler.end(first, 31.0)  # 31 s instead of the 1 s assumed: a tenth of the way, 4 s
    with pytest.raises(OverloadedError, match="16 s"):
        scheduler.submit(Ticket(None, 1, 0.0))


def test_an_account_leaves_places_in_the_queue_to_others():
    scheduler = Scheduler(max_queued=4, max_queued_each=2)
    for account, full in (("a", False), ("a", False), ("b", False), ("a", True), ("b", False), ("c", True)):
        with pytest.raises(OverloadedError) if full else contextlib.nullcontext():
            scheduler.submit(Ticket(None, 1, 0.0, account=account))


@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", 0), ("places", 1.5), ("positions", True), ("max_queued", 0), ("max_queued_each", 0), ("patience_s", -1)],
)
def test_impossible_sizes(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        Scheduler(**{name: value})
