"""The cloud's end: one thread for each device's stream, which is a session: nothing outlives it."""

import logging
import threading
from collections.abc import Callable

import torch
from grpc import StatusCode
from transformers import Cache

from plpkg.residual.cut.cloud_part import CloudPart, cut_back
from plpkg.residual.wire.messages import BrokenStreamError, Messages, StatusError
from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack
from plpkg.residual.wire.terms import Limits, differences
from plpkg.residual.wire.wire_pb2 import Final, Hello, Part, Step, Terms, Welcome


class Sessions:
    """Sessions of one cloud: what all its streams share.

    Parameters
    ----------
    part, terms, limits
        The cloud's layers, what a device must have as well, and what it may ask for.
    """

    def __init__(self, part: CloudPart, terms: Terms, limits: Limits) -> None:
        self.part = part
        self.terms = terms
        self.limits = limits
        self._open: set[Stream] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, stream: "Stream", hello: Hello) -> None:
        """Let a device begin.

        Raises
        ------
        StatusError
            Other terms, or no room.
        """
        different = differences(hello.terms, self.terms)
        if different:
            raise StatusError(StatusCode.FAILED_PRECONDITION, different)
        with self._lock:
            if len(self._open) >= self.limits.sessions:
                said = f"the cloud has {self.limits.sessions} sessions, its limit"
                raise StatusError(StatusCode.RESOURCE_EXHAUSTED, said)
            self._open.add(stream)

    def close(self, stream: "Stream") -> None:
        """Its device has left."""
        with self._lock:
            self._open.discard(stream)


class Stream:
    """Service of one device while it is connected: its steps, and the exchanges within them.

    Parameters
    ----------
    sessions
        The cloud's.
    messages
        The messages to the device, and from it.
    end
        Breaks the stream off, from any thread.

    Attributes
    ----------
    greeted
        Whether the device has said hello.
    """

    def __init__(self, sessions: Sessions, messages: Messages, end: Callable[[], object]) -> None:
        self.sessions = sessions
        self.messages = messages
        self.end = end
        self.part = sessions.part
        self.terms = sessions.terms
        self.limits = sessions.limits
        self.dtype = PRECISIONS[self.terms.precision]
        self.greeted = False
        self.shape = (0, 0)  # (batch, seq) of the pass under way
        self._cache: Cache | None = None
        self._batch = 0  # the sequences in it
        self._trips = 0  # round trips of this pass that followed one another so far
        self._sent: dict[int, int] = {}  # by exchange, after how many of them it was sent

    def run(self) -> None:
        """Serve the device until it leaves, or asks for what it may not."""
        status = None
        try:
            hello = self.messages.receive("hello", limit_s=self.limits.answer_s)
            self.sessions.open(self, hello)
            self.greeted = True
            self.messages.send(welcome=Welcome(tokens=self.limits.tokens, forgets=self.part.make_cache is not None))
            self.part.connect(self)
            while True:
                self._step(self.messages.receive("step", limit_s=self.limits.idle_s))
        except BrokenStreamError:
            pass  # nobody is there to be told
        except StatusError as refusal:
            status = refusal
        except (ValueError, OverflowError, FloatingPointError) as error:
            status = StatusError(StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:
            logging.getLogger(__name__).exception("a session failed")
            status = StatusError(StatusCode.UNKNOWN, f"the cloud failed: {type(error).__name__}")
        finally:
            self.part.connect(None)
            self.sessions.close(self)
            self.messages.end(status)

    def _step(self, step: Step) -> None:
        self._check(step)
        self._trips = 0
        hidden = unpack(step.hidden, (step.batch, step.seq, self.terms.hidden), self.dtype)
        hidden = hidden.to(next(self.part.parameters()))  # its type and place
        if step.train:
            self._train(step, hidden)
            return
        with torch.inference_mode():
            if step.new_sequence:
                self._cache = self.part.new_cache()
                self._batch = step.batch
            else:
                cut_back(self._cache, step.keep)
            final = self._read(self._cache, hidden)
        self.messages.send(final=self._final(final[:, -step.positions :]))

    def _read(self, cache: Cache | None, hidden: torch.Tensor) -> torch.Tensor:
        """One pass through the layers, with the device."""
        self.shape = tuple(hidden.shape[:2])
        return self.part(hidden, cache=cache)

    def _final(self, hidden: torch.Tensor) -> Final:
        return Final(hidden=pack(hidden, self.dtype), round_trips=self._trips + 1)

    def _check(self, step: Step) -> None:
        """Refuse a step that cannot be, or that is larger than the limits."""
        if not (step.batch and step.seq):
            raise ValueError(f"a step of batch={step.batch}, seq={step.seq} is empty")
        alone = step.new_sequence or step.train  # it goes on from nothing
        length = step.seq if alone else step.keep + step.seq
        self._require_within("batch", step.batch, self.limits.batch)
        self._require_within("tokens", length, self.limits.tokens)
        if not 1 <= step.positions <= step.seq:
            raise ValueError(f"positions must be between 1 and seq={step.seq}, got {step.positions}")
        if alone:
            return
        if self._cache is None or step.batch != self._batch:
            raise ValueError(f"batch={step.batch}, but the sequence began with {self._batch}")
        if self.part.make_cache and step.keep != self._cache.get_seq_length():
            raise ValueError("this cloud's KV cache is bounded: no guess can be taken out of it again")

    @staticmethod
    def _require_within(name: str, asked: int, limit: int) -> None:
        if asked > limit:
            raise StatusError(StatusCode.OUT_OF_RANGE, f"{name} would be {asked}, the cloud's limit is {limit}")

    def _train(self, step: Step, hidden: torch.Tensor) -> None:
        """One pass there and back: each exchange asks the device again, on the way back."""
        with torch.enable_grad():
            hidden.requires_grad_(step.input_gradient)
            final = self._read(None, hidden)
            self.messages.send(final=self._final(final))
            if not final.requires_grad:  # nothing that learns is before it
                return
            data = self.messages.receive("grad_hidden", limit_s=self.limits.answer_s)
            final.backward(unpack(data, tuple(final.shape), self.dtype).to(final))
        if hidden.grad is not None:  # step.input_gradient
            self.messages.send(grad_hidden=pack(hidden.grad, self.dtype))

    def send(self, group: int, u: torch.Tensor) -> None:
        self._sent[group] = self._trips
        self.messages.send(residual=Part(group=group, data=pack(u, self.dtype)))

    def receive(self, group: int) -> torch.Tensor:
        v = self._part("residual", group, self.terms.r_d2c)
        self._trips = max(self._trips, self._sent[group] + 1)  # another may have been under way at the same time
        return v

    def backward(self, group: int, grad_v: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        self.messages.send(grad_output=Part(group=group, data=pack(grad_v, self.dtype), unanswered=not wanted))
        if not wanted:
            return None
        return self._part("grad_input", group, self.terms.r_c2d)

    def _part(self, content: str, group: int, rank: int) -> torch.Tensor:
        """The device's answer ``(projections, batch, seq, rank)`` to an exchange, which must be the next message."""
        part = self.messages.receive(content, limit_s=self.limits.answer_s)
        if part.group != group:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"exchange {group} was answered with {part.group}")
        return unpack(part.data, (self.terms.projections[group], *self.shape, rank), self.dtype)
