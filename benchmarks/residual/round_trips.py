"""A message there and back on loopback, through what could carry it; measured by ``benchmarks/residual/wire.py``.

* socket: the bytes alone.
* asyncio grpcio, grpcio: the bytes on a gRPC stream, by gRPC's own library.
* Messages: a typed, counted message with a deadline on such a stream, as device and cloud exchange it.
"""

import asyncio
import multiprocessing
import queue
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import grpc

from plpkg.residual.wire.messages import Counter, Messages
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Part

METHOD = "/plpkg.Echo/Echo"
KINDS = ("socket", "asyncio grpcio", "grpcio", "Messages")
LIMIT_S = 60.0


class Handler(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Callable) -> None:
        self.handler = grpc.stream_stream_rpc_method_handler(behaviour)

    def service(self, handler_call_details):
        return self.handler


def echo(kind: str, address: Connection) -> None:
    """Send everything back; says first where."""
    if kind == "socket":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address.send(listener.getsockname()[1])
            connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(65536):
            connection.sendall(data)
    elif kind == "asyncio grpcio":
        asyncio.run(echo_in_a_loop(address))
    else:
        server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler(typed if kind == "Messages" else back)])
        address.send(server.add_insecure_port("127.0.0.1:0"))
        server.start()
        server.wait_for_termination()


def back(requests: Iterator[bytes], _) -> Iterator[bytes]:
    yield from requests


def typed(requests: Iterator[bytes], _) -> Iterator[bytes]:
    messages = Messages(FromCloud, FromDevice, "the device", Counter())
    messages.listen(requests)
    sent = messages.outgoing()
    while True:
        messages.send(residual=messages.receive("residual", limit_s=LIMIT_S))
        yield next(sent)


async def echo_in_a_loop(address: Connection) -> None:
    async def back_in_a_loop(requests, _):
        async for message in requests:
            yield message

    server = grpc.aio.server(handlers=[Handler(back_in_a_loop)])
    address.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def seconds(kind: str, port: int, payload: bytes, count: int) -> list[float]:
    """How long each of so many round trips takes."""
    if kind == "socket":
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return timed(lambda: (connection.sendall(payload), connection.recv(65536)), count)
    if kind == "asyncio grpcio":
        return asyncio.run(seconds_in_a_loop(port, payload, count))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        connect = channel.stream_stream(METHOD)
        if kind == "grpcio":
            outgoing = queue.SimpleQueue()
            stream = connect(iter(outgoing.get, None))
            return timed(lambda: (outgoing.put(payload), next(stream)), count)
        messages = Messages(FromDevice, FromCloud, "the cloud", Counter())
        messages.listen(connect(messages.outgoing()))
        part = Part(group=1, data=payload)
        return timed(lambda: (messages.send(residual=part), messages.receive("residual", limit_s=LIMIT_S)), count)


def timed(exchange: Callable, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - began)
    return times


async def seconds_in_a_loop(port: int, payload: bytes, count: int) -> list[float]:
    times = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = channel.stream_stream(METHOD)()
        for _ in range(count):
            began = time.perf_counter()
            await stream.write(payload)
            await stream.read()
            times.append(time.perf_counter() - began)
        stream.cancel()
    return times


def rows(count: int = 4000) -> list[dict]:
    """Median and 99th percentile of each kind, in µs; the first tenth warms up."""
    context, measured = multiprocessing.get_context("spawn"), []
    for kind in KINDS:
        ours, theirs = context.Pipe()
        process = context.Process(target=echo, args=(kind, theirs), daemon=True)
        process.start()
        try:
            times = sorted(1e6 * t for t in seconds(kind, ours.recv(), bytes(384), count)[count // 10 :])
        finally:
            process.kill()
            process.join()
        measured.append(
            {"section": "round trip", "case": "384 bytes, loopback", "what": kind,
             "median_us": round(statistics.median(times)), "p99_us": round(times[int(0.99 * len(times))])}
        )  # fmt: skip
    return measured
