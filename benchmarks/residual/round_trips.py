"""A message there and back on loopback, through what could carry it; part of ``benchmarks/residual/wire.py``.

* socket: the bytes alone.
* call: :mod:`plpkg.residual.call`, as device and cloud use it; asleep while it waits, and with busy waits.
* grpcio, asyncio grpcio: the same protocol, by gRPC's own library.

Run: ``python -m benchmarks.residual.round_trips`` (a quarter of a minute; prints, records nothing).
"""

import argparse
import asyncio
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from plpkg.residual.call import BrokenCallError, ClientCall, ServerCall

METHOD = "/plpkg.Echo/Echo"
KINDS = ("socket", "call", "call, busy waits", "grpcio", "asyncio grpcio")
LIMITS = dict(timeout_s=60.0, max_message_bytes=1 << 20)


def same(data: bytes) -> bytes:
    return data


def accepted() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def echo(kind: str, busy_wait_s: float) -> None:
    """Send everything back."""
    if kind == "socket":
        connection = accepted()
        while data := connection.recv(65536):
            connection.sendall(data)
    elif kind.startswith("call"):
        call = ServerCall(accepted(), None, LIMITS["max_message_bytes"])
        call.busy_wait_s = busy_wait_s
        call.accept(METHOD, LIMITS["timeout_s"])
        try:
            while (data := call.receive(LIMITS["timeout_s"])) is not None:
                call.send(data, LIMITS["timeout_s"])
        except BrokenCallError:
            pass
    elif kind == "grpcio":
        server = grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers([Handlers(lambda requests, context: requests)])
        print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
        server.start()
        server.wait_for_termination()
    else:
        asyncio.run(echo_in_a_loop())


async def echo_in_a_loop() -> None:
    async def back(requests, context):
        async for message in requests:
            yield message

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Handlers(back)])
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


class Handlers(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Callable) -> None:
        self.handler = grpc.stream_stream_rpc_method_handler(behaviour, same, same)

    def service(self, handler_call_details):
        return self.handler


def seconds(kind: str, busy_wait_s: float, address: str, payload: bytes, count: int) -> list[float]:
    """How long each of so many round trips takes."""
    if kind == "socket":
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return timed(lambda: (connection.sendall(payload), connection.recv(65536)), count)
    if kind.startswith("call"):
        call = ClientCall(address, METHOD, authority=address, **LIMITS)
        call.busy_wait_s = busy_wait_s
        found = timed(lambda: (call.send(payload, 60.0), call.receive(60.0)), count)
        call.close()
        return found
    if kind == "grpcio":
        with grpc.insecure_channel(address) as channel:
            outgoing = queue.SimpleQueue()
            stream = channel.stream_stream(METHOD, same, same)(iter(outgoing.get, None))
            found = timed(lambda: (outgoing.put(payload), next(stream)), count)
            outgoing.put(None)
            return found
    return asyncio.run(seconds_in_a_loop(address, payload, count))


def timed(work: Callable, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


async def seconds_in_a_loop(address: str, payload: bytes, count: int) -> list[float]:
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(METHOD, same, same)()
        for _ in range(count):
            began = time.perf_counter()
            await stream.write(payload)
            await stream.read()
            times.append(time.perf_counter() - began)
        stream.cancel()
    return times


def rows(busy_wait_s: float = 0.05, count: int = 4000) -> list[dict]:
    """Median and 99th percentile of each kind, in µs; the first tenth warms up."""
    found = []
    for kind in KINDS:
        wait = busy_wait_s if "busy" in kind else 0.0
        command = [sys.executable, "-m", "benchmarks.residual.round_trips", "--echo", kind, "--busy-wait", str(wait)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address = process.stdout.readline().strip()
            times = sorted(1e6 * t for t in seconds(kind, wait, address, bytes(400), count)[count // 10 :])
        finally:
            process.kill()
            process.wait()
        found.append(
            {"section": "round trip", "case": "400 bytes, loopback", "what": kind,
             "median_us": round(statistics.median(times)), "p99_us": round(times[int(0.99 * len(times))])}
        )  # fmt: skip
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    parser.add_argument("--busy-wait", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo is not None:
        echo(arguments.echo, arguments.busy_wait)
    else:
        print(*rows(), sep="\n")
