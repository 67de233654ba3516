"""The cloud against devices that do what they should not, message by message."""

import contextlib
import copy
import gc
import queue
import re
import socket
import threading
import weakref

import certificate
import grpc
import pytest
import torch
from grpc import StatusCode
from hypothesis import given, settings, strategies as st
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from plpkg.residual import CloudServer, DeviceClient, Limits, PrivateLoraConfig
from plpkg.residual.wire.messages import METHOD, TEXT
from plpkg.residual.wire.terms import FINGERPRINTS, OPTIONS
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Hello, Part, Step

from waiting import PATIENCE_S, wait_until

IDS = torch.arange(1, 9).reshape(1, 8)
HIDDEN = 32


class Raw:
    """A device of single messages."""

    def __init__(self, cloud, *, metadata=(), serialize=FromDevice.SerializeToString):
        self.channel = grpc.insecure_channel(cloud.address, [("grpc.use_local_subchannel_pool", 1)])
        self.outgoing = queue.SimpleQueue()
        connect = self.channel.stream_stream(METHOD, serialize, FromCloud.FromString)
        self.call = connect(iter(self.outgoing.get, None), metadata=metadata, timeout=PATIENCE_S)

    def put(self, **content):
        self.outgoing.put(FromDevice(**content))

    def get(self):
        return next(self.call)

    def status(self):
        """How the stream ends."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code(), self.call.details()

    def close(self):
        self.call.cancel()
        self.channel.close()


@pytest.fixture
def serve(adapted):
    """Starts clouds for the model of ``adapted(**config)`` that end with the test."""
    with contextlib.ExitStack() as opened:
        yield lambda config=(), precision="fp32", **options: opened.enter_context(
            CloudServer(adapted(**dict(config)), precision=precision, **options)
        )


@pytest.fixture
def cloud(serve):
    return serve(limits=Limits(tokens=20, batch=2, sessions=3))


@pytest.fixture
def raw(request, serve):
    """Opens a device that is welcome; with ``hello``, one that has said this and read no answer."""
    with contextlib.ExitStack() as opened:

        def open_one(hello=True, *, server=None, **options):
            server = server or request.getfixturevalue("cloud")
            device = opened.enter_context(contextlib.closing(Raw(server, **options)))
            if hello:
                device.put(hello=Hello(terms=server.terms) if hello is True else hello)
            if hello is True:
                assert device.get().WhichOneof("content") == "welcome"
            return device

        yield open_one


def step(batch=1, seq=2, size=None, **fields):
    data = bytes(batch * seq * HIDDEN * 4 if size is None else size)
    return Step(batch=batch, seq=seq, hidden=data, **dict(new_sequence=True, positions=1) | fields)


def still_serves(cloud, adapted):
    with DeviceClient(cloud.address, adapted(), precision="fp32") as client:
        return client.generate(IDS, 2, eos_token_id=-1).shape == (1, 10)


@pytest.mark.parametrize(
    ("message", "code", "details"),
    [
        (step(size=7), "INVALID_ARGUMENT", r"a tensor of shape \(1, 2, 32\) has 256 bytes, got 7"),
        (step(size=0), "INVALID_ARGUMENT", "has 256 bytes, got 0"),
        (step(size=4096), "INVALID_ARGUMENT", "has 256 bytes, got 4096"),
        (step(batch=0), "INVALID_ARGUMENT", "a step of batch=0, seq=2 is empty"),
        (step(seq=0), "INVALID_ARGUMENT", "a step of batch=1, seq=0 is empty"),
        (step(seq=21), "OUT_OF_RANGE", "tokens would be 21, the cloud's limit is 20"),
        (step(batch=3), "OUT_OF_RANGE", "batch would be 3, the cloud's limit is 2"),
        (step(batch=2**32 - 1, seq=2**32 - 1, size=9), "OUT_OF_RANGE", "batch would be 4294967295"),
        (step(new_sequence=False), "INVALID_ARGUMENT", "batch=1, but the sequence began with 0"),
        (step(train=True, seq=30), "OUT_OF_RANGE", "tokens would be 30"),
        (step(positions=0), "INVALID_ARGUMENT", "positions must be between 1 and seq=2, got 0"),
        (step(positions=3), "INVALID_ARGUMENT", "positions must be between 1 and seq=2, got 3"),
        (dict(residual=Part(group=1, data=bytes(72))), "INVALID_ARGUMENT", "exchange 0 was answered with 1"),
        (dict(residual=Part(group=0, data=bytes(71))), "INVALID_ARGUMENT", "has 72 bytes, got 71"),
        (dict(residual=Part(group=0, data=b"")), "INVALID_ARGUMENT", "has 72 bytes, got 0"),
        (dict(grad_hidden=bytes(72)), "INVALID_ARGUMENT", "a residual was due, the device sent grad_hidden"),
        (dict(step=step()), "INVALID_ARGUMENT", "a residual was due, the device sent step"),
        (dict(hello=Hello()), "INVALID_ARGUMENT", "a residual was due, the device sent hello"),
        (dict(), "INVALID_ARGUMENT", "a residual was due, the device sent nothing"),
    ],
)
def test_an_impossible_step_or_answer_is_refused_with_the_reason(raw, cloud, adapted, message, code, details):
    """An answer, in the middle of a step."""
    device = raw()
    if isinstance(message, Step):
        device.put(step=message)
    else:
        device.put(step=step())
        assert device.get().residual.group == 0
        device.put(**message)
    status, reason = device.status()
    assert status.name == code
    assert re.search(details, reason)
    assert still_serves(cloud, adapted)


@pytest.fixture
def ladder(serve):
    """A cloud that answers each step by itself."""
    return serve(dict(ladder=dict(r=4)), limits=Limits(tokens=20))


@pytest.mark.parametrize(
    ("fields", "details"),
    [
        (dict(keep=0), "keep must be between 1 and the 2 positions in the cache, got 0"),
        (dict(keep=3), "keep must be between 1 and the 2 positions in the cache, got 3"),
        (dict(keep=2**32 - 1), "tokens would be 4294967297, the cloud's limit is 20"),
        (dict(batch=2), "batch=2, but the sequence began with 1"),
        (None, "a step was due, the device sent hello"),
    ],
)
def test_nonsense_in_the_middle_of_a_sequence_ends_it_and_no_other(raw, ladder, fields, details):
    devices = [raw(server=ladder) for _ in range(2)]
    for device in devices:
        device.put(step=step())
        device.get()
    odd = dict(hello=Hello()) if fields is None else dict(step=step(**dict(new_sequence=False, keep=2) | fields))
    devices[1].put(**odd)
    code, reason = devices[1].status()
    assert code in (StatusCode.INVALID_ARGUMENT, StatusCode.OUT_OF_RANGE)
    assert details in reason
    assert ladder.sessions == 1
    devices[0].put(step=step(new_sequence=False, keep=2))
    assert devices[0].get().final.hidden


def test_nothing_is_kept_of_a_stream_that_has_ended(raw, ladder):
    device = raw(server=ladder)
    device.put(step=step())
    device.get()
    (stream,) = ladder._streams
    kept = [weakref.ref(stream), weakref.ref(stream._cache)]
    del stream
    device.call.cancel()
    wait_until(lambda: not ladder._streams)
    wait_until(lambda: gc.collect() >= 0 and not any(each() for each in kept))
    assert ladder.sessions == 0


@pytest.mark.parametrize("first", [dict(step=step()), dict(residual=Part(group=0)), dict()])
def test_a_device_has_to_say_hello_first(raw, first):
    device = raw(hello=False)
    device.put(**first)
    code, details = device.status()
    assert code is StatusCode.INVALID_ARGUMENT
    assert "a hello was due" in details


def test_every_term_has_to_agree_and_a_long_one_is_sent_back_in_part(raw, cloud):
    for field in cloud.terms.DESCRIPTOR.fields:
        terms = copy.deepcopy(cloud.terms)
        terms.ClearField(field.name)
        if terms == cloud.terms:  # it is zero
            terms.MergeFrom(type(terms)(**{field.name: [1] if field.is_repeated else 1}))
        code, details = raw(Hello(terms=terms)).status()
        assert code is StatusCode.FAILED_PRECONDITION
        assert details.startswith((OPTIONS | FINGERPRINTS).get(field.name, field.name) + " ")
    terms = copy.deepcopy(cloud.terms)
    terms.targets = "x" * 2**20
    code, details = raw(Hello(terms=terms)).status()
    assert code is StatusCode.FAILED_PRECONDITION
    assert details.startswith("--target xxx")
    assert len(details) == TEXT


@pytest.mark.parametrize("said", [None, "secret", "Bearer secre", "Bearer "])
def test_a_wrong_token_gets_nothing(serve, raw, said):
    server = serve(token="secret")
    metadata = [] if said is None else [("authorization", said)]
    refused = raw(Hello(terms=server.terms), server=server, metadata=metadata)
    assert refused.status() == (StatusCode.UNAUTHENTICATED, "no token, or a wrong one")
    raw(server=server, metadata=[("authorization", "Bearer secret")])  # it is welcome


def test_random_bytes_end_the_stream_and_harm_nobody(cloud, adapted):
    @settings(max_examples=60)
    @given(data=st.binary(max_size=200), after_hello=st.booleans())
    def attack(data, after_hello):
        device = Raw(cloud, serialize=bytes)
        if after_hello:
            device.outgoing.put(FromDevice(hello=Hello(terms=cloud.terms)).SerializeToString())
            device.get()
        device.outgoing.put(data)
        device.outgoing.put(None)
        code, _ = device.status()
        device.close()
        assert code is not StatusCode.OK
        assert sum(thread.name == "plpkg-session" for thread in threading.enumerate()) < 5

    attack()
    assert still_serves(cloud, adapted)


def connect(server):
    return socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), 30)


def test_who_only_connects_is_sent_away(serve, adapted):
    """Connections without a stream, and with bytes that are no HTTP/2: gRPC's own options end them."""
    server = serve(limits=Limits(sessions=1, answer_s=1.0))
    silent = [connect(server) for _ in range(100)]
    for connection in silent[:50]:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert still_serves(server, adapted)
    for connection in silent:
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(1024):
                pass


def test_a_newcomer_takes_the_place_of_who_says_nothing(serve, adapted, raw, monkeypatch):
    monkeypatch.setattr("plpkg.residual.wire.cloud.WAITING", 2)
    server = serve(limits=Limits(sessions=1))
    with DeviceClient(server.address, adapted(), precision="fp32") as device:
        device.generate(IDS, 2)
        silent = [raw(hello=False, server=server) for _ in range(4)]
        wait_until(lambda: sum(stream.call.is_active() for stream in silent) == 2)  # whoever came first
        assert device.generate(IDS, 2, eos_token_id=-1).shape == (1, 10)
        assert device.wire.stream == 1  # it did not have to come back
    assert still_serves(server, adapted)


def test_no_more_threads_is_not_the_end(serve, adapted, monkeypatch):
    server, original, refused = serve(), threading.Thread.start, []

    def fails_once(thread):
        if thread.name == "plpkg-session" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    assert still_serves(server, adapted)
    assert refused
    wait_until(lambda: not server._streams)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_every_address_is_ipv4s_too(serve, tmp_path):
    certificate.written(tmp_path / "tls")
    server = serve(address="[::]:0", tls=tmp_path / "tls", token="t")
    connect(server).close()
    socket.create_connection(("::1", int(server.address.rpartition(":")[2])), 5).close()


def test_too_many_devices_are_told_so_and_who_leaves_makes_room(raw, cloud):
    devices = [raw() for _ in range(3)]
    full = (StatusCode.RESOURCE_EXHAUSTED, "the cloud has 3 sessions, its limit")
    assert raw(Hello(terms=cloud.terms)).status() == full
    devices[0].outgoing.put(None)
    assert devices[0].status()[0] is StatusCode.OK
    assert cloud.sessions == 2
    devices[1].put(step=step())
    devices[1].get()
    devices[1].call.cancel()  # in the middle of a step
    wait_until(lambda: cloud.sessions == 1)
    for _ in range(2):
        raw()


def test_a_message_too_large_is_refused_before_it_is_read(serve, raw):
    device = raw(server=serve(limits=Limits(message_bytes=5000)))
    device.put(step=step(seq=64))
    code, details = device.status()
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert "5000" in details


@pytest.mark.parametrize("moment", ["hello", "step", "residual", "grad_hidden"])
def test_no_wait_is_without_a_deadline(serve, raw, moment):
    limits = {"hello": Limits(answer_s=0.3), "step": Limits(idle_s=0.4)}.get(moment, Limits(answer_s=2.0))
    server = serve(limits=limits)
    device = raw(server=server, hello=moment != "hello")
    if moment in ("residual", "grad_hidden"):
        device.put(step=step(train=moment == "grad_hidden"))
        device.get()
    if moment == "grad_hidden":
        for group in range(4):
            device.put(residual=Part(group=group, data=bytes(3 * 2 * 3 * 4)))
            device.get()
    code, details = device.status()
    assert code is StatusCode.DEADLINE_EXCEEDED
    assert re.search(f"a {moment} .*was due", details)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "plpkg-session"])
    assert server.sessions == 0


def test_layers_whose_cache_is_overwritten_are_refused():
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    adapter = PrivateLoraConfig(r_c2d=2, r_d2c=2, target_modules=["q_proj", "k_proj", "v_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_config(config), adapter)
    with pytest.raises(ValueError, match="cannot be taken back to where it was before a step"):
        CloudServer(model)


def test_an_address_in_use_is_named(cloud, adapted):
    with pytest.raises(OSError, match=f"{cloud.address} cannot be bound"):
        CloudServer(adapted(), cloud.address)
