"""Which request runs when: a state machine without engine, threads or clock; the caller passes the time.

Punica (arXiv 2310.18547, Section 5) batches what has its adapter and queues the rest. Here a request whose adapter is
still on its way stands behind nobody and before nobody. Accounts take turns (round robin): a start belongs to the
account whose last one is longest ago, and goes to its oldest request that can start. Adapters have slots, which those
that nobody uses give up, least recently used first. Left to that, requests for popular adapters could pass another one
for ever, so waiting is bounded, as EASY backfilling bounds it (Lifka 1995): while any request has waited for
``patience_s``, what one request lacks is reserved for it: a place in the batch, room for keys and values, and, if no
slot is idle, one slot that takes no newcomers until it is idle. It keeps the reservation until it starts or leaves;
slots emptied for many at a time would serve nobody. Accounts take turns at reservations, too, each with its oldest
request. These turns are counted by themselves: small requests that start would else use up those of a large one.

Accounts have shares: with ``n`` accounts that run or wait, each has the ``n``-th part of the places, of the positions
and of the slots. A request within its account's share does not wait for what others have beyond theirs: of these, what
was started last is paused, and goes on when there is room again. What a paused request has read stays in memory as long
as nobody needs the room; then it is read again, at its own account's expense.

Left out: which answer will be short (nobody knows), and shares within an account.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from plpkg.validation import number, whole_number


class OverloadedError(RuntimeError):
    """No room for one more request; there may be after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, retry_after_s)

    def __str__(self) -> str:
        return f"{self.args[0]}; try again in {self.retry_after_s} s"


@dataclass(eq=False)
class Ticket:
    """A request, as the scheduler sees it.

    Attributes
    ----------
    adapter
        What it needs in a slot, or None.
    positions
        The most positions of keys and values that it fills: its prompt's and those of the tokens that it may write.
    arrived_s
        When it came.
    state
        ``"fetching"`` until its adapter is in memory, ``"waiting"``, ``"running"``, ``"ended"``.
    since_s
        When it came into this state.
    account
        Whose it is.
    begun
        It has run.
    held
        It is paused, and what it has read is still in memory.
    """

    adapter: str | None
    positions: int
    arrived_s: float
    state: str = "fetching"
    since_s: float = 0.0
    account: str = ""
    begun: bool = False
    held: bool = False


class Pause(NamedTuple):
    """A decision: the request gives up its place, and waits to go on."""

    ticket: Ticket


class Drop(NamedTuple):
    """A decision: what a paused request has read leaves the memory."""

    ticket: Ticket


class Start(NamedTuple):
    """A decision: the request runs now, or goes on, and the adapter, if any, gives up its slot for the request's."""

    ticket: Ticket
    evicted: str | None


class Scheduler:
    """Decides which requests run.

    An account's k-th waiting request starts at most ``patience_s + k * n * longest`` seconds after its adapter has
    come, if ``n`` accounts, its own among them, have waiting requests meanwhile, and none runs for more than
    ``longest`` seconds. It is the k-th if ``k - 1`` of its account still wait then whose adapters came before. ``n``
    counts also accounts that come while it waits, and ``longest`` the steps that read prompts, others' among them. What
    waits before it is submitted, or until its adapter has come, has no bound here.

    A request that leaves its account within its share of places, positions and slots starts at the next decision, while
    there are no more accounts than places and slots, and no request with a reservation is larger than a share. For if
    it lacks one of them, the others use more than ``n - 1`` shares of that, reservations included, so one of them is
    beyond its own; and once all others are within theirs, there is room for it and for the reservation. Accounts that
    are within their shares, with the reservation, are not paused unless more accounts come. The bound above holds as
    well: ``k`` counts also those of its account that are paused meanwhile.

    Parameters
    ----------
    slots
        The most adapters in use at a time.
    places
        The most requests that run at a time.
    positions
        The most positions that running requests may fill.
    max_queued
        The most requests that do not run yet.
    max_queued_each
        The most of them that are one account's; all by default.
    patience_s
        After which there are reservations; ``math.inf`` for none.

    Attributes
    ----------
    queued, running
        Tickets, in the order of their coming and of their starting.
    slots
        By adapter, how many running requests use it; who was started least recently first.
    """

    def __init__(
        self, slots=16, places=32, positions=2**16, max_queued=1024, max_queued_each=None, patience_s=2.0
    ) -> None:
        self.num_slots, self.places = whole_number("slots", slots, 1), whole_number("places", places, 1)
        self.positions = whole_number("positions", positions, 1)
        self.max_queued = whole_number("max_queued", max_queued, 1)
        each = max_queued if max_queued_each is None else max_queued_each
        self.max_queued_each = whole_number("max_queued_each", each, 1)
        self.patience_s = patience_s if patience_s == math.inf else number("patience_s", patience_s, 0)
        self.queued: list[Ticket] = []
        self.running: list[Ticket] = []
        self.slots: OrderedDict[str, int] = OrderedDict()
        self._mean_run_s = 1.0
        self._reserved: Ticket | None = None
        self._count, self._last_start, self._last_reservation = 0, {}, {}  # by account, as numbers that only grow

    @property
    def filled(self) -> int:
        """The positions that running requests may fill, and those that paused ones hold."""
        return sum(each.positions for each in self.running) + sum(each.positions for each in self.queued if each.held)

    def submit(self, ticket: Ticket) -> None:
        """Queue a request, which is told by :meth:`fetched` when its adapter is there.

        Raises
        ------
        ValueError
            It could never run.
        OverloadedError
            The queue is full, or the account's part of it.
        """
        if ticket.positions > self.positions:
            raise ValueError(f"the request may fill {ticket.positions:,} positions, {self.positions:,} are there")
        theirs = sum(each.account == ticket.account for each in self.queued)
        if len(self.queued) >= self.max_queued or theirs >= self.max_queued_each:
            after = math.ceil(self._mean_run_s * len(self.queued) / self.places)
            raise OverloadedError(f"{len(self.queued)} requests are waiting", max(1, after))
        ticket.state, ticket.since_s = "fetching", ticket.arrived_s
        self.queued.append(ticket)

    def fetched(self, ticket: Ticket, now_s: float) -> None:
        """A request's adapter is in memory, or it needs none; for one that has ended meanwhile, no error."""
        if ticket.state == "fetching":
            ticket.state, ticket.since_s = "waiting", now_s

    def end(self, ticket: Ticket, now_s: float) -> None:
        """A request has ended, whatever its state and the reason; once more is no error."""
        if ticket.state == "running":
            self.running.remove(ticket)
            self._mean_run_s += 0.1 * (now_s - ticket.since_s - self._mean_run_s)
            if ticket.adapter is not None:
                self.slots[ticket.adapter] -= 1
        elif ticket.state != "ended":
            self._waits_no_more(ticket)
        ticket.state = "ended"

    def forget(self, adapter: str) -> bool:
        """Empty an adapter's slot, unless a running request uses it: whether it has none now."""
        if not self.slots.get(adapter):
            self.slots.pop(adapter, None)
        return adapter not in self.slots

    def decide(self, now_s: float) -> list[Start | Pause | Drop]:
        """What starts now, in the order of reservations and then of turns, and what leaves for it before."""
        decisions: list[Start | Pause | Drop] = []
        while True:
            more = self._decided(now_s)
            decisions += more
            if not any(isinstance(each, Pause) for each in more):
                return decisions

    def _decided(self, now_s: float) -> list[Start | Pause | Drop]:
        """What is decided until somebody is paused, which may leave room for who comes first."""
        decisions: list[Start | Pause | Drop] = []
        running = Counter(each.account for each in self.running)
        num_accounts = len(running.keys() | {each.account for each in self.queued if each.state == "waiting"})
        places = self.places - len(self.running)
        positions = self.positions - sum(each.positions for each in self.running)
        drained = ""  # whose slot takes no newcomers
        for ticket in self._in_order(now_s):
            if min(places, positions) <= 0 and running[ticket.account] + 1 > self._share("places", num_accounts):
                if num_accounts == 1:
                    break
                continue  # there is no room, and none is made for this account
            slot, evicted = self._slot(ticket.adapter)
            fits = slot and ticket.adapter != drained and places > 0 and ticket.positions <= positions
            paused = [] if fits else self._beyond_their_shares(ticket, num_accounts)
            if paused is not None:
                decisions += [self._pause(each, now_s) for each in paused]
                decisions += self._dropped(ticket)
                _, evicted = self._slot(ticket.adapter)
                decisions.append(self._start(ticket, evicted, now_s))
                running[ticket.account] += 1
                if paused:
                    break
            elif ticket is self._reserved:
                drained = "" if slot else next(iter(self.slots))
            else:
                continue
            places, positions = places - 1, positions - ticket.positions  # taken, or reserved for it
        return decisions

    def _beyond_their_shares(self, ticket: Ticket, num_accounts: int) -> list[Ticket] | None:
        """Running requests of others that have to be paused for one that waits; None if it has to wait.

        What has the reservation counts as if it ran: it must not be passed.
        """
        if num_accounts == 1:
            return None
        reserved = [self._reserved] if self._reserved not in (None, ticket) else []
        running, victims = [*reserved, *self.running], []
        if not self._within_its_share(ticket, running, num_accounts):
            return None
        while True:
            lacking = self._lacking(ticket, running)
            if lacking is None:
                return victims
            victim = self._furthest_beyond(lacking, running, num_accounts)
            if victim is None:
                return None
            leave = [victim]
            if lacking == "slots":  # one is free once nobody uses its adapter
                leave = [
                    each for each in self.running if (each.account, each.adapter) == (victim.account, victim.adapter)
                ]
            victims += [each for each in leave if each in running]
            running = [each for each in running if each not in leave]

    @property
    def _whole(self) -> dict[str, int]:
        """Of each resource, how much there is."""
        return {"places": self.places, "positions": self.positions, "slots": self.num_slots}

    def _used(self, tickets: list[Ticket]) -> dict[str, int]:
        """Of each resource, how much requests use that run."""
        adapters = {each.adapter for each in tickets} - {None}
        return {
            "places": len(tickets), "positions": sum(each.positions for each in tickets), "slots": len(adapters),
        }  # fmt: skip

    def _share(self, resource: str, num_accounts: int) -> float:
        share = self._whole[resource] / num_accounts
        # Part of a place or of a slot is of no use; positions are many, and a request takes any number of them.
        return share if resource == "positions" else max(1, share)

    def _within_its_share(self, ticket: Ticket, running: list[Ticket], num_accounts: int) -> bool:
        used = self._used([*(each for each in running if each.account == ticket.account), ticket])
        return all(count <= self._share(resource, num_accounts) for resource, count in used.items())

    def _lacking(self, ticket: Ticket, running: list[Ticket]) -> str | None:
        """What a request would lack if these were all that run."""
        used = self._used([*running, ticket])
        return next((resource for resource, whole in self._whole.items() if used[resource] > whole), None)

    def _furthest_beyond(self, resource: str, running: list[Ticket], num_accounts: int) -> Ticket | None:
        """What was started last of the account that is furthest beyond its share, if one is."""
        by_account: dict[str, list[Ticket]] = {}
        for each in running:
            by_account.setdefault(each.account, []).append(each)
        used = {account: self._used(theirs)[resource] for account, theirs in by_account.items()}
        for account in sorted(used, key=used.get, reverse=True):
            if used[account] <= self._share(resource, num_accounts):
                return None
            for each in reversed(by_account[account]):
                if each.state == "running" and (resource != "slots" or each.adapter is not None):
                    return each
        return None

    def _pause(self, ticket: Ticket, now_s: float) -> Pause:
        self.running.remove(ticket)
        if ticket.adapter is not None:
            self.slots[ticket.adapter] -= 1
        ticket.state, ticket.since_s, ticket.held = "waiting", now_s, True
        self.queued.append(ticket)
        return Pause(ticket)

    def _dropped(self, ticket: Ticket) -> list[Drop]:
        """Make room in memory for a request that starts: what was paused last goes first."""
        drops = []
        held = [each for each in self.queued if each.held and each is not ticket]
        taken = 0 if ticket.held else ticket.positions
        while held and self.filled + taken > self.positions:
            last = held.pop()
            last.held = False
            drops.append(Drop(last))
        return drops

    def _in_order(self, now_s: float) -> Iterator[Ticket]:
        """Requests that wait: who has a reservation, then all in turn. It looks whether the one before was started."""
        queues: dict[str, deque[Ticket]] = {}
        waiting = [each for each in self.queued if each.state == "waiting"]
        waiting.sort(key=lambda each: (not each.begun, each.since_s))  # what was paused goes on first
        for ticket in waiting:
            queues.setdefault(ticket.account, deque()).append(ticket)
        while waiting and now_s - min(each.since_s for each in waiting) >= self.patience_s:
            if self._reserved not in waiting:
                account = min(queues, key=lambda each: self._last_reservation.get(each, 0))
                self._reserved = queues[account][0]
                self._last_reservation[account] = self._count = self._count + 1  # also if it leaves instead
            yield (ticket := self._reserved)
            queues[ticket.account].remove(ticket)
            queues = {account: queue for account, queue in queues.items() if queue}
            if ticket.state == "waiting":
                break
            waiting.remove(ticket)
        turns = deque(sorted(queues, key=lambda account: self._last_start.get(account, 0)))
        while turns:
            account = turns.popleft()
            ticket = queues[account].popleft()
            yield ticket
            if queues[account]:
                (turns.append if ticket.state == "running" else turns.appendleft)(account)

    def _slot(self, adapter: str | None) -> tuple[bool, str | None]:
        """Whether there is a slot for an adapter, and who would have to leave it."""
        if adapter is None or adapter in self.slots or len(self.slots) < self.num_slots:
            return True, None
        idle = next((each for each, users in self.slots.items() if not users), None)
        return idle is not None, idle

    def _start(self, ticket: Ticket, evicted: str | None, now_s: float) -> Start:
        if evicted is not None:
            del self.slots[evicted]
        if ticket.adapter is not None:
            self.slots[ticket.adapter] = self.slots.get(ticket.adapter, 0) + 1
            self.slots.move_to_end(ticket.adapter)
        self._waits_no_more(ticket)
        self.running.append(ticket)
        ticket.state, ticket.since_s = "running", now_s
        ticket.begun, ticket.held = True, False
        self._last_start[ticket.account] = self._count = self._count + 1
        return Start(ticket, evicted)

    def _waits_no_more(self, ticket: Ticket) -> None:
        self.queued.remove(ticket)
        if ticket is self._reserved:  # or its adapter would stay in memory until another reservation
            self._reserved = None
