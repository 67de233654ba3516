"""What the service's tests share: a real S3 server in this process, the small backbone, the writers' adapters."""

import contextlib
import itertools
from typing import NamedTuple

import pytest

from plpkg.adapters import validate_adapter
from plpkg.backbones import load_backbone
from plpkg.catalog import data_path


class S3(NamedTuple):
    """A running server; ``environment`` is what obstore and boto3 need to find it."""

    endpoint: str
    bucket: str
    environment: dict[str, str]


@pytest.fixture(scope="session")
def s3():
    """moto's S3 server on a free port, with one bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = dict(aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    client.create_bucket(Bucket="adapters")
    client.close()
    environment = {name.upper(): value for name, value in keys.items() if name != "region_name"}
    yield S3(endpoint, "adapters", environment | dict(AWS_REGION="us-east-1", AWS_ENDPOINT_URL=endpoint,
                                                      AWS_ALLOW_HTTP="true"))  # fmt: skip
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
