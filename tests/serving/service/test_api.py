"""What OpenAI's client gets: the engine's own answers as text, whole and in streams, or an error; never another's."""

import asyncio
import copy
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from hypothesis import given, settings, strategies as st

from plpkg.adapters import CONFIG, WEIGHTS
from plpkg.serving.engine import Engine
from plpkg.serving.requests import Request
from plpkg.serving.service.http.answers import texts
from plpkg.serving.service.http.api import app
from plpkg.serving.service.http.listener import Listener
from plpkg.serving.service.http.metrics import Metrics
from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.store import Store

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


def versioned(service, name):
    return service.client.get(f"/v1/accounts/local/adapters/{name}").json()["version"]


# What is answered


@pytest.mark.parametrize("way", ["base", "name", "version", "lora"])
def test_the_text_is_the_engines_whole_and_in_a_stream(service, client, text, way):
    adapter = None if way == "base" else "numpy"
    fields = dict(model={"name": "numpy", "version": f"numpy@{versioned(service, 'numpy')}"}.get(way, "base"))
    fields |= dict(extra_body={"lora": "numpy"}) if way == "lora" else {}
    fields |= dict(prompt=PROMPT, max_tokens=NEW, temperature=0)
    whole = client.completions.create(**fields)
    assert whole.choices[0].text == text(PROMPT, adapter)
    assert (way == "base") == (whole.choices[0].text == text(PROMPT))  # the adapter makes a difference here
    assert whole.choices[0].finish_reason == "length"
    assert whole.model == fields["model"]
    events = [*client.completions.create(**fields, stream=True)]
    assert "".join(each.choices[0].text for each in events) == whole.choices[0].text
    assert [each.choices[0].finish_reason for each in events] == [None] * (len(events) - 1) + ["length"]
    assert len(events) > NEW // 2  # it comes as it is written
    assert len({each.id for each in events}) == 1


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
    for given_as in (prompts, [exact[1](each)["input_ids"] for each in prompts]):
        fields = dict(model="torch", prompt=given_as, max_tokens=NEW, temperature=0)
        whole = client.completions.create(**fields)
        assert [each.index for each in whole.choices] == [0, 1, 2]
        assert [each.text for each in whole.choices] == [text(each, "torch") for each in prompts]
        assert whole.usage.completion_tokens == 3 * NEW
        assert whole.usage.prompt_tokens == sum(len(exact[1](each)["input_ids"]) for each in prompts)
        written = ["", "", ""]
        for event in client.completions.create(**fields, stream=True):
            written[event.choices[0].index] += event.choices[0].text
        assert written == [each.text for each in whole.choices]
    ids = exact[1](PROMPT)["input_ids"]
    one = client.completions.create(model="base", prompt=ids, max_tokens=NEW, temperature=0)
    assert one.choices[0].text == text(PROMPT)


def test_stop_strings_are_left_out_also_where_they_span_tokens(client, text, expected, exact):
    tokens = [exact[1].decode([each]) for each in expected(PROMPT)]
    at = next(n for n in range(2, NEW) if len(tokens[n]) > 1)
    stops = {"within a token": tokens[at][1:], "across tokens": tokens[at - 1][-1] + tokens[at][:-1]}
    for stop in stops.values():
        kept = text(PROMPT)[: text(PROMPT).index(stop)]
        fields = dict(model="base", prompt=PROMPT, max_tokens=NEW, temperature=0)
        for given_as in (stop, ["never written", stop]):
            whole = client.completions.create(**fields, stop=given_as)
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == (kept, "stop")
            assert whole.usage.completion_tokens < NEW
            events = [*client.completions.create(**fields, stop=given_as, stream=True)]
            assert "".join(each.choices[0].text for each in events) == kept
            assert events[-1].choices[0].finish_reason == "stop"


def test_samples_are_those_of_their_seed(client, text):
    def sample(seed):
        fields = dict(model="numpy", prompt=PROMPT, max_tokens=NEW, temperature=1.2, top_p=0.95, seed=seed)
        return client.completions.create(**fields).choices[0].text

    seeds = [3, 4, 5]
    samples = [sample(seed) for seed in seeds]
    assert samples == [text(PROMPT, "numpy", temperature=1.2, top_p=0.95, seed=seed) for seed in seeds]
    assert len(set(samples)) > 1
    unseeded = {client.completions.create(model="base", prompt=PROMPT, max_tokens=NEW).choices[0].text for _ in "123"}
    assert len(unseeded) > 1  # temperature is 1, and each draws a seed


def test_usage_comes_last_in_a_stream_that_asks_for_it(client, exact):
    fields = dict(model="base", prompt=PROMPT, max_tokens=5, temperature=0, stream=True)
    *events, last = client.completions.create(**fields, stream_options=dict(include_usage=True))
    prompt = len(exact[1](PROMPT)["input_ids"])
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (prompt, 5, prompt + 5)
    assert all(each.usage is None for each in events)
    assert all(each.usage is None for each in client.completions.create(**fields))


def test_how_much_is_written_where_a_request_does_not_say(client, exact):
    fields = dict(model="base", temperature=0)
    assert client.completions.create(prompt=PROMPT, **fields).usage.completion_tokens == 16
    positions = exact[0].config.max_position_embeddings
    nearly = [9] * (positions - 3)
    assert client.completions.create(prompt=nearly, **fields).usage.completion_tokens == 3
    turns = [dict(role="user", content="a")]
    for name in ("max_tokens", "max_completion_tokens"):
        assert client.chat.completions.create(messages=turns, **{name: 4}, **fields).usage.completion_tokens == 4
    long = client.chat.completions.create(messages=[dict(role="user", content="a " * (positions - 40))], **fields)
    assert long.usage.total_tokens == positions


def test_models_are_listed_and_found(service, client):
    assert sorted(each.id for each in client.models.list()) == ["base", "numpy", "scipy", "torch"]
    version = versioned(service, "numpy")
    assert client.models.retrieve("numpy").root == version
    assert client.models.retrieve(f"numpy@{version}").id == f"numpy@{version}"
    assert client.models.retrieve("base").parent is None
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("pandas")


# What is refused


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
        (dict(prompt=""), 422, "prompt"),
        (dict(prompt=[9999999]), 400, "vocab"),
        (dict(prompt=["a"] * 65), 422, "prompt"),
        (dict(prompt=[]), 422, "prompt"),
        (dict(max_tokens=0), 422, "max_tokens"),
        (dict(temperature=-1), 422, "temperature"),
        (dict(top_p=0), 422, "top_p"),
        (dict(logprobs=3), 422, "logprobs"),
        (dict(n=2), 422, "n:"),
        (dict(suffix="a"), 422, "suffix"),
        (dict(stop=[""]), 422, "stop"),
        (dict(tools=[]), 422, "tools"),
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
    wait_until(lambda: service.inside == (0, 0, 0))


def test_a_prompt_that_cannot_be_served_ends_those_beside_it(service):
    response = service.client.post("/v1/completions", json=dict(model="numpy", prompt=[[9], [9999999]], max_tokens=500))
    assert response.status_code == 400
    wait_until(lambda: service.inside == (0, 0, 0))


def test_a_chat_needs_a_template_and_turns_that_it_has(service, exact, tmp_path):
    refusing = copy.deepcopy(exact[1])
    refusing.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('who asks?') }}{% endif %}"
    for tokenizer, said in ((refusing, "who asks?"), (_without_template(exact[1]), "no chat template")):
        with Listener(app(Scripted([]), Store(tmp_path), exact[0], tokenizer, name="base")) as listener:
            body = dict(model="base", messages=[dict(role="system", content="a")])
            response = httpx.post(f"{listener.address}/v1/chat/completions", json=body)
            assert (response.status_code, said in response.text) == (400, True)


def _without_template(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    return bare


def test_a_full_account_and_an_overloaded_service_say_so(exact, writers, tmp_path):
    scheduler = Scheduler(slots=1, places=1, max_queued=1)
    with (
        served(*exact, Store(tmp_path, max_versions=1), scheduler=scheduler) as service,
        ThreadPoolExecutor(2) as pool,
    ):
        assert service.upload("numpy", writers["numpy"]).status_code == 201
        full = service.upload("torch", writers["torch"])
        assert (full.status_code, "1 versions" in full.text) == (409, True)
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


def test_a_store_that_does_not_answer_is_503_without_its_address(exact, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings = dict(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ALLOW_HTTP="true", AWS_REGION="us-east-1")
    for name, value in (settings | dict(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")).items():
        monkeypatch.setenv(name, value)
    with served(*exact, Store("s3://adapters/of-all", timeout_s=1)) as service:
        for response in (
            service.complete("numpy"),
            service.client.get("/v1/models"),
            service.client.get("/v1/accounts/local/adapters"),
            service.client.delete("/v1/accounts/local/adapters/numpy"),
        ):
            assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
            assert "Retry-After" in response.headers
            assert not any(told in response.text for told in (str(port), "s3", "of-all", "127.0.0.1"))
        assert service.complete("base").status_code == 200  # which needs no store


def test_a_body_is_refused_before_it_is_read(service):
    def answer(*headers, path="/v1/completions"):
        with socket.create_connection(("127.0.0.1", httpx.URL(service.url).port), timeout=20) as connection:
            lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", "")
            connection.sendall("\r\n".join(lines).encode())  # and no body, for which nobody waits
            return int(connection.makefile().readline().split()[1])

    assert answer(f"Content-Length: {2**22 + 1}") == 413
    assert answer(f"Content-Length: {10**30}") in (400, 413)
    assert answer(f"Content-Length: {2**32}", path="/v1/accounts/local/adapters/a") == 413
    assert answer() == 411
    assert answer("Transfer-Encoding: chunked") == 411


@pytest.mark.parametrize("headers", [{"Origin": "https://example.org"}, {"Host": "example.org"}, {"Origin": "null"}])
def test_without_keys_no_page_in_a_browser_gets_in(service, headers):
    for path in ("/v1/models", "/metrics", "/v1/accounts/local/adapters"):
        assert service.client.get(path, headers=headers).status_code == 403


# Adapters come and go


def test_an_upload_is_served_at_once_and_its_versions_stay(service, client, writers, text):
    made = [service.upload("mine", writers[name]) for name in ("peft", "pandas")]
    assert [each.status_code for each in made] == [201, 201]
    versions = [each.json()["version"] for each in made]
    assert versions == [writers[name].digest for name in ("peft", "pandas")]
    assert made[0].json() == dict(id="mine", version=versions[0], rank=8, bytes=writers["peft"].num_bytes)
    fields = dict(prompt=PROMPT, max_tokens=NEW, temperature=0)
    answers = [
        client.completions.create(model=model, **fields).choices[0].text for model in ("mine", f"mine@{versions[0]}")
    ]
    assert answers == [text(PROMPT, "pandas"), text(PROMPT, "peft")]
    assert answers[0] != answers[1]
    listed = service.client.get("/v1/accounts/local/adapters").json()["data"]
    assert dict(id="mine", version=versions[1], versions=versions) in listed
    assert service.client.delete("/v1/accounts/local/adapters/mine").json() == dict(id="mine", deleted=True)
    for gone in ("mine", f"mine@{versions[0]}"):
        assert service.complete(gone).status_code == 404
    assert service.client.delete("/v1/accounts/local/adapters/mine").status_code == 404
    assert "mine" not in [each.id for each in client.models.list()]
    assert versions[0] not in service.replica.engine.adapters


def test_a_bad_upload_is_told_every_reason(service, writers):
    good = {part: bytes(writers["numpy"].files[part]) for part in (CONFIG, WEIGHTS)}
    config = json.loads(good[CONFIG]) | dict(use_dora=True, lora_alpha=-1)

    def post(files, name="bad", **options):
        return service.client.post(f"/v1/accounts/local/adapters/{name}", files=files, **options)

    response = post({CONFIG: (CONFIG, json.dumps(config)), WEIGHTS: (WEIGHTS, good[WEIGHTS][:-10])})
    assert response.status_code == 422
    reasons = response.json()["error"]["reasons"]
    assert all(any(word in each for each in reasons) for word in ("use_dora", "lora_alpha", "bytes"))
    assert response.json()["error"]["message"] == "; ".join(reasons)
    wrong = [
        {CONFIG: (CONFIG, good[CONFIG])},
        {part: (part, content) for part, content in good.items()} | dict(third=("third", b"")),
        {"config": (CONFIG, good[CONFIG]), WEIGHTS: (WEIGHTS, good[WEIGHTS])},
        {CONFIG: (None, good[CONFIG]), WEIGHTS: (WEIGHTS, good[WEIGHTS])},  # a field, not a file
        [(CONFIG, (CONFIG, good[CONFIG])), (CONFIG, (CONFIG, good[CONFIG]))],
    ]
    for files in wrong:
        assert post(files).status_code in (400, 422), files
    path = "/v1/accounts/local/adapters/bad"
    assert service.client.post(path, json={}).status_code == 422
    assert service.client.post(path).status_code == 422
    malformed = service.client.post(path, content=b"--x\r\nnonsense", headers={"Content-Type": "multipart/form-data"})
    assert malformed.status_code in (400, 422)
    for name in ("base", "-a", "a" * 65, "a@b", "%2e%2e"):
        assert post({part: (part, content) for part, content in good.items()}, name=name).status_code in (400, 404, 405)
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
        wait_until(
            lambda: not {*service.replica.engine.adapters} - {_path(name, writers) for name in ("numpy", "torch")}
        )


def _path(name, writers):
    return f"local/{name}/{writers[name].digest}"


def _piece(line, _):
    return json.loads(line.removeprefix("data: "))["choices"][0]["text"]


# Who goes before the end


@pytest.mark.parametrize("moment", ["in a stream", "before the first token", "in a whole answer"])
def test_a_client_that_goes_leaves_nothing_behind(exact, writers, tmp_path, moment):
    store = GatedStore(tmp_path)
    with served(*exact, store) as service:
        assert service.upload("numpy", writers["numpy"]).status_code == 201
        if moment != "before the first token":
            store.gate.set()
        body = json.dumps(_long("numpy", stream=moment == "in a stream", prompt=["a", "b"])).encode()
        with socket.create_connection(("127.0.0.1", httpx.URL(service.url).port)) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
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


# How tokens become text


class Scripted:
    """In the place of a replica: what it writes is given."""

    def __init__(self, ids):
        self.ids = ids

    async def stream(self, path, request):
        for n, token in enumerate(self.ids, 1):
            yield token, "length" if n == len(self.ids) else None

    async def close(self):
        pass


def spoken(tokenizer, prompt, ids, stop=()):
    """What :func:`texts` makes of ids after a prompt's."""

    async def pieces():
        request = Request(prompt, stop=stop)
        return [each async for each in texts(Scripted(ids).stream(None, request), request, tokenizer, METRICS)]

    return asyncio.run(pieces())


METRICS = Metrics()
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=150)
@given(text=UNICODE, prompt=UNICODE)
def test_characters_come_whole_whatever_tokens_they_span(base, text, prompt):
    tokenizer = base[1]
    ids, before = tokenizer(text)["input_ids"], tokenizer(prompt)["input_ids"]
    pieces = [piece for piece, _ in spoken(tokenizer, before, ids)]
    assert "".join(pieces) == text.rstrip("\ufffd")  # which cannot be told from a character's beginning


def test_characters_that_span_tokens_come_whole_in_a_stream(exact, tmp_path):
    model, tokenizer = exact
    ids = tokenizer("naïve 🙂🙃 ümlaut 漢字")["input_ids"]
    assert len(ids) > len("naïve 🙂🙃 ümlaut 漢字")
    backend = Scripted(ids)
    with (
        Listener(app(backend, Store(tmp_path), model, tokenizer, name="base")) as listener,
        openai.OpenAI(base_url=f"{listener.address}/v1", api_key="none", max_retries=0) as client,
    ):
        events = [*client.completions.create(model="base", prompt="a", stream=True)]
    pieces = [each.choices[0].text for each in events]
    assert "".join(pieces) == "naïve 🙂🙃 ümlaut 漢字"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("prompt", ["abc \ufffd", "abc \ufffd\ufffd", "é"])
def test_no_prompt_is_taken_for_a_part_of_the_answer(base, prompt):
    """Also one that ends in a replacement character, or in half of one."""
    tokenizer = base[1]
    before = tokenizer(prompt)["input_ids"]
    half = tokenizer("🙂")["input_ids"][:-1]
    for ids in (before, before + half):
        assert "".join(piece for piece, _ in spoken(tokenizer, ids, tokenizer(" foo bar")["input_ids"])) == " foo bar"


@settings(max_examples=150)
@given(data=st.data())
def test_any_tokens_make_text(base, data):
    """Also those that a random model writes: halves of characters, and ids that the tokenizer has not."""
    tokenizer = base[1]
    token = st.integers(0, 260) | st.integers(0, len(tokenizer) + 5)
    before, ids = data.draw(st.lists(token, min_size=1, max_size=5)), data.draw(st.lists(token, min_size=1, max_size=9))
    pieces = spoken(tokenizer, before, ids)
    assert [reason for _, reason in pieces] == [None] * (len(ids) - 1) + ["length"]
    text, alone = "".join(piece for piece, _ in pieces), tokenizer.decode(ids, skip_special_tokens=True)
    assert alone.startswith(text)
    assert alone == text or alone.endswith("\ufffd")  # a character that was never finished is left out


@settings(max_examples=200)
@given(
    text=st.text("abc", min_size=1, max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_text_ends_before_its_first_stop_string(base, text, stop):
    ids = base[1](text)["input_ids"]
    pieces = spoken(base[1], [9], ids, stop)
    # The first that is complete when a token has come; of those, the one that begins first
    written, kept, reason = "", text, "length"
    for token in ids:
        written += base[1].decode([token])
        if ends := [written.find(each) for each in stop if each in written]:
            kept, reason = written[: min(ends)], "stop"
            break
    assert ("".join(piece for piece, _ in pieces), pieces[-1][1]) == (kept, reason)
