"""A store that fails, through a proxy that this file breaks, and a service that is killed: nothing half-visible."""

import asyncio
import contextlib
import functools
import http.client
import http.server
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import obstore
import pytest

from plpkg.adapters import CONFIG, WEIGHTS, AdapterLimits, InvalidAdapterError, validate_adapter
from plpkg.serving.service.store import START_BYTES, UNFINISHED, NotFoundError, Store, StoreError
from plpkg.serving.service.tiers import Disk, Tiers

from preloaded import Process
from waiting import PATIENCE_S, line_of, until, wait_until


@dataclass
class Fault:
    """What happens to requests of a method whose path contains a text, ``times`` times.

    ``before`` is called first; then ``status`` is answered, or the server's answer, of which ``cut`` bytes are sent,
    then ``after`` is called, and the connection closed.
    """

    method: str
    text: str
    ranged: bool | None = None
    before: object = None
    status: int | None = None
    cut: int | None = None
    after: object = None
    times: float = float("inf")
    used: int = 0


class Proxy(http.server.ThreadingHTTPServer):
    """Between the store and a server."""

    daemon_threads, block_on_close = True, False

    def __init__(self, endpoint):
        self.upstream, self.faults, self.sent = urlsplit(endpoint).netloc, [], []
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method, path, ranged):
        for each in self.faults:
            if each.method == method and each.text in path and each.ranged in (None, ranged) and each.times > 0:
                each.times, each.used = each.times - 1, each.used + 1
                return each
        return None

    def handle_error(self, request, client_address):
        """A broken connection is what this is for."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing."""

    def handle_one(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path, "Range" in self.headers) or Fault("", "")
        if fault.before:
            fault.before()
        if fault.status:
            self.send_response(fault.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=PATIENCE_S)
        upstream.request(self.command, self.path, body, dict(self.headers) | {"Connection": "close"})
        answer = upstream.getresponse()
        content = answer.read()[: fault.cut]
        upstream.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "date", "server", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        self.server.sent.append((self.command, self.path, len(content)))
        self.wfile.write(content)
        if fault.after:
            fault.after()
        if fault.cut is not None:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815 (the standard library names them)


@pytest.fixture
def proxy(s3):
    server = Proxy(s3.endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def stores(proxy, url, monkeypatch):
    """The same store directly and through the proxy."""
    direct = Store(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return direct, Store(url, timeout_s=0.5, refresh_s=0)


@pytest.fixture
def gate():
    """Who waits for it is let go at the end at the latest, its connection without an answer."""
    event, passed = threading.Event(), []

    def wait():
        passed.append(True)
        event.wait()
        raise ConnectionAbortedError

    wait.passed, wait.open = passed, event.set
    yield wait
    event.set()


async def take(tiers, path):
    async with tiers.lease(path) as adapter:
        return adapter


def finished(tiers, path):
    assert (dict(tiers.leases), tiers._flights) == ({}, {})
    assert path not in tiers.host
    assert not (tiers.disk.folder / path).exists()


def cut_off(cut):
    """The header goes through; the rest is cut, and what is asked for again gets nothing."""
    return [Fault("GET", WEIGHTS, True, times=1), Fault("GET", WEIGHTS, False, cut=cut), Fault("GET", WEIGHTS, cut=0)]


# By name: the faults of the proxy, how it ends, and with which words.
FAULTS = {
    "no weights": ([Fault("GET", WEIGHTS, status=404)], NotFoundError, "no such version"),
    "no weights at last": ([Fault("GET", WEIGHTS, False, status=404)], NotFoundError, "no such version"),
    "errors": ([Fault("GET", CONFIG, status=500)], StoreError, "does not answer"),
    "overload": ([Fault("GET", WEIGHTS, False, status=503)], StoreError, "does not answer"),
    "refused": ([Fault("GET", CONFIG, status=403)], StoreError, "does not answer"),
    "cut": (cut_off(50_000), StoreError, "does not answer"),
    "cut at the end": (cut_off(168_975), StoreError, "does not answer"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_download_that_fails(name, stores, proxy, base, writers, tmp_path):
    """What is wrong in the store itself is in ``test_store.py``."""
    (faults, kind, words), (direct, store) = FAULTS[name], stores
    bad, good = [f"alice/{each}/{await direct.put('alice', each, writers[each])}" for each in ("numpy", "torch")]
    proxy.faults = [Fault(**vars(each) | dict(text=f"{bad}/{each.text}")) for each in faults]
    tiers = Tiers(store, base[0], disk=Disk(tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        first, other, second = await asyncio.gather(
            *(take(tiers, path) for path in (bad, good, bad)), return_exceptions=True
        )
    assert other.files == writers["torch"].files
    for error in (first, second):
        assert type(error) is kind
        assert words in str(error)
    finished(tiers, bad)
    assert (tmp_path / good).exists()
    assert all(each.used for each in proxy.faults)


async def test_a_body_that_breaks_off_once_is_taken_up(stores, proxy, base, writers):
    direct, store = stores
    path = f"alice/a/{await direct.put('alice', 'a', writers['numpy'])}"
    proxy.faults = [Fault("GET", WEIGHTS, ranged=False, cut=50_000, times=1)]
    assert (await take(Tiers(store, base[0]), path)).files == writers["numpy"].files
    assert proxy.faults[0].used == 1


@pytest.mark.parametrize("ranged", [True, False])
async def test_a_server_that_freezes(ranged, stores, proxy, gate, base, writers, tmp_path):
    """It ends in bounded time, and who needs another adapter does not wait for it."""
    direct, store = stores
    bad, good = [f"alice/{each}/{await direct.put('alice', each, writers[each])}" for each in ("numpy", "torch")]
    proxy.faults = [Fault("GET", f"{bad}/{WEIGHTS}", ranged=ranged, before=gate)]
    tiers = Tiers(store, base[0], disk=Disk(tmp_path), downloads=2)
    frozen = asyncio.create_task(take(tiers, bad))
    await until(lambda: gate.passed)
    await take(tiers, good)
    assert not frozen.done()
    with pytest.raises(StoreError, match="does not answer"):
        await asyncio.wait_for(frozen, PATIENCE_S)
    finished(tiers, bad)
    assert len(gate.passed) <= 3


@pytest.mark.parametrize(("longer", "reason"), [(0, "not the version that it was stored as"), (1000, "bytes, at most")])
async def test_an_object_that_changes_while_it_is_read(longer, reason, stores, proxy, base, writers, tmp_path):
    """Between the range read and the download: another adapter's weights, in whole or more of them."""
    direct, store = stores
    path = f"alice/a/{await direct.put('alice', 'a', writers['numpy'])}"
    other = bytes(writers["torch"].files[WEIGHTS]) + b"\0" * longer
    change = functools.partial(obstore.put, direct._objects, f"{path}/{WEIGHTS}", other)
    proxy.faults = [Fault("GET", WEIGHTS, ranged=False, before=change)]
    tiers = Tiers(store, base[0], disk=Disk(tmp_path))
    with pytest.raises(InvalidAdapterError, match=reason):
        await take(tiers, path)
    assert proxy.faults[0].used == 1
    finished(tiers, path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (CONFIG, lambda old: old.replace(b'"LORA"', b'"LOHA"')),
        (WEIGHTS, lambda old: old.replace(b"layers.0.", b"layers.9.")),
        (WEIGHTS, lambda old: old + b"\0" * 200_000),
        (WEIGHTS, lambda old: b"\xff" * 8 + old[8:]),
    ],
)
async def test_what_is_wrong_in_the_header_is_not_downloaded(name, change, stores, proxy, base, writers):
    """By the bytes that the server has sent: of the weights never more than the first read."""
    direct, store = stores
    path, content = f"alice/a/{await direct.put('alice', 'a', writers['numpy'])}", bytes(writers["numpy"].files[name])
    assert change(content) != content
    obstore.put(direct._objects, f"{path}/{name}", change(content))
    with pytest.raises(InvalidAdapterError):
        await store.fetch(path, base[0], AdapterLimits(max_bytes=300_000))
    sent = [count for method, where, count in proxy.sent if where.endswith(WEIGHTS)]
    assert sum(sent) <= START_BYTES < len(writers["numpy"].files[WEIGHTS])
    assert sum(count for *_, count in proxy.sent) > 0


@pytest.mark.parametrize("text", [WEIGHTS, CONFIG, "current"])
async def test_an_upload_to_a_server_that_freezes(text, stores, proxy, gate, writers):
    direct, store = stores
    await direct.put("alice", "mine", writers["numpy"])
    proxy.faults = [Fault("PUT", text, before=gate)]
    with pytest.raises(StoreError, match="does not answer"):
        await asyncio.wait_for(store.put("alice", "mine", writers["torch"]), PATIENCE_S)
    assert gate.passed
    proxy.faults.clear()
    assert await store.current("alice", "mine") == writers["numpy"].digest
    await store.put("alice", "mine", writers["torch"])
    assert await store.current("alice", "mine") == writers["torch"].digest


@pytest.fixture
def service(url, proxy, stores, tmp_path):
    """A real ``plpkg serve`` whose store is behind the proxy: its process, and clients of the accounts."""
    accounts = ("alice", "bob", "carol", "dave")
    (tmp_path / "keys").write_text("".join(f"{each} {each * 8}\n" for each in accounts))
    code = "import json, os, sys; os.environ |= json.loads(sys.argv.pop(1)); from plpkg.cli import app; app()"
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment = json.dumps(environment | {"PLPKG_KEYS": str(tmp_path / "keys")})  # the server that forks has another
    options = ["--store", url, "--disk", str(tmp_path / "disk"), "--listen", "127.0.0.1:0"]

    @contextlib.contextmanager
    def serving():
        with Process(code, environment, "serve", *options) as process, contextlib.ExitStack() as stack:
            address = line_of(process.stdout, r"on (http://127\.0\.0\.1:\d+)$")[1]
            httpx.get(f"{address}/health", timeout=PATIENCE_S).raise_for_status()
            heads = {each: {"Authorization": f"Bearer {each * 8}"} for each in accounts}
            made = {k: httpx.Client(base_url=address, headers=v, timeout=PATIENCE_S) for k, v in heads.items()}
            yield process, {each: stack.enter_context(client) for each, client in made.items()}

    return serving


def complete(client, model, **options):
    body = dict(model=model, prompt="def f(x):\n", max_tokens=8, temperature=0) | options
    return client.post("/v1/completions", json=body)


def test_a_service_that_is_killed(service, stores, proxy, gate, base, writers, tmp_path):
    """In the middle of three uploads, each at another write, of a download, and of an answer."""
    old, new, slow, good = (writers[name] for name in ("scipy", "peft", "numpy", "torch"))
    for account, name, adapter in (("alice", "mine", old), ("dave", "slow", slow), ("dave", "good", good)):
        asyncio.run(stores[0].put(account, name, adapter))
    direct, begun = stores[0]._objects, {f"alice/mine/{new.digest}/{UNFINISHED}"}
    writes = {"alice": f"{new.digest}/{WEIGHTS}", "bob": f"{new.digest}/{CONFIG}", "carol": "current"}
    proxy.faults = [Fault("PUT", f"{account}/mine/{text}", before=gate) for account, text in writes.items()]
    proxy.faults += [Fault("GET", f"slow/{slow.digest}/{WEIGHTS}", ranged=False, cut=90_000, after=gate)]

    def upload(client, account):
        files = {name: (name, bytes(new.files[name])) for name in (CONFIG, WEIGHTS)}
        return client.post(f"/v1/accounts/{account}/adapters/mine", files=files)

    with service() as (process, clients), ThreadPoolExecutor(5) as pool:
        first = complete(clients["dave"], "good").json()["choices"][0]["text"]
        calls = [pool.submit(upload, clients[account], account) for account in writes]
        calls += [pool.submit(complete, clients["dave"], "slow")]
        calls += [pool.submit(complete, clients["dave"], "good", max_tokens=400)]
        wait_until(lambda: len(gate.passed) >= 4 or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        process.kill()
        for call in calls[:4]:
            assert isinstance(call.exception(), httpx.TransportError)
    gate.open()
    proxy.faults.clear()
    disk = tmp_path / "disk"
    half = disk / "dave/slow" / slow.digest  # as a kill within a write to the disk leaves it
    half.mkdir(parents=True, exist_ok=True)
    (half / WEIGHTS).write_bytes(slow.files[WEIGHTS])
    (half / f"{CONFIG}.partial").write_bytes(b"{")
    proxy.sent.clear()
    whole = {each["path"] for account in ("alice", "dave") for each in obstore.list(direct, prefix=account).collect()}
    with service() as (process, clients):
        assert not half.exists()
        assert {each["path"] for each in obstore.list(direct).collect()} == whole - begun
        for account, expected in (("alice", {"mine": old.digest}), ("bob", {}), ("carol", {})):
            listed = clients[account].get(f"/v1/accounts/{account}/adapters").json()["data"]
            assert {each["id"]: each["version"] for each in listed} == expected
            names = {each["id"] for each in clients[account].get("/v1/models").json()["data"]}
            assert names == {"plpkg-small", *expected}
            for name in () if expected else ("mine", f"mine@{new.digest}"):
                assert complete(clients[account], name).status_code == 404
        assert complete(clients["dave"], "good").json()["choices"][0]["text"] == first
        assert not [path for _, path, _ in proxy.sent if "dave/good" in path and WEIGHTS in path], "it was on the disk"
        assert complete(clients["dave"], "slow").status_code == 200
        for account in writes:
            assert upload(clients[account], account).json()["version"] == new.digest
            assert complete(clients[account], "mine").status_code == 200
    kept = [*disk.glob("*/*/*")]
    assert len(kept) == 5
    assert all(validate_adapter(each, base[0]).digest == each.name for each in kept)


def test_a_store_that_hangs(service, stores, proxy, gate, writers):
    """What is in memory is served on; who waits for the rest is told at the end."""
    for name in ("torch", "numpy"):
        asyncio.run(stores[0].put("dave", name, writers[name]))
    with service() as (process, clients), ThreadPoolExecutor(1) as pool:

        def served():
            answer = complete(clients["dave"], "torch")
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        text = served()
        proxy.faults = [Fault(method, "", before=gate) for method in ("GET", "PUT", "POST", "DELETE", "HEAD")]
        wait_until(lambda: served() == text and gate.passed)  # it has been asked which version is current
        assert served() == text
        before = len(gate.passed)
        absent = pool.submit(complete, clients["dave"], "numpy")
        wait_until(lambda: len(gate.passed) > before)
        process.send_signal(signal.SIGINT)
        assert (answer := absent.result()).status_code == 503, answer.text
        assert answer.json()["error"]["message"] == "the service is ending"
        assert process.wait() == 0
        assert "Traceback" not in process.stdout.read()
