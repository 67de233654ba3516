import itertools
import json
import statistics
from datetime import datetime, timedelta
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from plpkg.autonomy import availability
from plpkg.autonomy.availability import (
    AUTONOMOUS,
    FEDERATED,
    State,
    Trace,
    cdf,
    days_until,
    leave,
    minutes_per_day,
    read_traces,
    synthetic_traces,
    trainable,
)

from rounding import relative, sampling_error

START = datetime(2020, 1, 28, 23, 59, 30)
ON = {"charging": "battery_charged_on", "screen_off": "screen_lock", "unmetered": "wifi"}
OFF = {"charging": "battery_charged_off", "screen_off": "screen_unlock", "unmetered": "4G"}
RULES = st.sampled_from([AUTONOMOUS, FEDERATED, ("unmetered",), ()])


@st.composite
def traces(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    states = [State(*draw(st.tuples(*[st.booleans()] * 3))) for _ in lengths]
    return Trace("phone", tuple(itertools.accumulate(lengths, initial=0)), tuple(states))


def seconds(trace, rules):
    """Whether all rules hold, second by second."""
    spans = zip(itertools.pairwise(trace.times_s), trace.states, strict=True)
    return [all(state._asdict()[rule] for rule in rules) for (start, end), state in spans for _ in range(start, end)]


def messages(trace, start=START):
    """What a device would have said, with levels and screens that change nothing in between."""
    lines, before = [], State()
    for time, state in zip(trace.times_s, (*trace.states, trace.states[-1]), strict=True):
        for name, value in state._asdict().items():
            if value != getattr(before, name):
                lines.append((time, (ON if value else OFF)[name]))
        lines += [(time, "87.0%"), (time, "screen_on")]
        before = state
    return "".join(f"{start + timedelta(seconds=time)}\t{said}\n" for time, said in lines)


def written(path, users):
    path.write_text(json.dumps({user: {"guid": user, "messages": text} for user, text in users.items()}))
    return path


@given(traces(), RULES)
def test_windows_are_the_longest_runs_of_seconds(trace, rules):
    holds = seconds(trace, rules)
    windows = trainable(trace, rules)
    assert [k for start, end in windows for k in range(start, end)] == [k for k, held in enumerate(holds) if held]
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(windows))


@given(traces(), RULES)
def test_a_day_s_minutes_are_its_seconds(trace, rules):
    with patch.object(availability, "DAY", 60):  # short days, so that every second can be looked at
        days = minutes_per_day(trace, rules)
    holds = seconds(trace, rules)
    counted = [sum(holds[k : k + 60]) / 60 for k in range(0, len(holds) // 60 * 60, 60)]
    assert days == pytest.approx(counted, rel=relative(16), abs=0)


def test_the_cdf_counts_device_days_of_all_devices():
    day, hour = 86_400, 3_600
    first = Trace("a", (0, hour, 2 * day + hour), (State(True, True), State(True, False)))
    second = Trace("b", (0, 600, 2 * hour, day), (State(), State(True, True, True), State(True, True)))
    assert cdf([first, second]) == ([0.0, 60.0, 1430.0], [1 / 3, 2 / 3, 1.0])
    assert cdf([first, second], FEDERATED) == ([0.0, 0.0, 110.0], [1 / 3, 2 / 3, 1.0])
    assert cdf([Trace("c", (0, hour), (State(),))]) == ([], [])


@given(traces(), st.integers(1, 100), st.integers(0, 20))
def test_learning_goes_on_from_window_to_window(trace, needed, checkpoint_s):
    windows, done, expected = trainable(trace), 0, None
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


@pytest.mark.parametrize(
    ("times", "states", "message"),
    [
        ((0, 5), (), "0 states need one time more"),
        ((0, 5, 9), (State(),), "1 states need one time more"),
        ((1, 5), (State(),), r"from 0, got \(1, 5\)"),
        ((0, 5, 5), (State(), State()), "greater than 5, got 5"),
        ((0, float("nan")), (State(),), "got nan"),
        ((0, 5), (State(True, 1, False),), "screen_off must be True or False, got 1"),
    ],
)
def test_a_trace_is_whole(times, states, message):
    with pytest.raises(ValueError, match=message):
        Trace("phone", times, states)


def test_a_trace_is_a_table():
    trace = Trace("phone", (0, 60, 43_200), (State(True), State(True, True)))
    assert trace.rows()[1] == dict(start_s=60, end_s=43_200, charging=True, screen_off=True, unmetered=False)
    assert repr(trace) == "Trace(phone: 2 intervals in 0.50 days)"
    assert len(trace.to_frame()) == 2
    assert "<th>unmetered</th>" in trace._repr_html_()
    with pytest.raises(ValueError, match="a rule must be one of 'charging', 'screen_off', 'unmetered', got 'wifi'"):
        trainable(trace, ("charging", "wifi"))


@given(st.lists(traces(), min_size=1, max_size=3))
def test_what_is_written_is_read(tmp_path_factory, several):
    path = tmp_path_factory.mktemp("round") / "state_traces.json"
    read = read_traces(written(path, {str(k): messages(trace) for k, trace in enumerate(several)}))
    assert [trace.device for trace in read] == [str(k) for k in range(len(several))]
    for trace, copy in zip(several, read, strict=True):
        assert copy.times_s == trace.times_s
        assert copy.states == trace.states


def test_a_file_is_read_as_flash_reads_it(tmp_path):
    said = [
        ("2020-01-28 22:00:00", "wifi"),
        ("2020-01-28 22:00:10", "Battery_Charged_On"),
        ("2020-01-28 22:00:20", "screen_off"),  # not yet locked
        ("2020-01-28 22:00:25", "screen_lock"),
        ("2020-01-28 22:00:25", "100%"),
        ("2020-01-28 22:00:40", "2G"),
        ("2020-01-28 22:00:50", "WIFI"),
        ("2020-01-28 22:00:55", "Unknown"),
        ("2020-01-28 22:01:00", "screen_on"),  # the lock's own screen
        ("2020-01-28 22:01:10", "screen_unlock"),
        ("2020-01-28 22:01:20", "battery_charged_off"),
    ]
    text = "\n".join(f" {time} \t {state}\r" for time, state in said)
    (trace,) = read_traces(written(tmp_path / "state_traces.json", {"17": f"\n{text}\n \n"}))
    assert trainable(trace, FEDERATED) == [(25, 40), (50, 55)]
    assert trainable(trace) == [(25, 70)]
    assert (trace.device, trace.times_s[-1]) == ("17", 80)


def test_lines_are_sorted_by_time_and_keep_their_order_within_one(tmp_path):
    said = ["00:00:09\twifi", "00:00:00\t4G", "00:00:05\twifi", "00:00:05\t3g", "00:00:07\t5G", "00:00:07\twifi"]
    text = "\n".join(f"2020-02-29 {line}" for line in said)
    (trace,) = read_traces(written(tmp_path / "t.json", {"u": text}))
    assert trainable(trace, ("unmetered",)) == [(7, 9)]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("2020-01-28 22:00:00", "2020-01-28 22:00:00"),
        ("2020-01-28 22:00:00 wifi", "wifi"),
        ("2020-01-28 22:00:00\twifi\twifi", "wifi"),
        ("2020-01-28T22:00:00\twifi", "T22"),
        ("2020-01-28 22:00:00+01:00\twifi", "01:00"),
        ("2020-02-30 22:00:00\twifi", "2020-02-30"),
        ("2020-01-28 24:00:01\twifi", "24:00:01"),
        ("٢020-01-28 22:00:00\twifi", "020-01-28"),
        ("2020-01-28 22:00:00\tbattery_low", "battery_low"),
        ("2020-01-28 22:00:00\t%", "%"),
        ("2020-01-28 22:00:00\t-3%", "-3%"),
        ("2020-01-28 22:00:00\t٣%", "٣%"),
        ("2020-01-28 22:00:00\tſcreen_lock", "creen_lock"),  # a long s is an s where case is ignored
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, shown):
    good = messages(Trace("phone", (0, 5), (State(True),)))
    path = written(tmp_path / "state_traces.json", {"first": good, "second": f"{good}\n{line}\n{good}"})
    place = good.count("\n") + 2
    with pytest.raises(ValueError, match=rf"state_traces.json: user 'second', line {place}: ") as caught:
        read_traces(path)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("[]", "not an object"),
        ('{"a": {"messages": "2020"}, "a": {}}', "stands there twice"),
        ('{"a": []}', "user 'a': messages must be a text, got None"),
        ('{"a": {"messages": ["x"]}}', r"user 'a': messages must be a text, got \['x'\]"),
        ('{"a": {"messages": ""}}', "user 'a': the messages span no time"),
        ('{"a": {"messages": "2020-01-28 22:00:00\\twifi"}}', "user 'a': the messages span no time"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, content, message):
    (path := tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=rf"bad.json: .*{message}"):
        read_traces(path)
    with pytest.raises(ValueError, match=r"none.json: none.json is missing"):
        read_traces(tmp_path / "none.json")


PIECES = st.sampled_from(
    ["2020-01-28 22:00:00", "2020-01-28 23:00:00", "\t", "\n", " ", "wifi", "0.0%", "\x00", "9999"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.lists(PIECES, max_size=9).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.just("messages"), inner),
    max_leaves=8,
)


SCRAMBLED = st.lists(PIECES, max_size=12).map("".join)


@settings(max_examples=300)
@given(st.binary() | st.text().map(str.encode) | JSON.map(json.dumps).map(str.encode), SCRAMBLED)
def test_garbage_is_refused_or_a_trace(tmp_path_factory, content, text):
    path = tmp_path_factory.mktemp("garbage") / "state_traces.json"
    path.write_bytes(content)
    try:
        assert all(isinstance(trace, Trace) for trace in read_traces(path))
    except ValueError as error:
        assert "state_traces.json" in str(error)  # noqa: PT017 (either is right)
    try:
        assert [trace.times_s for trace in read_traces(written(path, {"u": text}))] == [(0, 3600)]
    except ValueError as error:
        assert "user 'u'" in str(error)  # noqa: PT017


def test_invented_traces_have_the_reported_medians():
    invented = synthetic_traces(2000, 1, seed=0)
    for rules, median in ((AUTONOMOUS, 120), (FEDERATED, 60)):
        minutes = [day for trace in invented for day in minutes_per_day(trace, rules)]
        below = statistics.mean((day < median) + (day == median) / 2 for day in minutes)
        # Of one day each, devices are independent; the fit itself is near to one in two hundred days.
        assert abs(below - 0.5) < sampling_error(0.25, len(minutes)) + 0.005


def test_invented_traces_are_their_seed_s():
    invented = synthetic_traces(3, 4, seed=5)
    assert invented == synthetic_traces(3, 4, seed=5) != synthetic_traces(3, 4, seed=6)
    assert len({trace.states for trace in invented}) == 3
    for trace in invented:
        assert trace.times_s[-1] == 4 * 86_400
        assert all(time % 60 == 0 for time in trace.times_s)
        assert all(one != other for one, other in itertools.pairwise(trace.states))
    for devices, days in ((0, 1), (1, 0), (1, 1.5)):
        with pytest.raises(ValueError, match=r"(devices|days) must be a whole number of at least 1, got"):
            synthetic_traces(devices, days, seed=0)
    for seed in (-1, 2**64, 0.5):
        with pytest.raises(ValueError, match=r"seed must be .*between 0 and \d+, got"):
            synthetic_traces(1, 1, seed)
