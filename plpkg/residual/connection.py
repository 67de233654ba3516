"""The device's end of the connection: one stream, deadlines on every wait, and coming back after it broke."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
from grpc import StatusCode

from plpkg.residual import wire
from plpkg.residual.wire import Counter, StatusError
from plpkg.residual.wire_pb2 import FromCloud, FromDevice, Goodbye, Hello, Terms

Result = TypeVar("Result")

BROKEN = {
    StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
"""Statuses after which the device comes back; any other is the cloud's refusal."""


class BrokenStreamError(ConnectionError):
    """The stream broke off."""


class SessionLostError(ConnectionError):
    """The cloud does not know the session any more."""


class RefusedError(RuntimeError):
    """The cloud has said no.

    Attributes
    ----------
    code
        The gRPC status.
    """

    def __init__(self, failure: StatusError) -> None:
        super().__init__(f"{failure.code.name}: {failure.details}")
        self.code = failure.code


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
        For each answer of the cloud.
    retry_s
        How long to try to come back.
    max_message_bytes
        Of what the cloud sends.

    Raises
    ------
    ValueError
        The target is not on this machine, and TLS or the token is missing.
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
        wire.require_protection(target, encrypted=ca is not None, token=token)
        self.target, self.terms, self.timeout_s, self.retry_s = target, terms, timeout_s, retry_s
        self.traffic = Counter()
        self.session, self.steps = b"", 0
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        options = [*wire.CHANNEL_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
        if ca is None:
            self._channel = grpc.insecure_channel(via or target, options)
        else:
            options.append(("grpc.ssl_target_name_override", target.rpartition(":")[0].strip("[]")))
            credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
            self._channel = grpc.secure_channel(via or target, credentials, options)
        self._connect = self._channel.stream_stream(wire.METHOD, FromDevice.SerializeToString, FromCloud.FromString)
        self._call: grpc.Call | None = None
        self._outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self._deadline = float("inf")
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="plpkg-deadline").start()

    def close(self) -> None:
        """Leave: the cloud forgets the session."""
        if self._call is not None:
            self._outgoing.put(FromDevice(goodbye=Goodbye()))
            self._outgoing.put(None)
            self._deadline = time.monotonic() + min(5.0, self.timeout_s)
            try:
                for _ in self._call:  # until the cloud has taken note
                    pass
            except grpc.RpcError:
                pass
            self._call = None
        self._closed.set()
        self._channel.close()

    def keep_trying(self, run: Callable[[], Result]) -> Result:
        """``run()``, again from its beginning whenever the stream breaks.

        Raises
        ------
        ConnectionError
            It did not work for ``retry_s``; :class:`SessionLostError` if the cloud has forgotten the session.
        RefusedError
            The cloud does not want to.
        """
        give_up, pause = None, 0.05
        while True:
            try:
                if self._call is None:
                    self._open()
                return run()
            except BrokenStreamError as error:
                give_up = time.monotonic() + self.retry_s if give_up is None else give_up
                if time.monotonic() + pause > give_up:
                    raise ConnectionError(f"no connection to {self.target}: {error}") from error
            except BaseException:
                self.reset()  # in the middle of a step: the next one begins with a new stream
                raise
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def reset(self) -> None:
        """Break the stream off; the session goes on with the next."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _open(self) -> None:
        self._outgoing = queue.SimpleQueue()
        self._call = self._connect(iter(self._outgoing.get, None), metadata=self._metadata)
        self.send(FromDevice(hello=Hello(terms=self.terms, session=self.session)))
        try:
            welcome = self.receive("welcome")
        except RefusedError as refused:
            if refused.code is StatusCode.NOT_FOUND and self.session:
                self.session, self.steps = b"", 0
                raise SessionLostError(str(refused)) from refused
            raise
        self.session, self.steps = welcome.session, welcome.steps

    def send(self, message: FromDevice, payload: bytes = b"") -> None:
        """Put a message on its way."""
        self.traffic.sent(payload, message)
        self._outgoing.put(message)

    def receive(self, content: str):
        """The content of the next message, which must be this one.

        Raises
        ------
        BrokenStreamError
            The stream broke off, or nothing came for ``timeout_s``.
        RefusedError
            The cloud ended it with another status.
        """
        self._deadline = time.monotonic() + self.timeout_s
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            self._fail(error)
        self._deadline = float("inf")
        if message is None:
            self._call = None
            raise BrokenStreamError(f"{self.target} ended the stream")
        found = message.WhichOneof("content")
        if found != content:
            self.reset()
            raise RefusedError(StatusError(StatusCode.INTERNAL, f"the cloud sent {found}, not {content}"))
        value = getattr(message, content)
        payload = value if isinstance(value, bytes) else getattr(value, "data", b"")
        self.traffic.received(payload, message)
        if content != "welcome":
            self.traffic.round_trips += 1
        return value

    def _fail(self, error: grpc.RpcError) -> None:
        late = time.monotonic() > self._deadline
        self._deadline, self._call = float("inf"), None
        if late:
            raise BrokenStreamError(f"{self.target} did not answer for {self.timeout_s:g} s") from None
        if error.code() in BROKEN:
            raise BrokenStreamError(f"{error.code().name}: {error.details()}") from None
        raise RefusedError(StatusError(error.code(), error.details())) from None

    def _watch(self) -> None:
        """Cancels a wait that takes too long: a stream's own wait has no deadline."""
        while not self._closed.wait(min(0.25, self.timeout_s / 4)):
            call = self._call
            if call is not None and time.monotonic() > self._deadline:
                call.cancel()
