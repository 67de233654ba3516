"""When a device may learn: in the windows in which it charges, its screen is off and, for some, its network is free.

Federated learning asks for all three (Bonawitz et al. 2019, arXiv:1902.01046). Autonomous learning (AutLearn) sends
nothing and drops the last, so its windows hold the federated ones. Left out: the battery's level, heat, daylight.
"""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch

from plpkg.results import Tabular
from plpkg.untrusted import read_file, shown, strict_json
from plpkg.validation import flag, number, one_of, whole_number

AUTONOMOUS = ("charging", "screen_off")
FEDERATED = (*AUTONOMOUS, "unmetered")
DAY = 86_400  # seconds
NIGHT_MINUTES, UNMETERED_SHARE = 127.5, 0.632  # the median charge of a night, and of devices: both fitted
CHANGES = {name: ("unmetered", name == "wifi") for name in ("wifi", "2g", "3g", "4g", "5g", "unknown")}
CHANGES |= {f"battery_charged_{name}": ("charging", name == "on") for name in ("on", "off")}
CHANGES |= {f"screen_{name}": ("screen_off", name == "lock") for name in ("lock", "unlock")}
STATES = "|".join([*CHANGES, "screen_on", "screen_off", r"\d+(?:\.\d+)?%"])
LINE = re.compile(rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d) *\t *({STATES})", re.ASCII | re.IGNORECASE)


class State(NamedTuple):
    """What a device is doing."""

    charging: bool = False
    screen_off: bool = False
    unmetered: bool = False


@dataclass(frozen=True)
class Trace(Tabular):
    """A device's ``states``, an interval each, and the intervals' bounds, rising from 0; ValueError otherwise."""

    device: str
    times_s: tuple[float, ...]
    states: tuple[State, ...]

    def __post_init__(self) -> None:
        if not self.states or len(self.times_s) != len(self.states) + 1 or self.times_s[0] != 0:
            raise ValueError(f"{len(self.states)} states need one time more, from 0, got {shown(self.times_s)}")
        for before, after in itertools.pairwise(self.times_s):
            number("each of times_s", after, before, open_low=True)
        for name, value in ((name, getattr(state, name)) for state in self.states for name in State._fields):
            flag(name, value)

    def rows(self) -> list[dict]:
        spans = zip(itertools.pairwise(self.times_s), self.states, strict=True)
        return [dict(start_s=start, end_s=end, **state._asdict()) for (start, end), state in spans]

    def __repr__(self) -> str:
        return f"Trace({self.device}: {len(self.states)} intervals in {self.times_s[-1] / DAY:.2f} days)"


def trainable(trace: Trace, rules: Sequence[str] = AUTONOMOUS) -> list[tuple[float, float]]:
    """The longest windows ``(start_s, end_s)`` in which all ``rules``, fields of :class:`State`, hold."""
    for rule in rules:
        one_of("a rule", rule, State._fields)
    groups = itertools.groupby(trace.rows(), lambda row: all(row[rule] for rule in rules))
    return [(run[0]["start_s"], run[-1]["end_s"]) for run in ([*rows] for holds, rows in groups if holds)]


def minutes_per_day(trace: Trace, rules: Sequence[str] = AUTONOMOUS) -> list[float]:
    """The trainable minutes of each whole day: of 24 hours, counted from the trace's start."""
    windows, days = trainable(trace, rules), range(0, int(trace.times_s[-1] // DAY) * DAY, DAY)
    return [sum(max(0.0, min(end, day + DAY) - max(start, day)) for start, end in windows) / 60 for day in days]


def cdf(traces: Iterable[Trace], rules: Sequence[str] = AUTONOMOUS) -> tuple[list[float], list[float]]:
    """The trainable minutes of all device-days, rising, and the share of device-days with at most as many."""
    minutes = sorted(itertools.chain.from_iterable(minutes_per_day(trace, rules) for trace in traces))
    return minutes, [(k + 1) / len(minutes) for k in range(len(minutes))]


def days_until(seconds: float, windows: Iterable[tuple[float, float]], checkpoint_s: float = 0.0) -> float | None:
    """Days from a trace's start until ``seconds`` of learning are done; None if its windows end before.

    What one window leaves goes on in the next; each loses ``checkpoint_s``, to load the model and its checkpoint.
    """
    left, overhead = number("seconds", seconds, open_low=True), number("checkpoint_s", checkpoint_s)
    for start, end in windows:
        if left <= end - start - overhead:
            return (start + overhead + left) / DAY
        left -= max(0.0, end - start - overhead)
    return None


def leave(seconds: float) -> Iterator[None]:
    """A step budget: yields once for each step that may begin, until ``seconds`` have passed. Any generator will do."""
    end = time.monotonic() + number("seconds", seconds)
    while time.monotonic() < end:
        yield


def read_traces(path: str | Path) -> list[Trace]:
    """Read the form of FLASH's ``data/state_traces.json`` (Yang et al. 2021, github.com/PKU-Chengxu/FLASH).

    An object of users, each with ``"messages"``: lines of a time, a tab, and what begins then. As in FLASH's reader
    a locked screen is an off one, and nothing holds before it is said. Here lines are sorted, those of one time stay
    in their order, and the last ends the trace; FLASH sorts its windows, and drops one that is still open.

    Raises
    ------
    ValueError
        Anything malformed, with file, user and line, or messages that span no time; nothing is returned.
    """
    try:
        return [_trace(user, record) for user, record in strict_json(read_file(Path(path), 2**30)).items()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _trace(user: str, record: object) -> Trace:
    messages, said = record.get("messages") if isinstance(record, dict) else None, []
    if not isinstance(messages, str):
        raise ValueError(f"user {shown(user)}: messages must be a text, got {shown(messages)}")
    for row, text in enumerate(map(str.strip, messages.split("\n")), 1):
        try:
            if text:
                stamp, message = LINE.fullmatch(text).groups()
                said.append((datetime.fromisoformat(stamp), message.lower()))
        except (AttributeError, ValueError):  # no match, or no such day
            raise ValueError(f"user {shown(user)}, line {row}: {shown(text)} is no time, tab and state") from None
    states, state = {}, State()
    for when, message in sorted(said, key=lambda each: each[0]):
        state = state._replace(**dict([CHANGES[message]] if message in CHANGES else []))
        states[when] = state
    if len(states) < 2:
        raise ValueError(f"user {shown(user)}: the messages span no time")
    start = min(states)
    return Trace(user, tuple((when - start).total_seconds() for when in states), tuple(states.values())[:-1])


def synthetic_traces(devices: int, days: int, seed: int) -> list[Trace]:
    """Invented traces from a noon on, in whole minutes: a calibration, not evidence.

    Two numbers are fitted so that the median device-day has 120 trainable minutes under :data:`AUTONOMOUS` and 60
    under :data:`FEDERATED`, as AutLearn reports of 1,500 users. The rest, nights of charging at home, half an hour on
    most days, a screen in use for five minutes at a time, is plausible at best.
    """
    generator = torch.Generator().manual_seed(whole_number("seed", seed, 0, 2**64 - 1))
    traces, shape = [], (whole_number("days", days, 1), 1440)
    clock = torch.arange(1440)  # (minutes,) since noon
    use = torch.where((clock >= 780) & (clock < 1140), 0.003, 0.05)  # (minutes,)
    for device in range(whole_number("devices", devices, 1)):
        evening, noon, unmetered = torch.rand(3, days, 1, generator=generator)  # (days, 1) each
        night = NIGHT_MINUTES * (0.8 * torch.randn(days, 1, generator=generator)).exp()  # (days, 1)
        since, then = clock - (600 + 120 * evening), clock - 2000 * noon  # (days, minutes); most noons are in the day
        charging = ((since >= 0) & (since < night)) | ((then >= 0) & (then < 30))  # (days, minutes)
        used = torch.max_pool1d((torch.rand(shape, generator=generator) < use).float(), 5, 1, 2) > 0  # (days, minutes)
        home = (clock >= 420) & (clock < 1200) & (unmetered[0] < UNMETERED_SHARE)  # (minutes,)
        grid = torch.stack([charging, ~used, home.expand(shape)], 2).flatten(0, 1)  # (minutes, states)
        rows, lengths = grid.unique_consecutive(dim=0, return_counts=True)  # (intervals, states), (intervals,)
        times = (0, *(60 * lengths.cumsum(0)).tolist())
        traces.append(Trace(f"synthetic-{device}", times, tuple(State(*row) for row in rows.tolist())))
    return traces
