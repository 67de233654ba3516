"""One gRPC call on a TCP connection of its own, in the thread of whoever makes it or serves it.

A token takes a round trip for each layer, so what counts is how soon a message of 400 bytes gets through. grpcio hands
every message from thread to thread at both ends; here whoever sends writes to the socket, and whoever waits reads from
it. HTTP/2 is h2's work; gRPC adds five bytes before each message and the status behind the last. At the other end there
can be any gRPC peer: in the tests there is grpcio, at either.

Left out: several calls on one connection, compression, deadlines that are told to the other side, and servers that
announce their end (GOAWAY) but go on: that is the end here. A peer that pings is answered at the next wait, not while
this side computes. Two ends that both send more at once than buffers hold wait until their deadlines.
"""

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import quote, unquote

from grpc import StatusCode
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from plpkg.validation import host_and_port

Result = TypeVar("Result")

WINDOW = 4 * 2**20
"""Bytes that the peer may send before anybody has read them."""
CHUNK = 64 * 1024
LOOK_S = 0.2
"""After so long, a wait looks whether somebody else has ended the call."""
NOT_YET = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its bytes."""
BEFORE = 256 * 1024
"""Bytes that may come before the call itself: from there on a token is needed."""

give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
CODES = {str(code.value[0]): code for code in StatusCode}
HTTP = dict.fromkeys(("429", "502", "503", "504"), StatusCode.UNAVAILABLE) | {
    "400": StatusCode.INTERNAL, "401": StatusCode.UNAUTHENTICATED, "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
}  # fmt: skip
"""What an answer without a gRPC status means (gRPC's own table)."""
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters that a status's details keep on the wire."""


class StatusError(Exception):
    """A call ends with a gRPC status.

    Attributes
    ----------
    code, details
        The status.
    """

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class BrokenCallError(ConnectionError):
    """The connection is gone, or what comes over it is not gRPC."""


class _Call:
    """What both ends do. One thread uses a call; others may only set :attr:`failure` or :meth:`abandon` it.

    Attributes
    ----------
    failure
        Set by another thread: whoever waits raises it, ``LOOK_S`` later at most.
    busy_wait_s
        How long a wait looks for what is to come before it sleeps: who sleeps is woken late, and finds cold caches.
        Looking takes a core, and Python's lock from other threads.
    """

    def __init__(self, connection: socket.socket, *, client: bool, max_message_bytes: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.failure: Exception | None = None
        self._socket, self._max_message_bytes, self.busy_wait_s = connection, max_message_bytes, 0.0
        self._http = H2Connection(H2Configuration(client_side=client, header_encoding="latin-1"))
        wanted = {
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
            SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            **({SettingCodes.ENABLE_PUSH: 0} if client else {SettingCodes.MAX_CONCURRENT_STREAMS: 1}),
        }
        self._http.local_settings = Settings(client=client, initial_values=wanted)
        self._http.initiate_connection()
        self._http.increment_flow_control_window(WINDOW - 65_535)  # with which every connection begins
        self._stream = 0
        self._headers: dict[str, str] = {}  # of the request; of the answer and its end
        self._received, self._unacknowledged = bytearray(), 0
        self._unsent = memoryview(b"")
        self._read_all = False  # nothing more will come

    def send(self, message: bytes, timeout_s: float) -> None:
        """Send a message; what becomes of a call that the other side has ended, the next :meth:`receive` says.

        Raises
        ------
        TimeoutError
            The other side did not take it in time.
        BrokenCallError
            The connection broke.
        """
        deadline = time.monotonic() + timeout_s
        rest = memoryview(PREFIX.pack(0, len(message)) + message)
        try:
            while rest and not self._over():
                room = min(self._http.local_flow_control_window(self._stream), self._http.max_outbound_frame_size)
                if room > 0:  # a window may be negative
                    self._say(self._http.send_data, self._stream, rest[:room].tobytes())
                    rest = rest[room:]
                else:
                    self._flush(deadline)
                    self._read(deadline)
            self._flush(deadline)
        except TimeoutError:
            self.failure = BrokenCallError("a message was sent in part")
            raise

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; ``None`` if the other side has sent its last.

        Raises
        ------
        TimeoutError
            Nothing came in time.
        StatusError
            A message too large; and at the calling end, the status with which the call has ended.
        BrokenCallError
            The connection broke.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self._message()) is None and not self._read_all:
            if self._unacknowledged > WINDOW // 4:
                self._say(self._http.acknowledge_received_data, self._unacknowledged, self._stream)
                self._unacknowledged = 0
                self._flush(deadline)
            self._read(deadline)
        if message is None:
            self._check_end()
        return message

    def abandon(self) -> None:
        """Break the connection off, from any thread."""
        with contextlib.suppress(OSError):  # it is gone already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # an SSLSocket's own would go on in the clear

    def close(self) -> None:
        """Break the connection off, and forget it."""
        self.abandon()
        self._socket.close()

    def _over(self) -> bool:
        return False  # whether the other side will not read any more

    def _check_end(self) -> None:
        if self._received:
            raise BrokenCallError("the call ended in the middle of a message")

    def _message(self) -> bytes | None:
        if len(self._received) < PREFIX.size:
            return None
        compressed, size = PREFIX.unpack_from(self._received)
        if compressed:
            raise StatusError(StatusCode.UNIMPLEMENTED, "compressed messages are not understood")
        if size > self._max_message_bytes:
            limit = self._max_message_bytes
            raise StatusError(StatusCode.RESOURCE_EXHAUSTED, f"a message of {size} bytes, the limit is {limit}")
        end = PREFIX.size + size
        if len(self._received) < end:
            return None
        message = bytes(self._received[PREFIX.size : end])
        del self._received[:end]
        return message

    def _say(self, what: Callable[..., Result], *arguments) -> Result:
        """Something that HTTP/2 may not allow (any more)."""
        try:
            return what(*arguments)
        except ProtocolError as error:
            raise BrokenCallError(f"HTTP/2: {error}") from error

    def _wait(self, operation: Callable[[], Result], deadline: float) -> Result:
        busy_until = time.monotonic() + self.busy_wait_s
        while True:
            if self.failure is not None:
                raise self.failure
            if (now := time.monotonic()) >= deadline:
                raise TimeoutError
            self._socket.settimeout(0.0 if now < busy_until else min(deadline - now, LOOK_S))
            try:
                return operation()
            except NOT_YET:
                give_way()  # to whoever else wants this core
            except OSError as error:
                raise BrokenCallError(str(error)) from error

    def _read(self, deadline: float) -> int:
        """Take note of what has come; how many bytes."""
        data = self._wait(lambda: self._socket.recv(CHUNK), deadline)
        if not data:
            raise BrokenCallError("the connection was closed")
        for event in self._say(self._http.receive_data, data):
            self._note(event)
        with contextlib.suppress(BrokenCallError):  # who does not read any more may have said why
            self._flush(deadline)  # what HTTP/2 itself answers
        return len(data)

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.ConnectionTerminated) and not self._read_all:
            raise BrokenCallError(f"the other side ends the connection: {event.error_code!r}")
        if isinstance(event, events.RequestReceived) and not self._stream:
            self._stream = event.stream_id
        if getattr(event, "stream_id", None) != self._stream:
            return
        if isinstance(event, events.DataReceived):
            self._received += event.data
            self._unacknowledged += event.flow_controlled_length
        elif isinstance(event, events.RequestReceived | events.ResponseReceived | events.TrailersReceived):
            self._headers |= dict(event.headers)
        elif isinstance(event, events.StreamEnded):
            self._read_all = True
        elif isinstance(event, events.StreamReset) and not self._read_all:
            raise BrokenCallError(f"the other side breaks the call off: {event.error_code!r}")

    def _flush(self, deadline: float) -> None:
        if data := self._http.data_to_send():
            self._unsent = memoryview(bytes(self._unsent) + data)
        while self._unsent:
            sent = self._wait(lambda: self._socket.send(self._unsent), deadline)
            self._unsent = self._unsent[sent:]


class ClientCall(_Call):
    """A call that this side makes.

    Parameters
    ----------
    address
        ``host:port`` to connect to; never through a proxy.
    method
        Such as ``/package.Service/Method``.
    authority
        ``host:port`` of the server, whose certificate must be for this host.
    metadata
        Pairs of names and values.
    tls
        Without it the connection is in the clear.
    timeout_s
        For the connection.
    max_message_bytes
        Of what comes.

    Raises
    ------
    BrokenCallError
        Nobody is there, or somebody else.
    """

    def __init__(
        self,
        address: str,
        method: str,
        *,
        authority: str,
        metadata: Sequence[tuple[str, str]] = (),
        tls: ssl.SSLContext | None = None,
        timeout_s: float,
        max_message_bytes: int,
    ) -> None:
        connection = None
        try:
            connection = socket.create_connection(host_and_port(address), timeout_s)
            if tls is not None:
                connection = tls.wrap_socket(connection, server_hostname=host_and_port(authority)[0])
                _require_http2(connection)
        except OSError as error:
            if connection is not None:
                connection.close()
            raise BrokenCallError(str(error)) from error
        scheme = "http" if tls is None else "https"
        request = {":method": "POST", ":scheme": scheme, ":path": method, ":authority": authority}
        request |= {"te": "trailers", "content-type": "application/grpc", "user-agent": "plpkg"}
        try:
            super().__init__(connection, client=True, max_message_bytes=max_message_bytes)
            self._stream = self._http.get_next_available_stream_id()
            self._http.send_headers(self._stream, [*request.items(), *metadata])  # they leave with the first message
        except BaseException:
            connection.close()
            raise

    def send(self, message: bytes, timeout_s: float) -> None:
        try:
            super().send(message, timeout_s)
        except BrokenCallError:
            deadline = time.monotonic() + 1.0
            with contextlib.suppress(BrokenCallError, TimeoutError):  # perhaps the other side has said why
                while not self._read_all:
                    self._read(deadline)
            if not self._read_all:
                raise

    def end(self, timeout_s: float) -> None:
        """Say that nothing more will be sent."""
        if not self._over():
            self._say(self._http.end_stream, self._stream)
        self._flush(time.monotonic() + timeout_s)

    def _check_end(self) -> None:
        http, found = self._headers.get(":status"), self._headers.get("grpc-status")
        if found is None and http == "200":
            raise BrokenCallError("the call ended without a status")
        if found is None:
            raise StatusError(HTTP.get(http, StatusCode.UNKNOWN), f"HTTP status {http}")
        code = CODES.get(found, StatusCode.UNKNOWN)
        if code is not StatusCode.OK:
            raise StatusError(code, unquote(self._headers.get("grpc-message", "")))
        super()._check_end()

    def _over(self) -> bool:
        return self._read_all


class ServerCall(_Call):
    """A call that came in on a connection; :meth:`accept` first."""

    def __init__(self, connection: socket.socket, tls: ssl.SSLContext | None, max_message_bytes: int) -> None:
        super().__init__(connection, client=False, max_message_bytes=max_message_bytes)
        self._tls, self._answered = tls, False

    def accept(self, method: str, timeout_s: float) -> dict[str, str]:
        """Wait until the call is there; its metadata, HTTP/2's own fields included.

        Raises
        ------
        TimeoutError, BrokenCallError
            As everywhere.
        StatusError
            It calls something else.
        """
        deadline = time.monotonic() + timeout_s
        if self._tls is not None:
            self._socket.settimeout(timeout_s)
            try:
                self._socket = self._tls.wrap_socket(self._socket, server_side=True, do_handshake_on_connect=False)
                self._socket.do_handshake()
                _require_http2(self._socket)
            except OSError as error:
                raise BrokenCallError(str(error)) from error
        size = 0
        while not self._stream:
            size += self._read(deadline)
            if size > BEFORE:
                raise BrokenCallError(f"{size} bytes came, but no call")
        if not self._headers.get("content-type", "").startswith("application/grpc"):
            raise StatusError(StatusCode.INTERNAL, f"not gRPC: {self._headers.get('content-type', 'no content-type')}")
        if (path := self._headers.get(":path")) != method:
            raise StatusError(StatusCode.UNIMPLEMENTED, f"there is no {path}, only {method}")
        return self._headers

    def send(self, message: bytes, timeout_s: float) -> None:
        if not self._answered:
            self._answered = True
            answer = [(":status", "200"), ("content-type", "application/grpc")]
            self._say(self._http.send_headers, self._stream, answer)
        super().send(message, timeout_s)

    def finish(self, code: StatusCode, details: str = "", *, timeout_s: float = 1.0) -> None:
        """End the call with a status, and the connection: when the other side closes it, or after ``timeout_s``."""
        deadline, self.failure = time.monotonic() + timeout_s, None  # whoever set it wanted this
        trailers = [("grpc-status", str(code.value[0])), ("grpc-message", quote(details, safe=PLAIN))]
        answer = [] if self._answered else [(":status", "200"), ("content-type", "application/grpc")]
        with contextlib.suppress(OSError, ProtocolError, StatusError):  # it does not want to know, or not in time
            if self._stream:
                self._http.send_headers(self._stream, answer + trailers, end_stream=True)
                if not self._read_all:
                    self._http.reset_stream(self._stream, ErrorCodes.NO_ERROR)  # there is no use in sending more
            self._http.close_connection()
            self._flush(deadline)
            # Closing at once would take back what the other side has not read yet: wait until it closes as well.
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while self._wait(lambda: socket.socket.recv(self._socket, CHUNK), deadline):
                pass


def _require_http2(encrypted: ssl.SSLSocket) -> None:
    if encrypted.selected_alpn_protocol() != "h2":
        raise BrokenCallError("the other side does not speak HTTP/2")
