"""Typed messages over a gRPC stream, and the device's end of it: deadlines on every wait, and coming back.

A stream of gRPC's own has one deadline for all of it, and whoever reads from it waits without one. So a thread reads,
and whoever wants the next message waits for that thread. Both sides take turns: a peer that sends message after
message, or reads none, is given up, and holds no more than :data:`BACKLOG` of them in memory.
"""

import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode

from plpkg.residual.wire import certificates
from plpkg.residual.wire.wire_pb2 import Final, FromCloud, FromDevice, Goodbye, Hello, Part, Step, Terms
from plpkg.results import Tabular
from plpkg.validation import host_and_port

METHOD = "/plpkg.residual.v1.Residual/Connect"

OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # or what is meant to stay on this machine could take the way through a proxy
    ("grpc.http2.bdp_probe", 0),  # its pings would be counted as traffic
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),  # a peer that has vanished is noticed within a minute
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""What both ends ask of gRPC."""

TICK_S = 1.0
"""How often whoever waits for a message is told that there is none yet."""

MAX_MESSAGE_BYTES = 256 * 2**20
"""The longest message that the cloud may send."""

BACKLOG = 8
"""Messages that may wait to be sent, or to be read."""

TEXT = 1000
"""Characters of a status's details: those that come from a peer are no longer when they are shown, or sent back."""


class StatusError(Exception):
    """A stream ends with a gRPC status.

    Attributes
    ----------
    code, details
        The status; the details are cut off after :data:`TEXT` characters.
    """

    def __init__(self, code: StatusCode, details: str) -> None:
        self.code = code
        self.details = details if len(details) <= TEXT else f"{details[: TEXT - 1]}…"
        super().__init__(self.details)


class BrokenStreamError(ConnectionError):
    """The other side broke the stream off, or is gone."""


_COUNTING = threading.Lock()  # the cloud's sessions count in one counter


@dataclass
class Counter(Tabular):
    """What has crossed so far, seen from the side that counts.

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
        What the device has written; how many guesses travelled; and how many of them it has written.
    stopped
        Why the device sends no guesses any more; empty while it does.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_message_bytes: int = 0
    received_message_bytes: int = 0
    round_trips: int = 0
    tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stopped: str = ""

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
        """What has crossed in both."""
        counts = {name: value + vars(other)[name] for name, value in self.rows()[0].items()}
        return Counter(**counts, stopped=self.stopped)

    def __sub__(self, earlier: "Counter") -> "Counter":
        """What has crossed since ``earlier``, a copy made then."""
        counts = {name: value - vars(earlier)[name] for name, value in self.rows()[0].items()}
        return Counter(**counts, stopped=self.stopped)

    def rows(self) -> list[dict]:
        return [{name: value for name, value in vars(self).items() if name != "stopped"}]

    def __repr__(self) -> str:
        text = (
            f"{self.sent_bytes:,} bytes sent + {self.received_bytes:,} received, {self.round_trips} round trips "
            f"({self.sent_message_bytes:,} + {self.received_message_bytes:,} with protobuf)"
        )
        if self.tokens:
            text += f"; {self.tokens} tokens, {self.tokens / self.round_trips:.2f} a round trip"
        if self.drafted_tokens:
            text += f"; {self.accepted_tokens} of {self.drafted_tokens} guesses accepted"
        return "; ".join(filter(None, (text, self.stopped)))


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

    Attributes
    ----------
    outgoing
        What gRPC sends: serialized messages, and ``None`` after the last. At the serving end a :class:`StatusError`
        ends the stream with its status.
    """

    def __init__(self, sends: type[Message], receives: type[Message], peer: str, traffic: Counter) -> None:
        self._sends, self._receives, self._peer, self._traffic = sends, receives, peer, traffic
        self.outgoing: queue.SimpleQueue[bytes | StatusError | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def listen(self, incoming: Iterable[bytes]) -> None:
        """Read what gRPC receives, in a thread of its own, until the stream ends or breaks."""
        threading.Thread(target=self._read, args=(incoming,), daemon=True, name="plpkg-reader").start()

    def _read(self, incoming: Iterable[bytes]) -> None:
        end: Exception = BrokenStreamError(f"{self._peer} ended the stream")
        try:
            for data in incoming:
                if self._inbox.qsize() >= BACKLOG:
                    end = StatusError(StatusCode.RESOURCE_EXHAUSTED, f"{self._peer} does not wait for its turn")
                    break
                self._inbox.put(data)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call):  # at the calling end
                end = StatusError(error.code(), error.details() or "")
            else:
                end = BrokenStreamError(f"{self._peer} broke the stream off")
        self.interrupt(end)

    def interrupt(self, error: Exception) -> None:
        """Let whoever waits for a message, now or later, raise this error."""
        self._inbox.put(error)

    def send(self, **content) -> None:
        """Put a message with this one field on its way.

        Raises
        ------
        StatusError
            The other side reads nothing.
        """
        if self.outgoing.qsize() >= BACKLOG:
            raise StatusError(StatusCode.RESOURCE_EXHAUSTED, f"{self._peer} reads nothing")
        (value,) = content.values()
        data = self._sends(**content).SerializeToString()
        self._traffic.sent(_payload_bytes(value), len(data))
        self.outgoing.put(data)

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
        data, left = None, limit_s
        while data is None:
            wait = left if meanwhile is None else min(left, TICK_S)
            try:
                data = self._inbox.get(timeout=wait)
            except queue.Empty:
                left -= wait
                if left <= 0:
                    details = f"{self._peer} said nothing for {limit_s:g} s, a {due} was due"
                    raise StatusError(StatusCode.DEADLINE_EXCEEDED, details) from None
                meanwhile(left)
        if isinstance(data, Exception):
            self.interrupt(data)
            raise data
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


def _payload_bytes(value: Message | bytes) -> int:
    """The bytes of the tensor in a message's field."""
    if isinstance(value, Step):
        return len(value.hidden)
    if isinstance(value, Final):
        return len(value.hidden) + len(value.tokens)
    if isinstance(value, Part):
        return len(value.data)
    return len(value) if isinstance(value, bytes) else 0


Result = TypeVar("Result")

BROKEN = {
    StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
"""Statuses after which the device comes back; any other is the cloud's refusal."""

UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
"""What gRPC says of a certificate that is not trusted, or not for this host: it will be the same the next time."""


CROWDED = "Concurrent RPC limit"
"""What gRPC says where more streams come at once than the cloud can even refuse: it passes."""

SILENCE_S = 3.0
"""Without an answer, this is said so often."""


class SessionLostError(ConnectionError):
    """The cloud does not know the session any more."""


class RefusedError(RuntimeError):
    """The cloud has said no.

    Attributes
    ----------
    code, details
        The gRPC status, and what the cloud says.
    """

    def __init__(self, failure: StatusError) -> None:
        super().__init__(f"{failure.code.name}: {failure.details}")
        self.code, self.details = failure.code, failure.details


class Connection:
    """A session with a cloud, over as many streams as it takes.

    Parameters
    ----------
    target
        ``host:port``.
    terms
        What the cloud must have as well.
    token, ca
        Bearer token; and the file of the certificate to trust, which also switches TLS on.
    via
        Where to connect instead: a relay's address.
    timeout_s
        The longest wait for an answer of the cloud.
    retry_s
        How long to try to come back.

    Attributes
    ----------
    on_silence
        Called with a sentence after every :data:`SILENCE_S` seconds without an answer.

    Raises
    ------
    ValueError
        The target is not a loopback address, and TLS or the token is missing.
    OSError
        ``ca`` cannot be read.
    """

    def __init__(
        self,
        target: str,
        terms: Terms,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        via: str | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 30.0,
    ) -> None:
        certificates.require_protection(target, encrypted=ca is not None, token=token, option="--ca")
        self.target, self.terms, self.timeout_s, self.retry_s = target, terms, timeout_s, retry_s
        self.traffic = Counter()
        self.session, self.steps, self.max_tokens, self.forgets = b"", 0, 0, False
        self.on_silence: Callable[[str], object] | None = None
        self._met, self._silent_since, self._say_at, self._give_up = False, None, 0.0, None
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.http2.max_pings_without_data", 0),  # as many as it takes, while the cloud computes
            ("grpc.enable_retries", 0),  # a session goes on with another stream, not a stream by itself
            ("grpc.use_local_subchannel_pool", 1),  # each client has a connection of its own
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.ssl_target_name_override", host_and_port(target)[0]),  # also where a relay stands between
        ]
        if ca is None:
            self._channel = grpc.insecure_channel(via or target, options[:-1])
        else:
            self._channel = grpc.secure_channel(via or target, certificates.for_device(ca), options)
        self._connect = self._channel.stream_stream(METHOD)
        self._call: grpc.Call | None = None
        self._messages: Messages | None = None
        self._closed = False

    def close(self, *, leave: bool = True) -> None:
        """End the connection, and ``leave``: the cloud forgets the session. In the middle of a step that cannot be."""
        self._closed = True
        try:
            if leave and self._call is not None:
                self._messages.send(goodbye=Goodbye())
                self._messages.outgoing.put(None)
                self._messages.receive(limit_s=min(5.0, self.timeout_s))  # the end: the cloud has taken note
        except (BrokenStreamError, StatusError):
            pass
        finally:
            self.reset()
            self._channel.close()

    def keep_trying(self, run: Callable[[], Result]) -> Result:
        """``run()``, again from its beginning whenever the stream breaks.

        Raises
        ------
        ConnectionError
            It did not work for ``retry_s``; nobody listens where the cloud has never been met; or the other side shows
            a certificate that is not trusted. :class:`SessionLostError` if the cloud has forgotten the session.
        RefusedError
            The cloud does not want to.
        """
        self._give_up, self._silent_since, pause = None, None, 0.05
        while True:
            try:
                if self._call is None:
                    self._open()
                return run()
            except BrokenStreamError as error:
                if not self._met and (refusal := self._refusal()):
                    raise ConnectionError(f"no connection to {self.target}: {refusal}") from error
                if self._give_up is None:
                    self._give_up = time.monotonic() + self.retry_s
                if time.monotonic() + pause > self._give_up:
                    raise ConnectionError(f"no connection to {self.target}: {error}") from error
                self._say(0.0)
            except BaseException as error:
                self.reset()  # in the middle of a step: the next one begins with a new stream
                if self._closed:
                    raise RuntimeError("this client is closed") from error
                raise
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def reset(self) -> None:
        """Break the stream off; the session goes on with the next."""
        if self._call is not None:
            self._end()
            self._call = None

    def _open(self) -> None:
        self._messages = Messages(FromDevice, FromCloud, self.target, self.traffic)
        self._call = self._connect(iter(self._messages.outgoing.get, None), metadata=self._metadata)
        self._end = weakref.finalize(self, _end, self._call, self._messages)  # also where nobody closes it
        self._messages.listen(self._call)
        self.send(hello=Hello(terms=self.terms, session=self.session))
        try:
            welcome = self._next("welcome")
        except RefusedError as refused:
            if refused.code is StatusCode.NOT_FOUND and self.session:
                self.session, self.steps = b"", 0
                raise SessionLostError(str(refused)) from refused
            raise
        self.session, self.steps, self.max_tokens = welcome.session, welcome.steps, welcome.tokens
        self.forgets = welcome.forgets
        self._met = True

    def _refusal(self) -> str | None:
        """Why nobody can be reached where the cloud should be, if it is certain: a relay in between would hide it."""
        try:
            socket.create_connection(host_and_port(self.target), self.timeout_s).close()
        except (ConnectionRefusedError, socket.gaierror) as error:
            return f"{error.strerror}: no cloud is there"
        except OSError:
            pass
        return None

    def _say(self, wait_s: float) -> None:
        """From time to time, how long nothing has come; what is waited for may still take ``wait_s``."""
        now = time.monotonic()
        if self.on_silence is None or self._silent_since is None or now < self._say_at:
            return
        left = wait_s + self.retry_s if self._give_up is None else max(wait_s, self._give_up - now)
        self.on_silence(f"no answer for {now - self._silent_since:.0f} s, trying for {left:.0f} more")
        self._say_at = now + SILENCE_S

    def send(self, **content) -> None:
        """Put a message with this one field on its way."""
        self._messages.send(**content)

    def receive(self, content: str, *, round_trips: int = 1):
        """The field of the next message, which must be this one: the answer to what was sent last.

        It counts as so many round trips: none where its Final will say.

        Raises
        ------
        BrokenStreamError
            The connection broke, or nothing came for ``timeout_s``.
        RefusedError
            The cloud ended the stream with another status, or sent something else.
        """
        value = self._next(content)
        self.traffic.round_trips += round_trips
        return value

    def _next(self, content: str):
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            self._say_at = self._silent_since + SILENCE_S
        try:
            value = self._messages.receive(content, limit_s=self.timeout_s, meanwhile=self._say)
            self._silent_since = None
            return value
        except BrokenStreamError:
            self.reset()
            raise
        except StatusError as status:
            self.reset()
            if any(text in status.details for text in UNTRUSTED):
                raise ConnectionError(f"no connection to {self.target}: {status.details}") from None
            if status.code in BROKEN or status.details.startswith(CROWDED):
                raise BrokenStreamError(f"{status.code.name}: {status.details}") from None
            raise RefusedError(status) from None


def _end(call: grpc.Call, messages: Messages) -> None:
    call.cancel()
    messages.outgoing.put(None)
