"""The device's end of the connection: one call, deadlines on every wait, and coming back after it broke."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from google.protobuf.message import DecodeError
from grpc import StatusCode

from plpkg.residual import certificates, wire
from plpkg.residual.call import BrokenCallError, ClientCall, StatusError
from plpkg.residual.wire import Counter
from plpkg.residual.wire_pb2 import FromCloud, FromDevice, Goodbye, Hello, Terms

Result = TypeVar("Result")

BROKEN = {
    StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
"""Statuses after which the device comes back; any other is the cloud's refusal."""


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
    busy_wait_s
        How long each wait looks for the answer before it sleeps.
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
        busy_wait_s: float = 0.0,
        max_message_bytes: int = 256 * 2**20,
    ) -> None:
        wire.require_protection(target, encrypted=ca is not None, token=token)
        self.target, self.terms, self.timeout_s, self.retry_s = target, terms, timeout_s, retry_s
        self.traffic, self.busy_wait_s = Counter(), busy_wait_s
        self.session, self.steps = b"", 0
        self._address, self._max_message_bytes = via or target, max_message_bytes
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._tls: ssl.SSLContext | None = None
        if ca is not None:
            self._tls = certificates.for_device(ca)
            self._tls.set_alpn_protocols(["h2"])
        self._call: ClientCall | None = None

    def close(self) -> None:
        """Leave: the cloud forgets the session."""
        if self._call is None:
            return
        patience_s = min(5.0, self.timeout_s)
        try:
            self.send(FromDevice(goodbye=Goodbye()))
            self._call.end(patience_s)
            while self._call.receive(patience_s) is not None:  # until the cloud has taken note
                pass
        except (BrokenCallError, StatusError, TimeoutError):
            pass
        self.reset()

    def keep_trying(self, run: Callable[[], Result]) -> Result:
        """``run()``, again from its beginning whenever the stream breaks.

        Raises
        ------
        ConnectionError
            It did not work for ``retry_s``, or the other side shows a certificate that is not trusted;
            :class:`SessionLostError` if the cloud has forgotten the session.
        RefusedError
            The cloud does not want to.
        """
        give_up, pause = None, 0.05
        while True:
            try:
                if self._call is None:
                    self._open()
                return run()
            except BrokenCallError as error:
                give_up = time.monotonic() + self.retry_s if give_up is None else give_up
                stranger = isinstance(error.__cause__, ssl.SSLCertVerificationError)  # and stays one
                if stranger or time.monotonic() + pause > give_up:
                    raise ConnectionError(f"no connection to {self.target}: {error}") from error
            except BaseException:
                self.reset()  # in the middle of a step: the next one begins with a new stream
                raise
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def reset(self) -> None:
        """Break the stream off; the session goes on with the next."""
        if self._call is not None:
            self._call.close()
            self._call = None

    def _open(self) -> None:
        self._call = ClientCall(
            self._address,
            wire.METHOD,
            authority=self.target,
            metadata=self._metadata,
            tls=self._tls,
            timeout_s=self.timeout_s,
            max_message_bytes=self._max_message_bytes,
        )
        self._call.busy_wait_s = self.busy_wait_s
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
        """Put a message on its way.

        Raises
        ------
        BrokenCallError
            The connection broke, or the cloud reads nothing.
        """
        self.traffic.sent(payload, message)
        try:
            self._call.send(message.SerializeToString(), self.timeout_s)
        except (BrokenCallError, TimeoutError) as error:
            self._broken(error)

    def receive(self, content: str):
        """The content of the next message, which must be this one.

        Raises
        ------
        BrokenCallError
            The connection broke, or nothing came for ``timeout_s``.
        RefusedError
            The cloud ended it with another status.
        """
        try:
            data = self._call.receive(self.timeout_s)
            message = None if data is None else FromCloud.FromString(data)
        except (BrokenCallError, TimeoutError) as error:
            self._broken(error)
        except StatusError as failure:
            if failure.code in BROKEN:
                self._broken(failure)
            self.reset()
            raise RefusedError(failure) from None
        except DecodeError as error:
            self.reset()
            raise RefusedError(StatusError(StatusCode.INTERNAL, f"the cloud sent no message: {error}")) from None
        if message is None:
            self._broken(f"{self.target} ended the call")
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

    def _broken(self, reason: Exception | str) -> NoReturn:
        self.reset()
        if isinstance(reason, TimeoutError):
            reason = f"{self.target} did not answer for {self.timeout_s:g} s"
        elif isinstance(reason, StatusError):
            reason = f"{reason.code.name}: {reason.details}"
        raise BrokenCallError(str(reason)) from None
