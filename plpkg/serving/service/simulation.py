"""The scheduler on a virtual clock: when each request would start and end, *simulated*.

It is the service's own scheduler that decides; the store, the steps and the requests are numbers. Left out: prompts
that take several steps, and answers that end before their last token.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from plpkg.results import Tabular
from plpkg.serving.popularity import ARRIVALS
from plpkg.serving.service.scheduler import Scheduler, Ticket
from plpkg.validation import one_of


class Arrival(NamedTuple):
    """A request to come: when, for whose adapter, and the tokens of its prompt and of its answer."""

    arrived_s: float
    adapter: str
    prompt: int
    new: int


def arrivals(
    count: int,
    per_s: float,
    tenants: int,
    popularity: str = "zipf",
    *,
    tokens: tuple[int, int] = (8, 128),
    seed: int = 0,
) -> list[Arrival]:
    """Draw ``count`` requests that come at random (Poisson), ``per_s`` in a second on average.

    ``popularity`` is one of :data:`plpkg.serving.popularity.ARRIVALS`. Punica's geometric law would leave most of many
    tenants without any. Prompts and answers have any length between the two of ``tokens`` alike.
    """
    one_of("popularity", popularity, ARRIVALS)
    random = Random(seed)
    shares = [1 / k if popularity == "zipf" else 1.0 for k in range(1, tenants + 1)]
    owners = random.choices(range(tenants), shares, k=count)  # drawn for each law, so that the times are the same
    if popularity == "distinct":
        owners = [k % tenants for k in range(count)]
    elif popularity == "identical":
        owners = [0] * count
    now = 0.0
    drawn: list[Arrival] = []
    for k in owners:
        now += random.expovariate(per_s)
        drawn.append(Arrival(now, f"tenant-{k}", random.randint(*tokens), random.randint(*tokens)))
    return drawn


@dataclass(frozen=True)
class Simulation(Tabular):
    """The times of each request, in seconds; a ``hit``: its adapter was in a slot when it came."""

    table: list[dict]

    def rows(self) -> list[dict]:
        return self.table

    @property
    def hit_rate(self) -> float:
        return sum(row["hit"] for row in self.table) / len(self.table)

    @property
    def tokens_per_s(self) -> float:
        first = self.table[0]["arrived_s"]
        last = max(row["ended_s"] for row in self.table)
        return sum(row["new"] for row in self.table) / (last - first)

    @property
    def longest_wait_s(self) -> float:
        """From an adapter's coming to its request's start."""
        return max(row["started_s"] - row["fetched_s"] for row in self.table)

    def first_token_s(self, share: float = 0.5) -> float:
        """The time to the first token that this share of the requests does not exceed."""
        times = sorted(row["first_token_s"] - row["arrived_s"] for row in self.table)
        return times[max(0, math.ceil(share * len(times)) - 1)]

    def of(self, adapter: str) -> "Simulation":
        """The requests for one adapter."""
        return Simulation([row for row in self.table if row["adapter"] == adapter])

    def __repr__(self) -> str:
        return (
            f"Simulation({len(self.table)} requests: {100 * self.hit_rate:.0f} % find their adapter in a slot, "
            f"{self.tokens_per_s:,.0f} tokens/s, {self.first_token_s():.2f} s to the first token, "
            f"p99 {self.first_token_s(0.99):.2f} s)"
        )


def simulate(arrivals: list[Arrival], scheduler: Scheduler, *, fetch_s=0.25, step_s=0.025, token_s=1e-4) -> Simulation:
    """Let requests come to a scheduler, in order, until all have ended.

    A step takes ``step_s`` and ``token_s`` for each token that it reads. An adapter is in memory ``fetch_s`` after it
    was asked for, and stays while it is in a slot or waited for.
    """
    if not arrivals:
        raise ValueError("arrivals must be at least one, got none")
    now = 0.0
    coming = deque(arrivals)
    memory: dict[str, float] = {}  # by adapter, since when it is there
    fetching: dict[Ticket, float] = {}  # until when
    written: Counter[Ticket] = Counter()  # tokens
    rows: dict[Ticket, dict] = {}
    ended: list[Ticket] = []
    while coming or scheduler.queued or scheduler.running:
        while coming and coming[0].arrived_s <= now:
            arrival = coming.popleft()
            ticket = Ticket(arrival.adapter, arrival.prompt + arrival.new, arrival.arrived_s)
            scheduler.submit(ticket)
            ready_s = memory.setdefault(arrival.adapter, arrival.arrived_s + fetch_s)
            fetching[ticket] = max(arrival.arrived_s, ready_s)
            rows[ticket] = arrival._asdict() | dict(hit=ticket.adapter in scheduler.slots, fetched_s=fetching[ticket])
        fetched = [ticket for ticket, ready_s in fetching.items() if ready_s <= now]
        for ticket in fetched:
            scheduler.fetched(ticket, fetching.pop(ticket))
        if fetched or ended:  # nothing else lets a request start
            for start in scheduler.decide(now):  # of one account, so that nobody is paused
                rows[start.ticket]["started_s"] = now
            kept = scheduler.slots.keys() | {ticket.adapter for ticket in scheduler.queued}
            memory = {adapter: since_s for adapter, since_s in memory.items() if adapter in kept}
        if not scheduler.running:
            events = [*fetching.values()]
            if coming:
                events.append(coming[0].arrived_s)
            now = min(events)
            continue
        read = sum(1 if written[ticket] else rows[ticket]["prompt"] for ticket in scheduler.running)
        now += step_s + token_s * read
        written.update(scheduler.running)
        for ticket in scheduler.running:
            rows[ticket].setdefault("first_token_s", now)
        ended = [ticket for ticket in scheduler.running if written[ticket] >= rows[ticket]["new"]]
        for ticket in ended:
            rows[ticket]["ended_s"] = now
            scheduler.end(ticket, now)
    return Simulation(list(rows.values()))
