"""The device's end of the stream: one connection, opened again after it broke.

A cloud keeps nothing of a stream that has ended. Whoever computes over it looks at ``Wire.stream``: if it is
another one, the cloud has read nothing yet.
"""

import socket
import ssl
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc import StatusCode

from plpkg.catalog import Link
from plpkg.residual.wire import certificates
from plpkg.residual.wire.link import lanes
from plpkg.residual.wire.messages import METHOD, OPTIONS, BrokenStreamError, Counter, Messages, StatusError
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Hello, Terms
from plpkg.validation import host_and_port

Result = TypeVar("Result")

BROKEN = {
    StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
"""Statuses after which the device comes back; any other is the cloud's refusal."""

UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "WRONG_VERSION_NUMBER")
"""Words of gRPC for a certificate that is not trusted, or not for this host, and for a cloud without TLS: it will be
the same the next time."""

CROWDED = "Concurrent RPC limit"
"""Words of gRPC where more streams come at once than the cloud can even refuse: it passes."""

SILENCE_S = 3.0
"""How often it is said that there is no answer yet."""

SHORT_BYTES = 4 * 2**20
"""The longest message that a connection takes, unless longer ones are due."""


class RefusedError(RuntimeError):
    """The cloud has said no.

    Attributes
    ----------
    code, details
        The gRPC status, and what the cloud says.
    """

    def __init__(self, failure: StatusError) -> None:
        super().__init__(f"{failure.code.name}: {failure.details}")
        self.code = failure.code
        self.details = failure.details


class _TooLongError(Exception):
    """A message is due that is longer than the connection takes."""


class Wire:
    """A connection with a cloud.

    Parameters
    ----------
    target
        ``host:port``.
    terms
        The terms that the cloud must have as well.
    token, ca
        Bearer token; and the file of the certificate to trust, which also switches TLS on.
    link
        The link that the messages pass: each takes its time.
    timeout_s
        The longest wait for an answer of the cloud.
    retry_s
        How long to try to come back.

    Attributes
    ----------
    stream
        The number of the stream: another one after each break.
    max_tokens, forgets
        The longest sequence that the cloud takes, and whether its KV cache is bounded.
    traffic
        The traffic so far.
    lanes
        The way up and the way down of the link, if there is one.
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
        link: Link | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 30.0,
    ) -> None:
        certificates.require_protection(target, encrypted=ca is not None, token=token, option="--ca")
        self.target = target
        self.terms = terms
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self._credentials = None if ca is None else certificates.for_device(ca)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.lanes = None if link is None else lanes(link)
        self.traffic = Counter()
        self.stream = 0
        self.max_tokens = 0
        self.forgets = False
        self.on_silence: Callable[[str], object] | None = None
        self._closed = False
        self._silent_since: float | None = None  # these three by time.monotonic()
        self._say_at = 0.0
        self._give_up: float | None = None
        self._call: Any = None  # of the open stream: a grpc.Call, and an iterator of what comes
        self._messages: Messages  # of the stream that was opened last
        self._longest = SHORT_BYTES
        self._channel = self._new_channel()

    def _new_channel(self) -> grpc.Channel:
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", self._longest),
            ("grpc.http2.max_pings_without_data", 0),  # as many as it takes, while the cloud computes
            ("grpc.enable_retries", 0),  # what is computed anew is decided here
            ("grpc.use_local_subchannel_pool", 1),  # each client has a connection of its own
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self._credentials is None:
            return grpc.insecure_channel(self.target, options)
        return grpc.secure_channel(self.target, self._credentials, options)

    def close(self) -> None:
        """End the connection; a step under way fails."""
        self._closed = True
        self.reset()
        self._channel.close()

    def meet(self) -> None:
        """Open the stream, unless it is open; raises what :meth:`step` does."""
        self.step(lambda: None)

    def step(self, run: Callable[..., Result], *arguments) -> Result:
        """``run(*arguments)``, again from its beginning whenever the stream breaks.

        Raises
        ------
        RuntimeError
            The client is closed.
        ConnectionError
            It did not work for ``retry_s``; nobody can be reached where the cloud has never been met; or the other side
            shows a certificate that is not trusted.
        RefusedError
            The cloud does not want to.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        try:
            return self._step(run, *arguments)
        except BaseException as error:
            self.reset()  # in the middle of a step: the next one begins with a new stream
            if self._closed:
                raise RuntimeError("this client is closed") from error
            raise

    def _step(self, run: Callable[..., Result], *arguments) -> Result:
        self._give_up = None
        self._silent_since = None
        pause = 0.05
        while True:
            try:
                if self._call is None:
                    self._open()
                return run(*arguments)
            except _TooLongError:
                self.reset()
                self._channel.close()
                self._channel = self._new_channel()
                continue
            except BrokenStreamError as error:
                self.reset()
                unavailable = str(error).startswith(StatusCode.UNAVAILABLE.name)  # and not silent
                if self.stream == 0 and unavailable:  # the cloud has never been met
                    reason = self._hopeless()
                    if reason:
                        raise ConnectionError(f"no connection to {self.target}: {reason}") from error
                if self._give_up is None:
                    self._give_up = time.monotonic() + self.retry_s
                if time.monotonic() + pause > self._give_up:
                    raise ConnectionError(f"no connection to {self.target}: {error}") from error
                self._say(0.0)
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def reset(self) -> None:
        """Break the stream off."""
        if self._call is not None:
            self._end()
            self._call = None

    def _open(self) -> None:
        self._messages = Messages(FromDevice, FromCloud, self.target, self.traffic, self.lanes)
        self._call = self._connect(self._messages)
        self._end = weakref.finalize(self, _end, self._call, self._messages)  # also where nobody closes it
        self._messages.listen(self._call)
        self.send(hello=Hello(terms=self.terms))
        try:
            welcome = self.receive("welcome", round_trips=0)
        except RefusedError as refused:
            if self.stream and refused.code is StatusCode.RESOURCE_EXHAUSTED:  # by the stream that broke, perhaps
                raise BrokenStreamError(str(refused)) from refused
            raise
        self.max_tokens = welcome.tokens
        self.forgets = welcome.forgets
        self.stream += 1

    def _connect(self, messages: Messages) -> Any:
        return self._channel.stream_stream(METHOD)(messages.outgoing(), metadata=self._metadata)

    def _hopeless(self) -> str:
        """Why nobody can be reached where the cloud should be, if that is certain."""
        try:
            with socket.create_connection(host_and_port(self.target), self.timeout_s) as reached:
                if self._credentials is None and _speaks_tls(reached):
                    return "the cloud speaks TLS: give its certificate, --ca"
        except (ConnectionRefusedError, socket.gaierror) as error:
            return f"{error.strerror}: no cloud is there"
        except OSError:
            pass
        return ""

    def _say(self, wait_s: float) -> None:
        """From time to time, how long nothing has come; what is waited for may still take ``wait_s``."""
        now = time.monotonic()
        if self.on_silence is None or self._silent_since is None or now < self._say_at:
            return
        left = wait_s + self.retry_s if self._give_up is None else max(wait_s, self._give_up - now)
        self.on_silence(f"no answer for {now - self._silent_since:.0f} s, trying for {left:.0f} more")
        self._say_at = now + SILENCE_S

    def expect(self, longest: int) -> None:
        """From now on a message of more bytes than these is refused.

        A connection takes no longer ones than it was made for: for more, the step begins again over another one.
        """
        if longest > self._longest:
            self._longest = 2 ** (longest - 1).bit_length()
            raise _TooLongError
        self._messages.longest = longest

    def send(self, **content) -> None:
        """Put a message with this one field on its way."""
        self._messages.send(**content)

    def receive(self, content: str, *, round_trips: int = 1):
        """The field of the next message, which must be this one: the answer to what was sent last.

        It adds ``round_trips`` to the count: 0 within a step, whose Final reports them.

        Raises
        ------
        BrokenStreamError
            The connection broke, or nothing came for ``timeout_s``.
        RefusedError
            The cloud ended the stream with another status, or sent something else.
        """
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            self._say_at = self._silent_since + SILENCE_S
        try:
            value = self._messages.receive(content, limit_s=self.timeout_s, meanwhile=self._say)
        except StatusError as status:
            if any(text in status.details for text in UNTRUSTED):
                raise ConnectionError(f"no connection to {self.target}: {status.details}") from None
            if status.code in BROKEN or status.details.startswith(CROWDED):
                raise BrokenStreamError(f"{status.code.name}: {status.details}") from None
            raise RefusedError(status) from None
        self._silent_since = None
        self.traffic.round_trips += round_trips
        return value


def _end(call: grpc.Call, messages: Messages) -> None:
    call.cancel()
    messages.end()


def _speaks_tls(reached: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        context.wrap_socket(reached).close()
    except OSError:
        return False
    return True
