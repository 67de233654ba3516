"""Whatever comes, fails, ends or leaves in whatever order: the scheduler's promises hold, and its bound on waiting."""

import contextlib
import heapq
import math
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st

from plpkg.serving.service.scheduler import OverloadedError, Scheduler, Ticket


class Job(NamedTuple):
    """A request to come, in whole seconds, so that nothing is rounded; it may leave in any state."""

    arrives: int
    fetch: int
    adapter: str | None
    positions: int
    runs: int
    leaves: float = math.inf


def drive(jobs, scheduler, forgotten=()):
    """By job that has started, its wait since its adapter came, and what the scheduler's docstring allows.

    ``forgotten`` are ``(time, adapter)``. The scheduler's books are kept here a second time, by the jobs' numbers.
    """
    tickets = [Ticket(job.adapter, job.positions, job.arrives) for job in jobs]
    live, fetched, started, ended = [], {}, {}, {}  # live in the order of their coming
    events = [(job.arrives, 1, k) for k, job in enumerate(jobs)] + [(at, 3, adapter) for at, adapter in forgotten]
    heapq.heapify(events)

    def running():
        return [k for k in live if k in started]

    def could_start(k):
        slots, job, filled = scheduler.slots, jobs[k], sum(jobs[other].positions for other in running())
        room = job.adapter is None or job.adapter in slots or len(slots) < scheduler.num_slots or 0 in slots.values()
        return room and len(running()) < scheduler.places and filled + job.positions <= scheduler.positions

    def decide():
        queue = sorted((k for k in live if k in fetched and k not in started), key=fetched.get)
        overdue = [k for k in queue if now - fetched[k] >= scheduler.patience_s]
        must, before, left = [k for k in overdue[:1] if could_start(k)], dict(scheduler.slots), [*queue]
        for ticket, evicted in scheduler.decide(now):
            k = tickets.index(ticket)
            assert before.get(evicted, 0) == 0
            for other in left[: left.index(k)]:  # first come, first served where nothing else speaks against it
                assert (jobs[other].adapter, jobs[other].positions) != (jobs[k].adapter, jobs[k].positions)
            left.remove(k)
            started[k] = now
            heapq.heappush(events, (now + jobs[k].runs, 0, k))
        assert running() or not left, "something can always run alone"
        assert set(must).isdisjoint(left)
        if not set(overdue) & set(left):
            assert not any(map(could_start, left)), "somebody waits for nothing"

    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, what, k = heapq.heappop(events)
            if what == 1 and len(live) - len(running()) == scheduler.max_queued:
                with pytest.raises(OverloadedError) as caught:
                    scheduler.submit(tickets[k])
                assert caught.value.retry_after_s >= 1
            elif what == 1:
                scheduler.submit(tickets[k])
                live.append(k)
                heapq.heappush(events, (now + jobs[k].fetch, 2, k))
                if jobs[k].leaves < math.inf:
                    heapq.heappush(events, (now + jobs[k].leaves, 0, k))
            elif what == 2:
                scheduler.fetched(tickets[k], now)
                fetched[k] = now
            elif what == 3:
                used = k in {jobs[other].adapter for other in running()}
                assert scheduler.forget(k) is not used
                assert (k in scheduler.slots) is used
            else:
                scheduler.end(tickets[k], now)
                live = [other for other in live if other != k]
                ended.setdefault(k, now)
        decide()
        users = Counter(jobs[k].adapter for k in running() if jobs[k].adapter)
        assert {name: count for name, count in scheduler.slots.items() if count} == dict(users)
        assert {*scheduler.running} == {tickets[k] for k in running()}
        assert scheduler.queued == [tickets[k] for k in live if k not in started]
        assert len(running()) <= scheduler.places
        assert len(scheduler.slots) <= scheduler.num_slots
        assert scheduler.filled == sum(jobs[k].positions for k in running()) <= scheduler.positions
        assert all(tickets[k].state == "ended" for k in ended)
    assert not live
    order, waits = {k: (at, jobs[k].arrives, k) for k, at in fetched.items()}, {}
    for k in started:
        ahead = [o for o in order if order[o] < order[k] and min(started.get(o, math.inf), ended[o]) > fetched[k]]
        waits[k] = started[k] - fetched[k], (len(ahead) + 1) * max(job.runs for job in jobs)
    return waits


ADAPTERS, LEAVES = st.sampled_from([None, *"abcd"]), st.just(math.inf) | st.integers(0, 40)
JOBS = st.lists(
    st.builds(Job, st.integers(0, 40), st.integers(0, 30), ADAPTERS, st.integers(1, 10), st.integers(1, 9), LEAVES),
    min_size=1,
    max_size=40,
)
# In the order of their coming the first would take what is kept for the second, and run before it.
FETCHED_LATE = [Job(0, 9, "a", 10, 10), Job(1, 0, "b", 1, 10), Job(1, 0, "c", 5, 10)]
FETCHED_LATE += [Job(k, 0, None, 1, 10) for k in range(1, 40)]


@settings(max_examples=400, derandomize=True)
@example(jobs=FETCHED_LATE, slots=1, places=9, max_queued=1024, patience_s=2, forgotten=[])
@given(
    jobs=JOBS,
    slots=st.integers(1, 3),
    places=st.integers(1, 5),
    max_queued=st.sampled_from([3, 6, 1024]),
    patience_s=st.integers(0, 8),
    forgotten=st.lists(st.tuples(st.integers(0, 80), st.sampled_from("abcd")), max_size=4),
)
def test_its_promises_hold_and_nobody_waits_beyond_the_stated_bound(
    jobs, slots, places, max_queued, patience_s, forgotten
):
    scheduler = Scheduler(slots, places, positions=10, max_queued=max_queued, patience_s=patience_s)
    for wait, bound in drive(jobs, scheduler, forgotten).values():
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


def come(scheduler, adapter, now):
    """A request whose adapter is in memory."""
    ticket = Ticket(adapter, 1, now)
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
