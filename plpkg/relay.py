"""A TCP relay that makes loopback a slow link: every byte takes its time each way, and half the RTT on top.

It runs in a process of its own: in the device's, Python's lock would delay it. It also counts the bytes of the TCP
stream: payload, protobuf, gRPC, HTTP/2 and TLS, without TCP/IP headers.

Left out: loss, jitter, and the slow start of TCP.
"""

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque

from plpkg.catalog import Link, link as find_link
from plpkg.validation import host_and_port

UNLIMITED = Link("unlimited", 1e15, 1e15, 0.0)
CHUNK = 16 * 1024
WAITING = 4 * 2**20
"""Bytes on their way in one direction of a connection, beyond which the relay stops reading."""
SPIN_S = 300e-6
"""A sleeping process wakes up to this much late: the rest of a wait is spent looking at the clock."""


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
        self._asking = threading.Lock()
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

    def cut(self) -> None:
        """Break every connection, as a link does that goes down for a moment."""
        self._ask("cut")

    def close(self) -> None:
        """Break every connection, and accept no more."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what the process did not read
                pipe.close()

    def _ask(self, what: str) -> list[int]:
        with self._asking:
            self._process.stdin.write(what + "\n")
            return json.loads(self._process.stdout.readline())


class _Way:
    """One direction of the link: its connections share it."""

    def __init__(self, bits_per_s: float) -> None:
        self.bits_per_s, self.free_at, self.bytes = bits_per_s, 0.0, 0

    def arrival(self, size: int, delay_s: float) -> float:
        """When so many bytes that enter now come out."""
        self.free_at = max(time.perf_counter(), self.free_at) + 8 * size / self.bits_per_s
        self.bytes += size
        return self.free_at + delay_s


class _Flow:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: _Way) -> None:
        self.source, self.sink, self.way = source, sink, way
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.waiting, self.out, self.read_all = 0, b"", False

    def take(self, delay_s: float) -> None:
        """Read what has come."""
        try:
            data = self.source.recv(CHUNK)
        except OSError:
            data = b""
        self.read_all = not data
        self.waiting += len(data)
        self.under_way.append((self.way.arrival(len(data), delay_s), data))

    def give(self) -> bool:
        """Send what has arrived; whether the connection is over."""
        while self.under_way and self.under_way[0][0] <= time.perf_counter() and not self.out:
            _, self.out = self.under_way.popleft()
            if not self.out:
                return True
            self.push()
        return False

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
        self.up, self.down = _Way(uplink_bits_per_s), _Way(downlink_bits_per_s)
        self.connections: list[tuple[_Flow, _Flow]] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        print(self.listener.getsockname()[1], flush=True)

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            for pair in list(self.connections):
                over = [flow.give() for flow in pair]  # both, whatever the first says
                if any(over):
                    self.end(pair)
            with selectors.SelectSelector() as selector:  # unlike epoll it waits to the microsecond
                selector.register(sys.stdin, selectors.EVENT_READ, self.obey)
                selector.register(self.listener, selectors.EVENT_READ, self.accept)
                self.register(selector)
                for key, events in selector.select(self.patience()):
                    if key.data(events) is False:
                        return

    def register(self, selector: selectors.BaseSelector) -> None:
        """Every socket that may be read or has to be written."""
        wanted: dict[socket.socket, list] = {}
        for flow in (flow for pair in self.connections for flow in pair):
            if not flow.read_all and flow.waiting < WAITING:
                wanted.setdefault(flow.source, []).append((selectors.EVENT_READ, lambda f=flow: f.take(self.delay_s)))
            if flow.out:
                wanted.setdefault(flow.sink, []).append((selectors.EVENT_WRITE, flow.push))
        for each, works in wanted.items():
            mask = sum(event for event, _ in works)
            selector.register(each, mask, lambda events, w=works: [work() for event, work in w if event & events])

    def patience(self) -> float | None:
        """How long to wait for events."""
        dues = [f.under_way[0][0] for pair in self.connections for f in pair if f.under_way and not f.out]
        return max(0.0, min(dues) - time.perf_counter() - SPIN_S) if dues else None

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
            print(json.dumps([self.up.bytes, self.down.bytes]), flush=True)
        return bool(line)

    def end(self, pair: tuple[_Flow, _Flow]) -> None:
        self.connections.remove(pair)
        for flow in pair:
            with contextlib.suppress(OSError):
                flow.source.shutdown(socket.SHUT_RDWR)
            flow.source.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _Server(*json.loads(sys.argv[1])).run()
