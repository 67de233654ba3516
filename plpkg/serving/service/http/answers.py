"""Answers as OpenAI writes them: tokens become text, texts become a body or events, exceptions become errors."""

import asyncio
import errno
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from plpkg.adapters import InvalidAdapterError
from plpkg.serving.requests import Request
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
}
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of the operating system whose status is 507."""


async def texts(tokens, request: Request, tokenizer, metrics: Metrics) -> AsyncIterator[tuple[str, str | None]]:
    """What each token adds to the text, and the reason at the end.

    A stop string is left out; what may become one waits until it has or has not. So do the bytes of a character, which
    is left out too if the last token does not finish it.
    """
    before = list(request.input_ids[-8:])
    if tokenizer.decode(before, skip_special_tokens=True).endswith("\ufffd"):
        before = []  # a prompt that ends in half a character would be taken for a part of the answer
    held, decoder = "", DecodeStream(ids=before, skip_special_tokens=True)
    began = last = time.monotonic()
    async with aclosing(tokens):
        async for token, reason in tokens:
            now = time.monotonic()
            (metrics.first_s if last == began else metrics.between_s).observe(now - last)
            metrics.written.inc()
            last, held = now, held + (decoder.step(tokenizer.backend_tokenizer, token) or "")
            ends = [held.find(text) for text in request.stop if text in held]
            ready = min(ends) if ends else len(held) - (0 if reason else _may_become(held, request.stop))
            yield held[:ready], (reason := "stop" if ends else reason)
            if reason:
                metrics.success.labels(reason).inc()
                return
            held = held[ready:]


def _may_become(text: str, stops) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = [(stop, min(len(stop) - 1, len(text))) for stop in stops]
    return max((n for stop, most in longest for n in range(1, most + 1) if text.endswith(stop[:n])), default=0)


async def merged(streams: list) -> AsyncIterator[tuple[int, object]]:
    """What several streams yield, as it comes, with the number of each; when one fails, all end.

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
    """A completion, from the ``(index, (text, reason))`` of :func:`merged`."""

    kind, event, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, identity: str, model: str, prompt_tokens: int) -> None:
        self._head = {"id": f"{self.prefix}-{identity}", "created": int(time.time()), "model": model}
        self._prompt_tokens, self._new_tokens, self._begun = prompt_tokens, 0, set()

    async def whole(self, pieces) -> Response:
        """All of it as one body."""
        written, reasons = {}, {}
        async for index, (text, reasons[index]) in pieces:
            written[index] = written.get(index, "") + text
            self._new_tokens += 1
        choices = [self._choice(written[index], index, reasons[index]) for index in sorted(written)]
        return json_response(200, self._head | {"object": self.kind, "choices": choices, "usage": self._usage()})

    async def events(self, pieces, usage: bool) -> AsyncIterator[str]:
        """Events as it is written; the last before the end counts tokens, if ``usage``."""
        try:
            async with aclosing(pieces):
                async for index, (text, reason) in pieces:
                    self._new_tokens += 1
                    if text or reason or index not in self._begun:
                        yield self._event([self._delta(text, index, reason)])
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

    def _choice(self, text: str, index: int, reason: str | None) -> dict:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    _delta = _choice


class ChatCompletion(Completion):
    """An answer in a chat."""

    kind, event, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, text: str, index: int, reason: str | None) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def _delta(self, text: str, index: int, reason: str | None) -> dict:
        delta = {"content": text} | ({} if index in self._begun else {"role": "assistant"})
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class Events(StreamingResponse):
    """Server-sent events; what they come from is closed however they end."""

    media_type = "text/event-stream"

    async def __call__(self, scope, receive, send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def refusal(_, error: Exception) -> Response:
    """The response to an exception of :data:`STATUS`."""
    status, reasons = _status(error), getattr(error, "reasons", None) or [_said(error)]
    after = {"Retry-After": str(getattr(error, "retry_after_s", 1))} if status in (429, 503) else None
    return error_response(status, *reasons, headers=after)


def _status(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in FULL:
        return 507
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def _said(error: Exception) -> str:
    if isinstance(error, StoreError):  # its own words name the store
        logging.getLogger(__name__).warning("%s", error)
        return "the store of adapters does not answer"
    if isinstance(error, OSError | MemoryError):  # its own words name files
        logging.getLogger(__name__).warning("%s: %s", type(error).__name__, error)
        return f"the service lacks something: {os.strerror(getattr(error, 'errno', None) or errno.ENOMEM)}"
    return str(error)


def _body(status: int, *reasons: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": "; ".join(reasons), "type": kind, "code": status, "param": None, "reasons": reasons}}


def error_response(status: int, *reasons: str, headers: dict | None = None) -> Response:
    """An error in OpenAI's form; each reason is also there by itself."""
    return json_response(status, _body(status, *reasons), headers)


def json_response(status: int, body: dict, headers: dict | None = None) -> Response:
    """In ASCII: a stranger's text may hold what UTF-8 cannot."""
    return Response(json.dumps(body), status, headers, "application/json")
