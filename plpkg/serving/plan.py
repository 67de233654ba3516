"""The plan of a step: which tokens of which requests are read, in one row that is sorted by adapter."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from plpkg.serving.attention import Row
from plpkg.serving.requests import Running
from plpkg.serving.segments import Segments
from plpkg.serving.slots import Group, Pool


class Plan(NamedTuple):
    """The requests that read in a step, each with its row of the batch; and the adapters of its tokens."""

    batch: list[Running]
    rows: list[Row]
    groups: list[Group]


def plan(running: Sequence[Running], pools: Sequence[Pool], max_tokens: int) -> Plan:
    """Choose each request's tokens, sorted by adapter; requests without one come last."""
    counts = shares(running, max_tokens)
    places = _places(pools)  # by digest
    batch = [each for each in running if counts[each]]
    batch.sort(key=lambda each: places[each.owner[0]])
    groups = [Group(Segments(), pool.factors) for pool in pools]
    rows: list[Row] = []
    end = 0
    for digest, members in itertools.groupby(batch, key=lambda each: each.owner[0]):
        begin = end
        for each in members:
            scores_prompt = each.request.score_prompt and each.computed < each.prompt
            rows.append(Row(slice(end, end + counts[each]), each.computed, each.past, scores_prompt))
            end += counts[each]
        if digest:
            pool, slot = places[digest]
            groups[pool].segments.append((begin, end, slot))
    return Plan(batch, rows, groups)


def _places(pools: Sequence[Pool]) -> dict[str, tuple[int, int]]:
    """By digest, the number of its pool and its slot there; without an adapter, behind all of them."""
    places = {"": (len(pools), 0)}
    for number, pool in enumerate(pools):
        pool.close_gaps()
        for slot, digest in enumerate(pool.digests):
            if digest:
                places[digest] = (number, slot)
    return places


def shares(running: Sequence[Running], max_tokens: int) -> dict[Running, int]:
    """How many tokens each running request reads in a step of ``max_tokens``.

    Who writes is never left out. Prompts share the rest, by account: a long one of another's takes no time.
    """
    counts = {each: 1 for each in running if len(each.ids) - each.computed == 1}
    left = max_tokens - len(counts)
    reading = [each for each in running if each not in counts]
    counts |= dict.fromkeys(reading, 0)
    accounts = {each.request.account for each in reading}
    part = left // max(1, len(accounts))
    for most in (part, left):  # first each account's part, then what others leave
        taken = dict.fromkeys(accounts, 0)
        for each in reading:
            account = each.request.account
            unread = len(each.ids) - each.computed - counts[each]
            more = max(0, min(unread, most - taken[account], left))
            counts[each] += more
            taken[account] += more
            left -= more
    return counts
