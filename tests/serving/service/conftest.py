"""What the service's tests share: a real S3 server in this process, the small backbone, the writers' adapters."""

import asyncio
import contextlib
import inspect
import itertools
import json
import socket
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch

from plpkg.adapters import validate_adapter
from plpkg.backbones import load_backbone
from plpkg.catalog import data_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session")
def s3():
    """moto's S3 server on a free port, its bucket, and the environment that obstore and boto3 need to find it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys, region = dict(aws_access_key_id="key", aws_secret_access_key="secret"), "us-east-1"
    with contextlib.closing(boto3.client("s3", endpoint_url=endpoint, region_name=region, **keys)) as client:
        client.create_bucket(Bucket="adapters")
    environment = dict(AWS_REGION=region, AWS_ENDPOINT_URL=endpoint, AWS_ALLOW_HTTP="true")
    environment |= {name.upper(): value for name, value in keys.items()}
    yield SimpleNamespace(endpoint=endpoint, bucket="adapters", environment=environment)
    server.stop()


@pytest.fixture
def url(s3, monkeypatch, _prefixes=itertools.count()):  # noqa: B008 (one for all calls is meant)
    """An S3 URL that no other test uses; the environment is such that ``Store(url)`` finds the server."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/test-{next(_prefixes)}"


@pytest.fixture(scope="session")
def base():
    """plpkg-small and its tokenizer."""
    return load_backbone("plpkg-small")


@pytest.fixture(scope="session")
def writers(base):
    """The writers' adapters of ``data/serving``, by name."""
    with contextlib.chdir(data_path("serving")):
        return {name: validate_adapter(name, base[0]) for name in ("numpy", "torch", "scipy", "peft", "pandas")}


@pytest.fixture(scope="session")
def tiny(base, tools):
    """A random model for the base's tokenizer, of few positions, so that no answer is long; its adapters by name."""
    model = tools.backbone(dtype=torch.float32, num_layers=1, vocab=len(base[1]), max_positions=64)
    return model, {f"adapter-{n}": tools.adapted(model, 1 + n % 3, seed=n)[1] for n in range(6)}


@pytest.fixture(scope="session")
def asked():
    """A context in which a completion has been asked for on a socket, so that its client can go."""

    @contextlib.contextmanager
    def ask(service, **body):
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(service.url).port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            yield connection

    return ask
