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
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

import plpkg
from plpkg.adapters import CONFIG, MAX_CONFIG_BYTES, POLICIES, WEIGHTS, AdapterLimits, InvalidAdapterError, read_adapter
from plpkg.decoding import longest_text
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
    starts,
    texts,
)
from plpkg.serving.service.http.door import Door
from plpkg.serving.service.http.intake import MAX_HELD, TOKEN_BYTES, Intake, Parsed
from plpkg.serving.service.http.logprobs import Spelling
from plpkg.serving.service.http.metrics import Metrics
from plpkg.serving.service.http.names import Names, stored_name
from plpkg.serving.service.store import NotFoundError, Store, stored_version
from plpkg.validation import one_of, shown

COMPLETION_TOKENS, CHAT_TOKENS = 16, 256
"""Written at most where a request does not say."""
MOST_ANSWERS, MOST_SCORED = 64, 2**20
"""Of a request, also of its prompts' log-probabilities."""
STATUSES = {*STATUS.values(), 401, 403, 411, 413, 415, 507}
ERRORS = {status: {"description": "An error as OpenAI writes it."} for status in STATUSES}
SAID = {"extra_forbidden": "this service does not know it", "missing": "it is needed"}
"""For pydantic's words."""
SERVED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/accounts/ACCOUNT/adapters")
EVENTS = {200: {"content": {Events.media_type: {}}}}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "required": [CONFIG, WEIGHTS],
    "properties": {name: {"type": "string", "format": "binary"} for name in (CONFIG, WEIGHTS)},
}}}}}  # fmt: skip


def app(
    backend, store: Store, model, tokenizer, *, name: str, keys: Keys | None = None, limits=None, origins=(),
    max_model_len: int | None = None,
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
        What clients call the base.
    keys
        Who may do what; without, every program on this machine is the account ``local``.
    limits
        Of adapters, as of :func:`~plpkg.adapters.validate_adapter`.
    origins
        Of pages that browsers let in (CORS), as ``https://chat.example.org``; ``*`` lets all in who have a key.
    max_model_len
        As of the backend's :class:`~plpkg.serving.Engine`.
    """
    if keys is None and "*" in origins:
        raise ValueError("origins='*' would let every page in a browser in: name them, or have keys")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the service needs a fast tokenizer, got {type(tokenizer).__name__}")
    metrics = Metrics()
    positions, spelling = longest_text(model.config, max_model_len), Spelling(tokenizer)
    longest = None if positions == sys.maxsize else positions
    characters = positions * max(map(len, tokenizer.get_vocab()))  # of so many tokens, each the longest
    names = Names(store, name)
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
    api.add_middleware(Door, keys=keys, max_upload=max_upload, origins=origins)
    if origins:  # outermost: a browser's question before the request has no key
        api.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    for kind in STATUS:
        api.add_exception_handler(kind, refusal)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(ClientDisconnect, _gone)
    api.add_exception_handler(RequestValidationError, _wrong_fields)

    def readable(texts: list[str]) -> None:
        """Refuse what no tokenizer could make short enough: it would take seconds, and a hundred times its size."""
        if (longest := max(map(len, texts))) > characters:
            raise ValueError(f"a text of {longest:,} characters does not fit the model's {positions:,} positions")

    async def answer(
        call: Call, body: bodies.Settings, prompts: list, form, usual: int, logprobs: int | None, echoes=()
    ) -> Response:
        account = call.state.account
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.lora is not None and body.model != name:
            raise ValueError(f"lora={body.lora!r} goes with model={name!r}, got {body.model!r}")
        answers = len(prompts) * body.n
        if answers > MOST_ANSWERS:
            asked = f"n={body.n} of {len(prompts)} prompts are {answers} answers"
            raise ValueError(f"{asked}, at most {MOST_ANSWERS} are allowed")
        wanted = body.lora or (body.model if body.model != name else None)
        where = None if wanted is None else await _unless_gone(call, names.path(account, wanted))
        settings = dict(temperature=body.temperature, top_p=body.top_p or 1e-9, stop=body.stop, account=account)
        settings |= dict(logprobs=0 if most == 0 and logprobs is None else logprobs)
        settings |= dict(score_prompt=bool(echoes) and logprobs is not None)
        requests = [
            Request(
                ids,
                max_new_tokens=max(1, min(usual, positions - len(ids))) if most is None else most,
                seed=None if body.seed in (None, -1) else (body.seed + k) % 2**63,
                **settings,
            )
            for ids in prompts
            for k in range(body.n)
        ]
        lengths = (min(len(each.input_ids) + each.max_new_tokens, positions) for each in requests)
        call.state.hold(TOKEN_BYTES * sum(lengths))
        metrics.prompt.inc(prompt_tokens := sum(map(len, prompts)))
        before = [(each, ()) for each in echoes or [""] * len(prompts)]
        if settings["score_prompt"] and max(map(len, prompts)) <= positions:  # or the backend refuses them
            values = prompt_tokens * body.n * (logprobs + 1)
            if values > MOST_SCORED:
                raise ValueError(f"their log-probabilities are {values:,} values, at most {MOST_SCORED:,} are allowed")
            places = await asyncio.to_thread(lambda: [starts(tokenizer, ids) for ids in prompts])
            before = [*zip(echoes, places, strict=True)]
        pieces = merged(
            [
                texts(backend.stream(where, each), each, tokenizer, metrics, *before[k // body.n])
                for k, each in enumerate(requests)
            ]
        )
        first = await _unless_gone(call, anext(pieces))  # what fails at once has a status
        scored = None if logprobs is None else spelling
        written = form(secrets.token_hex(12), body.model, prompt_tokens, scored)
        if body.stream:
            return Events(written.events(_again(first, pieces), body.stream_options.include_usage))
        return await _unless_gone(call, written.whole(_again(first, pieces)))

    @api.post("/v1/completions", responses=EVENTS)
    async def completions(call: Call, body: bodies.Completion) -> Response:
        prompts = echoes = body.prompt
        if isinstance(prompts[0], str):
            readable(prompts)
            prompts = (await asyncio.to_thread(tokenizer, prompts))["input_ids"]
        elif body.echo:
            echoes = await asyncio.to_thread(tokenizer.batch_decode, prompts, skip_special_tokens=True)
        echoes = echoes if body.echo else ()
        return await answer(call, body, prompts, Completion, COMPLETION_TOKENS, body.logprobs, echoes)

    async def templated(messages: list[bodies.ChatMessage], generation: bool = True) -> list[int]:
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {name} has no chat template: use /v1/completions")
        turns = [each.turn for each in messages]
        readable(["".join(str(each) for turn in turns for each in turn.values())])
        try:
            return await asyncio.to_thread(
                tokenizer.apply_chat_template, turns, add_generation_prompt=generation, return_dict=False
            )
        except Exception as error:  # the template's: turns in an order that it does not have, say
            raise ValueError(f"the chat template refuses the messages: {error}") from None

    @api.post("/v1/chat/completions", responses=EVENTS)
    async def chat(call: Call, body: bodies.Chat) -> Response:
        ids = await templated(body.messages)
        logprobs = body.top_logprobs if body.logprobs else None
        return await answer(call, body, [ids], ChatCompletion, CHAT_TOKENS, logprobs)

    @api.post("/tokenize")
    async def tokenize(call: Call, body: bodies.Tokenize) -> dict:
        if body.model not in (None, name):
            await names.existing(call.state.account, body.model)
        if body.messages is not None:
            ids = await templated(body.messages, body.add_generation_prompt)
        else:
            readable([body.prompt])
            special = dict(add_special_tokens=body.add_special_tokens)
            ids = (await asyncio.to_thread(tokenizer, body.prompt, **special))["input_ids"]
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings}

    @api.post("/detokenize")
    async def detokenize(call: Call, body: bodies.Detokenize) -> dict:
        if body.model not in (None, name):
            await names.existing(call.state.account, body.model)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)}

    @api.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(call: Call, body: bodies.Load) -> str:
        await names.load(call.state.account, body.lora_name, body.lora_path, body.load_inplace)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @api.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(call: Call, body: bodies.Unload) -> str:
        """Forget a loaded name, or what is in memory of a stored adapter, which comes back when it is asked for."""
        account = call.state.account
        if not names.forget(account, body.lora_name):
            await names.path(account, body.lora_name)
            await backend.drop(f"{account}/{body.lora_name}")
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def described(identity: str, owner: str, root: str, parent: str | None = None) -> dict:
        return {"id": identity, "object": "model", "created": 0, "owned_by": owner, "root": root, "parent": parent} | {
            "max_model_len": longest
        }

    @api.get("/v1/models")
    async def models(call: Call) -> dict:
        account = call.state.account
        theirs = [described(each["id"], account, each["version"], name) for each in await names.stored(account)]
        theirs += [described(each, account, root, name) for each, root in names.loaded(account).items()]
        return {"object": "list", "data": [described(name, "plpkg", name), *theirs]}

    @api.get("/v1/models/{model_name:path}")
    async def one_model(call: Call, model_name: str) -> dict:
        if model_name == name:
            return described(name, "plpkg", name)
        account = call.state.account
        _, version = await names.existing(account, model_name)
        return described(model_name, account, version, name)

    @api.get("/v1/accounts/{account}/adapters")
    async def adapters(call: Call, account: str) -> dict:
        return {"object": "list", "data": await names.stored(_theirs(call, account))}

    @api.post("/v1/accounts/{account}/adapters/{adapter}", status_code=201, openapi_extra=UPLOAD)
    async def upload(call: Call, account: str, adapter: str) -> dict:
        _theirs(call, account)
        names.require_possible(adapter)
        async with call.form(max_files=2, max_fields=0) as form, in_memory[account]:  # who sends slowly is on disk
            files = {part: await file.read() for part, file in form.items() if isinstance(file, UploadFile)}
            if set(files) != {CONFIG, WEIGHTS}:
                raise InvalidAdapterError(f"an upload has the files {CONFIG} and {WEIGHTS}, got {', '.join(files)}")
            intake.fullness(files[CONFIG][:MAX_CONFIG_BYTES])
            made = await asyncio.to_thread(read_adapter, files[CONFIG], files[WEIGHTS], model, limits)
            before = (await store.versions(account)).get(adapter, [])
            version = await store.put(account, adapter, made)
            gone = {*before} - {*(await store.versions(account))[adapter]}
        names.forget(account, adapter)
        for each in gone:  # of a full account: nothing is to be left of it in memory
            await backend.drop(f"{account}/{adapter}/{each}")
        return {"id": adapter, "version": version, "rank": made.rank, "bytes": made.num_bytes}

    @api.get("/v1/accounts/{account}/adapters/{adapter}")
    async def one_adapter(call: Call, account: str, adapter: str) -> dict:
        return {"id": adapter, "version": await store.current(_theirs(call, account), stored_name(adapter))}

    async def forget(account: str, adapter: str, place: tuple[str, ...]) -> None:
        names.deleted(account, adapter)
        await backend.drop("/".join(place))

    @api.delete("/v1/accounts/{account}/adapters/{adapter}")
    async def delete(call: Call, account: str, adapter: str) -> dict:
        stored, at, version = adapter.partition("@")
        place = _theirs(call, account), stored_name(stored), *([stored_version(version)] if at else [])
        try:
            await store.delete(*place)
        except ValueError:  # the current version: all is as it was
            raise
        except BaseException:  # deleted by a process that died before this, perhaps
            await forget(account, adapter, place)
            raise
        await forget(account, adapter, place)
        return {"id": adapter, "deleted": True}

    @api.get("/metrics", response_class=PlainTextResponse)
    async def measured(call: Call) -> Response:
        if keys is not None and call.state.account != OPERATOR:
            raise NotFoundError(f"metrics are of all accounts: only the account {OPERATOR!r} may read them")
        return Response(metrics.text(await backend.gauges()), media_type="text/plain; version=0.0.4")

    @api.get("/health")
    @api.get("/ping")
    async def health() -> dict:
        await backend.gauges()  # or an error
        return {"status": "ok", "model": name}

    @api.get("/version")
    async def version() -> dict:
        return {"version": plpkg.__version__}

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


async def _http_error(call: Call, error: HTTPException) -> Response:
    detail = error.detail
    if error.status_code == 404:
        detail = f"{shown(call.url.path)} is not served: {', '.join(SERVED)} are"
    return error_response(error.status_code, detail, headers=error.headers)


async def _gone(*_) -> Response:
    return error_response(499, "the client has gone")


async def _wrong_fields(_, error: RequestValidationError) -> Response:
    errors = [(_field(each["loc"][1:]), SAID.get(each.get("type"), each["msg"])) for each in error.errors()]
    return error_response(422, *(": ".join(filter(None, each)) for each in errors), param=errors[0][0] or None)


def _field(place: tuple) -> str:
    parts = [str(each) for each in place if each not in bodies.TAGS]
    return ".".join(parts) if parts and isinstance(place[0], str) else ""  # a number is where JSON is broken
