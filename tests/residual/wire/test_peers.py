"""Peers that are slow, gone, many or rude, over real connections: what they may cost the other side."""

import gc
import signal
import threading

import grpc
import pytest
import torch
from grpc import StatusCode

from plpkg.residual import CloudServer, DeviceClient, Limits
from plpkg.residual.wire import connection, messages
from plpkg.residual.wire.terms import differences
from tests.residual.conftest import cloud_process

from waiting import PATIENCE_S, wait_until

IDS = torch.arange(1, 9).reshape(1, 8)
CROWD = "maximum_concurrent_rpcs"


def generate(cloud, model, **options):
    with DeviceClient(cloud.address, model, precision="fp32", **options) as device:
        return device.generate(IDS, 2, eos_token_id=-1)


def test_who_reads_not_even_the_end_is_cut_off(pair, adapted):
    """More than a stream's window is on its way to a device that has stopped reading."""
    server, device, _ = pair(cloud=dict(limits=Limits(tokens=4000, answer_s=1.0)))
    device.generate(IDS, 1)
    (stream,) = server._streams
    for _ in range(5 * messages.BACKLOG):  # the device reads the first, and no more than it has asked for
        stream.messages._outgoing.put((0.0, bytes(2**20)))
    stream.messages.interrupt(messages.StatusError(StatusCode.INTERNAL, "the end"))
    wait_until(lambda: "plpkg-reader" not in {thread.name for thread in threading.enumerate()})  # at both ends
    wait_until(lambda: not server._streams)
    assert generate(server, adapted()).shape == (1, 10)


def test_a_cloud_that_has_stopped_is_noticed_by_its_silence(adapted, monkeypatch):
    """Not by ``timeout_s``: whoever asks for a long text may set that high."""
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = [(name, quick.get(name, value)) for name, value in messages.OPTIONS]
    monkeypatch.setattr(connection, "OPTIONS", options)
    process, address = cloud_process()
    with process, DeviceClient(address, adapted(), precision="fp32", timeout_s=PATIENCE_S, retry_s=0) as device:
        device.generate(IDS, 1)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionError, match=f"no connection to {address}: UNAVAILABLE: .*ping timeout"):
            device.generate(IDS, 1)


def test_who_meets_a_crowd_comes_back(pair, adapted, monkeypatch):
    server_of = grpc.server
    monkeypatch.setattr(grpc, "server", lambda pool, **options: server_of(pool, **options | {CROWD: 1}))
    server, first, _ = pair()
    first.generate(IDS, 1)
    with pytest.raises(ConnectionError, match="Concurrent RPC limit exceeded"):
        generate(server, adapted(), retry_s=0.2)
    leaving = threading.Timer(0.5, first.close)
    leaving.start()
    assert generate(server, adapted(), retry_s=PATIENCE_S).shape == (1, 10)
    leaving.join()


def test_an_endless_hello_is_named_in_part(adapted):
    with CloudServer(adapted()) as server:
        device = type(server.terms)()
        device.CopyFrom(server.terms)
        device.projections.extend([3] * 10**6)
        assert differences(device, server.terms).startswith("projections [3, 3, 3, 3, 3")
        assert len(differences(device, server.terms)) < 1000


def test_a_client_that_nobody_closes_is_collected(adapted):
    with CloudServer(adapted(), precision="fp32") as server:
        device = DeviceClient(server.address, adapted(), precision="fp32")
        device.generate(IDS, 1)
        assert len(server._streams) == 1
        del device
        gc.collect()
        wait_until(lambda: not server._streams)


def test_closing_from_another_thread_ends_what_is_under_way(pair):
    server, device, _ = pair(retry_s=60)

    def close_elsewhere(_):
        thread = threading.Thread(target=device.close)
        thread.start()
        thread.join(PATIENCE_S)

    with pytest.raises(RuntimeError, match="this client is closed"):
        device.generate(IDS, 4, eos_token_id=-1, on_token=close_elsewhere)
    wait_until(lambda: not server._streams)
