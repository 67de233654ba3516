"""Answers as OpenAI writes them: tokens become text, texts become a body or events, exceptions become errors."""

import asyncio
import errno
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from starlette.responses import Response, StreamingResponse

from plpkg.adapters import InvalidAdapterError
from plpkg.decoding import Text
from plpkg.serving.requests import Scored
from plpkg.serving.service.http.logprobs import Spelling
from plpkg.serving.service.http.metrics import Metrics
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import AccountFullError, NotFoundError, StoreError

STATUS = {
    ValueError: 400,
    NotFoundError: 404,
    AccountFullError: 409,
    InvalidAdapterError: 422,
    OverloadedError: 429,
    RuntimeError: 500,
    StoreError: 503,
    OSError: 503,
    MemoryError: 503,
    Exception: 500,
}
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of the operating system whose status is 507."""


class Piece(NamedTuple):
    """The text that a token adds, the reason if it is the last, and what was scored, with where that begins."""

    text: str
    reason: str | None
    scored: list[tuple[int, Scored]]
    tokens: int
    """One, or none where none was to be written."""


def starts(tokenizer, ids: list[int]) -> list[int]:
    """Where each of a prompt's tokens begins in its text."""
    text = Text(tokenizer)
    places: list[int] = []
    for each in ids:
        places.append(text.length)
        text.add(each)
    return places


async def texts(
    tokens, text: Text, metrics: Metrics, echo: str = "", places: Sequence[int] = ()
) -> AsyncIterator[Piece]:
    """A request's answer in pieces, after the text ``echo``; ``places`` are those of the prompt's tokens in it."""
    piece = echo  # what was not told yet
    begins = [*places]  # of the tokens in it
    last = None
    asked = time.monotonic()
    async with aclosing(tokens):
        async for token, reason, *scored in tokens:
            now = time.monotonic()
            if last is None:
                metrics.first_s.observe(now - asked)
            else:
                metrics.between_s.observe(now - last)
            last = now
            begins.append(len(echo) + text.length)
            wrote = token is not None
            if wrote:
                added, stopped = text.add(token, reason is not None)
                piece += added
                if stopped:
                    reason = "stop"
                metrics.written.inc()
            yield Piece(piece, reason, [*zip(begins, scored, strict=False)], int(wrote))
            if reason:
                metrics.success.labels(reason).inc()
                return
            piece = ""
            begins = []


async def merged(streams: list) -> AsyncIterator[tuple[int, object]]:
    """Items of several streams, as they come, with the number of each; when one fails, all end.

    A stream that is not read is not asked for more.
    """
    queue: asyncio.Queue = asyncio.Queue(16)

    async def pump(index: int, stream) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.create_task(pump(*each)) for each in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class Completion:
    """A completion, from the ``(index, piece)`` of :func:`merged`; ``spelling`` is there if tokens were scored."""

    kind = "text_completion"
    event = "text_completion"
    prefix = "cmpl"

    def __init__(self, identity: str, model: str, prompt_tokens: int, spelling: Spelling | None = None) -> None:
        self._head = {"id": f"{self.prefix}-{identity}", "created": int(time.time()), "model": model}
        self._prompt_tokens = prompt_tokens
        self._new_tokens = 0
        self._begun: set[int] = set()  # the choices of which an event was sent
        self._spelling = spelling

    async def whole(self, pieces) -> Response:
        """All of it as one body."""
        written: dict[int, Piece] = {}
        async for index, piece in pieces:
            text, _, scored, _ = written.get(index, Piece("", None, [], 0))
            scored += piece.scored  # in place: a prompt's may be many
            written[index] = piece._replace(text=text + piece.text, scored=scored)
            self._new_tokens += piece.tokens
        return await self._made(self._response, written)

    async def _made(self, make: Callable, *arguments):
        """Call a function, in a thread where tokens are spelled: a prompt's may be many."""
        if self._spelling is None:
            return make(*arguments)
        return await asyncio.to_thread(make, *arguments)

    def _response(self, written: dict[int, Piece]) -> Response:
        choices = [self._choice(index, written[index]) for index in sorted(written)]
        return json_response(200, self._head | {"object": self.kind, "choices": choices, "usage": self._usage()})

    async def events(self, pieces, usage: bool) -> AsyncIterator[str]:
        """Events as it is written; the last before the end counts tokens, if ``usage``."""
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    self._new_tokens += piece.tokens
                    says_something = piece.text or piece.reason or piece.scored
                    if says_something or index not in self._begun:
                        yield self._event([await self._made(self._delta, index, piece)])
                        self._begun.add(index)
            if usage:
                yield self._event([], usage=self._usage())
        except Exception as error:  # after the head, a status cannot tell it
            yield f"data: {json.dumps(_body(_status(error), _said(error)))}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, choices: list, **more) -> str:
        return f"data: {json.dumps(self._head | {'object': self.event, 'choices': choices} | more)}\n\n"

    def _usage(self) -> dict:
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._new_tokens}
        return counts | {"total_tokens": self._prompt_tokens + self._new_tokens}

    def _choice(self, index: int, piece: Piece) -> dict:
        return {"text": piece.text} | self._rest(index, piece)

    def _rest(self, index: int, piece: Piece) -> dict:
        logprobs = None if self._spelling is None else self._scored(self._spelling, piece.scored)
        return {"index": index, "logprobs": logprobs, "finish_reason": piece.reason}

    def _scored(self, spelling: Spelling, scored: list) -> dict:
        return spelling.completion(scored)

    _delta = _choice


class ChatCompletion(Completion):
    """An answer in a chat."""

    kind = "chat.completion"
    event = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _choice(self, index: int, piece: Piece) -> dict:
        return {"message": {"role": "assistant", "content": piece.text, "refusal": None}} | self._rest(index, piece)

    def _delta(self, index: int, piece: Piece) -> dict:
        delta = {"content": piece.text}
        if index not in self._begun:
            delta["role"] = "assistant"
        return {"delta": delta} | self._rest(index, piece)

    def _scored(self, spelling: Spelling, scored: list) -> dict:
        return spelling.chat(scored)


class Events(StreamingResponse):
    """Server-sent events; what they come from is closed however they end."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[str, None]

    async def __call__(self, scope, receive, send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def refusal(_, error: Exception) -> Response:
    """The response to an exception of :data:`STATUS`."""
    status = _status(error)
    headers = None
    if status in (429, 503):
        headers = {"Retry-After": str(getattr(error, "retry_after_s", 1))}
    return error_response(status, _said(error), headers=headers)


def _kind(error: Exception) -> type[Exception]:
    """The nearest class of :data:`STATUS`."""
    return next(kind for kind in type(error).__mro__ if kind in STATUS)


def _status(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in FULL:
        return 507
    return STATUS[_kind(error)]


def _said(error: Exception) -> str:
    """An error's words, if they are meant for a client."""
    if isinstance(error, StoreError) and error.errno not in FULL:  # its own words name the store
        logging.getLogger(__name__).warning("%s", error)
        return "the store of adapters does not answer"
    if isinstance(error, OSError | MemoryError):  # its words name files
        logging.getLogger(__name__).warning("%s: %s", type(error).__name__, error)
        number = getattr(error, "errno", None) or errno.ENOMEM
        return f"the service lacks something: {os.strerror(number)}"
    if _kind(error) is Exception:  # nobody meant these words for a client
        return f"an error of the service: {type(error).__name__}"
    return str(error)


def _body(status: int, *reasons: str, param: str | None = None) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": "; ".join(reasons), "type": kind, "code": status, "param": param, "reasons": reasons}}


def error_response(status: int, *reasons: str, param: str | None = None, headers: Mapping | None = None) -> Response:
    """An error in OpenAI's form, about the field ``param``; each reason is also there by itself."""
    return json_response(status, _body(status, *reasons, param=param), headers)


def json_response(status: int, body: dict, headers: Mapping | None = None) -> Response:
    """In ASCII: a stranger's text may hold what UTF-8 cannot."""
    return Response(json.dumps(body), status, headers, "application/json")
