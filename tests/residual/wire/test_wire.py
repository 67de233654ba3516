"""The device's end against what a cloud can do to it: refuse, be full, speak TLS, or say what it should not."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import certificate
import grpc
import pytest
from grpc import StatusCode

from plpkg.residual import CloudServer, DeviceClient, Limits, RefusedError
from plpkg.residual.wire import connection
from plpkg.residual.wire.messages import METHOD, TEXT
from plpkg.residual.wire.wire_pb2 import Final, FromCloud, Part, Welcome
from tests.residual.conftest import IDS
from tests.residual.wire.conftest import same_tokens

from waiting import PATIENCE_S, wait_until


@pytest.fixture
def stranger():
    """Starts a cloud that answers each stream as ``connect(requests, context)`` does; gives its address."""
    with contextlib.ExitStack() as opened:

        def start(connect):
            service, _, method = METHOD[1:].partition("/")
            handlers = {method: grpc.stream_stream_rpc_method_handler(connect)}
            server = grpc.server(ThreadPoolExecutor(2), [grpc.method_handlers_generic_handler(service, handlers)])
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            opened.callback(lambda: server.stop(0).wait())
            return f"127.0.0.1:{port}"

        yield start


def test_what_a_cloud_says_is_shown_as_one_printable_short_line(stranger, adapted):
    def connect(requests, context):
        context.abort(StatusCode.PERMISSION_DENIED, "\x1b]0;a title\x07no\r\n, \u202enever" + "x" * 5000)

    with DeviceClient(stranger(connect), adapted()) as device, pytest.raises(RefusedError) as refused:
        device.generate(IDS, 1)
    assert refused.value.code is StatusCode.PERMISSION_DENIED
    assert refused.value.details.startswith("\ufffd]0;a title\ufffdno\ufffd , \ufffdneverxxx")
    assert str(refused.value) == f"PERMISSION_DENIED: {refused.value.details}"
    assert refused.value.details.isprintable()
    assert len(refused.value.details) == TEXT


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (dict(residual=Part(data=bytes(2600))), RefusedError, "sent 2,60. bytes where at most 2,560 were due"),
        (dict(residual=Part(data=bytes(718))), ValueError, r"a tensor of shape \(3, 2, 12, 5\) has 720 bytes, got 718"),
        (dict(residual=Part(group=4)), ValueError, r"the cloud sent exchange 4 where one of \[0, 1, 2, 3\] was due"),
        (dict(final=Final()), RefusedError, "a residual was due, .* sent final"),
        ({}, RefusedError, "a residual was due, .* sent nothing"),
    ],
)
def test_what_was_not_due_is_refused_with_the_reason(stranger, adapted, answer, error, message):
    def connect(requests, context):
        next(requests)
        yield FromCloud(welcome=Welcome(tokens=100)).SerializeToString()
        next(requests)
        yield FromCloud(**answer).SerializeToString()

    with DeviceClient(stranger(connect), adapted()) as device, pytest.raises(error, match=message):
        device.generate(IDS, 1)


def test_a_device_without_a_certificate_is_told_at_once_that_the_cloud_speaks_tls(tmp_path, adapted, before):
    certificate.written(tmp_path / "tls")
    with (
        CloudServer(adapted(), tls=tmp_path / "tls") as cloud,
        DeviceClient(cloud.address, adapted(), retry_s=3.0) as device,
    ):
        tries = before(device.wire, "_open", lambda _: None)
        with pytest.raises(ConnectionError, match=f"^no connection to {cloud.address}: the cloud speaks TLS: give its"):
            device.connect()
        assert tries == [1]


def test_where_a_cloud_is_full_only_who_was_there_before_tries_again(pair, adapted, before):
    """The place may be that of its own stream that broke."""
    patient = dict(precision="fp32", retry_s=PATIENCE_S)
    server, device, whole = pair(cloud=dict(limits=Limits(sessions=1)), retry_s=PATIENCE_S)
    device.connect()
    device.wire.reset()
    wait_until(lambda: not server.sessions)
    with DeviceClient(server.address, adapted(), **patient) as other:
        other.connect()
        with (
            DeviceClient(server.address, adapted(), **patient) as new,
            pytest.raises(RefusedError, match=r"^RESOURCE_EXHAUSTED: the cloud has 1 sessions, its limit$"),
        ):
            new.connect()
        tries = before(device.wire, "_open", lambda number: number == 3 and other.close())
        same_tokens(device, whole, count=2)
    assert len(tries) >= 3


def test_longer_messages_than_a_connection_takes_have_another_one(pair, monkeypatch):
    """A text that grows beyond it is not read again: what is due of each token is short."""
    monkeypatch.setattr(connection, "SHORT_BYTES", 4096)
    _, client, whole = pair()
    same_tokens(client, whole, IDS.repeat(1, 2), 8)
    assert client.wire.stream == 2
    client.train_step(IDS.repeat(1, 4))
    assert client.wire.stream == 3


def test_a_host_that_says_nothing_is_waited_for_once(adapted, monkeypatch):
    asked = []
    monkeypatch.setattr(connection.Wire, "_hopeless", lambda self: asked.append(self.target) or "")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            DeviceClient(address, adapted(), timeout_s=0.2, retry_s=0) as device,
            pytest.raises(ConnectionError, match=r"said nothing for 0\.2 s"),
        ):
            device.connect()
    assert not asked


def test_a_device_with_ca_at_a_cloud_without_tls_is_told_at_once(adapted, tmp_path):
    ca = certificate.written(tmp_path)
    with (
        CloudServer(adapted()) as cloud,
        DeviceClient(cloud.address, adapted(), ca=ca, token="secret", retry_s=PATIENCE_S) as device,
        pytest.raises(ConnectionError, match="WRONG_VERSION_NUMBER"),
    ):
        device.connect()
