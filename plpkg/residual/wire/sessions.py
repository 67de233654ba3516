"""What the cloud keeps for its devices. A session outlives the streams over which its device speaks."""

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

from grpc import StatusCode
from transformers import Cache

from plpkg.residual.cloud_part import CloudPart
from plpkg.residual.wire.messages import Messages, StatusError
from plpkg.residual.wire.terms import Limits, differences
from plpkg.residual.wire.wire_pb2 import Final, Hello, Step, Terms


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
