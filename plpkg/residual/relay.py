"""A TCP relay that makes loopback a slow link: every byte takes its time each way, and half the RTT on top.

Also counts the bytes of the TCP stream: payload, protobuf, gRPC, HTTP/2 and TLS, without TCP/IP headers.

Left out: loss, jitter, and the slow start of TCP.
"""

import contextlib
import queue
import socket
import threading
import time

from plpkg.catalog import Link, link as find_link
from plpkg.residual.wire import host_and_port

UNLIMITED = Link("unlimited", 1e15, 1e15, 0.0)
CHUNK = 16 * 1024
SPIN_S = 300e-6
"""A sleeping thread wakes up to this much late: the rest of a wait is spent looking at the clock."""


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
    uplink_bytes, downlink_bytes
        That have passed so far.
    """

    def __init__(self, target: str, link: str | Link = UNLIMITED) -> None:
        self.link = find_link(link)
        self._target = host_and_port(target)
        self.uplink_bytes = self.downlink_bytes = 0
        self._free_at = {"uplink": 0.0, "downlink": 0.0}
        self._lock = threading.Lock()
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="plpkg-relay").start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Break every connection, and accept no more."""
        self._closed = True
        _end(self._listener)
        self.cut()

    def cut(self) -> None:
        """Break every connection, as a link does that goes down for a moment."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            _end(each)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets = [each for each in self._sockets if each.fileno() >= 0] + [near, far]
                closed = self._closed
            if closed:
                self.cut()
                return
            self._start("uplink", near, far)
            self._start("downlink", far, near)

    def _start(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        on_the_way: queue.SimpleQueue = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, args=(direction, source, sink, on_the_way), daemon=True).start()

    def _read(self, direction: str, source: socket.socket, sink: socket.socket, on_the_way: queue.SimpleQueue) -> None:
        bits_per_s = getattr(self.link, f"{direction}_bits_per_s")
        while True:
            try:
                data = source.recv(CHUNK)
            except OSError:
                data = b""
            now = time.perf_counter()
            with self._lock:  # the connections share the link
                self._free_at[direction] = max(now, self._free_at[direction]) + 8 * len(data) / bits_per_s
                arrives = self._free_at[direction] + self.link.rtt_s / 2
                setattr(self, f"{direction}_bytes", getattr(self, f"{direction}_bytes") + len(data))
            on_the_way.put((arrives, data))
            if not data:
                return

    def _write(self, direction: str, source: socket.socket, sink: socket.socket, on_the_way: queue.SimpleQueue) -> None:
        while True:
            arrives, data = on_the_way.get()
            _wait_until(arrives)
            try:
                sink.sendall(data)
            except OSError:
                data = b""
            if not data:
                _end(sink)
                _end(source)
                return


def _wait_until(moment: float) -> None:
    if (left := moment - time.perf_counter() - SPIN_S) > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
