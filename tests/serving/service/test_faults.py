"""A store that fails, through a proxy that this file breaks, and a service that is killed: nothing half-visible."""

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import obstore
import pytest

from plpkg.adapters import CONFIG, WEIGHTS, AdapterLimits, InvalidAdapterError, validate_adapter
from plpkg.serving.service.store import START_BYTES, NotFoundError, Store, StoreError
from plpkg.serving.service.tiers import Disk, Tiers

from preloaded import Process
from waiting import PATIENCE_S, line_of, wait_until

TIMEOUT_S = 0.5


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
        pass

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
    return direct, Store(url, timeout_s=TIMEOUT_S, refresh_s=0)


@pytest.fixture
def gate():
    """Who waits for it is let go at the end at the latest, its connection without an answer."""
    event, passed = threading.Event(), []

    def wait():
        passed.append(True)
        event.wait(PATIENCE_S)
        raise ConnectionAbortedError

    wait.passed, wait.open = passed, event.set
    yield wait
    event.set()


async def take(tiers, path):
    async with tiers.lease(path) as adapter:
        return adapter


def stored(direct, path, adapter, **changed):
    """Put an adapter's files under a path that may not be theirs."""
    for name in (WEIGHTS, CONFIG):
        obstore.put(direct._objects, f"{path}/{name}", changed.get(name.split("_")[1][:5], bytes(adapter.files[name])))


def spoiled(weights, tail):
    return bytes(weights[: -len(tail)]) + tail


HEADER = Fault("GET", WEIGHTS, True, times=1)  # which goes through
RESUMED = Fault("GET", WEIGHTS, True, cut=0)
# By name: what is stored in the place of the weights, the faults of the proxy, how it ends, and with which words.
FAULTS = {
    "no weights": (None, [Fault("GET", WEIGHTS, status=404)], NotFoundError, "no such version"),
    "no weights at last": (None, [Fault("GET", WEIGHTS, False, status=404)], NotFoundError, "no such version"),
    "errors": (None, [Fault("GET", CONFIG, status=500)], StoreError, "does not answer"),
    "overload": (None, [Fault("GET", WEIGHTS, False, status=503)], StoreError, "does not answer"),
    "refused": (None, [Fault("GET", CONFIG, status=403)], StoreError, "does not answer"),
    "cut": (None, [HEADER, Fault("GET", WEIGHTS, False, cut=50_000), RESUMED], StoreError, "does not answer"),
    "cut at the end": (None, [HEADER, Fault("GET", WEIGHTS, False, cut=168_975), RESUMED], StoreError, "not answer"),
    "truncated": (lambda old: old[:100_000], [], InvalidAdapterError, "bytes"),
    "longer": (lambda old: old + b"\0" * 8, [], InvalidAdapterError, "bytes"),
    "oversized": (lambda old: old + b"\0" * 200_000, [], InvalidAdapterError, "368,976 bytes, at most 300,000"),
    "not finite": (lambda old: spoiled(old, b"\0\0\xc0\x7f"), [], InvalidAdapterError, "not finite"),
    "another": (lambda old: spoiled(old, b"\0\0\0\0"), [], InvalidAdapterError, "not the version that it was stored"),
}


def finished(tiers, disk, path):
    assert (dict(tiers.leases), tiers._flights) == ({}, {})
    assert path not in tiers.host
    assert not (disk.folder / path).exists()


@pytest.mark.parametrize("name", FAULTS)
def test_a_download_that_fails(name, stores, proxy, base, writers, tmp_path):
    change, faults, kind, words = FAULTS[name]

    async def main():
        direct, store = stores
        bad, good = f"alice/bad/{writers['numpy'].digest}", f"alice/good/{writers['torch'].digest}"
        old = bytes(writers["numpy"].files[WEIGHTS])
        stored(direct, bad, writers["numpy"], model=change(old) if change else old)
        stored(direct, good, writers["torch"])
        proxy.faults = [Fault(**vars(each) | dict(text=f"bad/{bad[-64:]}/{each.text}")) for each in faults]
        tiers = Tiers(store, base[0], limits=AdapterLimits(max_bytes=300_000), disk=(disk := Disk(tmp_path)))
        began = time.monotonic()
        calls = [asyncio.create_task(take(tiers, path)) for path in (bad, good, bad)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < PATIENCE_S
        assert results[1].files == writers["torch"].files
        for error in (results[0], results[2]):
            assert type(error) is kind
            assert words in str(error)
        finished(tiers, disk, bad)
        assert (disk.folder / good).exists()
        assert all(each.used for each in proxy.faults)

    asyncio.run(main())


def test_a_body_that_breaks_off_once_is_taken_up(stores, proxy, base, writers):
    async def main():
        direct, store = stores
        path = f"alice/a/{await direct.put('alice', 'a', writers['numpy'])}"
        proxy.faults = [Fault("GET", WEIGHTS, ranged=False, cut=50_000, times=1)]
        assert (await take(Tiers(store, base[0]), path)).files == writers["numpy"].files
        assert proxy.faults[0].used == 1

    asyncio.run(main())


@pytest.mark.parametrize("ranged", [True, False])
def test_a_server_that_freezes(ranged, stores, proxy, gate, base, writers, tmp_path):
    """It ends in bounded time, and who needs another adapter does not wait for it."""

    async def main():
        direct, store = stores
        bad = f"alice/bad/{await direct.put('alice', 'bad', writers['numpy'])}"
        good = f"alice/good/{await direct.put('alice', 'good', writers['torch'])}"
        proxy.faults = [Fault("GET", f"bad/{bad[-64:]}/{WEIGHTS}", ranged=ranged, before=gate)]
        tiers = Tiers(store, base[0], disk=(disk := Disk(tmp_path)), downloads=2)
        began = time.monotonic()
        frozen = asyncio.create_task(take(tiers, bad))
        while not gate.passed:
            await asyncio.sleep(0.001)
        await take(tiers, good)
        assert not frozen.done()
        with pytest.raises(StoreError, match="does not answer"):
            await frozen
        assert TIMEOUT_S <= time.monotonic() - began < PATIENCE_S
        finished(tiers, disk, bad)
        assert len(gate.passed) <= 3

    asyncio.run(main())


@pytest.mark.parametrize("longer", [0, 1000])
def test_an_object_that_changes_while_it_is_read(longer, stores, proxy, base, writers, tmp_path):
    """Between the range read and the download: another adapter's weights, in whole or more of them."""

    async def main():
        direct, store = stores
        path = f"alice/a/{await direct.put('alice', 'a', writers['numpy'])}"
        other = bytes(writers["torch"].files[WEIGHTS]) + b"\0" * longer
        change = Fault("GET", WEIGHTS, ranged=False, before=lambda: obstore.put(
            direct._objects, f"{path}/{WEIGHTS}", other))  # fmt: skip
        proxy.faults = [change]
        tiers = Tiers(store, base[0], disk=(disk := Disk(tmp_path)))
        reason = "bytes, at most" if longer else "not the version that it was stored as"
        with pytest.raises(InvalidAdapterError, match=reason):
            await take(tiers, path)
        assert change.used == 1
        finished(tiers, disk, path)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (CONFIG, lambda old: old.replace(b'"LORA"', b'"LOHA"')),
        (WEIGHTS, lambda old: old.replace(b"layers.0.", b"layers.9.")),
        (WEIGHTS, lambda old: old + b"\0" * 200_000),
        (WEIGHTS, lambda old: b"\xff" * 8 + old[8:]),
    ],
)
def test_what_is_wrong_in_the_header_is_not_downloaded(name, change, stores, proxy, base, writers):
    """By the bytes that the server has sent: of the weights never more than the first read."""

    async def main():
        direct, store = stores
        path, content = f"alice/a/{writers['numpy'].digest}", bytes(writers["numpy"].files[name])
        assert change(content) != content
        stored(direct, path, writers["numpy"], **{name.split("_")[1][:5]: change(content)})
        with pytest.raises(InvalidAdapterError):
            await store.fetch(path, base[0], AdapterLimits(max_bytes=300_000))
        sent = [count for method, where, count in proxy.sent if where.endswith(WEIGHTS)]
        assert sum(sent) <= START_BYTES < len(writers["numpy"].files[WEIGHTS])
        assert sum(count for *_, count in proxy.sent) > 0

    asyncio.run(main())


@pytest.mark.parametrize("text", [WEIGHTS, CONFIG, "current"])
def test_an_upload_to_a_server_that_freezes(text, stores, proxy, gate, writers):
    async def main():
        direct, store = stores
        await direct.put("alice", "mine", writers["numpy"])
        proxy.faults = [Fault("PUT", text, before=gate)]
        began = time.monotonic()
        with pytest.raises(StoreError, match="does not answer"):
            await store.put("alice", "mine", writers["torch"])
        assert time.monotonic() - began < PATIENCE_S
        assert gate.passed
        proxy.faults.clear()
        assert await store.current("alice", "mine") == writers["numpy"].digest
        await store.put("alice", "mine", writers["torch"])
        assert await store.current("alice", "mine") == writers["torch"].digest

    asyncio.run(main())


@contextlib.contextmanager
def service(url, disk, keys):
    """A real ``plpkg serve``, and its address."""
    code = "import json, os, sys; os.environ |= json.loads(sys.argv.pop(1)); from plpkg.cli import app; app()"
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment = json.dumps(environment | {"PLPKG_KEYS": str(keys)})  # the server that forks it has another
    with Process(code, environment, "serve", "--store", url, "--disk", str(disk), "--listen", "127.0.0.1:0") as process:
        address = line_of(process.stdout, r"on (http://127\.0\.0\.1:\d+)$")[1]
        httpx.get(f"{address}/health", timeout=PATIENCE_S).raise_for_status()
        yield process, address


def test_a_service_that_is_killed(stores, proxy, url, base, writers, tmp_path):
    """In the middle of three uploads, each at another write, of a download, and of an answer."""
    direct, accounts = stores[0], ("alice", "bob", "carol", "dave")
    (tmp_path / "keys").write_text("".join(f"{each} {each * 8}\n" for each in accounts))
    old, new, slow, good = (writers[name] for name in ("scipy", "peft", "numpy", "torch"))
    for account, name, adapter in (("alice", "mine", old), ("dave", "slow", slow), ("dave", "good", good)):
        asyncio.run(direct.put(account, name, adapter))
    event, held = threading.Event(), []

    def hold():
        held.append(True)
        event.wait(PATIENCE_S)
        raise ConnectionAbortedError

    writes = [Fault("PUT", f"{account}/mine/{text}", before=hold) for account, text in (
        ("alice", f"{new.digest}/{WEIGHTS}"), ("bob", f"{new.digest}/{CONFIG}"), ("carol", "current"))]  # fmt: skip
    load = Fault("GET", f"slow/{slow.digest}/{WEIGHTS}", ranged=False, cut=90_000, after=hold)
    proxy.faults = [*writes, load]
    files = {name: (name, bytes(new.files[name])) for name in (CONFIG, WEIGHTS)}

    def client(address, account):
        return httpx.Client(base_url=address, headers={"Authorization": f"Bearer {account * 8}"}, timeout=PATIENCE_S)

    def upload(address, account):
        with client(address, account) as http:
            return http.post(f"/v1/accounts/{account}/adapters/mine", files=files)

    def complete(address, account, model, **options):
        with client(address, account) as http:
            body = dict(model=model, prompt="def f(x):\n", max_tokens=8, temperature=0) | options
            return http.post("/v1/completions", json=body)

    disk = tmp_path / "disk"
    with service(url, disk, tmp_path / "keys") as (process, address), ThreadPoolExecutor(5) as pool:
        first = complete(address, "dave", "good").json()["choices"][0]["text"]
        calls = [pool.submit(upload, address, account) for account in accounts[:3]]
        calls += [pool.submit(complete, address, "dave", "slow")]
        calls += [pool.submit(complete, address, "dave", "good", max_tokens=400)]
        wait_until(lambda: len(held) >= 4 or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        process.kill()
        for call in calls[:4]:
            assert isinstance(call.exception(), httpx.TransportError)
    event.set()
    proxy.faults.clear()
    half = disk / "dave/slow" / slow.digest  # as a kill within a write to the disk leaves it
    half.mkdir(parents=True, exist_ok=True)
    (half / WEIGHTS).write_bytes(slow.files[WEIGHTS])
    (half / f"{CONFIG}.partial").write_bytes(b"{")
    proxy.sent.clear()
    with service(url, disk, tmp_path / "keys") as (process, address):
        assert not half.exists()
        for account, expected in (("alice", {"mine": old.digest}), ("bob", {}), ("carol", {})):
            with client(address, account) as http:
                listed = http.get(f"/v1/accounts/{account}/adapters").json()["data"]
                assert {each["id"]: each["version"] for each in listed} == expected
                names = {each["id"] for each in http.get("/v1/models").json()["data"]}
                assert names == {"plpkg-small", *expected}
            if not expected:
                assert complete(address, account, "mine").status_code == 404
                assert complete(address, account, f"mine@{new.digest}").status_code == 404
        assert complete(address, "dave", "good").json()["choices"][0]["text"] == first
        assert not [path for _, path, _ in proxy.sent if "dave/good" in path and WEIGHTS in path], "it was on the disk"
        assert complete(address, "dave", "slow").status_code == 200
        for account in accounts[:3]:
            assert upload(address, account).json()["version"] == new.digest
            assert complete(address, account, "mine").status_code == 200
    kept = [*disk.glob("*/*/*")]
    assert len(kept) == 5
    assert all(validate_adapter(each, base[0]).digest == each.name for each in kept)
