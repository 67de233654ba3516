"""The device's end of the connection: one stream, deadlines on every wait, and coming back after it broke."""

import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
from grpc import StatusCode

from plpkg.residual.wire import certificates
from plpkg.residual.wire.messages import METHOD, OPTIONS, BrokenStreamError, Counter, Messages, StatusError
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Goodbye, Hello, Terms
from plpkg.validation import host_and_port

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
    max_message_bytes
        The longest message that the cloud may send.

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
        max_message_bytes: int = 256 * 2**20,
    ) -> None:
        certificates.require_protection(target, encrypted=ca is not None, token=token, option="--ca")
        self.target, self.terms, self.timeout_s, self.retry_s = target, terms, timeout_s, retry_s
        self.traffic = Counter()
        self.session, self.steps, self.max_tokens = b"", 0, 0
        self.on_silence: Callable[[str], object] | None = None
        self._met, self._silent_since, self._say_at, self._give_up = False, None, 0.0, None
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", max_message_bytes),
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
