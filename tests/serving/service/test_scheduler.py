"""Whatever comes, fails, ends or leaves in whatever order: the scheduler's promises hold, and its bound on waiting."""

import heapq
import math
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plpkg.serving.service.scheduler import OverloadedError, Scheduler, Ticket

SIZES = dict(slots=2, places=3, positions=12, max_queued=6, patience_s=3.0)
ADAPTERS = st.sampled_from([None, *"abcd"])


class Machine(RuleBasedStateMachine):
    """A model keeps by itself who was fetched, started and ended."""

    def __init__(self):
        super().__init__()
        self.scheduler, self.now = Scheduler(**SIZES), 0.0
        self.live: list[Ticket] = []  # in the order of their coming
        self.fetched: dict[Ticket, float] = {}
        self.started: list[Ticket] = []
        self.ended: list[Ticket] = []

    def some(self, data, tickets):
        return data.draw(st.sampled_from(tickets))

    @rule(adapter=ADAPTERS, positions=st.sampled_from([1, 2, 3, 5, 12]), in_memory=st.booleans())
    def submit(self, adapter, positions, in_memory):
        ticket = Ticket(adapter, positions, self.now)
        if len(self.live) - len(self.started) == SIZES["max_queued"]:
            with pytest.raises(OverloadedError) as caught:
                self.scheduler.submit(ticket)
            assert caught.value.retry_after_s >= 1
        else:
            self.scheduler.submit(ticket)
            self.live.append(ticket)
            if in_memory:
                self.scheduler.fetched(ticket, self.now)
                self.fetched[ticket] = self.now

    @precondition(lambda self: any(ticket.state == "fetching" for ticket in self.live))
    @rule(data=st.data())
    def fetch(self, data):
        ticket = self.some(data, [ticket for ticket in self.live if ticket.state == "fetching"])
        self.scheduler.fetched(ticket, self.now)
        self.fetched[ticket] = self.now

    @rule(seconds=st.integers(1, 4))
    def time_goes_by(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        """Finished, failed or cancelled: in any state."""
        ticket = self.some(data, self.live)
        self.live.remove(ticket)
        self.started = [each for each in self.started if each is not ticket]
        self.ended.append(ticket)
        self.scheduler.end(ticket, self.now)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def what_comes_too_late(self, data):
        ticket = self.some(data, self.ended)
        self.scheduler.end(ticket, self.now)
        self.scheduler.fetched(ticket, self.now)
        assert ticket.state == "ended"

    @rule(adapter=st.sampled_from("abcd"))
    def forget(self, adapter):
        used = adapter in {ticket.adapter for ticket in self.started}
        assert self.scheduler.forget(adapter) is not used
        assert (adapter in self.scheduler.slots) is used

    def could_start(self, ticket):
        slots = self.scheduler.slots
        room = ticket.adapter is None or ticket.adapter in slots or len(slots) < SIZES["slots"] or 0 in slots.values()
        filled = sum(each.positions for each in self.started)
        return room and len(self.started) < SIZES["places"] and filled + ticket.positions <= SIZES["positions"]

    @rule()
    def decide(self):
        before, queue = dict(self.scheduler.slots), [each for each in self.live if each in self.fetched]
        queue = sorted((each for each in queue if each not in self.started), key=self.fetched.get)
        overdue = [each for each in queue if self.now - self.fetched[each] >= SIZES["patience_s"]]
        could = overdue and self.could_start(overdue[0])
        starts = self.scheduler.decide(self.now)
        for ticket, evicted in starts:
            assert ticket in queue
            assert before.get(evicted, 0) == 0
            self.started.append(ticket)
        left = [each for each in queue if each not in self.started]
        assert starts or self.started or not left, "something can always run alone"
        if could:
            assert overdue[0] in self.started
        if not any(each in overdue for each in left):
            assert not any(self.could_start(each) for each in left), "somebody waits for nothing"
        for ticket, _ in starts:  # first come, first served where nothing else speaks against it
            for other in queue[: queue.index(ticket)]:
                assert other in self.started or (other.adapter, other.positions) != (ticket.adapter, ticket.positions)

    @invariant()
    def its_books_are_right(self):
        scheduler, running = self.scheduler, Counter(each.adapter for each in self.started if each.adapter)
        assert set(scheduler.running) == set(self.started) <= set(self.fetched)
        assert scheduler.queued == [ticket for ticket in self.live if ticket not in self.started]
        assert {name: users for name, users in scheduler.slots.items() if users} == dict(running)
        assert len(scheduler.slots) <= SIZES["slots"]
        assert len(self.started) <= SIZES["places"]
        assert scheduler.filled == sum(each.positions for each in self.started) <= SIZES["positions"]
        assert all(ticket.state == "ended" for ticket in self.ended)

    def teardown(self):
        for ticket in self.live:
            self.scheduler.fetched(ticket, self.now)
            self.fetched.setdefault(ticket, self.now)
        while self.live:  # each round starts somebody, which :meth:`decide` asserts
            self.decide()
            for ticket in list(self.started):
                self.scheduler.end(ticket, self.now)
                self.started.remove(ticket)
                self.live.remove(ticket)
        assert not self.scheduler.queued
        assert not self.scheduler.running
        assert not any(self.scheduler.slots.values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


class Job(NamedTuple):
    """Whole seconds, so that nothing is rounded."""

    arrives: int
    fetch: int
    adapter: str | None
    positions: int
    runs: int


def drive(jobs, scheduler):
    """Each job's wait between its adapter and its start, and what the class's docstring allows."""
    events, times = [], {}
    for k, job in enumerate(jobs):
        ticket = Ticket(job.adapter, job.positions, job.arrives)
        times[ticket] = dict(job=job, fetched=job.arrives + job.fetch, order=(job.arrives + job.fetch, job.arrives, k))
        heapq.heappush(events, (job.arrives, 1, k, ticket))
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, what, k, ticket = heapq.heappop(events)
            if what == 1:
                scheduler.submit(ticket)
                heapq.heappush(events, (times[ticket]["fetched"], 2, k, ticket))
            elif what == 2:
                scheduler.fetched(ticket, now)
            else:
                scheduler.end(ticket, now)
        for ticket, _ in scheduler.decide(now):
            times[ticket]["started"] = now
            heapq.heappush(events, (now + times[ticket]["job"].runs, 0, times[ticket]["order"][2], ticket))
        assert len(scheduler.running) <= scheduler.places
        assert scheduler.filled <= scheduler.positions
        assert len(scheduler.slots) <= scheduler.num_slots
    longest, waits = max(job.runs for job in jobs), []
    assert all("started" in each for each in times.values())
    for each in times.values():
        ahead = [o for o in times.values() if o["order"] < each["order"] and o["started"] > each["fetched"]]
        waits.append((each["started"] - each["fetched"], (len(ahead) + 1) * longest))
    return waits


JOBS = st.lists(
    st.builds(Job, st.integers(0, 40), st.integers(0, 30), ADAPTERS, st.integers(1, 12), st.integers(1, 9)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(JOBS, st.integers(1, 3), st.integers(1, 5), st.integers(0, 8))
def test_nobody_waits_beyond_the_stated_bound(jobs, slots, places, patience_s):
    for wait, bound in drive(jobs, Scheduler(slots, places, positions=12, patience_s=patience_s)):
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


def test_who_was_asked_for_first_but_fetched_late_does_not_pass():
    # In the order of their coming the first would take what is kept for the second, and run before it.
    jobs = [Job(0, 9, "a", 10, 10), Job(1, 0, "b", 1, 10), Job(1, 0, "c", 5, 10)]
    jobs += [Job(k, 0, None, 1, 10) for k in range(1, 40)]
    waits = drive(jobs, Scheduler(slots=1, places=9, positions=10, patience_s=2))
    assert all(wait <= 2 + bound for wait, bound in waits)


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
    tickets = [Ticket(None, 1, 0.0) for _ in range(5)]
    scheduler.submit(tickets[0])
    scheduler.fetched(tickets[0], 0.0)
    scheduler.decide(0.0)
    for ticket in tickets[1:]:
        scheduler.submit(ticket)
    with pytest.raises(OverloadedError, match=r"4 requests are waiting; try again in 4 s") as caught:
        scheduler.submit(Ticket(None, 1, 0.0))
    assert caught.value.retry_after_s == 4
    scheduler.end(tickets[0], 31.0)  # 31 s instead of the 1 s assumed: a tenth of the way, 4 s
    with pytest.raises(OverloadedError, match="16 s"):
        scheduler.submit(Ticket(None, 1, 0.0))


def test_an_account_leaves_places_in_the_queue_to_others():
    scheduler = Scheduler(max_queued=4, max_queued_each=2)
    for account in ("a", "a", "b"):
        scheduler.submit(Ticket(None, 1, 0.0, account=account))
    with pytest.raises(OverloadedError):
        scheduler.submit(Ticket(None, 1, 0.0, account="a"))
    scheduler.submit(Ticket(None, 1, 0.0, account="b"))
    with pytest.raises(OverloadedError):
        scheduler.submit(Ticket(None, 1, 0.0, account="c"))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(slots=0),
        dict(places=1.5),
        dict(positions=True),
        dict(max_queued=0),
        dict(max_queued_each=0),
        dict(patience_s=-1),
    ],
)
def test_impossible_sizes(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        Scheduler(**wrong)
