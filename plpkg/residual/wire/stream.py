"""One device's stream, served by a thread of its own: the transport between the decoder layers and the device."""

import logging
from collections.abc import Callable

import torch
from grpc import StatusCode

from plpkg.residual.wire.messages import BrokenStreamError, Messages, StatusError
from plpkg.residual.wire.sessions import Session, Sessions
from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack
from plpkg.residual.wire.wire_pb2 import Part, Step, Welcome


class Stream:
    """What the cloud does for a device while it is connected.

    Parameters
    ----------
    sessions
        The cloud's sessions, of which the device begins or resumes one.
    messages
        What goes to the device and comes from it.
    end
        Breaks the stream off, from any thread.

    Attributes
    ----------
    session
        The device's, once it has said hello.
    """

    def __init__(self, sessions: Sessions, messages: Messages, end: Callable[[], object]) -> None:
        self.sessions, self.messages, self.end = sessions, messages, end
        self.session: Session | None = None
        self.part, self.terms, self.limits = sessions.part, sessions.terms, sessions.limits
        self.dtype = PRECISIONS[self.terms.precision]
        self.shape = (0, 0)  # (batch, seq) of the step under way

    def run(self) -> None:
        """Serve the device until it leaves, breaks off, or asks for what it may not."""
        status, left = None, False
        try:
            hello = self.messages.receive("hello", limit_s=self.limits.answer_s)
            self.session = self.sessions.open(hello, self.messages)
            self.messages.send(welcome=Welcome(session=self.session.key, steps=self.session.steps))
            self.part.connect(self)
            while isinstance(step := self.messages.receive("step", "goodbye", limit_s=self.limits.idle_s), Step):
                self._step(self.session, step)
            left = True
        except StatusError as refusal:
            status = refusal
        except (ValueError, OverflowError) as error:
            status = StatusError(StatusCode.INVALID_ARGUMENT, str(error))
        except BrokenStreamError as end:  # the session waits
            status = StatusError(StatusCode.ABORTED, str(end))
        except Exception as error:
            logging.getLogger(__name__).exception("a session failed")
            status = StatusError(StatusCode.UNKNOWN, f"the cloud failed: {type(error).__name__}")
        finally:
            self.part.connect(None)
            if self.session is not None:
                self.sessions.close(self.session, self.messages, forget=left)
            self.messages.outgoing.put(status)

    def _step(self, session: Session, step: Step) -> None:
        if session.answer is not None and step == session.answer[0]:
            self.messages.send(hidden=session.answer[1])  # it was lost on its way
            return
        if step.number != session.steps + 1:
            raise StatusError(
                StatusCode.FAILED_PRECONDITION, f"step {step.number} on the device, {session.steps} done on the cloud"
            )
        self._check(session, step)
        self.shape = batch, seq = step.batch, step.seq
        hidden = unpack(step.hidden, (batch, seq, self.terms.hidden), self.dtype)
        hidden = hidden.to(next(self.part.parameters()))  # its type and place
        if step.train:
            self._train(step, hidden)
            session.steps = step.number
            return
        with session.all_or_nothing(), torch.inference_mode():
            if step.new_sequence:
                session.cache, session.batch = self.part.new_cache(), batch
            final = self.part(hidden, cache=session.cache)
        answer = pack(final if step.all_positions else final[:, -1:], self.dtype)
        session.steps, session.answer = step.number, (step, answer)
        self.messages.send(hidden=answer)

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

    def _train(self, step: Step, hidden: torch.Tensor) -> None:
        with torch.enable_grad():
            hidden.requires_grad_(step.input_gradient)
            final = self.part(hidden)
            self.messages.send(hidden=pack(final, self.dtype))
            data = self.messages.receive("grad_hidden", limit_s=self.limits.answer_s)
            gradient = unpack(data, tuple(final.shape), self.dtype).to(final)
            if final.requires_grad:
                final.backward(gradient)
        if step.input_gradient:
            self.messages.send(grad_hidden=pack(hidden.grad, self.dtype))

    def send(self, group: int, u: torch.Tensor) -> None:
        self.messages.send(residual=Part(group=group, data=pack(u, self.dtype)))

    def receive(self, group: int) -> torch.Tensor:
        return self._part("residual", group, self.terms.r_d2c)

    def backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        self.messages.send(grad_output=Part(group=group, data=pack(grad_v, self.dtype)))
        return self._part("grad_input", group, self.terms.r_c2d)

    def _part(self, content: str, group: int, rank: int) -> torch.Tensor:
        part = self.messages.receive(content, limit_s=self.limits.answer_s)
        if part.group != group:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"exchange {group} was answered with {part.group}")
        return unpack(part.data, (self.terms.projections[group], *self.shape, rank), self.dtype)
