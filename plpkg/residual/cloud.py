"""The cloud's end: serves the decoder layers to several devices at once, each with a session of its own.

A session is a KV cache and the number of the last completed step. A step that breaks off leaves the cache as it
was; a device that comes back within ``resume_s`` goes on with it, and a step that it repeats because the answer was
lost is answered from memory. Each connection has a thread, so that one device's silence holds nobody up.

Left out: batching the steps of several devices together. Training on a GPU waits for the device inside PyTorch's
backward thread, of which each GPU has one: there one device's silence does hold up the others' training.
"""

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path

import torch
from grpc import StatusCode
from peft import PeftModel

from plpkg.residual import certificates, wire
from plpkg.residual.call import ServerCall, StatusError
from plpkg.residual.session import Session, Stream
from plpkg.residual.split import split
from plpkg.residual.wire import Counter, Limits
from plpkg.residual.wire_pb2 import Hello
from plpkg.validation import host_and_port, number

WAITING = 64
"""Connections beyond those with a session: who has shown no token yet, and who is told that there is no room.

Beyond these, a newcomer takes the place of the one that has been there longest.
"""


class CloudServer:
    """Serves a model's decoder layers; a context manager.

    Parameters
    ----------
    model
        What ``get_peft_model(model, PrivateLoraConfig(...))`` gave. Its M, embedding and LM head are not used: the
        devices have them; :func:`plpkg.residual.split.release` frees them here.
    address
        ``host:port``; port 0 takes a free one. See :attr:`address`.
    first_k, last_k
        How many layers the devices keep at either end.
    precision
        Of the values on the wire: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    tls
        A folder with ``cert.pem`` and ``key.pem``; :func:`plpkg.residual.certificates.write` makes one.
    token
        What a device must show. Both are needed unless the address is a loopback one.
    limits
        What devices may ask for.
    busy_wait_s
        How long it looks for a device's next message before it sleeps. Looking takes a core, and saves what waking up
        costs: a few hundred µs on a virtual machine, at each layer. Only for a device that computes alone: several
        would fight for Python's lock.
    adapter_name
        Which adapter's A and B.

    Attributes
    ----------
    address
        Where it listens.
    traffic
        What has crossed, all devices together.
    computing
        The connections with a step under way.
    num_threads
        With how many each connection computes: those of ``torch.get_num_threads()`` here and now.

    Raises
    ------
    ValueError
        An address that needs TLS and a token without them; a time below zero.
    OSError
        The address cannot be bound, or the certificate read.
    """

    def __init__(
        self,
        model: PeftModel,
        address: str = "127.0.0.1:0",
        *,
        first_k: int = 0,
        last_k: int = 0,
        precision: str = "fp16",
        tls: str | Path | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        busy_wait_s: float = 0.0,
        adapter_name: str = "default",
    ) -> None:
        number("busy_wait_s", busy_wait_s)
        if not isinstance(limits, Limits | None):
            raise ValueError(f"limits must be a Limits, got {limits!r}")
        wire.require_protection(address, encrypted=tls is not None, token=token)
        device, self.part = split(model, first_k, last_k, adapter_name=adapter_name)
        self.terms = wire.terms(model, device, adapter_name, (first_k, last_k), precision)
        self.dtype = wire.PRECISIONS[precision]
        self.limits = limits or Limits()
        self.traffic, self.num_threads = Counter(), torch.get_num_threads()
        self.token, self.busy_wait_s = token, busy_wait_s
        self.computing: set[Stream] = set()
        self._sessions: dict[bytes, Session] = {}
        self._lock = threading.Lock()
        self._connections: dict[Stream, threading.Thread] = {}
        self._stopped = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True, name="plpkg-cloud")
        self.part.eval()
        self.part.new_cache()  # refuses layers whose cache cannot be taken back

        self._tls = None
        if tls is not None:
            self._tls = certificates.for_cloud(tls)
            self._tls.set_alpn_protocols(["h2"])
            self._tls.num_tickets = 0  # a device's next connection begins anew
        host, port = host_and_port(address)
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            both = host == "::" and socket.has_dualstack_ipv6()  # every address, those of IPv4 as well
            self._listener = socket.create_server(place[:2], family=family, backlog=128, dualstack_ipv6=both)
        except OSError as error:
            raise OSError(f"{address} cannot be bound: {error}") from error
        self._listener.settimeout(1.0)  # to look whether it is over, where nothing wakes who accepts
        self.address = f"{address.rpartition(':')[0]}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "CloudServer":
        self._accepting.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        """Break off what is under way after ``grace_s`` seconds, and forget every session."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, on Linux
        self._listener.close()
        if self._accepting.is_alive():
            self._accepting.join()
        patience = time.monotonic() + grace_s
        while self._connections and time.monotonic() < patience:
            time.sleep(0.02)
        left = list(self._connections.items())
        for stream, _ in left:
            stream.call.abandon()
        patience = time.monotonic() + 10
        for _, thread in left:
            thread.join(max(0.0, patience - time.monotonic()))
        with self._lock:
            self._sessions.clear()

    def wait(self) -> None:
        """Until :meth:`stop` is called."""
        self._stopped.wait()

    @property
    def sessions(self) -> int:
        """How many there are, waiting ones included."""
        return len(self._sessions)

    def _accept(self) -> None:
        """Give each connection a thread."""
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it was closed, or there are no more files to open
                self._stopped.wait(0.05)
                continue
            if not self._has_room():
                connection.close()
                continue
            stream = None
            try:
                stream = Stream(self, ServerCall(connection, self._tls, self.limits.message_bytes))
                thread = threading.Thread(target=self._serve, args=(stream,), daemon=True, name="plpkg-session")
                self._connections[stream] = thread
                thread.start()
            except (OSError, RuntimeError):  # it is gone again, or there can be no more threads
                self._connections.pop(stream, None)
                connection.close()
                self._stopped.wait(0.05)

    def _has_room(self) -> bool:
        """Whether there may be one more connection: of those without a session, the oldest gives its place."""
        if len(self._connections) < self.limits.sessions + WAITING:
            return True
        with self._lock:
            at_work = {session.connection for session in self._sessions.values()}
        for stream, thread in list(self._connections.items()):
            if stream not in at_work:
                stream.call.abandon()
                thread.join(1.0)
                return not thread.is_alive()
        return False

    def _serve(self, stream: Stream) -> None:
        try:
            stream.run()
        finally:
            del self._connections[stream]

    def open(self, hello: Hello, connection: Stream) -> Session:
        """The session that a device begins or goes on with."""
        if different := wire.differences(hello.terms, self.terms):
            raise StatusError(StatusCode.FAILED_PRECONDITION, different)
        with self._lock:
            session, before = self._find(hello), None
            session.connection, before = connection, session.connection
        if before is not None:  # it broke, but nobody has told us yet
            before.call.failure = StatusError(StatusCode.ABORTED, "the session goes on on another connection")
        patience = time.monotonic() + self.limits.answer_s
        while not session.free.acquire(timeout=0.1):
            if connection.call.failure is not None or time.monotonic() > patience:
                self._leave(session, connection, forget=False)
                raise StatusError(StatusCode.UNAVAILABLE, "the session's earlier connection does not end")
        return session

    def _find(self, hello: Hello) -> Session:
        waiting = [session for session in self._sessions.values() if session.connection is None]
        full = len(self._sessions) >= self.limits.sessions
        for session in sorted(waiting, key=lambda session: session.waits_until):
            # Those that wait too long go, and for a new device also the one that has waited longest.
            if time.monotonic() > session.waits_until or (full and not hello.session):
                del self._sessions[session.key]
                full = False
        if hello.session:
            if hello.session not in self._sessions:
                raise StatusError(StatusCode.NOT_FOUND, "no such session: it was forgotten, or the cloud began anew")
            return self._sessions[hello.session]
        if full:
            raise StatusError(
                StatusCode.RESOURCE_EXHAUSTED, f"the cloud has {self.limits.sessions} sessions, its limit"
            )
        session = Session(self.part, secrets.token_bytes(16))
        self._sessions[session.key] = session
        return session

    def close(self, session: Session, connection: Stream, *, forget: bool) -> None:
        """A connection has ended: the session waits for the next one, or is forgotten."""
        self._leave(session, connection, forget=forget)
        session.free.release()

    def _leave(self, session: Session, connection: Stream, *, forget: bool) -> None:
        with self._lock:
            if session.connection is not connection:
                return  # the session goes on on another one
            session.connection = None
            session.waits_until = time.monotonic() + self.limits.resume_s
            if forget:
                self._sessions.pop(session.key, None)
