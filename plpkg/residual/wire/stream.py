"""The cloud's end: one thread for each device's stream, and the sessions, which outlive the streams.

A step can ask the cloud to write on by itself (``ahead``), with the public backbone alone. Behind a ladder this is
final: the layers do not depend on M, and the device corrects what was written. Where M acts inside the layers, what was
written is taken out of the KV cache again and verified by a pass with M.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from grpc import StatusCode
from transformers import Cache, DynamicCache

from plpkg.residual.cloud_part import CloudPart, cut_back
from plpkg.residual.wire.connection import BrokenStreamError, Messages, StatusError
from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack
from plpkg.residual.wire.terms import Limits, differences
from plpkg.residual.wire.wire_pb2 import Choice, Final, Hello, Part, Step, Terms, Welcome
from plpkg.residual.wire.writing import checked_warpers, race


class Session:
    """What the cloud keeps for a device between two steps.

    Attributes
    ----------
    key
        A secret: whoever has it can go on with the session.
    cache, batch
        The KV cache of the sequence, and how many sequences are in it.
    steps
        How many steps are done.
    answer
        The last step and what answered it: it may be lost on its way, and asked for again.
    messages
        The stream that the device speaks over; ``None`` while the session waits for the next.
    waits_until
        When a session that waits is forgotten, by :func:`time.monotonic`.
    free
        Held by the thread that computes for the session.
    """

    def __init__(self, part: CloudPart) -> None:
        self.key = secrets.token_bytes(16)
        self.cache: Cache = part.new_cache()
        self.batch = self.steps = 0
        self.answer: tuple[Step, Final] | None = None
        self.messages: Messages | None = None
        self.waits_until = 0.0
        self.free = threading.Lock()

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


class Sessions:
    """The sessions of one cloud, by their keys.

    Parameters
    ----------
    part, terms, limits
        The cloud's layers, what a device must have as well, and what it may ask for.
    """

    def __init__(self, part: CloudPart, terms: Terms, limits: Limits) -> None:
        self.part, self.terms, self.limits = part, terms, limits
        self._by_key: dict[bytes, Session] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._by_key.clear()

    def open(self, hello: Hello, messages: Messages) -> Session:
        """The session that a device begins or goes on with.

        Raises
        ------
        StatusError
            Other terms, an unknown session, or no room for a new one.
        """
        if different := differences(hello.terms, self.terms):
            raise StatusError(StatusCode.FAILED_PRECONDITION, different)
        with self._lock:
            session = self._find(hello.session)
            before, session.messages = session.messages, messages
        if before is not None:  # it broke, but nobody has told us yet
            before.interrupt(StatusError(StatusCode.ABORTED, "the session goes on on another connection"))
        if not session.free.acquire(timeout=self.limits.answer_s):
            self._leave(session, messages, forget=False)
            raise StatusError(StatusCode.UNAVAILABLE, "the session's earlier connection does not end")
        return session

    def _find(self, key: bytes) -> Session:
        waiting = [session for session in self._by_key.values() if session.messages is None]
        full = len(self._by_key) >= self.limits.sessions
        for session in sorted(waiting, key=lambda session: session.waits_until):
            # Those that wait too long go, and for a new device also the one that has waited longest.
            if time.monotonic() > session.waits_until or (full and not key):
                del self._by_key[session.key]
                full = False
        if key:
            if key not in self._by_key:
                raise StatusError(StatusCode.NOT_FOUND, "no such session: it was forgotten, or the cloud began anew")
            return self._by_key[key]
        if full:
            raise StatusError(
                StatusCode.RESOURCE_EXHAUSTED, f"the cloud has {self.limits.sessions} sessions, its limit"
            )
        session = Session(self.part)
        self._by_key[session.key] = session
        return session

    def close(self, session: Session, messages: Messages, *, forget: bool) -> None:
        """A stream has ended: its session waits for the next one, or is forgotten."""
        self._leave(session, messages, forget=forget)
        session.free.release()

    def _leave(self, session: Session, messages: Messages, *, forget: bool) -> None:
        with self._lock:
            if session.messages is not messages:
                return  # the session goes on on another stream
            session.messages = None
            session.waits_until = time.monotonic() + self.limits.resume_s
            if forget:
                self._by_key.pop(session.key, None)


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
        self.shape = (0, 0)  # (batch, seq) of the pass under way
        self._trips, self._sent = 0, {}  # that followed one another so far, and when each message was sent

    def run(self) -> None:
        """Serve the device until it leaves, breaks off, or asks for what it may not."""
        status, left = None, False
        try:
            hello = self.messages.receive("hello", limit_s=self.limits.answer_s)
            self.session = self.sessions.open(hello, self.messages)
            state = dict(session=self.session.key, steps=self.session.steps, tokens=self.limits.tokens)
            state["forgets"] = self.part.make_cache is not None
            self.messages.send(welcome=Welcome(**state))
            self.part.connect(self)
            while isinstance(step := self.messages.receive("step", "goodbye", limit_s=self.limits.idle_s), Step):
                self._step(self.session, step)
            left = True
        except StatusError as refusal:
            status = refusal
        except (ValueError, OverflowError, FloatingPointError) as error:
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
            self.messages.send(final=session.answer[1])  # it was lost on its way
            return
        if step.number != session.steps + 1:
            raise StatusError(
                StatusCode.FAILED_PRECONDITION, f"step {step.number} on the device, {session.steps} done on the cloud"
            )
        self._check(session, step)
        self._trips = 0
        hidden = unpack(step.hidden, (step.batch, step.seq, self.terms.hidden), self.dtype)
        hidden = hidden.to(next(self.part.parameters()))  # its type and place
        if step.train:
            self._train(step, hidden)
            session.steps = step.number
            return
        with session.all_or_nothing(), torch.inference_mode():
            if step.new_sequence:
                session.cache, session.batch = self.part.new_cache(), step.batch
            else:
                cut_back(session.cache, step.keep)
            final, written = self._pass(session, hidden, step)
        answer = self._final(final[:, -step.positions - step.ahead :], written)
        session.steps, session.answer = step.number, (step, answer)
        self.messages.send(final=answer)

    def _pass(self, session: Session, hidden: torch.Tensor, step: Step) -> tuple[torch.Tensor, list[int]]:
        """The final hidden states of a step, and the tokens that the cloud has written."""
        if not step.ahead:
            return self._read(session.cache, hidden), []
        cache, seen = session.cache, session.cache.get_seq_length()
        finals, written, embedded = [], [], hidden
        with self.part.alone():
            for _ in range(step.ahead):
                finals.append(self.part(embedded, cache=cache))
                logits = self.part.public.logits(finals[-1][:, -1:])[:, -1]
                position = cache.get_seq_length()
                written.append(_guess(logits, step.choice, position))
                ids, at = torch.tensor([[written[-1]], [position]], device=logits.device).split(1)
                embedded = self.part.public.embed(ids, position_ids=at).to(hidden)
            if not self.part.exchanges:
                return torch.cat([*finals, self.part(embedded, cache=cache)], dim=1), written
        # What M would have made of the layers' states is not there: everything is read again, with the device.
        if seen:
            cut_back(cache, seen)
        else:
            session.cache = self.part.new_cache()
        ids = torch.tensor([written], device=hidden.device)
        at = torch.arange(seen + step.seq, seen + step.seq + step.ahead, device=hidden.device)[None]
        embedded = self.part.public.embed(ids, position_ids=at).to(hidden)
        return self._read(session.cache, torch.cat([hidden, embedded], dim=1)), written

    def _read(self, cache: DynamicCache | None, hidden: torch.Tensor) -> torch.Tensor:
        """One pass through the layers, with the device."""
        self.shape = tuple(hidden.shape[:2])
        return self.part(hidden, cache=cache)

    def _final(self, hidden: torch.Tensor, written: Sequence[int] = ()) -> Final:
        tokens = torch.tensor(written, dtype=torch.int32).numpy().tobytes()
        return Final(hidden=pack(hidden, self.dtype), tokens=tokens, round_trips=self._trips + 1)

    def _check(self, session: Session, step: Step) -> None:
        if not (step.batch and step.seq):
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"a step of batch={step.batch}, seq={step.seq} is empty")
        alone = step.new_sequence or step.train
        length = step.seq + step.ahead + (0 if alone else step.keep)
        for what, asked, limit in (("batch", step.batch, self.limits.batch), ("tokens", length, self.limits.tokens)):
            if asked > limit:
                raise StatusError(StatusCode.OUT_OF_RANGE, f"{what} would be {asked}, the cloud's limit is {limit}")
        if not 1 <= step.positions <= step.seq:
            raise StatusError(
                StatusCode.INVALID_ARGUMENT, f"positions must be between 1 and seq={step.seq}, got {step.positions}"
            )
        if step.ahead and (step.train or step.batch > 1 or self.part.public is None):
            raise StatusError(
                StatusCode.INVALID_ARGUMENT,
                f"ahead={step.ahead}: the cloud writes on only where it has every layer, and for one sequence "
                f"(batch={step.batch}) that is not learnt from",
            )
        if step.ahead and not self.part.writes:
            raise StatusError(
                StatusCode.INVALID_ARGUMENT,
                f"ahead={step.ahead}: this cloud has released the embedding and the LM head, and cannot write on",
            )
        if self.part.make_cache and (step.ahead or not (alone or step.keep == session.cache.get_seq_length())):
            raise StatusError(
                StatusCode.INVALID_ARGUMENT, "this cloud's KV cache is bounded: no guess can be taken out of it again"
            )
        if not alone and step.batch != session.batch:
            raise StatusError(
                StatusCode.INVALID_ARGUMENT, f"batch={step.batch}, but the sequence began with {session.batch}"
            )

    def _train(self, step: Step, hidden: torch.Tensor) -> None:
        with torch.enable_grad():
            hidden.requires_grad_(step.input_gradient)
            final = self._read(None, hidden)
            self.messages.send(final=self._final(final))
            if not final.requires_grad:  # nothing that learns is before it
                return
            data = self.messages.receive("grad_hidden", limit_s=self.limits.answer_s)
            final.backward(unpack(data, tuple(final.shape), self.dtype).to(final))
        if step.input_gradient:
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
        return self._part("grad_input", group, self.terms.r_c2d) if wanted else None

    def _part(self, content: str, group: int, rank: int) -> torch.Tensor:
        part = self.messages.receive(content, limit_s=self.limits.answer_s)
        if part.group != group:
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"exchange {group} was answered with {part.group}")
        return unpack(part.data, (self.terms.projections[group], *self.shape, rank), self.dtype)


def _guess(logits: torch.Tensor, choice: Choice, position: int) -> int:
    """What the device may choose at a position, from the cloud's own logits ``(1, vocab)``."""
    if not choice.temperature:
        return logits.argmax(-1).item()
    options = dict(do_sample=True, temperature=choice.temperature, top_k=choice.top_k, top_p=choice.top_p)
    return race(checked_warpers(1, **options)(None, logits.float()), choice.seed, position).item()
