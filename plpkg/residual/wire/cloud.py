"""The cloud's end: serves the decoder layers to several devices at once, each with a session of its own.

A session is a stream and its KV cache: a device whose stream broke comes with all of its text again. Each stream has a
thread, so that one device's silence holds nobody up.

Left out: batching the steps of several devices together. Training on a GPU waits for the device inside PyTorch's
backward thread, of which each GPU has one: there one device's silence does hold up the others' training.
"""

import hmac
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import torch
from grpc import StatusCode
from peft import PeftModel
from transformers import Cache

from plpkg.residual.cut.parts import split
from plpkg.residual.wire import certificates
from plpkg.residual.wire.messages import METHOD, OPTIONS, Counter, Messages, StatusError
from plpkg.residual.wire.session import Sessions, Stream
from plpkg.residual.wire.terms import Limits, terms
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice

WAITING = 64
"""Streams beyond those with a session: who has not said hello yet, and who is told that there is no room.

Beyond these, a newcomer takes the place of the one that has been there longest.
"""


class CloudServer:
    """Serves a model's decoder layers; a context manager.

    Parameters
    ----------
    model
        The result of ``get_peft_model(model, PrivateLoraConfig(...))``, or a ``LadderConfig``. Its M are not used: the
        devices have them; :func:`plpkg.residual.cut.parts.release` frees them here, and the embedding and LM head.
    address
        ``host:port``; port 0 takes a free one. See :attr:`address`.
    first_k, last_k, fold
        How the model is cut: :func:`plpkg.residual.cut.parts.split`.
    precision
        Of the values on the wire: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    tls
        A folder with ``cert.pem`` and ``key.pem``; docs/tour.md has the line of openssl that makes them.
    token
        The bearer token that a device must show. Both are needed unless the address is a loopback one.
    limits
        The limits of what devices may ask for.
    cache
        Makes a bounded KV cache for each sequence: ``plpkg.retention.bounded(model, scorer, budget)``. Then nobody can
        take guesses back, and devices write without a draft. By default nothing is forgotten.
    adapter_name
        Which adapter's A and B.

    Attributes
    ----------
    address
        Where it listens.
    traffic
        The traffic of all devices together.
    num_threads
        With how many each stream's thread computes: those of ``torch.get_num_threads()`` here and now.

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
        fold: bool = False,
        precision: str = "fp16",
        tls: str | Path | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        cache: Callable[[torch.nn.Module], Cache] | None = None,
        adapter_name: str = "default",
    ) -> None:
        if not isinstance(limits, Limits | None):
            raise ValueError(f"limits must be a Limits, got {limits!r}")
        limits = limits or Limits()
        certificates.require_protection(address, encrypted=tls is not None, token=token, option="--tls")
        device, self.part = split(model, first_k, last_k, fold=fold, adapter_name=adapter_name)
        self.part.eval()
        self.part.make_cache = cache
        self.part.new_cache()  # refuses layers whose cache cannot be taken back
        self.terms = terms(model, device, self.part.riders, adapter_name, (first_k, last_k), precision)
        self.traffic = Counter()
        self.num_threads = torch.get_num_threads()
        self._sessions = Sessions(self.part, self.terms, limits)
        self._token = token
        self._streams: dict[Stream, threading.Thread] = {}

        streams = limits.sessions + WAITING + 8  # some more, so that who is refused is told why
        answer_ms = round(1000 * limits.answer_s)
        self._server = grpc.server(
            ThreadPoolExecutor(streams, "plpkg-cloud"),
            handlers=[_Handler(self._connect)],
            maximum_concurrent_rpcs=streams,
            options=[
                *OPTIONS,
                ("grpc.max_receive_message_length", limits.message_bytes),
                ("grpc.so_reuseport", 0),  # or two clouds could share an address
                ("grpc.server_handshake_timeout_ms", answer_ms),
                ("grpc.max_connection_idle_ms", answer_ms),  # a connection without a stream
            ],
        )
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, certificates.for_cloud(tls))
        except RuntimeError as error:
            raise OSError(f"{address} cannot be bound: {error}") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"

    def start(self) -> "CloudServer":
        """Serve until :meth:`stop`: what entering a ``with`` block does, and leaving it."""
        self._server.start()
        return self

    __enter__ = start

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        """Break off what is under way after ``grace_s`` seconds."""
        self._server.stop(grace_s).wait()
        patience = time.monotonic() + 10
        for thread in list(self._streams.values()):
            if thread.is_alive():
                thread.join(max(0.0, patience - time.monotonic()))

    def wait(self) -> None:
        """Until :meth:`stop` is called."""
        self._server.wait_for_termination()

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self._sessions)

    def _connect(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream: a thread of its own serves it, and this one sends what that has to say."""
        shown = str(dict(context.invocation_metadata()).get("authorization", ""))
        if self._token is not None and not hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            context.abort(StatusCode.UNAUTHENTICATED, "no token, or a wrong one")
        messages = Messages(FromCloud, FromDevice, "the device", self.traffic)
        over = threading.Event()

        def gone() -> None:  # nobody reads any more
            over.set()
            messages.end()

        context.add_callback(gone)
        stream = Stream(self._sessions, messages, end=context.cancel)
        thread = threading.Thread(target=self._serve, args=(stream, over), daemon=True, name="plpkg-session")
        self._streams[stream] = thread
        silent = [stream for stream in list(self._streams) if not stream.greeted]
        if len(silent) > WAITING:
            self._streams.pop(silent[0], None)
            silent[0].end()
        try:
            messages.listen(requests)
            thread.start()
        except RuntimeError as error:  # there can be no more threads
            self._streams.pop(stream, None)
            context.abort(StatusCode.UNAVAILABLE, str(error))
        for message in messages.outgoing():
            if isinstance(message, StatusError):
                context.abort(message.code, message.details)
            yield message

    def _serve(self, stream: Stream, over: threading.Event) -> None:
        torch.set_num_threads(self.num_threads)  # a new thread would take as many as there are cores
        try:
            stream.run()
        finally:
            if not over.wait(stream.limits.answer_s):  # the device reads nothing, not even how the stream ends
                stream.end()
            self._streams.pop(stream, None)


class _Handler(grpc.GenericRpcHandler):
    """Knows one method; its messages are bytes."""

    def __init__(self, connect) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(connect)

    def service(self, handler_call_details):
        return self._handler if handler_call_details.method == METHOD else None
