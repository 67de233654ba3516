"""What an account's requests hold and cost before they are answered: bytes in memory and on disk, and time to parse.

What a request may hold is claimed when its head has come, and given back at its end: its body, wherever that is kept,
what its answer may leave unread, and a little for itself. Bytes alone do not say what a body costs to parse: four MiB
of JSON may be one text, or a million lists. So bodies are parsed beside the event loop, an account's one after the
other, and after each the account waits in proportion to the time that it took.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from plpkg.serving.service.http.answers import refusal
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import NotFoundError
from plpkg.untrusted import require_characters

SMALL = 2**12
"""Bytes of a body that takes less time to parse than a thread takes to begin."""
PARSE_S = 10
"""How long a request waits for its body to be parsed."""
PAUSE, REFUSED_S = 9, 0.01
"""How many times as long as a body took does its account wait for the next one (a parser has the interpreter to itself:
an account has a tenth of it), and how long, in seconds, after a request that is refused."""
MAX_HELD = 2**29
"""Bytes that an account's unfinished requests may hold, beside one upload of the largest size: 64 long prompts, say."""
REQUEST_BYTES, TOKEN_BYTES = 2**17, 128
"""What a request holds by itself (buffers of its connection, among others), and for each token, read or written."""


class Intake:
    """Middleware behind the door: refuses what would let an account's unfinished requests hold more than ``most``."""

    def __init__(self, app, most: int) -> None:
        self.app, self.most, self.held = app, most, Counter()
        self.turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or (account := scope["state"]["account"]) is None:
            await self.app(scope, receive, send)
            return
        length = claimed = 0

        def hold(more: int) -> None:
            nonlocal claimed
            if self.held[account] + more > self.most:
                raise OverloadedError(f"the account's unfinished requests may hold {self.most:,} bytes", 1)
            self.held[account] += more
            claimed += more

        async def counted():  # a body in chunks does not say its length
            nonlocal length
            message = await receive()
            length -= len(message.get("body", b""))
            if length < 0:
                hold(-length)
                length = 0
            return message

        scope["state"] |= {"hold": hold, "turn": self.turns[account]}
        try:
            length = int(Headers(scope=scope).get("content-length", "").lstrip("0") or 0)
            hold(REQUEST_BYTES + length)
        except OverloadedError as error:
            await (await refusal(None, error))(scope, receive, send)
        else:
            await self.app(scope, counted, send)
        finally:
            self.held[account] -= claimed


class Parsed(APIRoute):
    """A route that parses and validates bodies beside the event loop; an account's larger ones take turns."""

    def get_route_handler(self) -> Callable:
        handle, kind = super().get_route_handler(), self.body_field and self.body_field.field_info.annotation

        async def handler(call: Request):
            try:
                if kind:
                    call._json, call._body = await _read(call, kind), b"parsed"  # FastAPI takes what is in _json
                return await handle(call)
            except (HTTPException, RequestValidationError, ValueError, NotFoundError):
                async with call.state.turn:
                    await asyncio.sleep(REFUSED_S)
                raise

        return handler


async def _read(call: Request, kind: type[BaseModel]) -> BaseModel:
    media = call.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HTTPException(415, f"the body must be application/json, its Content-Type is {media!r}")
    body = await call.body()
    if len(body) <= SMALL:
        return parsed(body, kind)
    turn, loop = call.state.turn, asyncio.get_running_loop()

    def parse() -> BaseModel:
        began = time.thread_time()
        try:
            return parsed(body, kind)
        finally:
            pause = PAUSE * (time.thread_time() - began)
            loop.call_soon_threadsafe(loop.call_later, pause, turn.release)

    await turn.acquire()
    parsing = asyncio.shield(asyncio.to_thread(parse))  # a thread cannot be stopped: it keeps the turn until it ends
    try:
        return await asyncio.wait_for(parsing, PARSE_S)
    except TimeoutError:
        raise OverloadedError(f"the body could not be read within {PARSE_S} s", 1) from None


def parsed(body: bytes, kind: type[BaseModel]) -> BaseModel:
    """A body in JSON as a model. RequestValidationError if it is not JSON, or not what the model says."""
    try:
        value = json.loads(body.decode("utf-8-sig"))
        require_characters(body, value)
    except (ValueError, RecursionError) as error:
        raise RequestValidationError([{"loc": ("body", 0), "msg": f"the body cannot be read: {error}"}]) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in error.errors()]) from None
