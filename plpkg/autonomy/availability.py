"""When learning ends that has to wait for windows: a phone learns while it charges and its screen is off."""

import time
from collections.abc import Iterable, Iterator

from plpkg.validation import number

DAY = 86_400  # seconds


def days_until(seconds: float, windows: Iterable[tuple[float, float]], checkpoint_s: float = 0.0) -> float | None:
    """Days from time 0 until ``seconds`` of learning are done; None if the windows end before.

    Work that one window leaves goes on in the next; each loses ``checkpoint_s``, to load the model and its checkpoint.
    """
    left = number("seconds", seconds, open_low=True)
    overhead = number("checkpoint_s", checkpoint_s)
    for start, end in windows:
        usable = end - start - overhead
        if left <= usable:
            return (start + overhead + left) / DAY
        left -= max(0.0, usable)
    return None


def leave(seconds: float) -> Iterator[None]:
    """A step budget: yields once for each step that may begin, until ``seconds`` have passed. Any generator will do."""
    end = time.monotonic() + number("seconds", seconds)
    while time.monotonic() < end:
        yield
