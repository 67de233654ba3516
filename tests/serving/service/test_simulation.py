"""The virtual clock against what is counted by hand, and the bound on waiting where others would pass for ever."""

import math
from collections import Counter

import pytest

from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.simulation import Arrival, arrivals, simulate

STEP = dict(fetch_s=10, step_s=1, token_s=0)


def times(result, *names):
    return [tuple(row[f"{name}_s"] for name in names) for row in result.rows()]


def test_a_request_is_fetched_then_runs_a_step_a_token():
    result = simulate([Arrival(5, "a", 7, 3)], Scheduler(), **STEP)
    assert times(result, "arrived", "fetched", "started", "first_token", "ended") == [(5, 15, 15, 16, 18)]
    assert (result.tokens_per_s, result.first_token_s(), result.hit_rate) == (3 / 13, 11, 0)
    assert "0 % find their adapter" in repr(result)


def test_a_prompt_costs_time_by_its_tokens_and_an_answer_by_its_own():
    result = simulate([Arrival(0, "a", 7, 3)], Scheduler(), fetch_s=0, step_s=1, token_s=0.5)
    assert times(result, "first_token", "ended") == [(4.5, 4.5 + 2 * 1.5)]


def test_adapters_come_beside_the_steps_and_only_once():
    coming = [Arrival(0, "a", 1, 40), Arrival(12, "b", 1, 2), Arrival(14, "b", 1, 2), Arrival(15, "a", 1, 2)]
    result = simulate(coming, Scheduler(), **STEP)
    assert times(result, "fetched", "started", "ended") == [(10, 10, 50), (22, 22, 24), (22, 22, 24), (15, 15, 17)]
    assert [row["hit"] for row in result.rows()] == [False, False, False, True]
    assert result.hit_rate == 0.25


def test_who_left_its_slot_comes_from_the_store_again():
    coming = [Arrival(0, "a", 1, 2), Arrival(20, "b", 1, 2), Arrival(50, "a", 1, 2)]
    result = simulate(coming, Scheduler(slots=1), **STEP)
    assert times(result, "fetched")[-1] == (60,)


@pytest.mark.parametrize(
    ("popularity", "expected"),
    [
        ("distinct", [0.25] * 4),
        ("even", [0.25] * 4),
        ("zipf", [12 / 25, 6 / 25, 4 / 25, 3 / 25]),  # 1, 1/2, 1/3, 1/4 of their sum
        ("identical", [1, 0, 0, 0]),
    ],
)
def test_who_asks_how_often(popularity, expected):
    count = 4000
    coming = arrivals(count, 10, 4, popularity, tokens=(3, 5))
    asked = Counter(each.adapter for each in coming)
    for k, share in enumerate(expected):  # five standard deviations of a binomial law
        assert abs(asked[f"tenant-{k}"] - count * share) <= 5 * math.sqrt(count * share * (1 - share))
    assert abs(coming[-1].arrived_s - count / 10) <= 5 * math.sqrt(count) / 10
    assert {each.prompt for each in coming} == {each.new for each in coming} == {3, 4, 5}
    assert coming == sorted(coming)


def test_a_seed_gives_the_same_requests_and_another_others():
    assert arrivals(20, 1, 5, seed=1) == arrivals(20, 1, 5, seed=1) != arrivals(20, 1, 5, seed=2)
    with pytest.raises(ValueError, match=r"popularity must be one of .* got 'skewed'"):
        arrivals(20, 1, 5, "skewed")


@pytest.mark.parametrize(("patience_s", "kept"), [(2, True), (math.inf, False)])
def test_a_rare_tenant_waits_no_longer_than_stated(patience_s, kept):
    busy = arrivals(1500, 34, 16, "even")
    coming = sorted([*busy, *(Arrival(float(at), "rare", 64, 64) for at in (10, 20, 30))])
    rows = simulate(coming, Scheduler(16, 128, patience_s=patience_s)).rows()
    longest = max(row["ended_s"] - row["started_s"] for row in rows)

    def allowed(row):
        older = [o for o in rows if o["fetched_s"] <= row["fetched_s"] < o["started_s"] and o is not row]
        return row["started_s"] - row["fetched_s"] <= 2 + (len(older) + 1) * longest + 1e-9  # sums of floats

    assert all(map(allowed, rows)) is kept
