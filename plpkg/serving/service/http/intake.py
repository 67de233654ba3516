"""Limits of what an account's requests hold and cost before they are answered: bytes, and time to parse.

The memory of a request is claimed when its head has come, and given back at its end: its body, wherever that is kept,
what its answer may leave unread, and a little for itself. Bytes alone do not say what a body costs to parse: a MiB of
JSON may be one text, or half a million lists. So larger bodies are parsed by one thread beside the event loop, an
account's one after the other, and after each the account waits in proportion to the time that it took.
"""

import asyncio
import gc
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from plpkg.files.untrusted import require_characters
from plpkg.serving.service.http.answers import refusal
from plpkg.serving.service.http.clients import unless_gone
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import NotFoundError

SMALL = 2**12
"""Bytes of a body that takes less time to parse than a thread takes to begin."""
PARSE_S = 10
"""How long a request waits until its body is parsed, its account's bodies before it included."""
PAUSE = 9
"""How many times as long as a body took to parse its account waits for the next one: a parser has the interpreter to
itself, and an account has a tenth of it."""
REFUSED_S = 0.01
"""How long an account waits after a request that is refused."""
PARSER = ThreadPoolExecutor(1, "parser")
"""One thread for all accounts: a second thread would wait for the interpreter's lock, and
turn the collector on too soon."""
REFUSALS = HTTPException, RequestValidationError, ValueError, NotFoundError
"""Errors that a client has brought about; it may try again at once."""
MAX_HELD = 2**29
"""Bytes that an account's unfinished requests may hold, beside one upload of the largest size: 64 long prompts, say."""
REQUEST_BYTES = 2**17
"""Held by a request itself: buffers of its connection, among others."""
TOKEN_BYTES = 128
"""Held for each token, read or written."""


class Intake:
    """Middleware behind the door: refuses what would let an account's unfinished requests hold more than ``most``."""

    def __init__(self, app, most: int) -> None:
        self.app = app
        self.most = most
        self.held: Counter[str] = Counter()  # bytes, by account
        self.turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, scope, receive, send) -> None:
        account = scope["state"]["account"] if scope["type"] == "http" else None
        if account is None:
            await self.app(scope, receive, send)
            return
        length = 0  # what is still to come of the body, as its head says
        claimed = 0

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
            if length < 0:  # more than the head has said
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
        handle = super().get_route_handler()
        kind: Any = self.body_field.field_info.annotation if self.body_field else None

        async def handler(call: Request):
            try:
                if kind:
                    call._json = await _read(call, kind)  # FastAPI takes what is there
                    call._body = b"parsed"
                return await handle(call)
            except REFUSALS as error:
                refused = error.with_traceback(None)
            # Nothing may keep the parsed body while its account waits: its frames are in the traceback
            call._json = refused.__context__ = None
            async with call.state.turn:
                await asyncio.sleep(REFUSED_S)
            raise refused

        return handler


async def _read(call: Request, kind: type[BaseModel]) -> BaseModel:
    """A request's body as a model."""
    media = call.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HTTPException(415, f"the body must be application/json, its Content-Type is {media!r}")
    body = await call.body()
    if len(body) <= SMALL:
        return parsed(body, kind)
    try:
        async with asyncio.timeout(PARSE_S):
            return await unless_gone(call, _in_turn(body, kind, call.state.turn))
    except TimeoutError:
        raise OverloadedError(f"the account's bodies could not be read within {PARSE_S} s", 1) from None


async def _in_turn(body: bytes, kind: type[BaseModel], turn: asyncio.Lock) -> BaseModel:
    """Parse a body when its account's turn has come, which it then keeps for a while."""
    loop = asyncio.get_running_loop()
    took = 0.0

    def parse() -> BaseModel:
        nonlocal took
        began = time.thread_time()
        collects = gc.isenabled()
        gc.disable()  # or it would look through a million new objects again and again, and find nothing
        try:
            return parsed(body, kind)
        finally:
            took = time.thread_time() - began
            if collects:
                gc.enable()

    def release_later() -> None:
        loop.call_later(PAUSE * took, turn.release)

    await turn.acquire()
    try:
        parsing = PARSER.submit(parse)
    except BaseException:  # no thread can be started
        turn.release()
        raise
    # However it ends, also if it is given up before it begins
    parsing.add_done_callback(lambda _: loop.call_soon_threadsafe(release_later))
    return await asyncio.wrap_future(parsing)


def parsed(body: bytes, kind: type[BaseModel]) -> BaseModel:
    """A body in JSON as a model. RequestValidationError if it is not JSON, or not what the model says."""
    try:
        value = json.loads(body.decode("utf-8-sig"))
        require_characters(body, value)
        return kind.model_validate(value)
    except ValidationError as error:
        wrong = [each | {"loc": ("body", *each["loc"])} for each in error.errors(include_input=False)]
    except (ValueError, RecursionError) as error:
        wrong = [{"loc": ("body", 0), "msg": f"the body cannot be read: {error}"}]
    raise RequestValidationError(wrong)
