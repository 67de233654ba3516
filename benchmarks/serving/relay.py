"""A TCP relay that makes loopback a slow link: every byte takes its time each way, and half the RTT on top.

It runs in a process of its own: in the device's, Python's lock would delay it. It also counts the bytes of the TCP
stream: payload, protobuf, gRPC, HTTP/2 and TLS, without TCP/IP headers.

Left out: loss, jitter, and the slow start of TCP.
"""

import contextlib
import json
import math
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque

from plpkg.catalog import Link, link as find_link
from plpkg.residual.programs.curious import end_process
from plpkg.validation import host_and_port

UNLIMITED = Link("unlimited", 1e15, 1e15, 0.0)
CHUNK = 16 * 1024
WAITING = 4 * 2**20
"""Bytes on their way in one direction of a connection, beyond which the relay stops reading."""
SPIN_S = 300e-6
"""A sleeping process wakes up to this much late: the rest of a wait is spent looking at the sockets and the clock."""
CLOCK_S = 30e-6
"""A look at the sockets takes up to this long: the rest of a wait is spent looking at the clock alone."""


class Relay:
    """Between a device and the cloud; a context manager.

    Parameters
    ----------
    target
        Where to: ``host:port``.
    link
        A link or its catalog name; without limits by default.

    Attributes
    ----------
    address
        Where the device is to connect.

    Raises
    ------
    ValueError
        No such address or link.
    """

    def __init__(self, target: str, link: str | Link = UNLIMITED) -> None:
        self.link = find_link(link)
        host_and_port(target)
        rates = [self.link.uplink_bits_per_s, self.link.downlink_bits_per_s, self.link.rtt_s]
        command = [sys.executable, "-m", __name__, json.dumps([target, *rates])]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._process = subprocess.Popen(command, start_new_session=True, **pipes)  # Ctrl+C is not meant for it
        self._asking, self._counts = threading.Lock(), [0, 0, 0.0]
        self._end = weakref.finalize(self, end_process, self._process)  # also where nobody closes it
        self.address = f"127.0.0.1:{self._process.stdout.readline().strip()}"

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def uplink_bytes(self) -> int:
        """Bytes that have come from the devices so far."""
        return self._ask("count")[0]

    @property
    def downlink_bytes(self) -> int:
        """Bytes that have come from the target so far."""
        return self._ask("count")[1]

    @property
    def held_s(self) -> float:
        """How long it has kept what passed, seconds of all pieces together: their time on the link.

        A message of up to 16 KiB that waits for its answer is one piece.
        """
        return self._ask("count")[2]

    def cut(self) -> None:
        """Break every connection, as a link does that goes down for a moment."""
        self._ask("cut")

    def close(self) -> None:
        """Break every connection, and accept no more; the counts stay."""
        with contextlib.suppress(OSError, ValueError):  # the process has ended before
            self._ask("count")
        self._end()

    def _ask(self, what: str) -> list:
        with self._asking:
            if self._end.alive:
                self._process.stdin.write(what + "\n")
                self._counts = json.loads(self._process.stdout.readline())
            return self._counts


class _Direction:
    """One direction of the link: its connections share it."""

    def __init__(self, bits_per_s: float) -> None:
        self.bits_per_s, self.free_at, self.bytes, self.held_s = bits_per_s, 0.0, 0, 0.0

    def arrival(self, size: int, now: float, delay_s: float) -> float:
        """When so many bytes that enter now come out."""
        self.free_at = max(now, self.free_at) + 8 * size / self.bits_per_s
        self.bytes += size
        return self.free_at + delay_s


class _Flow:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: _Direction) -> None:
        self.source, self.sink, self.direction = source, sink, direction
        self.under_way: deque[tuple[float, float, bytes]] = deque()  # when it arrives, when it came, what
        self.waiting, self.out, self.read_all, self.over = 0, b"", False, False

    @property
    def may_read(self) -> bool:
        """Whether there is more to come, and room for it."""
        return not self.read_all and self.waiting < WAITING

    @property
    def due(self) -> float:
        """When the next bytes arrive, of those that need not wait for the sink."""
        return self.under_way[0][0] if self.under_way and not self.out else math.inf

    def take(self, delay_s: float) -> None:
        """Read what has come, and send on at once what has already arrived."""
        try:
            data = self.source.recv(CHUNK)
        except OSError:
            data = b""
        self.read_all = not data
        self.waiting += len(data)
        now = time.perf_counter()
        self.under_way.append((self.direction.arrival(len(data), now, delay_s), now, data))
        self.give()

    def give(self) -> None:
        """Send what has arrived; the end of what was read is the end of the connection."""
        while self.due <= (now := time.perf_counter()):
            _, came, self.out = self.under_way.popleft()
            self.direction.held_s += now - came
            if not self.out:
                self.over = True
                return
            self.push()

    def push(self) -> None:
        """Send on; what the sink does not take now waits."""
        try:
            sent = self.sink.send(self.out)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self.out)  # its own end will be read soon
        self.waiting -= sent
        self.out = self.out[sent:]


class _Server:
    """The relay's process: one loop over all sockets, as the waits have to be exact."""

    def __init__(self, target: str, uplink_bits_per_s: float, downlink_bits_per_s: float, rtt_s: float) -> None:
        self.target, self.delay_s = host_and_port(target), rtt_s / 2
        self.up, self.down = _Direction(uplink_bits_per_s), _Direction(downlink_bits_per_s)
        self.connections: list[tuple[_Flow, _Flow]] = []
        self.selector = selectors.SelectSelector()  # unlike epoll it waits to the microsecond
        self.watched: dict[socket.socket, int] = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        print(self.listener.getsockname()[1], flush=True)

    def run(self) -> None:
        """Until standard input ends."""
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.obey)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        while True:
            due = self.due()
            if due - time.perf_counter() < CLOCK_S:
                while time.perf_counter() < due:
                    pass
            for pair in list(self.connections):
                for flow in pair:
                    flow.give()
                if any(flow.over for flow in pair):
                    self.end(pair)
            for pair in self.connections:
                for reader, writer in (pair, pair[::-1]):
                    self.watch(reader, writer)
            for key, events in self.selector.select(self.patience()):
                if key.data(events) is False:
                    return

    def due(self) -> float:
        """When the next bytes arrive."""
        return min((flow.due for pair in self.connections for flow in pair), default=math.inf)

    def patience(self) -> float | None:
        """How long to wait for events."""
        due = self.due()
        return None if due == math.inf else max(0.0, due - time.perf_counter() - SPIN_S)

    def watch(self, reader: _Flow, writer: _Flow) -> None:
        """Wait for a socket that may be read by one flow, or has to be written by the other."""
        each = reader.source
        wanted = selectors.EVENT_READ * reader.may_read | selectors.EVENT_WRITE * bool(writer.out)
        if wanted != self.watched.get(each, 0):
            self.forget(each)

            def work(events: int) -> None:
                if events & selectors.EVENT_READ:
                    reader.take(self.delay_s)
                if events & selectors.EVENT_WRITE:
                    writer.push()

            if wanted:
                self.selector.register(each, wanted, work)
                self.watched[each] = wanted

    def forget(self, each: socket.socket) -> None:
        """Wait for a socket no more."""
        if self.watched.pop(each, 0):
            self.selector.unregister(each)

    def accept(self, _) -> None:
        near, _ = self.listener.accept()
        try:
            far = socket.create_connection(self.target, timeout=10)
        except OSError:
            near.close()
            return
        for each in (near, far):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections.append((_Flow(near, far, self.up), _Flow(far, near, self.down)))

    def obey(self, _) -> bool:
        line = sys.stdin.readline().strip()
        if line == "cut":
            for pair in list(self.connections):
                self.end(pair)
        if line:
            print(json.dumps([self.up.bytes, self.down.bytes, self.up.held_s + self.down.held_s]), flush=True)
        return bool(line)

    def end(self, pair: tuple[_Flow, _Flow]) -> None:
        self.connections.remove(pair)
        for flow in pair:
            self.forget(flow.source)
            with contextlib.suppress(OSError):
                flow.source.shutdown(socket.SHUT_RDWR)
            flow.source.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _Server(*json.loads(sys.argv[1])).run()
