"""What strangers with a key, and operators in a hurry, did to the service once."""

import asyncio
import copy
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from pydantic import ValidationError
from typer.testing import CliRunner

from plpkg.adapters import read_adapter
from plpkg.cli import app as cli
from plpkg.serving.service.http import api, bodies
from plpkg.serving.service.http.answers import _may_become
from plpkg.serving.service.http.door import MAX_BODY_BYTES, Door
from plpkg.serving.service.http.listener import Listener
from plpkg.serving.service.store import NotFoundError, Store
from plpkg.serving.service.tiers import Disk

from served import served
from waiting import wait_until


@pytest.fixture(scope="module")
def service(base, tmp_path_factory):
    with served(*base, Store(tmp_path_factory.mktemp("store"))) as service:
        yield service


def test_a_folder_for_downloads_may_hold_what_is_no_adapter(tmp_path, writers):
    papers, dead = tmp_path / "documents/letters/2025/one.txt", tmp_path / f"local/mine/{'0' * 64}/half"
    for each in (papers, dead):
        each.parent.mkdir(parents=True)
        each.write_text("text")
    disk = Disk(tmp_path, num_bytes=writers["numpy"].num_bytes)
    assert papers.exists()
    assert not dead.exists()
    for each in ("numpy", "torch"):  # one has to go
        disk.write(f"local/mine/{writers[each].digest}", writers[each])
    assert papers.exists()
    assert len([*tmp_path.glob("local/mine/*")]) == 1


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


def test_a_long_stop_string_costs_no_more_than_the_text(service):
    class Counted(str):
        slices = 0

        def __getitem__(self, key):
            Counted.slices += 1
            return str(self)[key]

    assert _may_become("text ab", [Counted("abc" * 1000)]) == 2
    assert Counted.slices <= len("text ab")
    assert service.complete("base", stop="x" * 1001).status_code == 422


def test_null_is_what_was_not_said(service):
    with service.openai() as client:
        unsaid = dict.fromkeys(("n", "stream", "temperature", "top_p", "best_of", "echo", "presence_penalty", "stop"))
        texts = [
            client.completions.create(model="base", prompt="import", max_tokens=8, seed=1, **each).choices[0].text
            for each in (unsaid, {})
        ]
    assert texts[0] == texts[1]
    response = service.client.post("/v1/completions", json=dict(model="base", prompt="a", tools=None))
    assert response.status_code == 422  # a field that is not served, whatever it holds
    assert "tools" in response.json()["error"]["message"]


def test_an_answers_number_does_not_count_everybodys(service):
    first, second = (service.complete("base", tokens=1).json()["id"] for _ in range(2))
    assert re.fullmatch("cmpl-[0-9a-f]{24}", first)
    assert first != second


@pytest.mark.parametrize(
    ("length", "status"),
    [
        (f"{'0' * 30}{MAX_BODY_BYTES}", 204),
        (f"{'0' * 30}{MAX_BODY_BYTES + 1}", 413),
        ("9" * 5000, 413),
        ("0" * 30, 204),
    ],
)
def test_a_length_with_zeros_before_it(length, status):
    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 204})

    async def statuses():
        sent, headers = [], [(b"host", b"localhost"), (b"content-length", length.encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

        async def send(message):
            sent.append(message)

        await Door(inner, None, 0)(scope, None, send)
        return sent[0]["status"]

    assert asyncio.run(statuses()) == status


def test_an_accounts_uploads_are_in_memory_one_at_a_time(service, writers, monkeypatch):
    now, most, lock = 0, 0, threading.Lock()

    def slow(*arguments):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.1)
        with lock:
            now -= 1
        return read_adapter(*arguments)

    monkeypatch.setattr(api, "read_adapter", slow)
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(lambda name: service.upload(name, writers["numpy"]).status_code, "abcdef"))
    assert made == [201] * 6
    assert most == 1


def test_a_model_that_does_not_say_how_long_a_text_may_be(base, tmp_path):
    class Backend:
        async def stream(self, path, request):
            self.request = request
            yield 0, "length"

    async def post(application):
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json=dict(model="base", prompt=[1, 2]))

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    backend = Backend()
    application = api.app(backend, Store(tmp_path), SimpleNamespace(config=config), base[1], name="base")
    assert asyncio.run(post(application)).status_code == 200
    assert backend.request.max_new_tokens == api.COMPLETION_TOKENS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--store", "s3://"], "s3://"),
        (["--store", "nowhere://x"], "nowhere://x"),
        (["--store", "FILE"], "FILE"),
        (["--store", "FOLDER", "--disk", "FOLDER"], "is the store"),
        (["--adapter", "FOLDER", "--model", "folder"], "the model's name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_do_harm_are_refused_by_name(arguments, said, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    places = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path / "folder")}
    for name, value in dict(COLUMNS="400", TERM="dumb", PLPKG_KEYS="").items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(
        cli, ["serve", "--listen", "127.0.0.1:0", *(places.get(each, each) for each in arguments)]
    )
    assert result.exit_code == 2, result.output
    assert places.get(said, said) in result.output


class Held(Store):
    """Answers a read of a current version, once it has been read, when ``gate`` is set."""

    gate, reading, has_read = None, 0, False

    async def _range(self, path, end):
        self.reading += 1
        try:
            result = await super()._range(path, end)
            self.has_read = True
            await self.gate.wait()
            return result
        finally:
            self.reading -= 1


@pytest.mark.parametrize("then", ["uploaded", "deleted"])
def test_what_was_read_before_a_write_is_not_current(then, tmp_path, writers):
    async def test():
        store = Held(tmp_path)
        await store.put("local", "mine", writers["numpy"])
        store._current.clear()  # as after refresh_s
        store.gate = asyncio.Event()
        slow = asyncio.create_task(store.current("local", "mine"))
        while not store.has_read:
            await asyncio.sleep(0.001)
        if then == "uploaded":
            await store.put("local", "mine", writers["torch"])
        else:
            await store.delete("local", "mine")
        store.gate.set()
        await slow
        if then == "uploaded":
            assert await store.current("local", "mine") == writers["torch"].digest
        else:
            with pytest.raises(NotFoundError):
                await store.current("local", "mine")

    asyncio.run(test())


def test_who_goes_while_the_store_hangs_leaves_no_question(base, tmp_path):
    store = Held(tmp_path)
    store.gate = asyncio.Event()  # never set
    (tmp_path / "local/mine").mkdir(parents=True)
    (tmp_path / "local/mine/current").write_text("0" * 64)
    with served(*base, store) as service:
        with pytest.raises(httpx.ReadTimeout):
            service.client.post("/v1/completions", json=dict(model="mine", prompt="a"), timeout=0.5)
        wait_until(lambda: not store.reading)


def test_a_text_that_cannot_fit_is_not_split_into_tokens(base, tmp_path, monkeypatch):
    tokenizer = copy.deepcopy(base[1])
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    most = base[0].config.max_position_embeddings * max(map(len, tokenizer.get_vocab()))
    with served(base[0], tokenizer, Store(tmp_path)) as service:
        split = []
        kind = type(tokenizer)
        monkeypatch.setattr(kind, "__call__", lambda *arguments, **options: split.append(arguments))
        monkeypatch.setattr(kind, "apply_chat_template", lambda *arguments, **options: split.append(arguments))
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
    assert chosen == ["h11", "h11"]
