"""Bodies that cost much, and requests that never finish: refused, charged to its account, and given back."""

import asyncio
import contextlib
import errno
import itertools
import json
import socket
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import pytest
from starlette.exceptions import HTTPException

from plpkg.adapters import CONFIG, WEIGHTS, AdapterLimits
from plpkg.serving.service.http import adapters, api, bodies, clients, intake
from plpkg.serving.service.http.accounts import Keys
from plpkg.serving.service.http.answers import merged
from plpkg.serving.service.http.intake import REQUEST_BYTES, Intake
from plpkg.serving.service.store import Store, StoreError

from served import served
from waiting import PATIENCE_S, wait_until

KEYS = {"ann": "a" * 16, "bob": "b" * 16}


def header(account):
    return {"Authorization": f"Bearer {KEYS[account]}"}


@pytest.fixture
def service(base, tmp_path, monkeypatch):
    """Of two accounts, each of which may hold little."""
    monkeypatch.setattr(api, "MAX_HELD", 8 * REQUEST_BYTES)
    keys = Keys(f"{account} {key}" for account, key in KEYS.items())
    with served(*base, Store(tmp_path), keys=keys, limits=AdapterLimits(max_bytes=2**14)) as service:
        yield service


# What a body costs


def repeated(item, head='"prompt": [', tail="]"):
    """A body of some 500 kB."""
    return f'{{"model": "base", {head}{",".join([item] * (2**19 // (len(item) + 1)))}{tail}}}'.encode()


TURN = '"messages": [{"role": "user", "content": ['
MANY = {
    "lists in lists": repeated("[" * 100 + "]" * 100),
    "objects": repeated("{}"),
    "numbers": repeated("0"),
    "nulls": repeated("null", head='"stop": ['),
    "escaped quotes": repeated('"\\""'),
    "keys": repeated('"a": 1', head='"metadata": {', tail="}"),
    "tools": repeated('{"type": "function"}', head='"tools": ['),
    "messages": repeated('{"role": "user", "content": "a"}', head='"messages": ['),
    "parts": repeated('{"type": "text", "text": "a"}', head=TURN, tail="]}]"),
    "too deep": repeated("[" * 2**18),
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_many_items_are_refused_at_once_and_in_few_words(service, monkeypatch, path):
    monkeypatch.setattr(intake, "PAUSE", 0)
    headers = header("ann") | {"Content-Type": "application/json"}
    for name, body in MANY.items():
        answer = service.client.post(f"/v1/{path}", content=body, headers=headers)
        assert answer.status_code in (400, 422), name
        assert len(answer.content) < 10_000, name
    assert status(service, "bob") == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "latin-1"])
def test_json_is_utf_8(encoding):
    body = json.dumps(dict(model="é", prompt=['"\\'] * 99), ensure_ascii=False).encode(encoding)
    with pytest.raises(intake.RequestValidationError, match="the body cannot be read"):
        intake.parsed(body, bodies.Completion)


def large(account="ann"):
    return dict(json=dict(model="base", prompt="a " * intake.SMALL), headers=header(account))


def test_after_a_body_its_account_waits_as_long_as_it_took_nine_times(service, monkeypatch):
    clock = itertools.count(step=0.02)
    monkeypatch.setattr(intake.time, "thread_time", lambda: next(clock))
    began = time.monotonic()
    for _ in range(3):
        assert service.client.post("/v1/completions", **large()).status_code == 400  # too long for the model
    assert time.monotonic() - began >= 2 * 9 * 0.02


def test_a_body_that_takes_too_long_is_given_up_and_keeps_its_turn(service, monkeypatch):
    go_on, parsed = threading.Event(), intake.parsed

    def slow(body, kind):
        go_on.wait(PATIENCE_S)
        return parsed(body, kind)

    monkeypatch.setattr(intake, "PARSE_S", 0.1)
    monkeypatch.setattr(intake, "parsed", slow)
    for _ in range(2):  # the second waits for the first one's turn
        answer = service.client.post("/v1/completions", **large())
        assert answer.status_code == 429
        assert "the account's bodies could not be read within 0.1 s" in answer.text
        assert status(service, "ann") == status(service, "bob") == 200
    go_on.set()
    monkeypatch.setattr(intake, "PARSE_S", PATIENCE_S)
    assert service.client.post("/v1/completions", **large()).status_code == 400


def test_a_turn_is_given_back_where_no_thread_can_be_started(service, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(intake.PARSER, "submit", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        assert service.client.post("/v1/completions", **large()).status_code == 500
    assert service.client.post("/v1/completions", **large()).status_code == 400


def test_the_body_of_a_client_that_has_gone_is_not_parsed(service, monkeypatch):
    begun, go_on, parsed = threading.Event(), threading.Event(), intake.parsed
    bodies, left = [], []

    def counted(body, kind):
        bodies.append(body)
        begun.set()
        go_on.wait(PATIENCE_S)
        return parsed(body, kind)

    async def unless_gone(call, work):
        try:
            return await clients.unless_gone(call, work)
        except HTTPException as error:
            left.append(error)
            raise

    monkeypatch.setattr(intake, "parsed", counted)
    monkeypatch.setattr(intake, "unless_gone", unless_gone)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(service.client.post, "/v1/completions", **large())
        assert begun.wait(PATIENCE_S)
        for _ in range(3):
            content = json.dumps(large()["json"]).encode()
            with unfinished(service, "ann", "/v1/completions", len(content)) as connection:
                connection.sendall(content)
        wait_until(lambda: len(left) == 3)
        go_on.set()
        assert first.result().status_code == 400
    assert service.client.post("/v1/completions", **large()).status_code == 400
    assert len(bodies) == 2


def test_nothing_is_left_of_a_refused_body_while_its_account_waits(service, monkeypatch):
    made, alive = [], []

    class Held(dict):
        """A dictionary that can be watched."""

    def loads(text):
        value = Held(json.loads(text))
        made.append(weakref.ref(value))
        return value

    async def sleep(_):
        alive.append(sum(each() is not None for each in made))

    monkeypatch.setattr(intake, "json", SimpleNamespace(loads=loads))
    monkeypatch.setattr(intake, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    for wrong in (dict(n=-1), dict(unheard_of=1), dict(model="nobody"), {}):  # the last is too long for the model
        body = large()["json"] | wrong
        assert service.client.post("/v1/completions", json=body, headers=header("ann")).status_code >= 400
    assert len(made) == 4
    assert alive == [0] * 4


def test_ids_that_no_model_takes_are_looked_at_once(service, monkeypatch):
    monkeypatch.setattr(service.replica.engine, "check", checked := mock.Mock())
    body = dict(model="base", prompt=[1] * 20_000, n=64)
    answer = service.client.post("/v1/completions", json=body, headers=header("ann"))
    assert (answer.status_code, "a prompt of 20,000 tokens" in answer.text) == (400, True)
    assert not checked.called


def test_an_accounts_bodies_are_parsed_one_at_a_time_and_nobody_elses_waits(service, monkeypatch):
    alone, begun, seen, parsed = threading.Lock(), threading.Event(), [], intake.parsed

    def slow(body, kind):
        mine = b"ann" in body
        seen.append(threading.current_thread().name)
        if mine:
            assert alone.acquire(blocking=False), "another is parsed"
            begun.set()
            time.sleep(0.1)
            alone.release()
        return parsed(body, kind)

    def ask(account):
        body = dict(model="base", prompt="a " * intake.SMALL, user=account)
        return service.client.post("/v1/completions", json=body, headers=header(account)).status_code

    monkeypatch.setattr(intake, "parsed", slow)
    with ThreadPoolExecutor(5) as threads:
        anns = [threads.submit(ask, "ann") for _ in range(4)]
        assert begun.wait(60)
        assert ask("bob") == 400  # too long for the model
        assert not all(each.done() for each in anns)
        assert [each.result() for each in anns] == [400] * 4
    assert not any("Thread-" in name and "asyncio" not in name for name in seen), "in the loop's thread"


def test_refusals_of_one_account_come_one_after_the_other(service, monkeypatch):
    monkeypatch.setattr(intake, "REFUSED_S", 0.05)
    bodies = [dict(model="nobody", prompt="a"), dict(model="base", prompt=[]), dict(model="base", prompt="a", n=-1)]
    began = time.monotonic()
    with ThreadPoolExecutor(6) as threads:
        ask = lambda body: service.client.post("/v1/completions", json=body, headers=header("ann")).status_code  # noqa: E731
        assert [*threads.map(ask, bodies * 2)] == [404, 422, 422] * 2
    assert time.monotonic() - began >= 6 * 0.05


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_is_not_json_is_told_in_one_sentence(service, kind):
    for path in ("/v1/completions", "/v1/chat/completions"):
        headers = header("ann") | {"Content-Type": kind}
        answer = service.client.post(path, content=b'{"model": "base", "prompt": "a"}', headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["reasons"] == [f"the body must be application/json, its Content-Type is {kind!r}"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_its_other_names(service, kind):
    body = b'\xef\xbb\xbf{"model": "base", "prompt": "a", "max_tokens": 1}'
    answer = service.client.post("/v1/completions", content=body, headers=header("ann") | {"Content-Type": kind})
    assert answer.status_code == 200


# What is never finished


@contextlib.contextmanager
def unfinished(service, account, path, length):
    """A request whose body does not come."""
    kind = "application/json" if "completions" in path else "multipart/form-data; boundary=x"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEYS[account]}"]
    lines += [f"Content-Type: {kind}", f"Content-Length: {length}", "", ""]
    with socket.create_connection(("127.0.0.1", urlsplit(service.url).port)) as connection:
        connection.sendall("\r\n".join(lines).encode())
        yield connection


def status(service, account, path="/v1/models"):
    return service.client.get(path, headers=header(account)).status_code


@pytest.mark.parametrize(("path", "length"), [("accounts/ann/adapters/mine", 2**14), ("completions", 2**19)])
def test_what_trickles_is_bounded_for_its_account_alone(service, path, length):
    with contextlib.ExitStack() as stack:
        for sent in [length] * 30 + [1] * 30:
            stack.enter_context(unfinished(service, "ann", f"/v1/{path}", sent))
        wait_until(lambda: status(service, "ann") == 429)
        answer = service.client.get("/v1/models", headers=header("ann"))
        assert "unfinished requests" in answer.json()["error"]["message"]
        assert int(answer.headers["Retry-After"]) >= 1
        assert status(service, "bob") == 200
    wait_until(lambda: status(service, "ann") == 200)


def test_answers_that_nobody_reads_are_bounded(service):
    body = dict(model="base", prompt=["a"] * 4, max_tokens=1000, temperature=0, stream=True)
    with contextlib.ExitStack() as stack:
        answers = [
            stack.enter_context(service.client.stream("POST", "/v1/completions", json=body, headers=header("ann")))
            for _ in range(4)
        ]
        assert [each.status_code for each in answers] == [200, 429, 429, 429]
        assert status(service, "bob") == 200
    wait_until(lambda: service.inside == (0, 0, 0))
    wait_until(lambda: service.complete("base", tokens=1, stream=False).status_code == 401)


async def test_a_stream_that_is_not_read_is_not_asked_for_more():
    asked = []

    async def stream():
        for k in range(1000):
            asked.append(k)
            yield k

    pieces = merged([stream(), stream()])
    await anext(pieces)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(asked) < 50
    assert len([each async for each in pieces]) == 1999
    await pieces.aclose()


@pytest.mark.parametrize("end", ["answered", "fails", "cancelled", "too much in chunks"])
async def test_what_was_held_is_given_back_however_a_request_ends(end):
    async def inner(scope, receive, send):
        scope["state"]["hold"](100)
        assert door.held == {"ann": REQUEST_BYTES + 107}
        if end == "fails":
            raise OSError("no more")
        if end == "cancelled":
            raise asyncio.CancelledError
        while end == "too much in chunks":
            await receive()

    async def receive():
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    door = Intake(inner, REQUEST_BYTES + 5000)
    scope = {"type": "http", "headers": [(b"content-length", b"0" * 5000 + b"7")], "state": {"account": "ann"}}
    errors = (OSError, asyncio.CancelledError, intake.OverloadedError)
    with contextlib.nullcontext() if end == "answered" else pytest.raises(errors):
        await door(scope, receive, None)
    assert not +door.held


# What the operating system says

LACKING = [(OSError(errno.ENOSPC, "/secret"), 507), (OSError(errno.EDQUOT, "/secret"), 507)]
LACKING += [(OSError(code, "/secret"), 503) for code in (errno.EMFILE, errno.EIO, errno.ENOMEM, errno.EACCES)]
LACKING += [(FULL_STORE := StoreError("/secret"), 507)]
FULL_STORE.errno = errno.ENOSPC
LACKING += [(PermissionError("/secret"), 503), (MemoryError("/secret"), 503), (TimeoutError("/secret"), 503)]


@pytest.mark.parametrize(
    "place", ["the body is parsed", "an upload is kept", "an upload is read", "the store is asked"]
)
def test_what_the_service_lacks_is_an_error_in_json(service, monkeypatch, place):
    owner, name = {
        "the body is parsed": (intake, "parsed"),
        "an upload is kept": (tempfile.SpooledTemporaryFile, "write"),
        "an upload is read": (adapters, "read_adapter"),
        "the store is asked": (Store, "current"),
    }[place]
    path, asked = "completions", dict(json=dict(model="mine", prompt="a"))
    if "upload" in place:
        path = "accounts/ann/adapters/mine"
        asked = dict(files={part: (part, b"{}") for part in (CONFIG, WEIGHTS)})
    for error, expected in LACKING:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mock.Mock(side_effect=error))
            answer = service.client.post(f"/v1/{path}", headers=header("ann"), **asked)
        told = answer.json()["error"]
        assert (answer.status_code, told["code"], told["type"]) == (expected, expected, "server_error"), error
        assert "secret" not in answer.text
        assert status(service, "ann") == 200
