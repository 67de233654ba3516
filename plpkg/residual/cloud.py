"""The cloud's end: serves the decoder layers to several devices at once, each with a session of its own.

A session is a KV cache and the number of the last completed step. A step that breaks off leaves the cache as it
was; a device that comes back within ``resume_s`` goes on with it, and a step that it repeats because the answer was
lost is answered from memory. Each connection has a thread, so that one device's silence holds nobody up.

Left out: batching the steps of several devices together. Training on a GPU waits for the device inside PyTorch's
backward thread, of which each GPU has one: there one device's silence does hold up the others' training.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import torch
from grpc import StatusCode
from peft import PeftModel

from plpkg.residual import wire
from plpkg.residual.session import Session, Stream
from plpkg.residual.split import split
from plpkg.residual.wire import Counter, Limits, StatusError
from plpkg.residual.wire_pb2 import FromCloud, FromDevice, Hello


class CloudServer:
    """Serves a model's decoder layers; a context manager.

    Parameters
    ----------
    model
        What ``get_peft_model(model, PrivateLoraConfig(...))`` gave. Its M are not used: the devices have them.
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
    adapter_name
        Which adapter's A and B.

    Attributes
    ----------
    address
        Where it listens.
    traffic
        What has crossed, all devices together.
    num_threads
        With how many each connection computes: those of ``torch.get_num_threads()`` here and now.

    Raises
    ------
    ValueError
        An address that needs TLS and a token without them.
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
        adapter_name: str = "default",
    ) -> None:
        wire.require_protection(address, encrypted=tls is not None, token=token)
        device, self.part = split(model, first_k, last_k, adapter_name=adapter_name)
        self.terms = wire.terms(model, device, adapter_name, (first_k, last_k), precision)
        self.dtype = wire.PRECISIONS[precision]
        self.limits = limits or Limits()
        self.traffic, self.num_threads = Counter(), torch.get_num_threads()
        self._token = token
        self._sessions: dict[bytes, Session] = {}
        self._lock = threading.Lock()
        self._connections: set[Stream] = set()
        self._stopped = threading.Event()
        self.part.eval()
        self.part.new_cache()  # refuses layers whose cache cannot be taken back

        # A few more than there may be sessions, so that those who are refused are told why.
        connections = self.limits.sessions + 8
        options = [
            *wire.CHANNEL_OPTIONS,
            ("grpc.max_receive_message_length", self.limits.message_bytes),
            ("grpc.so_reuseport", 0),  # or two clouds could share an address
        ]
        self._server = grpc.server(
            ThreadPoolExecutor(connections, "plpkg-cloud"), options=options, maximum_concurrent_rpcs=connections
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._connect, FromDevice.FromString, FromCloud.SerializeToString
        )
        self._server.add_generic_rpc_handlers((_Handlers({wire.METHOD: handler}),))
        host = address.rpartition(":")[0]
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                pair = (Path(tls, "key.pem").read_bytes(), Path(tls, "cert.pem").read_bytes())
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"{address} cannot be bound: {error}") from error
        self.address = f"{host}:{port}"

    def __enter__(self) -> "CloudServer":
        self._server.start()
        threading.Thread(target=self._watch, daemon=True, name="plpkg-deadlines").start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        """Break off what is under way after ``grace_s`` seconds, and forget every session."""
        self._stopped.set()
        self._server.stop(grace_s).wait(grace_s + 10)
        with self._lock:
            self._sessions.clear()

    def wait(self) -> None:
        """Until :meth:`stop` is called."""
        self._server.wait_for_termination()

    @property
    def sessions(self) -> int:
        """How many there are, waiting ones included."""
        return len(self._sessions)

    def _connect(self, requests: Iterator[FromDevice], context: grpc.ServicerContext) -> Iterator[FromCloud]:
        """One connection: hands out what its thread puts into the queue."""
        if self._token is not None:
            shown = dict(context.invocation_metadata()).get("authorization", "")
            if not hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
                context.abort(StatusCode.UNAUTHENTICATED, "no token, or a wrong one")
        connection = Stream(self, requests, context)
        context.add_callback(connection.closed)
        self._connections.add(connection)
        threading.Thread(target=connection.run, daemon=True, name="plpkg-session").start()
        while (item := connection.outgoing.get()) is not None:
            if isinstance(item, StatusError):
                context.abort(item.code, item.details)
            yield item

    def _watch(self) -> None:
        """Ends connections whose device is overdue; a stream's own waits have no deadline."""
        while not self._stopped.wait(0.2):
            now = time.monotonic()
            for connection in list(self._connections):
                if now > connection.deadline:
                    details = f"the device said nothing {connection.waits_for}"
                    connection.fail(StatusError(StatusCode.DEADLINE_EXCEEDED, details))

    def open(self, hello: Hello, connection: Stream) -> Session:
        """The session that a device begins or goes on with."""
        if different := wire.differences(hello.terms, self.terms):
            raise StatusError(StatusCode.FAILED_PRECONDITION, different)
        with self._lock:
            session, before = self._find(hello), None
            session.connection, before = connection, session.connection
        if before is not None:  # it broke, but nobody has told us yet
            before.fail(StatusError(StatusCode.ABORTED, "the session goes on on another connection"))
        patience = time.monotonic() + self.limits.answer_s
        while not session.free.acquire(timeout=0.1):
            if connection.ended or time.monotonic() > patience:
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


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: dict) -> None:
        self._handlers = handlers

    def service(self, handler_call_details):
        return self._handlers.get(handler_call_details.method)
