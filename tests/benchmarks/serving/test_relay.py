import gc
import socket
import socketserver
import threading
import time
from pathlib import Path

import pytest

from benchmarks.serving.relay import Relay
from plpkg.catalog import Link
from tests.residual.conftest import at_once

from waiting import PATIENCE_S, interpreter, wait_until


class Echo(socketserver.BaseRequestHandler):
    """Sends everything back."""

    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)


@pytest.fixture
def echo():
    """The address of a server that sends everything back."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def connect(address):
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def received(connection, count):
    data = bytearray()
    while len(data) < count:
        data += connection.recv(1 << 20)
    return bytes(data)


def there_and_back(connection, data):
    threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
    return received(connection, len(data))


def test_everything_arrives_in_order_and_is_counted(echo):
    data = bytes(range(256)) * 1000
    with Relay(echo) as relay, connect(relay.address) as connection:
        assert there_and_back(connection, data) == data
        assert (relay.uplink_bytes, relay.downlink_bytes) == (len(data), len(data))


def test_no_byte_is_faster_than_the_link(echo):
    link = Link("slow", 8e6, 4e6, 0.02)
    with Relay(echo, link) as relay, connect(relay.address) as connection:
        for size in (1, 100_000):
            began = time.perf_counter()
            there_and_back(connection, bytes(size))
            # The chunks of one direction overlap those of the other, but the last has to go both ways.
            assert time.perf_counter() - began >= 0.02 + 8 * size / 4e6


def test_the_time_on_the_link_is_measured(echo):
    link = Link("slow", 8e5, 8e5, 0.05)
    with Relay(echo, link) as relay, connect(relay.address) as connection:
        began = time.perf_counter()
        for _ in range(2):
            there_and_back(connection, bytes(1000))
        assert 2 * (2 * 0.01 + 0.05) <= relay.held_s <= time.perf_counter() - began


def test_two_connections_share_the_link(echo):
    link = Link("slow", 8e6, 1e9, 0.0)
    with Relay(echo, link) as relay, connect(relay.address) as one, connect(relay.address) as two:
        began = time.perf_counter()
        at_once(lambda connection: there_and_back(connection, bytes(50_000)), [one, two])
        assert time.perf_counter() - began >= 8 * 100_000 / 8e6


def test_a_cut_ends_both_ends_and_new_connections_pass(echo):
    with Relay(echo) as relay:
        with connect(relay.address) as connection:
            there_and_back(connection, b"a")
            relay.cut()
            assert connection.recv(10) == b""
        with connect(relay.address) as connection:
            assert there_and_back(connection, b"again") == b"again"


def test_what_a_cut_found_on_its_way_reaches_no_later_connection(echo):
    link = Link("slow", 8e6, 8e6, 0.05)
    with Relay(echo, link) as relay:
        for _ in range(3):
            with connect(relay.address) as connection:
                connection.sendall(bytes(10_000))
                relay.cut()
            with connect(relay.address) as connection:
                assert there_and_back(connection, b"again") == b"again"


def test_what_the_other_end_does_not_read_yet_waits(echo):
    """More than all buffers hold: nothing is lost, and the relay does not take it all."""
    data = bytes(range(256)) * 300_000
    with Relay(echo) as relay, connect(relay.address) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        taken = -1
        while taken < relay.uplink_bytes:  # until it takes no more, or all
            taken = relay.uplink_bytes
            time.sleep(0.3)
        assert sender.is_alive()
        assert relay.uplink_bytes < len(data)
        assert received(connection, len(data)) == data
        sender.join()


def test_it_ends_with_its_owner():
    code = "import os; from benchmarks.serving.relay import Relay; r = Relay('127.0.0.1:1'); "
    code += "print(r._process.pid, flush=True); os._exit(0)"
    pid = int(interpreter(code))
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_nobody_there_is_an_ended_connection():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Relay(f"127.0.0.1:{port}") as relay, connect(relay.address) as connection:
        assert connection.recv(10) == b""


def test_its_process_ends_with_it_and_the_counts_stay(echo):
    relay = Relay(echo)
    with connect(relay.address) as connection:
        there_and_back(connection, bytes(1000))
    relay.close()
    assert relay.uplink_bytes == relay.downlink_bytes == 1000
    with pytest.raises(ConnectionError):
        connect(relay.address).recv(1)
    relay.close()
    forgotten = Relay(echo)
    process = forgotten._process
    del forgotten
    gc.collect()
    assert process.poll() is not None
