"""A slow link, played on messages: each has a time of delivery.

A message leaves when those before it have left, takes its bytes' time at the link's rate, and then half the round-trip
time; the delays of several that are under way overlap. Left out: loss, jitter, and the slow start of TCP.
"""

import threading
import time

from plpkg.catalog import Link

SPIN_S = 200e-6
"""A sleeping thread wakes up to this much late: so much of a wait is spent looking at the clock."""


class Lane:
    """One direction of a link.

    Parameters
    ----------
    bits_per_s, delay_s
        Its rate, and how long a bit is under way.

    Attributes
    ----------
    held_s
        How long the messages so far were under way, seconds of all together.
    """

    def __init__(self, bits_per_s: float, delay_s: float) -> None:
        self.bits_per_s = bits_per_s
        self.delay_s = delay_s
        self.held_s = 0.0
        self._free_at = 0.0  # when the messages so far have left
        self._lock = threading.Lock()

    def delivery(self, size: int) -> float:
        """When so many bytes that are sent now arrive, by :func:`time.perf_counter`."""
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + 8 * size / self.bits_per_s
            arrives_at = self._free_at + self.delay_s
            self.held_s += arrives_at - now
            return arrives_at


def lanes(link: Link) -> tuple[Lane, Lane]:
    """The way up and the way down."""
    up = Lane(link.uplink_bits_per_s, link.rtt_s / 2)
    down = Lane(link.downlink_bits_per_s, link.rtt_s / 2)
    return up, down


def wait_until(moment: float) -> None:
    """Return at this time, or at once if it is over."""
    left = moment - time.perf_counter()
    if left > SPIN_S:
        time.sleep(left - SPIN_S)
    while time.perf_counter() < moment:
        pass
