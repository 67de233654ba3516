"""Which request runs when: a state machine without engine, threads or clock; the caller passes the time.

Punica (arXiv 2310.18547, Section 5) batches what has its adapter and queues the rest. Here four rules decide:

1. A request whose adapter is still on its way has no place in the queue yet (:meth:`Scheduler.fetched`).
2. Accounts take turns (round robin): a start belongs to the account whose last one is longest ago, and goes to its
   oldest request that can start (``_turns``).
3. Adapters have slots, which those that nobody uses give up, least recently used first (``_slot``).
4. Left to that, requests for popular adapters could pass another one for ever, so waiting is bounded, as EASY
   backfilling bounds it (Lifka 1995): while any request has waited for ``patience_s``, what one request lacks is
   reserved for it (``_reservations``): a place in the batch, room for keys and values, and, if no slot is
   idle, one slot that takes no newcomers until it is idle. It keeps the reservation until it starts or leaves; slots
   emptied for many at a time would serve nobody. Accounts take turns at reservations, too, each with its oldest
   request. These turns are counted by themselves: small requests that start would else use up those of a large one.

Accounts have shares: with ``n`` accounts that run or wait, each has the ``n``-th part of the places, of the positions
and of the slots. A request within its account's share does not wait for what others have beyond theirs: of these, what
was started last is paused (``_beyond_their_shares``), and goes on when there is room again. What a paused
request has read stays in memory as long as nobody needs the room; then it is read again, at its own account's expense.

Left out: which answer will be short (nobody knows), and shares within an account.
"""

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from plpkg.validation import number, whole_number


class OverloadedError(RuntimeError):
    """No room for one more request; there may be after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, retry_after_s)

    def __str__(self) -> str:
        return f"{self.args[0]}; try again in {self.retry_after_s} s"


class State(StrEnum):
    """Where a request stands."""

    FETCHING = "fetching"
    """Its adapter is not in memory yet."""
    WAITING = "waiting"
    """It can start, or go on, when it is chosen."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Ticket:
    """A request, as the scheduler sees it.

    Attributes
    ----------
    adapter
        The adapter that it needs in a slot, or None.
    positions
        The most positions of keys and values that it fills: its prompt's and those of the tokens that it may write.
    arrived_s
        When it came.
    state
        Where it stands.
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
    state: State = State.FETCHING
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
        self.num_slots = whole_number("slots", slots, 1)
        self.places = whole_number("places", places, 1)
        self.positions = whole_number("positions", positions, 1)
        self.max_queued = whole_number("max_queued", max_queued, 1)
        if max_queued_each is None:
            max_queued_each = max_queued
        self.max_queued_each = whole_number("max_queued_each", max_queued_each, 1)
        self.patience_s = patience_s if patience_s == math.inf else number("patience_s", patience_s, 0)
        self.queued: list[Ticket] = []
        self.running: list[Ticket] = []
        self.slots: OrderedDict[str, int] = OrderedDict()
        self._mean_run_s = 1.0
        self._reserved: Ticket | None = None  # who has the reservation
        self._turn = itertools.count(1)
        self._last_start: dict[str, int] = {}  # by account, the number of its last turn
        self._last_reservation: dict[str, int] = {}

    @property
    def filled(self) -> int:
        """The positions that running requests may fill, and those that paused ones hold."""
        running = sum(each.positions for each in self.running)
        held = sum(each.positions for each in self.queued if each.held)
        return running + held

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
        ticket.state = State.FETCHING
        ticket.since_s = ticket.arrived_s
        self.queued.append(ticket)

    def fetched(self, ticket: Ticket, now_s: float) -> None:
        """A request's adapter is in memory, or it needs none; for one that has ended meanwhile, no error."""
        if ticket.state == State.FETCHING:
            ticket.state = State.WAITING
            ticket.since_s = now_s

    def end(self, ticket: Ticket, now_s: float) -> None:
        """A request has ended, whatever its state and the reason; once more is no error."""
        if ticket.state == State.RUNNING:
            self._runs_no_more(ticket)
            run_s = now_s - ticket.since_s
            self._mean_run_s += 0.1 * (run_s - self._mean_run_s)  # recent runs count more
        elif ticket.state != State.ENDED:
            self._waits_no_more(ticket)
        ticket.state = State.ENDED

    def forget(self, adapter: str) -> bool:
        """Empty an adapter's slot, unless a running request uses it: whether it has none now."""
        if not self.slots.get(adapter):
            self.slots.pop(adapter, None)
        return adapter not in self.slots

    def decide(self, now_s: float) -> list[Start | Pause | Drop]:
        """Decide what starts now, in the order of reservations and then of turns, and what leaves for it before."""
        decisions: list[Start | Pause | Drop] = []
        paused = True
        while paused:  # then there may be room for who comes first
            more = self._decided(now_s)
            decisions += more
            paused = any(isinstance(each, Pause) for each in more)
        return decisions

    def _decided(self, now_s: float) -> list[Start | Pause | Drop]:
        """The decisions until somebody is paused, or nobody else can start."""
        decisions: list[Start | Pause | Drop] = []
        running = Counter(each.account for each in self.running)
        waiting = {each.account for each in self.queued if each.state == State.WAITING}
        num_accounts = len(running.keys() | waiting)
        free_places = self.places - len(self.running)
        free_positions = self.positions - sum(each.positions for each in self.running)
        drained = ""  # the adapter whose slot takes no newcomers
        for ticket in self._in_order(now_s):  # a generator, which sees the states that _start changes below
            full = free_places <= 0 or free_positions <= 0
            if full and running[ticket.account] + 1 > self._share("places", num_accounts):
                if num_accounts == 1:
                    break
                continue  # there is no room, and none is made for this account
            has_slot, _ = self._slot(ticket.adapter)
            can_enter = has_slot and ticket.adapter != drained
            fits = can_enter and free_places > 0 and ticket.positions <= free_positions
            victims = [] if fits else self._beyond_their_shares(ticket, num_accounts)  # None: it has to wait
            if victims is None and ticket is not self._reserved:
                continue
            if victims is not None:
                decisions += [self._pause(each, now_s) for each in victims]
                decisions += self._dropped(ticket)
                _, evicted = self._slot(ticket.adapter)  # of those that nobody uses now
                decisions.append(self._start(ticket, evicted, now_s))
                running[ticket.account] += 1
                if victims:
                    break  # what is free has changed: decide() looks anew
            elif not has_slot:
                drained = next(iter(self.slots))  # least recently used
            free_places -= 1  # taken, or reserved for it
            free_positions -= ticket.positions
        return decisions

    def _beyond_their_shares(self, ticket: Ticket, num_accounts: int) -> list[Ticket] | None:
        """Running requests of others that have to be paused for one that waits; None if it has to wait.

        The ticket with the reservation counts as if it ran: it must not be passed.
        """
        if num_accounts == 1:
            return None
        running = [*self.running]
        if self._reserved not in (None, ticket):
            running.insert(0, self._reserved)
        if not self._within_its_share(ticket, running, num_accounts):
            return None
        victims: list[Ticket] = []
        lacking = self._lacking(ticket, running)
        while lacking is not None:
            victim = self._furthest_beyond(lacking, running, num_accounts)
            if victim is None:
                return None
            leaving = [victim]
            if lacking == "slots":  # one is free once nobody uses its adapter
                leaving = self._alike(victim)
            victims += [each for each in leaving if each in running]
            running = [each for each in running if each not in leaving]
            lacking = self._lacking(ticket, running)
        return victims

    def _alike(self, ticket: Ticket) -> list[Ticket]:
        """The running requests of an account that use the same adapter."""
        same_account = [each for each in self.running if each.account == ticket.account]
        return [each for each in same_account if each.adapter == ticket.adapter]

    @property
    def _whole(self) -> dict[str, int]:
        """By resource, how much there is."""
        return {"places": self.places, "positions": self.positions, "slots": self.num_slots}

    def _used(self, tickets: list[Ticket]) -> dict[str, int]:
        """By resource, how much these requests use when they run."""
        positions = sum(each.positions for each in tickets)
        adapters = {each.adapter for each in tickets} - {None}
        return {"places": len(tickets), "positions": positions, "slots": len(adapters)}

    def _share(self, resource: str, num_accounts: int) -> float:
        """How much of a resource is one account's."""
        share = self._whole[resource] / num_accounts
        if resource == "positions":
            return share
        return max(1, share)  # part of a place or of a slot is of no use; of positions, a request takes any number

    def _within_its_share(self, ticket: Ticket, running: list[Ticket], num_accounts: int) -> bool:
        """Whether a request leaves its account within its share of everything, if these run."""
        theirs = [each for each in running if each.account == ticket.account]
        used = self._used([*theirs, ticket])
        return all(count <= self._share(resource, num_accounts) for resource, count in used.items())

    def _lacking(self, ticket: Ticket, running: list[Ticket]) -> str | None:
        """The resource that a request would lack if these were all that run."""
        used = self._used([*running, ticket])
        for resource, whole in self._whole.items():
            if used[resource] > whole:
                return resource
        return None

    def _furthest_beyond(self, resource: str, running: list[Ticket], num_accounts: int) -> Ticket | None:
        """The request that was started last of the account that is furthest beyond its share, if one is."""
        by_account: dict[str, list[Ticket]] = {}
        for each in running:
            by_account.setdefault(each.account, []).append(each)
        used = {account: self._used(theirs)[resource] for account, theirs in by_account.items()}
        for account in sorted(used, key=used.__getitem__, reverse=True):
            if used[account] <= self._share(resource, num_accounts):
                return None
            for each in reversed(by_account[account]):
                of_use = resource != "slots" or each.adapter is not None
                if each.state == State.RUNNING and of_use:  # who has the reservation only counts as if it ran
                    return each
        return None

    def _pause(self, ticket: Ticket, now_s: float) -> Pause:
        self._runs_no_more(ticket)
        ticket.state = State.WAITING
        ticket.since_s = now_s
        ticket.held = True
        self.queued.append(ticket)
        return Pause(ticket)

    def _dropped(self, ticket: Ticket) -> list[Drop]:
        """Make room in memory for a request that starts: what was paused last goes first."""
        drops = []
        held = [each for each in self.queued if each.held and each is not ticket]
        taken = 0 if ticket.held else ticket.positions  # what it holds is in ``filled`` already
        while held and self.filled + taken > self.positions:
            last = held.pop()
            last.held = False
            drops.append(Drop(last))
        return drops

    def _in_order(self, now_s: float) -> Iterator[Ticket]:
        """Requests that wait: who has a reservation, then all others in turn."""
        waiting = [each for each in self.queued if each.state == State.WAITING]
        waiting.sort(key=lambda each: (not each.begun, each.since_s))  # what was paused goes on first
        queues: dict[str, deque[Ticket]] = {}  # by account
        for ticket in waiting:
            queues.setdefault(ticket.account, deque()).append(ticket)
        yield from self._reservations(queues, waiting, now_s)
        yield from self._turns(queues)

    def _reservations(self, queues: dict[str, deque[Ticket]], waiting: list[Ticket], now_s: float) -> Iterator[Ticket]:
        """Who has a reservation, and the next if that one starts: the caller changes ``ticket.state`` between two.

        They are taken out of the accounts' ``queues``; ``waiting`` are all who stand in these.
        """
        while waiting and now_s - min(each.since_s for each in waiting) >= self.patience_s:
            if self._reserved not in waiting:
                account = min(queues, key=lambda each: self._last_reservation.get(each, 0))
                self._reserved = queues[account][0]
                self._last_reservation[account] = next(self._turn)  # also if it leaves instead
            ticket = self._reserved
            yield ticket
            queue = queues[ticket.account]
            queue.remove(ticket)
            if not queue:
                del queues[ticket.account]
            if ticket.state == State.WAITING:
                return  # it has not started, and keeps the only reservation
            waiting.remove(ticket)

    def _turns(self, queues: dict[str, deque[Ticket]]) -> Iterator[Ticket]:
        """Accounts in turn, each one's oldest first: the caller changes ``ticket.state`` between two tickets.

        The turn goes on when a request has started; if it could not, the next of its account has it.
        """
        accounts = deque(sorted(queues, key=lambda account: self._last_start.get(account, 0)))
        while accounts:
            account = accounts.popleft()
            ticket = queues[account].popleft()
            yield ticket
            if not queues[account]:
                continue
            if ticket.state == State.RUNNING:
                accounts.append(account)
            else:
                accounts.appendleft(account)

    def _slot(self, adapter: str | None) -> tuple[bool, str | None]:
        """Whether there is a slot for an adapter, and the adapter that would have to leave it."""
        if adapter is None or adapter in self.slots or len(self.slots) < self.num_slots:
            return True, None
        for each, users in self.slots.items():  # least recently used first
            if not users:
                return True, each
        return False, None

    def _start(self, ticket: Ticket, evicted: str | None, now_s: float) -> Start:
        if evicted is not None:
            del self.slots[evicted]
        if ticket.adapter is not None:
            self.slots[ticket.adapter] = self.slots.get(ticket.adapter, 0) + 1
            self.slots.move_to_end(ticket.adapter)
        self._waits_no_more(ticket)
        self.running.append(ticket)
        ticket.state = State.RUNNING
        ticket.since_s = now_s
        ticket.begun = True
        ticket.held = False
        self._last_start[ticket.account] = next(self._turn)
        return Start(ticket, evicted)

    def _runs_no_more(self, ticket: Ticket) -> None:
        self.running.remove(ticket)
        if ticket.adapter is not None:
            self.slots[ticket.adapter] -= 1

    def _waits_no_more(self, ticket: Ticket) -> None:
        self.queued.remove(ticket)
        if ticket is self._reserved:  # or its adapter would stay in memory until another reservation
            self._reserved = None
