"""The scheduler on a virtual clock, *simulated*: a step of 25 ms and 0.1 ms a token, a store of 250 ms, 32 places.

Answers and prompts have 8 to 128 tokens, any length alike; requests come at random (Poisson).

* ``slots``: 200 adapters by a power law (``zipf``), 11 requests a second, which is nearly all that the places can
  write: who finds its adapter in a slot, and when the first token comes.
* ``fairness``: the scheduler, which keeps what it lacks for who has waited for 2 s; least recently used without that;
  and in the order of coming, where who cannot start holds up all behind. ``zipf``: as above, at two loads. ``rare``:
  16 slots for 16 adapters that are asked for alike, 34 times a second with 128 places, so that all are nearly always in
  use, and for one that is asked for every 10 s, whose times the rows tell. ``beyond`` counts the requests that waited
  for longer than the scheduler's bound; ``bound_share`` is the largest share of it that one waited for, ``bound_s`` the
  bound of the one that waited for ``longest_wait_s``.

Run as ``python -m benchmarks.serving.scheduling``: less than a minute, the same on any machine.
"""

import math

import numpy as np

from benchmarks import record
from plpkg.serving.service.scheduler import Scheduler, Start
from plpkg.serving.service.simulation import Arrival, Simulation, arrivals, simulate

PATIENCE_S, REQUESTS, TENANTS, SLOTS, PER_S = 2.0, 4000, 200, 16, 11
RARE = "rare"


class InOrder(Scheduler):
    """First come, first served: who cannot start yet holds up all who came later."""

    def decide(self, now_s: float) -> list[Start]:
        starts = []
        while self.queued and self.queued[0].state == "waiting":
            ticket = self.queued[0]
            slot, evicted = self._slot(ticket.adapter)
            if not slot or len(self.running) == self.places or self.filled + ticket.positions > self.positions:
                break
            starts.append(self._start(ticket, evicted, now_s))
        return starts


POLICIES = {
    "patience 2 s": (Scheduler, PATIENCE_S),
    "least recently used": (Scheduler, math.inf),
    "in order": (InOrder, math.inf),
}


def bounds(result: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """Each request's wait, and what the scheduler's docstring allows it (s)."""
    arrived, fetched, started, ended = (
        np.array([row[f"{what}_s"] for row in result.table]) for what in ("arrived", "fetched", "started", "ended")
    )
    longest = (ended - started).max()
    places = np.empty(len(arrived), int)
    places[np.lexsort((arrived, fetched))] = np.arange(len(arrived))
    ahead = [np.sum((places < place) & (started > ready)) for place, ready in zip(places, fetched, strict=True)]
    return started - fetched, PATIENCE_S + (np.array(ahead) + 1) * longest


def row_of(section: str, case: str, what: str, coming: list[Arrival], slots: int, places: int = 32) -> dict:
    policy, patience_s = POLICIES[what]
    scheduler = policy(slots, places, max_queued=len(coming), patience_s=patience_s)
    result = simulate(coming, scheduler)
    waits, allowed = bounds(result)
    shares = waits / allowed
    measured = result.of(RARE) if case == RARE else result
    longest = np.flatnonzero(np.isclose(waits, measured.longest_wait_s))[0]
    return {
        "section": section, "case": case, "what": what, "slots": slots, "requests": len(measured.table),
        "hit_rate": round(measured.hit_rate, 3), "tokens_per_s": round(result.tokens_per_s, 1),
        "first_token_p50_s": round(measured.first_token_s(), 3),
        "first_token_p99_s": round(measured.first_token_s(0.99), 3),
        "longest_wait_s": round(measured.longest_wait_s, 3),
        "bound_share": round(float(shares.max()), 3), "bound_s": round(float(allowed[longest]), 1),
        "longest_run_s": round(max(row["ended_s"] - row["started_s"] for row in result.table), 2),
        "beyond": int((shares > 1 + 1e-9).sum()),
    }  # fmt: skip


def one_rare() -> list[Arrival]:
    """Sixteen tenants who always ask, and one who does every ten seconds."""
    busy = arrivals(2 * REQUESTS, 34, SLOTS, "even")
    rare = [Arrival(10.0 * (k + 1), RARE, 64, 64) for k in range(int(busy[-1].arrived_s / 10))]
    return sorted(busy + rare)


def main() -> None:
    coming = arrivals(REQUESTS, PER_S, TENANTS)
    rows = [row_of("slots", "zipf", "patience 2 s", coming, slots) for slots in (4, 8, 16, 32, 64)]
    for per_s in (PER_S, 13):
        coming = arrivals(REQUESTS, per_s, TENANTS)
        rows += [row_of("fairness", f"zipf, {per_s} a second", what, coming, SLOTS) for what in POLICIES]
    rows += [row_of("fairness", RARE, what, one_rare(), SLOTS, places=128) for what in POLICIES]
    record.write("serving.scheduling", rows)


if __name__ == "__main__":
    main()
