"""The cloud's end: serves the decoder layers to several devices at once, each with a session of its own.

A session is a KV cache and the number of the last completed step. A step that breaks off leaves the cache as it
was; a device that comes back within ``resume_s`` goes on with it, and a step that it repeats because the answer was
lost is answered from memory. Each connection has a thread, so that one device's silence holds nobody up.

Left out: batching the steps of several devices together. Training on a GPU waits for the device inside PyTorch's
backward thread, of which each GPU has one: there one device's silence does hold up the others' training.
"""

import contextlib
import hmac
import logging
import queue
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
from transformers import Cache

from plpkg.residual import wire
from plpkg.residual.parts import CloudPart
from plpkg.residual.split import split
from plpkg.residual.wire import Counter, Limits, StatusError
from plpkg.residual.wire_pb2 import FromCloud, FromDevice, Hello, Part, Step, Welcome

BACKLOG = 8
"""Messages that may wait for a device that does not read."""


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
        self.traffic = Counter()
        self._token = token
        self._sessions: dict[bytes, _Session] = {}
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
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
        connection = _Connection(self, requests, context)
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

    def open(self, hello: Hello, connection: "_Connection") -> "_Session":
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

    def _find(self, hello: Hello) -> "_Session":
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
        session = _Session(self.part, secrets.token_bytes(16))
        self._sessions[session.key] = session
        return session

    def close(self, session: "_Session", connection: "_Connection", *, forget: bool) -> None:
        """A connection has ended: the session waits for the next one, or is forgotten."""
        self._leave(session, connection, forget=forget)
        session.free.release()

    def _leave(self, session: "_Session", connection: "_Connection", *, forget: bool) -> None:
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


class _Session:
    """What the cloud keeps for a device between two messages."""

    def __init__(self, part: CloudPart, key: bytes) -> None:
        self.key = key
        self.part = part
        self.cache: Cache = part.new_cache()
        self.batch = 0
        self.steps = 0
        self.answer: tuple[Step, FromCloud] | None = None
        self.connection: _Connection | None = None
        self.waits_until = 0.0
        self.free = threading.Lock()  # held by the thread that computes for it

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A step that fails leaves the cache as it was: its tensors are replaced, never written into."""
        before = self.cache, self.batch, [(layer, dict(vars(layer))) for layer in self.cache.layers]
        try:
            yield
        except BaseException:
            self.cache, self.batch, layers = before
            self.cache.layers[:] = [layer for layer, _ in layers]
            for layer, fields in layers:
                vars(layer).clear()
                vars(layer).update(fields)
            raise


class _Connection:
    """One device's connection; also the transport of what its thread computes."""

    def __init__(self, server: CloudServer, requests: Iterator[FromDevice], context: grpc.ServicerContext) -> None:
        self.server, self.requests, self.context = server, requests, context
        self.outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self.limits, self.dtype, self.terms = server.limits, server.dtype, server.terms
        self.deadline, self.waits_for = time.monotonic() + self.limits.answer_s, "after connecting"
        self.shape = (0, 0)  # (batch, seq) of the step under way
        self.ended = False

    def closed(self) -> None:
        """The stream is over, whoever has ended it."""
        self.ended = True
        self.server._connections.discard(self)
        self.outgoing.put(None)

    def fail(self, failure: StatusError) -> None:
        """End the stream with a status, or, of a device that does not even read, without."""
        if self.ended:
            self.context.cancel()
        self.ended, self.deadline = True, time.monotonic() + 1.0
        self.outgoing.put(failure)

    def run(self) -> None:
        """Serve the device until it leaves, breaks off, or asks for what it may not."""
        session, left = None, False
        try:
            session = self.server.open(self._next("hello", self.limits.answer_s), self)
            self._put(FromCloud(welcome=Welcome(session=session.key, steps=session.steps)))
            self.server.part.connect(self)
            while (step := self._next("step", self.limits.idle_s, or_goodbye=True)) is not None:
                self._step(session, step)
            left = True
        except StatusError as failure:
            self.fail(failure)
        except (ValueError, OverflowError) as error:
            self.fail(StatusError(StatusCode.INVALID_ARGUMENT, str(error)))
        except grpc.RpcError:
            pass  # the stream broke: the session waits
        except Exception as error:
            logging.getLogger(__name__).exception("a session failed")
            self.fail(StatusError(StatusCode.UNKNOWN, f"the cloud failed: {type(error).__name__}"))
        finally:
            self.server.part.connect(None)
            if session is not None:
                self.server.close(session, self, forget=left)
            self.outgoing.put(None)

    def _step(self, session: _Session, step: Step) -> None:
        if session.answer is not None and step == session.answer[0]:
            self._put(session.answer[1], session.answer[1].hidden)  # it was lost on its way
            return
        if step.number != session.steps + 1:
            raise StatusError(
                StatusCode.FAILED_PRECONDITION, f"step {step.number} on the device, {session.steps} done on the cloud"
            )
        self._check(session, step)
        self.shape = batch, seq = step.batch, step.seq
        hidden = wire.unpack(step.hidden, (batch, seq, self.terms.hidden), self.dtype)
        hidden = hidden.to(next(session.part.parameters()))  # its type and place
        if step.train:
            self._train(session, step, hidden)
            session.steps = step.number
            return
        with session.all_or_nothing(), torch.no_grad():
            if step.new_sequence:
                session.cache, session.batch = session.part.new_cache(), batch
            final = session.part(hidden, cache=session.cache)
        answer = FromCloud(hidden=wire.pack(final if step.all_positions else final[:, -1:], self.dtype))
        session.steps, session.answer = step.number, (step, answer)
        self._put(answer, answer.hidden)

    def _check(self, session: _Session, step: Step) -> None:
        if not (step.batch and step.seq):
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"a step of batch={step.batch}, seq={step.seq} is empty")
        alone = step.new_sequence or step.train
        length = step.seq + (0 if alone else session.cache.get_seq_length())
        for what, asked, limit in (("batch", step.batch, self.limits.batch), ("tokens", length, self.limits.tokens)):
            if asked > limit:
                raise StatusError(StatusCode.OUT_OF_RANGE, f"{what} would be {asked}, the cloud's limit is {limit}")
        if not alone and step.batch != session.batch:
            raise StatusError(
                StatusCode.INVALID_ARGUMENT, f"batch={step.batch}, but the sequence began with {session.batch}"
            )

    def _train(self, session: _Session, step: Step, hidden: torch.Tensor) -> None:
        with torch.enable_grad():
            hidden.requires_grad_(step.input_gradient)
            final = session.part(hidden)
            answer = FromCloud(hidden=wire.pack(final, self.dtype))
            self._put(answer, answer.hidden)
            data = self._next("grad_hidden", self.limits.answer_s)
            gradient = wire.unpack(data, tuple(final.shape), self.dtype).to(final)
            if final.requires_grad:
                final.backward(gradient)
        if step.input_gradient:
            answer = FromCloud(grad_hidden=wire.pack(hidden.grad, self.dtype))
            self._put(answer, answer.grad_hidden)

    def send(self, group: int, u: torch.Tensor) -> None:
        part = Part(group=group, data=wire.pack(u, self.dtype))
        self._put(FromCloud(residual=part), part.data)

    def receive(self, group: int) -> torch.Tensor:
        return self._part("residual", group, self.terms.r_d2c)

    def backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        part = Part(group=group, data=wire.pack(grad_v, self.dtype))
        self._put(FromCloud(grad_output=part), part.data)
        return self._part("grad_input", group, self.terms.r_c2d)

    def _part(self, content: str, group: int, rank: int) -> torch.Tensor:
        part = self._next(content, self.limits.answer_s)
        if part.group != group:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"exchange {group} was answered with {part.group}")
        shape = (self.terms.projections[group], *self.shape, rank)
        return wire.unpack(part.data, shape, self.dtype)

    def _put(self, message: FromCloud, payload: bytes = b"") -> None:
        late = time.monotonic() + self.limits.answer_s
        while self.outgoing.qsize() > BACKLOG and not self.ended:
            if time.monotonic() > late:
                raise StatusError(
                    StatusCode.DEADLINE_EXCEEDED, f"the device read nothing for {self.limits.answer_s:g} s"
                )
            time.sleep(0.05)
        self.server.traffic.sent(payload, message)
        self.outgoing.put(message)

    def _next(self, content: str, limit_s: float, *, or_goodbye: bool = False):
        """The next message's content, which must be this one; ``None`` for a goodbye, where there may be one."""
        self.deadline, self.waits_for = time.monotonic() + limit_s, f"for {limit_s:g} s, a {content} was due"
        message = next(self.requests, None)
        if not self.ended:
            self.deadline = float("inf")
        if message is None:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"the stream ended where a {content} was due")
        found = message.WhichOneof("content")
        if found == "goodbye" and or_goodbye:
            return None
        if found != content:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"a {content} was due, got {found or 'nothing'}")
        value = getattr(message, content)
        payload = value if isinstance(value, bytes) else getattr(value, "data", getattr(value, "hidden", b""))
        self.server.traffic.received(payload, message)
        return value
