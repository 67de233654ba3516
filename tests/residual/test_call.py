"""One call: against grpcio at either end, and against peers that speak badly or not at all."""

import concurrent.futures
import contextlib
import queue
import socket
import ssl
import threading
import time

import grpc
import pytest
from grpc import StatusCode
from h2.settings import SettingCodes
from hypothesis import given, settings, strategies as st

from plpkg.residual import certificates
from plpkg.residual.call import WINDOW, BrokenCallError, ClientCall, ServerCall, StatusError

METHOD = "/plpkg.Test/Echo"
SIZES = [0, 1, 400, 16_379, 16_384, 70_000, 3 * WINDOW]
DETAILS = "100 % wrong: ä, 数, \n and /path?x=%41"
LIMIT = 32 * 2**20


def call(address, method=METHOD, limit=LIMIT, **options):
    return ClientCall(address, method, authority=address, timeout_s=20, max_message_bytes=limit, **options)


def same(data):
    return data


def payload(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


class Grpcio(grpc.GenericRpcHandler):
    """Sends everything back, and ends with the status that it is asked for."""

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.echo, same, same) if details.method == METHOD else None

    def echo(self, requests, context):
        for data in requests:
            if data == b"abort":
                context.abort(StatusCode.DATA_LOSS, DETAILS)
            yield data
        context.set_trailing_metadata([("seen", dict(context.invocation_metadata()).get("colour", "none"))])


@pytest.fixture
def grpcio_server():
    size = [("grpc.max_receive_message_length", -1)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=size)
    server.add_generic_rpc_handlers([Grpcio()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(0).wait()


@contextlib.contextmanager
def serving(work, *, tls=None, limit=LIMIT):
    """A thread that does ``work(call)`` for one connection; gives its address, and what became of it."""
    outcome = concurrent.futures.Future()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            served = ServerCall(listener.accept()[0], tls, limit)
            try:
                served.accept(METHOD, 20)
                outcome.set_result(work(served))
            except Exception as error:
                outcome.set_exception(error)
            finally:
                served.close()

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", outcome
        thread.join(30)
        assert not thread.is_alive()


def echo(served):
    while (data := served.receive(20)) is not None:
        if data == b"abort":
            served.finish(StatusCode.DATA_LOSS, DETAILS)
            return
        served.send(data, 20)
    served.finish(StatusCode.OK)


def test_a_grpcio_server_gets_and_gives_every_message(grpcio_server):
    client = call(grpcio_server, metadata=[("colour", "green")])
    for size in SIZES:
        client.send(payload(size), 20)
        assert client.receive(20) == payload(size)
    client.end(20)
    assert client.receive(20) is None
    assert client._headers["seen"] == "green"
    client.close()


def test_many_messages_can_be_under_way_before_one_is_read(grpcio_server):
    client = call(grpcio_server)
    messages = [payload(size) for size in (7, 100_000, 0, 50_000)] * 5
    for message in messages:
        client.send(message, 20)
    client.end(20)
    assert list(iter(lambda: client.receive(20), None)) == messages
    client.close()


@pytest.mark.parametrize("before", [[], [b"one", b"two"]])
def test_a_grpcio_servers_status_arrives(grpcio_server, before):
    client = call(grpcio_server)
    for message in [*before, b"abort"]:
        client.send(message, 20)
    assert [client.receive(20) for _ in before] == before
    with pytest.raises(StatusError) as ended:
        client.receive(20)
    assert (ended.value.code, ended.value.details) == (StatusCode.DATA_LOSS, DETAILS)
    client.send(b"too late", 20)
    with pytest.raises(StatusError):
        client.receive(20)
    client.close()


def test_what_a_server_does_not_know_is_unimplemented(grpcio_server):
    client = call(grpcio_server, "/plpkg.Test/Other")
    client.send(b"", 20)
    with pytest.raises(StatusError) as ended:
        client.receive(20)
    assert ended.value.code is StatusCode.UNIMPLEMENTED
    client.close()
    with serving(echo) as (address, outcome):
        other = call(address, "/plpkg.Test/Other")
        other.send(b"", 20)
        with pytest.raises(StatusError, match=r"there is no /plpkg\.Test/Other"):
            outcome.result(20)
        other.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_grpcio_client_gets_and_gives_every_message(tmp_path, encrypted):
    tls = server_side(certificates.write(tmp_path / "tls").parent) if encrypted else None
    with serving(echo, tls=tls) as (address, outcome), contextlib.ExitStack() as stack:
        size = [("grpc.max_receive_message_length", -1)]
        if encrypted:
            credentials = grpc.ssl_channel_credentials((tmp_path / "tls" / "cert.pem").read_bytes())
            channel = stack.enter_context(grpc.secure_channel(address, credentials, size))
        else:
            channel = stack.enter_context(grpc.insecure_channel(address, size))
        outgoing = queue.SimpleQueue()
        stream = channel.stream_stream(METHOD, same, same)(iter(outgoing.get, None), timeout=60)
        for length in SIZES:
            outgoing.put(payload(length))
            assert next(stream) == payload(length)
        outgoing.put(None)
        assert next(stream, None) is None
        assert stream.code() is StatusCode.OK
        outcome.result(20)


@pytest.mark.parametrize("before", [[], [b"one"]])
def test_a_grpcio_client_gets_the_status(before):
    with serving(echo) as (address, _), grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(METHOD, same, same)(iter([*before, b"abort"]), timeout=60)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert (ended.value.code(), ended.value.details()) == (StatusCode.DATA_LOSS, DETAILS)


def server_side(folder):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    tls.set_alpn_protocols(["h2"])
    return tls


def client_side(folder, alpn=("h2",)):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_verify_locations(folder / "cert.pem")
    tls.set_alpn_protocols(list(alpn))
    return tls


@pytest.mark.parametrize("busy_wait_s", [0.0, 0.005, 60.0])
def test_over_tls_large_messages_cross_both_ways(tmp_path, busy_wait_s):
    folder = certificates.write(tmp_path / "tls").parent
    with serving(echo, tls=server_side(folder)) as (address, outcome):
        client = call(address, tls=client_side(folder))
        client.busy_wait_s = busy_wait_s
        for size in SIZES:
            client.send(payload(size), 20)
            assert client.receive(20) == payload(size)
        client.end(20)
        assert client.receive(20) is None
        outcome.result(20)
        client.close()


def test_tls_to_who_speaks_something_else_or_nothing(tmp_path):
    folder = certificates.write(tmp_path / "tls").parent
    with serving(echo, tls=server_side(folder)) as (address, outcome):
        with pytest.raises(BrokenCallError):
            call(address, tls=client_side(folder, alpn=["http/1.1"]))
        with pytest.raises(BrokenCallError):
            outcome.result(20)
    with serving(echo) as (address, _), pytest.raises(BrokenCallError):
        call(address, tls=client_side(folder))
    with serving(echo, tls=server_side(folder)) as (address, _):
        other = certificates.write(tmp_path / "other").parent
        with pytest.raises(BrokenCallError, match="certificate verify failed"):
            call(address, tls=client_side(other))


@pytest.mark.parametrize("waits", ["receive", "send"])
@pytest.mark.parametrize("busy_wait_s", [0.0, 0.2, 60.0])
@pytest.mark.parametrize("encrypted", [False, True])
def test_waits_end_in_time_or_when_another_thread_says_so(tmp_path, waits, busy_wait_s, encrypted):
    folder = certificates.write(tmp_path).parent if encrypted else None
    done = threading.Event()
    with serving(lambda served: done.wait(20), tls=folder and server_side(folder)) as (address, _):
        client = call(address, tls=folder and client_side(folder))
        client.busy_wait_s = busy_wait_s
        wait = {"receive": client.receive, "send": lambda timeout_s: client.send(payload(3 * WINDOW), timeout_s)}[waits]
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            wait(0.3)
        assert time.monotonic() - began >= 0.3
        client.failure = None  # of a message that was sent in part
        failure = StatusError(StatusCode.ABORTED, "somebody else")
        threading.Timer(0.1, setattr, [client, "failure", failure]).start()
        with pytest.raises(StatusError, match="somebody else"):
            wait(20)
        client.failure = None
        threading.Timer(0.1, client.abandon).start()
        with pytest.raises(BrokenCallError):
            wait(20)
        client.close()
        done.set()


def test_a_status_reaches_a_client_that_has_not_read_all_and_still_sends():
    def refuse(served):
        served.send(payload(WINDOW), 20)
        served.finish(StatusCode.OUT_OF_RANGE, "enough")

    with serving(refuse) as (address, outcome):
        client = call(address)
        client.send(payload(200_000), 20)
        time.sleep(0.2)
        assert client.receive(20) == payload(WINDOW)
        with pytest.raises(StatusError, match="enough"):
            client.receive(20)
        client.close()
        outcome.result(20)


@pytest.mark.parametrize("sender", ["client", "server"])
def test_a_message_beyond_the_limit_is_refused_before_it_is_there(sender):
    def work(served):
        if sender == "server":
            served.send(payload(5000), 20)
        return served.receive(20)

    with serving(work, limit=1000) as (address, outcome):
        client = call(address, limit=1000)
        client.send(payload(5000 if sender == "client" else 10), 20)
        with pytest.raises(StatusError, match="a message of 5000 bytes, the limit is 1000"):
            client.receive(20) if sender == "server" else outcome.result(20)
        client.close()


def test_a_window_that_becomes_negative_is_waited_for():
    """The peer may allow less than has been sent already."""
    done = threading.Event()

    def work(served):
        served.receive(20)
        served._http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 50_000})
        served.send(b"now", 20)
        done.wait(20)

    with serving(work) as (address, _):
        client = call(address)
        client.send(payload(100_000), 20)
        assert client.receive(20) == b"now"
        assert client._http.local_flow_control_window(client._stream) < 0
        with pytest.raises(TimeoutError):
            client.send(b"x", 0.5)
        with pytest.raises(BrokenCallError, match="sent in part"):
            client.send(b"y", 0.5)
        client.close()
        done.set()


def test_a_status_is_heard_by_who_cannot_send_any_more():
    with serving(lambda served: served.finish(StatusCode.RESOURCE_EXHAUSTED, "enough", timeout_s=0.01)) as (
        address,
        outcome,
    ):
        client = call(address)
        client.send(b"x", 20)
        outcome.result(20)
        time.sleep(0.2)
        for _ in range(5):
            client.send(payload(1000), 20)
        with pytest.raises(StatusError, match="enough"):
            client.receive(20)
        client.close()


@pytest.mark.parametrize(
    ("status", "code"),
    [("5000" * 2000, StatusCode.UNKNOWN), ("", StatusCode.UNKNOWN), ("16", StatusCode.UNAUTHENTICATED)],
)
def test_any_status_and_any_bytes_in_its_message_are_one(status, code):
    def work(served):
        trailers = [(b":status", b"200"), (b"grpc-status", status.encode()), (b"grpc-message", b"caf\xe9 %zz")]
        served._http.send_headers(served._stream, trailers, end_stream=True)
        served._flush(time.monotonic() + 5)

    with serving(work) as (address, _):
        client = call(address)
        client.send(b"x", 5)
        with pytest.raises(StatusError, match="caf") as ended:
            client.receive(10)
        assert ended.value.code is code
        client.close()


def test_pings_before_the_call_have_an_end():
    with serving(echo) as (address, outcome):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(PREFACE + b"\0\0\0\4\0\0\0\0\0")
                for _ in range(2000):
                    connection.sendall(100 * (b"\0\0\x08\6\0\0\0\0\0" + bytes(8)))
            with pytest.raises(BrokenCallError, match="bytes came, but no call"):
                outcome.result(20)


def test_who_answers_after_the_call_was_reset_hears_that_it_is_broken():
    reset = threading.Event()

    def work(served):
        message = served.receive(20)
        reset.wait(20)
        with contextlib.suppress(TimeoutError):  # it may have come with the message
            served._read(time.monotonic() + 0.5)
        served.send(message, 20)

    with serving(work) as (address, outcome):
        client = call(address)
        client.send(b"x", 5)
        client.end(5)
        client._http.reset_stream(client._stream)
        client._flush(time.monotonic() + 5)
        reset.set()
        with pytest.raises(BrokenCallError):
            outcome.result(20)
        client.close()


def test_a_compressed_message_is_refused():
    with serving(lambda served: served.receive(20)) as (address, outcome):
        client = call(address)
        client._http.send_data(client._stream, b"\x01\0\0\0\x01x")
        client._flush(time.monotonic() + 5)
        with pytest.raises(StatusError, match="compressed") as refused:
            outcome.result(20)
        assert refused.value.code is StatusCode.UNIMPLEMENTED
        client.close()


def test_half_a_message_is_not_one():
    with serving(lambda served: served.receive(20)) as (address, outcome):
        client = call(address)
        client._http.send_data(client._stream, b"\0\0\0\0\x09half", end_stream=True)
        client._flush(time.monotonic() + 5)
        with pytest.raises(BrokenCallError, match="in the middle of a message"):
            outcome.result(20)
        client.close()


def test_who_sends_without_being_read_fills_no_memory():
    """A peer that keeps sending while this side waits to send gets no further than its window."""

    def work(served):
        served.receive(20)
        with pytest.raises(TimeoutError):
            served.send(payload(3 * WINDOW), 1.5)
        return len(served._received)

    with serving(work) as (address, outcome):
        client = call(address)
        client.send(b"begin", 5)
        with contextlib.suppress(TimeoutError, BrokenCallError):
            for _ in range(20):  # and it reads nothing, but what HTTP/2 needs
                client.send(payload(WINDOW), 1.0)
        assert outcome.result(20) <= WINDOW
        client.close()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@settings(max_examples=60)
@given(st.binary(max_size=300), st.booleans())
def test_bytes_that_are_no_call_end_it(data, preface):
    with serving(lambda served: served.receive(0.5)) as (address, outcome):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((PREFACE if preface else b"") + data)
            connection.shutdown(socket.SHUT_WR)
            with pytest.raises((BrokenCallError, StatusError, TimeoutError)):
                outcome.result(30)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 404 Not Found\r\n\r\n", b"", b"\0" * 100])
def test_who_does_not_speak_http2_is_no_server(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = call(f"127.0.0.1:{listener.getsockname()[1]}")
        client.send(b"x", 5)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            with pytest.raises(BrokenCallError):
                client.receive(10)
        client.close()


@pytest.mark.parametrize(
    ("headers", "error", "message"),
    [
        ([(":status", "404")], StatusError, "HTTP status 404"),
        ([(":status", "200")], BrokenCallError, "without a status"),
        ([(":status", "200"), ("grpc-status", "99")], StatusError, "^$"),
        ([(":status", "200"), ("grpc-status", "x")], StatusError, "^$"),
    ],
)
def test_an_answer_without_a_good_status(headers, error, message):
    def work(served):
        served._http.send_headers(served._stream, headers, end_stream=True)
        served._flush(time.monotonic() + 5)

    with serving(work) as (address, _):
        client = call(address)
        client.send(b"x", 5)
        with pytest.raises(error, match=message) as ended:
            client.receive(10)
        if error is StatusError:
            assert ended.value.code is (StatusCode.UNIMPLEMENTED if "404" in message else StatusCode.UNKNOWN)
        client.close()


def test_a_peer_that_pings_is_answered_while_somebody_waits():
    def work(served):
        served.receive(20)
        answers = []
        served._note = answers.append
        served._http.ping(b"12345678")
        served._flush(time.monotonic() + 5)
        with pytest.raises(TimeoutError):
            served.receive(0.5)
        return answers

    with serving(work) as (address, outcome):
        client = call(address)
        client.send(b"x", 5)
        with pytest.raises((TimeoutError, BrokenCallError)):
            client.receive(1)
        assert b"12345678" in [getattr(answer, "ping_data", None) for answer in outcome.result(20)]
        client.close()
