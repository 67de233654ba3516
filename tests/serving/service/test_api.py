"""What OpenAI's client gets: the engine's own answers as text, whole and in streams, or an error; never another's."""

import asyncio
import contextlib
import copy
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
import safetensors.torch
import torch
import uvicorn
from pydantic import ValidationError
from typer.testing import CliRunner
from uvicorn.protocols.http.h11_impl import H11Protocol

import plpkg
from plpkg.adapters import CONFIG, WEIGHTS, InvalidAdapterError, load_adapter, read_adapter, validate_adapter
from plpkg.cli import app as cli
from plpkg.serving.engine import Engine
from plpkg.serving.requests import Request
from plpkg.serving.service.http import adapters, bodies, completions
from plpkg.serving.service.http.api import app
from plpkg.serving.service.http.door import MAX_BODY_BYTES, Door
from plpkg.serving.service.http.listener import Listener
from plpkg.serving.service.http.neutral import NEUTRAL
from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.store import Store, StoreError

from served import served
from waiting import wait_until

PROMPT, NEW = "import numpy as np\n\n", 12
CHAT = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"


class GatedStore(Store):
    """Its downloads wait while the gate is closed."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.gate, self.asked = threading.Event(), 0

    async def fetch(self, *arguments):
        self.asked += 1
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        return await super().fetch(*arguments)


@pytest.fixture(scope="module")
def exact(base):
    """The small backbone in float64, so that no two orders of a sum choose another token, and a chat template."""
    model, tokenizer = copy.deepcopy(base[0]).double(), copy.deepcopy(base[1])
    tokenizer.chat_template = CHAT
    return model, tokenizer


@pytest.fixture(scope="module")
def service(exact, writers, tmp_path_factory):
    """Everybody is the account ``local``, which has three adapters."""
    with served(*exact, Store(tmp_path_factory.mktemp("store")), scheduler=Scheduler(slots=2)) as service:
        for name in ("numpy", "torch", "scipy"):
            assert service.upload(name, writers[name]).status_code == 201
        yield service


@pytest.fixture
def client(service):
    with service.openai() as client:
        yield client


@pytest.fixture(scope="module")
def expected(exact, writers):
    """The ids that an engine of its own writes: ``expected(prompt, adapter=None, new=NEW, **request)``."""
    model, tokenizer = copy.deepcopy(exact[0]), exact[1]
    engine = Engine(model, tokenizer)
    for name, adapter in writers.items():
        engine.load(name, adapter)

    def written(prompt, adapter=None, new=NEW, **options):
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return engine.generate([Request(ids, adapter=adapter, max_new_tokens=new, **options)])[0]

    yield written
    engine.close()


@pytest.fixture(scope="module")
def text(exact, expected):
    """As ``expected``, in text."""
    return lambda *arguments, **options: exact[1].decode(expected(*arguments, **options), skip_special_tokens=True)


def completed(client, **fields):
    """A greedy completion, whole; in a stream it must say the same, as it is written."""
    fields = dict(model="base", prompt=PROMPT, max_tokens=NEW, temperature=0) | fields
    whole, counted = client.completions.create(**fields), dict(stream=True, stream_options=dict(include_usage=True))
    *events, last = client.completions.create(**fields, **counted)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(each.usage is None for each in events)
    few = fields["temperature"] or "stop" in fields  # then a text may be held back for long
    assert len(events) > (1 if few else whole.usage.completion_tokens // 2)
    assert len({each.id for each in events}) == 1
    for k, choice in enumerate(whole.choices):
        parts = [each.choices[0] for each in events if each.choices[0].index == k]
        assert choice.index == k
        assert "".join(each.text for each in parts) == choice.text
        assert [each.finish_reason for each in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    return whole


# What is answered


@pytest.mark.parametrize("way", ["base", "name", "version", "lora"])
def test_the_text_is_the_engines_whole_and_in_a_stream(client, writers, text, way):
    names = {"name": "numpy", "version": f"numpy@{writers['numpy'].digest}"}
    fields = dict(model=names.get(way, "base")) | (dict(extra_body={"lora": "numpy"}) if way == "lora" else {})
    whole = completed(client, **fields)
    assert whole.choices[0].text == text(PROMPT, None if way == "base" else "numpy")
    assert (way == "base") == (whole.choices[0].text == text(PROMPT))  # the adapter makes a difference here
    assert (whole.choices[0].finish_reason, whole.model) == ("length", fields["model"])


def test_a_chat_is_its_template_continued(client, text, exact):
    turns = [dict(role="system", content="Be brief."), dict(role="user", content=[dict(type="text", text="numpy")])]
    prompt = "system: Be brief.\nuser: numpy\nassistant:"
    fields = dict(model="numpy", messages=turns, max_tokens=NEW, temperature=0)
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == text(prompt, "numpy")
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(exact[1](prompt)["input_ids"])
    events = [*client.chat.completions.create(**fields, stream=True)]
    assert "".join(each.choices[0].delta.content for each in events) == text(prompt, "numpy")
    assert [each.choices[0].delta.role for each in events] == ["assistant"] + [None] * (len(events) - 1)
    assert events[-1].choices[0].finish_reason == "length"


def test_several_prompts_and_ids_in_one_request(client, text, exact):
    prompts = [PROMPT, "def load(path):", "class"]
    ids = exact[1](prompts)["input_ids"]
    for given_as in (prompts, ids):
        whole = completed(client, model="torch", prompt=given_as)
        assert [each.text for each in whole.choices] == [text(each, "torch") for each in prompts]
        assert whole.usage.completion_tokens == 3 * NEW
        assert whole.usage.prompt_tokens == sum(map(len, ids))
    assert completed(client, prompt=ids[0]).choices[0].text == text(PROMPT)


def test_stop_strings_are_left_out_also_where_they_span_tokens(client, text, expected, exact):
    tokens = [exact[1].decode([each]) for each in expected(PROMPT)]
    at = next(n for n in range(2, NEW) if len(tokens[n]) > 1)
    for stop in (tokens[at][1:], tokens[at - 1][-1] + tokens[at][:-1]):  # within a token, across two
        for given_as in (stop, ["never written", stop]):
            whole = completed(client, stop=given_as)
            kept = text(PROMPT)[: text(PROMPT).index(stop)]
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == (kept, "stop")
            assert whole.usage.completion_tokens < NEW


def test_samples_are_those_of_their_seed(client, text):
    settings, samples = dict(temperature=1.2, top_p=0.95), set()
    for seed in (3, 4, 5):
        sample = completed(client, model="numpy", seed=seed, **settings).choices[0].text
        assert sample == text(PROMPT, "numpy", seed=seed, **settings)
        samples.add(sample)
    assert len(samples) > 1
    unseeded = {client.completions.create(model="base", prompt=PROMPT, max_tokens=NEW).choices[0].text for _ in "123"}
    assert len(unseeded) > 1  # temperature is 1, and each draws a seed


def test_usage_is_in_a_stream_only_where_it_is_asked_for(client, exact):
    prompt, fields = len(exact[1](PROMPT)["input_ids"]), dict(model="base", prompt=PROMPT, max_tokens=5)
    usage = completed(client, **fields).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 5, prompt + 5)
    assert all(each.usage is None for each in client.completions.create(**fields, stream=True))


def test_how_much_is_written_where_a_request_does_not_say(client, exact):
    fields = dict(model="base", temperature=0)
    assert client.completions.create(prompt=PROMPT, **fields).usage.completion_tokens == 16
    positions = exact[0].config.max_position_embeddings
    nearly = [9] * (positions - 3)
    assert client.completions.create(prompt=nearly, **fields).usage.completion_tokens == 3
    full = client.completions.create(prompt=[9] * positions, max_tokens=0, echo=True, logprobs=0, **fields)
    assert (len(full.choices[0].logprobs.tokens), full.usage.completion_tokens) == (positions, 0)
    turns = [dict(role="user", content="a")]
    for name in ("max_tokens", "max_completion_tokens"):
        assert client.chat.completions.create(messages=turns, **{name: 4}, **fields).usage.completion_tokens == 4
    long = client.chat.completions.create(messages=[dict(role="user", content="a " * (positions - 40))], **fields)
    assert long.usage.total_tokens == positions


def test_models_are_listed_and_found(service, client, writers):
    assert sorted(each.id for each in client.models.list()) == ["base", "numpy", "scipy", "torch"]
    version = writers["numpy"].digest
    assert service.client.get("/v1/accounts/local/adapters/numpy").json()["version"] == version
    assert client.models.retrieve("numpy").root == version
    assert client.models.retrieve(f"numpy@{version}").id == f"numpy@{version}"
    assert client.models.retrieve("base").parent is None
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("pandas")


def test_log_probabilities_are_the_models_own(client, exact, expected):
    """Of an adapter's tokens and of a prompt's, as those who evaluate models ask for them."""
    model, tokenizer = exact
    ids = tokenizer(PROMPT)["input_ids"]
    new = expected(PROMPT)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + new])).logits[0].log_softmax(-1)
    values = [None, *(logprobs[at - 1, token].item() for at, token in enumerate((ids + new)[1:], 1))]
    texts = [tokenizer.decode([token]) for token in ids + new]
    ask = dict(model="base", temperature=0, echo=True, logprobs=1)
    for prompt in (PROMPT, ids, [PROMPT, "class"], [ids, [5]]):
        for most in (0, 1, NEW):
            choice = client.completions.create(prompt=prompt, max_tokens=most, **ask).choices[0]
            assert choice.text == "".join(texts[: len(ids) + most])
            assert choice.logprobs.tokens == texts[: len(ids) + most]
            assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(values[1 : len(ids) + most], abs=1e-9)
            for at, (place, top) in enumerate(
                zip(choice.logprobs.text_offset, choice.logprobs.top_logprobs, strict=True)
            ):
                assert choice.text[place:].startswith(texts[at])
                assert at == 0 or max(top.values()) == pytest.approx(logprobs[at - 1].max().item(), abs=1e-9)
    fields = dict(model="base", prompt=PROMPT, max_tokens=NEW, temperature=0, logprobs=0)
    for echo, first in ((True, 0), (False, len(ids))):
        whole = completed(client, **fields, echo=echo).choices[0]
        parts = [each.choices[0].logprobs for each in client.completions.create(**fields, echo=echo, stream=True)]
        assert [value for each in parts for value in each.token_logprobs] == whole.logprobs.token_logprobs
        assert whole.logprobs.token_logprobs == pytest.approx(values[first:], abs=1e-9, nan_ok=True)
    assert client.completions.create(model="base", prompt="a", max_tokens=0).choices[0].text == ""


def test_a_chats_log_probabilities(client):
    ask = dict(model="numpy", messages=[dict(role="user", content="a")], max_tokens=8, temperature=0, logprobs=True)
    whole = client.chat.completions.create(**ask, top_logprobs=2).choices[0]
    assert "".join(each.token for each in whole.logprobs.content) == whole.message.content
    for each in whole.logprobs.content:
        assert (each.token, each.logprob) == (each.top_logprobs[0].token, each.top_logprobs[0].logprob)
        assert each.bytes == [*each.token.encode()]
        assert len(each.top_logprobs) == 2
    parts = [*client.chat.completions.create(**ask, stream=True)]
    streamed = [token.logprob for each in parts for token in each.choices[0].logprobs.content]
    assert streamed == [each.logprob for each in whole.logprobs.content]


def test_several_answers_have_seeds_of_their_own(client, text):
    settings = dict(temperature=1.2, top_p=0.95)
    whole = completed(client, model="numpy", prompt=[PROMPT, "class"], n=3, best_of=3, seed=2**63 - 2, **settings)
    seeds = (2**63 - 2, 2**63 - 1, 0)
    texts = [text(prompt, "numpy", seed=seed, **settings) for prompt in (PROMPT, "class") for seed in seeds]
    assert [each.text for each in whole.choices] == texts
    assert len({*texts}) > 3
    assert whole.usage.prompt_tokens == completed(client, prompt=[PROMPT, "class"]).usage.prompt_tokens


def test_a_chat_may_have_tools_in_its_past(exact, tmp_path):
    tokenizer = copy.deepcopy(exact[1])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments.city }}{% endfor %}{{ m.tool_call_id }};{% endfor %}"
    )
    call = dict(id="c1", type="function", function=dict(name="weather", arguments='{"city": "Bonn"}'))
    turns = [
        dict(role="user", content=[dict(type="text", text="a"), dict(type="text", text="b")]),
        dict(role="assistant", content=None, refusal=None, audio=None, tool_calls=[call]),
        dict(role="tool", content="dry", tool_call_id="c1"),
    ]
    with served(exact[0], tokenizer, Store(tmp_path)) as service:
        read = tokenizer("user:ab;assistant:Bonn;tool:dryc1;")["input_ids"]
        with service.openai() as client:
            answer = client.chat.completions.create(model="base", messages=turns, max_tokens=8, temperature=0)
            same = client.completions.create(model="base", prompt=read, max_tokens=8, temperature=0)
        assert answer.choices[0].message.content == same.choices[0].text
        assert answer.usage.prompt_tokens == len(read)
        for wrong, field in (
            (dict(role="user", content=None), "content is missing"),
            (dict(role="user", content=[dict(type="image_url", image_url="a")]), "messages.0.content.0.type"),
            (dict(role="user", content=5), "messages.0.content: "),
            (dict(role="wizard", content="a"), "messages.0.role: "),
            (dict(role="assistant", tool_calls=[call | dict(function="f")]), "messages.0.tool_calls.0.function: "),
        ):
            refused = service.client.post("/v1/chat/completions", json=dict(model="base", messages=[wrong]))
            assert (refused.status_code, field in refused.json()["error"]["reasons"][0]) == (422, True), refused.text


def test_the_longest_text_and_the_version_are_told(service, exact):
    positions = exact[0].config.max_position_embeddings
    assert {each["max_model_len"] for each in service.client.get("/v1/models").json()["data"]} == {positions}
    assert service.client.get("/version").json() == dict(version=plpkg.__version__)


# What is refused


def test_a_part_of_an_adapter_comes_in_by_no_door(service, exact, writers, tmp_path):
    """Its file lacks one layer of five, and nothing else is wrong with it."""
    files = {part: bytes(content) for part, content in writers["numpy"].files.items()}
    tensors = safetensors.torch.load(files[WEIGHTS])
    files[WEIGHTS] = safetensors.torch.save({name: each for name, each in tensors.items() if ".layers.3." not in name})
    part, kept, engine = tmp_path / "part", tmp_path / "store", Engine(*exact)
    version = "0" * 64
    place = kept / "local" / "part" / version
    for folder in (part, place):
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    said = r"layers\.3\.[\w.]+': the weights lack it"
    for door in (
        lambda: validate_adapter(part, exact[0]),
        lambda: load_adapter(part, exact[0]),
        lambda: read_adapter(files[CONFIG], files[WEIGHTS], exact[0]),
        lambda: engine.load("part", part),
        lambda: asyncio.run(Store(kept).fetch(f"local/part/{version}", exact[0])),
    ):
        with pytest.raises(InvalidAdapterError, match=said):
            door()
    refused = service.upload("part", SimpleNamespace(files=files))
    assert refused.status_code == 422
    assert re.search(said, refused.json()["error"]["message"])
    served = CliRunner().invoke(
        cli, ["serve", "--model", "plpkg-small", "--adapter", str(part), "--listen", "127.0.0.1:0"]
    )
    assert served.exit_code != 0
    assert re.search(said, str(served.output) + str(served.exception))


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        (dict(model="pandas"), 404, "no adapter 'pandas'"),
        (dict(model="numpy@" + "0" * 64), 404, "no such version"),
        (dict(model="numpy@" + "0" * 63), 404, "a version is"),
        (dict(model=""), 404, "no adapter has the name"),
        (dict(model="../numpy"), 404, "no adapter has the name"),
        (dict(model="base", lora="pandas"), 404, "no adapter 'pandas'"),
        (dict(model="numpy", lora="torch"), 400, "lora='torch'"),
        (dict(max_tokens=5000), 400, "positions"),
        (dict(prompt="a " * 2000), 400, "positions"),
        (dict(prompt=""), 422, "prompt.0: "),
        (dict(prompt=[9999999]), 400, "vocab"),
        (dict(prompt=["a"] * 65), 422, "prompt: "),
        (dict(prompt=["a", ""]), 422, "prompt.1: "),
        (dict(prompt=["a", [1]]), 422, "prompt: "),
        (dict(prompt=[[1], [1, "a"]]), 422, "prompt.1.1: "),
        (dict(prompt=5), 422, "prompt: "),
        (dict(prompt=[]), 422, "prompt: "),
        (dict(prompt=["a"] * 33, n=2), 400, "66 answers"),
        (dict(max_tokens=-1), 422, "max_tokens: "),
        (dict(max_tokens="5"), 422, "max_tokens: "),
        (dict(temperature=-1), 422, "temperature: "),
        (dict(top_p=-0.1), 422, "top_p: "),
        (dict(logprobs=21), 422, "logprobs: "),
        (dict(logprobs=True), 422, "logprobs: "),
        (dict(n=0), 422, "n: "),
        (dict(best_of=2), 422, "best_of: must be 1 or n=1, got 2"),
        (dict(suffix="a"), 422, "suffix: "),
        (dict(stop=[""]), 422, "stop.0: "),
        (dict(stop="x" * 1001), 422, "stop.0: "),
        (dict(stop=5), 422, "stop: "),
        (dict(logit_bias={"5": 3}), 422, "logit_bias.5: only 0 or null is served, got 3"),
        (dict(logit_bias={"7": -100}), 422, "logit_bias.7: only 0 or null is served, got -100"),
        (dict(stream_options=dict(continuous_usage_stats=True)), 422, "stream_options.continuous_usage_stats: "),
        (dict(unheard_of=0), 422, "unheard_of: this service does not know it"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_and_says_what(service, fields, status, said, stream):
    fields = dict(model="base", prompt="a") | fields
    response = service.client.post("/v1/completions", json=fields | dict(stream=stream))
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert said in error["message"]
    assert error["code"] == status
    assert error["type"] == "invalid_request_error"
    field, names_a_field, _ = said.partition(": ")
    assert error["param"] == (field if names_a_field else None)
    wait_until(lambda: service.inside == (0, 0, 0))


def test_a_prompt_that_cannot_be_served_ends_those_beside_it(service):
    response = service.client.post("/v1/completions", json=dict(model="numpy", prompt=[[9], [9999999]], max_tokens=500))
    assert response.status_code == 400
    wait_until(lambda: service.inside == (0, 0, 0))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if messages[0].role != 'user' %}{{ raise_exception('who asks?') }}{% endif %}", "who asks?"),
        (None, "no chat template"),
    ],
)
def test_a_chat_needs_a_template_and_turns_that_it_has(template, said, exact, tmp_path):
    tokenizer = copy.deepcopy(exact[1])
    tokenizer.chat_template = template
    with served(exact[0], tokenizer, Store(tmp_path)) as service:
        body = dict(model="base", messages=[dict(role="system", content="a")])
        response = service.client.post("/v1/chat/completions", json=body)
    assert (response.status_code, said in response.text) == (400, True)


def test_a_full_account_and_an_overloaded_service_say_so(exact, writers, tmp_path):
    scheduler = Scheduler(slots=1, places=1, max_queued=1)
    store = Store(tmp_path, max_versions=1)
    with served(*exact, store, scheduler=scheduler) as service, ThreadPoolExecutor(2) as pool:
        assert service.upload("numpy", writers["numpy"]).status_code == 201
        full = service.upload("torch", writers["torch"])
        assert (full.status_code, "1 versions" in full.text) == (409, True)
        old = writers["numpy"].digest
        assert service.complete(f"numpy@{old}").status_code == 200  # it is in memory now
        assert service.upload("numpy", writers["torch"]).status_code == 201  # the name's only version gives way
        assert service.complete(f"numpy@{old}").status_code == 404
        wait_until(lambda: not any(old in path for path in service.replica.tiers.host))
        with service.client.stream("POST", "/v1/completions", json=_long("base")):
            waiting = pool.submit(service.complete, "base", tokens=2)
            wait_until(lambda: service.inside[:2] == (1, 1))
            overloaded = service.complete("numpy")
            assert overloaded.status_code == 429
            assert int(overloaded.headers["Retry-After"]) >= 1
        assert waiting.result().status_code == 200  # as soon as the stream's client has gone
        assert service.complete("numpy").status_code == 200


def _long(model, **fields):
    """More than is ever waited for."""
    return dict(model=model, prompt="a", max_tokens=1000, temperature=0, stream=True) | fields


def test_a_store_that_does_not_answer_is_503_without_its_address(exact, tmp_path, monkeypatch):
    async def fails(*_):
        raise StoreError("s3://of-all at 127.0.0.1 does not answer")

    store = Store(tmp_path)
    for method in ("current", "versions", "delete"):
        monkeypatch.setattr(store, method, fails)
    with served(*exact, store) as service:
        for response in (
            service.complete("numpy"),
            service.client.get("/v1/models"),
            service.client.get("/v1/accounts/local/adapters"),
            service.client.delete("/v1/accounts/local/adapters/numpy"),
        ):
            assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
            assert "Retry-After" in response.headers
            assert not any(told in response.text for told in ("s3", "of-all", "127.0.0.1"))
        assert service.complete("base").status_code == 200  # which needs no store


async def test_an_error_that_nobody_foresaw_is_json_without_its_words(base, tmp_path):
    class Backend:
        async def gauges(self):
            raise LookupError("/somebody/place: nothing there")

    application = app(Backend(), Store(tmp_path), *base, name="base")
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/health")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "an error of the service: LookupError")


def test_a_deletion_that_died_before_the_tiers_were_told(service, writers):
    """Once more, it is no longer in the store, and no longer in memory."""
    service.upload("dead", writers["scipy"]).raise_for_status()
    service.complete("dead").raise_for_status()
    path = f"local/dead/{writers['scipy'].digest}"
    assert path in service.replica.tiers.host
    asyncio.run(Store(service.replica.tiers.store.folder).delete("local", "dead"))
    assert service.client.delete("/v1/accounts/local/adapters/dead").status_code == 404
    assert path not in service.replica.tiers.host


def test_a_body_is_refused_before_it_is_read(service):
    def answer(*headers, path="/v1/completions"):
        with socket.create_connection(("127.0.0.1", httpx.URL(service.url).port), timeout=20) as connection:
            lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", "")
            connection.sendall("\r\n".join(lines).encode())  # and no body, for which nobody waits
            return int(connection.makefile().readline().split()[1])

    assert answer(f"Content-Length: {MAX_BODY_BYTES + 1}") == 413
    assert answer(f"Content-Length: {10**30}") in (400, 413)
    assert answer(f"Content-Length: {2**32}", path="/v1/accounts/local/adapters/a") == 413
    assert answer() == 411


def test_a_body_may_come_in_chunks_and_is_bounded_all_the_same(service):
    def sent(content, path="/v1/completions"):
        return service.client.post(path, content=content, headers={"Content-Type": "application/json"})

    body = json.dumps(dict(model="base", prompt="a", max_tokens=1)).encode()
    assert sent(iter([body[:9], body[9:]])).status_code == 200
    refused = sent(b" " * 2**18 for _ in range(MAX_BODY_BYTES // 2**18 + 1))
    assert (refused.status_code, "1,048,576 bytes" in refused.text) == (413, True)


PAGE = {"Origin": "https://chat.example.org", "Sec-Fetch-Site": "cross-site"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {"Host": "example.org"},
        {"Host": "localhost.example.org"},
        {"Sec-Fetch-Site": "cross-site"},  # a script's or an image's address, without Origin
        {"Sec-Fetch-Site": "same-site"},
        PAGE,
    ],
)
def test_without_keys_no_page_in_a_browser_gets_in(service, headers):
    for path in ("/v1/models", "/metrics", "/v1/accounts/local/adapters", "/health"):
        answer = service.client.get(path, headers=headers)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (403, False)


@pytest.mark.parametrize("headers", [{"Host": "LOCALHOST:80"}, {"Host": "localhost."}, {"Sec-Fetch-Site": "none"}])
def test_programs_on_this_machine_get_in(service, headers):
    for path in ("/health", "/ping", "/version", "/v1/models"):
        answer, head = (service.client.request(method, path, headers=headers) for method in ("GET", "HEAD"))
        assert (answer.status_code, head.status_code, head.content) == (200, 200, b"")


async def test_pages_of_an_origin_that_is_named_get_in(base, tmp_path):
    application = app(None, Store(tmp_path), *base, name="base", origins=[PAGE["Origin"]])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as client:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for answer in (
            await client.options("/v1/models", headers=PAGE | ask),
            await client.get("/version", headers=PAGE),
        ):
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE["Origin"])
        assert (await client.get("/version", headers=PAGE | {"Host": "example.org"})).status_code == 403
        assert (await client.get("/version", headers=PAGE | {"Origin": "https://example.org"})).status_code == 403
    with pytest.raises(ValueError, match="every page"):
        app(None, Store(tmp_path), *base, name="base", origins=["*"])


# What strangers with a key did once


def test_a_setting_that_needs_another_is_named():
    """As ``param``, by which clients find it."""
    chat = {"model": "base", "messages": [{"role": "user", "content": "a"}]}
    for kind, fields, named in (
        (bodies.Chat, chat | {"top_logprobs": 2}, "top_logprobs"),
        (bodies.Completion, {"model": "base", "prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    ):
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(fields)
        assert [each["loc"] for each in raised.value.errors()] == [(named,)]
    bodies.Chat.model_validate(chat | {"top_logprobs": 2, "logprobs": True})
    bodies.Completion.model_validate({"model": "base", "prompt": "a", "n": 3, "best_of": 3})


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/messages", "/nothing"])
def test_what_is_not_served_says_what_is(service, path):
    response = service.client.post(path, json={})
    error = response.json()["error"]
    assert response.status_code == 404
    assert error["message"].startswith(f"'{path}' is not served: /v1/completions, /v1/chat/completions")


@pytest.mark.parametrize("head", [b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 200_000, b"nonsense\r\n\r\n"])
def test_a_head_that_cannot_be_read_has_an_error_as_json(service, head):
    with socket.create_connection(("127.0.0.1", httpx.URL(service.url).port), timeout=20) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be refused before it is all there
            connection.sendall(head)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while some := connection.recv(65536):
                answer += some
    said, _, body = answer.partition(b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400")
    assert "the head of the request cannot be read" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (bodies.Completion, {"prompt": [-1] * 5000}),
        (bodies.Completion, {"prompt": [""] * 5000}),
        (bodies.Completion, {"prompt": [[-1] * 5000]}),
        (bodies.Completion, {"prompt": "a", **{f"field{i}": 0 for i in range(5000)}}),
        (bodies.Completion, {"prompt": "a", "metadata": {f"key{i}": 0 for i in range(5000)}}),
        (bodies.Completion, {"prompt": "a", "logit_bias": {f"key{i}": "" for i in range(5000)}}),
        (bodies.Completion, {"prompt": "a", "stop": [0] * 5000}),
        (bodies.Chat, {"messages": [{}] * 5000}),
        (bodies.Chat, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
    ],
)
def test_errors_are_few_however_much_is_wrong(kind, fields):
    """Each costs a kilobyte and some microseconds in which nobody else is answered."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"model": "base"} | fields)
    assert raised.value.error_count() < 10


def test_null_is_what_was_not_said(service):
    unsaid = dict.fromkeys(("n", "stream", "temperature", "top_p", "best_of", "echo", "presence_penalty", "stop"))
    body = dict(model="base", prompt="import", max_tokens=8, seed=1)
    null, absent = (service.client.post("/v1/completions", json=body | each).json() for each in (unsaid, {}))
    assert null["choices"][0]["text"] == absent["choices"][0]["text"]
    assert re.fullmatch("cmpl-[0-9a-f]{24}", null["id"])  # which does not count everybody's answers
    assert null["id"] != absent["id"]
    response = service.complete("base", toools=None)
    assert (response.status_code, "toools" in response.text) == (422, True)  # nobody knows what was meant


def test_values_that_change_nothing_are_taken_and_others_refused_by_name(service):
    turns = dict(messages=[dict(role="user", content="a")])
    for kind, given_as in ((bodies.Completion, dict(prompt="a")), (bodies.Chat, turns)):
        for name, values in NEUTRAL.items():
            for value in (*values, None):
                kind.model_validate({"model": "base", name: value} | given_as)
            with pytest.raises(ValidationError) as raised:
                kind.model_validate({"model": "base", name: {"another": 1}} | given_as)
            assert [each["loc"] for each in raised.value.errors()] == [(name,)]
    settings = {name: values[0] for name, values in NEUTRAL.items() if values}
    settings |= dict(user="a", metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, seed=-1)
    settings |= dict(logit_bias={}, logprobs=False)
    for path, given_as, more in (
        ("completions", dict(prompt=PROMPT), dict(suffix="", best_of=1, echo=False)),
        ("chat/completions", turns, {}),
    ):
        body = dict(model="base", max_tokens=4, temperature=0) | given_as
        plain, answer = (service.client.post(f"/v1/{path}", json=body | each) for each in ({}, settings | more))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]
    other = dict(top_k=5, repetition_penalty=1.1, store=True, tool_choice="required", min_tokens=True, tools=[1])
    refused = service.client.post("/v1/completions", json=body | dict(prompt="a") | other)
    assert all(f"{name}: only " in refused.json()["error"]["message"] for name in other)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        (f"{'0' * 30}{MAX_BODY_BYTES}", 204),
        (f"{'0' * 30}{MAX_BODY_BYTES + 1}", 413),
        ("9" * 5000, 413),
        ("0" * 30, 204),
    ],
)
async def test_a_length_with_zeros_before_it(length, status):
    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 204})

    async def send(message):
        sent.append(message)

    sent, headers = [], [(b"host", b"localhost"), (b"content-length", length.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await Door(inner, None, 0)(scope, None, send)
    assert sent[0]["status"] == status


def test_an_accounts_uploads_are_in_memory_one_at_a_time(service, writers, monkeypatch):
    alone = threading.Lock()

    def slow(*arguments):
        assert alone.acquire(blocking=False), "another is in memory"
        time.sleep(0.02)  # for others to come
        try:
            return read_adapter(*arguments)
        finally:
            alone.release()

    monkeypatch.setattr(adapters, "read_adapter", slow)
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(lambda _: service.upload("mine", writers["numpy"]).status_code, range(6)))
    assert made == [201] * 6
    assert service.client.delete("/v1/accounts/local/adapters/mine").status_code == 200


async def test_a_model_that_does_not_say_how_long_a_text_may_be(base, tmp_path):
    class Backend:
        async def stream(self, path, request):
            self.request = request
            yield 0, "length"

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    backend = Backend()
    application = app(backend, Store(tmp_path), SimpleNamespace(config=config), base[1], name="base")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as client:
        answer = await client.post("/v1/completions", json=dict(model="base", prompt=[1, 2]))
    assert answer.status_code == 200
    assert backend.request.max_new_tokens == completions.COMPLETION_TOKENS


def test_who_goes_while_the_store_hangs_leaves_no_question(base, tmp_path, monkeypatch):
    store, reading = Store(tmp_path), []

    async def hangs(path, end):
        reading.append(path)
        try:
            await asyncio.Event().wait()
        finally:
            reading.pop()

    monkeypatch.setattr(store, "_range", hangs)
    with served(*base, store) as service:
        with pytest.raises(httpx.ReadTimeout):
            service.client.post("/v1/completions", json=dict(model="mine", prompt="a"), timeout=0.5)
        wait_until(lambda: not reading)


def test_a_text_that_cannot_fit_is_not_split_into_tokens(base, tmp_path, monkeypatch):
    tokenizer = copy.deepcopy(base[1])
    tokenizer.chat_template = CHAT
    most = base[0].config.max_position_embeddings * max(map(len, tokenizer.get_vocab()))
    with served(base[0], tokenizer, Store(tmp_path)) as service:
        split = []
        for method in ("__call__", "apply_chat_template"):
            monkeypatch.setattr(type(tokenizer), method, lambda *arguments, **options: split.append(arguments))
        answers = [service.complete("base", prompt=["a", "a" * (most + 1)])]
        turns = [{"role": "user", "content": "a" * (most // 2 + 1)}] * 2
        answers.append(service.client.post("/v1/chat/completions", json=dict(model="base", messages=turns)))
    assert [each.status_code for each in answers] == [400, 400]
    assert all("characters" in each.json()["error"]["message"] for each in answers)
    assert not split


def test_heads_are_bounded(monkeypatch):
    """h11 takes 64 KiB; httptools, which uvicorn prefers where it is installed, all that anybody sends."""
    chosen = []

    def stop(*_, http="auto", **__):
        chosen.append(http)
        raise ValueError("enough")

    monkeypatch.setenv("PLPKG_KEYS", "")
    monkeypatch.setattr(uvicorn, "Config", stop)
    assert CliRunner().invoke(cli, ["serve", "--listen", "127.0.0.1:0"]).exit_code == 2
    with pytest.raises(ValueError, match="enough"):
        Listener(None)
    assert [issubclass(each, H11Protocol) for each in chosen] == [True, True]


# Adapters come and go


def test_an_upload_is_served_at_once_and_its_versions_stay(service, client, writers, text):
    made = [service.upload("mine", writers[name]) for name in ("peft", "pandas")]
    assert [each.status_code for each in made] == [201, 201]
    versions = [each.json()["version"] for each in made]
    assert versions == [writers[name].digest for name in ("peft", "pandas")]
    assert made[0].json() == dict(id="mine", version=versions[0], rank=8, bytes=writers["peft"].num_bytes)
    fields = dict(prompt=PROMPT, max_tokens=NEW, temperature=0)
    for model, name in (("mine", "pandas"), (f"mine@{versions[0]}", "peft")):
        assert client.completions.create(model=model, **fields).choices[0].text == text(PROMPT, name)
    assert text(PROMPT, "pandas") != text(PROMPT, "peft")
    listed = service.client.get("/v1/accounts/local/adapters").json()["data"]
    assert dict(id="mine", version=versions[1], versions=versions) in listed
    place = "/v1/accounts/local/adapters/mine"
    for version, status in (("", 404), ("..", 404), ("0" * 64, 404), (versions[1], 400), (versions[0], 200)):
        assert service.client.delete(f"{place}@{version}").status_code == status
        assert service.complete("mine").status_code == 200
        assert service.complete(f"mine@{versions[0]}").status_code == (404 if status == 200 else 200)
    assert service.client.delete(place).json() == dict(id="mine", deleted=True)
    for gone in ("mine", f"mine@{versions[0]}"):
        assert service.complete(gone).status_code == 404
    assert service.client.delete("/v1/accounts/local/adapters/mine").status_code == 404
    assert "mine" not in [each.id for each in client.models.list()]
    assert versions[0] not in service.replica.engine.adapters


def test_a_bad_upload_is_told_the_first_reason(service, writers):
    good = {part: (part, bytes(writers["numpy"].files[part])) for part in (CONFIG, WEIGHTS)}
    config = json.loads(good[CONFIG][1]) | dict(use_dora=True, lora_alpha=0)

    def post(name="bad", **options):
        return service.client.post(f"/v1/accounts/local/adapters/{name}", **options)

    response = post(files={CONFIG: (CONFIG, json.dumps(config)), WEIGHTS: (WEIGHTS, good[WEIGHTS][1][:-10])})
    assert response.status_code == 422
    (reason,) = response.json()["error"]["reasons"]
    assert response.json()["error"]["message"] == reason
    assert reason.startswith("adapter_config.json: use_dora=True must be empty")
    wrong = [
        {CONFIG: good[CONFIG]},
        good | dict(third=("third", b"")),
        {"config": good[CONFIG], WEIGHTS: good[WEIGHTS]},
        good | {CONFIG: (None, good[CONFIG][1])},  # a field, not a file
        [(CONFIG, good[CONFIG])] * 2,
    ]
    for files in wrong:
        assert post(files=files).status_code in (400, 422), files
    assert post(json={}).status_code == post().status_code == 422
    malformed = post(content=b"--x\r\nnonsense", headers={"Content-Type": "multipart/form-data"})
    assert malformed.status_code in (400, 422)
    for name in ("base", "-a", "a" * 65, "a@b", "%2e%2e"):
        assert post(name, files=good).status_code in (400, 404, 405)
    listed = service.client.get("/v1/accounts/local/adapters").json()["data"]
    assert sorted(each["id"] for each in listed) == ["numpy", "scipy", "torch"]


def test_no_adapters_name_ever_gets_the_bases_answer(exact, writers, text, tmp_path):
    """Deleted while it is fetched, while its request waits, while it runs; and more adapters than slots at a time."""
    store = GatedStore(tmp_path)
    scheduler = Scheduler(slots=1, places=1)
    with served(*exact, store, scheduler=scheduler) as service, ThreadPoolExecutor(8) as pool:
        for name, adapter in writers.items():
            assert service.upload(name, adapter).status_code == 201
        fetched = pool.submit(service.complete, "peft", PROMPT, NEW)
        wait_until(lambda: store.asked == 1)
        assert service.client.delete("/v1/accounts/local/adapters/peft").status_code == 200
        assert fetched.result().status_code == 404
        store.gate.set()
        with service.client.stream("POST", "/v1/completions", json=_long("base")):
            waits = pool.submit(service.complete, "pandas", PROMPT, NEW)
            wait_until(lambda: [each.state for each in scheduler.queued] == ["waiting"])
            assert service.client.delete("/v1/accounts/local/adapters/pandas").status_code == 200
        assert waits.result().json()["choices"][0]["text"] == text(PROMPT, "pandas")
        with service.client.stream("POST", "/v1/completions", json=_long("scipy", prompt=PROMPT)) as running:
            lines = running.iter_lines()
            pieces = [_piece(next(lines), next(lines))]
            assert service.client.delete("/v1/accounts/local/adapters/scipy").status_code == 200
            pieces += [_piece(next(lines), next(lines)) for _ in range(NEW - 1)]
        assert text(PROMPT, "scipy").startswith("".join(pieces)[: len(text(PROMPT, "scipy"))])
        wait_until(lambda: service.inside == (0, 0, 0))
        names = ["numpy", "torch", "base"] * 4
        answers = pool.map(lambda name: service.complete(name, PROMPT, NEW).json()["choices"][0]["text"], names)
        assert [*answers] == [text(PROMPT, None if name == "base" else name) for name in names]
        kept = {f"local/{name}/{writers[name].digest}" for name in ("numpy", "torch")}
        wait_until(lambda: not {*service.replica.engine.adapters} - kept)


def _piece(line, _):
    return json.loads(line.removeprefix("data: "))["choices"][0]["text"]


# Who goes before the end


@pytest.mark.parametrize("moment", ["in a stream", "before the first token", "in a whole answer"])
def test_a_client_that_goes_leaves_nothing_behind(exact, writers, tmp_path, asked, moment):
    store = GatedStore(tmp_path)
    with served(*exact, store) as service:
        assert service.upload("numpy", writers["numpy"]).status_code == 201
        if moment != "before the first token":
            store.gate.set()
        body = _long("numpy", stream=moment == "in a stream", prompt=["a", "b"])
        with asked(service, **body) as connection:
            if moment == "in a stream":
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            inside = (0, 2, 2) if moment == "before the first token" else (2, 0, 2)
            wait_until(lambda: service.inside == inside)
        wait_until(lambda: service.inside == (0, 0, 0))
        assert not service.replica._jobs
        assert not service.replica.engine._running
        assert "vllm:request_success_total{" not in service.client.get("/metrics").text  # none has come to its end
        store.gate.set()
        assert service.complete("numpy").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/accounts/local/adapters/mine"])
async def test_a_client_that_goes_within_its_body_is_no_error(path, base, tmp_path):
    """Or each would leave a traceback in the log."""
    kind = b"multipart/form-data; boundary=b" if "adapters" in path else b"application/json"
    headers = [(b"host", b"localhost"), (b"content-type", kind), (b"content-length", b"2000")]
    messages = [{"type": "http.request", "body": b"--b", "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = dict(type="http", method="POST", path=path, headers=headers, query_string=b"")
    await app(None, Store(tmp_path), *base, name="base")(scope, receive, send)
    assert sent[0]["status"] == 499
