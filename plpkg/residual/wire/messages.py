"""Typed messages over a gRPC stream, with a deadline on every wait, as both ends have them.

A stream of gRPC's own has one deadline for all of it, and whoever reads from it waits without one. So a thread reads,
and whoever wants the next message waits for that thread. Both sides take turns: a peer that sends message after
message, or reads none, is given up, and holds no more than :data:`BACKLOG` of them in memory.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode

from plpkg.files.untrusted import printable
from plpkg.residual.wire.link import Lane, wait_until
from plpkg.residual.wire.wire_pb2 import Final, Part, Step
from plpkg.results import Tabular

METHOD = "/plpkg.residual.v1.Residual/Connect"

OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # or what is meant to stay on this machine could take the way through a proxy
    ("grpc.http2.bdp_probe", 0),  # its pings would be counted as traffic
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),  # a peer that has vanished is noticed within a minute
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""Settings of gRPC at both ends."""

TICK_S = 1.0
"""How often whoever waits for a message is told that there is none yet."""

BACKLOG = 8
"""Messages that may wait to be sent, or to be read."""

TEXT = 1000
"""Characters of a status's details that are shown, or sent back."""


class StatusError(Exception):
    """A stream ends with a gRPC status.

    Attributes
    ----------
    code, details
        The status; and why, as one printable line: a peer may have written it.
    """

    def __init__(self, code: StatusCode, details: str) -> None:
        self.code = code
        self.details = " ".join(printable(details[:TEXT]).split())
        super().__init__(self.details)


class BrokenStreamError(ConnectionError):
    """The other side broke the stream off, or is gone."""


_COUNTING = threading.Lock()  # the cloud's sessions count in one counter


@dataclass
class Counter(Tabular):
    """Bytes, round trips and tokens so far, seen from the side that counts.

    Attributes
    ----------
    sent_bytes, received_bytes
        Payload: the tensors' bytes.
    sent_message_bytes, received_message_bytes
        The protobuf messages that carried them, and those of the handshake.
    round_trips
        How many times one side waited for the other's answer before it could go on; two exchanges that are under way
        at once count as one.
    tokens, drafted_tokens, accepted_tokens
        The tokens that the device has written; how many guesses travelled; and how many of them it has written.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_message_bytes: int = 0
    received_message_bytes: int = 0
    round_trips: int = 0
    tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def sent(self, payload: int, message: int) -> None:
        """Count one message on its way out: the bytes of its tensor, and all of its bytes."""
        with _COUNTING:
            self.sent_bytes += payload
            self.sent_message_bytes += message

    def received(self, payload: int, message: int) -> None:
        """Count one message that came in."""
        with _COUNTING:
            self.received_bytes += payload
            self.received_message_bytes += message

    def wrote(self, tokens: int, *, accepted: bool) -> None:
        """Count what the device has written, and whether it had been guessed."""
        self.tokens += tokens
        self.accepted_tokens += accepted

    def __add__(self, other: "Counter") -> "Counter":
        """The sum of both."""
        return Counter(**{name: count + getattr(other, name) for name, count in vars(self).items()})

    def __sub__(self, earlier: "Counter") -> "Counter":
        """The counts since ``earlier``, a copy made then."""
        return Counter(**{name: count - getattr(earlier, name) for name, count in vars(self).items()})

    def rows(self) -> list[dict]:
        return [dict(vars(self))]

    def __repr__(self) -> str:
        text = (
            f"{self.sent_bytes:,} bytes sent + {self.received_bytes:,} received, {self.round_trips} round trips "
            f"({self.sent_message_bytes:,} + {self.received_message_bytes:,} with protobuf)"
        )
        if self.tokens:
            text += f"; {self.tokens} tokens, {self.tokens / self.round_trips:.2f} a round trip"
        if self.drafted_tokens:
            text += f"; {self.accepted_tokens} of {self.drafted_tokens} guesses accepted"
        return text


class Messages:
    """One stream, seen from one end.

    Parameters
    ----------
    sends, receives
        ``FromDevice`` or ``FromCloud``: what goes out and what comes in.
    peer
        The other side, in the words of an error.
    traffic
        Counts what crosses.
    lanes
        The way out and the way in, of a link that takes its time.

    Attributes
    ----------
    longest
        The bytes of the longest message that is due; ``None`` where gRPC's own limit does.
    """

    def __init__(
        self,
        sends: type[Message],
        receives: type[Message],
        peer: str,
        traffic: Counter,
        lanes: tuple[Lane, Lane] | None = None,
    ) -> None:
        self._sends = sends
        self._receives = receives
        self._peer = peer
        self._traffic = traffic
        self._way_out, self._way_in = (None, None) if lanes is None else lanes
        self.longest: int | None = None
        self._outgoing: queue.SimpleQueue[tuple[float, bytes | StatusError | None]] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[float, bytes | Exception]] = queue.SimpleQueue()

    def outgoing(self) -> Iterator[bytes | StatusError]:
        """Messages that gRPC sends, serialized; at the serving end a :class:`StatusError` ends the stream."""
        while True:
            delivery, message = self._outgoing.get()
            if message is None:
                return
            if delivery:
                wait_until(delivery)
            yield message

    def end(self, status: StatusError | None = None) -> None:
        """Nothing is sent any more: the stream ends, at the serving end with a status."""
        self._outgoing.put((0.0, status))

    def listen(self, incoming: Iterable[bytes]) -> None:
        """Read what gRPC receives, in a thread of its own, until the stream ends or breaks."""
        threading.Thread(target=self._read, args=(incoming,), daemon=True, name="plpkg-reader").start()

    def _read(self, incoming: Iterable[bytes]) -> None:
        """Put each message into the inbox, and at last the error that tells how the stream ended."""
        end: Exception = BrokenStreamError(f"{self._peer} ended the stream")
        try:
            for data in incoming:
                if self._inbox.qsize() >= BACKLOG:
                    end = StatusError(StatusCode.RESOURCE_EXHAUSTED, f"{self._peer} does not wait for its turn")
                    break
                if self.longest is not None and len(data) > self.longest:
                    said = f"{self._peer} sent {len(data):,} bytes where at most {self.longest:,} were due"
                    end = StatusError(StatusCode.INVALID_ARGUMENT, said)
                    break
                self._inbox.put((_delivery(self._way_in, data), data))
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call):  # at the calling end
                end = StatusError(error.code(), error.details() or "")
            else:
                end = BrokenStreamError(f"{self._peer} broke the stream off")
        self.interrupt(end)

    def interrupt(self, error: Exception) -> None:
        """Let whoever waits for a message, now or later, raise this error."""
        self._inbox.put((0.0, error))

    def send(self, **content) -> None:
        """Put a message with this one field on its way.

        Raises
        ------
        StatusError
            The other side reads nothing.
        """
        if self._outgoing.qsize() >= BACKLOG:
            raise StatusError(StatusCode.RESOURCE_EXHAUSTED, f"{self._peer} reads nothing")
        (value,) = content.values()
        data = self._sends(**content).SerializeToString()
        self._traffic.sent(_payload_bytes(value), len(data))
        self._outgoing.put((_delivery(self._way_out, data), data))

    def receive(self, *contents: str, limit_s: float, meanwhile: Callable[[float], object] | None = None):
        """The field of the next message, which must be one of ``contents``.

        ``meanwhile`` is told every :data:`TICK_S` for how many seconds more it may still come.

        Raises
        ------
        StatusError
            Nothing came for ``limit_s`` seconds, or something else; or the other side ended the stream with a status.
        BrokenStreamError
            The other side ended the stream, or is gone.
        """
        due = " or a ".join(contents)
        delivery, data = self._next(due, limit_s, meanwhile)
        if isinstance(data, Exception):
            self.interrupt(data)  # for whoever waits next
            raise data
        if delivery:
            wait_until(delivery)
        try:
            message = self._receives.FromString(data)
        except DecodeError as error:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"{self._peer} sent no message: {error}") from None
        content = message.WhichOneof("content")
        if content not in contents:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"a {due} was due, {self._peer} sent {content or 'nothing'}")
        value = getattr(message, content)
        self._traffic.received(_payload_bytes(value), len(data))
        return value

    def _next(
        self, due: str, limit_s: float, meanwhile: Callable[[float], object] | None
    ) -> tuple[float, bytes | Exception]:
        """The next arrival in the inbox: when a message is due, and the message; or 0 and the error that ends all."""
        left = limit_s
        while True:
            wait = left if meanwhile is None else min(left, TICK_S)
            try:
                return self._inbox.get(timeout=wait)
            except queue.Empty:
                left -= wait
            if left <= 0 or meanwhile is None:
                details = f"{self._peer} said nothing for {limit_s:g} s, a {due} was due"
                raise StatusError(StatusCode.DEADLINE_EXCEEDED, details)
            meanwhile(left)


def _delivery(lane: Lane | None, data: bytes) -> float:
    """When a message arrives; 0 is at once."""
    return 0.0 if lane is None else lane.delivery(len(data))


def _payload_bytes(value: Message | bytes) -> int:
    """The bytes of the tensor in a message's field."""
    if isinstance(value, Step | Final):
        return len(value.hidden)
    if isinstance(value, Part):
        return len(value.data)
    if isinstance(value, bytes):
        return len(value)
    return 0
