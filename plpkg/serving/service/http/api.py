"""The service over HTTP, as an ASGI application: routes, who may come in, what they may hold, and errors."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request as Call
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

import plpkg
from plpkg.adapters import POLICIES, AdapterLimits
from plpkg.decoding import longest_text
from plpkg.files.untrusted import MAX_CONFIG_BYTES
from plpkg.serving.service.http import bodies
from plpkg.serving.service.http.accounts import OPERATOR, Keys
from plpkg.serving.service.http.adapters import Adapters
from plpkg.serving.service.http.answers import STATUS, error_response, refusal
from plpkg.serving.service.http.completions import Completions
from plpkg.serving.service.http.door import Door
from plpkg.serving.service.http.intake import MAX_HELD, Intake, Parsed
from plpkg.serving.service.http.metrics import Metrics
from plpkg.serving.service.http.names import Names
from plpkg.serving.service.store import NotFoundError, Store
from plpkg.validation import one_of, shown

STATUSES = {*STATUS.values(), 401, 403, 411, 413, 415, 507}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": "An error as OpenAI writes it."} for status in STATUSES
}
SAID = {"extra_forbidden": "this service does not know it", "missing": "it is needed"}
"""For pydantic's words."""
SERVED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/accounts/ACCOUNT/adapters")


def app(
    backend: Any, store: Store, model: Any, tokenizer: Any, *, name: str, keys: Keys | None = None,
    limits: AdapterLimits | str | None = None, origins: Sequence[str] = (), max_model_len: int | None = None,
) -> FastAPI:  # fmt: skip
    """The service as an ASGI application.

    Parameters
    ----------
    backend
        A :class:`~plpkg.serving.service.replica.Replica`, or what stands for several.
    store
        Where adapters are kept.
    model, tokenizer
        The base, of which modules and configuration are read only, and its tokenizer, a fast one.
    name
        The name that clients have for the base.
    keys
        Who may do what; without, every program on this machine is the account ``local``.
    limits
        Of adapters, as of :func:`~plpkg.adapters.reading.validate_adapter`.
    origins
        Of pages that browsers let in (CORS), as ``https://chat.example.org``; ``*`` lets all in who have a key.
    max_model_len
        As of the backend's :class:`~plpkg.serving.Engine`.
    """
    if keys is None and "*" in origins:
        raise ValueError("origins='*' would let every page in a browser in: name them, or have keys")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the service needs a fast tokenizer, got {type(tokenizer).__name__}")
    if isinstance(limits, str):
        limits = POLICIES[one_of("limits", limits, tuple(POLICIES))]
    elif limits is None:
        limits = AdapterLimits()

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        await backend.close()

    api = FastAPI(title="plpkg", lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS)
    max_upload = limits.max_bytes + MAX_CONFIG_BYTES + 2**14
    api.add_middleware(Intake, most=max_upload + MAX_HELD)
    api.add_middleware(Door, keys=keys, max_upload=max_upload, origins=origins)
    if origins:  # outermost: a browser's question before the request has no key
        api.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    for kind in STATUS:
        api.add_exception_handler(kind, refusal)
    api.add_exception_handler(HTTPException, _http_error)  # pyright: ignore[reportArgumentType] (its own exceptions)
    api.add_exception_handler(ClientDisconnect, _gone)
    api.add_exception_handler(RequestValidationError, _wrong_fields)  # pyright: ignore[reportArgumentType] (the same)
    names = Names(store, name)
    metrics = Metrics()
    positions = longest_text(model.config, max_model_len)
    longest = None if positions == sys.maxsize else positions
    api.include_router(Completions(backend, tokenizer, names, metrics, positions).router)
    api.include_router(Adapters(backend, store, names, model, limits, longest).router)
    api.include_router(_operating(backend, metrics, name, keys))
    return api


def _operating(backend, metrics: Metrics, name: str, keys: Keys | None) -> APIRouter:
    """Routes for who runs the service."""
    router = APIRouter(route_class=Parsed)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def measured(call: Call) -> Response:
        if keys is not None and call.state.account != OPERATOR:
            raise NotFoundError(f"metrics are of all accounts: only the account {OPERATOR!r} may read them")
        return Response(metrics.text(await backend.gauges()), media_type="text/plain; version=0.0.4")

    @router.get("/health")
    @router.get("/ping")
    async def health() -> dict:
        await backend.gauges()  # or an error
        return {"status": "ok", "model": name}

    @router.get("/version")
    async def version() -> dict:
        return {"version": plpkg.__version__}

    return router


async def _http_error(call: Call, error: HTTPException) -> Response:
    detail = error.detail
    if error.status_code == 404:
        detail = f"{shown(call.url.path)} is not served: {', '.join(SERVED)} are"
    return error_response(error.status_code, detail, headers=error.headers)


async def _gone(*_) -> Response:
    return error_response(499, "the client has gone")


async def _wrong_fields(_, error: RequestValidationError) -> Response:
    fields: list[str] = []
    reasons: list[str] = []
    for each in error.errors():
        field = _field(each["loc"][1:])
        message = SAID.get(each.get("type"), each["msg"])
        fields.append(field)
        reasons.append(": ".join(part for part in (field, message) if part))
    return error_response(422, *reasons, param=fields[0] or None)


def _field(place: tuple) -> str:
    """The field that an error is about, if it is about one."""
    parts = [str(each)[:100] for each in place if each not in bodies.TAGS]
    if not parts or not isinstance(place[0], str):  # a number is where JSON is broken
        return ""
    return ".".join(parts)
