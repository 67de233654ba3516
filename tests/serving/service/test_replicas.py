"""Two replicas behind one address: what they answer, where requests go, what reaches a client. 50 s, 2 GB."""

import asyncio
import contextlib
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from plpkg import catalog
from plpkg.adapters import CONFIG, InvalidAdapterError
from plpkg.backbones import load_backbone
from plpkg.serving.engine import Engine
from plpkg.serving.requests import Request
from plpkg.serving.service.http.api import app
from plpkg.serving.service.http.listener import Listener
from plpkg.serving.service.scheduler import OverloadedError
from plpkg.serving.service.store import NotFoundError, Store, StoreError

from waiting import PATIENCE_S, WITHOUT_RAY, patient_ray, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # on importing ray 2.60

PROMPT, NEW, AGAIN = "def load(path):", 12, 8
STEP_S = 0.02
"""That a step takes at least, so that a request is seen under way. Ray Serve 2.60 says each 0.1 s who has what."""
LONG = 900


def replica(folder, steps):
    """How each process makes its own; pickled by value, as the processes do not have this module."""

    def build():
        from plpkg.serving.service.replica import Replica
        from plpkg.serving.service.scheduler import Scheduler
        from plpkg.serving.service.tiers import Tiers

        model, tokenizer = load_backbone("plpkg-small", dtype=torch.float64)  # so that no batch changes a token
        engine = Engine(model, tokenizer)
        step = engine.step

        def counted():
            time.sleep(STEP_S)
            with steps.open("a") as file:
                file.write(".")
            return step()

        engine.step = counted
        return Replica(engine, Tiers(Store(folder), model), Scheduler())

    return build


def test_two_replicas_answer_as_one_and_an_adapter_stays_where_it_is(tmp_path, monkeypatch):
    patient_ray(monkeypatch)
    from plpkg.serving.service.replicas import replicated

    model, tokenizer = load_backbone("plpkg-small", dtype=torch.float64)
    store_path, steps = tmp_path / "store", tmp_path / "steps"
    store, engine = Store(store_path), Engine(model, tokenizer)
    for name in ("numpy", "torch"):
        adapter = engine.load(name, catalog.data_path() / "serving" / name)
        asyncio.run(store.put("local", name, adapter))
    path = "local/broken/" + 64 * "0"
    shutil.copytree(catalog.data_path() / "serving" / "numpy", store_path / path)
    (store_path / path / CONFIG).write_text("{}")
    (store_path / "local/broken/current").write_text(64 * "0")
    with pytest.raises(InvalidAdapterError) as refusal:
        asyncio.run(store.fetch(path, model))
    ids, names = tokenizer(PROMPT)["input_ids"], ("numpy", "torch", None)
    written = engine.generate([Request(ids, name, max_new_tokens=NEW) for name in names])
    whole = {name: tokenizer.decode(ids + new) for name, new in zip(names, written, strict=True)}
    assert len(set(whole.values())) == len(names)

    with contextlib.ExitStack() as stack:
        told = []
        backend = stack.enter_context(replicated(replica(store_path, steps), 2, say=told.append))
        assert told[1:] == ["replica 1 of 2 runs", "replica 2 of 2 runs"]
        address = stack.enter_context(Listener(app(backend, store, model, tokenizer, name="plpkg-small"))).address
        client = stack.enter_context(httpx.Client(base_url=address, timeout=PATIENCE_S))

        def body(name, **settings):
            return {"json": dict(model=name or "plpkg-small", prompt=PROMPT, max_tokens=NEW, temperature=0) | settings}

        def answered(name):
            answer = client.post("/v1/completions", **body(name)).raise_for_status().json()
            return PROMPT + answer["choices"][0]["text"] == whole[name]

        def gauge(*key):
            return sum(each.get(key, 0) for each in asyncio.run(backend.gauges()))

        assert all(map(answered, names))
        assert all(map(answered, 4 * [None]))  # meanwhile Ray hears who has what; before, it may send one elsewhere
        with ThreadPoolExecutor(AGAIN) as pool:
            assert all(pool.map(answered, AGAIN * names))
        # Each adapter is in the memory of one replica; sent at random, both would be by a chance of 2^-2·AGAIN.
        loaded = "lora_adapter_loaded", "host", str(adapter.rank)
        assert gauge(*loaded) == 2

        assert client.post("/v1/completions", **body("nobody")).status_code == 404
        refused = client.post("/v1/completions", **body("broken"))
        assert refused.status_code == 422
        assert refused.json()["error"]["reasons"] == [str(refusal.value)]

        with client.stream("POST", "/v1/completions", **body("numpy", max_tokens=LONG, stream=True)) as answer:
            next(answer.iter_lines())
            before = steps.stat().st_size
            assert gauge("num_requests_running") == 1
        wait_until(lambda: gauge("num_requests_running") == 0)
        assert steps.stat().st_size - before < LONG / 2, "it was not cancelled"
        client.delete("/v1/accounts/local/adapters/numpy").raise_for_status()
        assert gauge(*loaded) == 1


async def test_a_client_is_not_told_where_a_process_died():
    RayError = pytest.importorskip("ray.exceptions", reason=WITHOUT_RAY).RayError
    from plpkg.serving.service.replicas import Replicas

    class Handle:
        """Ray's, of a replica that dies within a stream."""

        stream = property(lambda self: self)

        def options(self, **_):
            return self

        async def remote(self, *_):
            yield 5, None
            raise RayError("ip: 192.0.2.2, pid: 7")

    with pytest.raises(RuntimeError, match=r"^a replica's process failed$"):
        assert [each async for each in Replicas(Handle()).stream(None, Request([5]))]


ERRORS = [InvalidAdapterError("one"), NotFoundError("none"), OverloadedError("full", 7)]


@pytest.mark.parametrize(
    "error", [*ERRORS, StoreError("down"), ValueError("no")], ids=lambda error: type(error).__name__
)
def test_errors_cross_processes_as_they_are(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("waits_s", "start_s", "reason"),
    [(0, 600, "the replicas do not start: .*there is no such model"), (1000, 1, "0 of 1 replicas run after 1 s")],
)
def test_replicas_that_do_not_start_say_why(waits_s, start_s, reason, monkeypatch):
    patient_ray(monkeypatch)
    from plpkg.serving.service.replicas import replicated

    def build():  # pickled by value, as the processes do not have this module
        import time

        time.sleep(waits_s)
        raise OSError("there is no such model")

    with pytest.raises(ValueError, match=reason), replicated(build, 1, start_s=start_s):
        pass
