"""Completions and chats as OpenAI's clients ask for them.

A request for an adapter is answered with that adapter or with an error, never by the base.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request as Call
from starlette.responses import Response

from plpkg.decoding import Text
from plpkg.serving.requests import Request
from plpkg.serving.service.http import bodies
from plpkg.serving.service.http.answers import ChatCompletion, Completion, Events, merged, starts, texts
from plpkg.serving.service.http.clients import unless_gone
from plpkg.serving.service.http.intake import TOKEN_BYTES, Parsed
from plpkg.serving.service.http.logprobs import Spelling
from plpkg.serving.service.http.metrics import Metrics
from plpkg.serving.service.http.names import Names

COMPLETION_TOKENS = 16
CHAT_TOKENS = 256
"""Written at most where a request does not say."""
MOST_ANSWERS = 64
"""Answers to a request."""
MOST_SCORED = 2**20
"""Values of its prompts' log-probabilities."""
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {Events.media_type: {}}}}


class Completions:
    """Routes of what the base and an account's adapters write.

    Parameters
    ----------
    backend
        A :class:`~plpkg.serving.service.replica.Replica`, or what stands for several.
    tokenizer
        The base's, a fast one.
    names, metrics
        The names that accounts have for adapters, and the counters.
    positions
        Of the longest text, prompt and answer.
    """

    def __init__(self, backend, tokenizer, names: Names, metrics: Metrics, positions: int) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._names = names
        self._metrics = metrics
        self._positions = positions
        self._spelling = Spelling(tokenizer)
        self._characters = positions * max(map(len, tokenizer.get_vocab()))  # of so many tokens, each the longest
        self.router = APIRouter(route_class=Parsed)
        self.router.post("/v1/completions", responses=EVENTS)(self.complete)
        self.router.post("/v1/chat/completions", responses=EVENTS)(self.chat)

    async def complete(self, call: Call, body: bodies.Completion) -> Response:
        """Continue one or more texts, or ids."""
        given: Any = body.prompt  # texts, or ids, never both
        prompts = given
        self._require_few(len(prompts), body.n)
        are_texts = isinstance(prompts[0], str)
        if are_texts:
            self._require_readable(prompts)
            encoded = await asyncio.to_thread(self._tokenizer, prompts)
            prompts = encoded["input_ids"]
        self._require_short(prompts)
        echoes: Sequence[str] = ()
        if body.echo and are_texts:
            echoes = given
        elif body.echo:
            echoes = await asyncio.to_thread(self._tokenizer.batch_decode, prompts, skip_special_tokens=True)
        return await self._answer(call, body, prompts, Completion, COMPLETION_TOKENS, body.logprobs, echoes)

    async def chat(self, call: Call, body: bodies.Chat) -> Response:
        """Answer a chat, through the tokenizer's template."""
        if self._tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {self._names.base} has no chat template: use /v1/completions")
        self._require_few(1, body.n)
        ids = await asyncio.to_thread(self._templated, body.messages)
        self._require_short([ids])
        logprobs = body.top_logprobs if body.logprobs else None
        return await self._answer(call, body, [ids], ChatCompletion, CHAT_TOKENS, logprobs)

    def _templated(self, messages: list[bodies.ChatMessage]) -> list[int]:
        """The ids of a chat, up to where the answer begins."""
        turns = [each.turn for each in messages]
        said: list[str] = []
        for turn in turns:
            said += map(str, turn.values())
        self._require_readable(["".join(said)])
        try:
            return self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # the template's: turns in an order that it does not have, say
            raise ValueError(f"the chat template refuses the messages: {error}") from None

    def _require_readable(self, texts: list[str]) -> None:
        """Refuse what no tokenizer could make short enough: it would take seconds, and a hundred times its size."""
        longest = max(map(len, texts))
        if longest > self._characters:
            raise ValueError(f"a text of {longest:,} characters does not fit the model's {self._positions:,} positions")

    def _require_short(self, prompts: list[list[int]]) -> None:
        """Refuse a prompt that no engine takes, before anything is done for each of its answers."""
        longest = max(map(len, prompts))
        if longest > self._positions:
            raise ValueError(f"a prompt of {longest:,} tokens does not fit the model's {self._positions:,} positions")

    @staticmethod
    def _require_few(prompts: int, n: int) -> None:
        """Refuse a request for more answers than one may have, before anything is done for them."""
        if prompts * n > MOST_ANSWERS:
            asked = f"n={n} of {prompts} prompts are {prompts * n} answers"
            raise ValueError(f"{asked}, at most {MOST_ANSWERS} are allowed")

    async def _answer(
        self, call: Call, body: bodies.Settings, prompts: list[list[int]], form: type[Completion], usual: int,
        logprobs: int | None, echoes: Sequence[str] = (),
    ) -> Response:  # fmt: skip
        """Let the backend write, for each prompt ``n`` times; ``echoes`` are the prompts' texts, told before."""
        place = await self._place(call, body)
        scores_prompt = bool(echoes) and logprobs is not None
        requests = self._requests(call, body, prompts, usual, logprobs, scores_prompt)
        lengths = (min(len(each.input_ids) + each.max_new_tokens, self._positions) for each in requests)
        call.state.hold(TOKEN_BYTES * sum(lengths))
        prompt_tokens = sum(map(len, prompts))
        self._metrics.prompt.inc(prompt_tokens)
        echoes = echoes or [""] * len(prompts)
        places: Sequence[Sequence[int]] = [()] * len(prompts)  # of each prompt's tokens in its text
        if scores_prompt:
            values = prompt_tokens * body.n * ((logprobs or 0) + 1)
            if values > MOST_SCORED:
                raise ValueError(f"their log-probabilities are {values:,} values, at most {MOST_SCORED:,} are allowed")
            places = await asyncio.to_thread(lambda: [starts(self._tokenizer, ids) for ids in prompts])
        streams = []
        for k, request in enumerate(requests):
            prompt = k // body.n
            tokens = self._backend.stream(place, request)
            text = Text(self._tokenizer, prompts[prompt], request.stop)
            streams.append(texts(tokens, text, self._metrics, echoes[prompt], places[prompt]))
        pieces = merged(streams)
        first = await unless_gone(call, anext(pieces))  # what fails at once has a status
        spelling = None if logprobs is None else self._spelling
        written = form(secrets.token_hex(12), body.model, prompt_tokens, spelling)
        if body.stream:
            return Events(written.events(_again(first, pieces), body.stream_options.include_usage))
        return await unless_gone(call, written.whole(_again(first, pieces)))

    async def _place(self, call: Call, body: bodies.Settings) -> str | None:
        """Where the adapter is that is asked for; None is the base."""
        base = self._names.base
        if body.lora is not None and body.model != base:
            raise ValueError(f"lora={body.lora!r} goes with model={base!r}, got {body.model!r}")
        if body.lora is None and body.model == base:
            return None
        return await unless_gone(call, self._names.path(call.state.account, body.lora or body.model))

    def _requests(
        self, call: Call, body: bodies.Settings, prompts: list[list[int]], usual: int, logprobs: int | None,
        scores_prompt: bool,
    ) -> list[Request]:  # fmt: skip
        """``n`` for each prompt, each with a seed of its own."""
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if most == 0 and logprobs is None:
            logprobs = 0  # the engine writes nothing only where it scores
        settings: dict[str, Any] = dict(
            temperature=body.temperature,
            top_p=body.top_p or 1e-9,
            stop=body.stop,
            account=call.state.account,
            logprobs=logprobs,
            score_prompt=scores_prompt,
        )
        requests: list[Request] = []
        for ids in prompts:
            room = max(1, min(usual, self._positions - len(ids)))
            new = room if most is None else most
            for k in range(body.n):
                seed = None if body.seed in (None, -1) else (body.seed + k) % 2**63
                requests.append(Request(ids, max_new_tokens=new, seed=seed, **settings))
        return requests


async def _again(first, rest):
    """A stream with the item that was taken off it."""
    async with contextlib.aclosing(rest):
        yield first
        async for each in rest:
            yield each
