"""The service over HTTP: completions and chats as OpenAI's clients ask for them, and adapters by account.

A request for an adapter is answered with that adapter or with an error, never by the base. Another account's adapter is
as absent as one that never was.
"""

import asyncio
import contextlib
import secrets
import sys
from collections import defaultdict

from fastapi import FastAPI, Request as Call
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from plpkg.adapters import CONFIG, MAX_CONFIG_BYTES, POLICIES, WEIGHTS, AdapterLimits, InvalidAdapterError, read_adapter
from plpkg.serving.requests import Request
from plpkg.serving.service.http import bodies, intake
from plpkg.serving.service.http.accounts import OPERATOR, Keys
from plpkg.serving.service.http.answers import (
    STATUS,
    ChatCompletion,
    Completion,
    Events,
    error_response,
    merged,
    refusal,
    texts,
)
from plpkg.serving.service.http.door import Door
from plpkg.serving.service.http.intake import MAX_HELD, TOKEN_BYTES, Intake, Parsed
from plpkg.serving.service.http.metrics import Metrics
from plpkg.serving.service.store import NAME, VERSION, NotFoundError, Store, StoreError
from plpkg.validation import one_of

COMPLETION_TOKENS, CHAT_TOKENS = 16, 256
"""Written at most where a request does not say."""
ERRORS = {
    status: {"description": "An error as OpenAI writes it."}
    for status in (*STATUS.values(), 401, 403, 411, 413, 415, 507)
}
EVENTS = {200: {"content": {Events.media_type: {}}}}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "required": [CONFIG, WEIGHTS],
    "properties": {name: {"type": "string", "format": "binary"} for name in (CONFIG, WEIGHTS)},
}}}}}  # fmt: skip


def app(backend, store: Store, model, tokenizer, *, name: str, keys: Keys | None = None, limits=None) -> FastAPI:
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
        What clients call the base.
    keys
        Who may do what; without, every program on this machine is the account ``local``.
    limits
        Of adapters, as of :func:`~plpkg.adapters.validate_adapter`.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the service needs a fast tokenizer, got {type(tokenizer).__name__}")
    metrics = Metrics()
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    characters = positions * max(map(len, tokenizer.get_vocab()))  # of so many tokens, each the longest
    in_memory = defaultdict(asyncio.Lock)  # an account's uploads, of up to limits.max_bytes, one at a time
    limits = (
        POLICIES[one_of("limits", limits, tuple(POLICIES))] if isinstance(limits, str) else limits or AdapterLimits()
    )

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        await backend.close()

    api = FastAPI(title="plpkg", lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS)
    api.router.route_class = Parsed
    max_upload = limits.max_bytes + MAX_CONFIG_BYTES + 2**14
    api.add_middleware(Intake, most=max_upload + MAX_HELD)
    api.add_middleware(Door, keys=keys, max_upload=max_upload)
    for kind in STATUS:
        api.add_exception_handler(kind, refusal)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(RequestValidationError, _wrong_fields)

    async def path(account: str, wanted: str) -> str:
        """Where the store has what an account calls ``NAME`` or ``NAME@SHA256``."""
        adapter, _, version = wanted.partition("@")
        if version and not VERSION.fullmatch(version):
            raise NotFoundError(f"a version is a SHA-256 in hex, got {version!r}")
        current = await store.current(account, _named(adapter))  # also with a version: it may be deleted
        return f"{account}/{adapter}/{version or current}"

    async def stored(account: str) -> list[dict]:
        """An account's adapters; one without a current version is being written, or deleted."""
        versions = await store.versions(account)
        current = await asyncio.gather(*(store.current(account, each) for each in versions), return_exceptions=True)
        for error in current:
            if isinstance(error, StoreError):
                raise error
        pairs = zip(versions, current, strict=True)
        return [{"id": each, "version": now, "versions": versions[each]} for each, now in pairs if isinstance(now, str)]

    def readable(texts: list[str]) -> None:
        """Refuse what no tokenizer could make short enough: it would take seconds, and a hundred times its size."""
        if (longest := max(map(len, texts))) > characters:
            raise ValueError(f"a text of {longest:,} characters does not fit the model's {positions:,} positions")

    async def answer(call: Call, body: bodies.Settings, prompts: list, form, usual: int) -> Response:
        account, most = call.state.account, body.max_completion_tokens or body.max_tokens
        if body.lora is not None and body.model != name:
            raise ValueError(f"lora={body.lora!r} goes with model={name!r}, got {body.model!r}")
        wanted = body.lora or (body.model if body.model != name else None)
        where = None if wanted is None else await _unless_gone(call, path(account, wanted))
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        settings = dict(temperature=body.temperature, top_p=body.top_p, seed=body.seed, stop=stop, account=account)
        requests = [
            Request(ids, max_new_tokens=most or max(1, min(usual, positions - len(ids))), **settings) for ids in prompts
        ]
        lengths = (min(len(each.input_ids) + each.max_new_tokens, positions) for each in requests)
        call.state.hold(TOKEN_BYTES * sum(lengths))
        metrics.prompt.inc(prompt_tokens := sum(map(len, prompts)))
        pieces = merged([texts(backend.stream(where, each), each, tokenizer, metrics) for each in requests])
        first = await _unless_gone(call, anext(pieces))  # what fails at once has a status
        written = form(secrets.token_hex(12), body.model, prompt_tokens)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return Events(written.events(_again(first, pieces), usage))
        return await _unless_gone(call, written.whole(_again(first, pieces)))

    @api.post("/v1/completions", responses=EVENTS)
    async def completions(call: Call, body: bodies.Completion) -> Response:
        one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        prompts = [body.prompt] if one else body.prompt
        if isinstance(prompts[0], str):
            readable(prompts)
            prompts = (await asyncio.to_thread(tokenizer, prompts))["input_ids"]
        return await answer(call, body, prompts, Completion, COMPLETION_TOKENS)

    @api.post("/v1/chat/completions", responses=EVENTS)
    async def chat(call: Call, body: bodies.Chat) -> Response:
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {name} has no chat template: use /v1/completions")
        turns = [{"role": each.role, "content": each.text} for each in body.messages]
        readable(["".join(each["content"] for each in turns)])
        try:
            ids = await asyncio.to_thread(
                tokenizer.apply_chat_template, turns, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # the template's: turns in an order that it does not have, say
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        return await answer(call, body, [ids], ChatCompletion, CHAT_TOKENS)

    def described(identity: str, owner: str, root: str, parent: str | None = None) -> dict:
        return {"id": identity, "object": "model", "created": 0, "owned_by": owner, "root": root, "parent": parent}

    @api.get("/v1/models")
    async def models(call: Call) -> dict:
        account = call.state.account
        theirs = [described(each["id"], account, each["version"], name) for each in await stored(account)]
        return {"object": "list", "data": [described(name, "plpkg", name), *theirs]}

    @api.get("/v1/models/{model_name:path}")
    async def one_model(call: Call, model_name: str) -> dict:
        if model_name == name:
            return described(name, "plpkg", name)
        account, adapter, version = (await path(call.state.account, model_name)).split("/")
        if version not in (await store.versions(account)).get(adapter, ()):
            raise NotFoundError("there is no such version of the adapter")
        return described(model_name, account, version, name)

    @api.get("/v1/accounts/{account}/adapters")
    async def adapters(call: Call, account: str) -> dict:
        return {"object": "list", "data": await stored(_theirs(call, account))}

    @api.post("/v1/accounts/{account}/adapters/{adapter}", status_code=201, openapi_extra=UPLOAD)
    async def upload(call: Call, account: str, adapter: str) -> dict:
        _theirs(call, account)
        if adapter == name or not NAME.fullmatch(adapter):
            raise ValueError(f"no adapter can have the name {adapter!r}")
        async with call.form(max_files=2, max_fields=0) as form, in_memory[account]:  # who sends slowly is on disk
            files = {part: await file.read() for part, file in form.items() if isinstance(file, UploadFile)}
            if set(files) != {CONFIG, WEIGHTS}:
                raise InvalidAdapterError([f"an upload has the files {CONFIG} and {WEIGHTS}, got {', '.join(files)}"])
            intake.fullness(files[CONFIG][:MAX_CONFIG_BYTES])
            made = await asyncio.to_thread(read_adapter, files[CONFIG], files[WEIGHTS], model, limits)
            version = await store.put(account, adapter, made)
        return {"id": adapter, "version": version, "rank": made.rank, "bytes": made.num_bytes}

    @api.get("/v1/accounts/{account}/adapters/{adapter}")
    async def one_adapter(call: Call, account: str, adapter: str) -> dict:
        return {"id": adapter, "version": await store.current(_theirs(call, account), _named(adapter))}

    @api.delete("/v1/accounts/{account}/adapters/{adapter}")
    async def delete(call: Call, account: str, adapter: str) -> dict:
        await store.delete(_theirs(call, account), _named(adapter))
        await backend.drop(f"{account}/{adapter}")
        return {"id": adapter, "deleted": True}

    @api.get("/metrics", response_class=PlainTextResponse)
    async def measured(call: Call) -> Response:
        if keys is not None and call.state.account != OPERATOR:
            raise NotFoundError(f"metrics are of all accounts: only the account {OPERATOR!r} may read them")
        return Response(metrics.text(await backend.gauges()), media_type="text/plain; version=0.0.4")

    @api.get("/health")
    async def health() -> dict:
        await backend.gauges()  # or an error
        return {"status": "ok", "model": name}

    return api


async def _again(first, rest):
    async with contextlib.aclosing(rest):
        yield first
        async for each in rest:
            yield each


async def _unless_gone(call: Call, work):
    """The result of work, which is cancelled when the client goes."""

    async def gone() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise HTTPException(499, "the client has gone")
        return tasks[0].result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _theirs(call: Call, account: str) -> str:
    if call.state.account != account:
        raise NotFoundError(f"this key has no account {account!r}")
    return account


def _named(adapter: str) -> str:
    if not NAME.fullmatch(adapter):
        raise NotFoundError(f"no adapter has the name {adapter!r}")
    return adapter


async def _http_error(_, error: HTTPException) -> Response:
    return error_response(error.status_code, error.detail, headers=error.headers)


async def _wrong_fields(_, error: RequestValidationError) -> Response:
    return error_response(422, *(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()))
