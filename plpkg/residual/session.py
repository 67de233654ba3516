"""What the cloud keeps for a device, and the stream in which a device speaks with it.

A session outlives its streams. Each stream has a thread, in which it computes; it is also the transport between the
decoder layers and the device.
"""

import contextlib
import hmac
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from google.protobuf.message import DecodeError
from grpc import StatusCode
from transformers import Cache

from plpkg.residual import wire
from plpkg.residual.call import BrokenCallError, ServerCall, StatusError
from plpkg.residual.parts import CloudPart
from plpkg.residual.wire_pb2 import FromCloud, FromDevice, Part, Step, Welcome

if TYPE_CHECKING:
    from plpkg.residual.cloud import CloudServer


class Session:
    """What the cloud keeps for a device between two messages."""

    def __init__(self, part: CloudPart, key: bytes) -> None:
        self.key = key
        self.part = part
        self.cache: Cache = part.new_cache()
        self.batch = 0
        self.steps = 0
        self.answer: tuple[Step, FromCloud] | None = None
        self.connection: Stream | None = None
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


class Stream:
    """One device's connection; also the transport of what its thread computes."""

    def __init__(self, server: "CloudServer", call: ServerCall) -> None:
        self.server, self.call = server, call
        self.limits, self.dtype, self.terms = server.limits, server.dtype, server.terms
        self.shape = (0, 0)  # (batch, seq) of the step under way

    def run(self) -> None:
        """Serve the device until it leaves, breaks off, or asks for what it may not."""
        try:
            if (end := self._serve()) is not None:
                self.call.finish(end.code, end.details, timeout_s=self.limits.answer_s)
        finally:
            self.call.close()

    def _serve(self) -> StatusError | None:
        """Everything until the end: its status, or ``None`` if there is nobody to tell."""
        session, left = None, False
        torch.set_num_threads(self.server.num_threads)  # a new thread would take as many as there are cores
        try:
            self._check_token(self.call.accept(wire.METHOD, self.limits.answer_s))
            session = self.server.open(self._next("hello", self.limits.answer_s), self)
            self._put(FromCloud(welcome=Welcome(session=session.key, steps=session.steps)))
            self.server.part.connect(self)
            while (step := self._next("step", self.limits.idle_s, or_goodbye=True)) is not None:
                self.server.computing.add(self)
                self._step(session, step)
                self.server.computing.discard(self)
            left = True
            return StatusError(StatusCode.OK, "")
        except StatusError as failure:
            return failure
        except (ValueError, OverflowError) as error:
            return StatusError(StatusCode.INVALID_ARGUMENT, str(error))
        except (BrokenCallError, TimeoutError):
            return None  # the session waits
        except Exception as error:
            logging.getLogger(__name__).exception("a session failed")
            return StatusError(StatusCode.UNKNOWN, f"the cloud failed: {type(error).__name__}")
        finally:
            self.server.computing.discard(self)
            self.server.part.connect(None)
            if session is not None:
                self.server.close(session, self, forget=left)

    def _check_token(self, metadata: dict[str, str]) -> None:
        shown, token = metadata.get("authorization", ""), self.server.token
        if token is not None and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            raise StatusError(StatusCode.UNAUTHENTICATED, "no token, or a wrong one")

    def _step(self, session: Session, step: Step) -> None:
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
        with session.all_or_nothing(), torch.inference_mode():
            if step.new_sequence:
                session.cache, session.batch = session.part.new_cache(), batch
            final = session.part(hidden, cache=session.cache)
        answer = FromCloud(hidden=wire.pack(final if step.all_positions else final[:, -1:], self.dtype))
        session.steps, session.answer = step.number, (step, answer)
        self._put(answer, answer.hidden)

    def _check(self, session: Session, step: Step) -> None:
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

    def _train(self, session: Session, step: Step, hidden: torch.Tensor) -> None:
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
        self.server.traffic.sent(payload, message)
        try:
            self.call.send(message.SerializeToString(), self.limits.answer_s)
        except TimeoutError:
            details = f"the device read nothing for {self.limits.answer_s:g} s"
            raise StatusError(StatusCode.DEADLINE_EXCEEDED, details) from None

    def _next(self, content: str, limit_s: float, *, or_goodbye: bool = False):
        """The next message's content, which must be this one; ``None`` for a goodbye, where there may be one."""
        self.call.busy_wait_s = self.server.busy_wait_s if self.server.computing <= {self} else 0.0
        try:
            data = self.call.receive(limit_s)
        except TimeoutError:
            details = f"the device said nothing for {limit_s:g} s, a {content} was due"
            raise StatusError(StatusCode.DEADLINE_EXCEEDED, details) from None
        if data is None:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"the stream ended where a {content} was due")
        try:
            message = FromDevice.FromString(data)
        except DecodeError as error:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"not a message: {error}") from None
        found = message.WhichOneof("content")
        if found == "goodbye" and or_goodbye:
            return None
        if found != content:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"a {content} was due, got {found or 'nothing'}")
        value = getattr(message, content)
        payload = value if isinstance(value, bytes) else getattr(value, "data", getattr(value, "hidden", b""))
        self.server.traffic.received(payload, message)
        return value
