import itertools

import pytest
from hypothesis import given, strategies as st

from plpkg.autonomy import availability
from plpkg.autonomy.availability import days_until, leave


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 100), st.integers(0, 20))
def test_learning_goes_on_from_window_to_window(lengths, needed, checkpoint_s):
    bounds = list(itertools.accumulate(lengths, initial=0))
    windows, done, expected = list(zip(bounds[::2], bounds[1::2], strict=False)), 0, None
    for start, end in windows:
        for second in range(start + checkpoint_s, end):
            done += 1
            if done == needed:
                expected = (second + 1) / 86_400
    assert days_until(needed, windows, checkpoint_s) == expected


@pytest.mark.parametrize(("seconds", "checkpoint_s"), [(0, 0), (-1, 0), (float("inf"), 0), (1, -1), ("1", 0)])
def test_no_negative_learning(seconds, checkpoint_s):
    with pytest.raises(ValueError, match=r"must be .*, got"):
        days_until(seconds, [(0, 10)], checkpoint_s)


def test_leave_ends_with_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(availability.time, "monotonic", lambda: now[0])
    window, steps = leave(2.5), 0
    now[0] = 500.0  # time before the first step is not the window's
    for _ in window:
        now[0] += 1
        steps += 1
    assert steps == 3
    assert list(leave(0)) == []
    with pytest.raises(ValueError, match="seconds must be at least 0, got -1"):
        next(leave(-1))
