"""What ``communication.on_the_wire`` says, beside the bytes of a real socket between a device and a cloud."""

from collections import Counter

import certificate
import pytest
import torch
from tapped import Tap

from plpkg import communication
from plpkg.catalog import ModelShape
from plpkg.residual import CloudServer, DeviceClient
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, WINDOW_UPDATE = 0, 8
WIDE = dict(hidden=512, intermediate=16)
"""A prompt's embeddings fill many frames, and more than the 65,535 bytes that HTTP/2 allows ahead."""
CASES = {
    "tokens": (WIDE, False, dict(phase="decode", tokens=6)),
    "tokens, TLS": (WIDE, True, dict(phase="decode", tokens=6)),
    "tokens, layers on the device": (WIDE, False, dict(phase="decode", tokens=6, first_k=1)),
    "prompt": (WIDE, False, dict(phase="prefill", tokens=150)),
    "prompt, TLS": (WIDE, True, dict(phase="prefill", tokens=150)),
    "training step": (WIDE, False, dict(phase="training", tokens=100, batch=2)),
    "training step, few tokens, layers on the device": ({}, False, dict(phase="training", tokens=4, first_k=1)),
}


def run(device, tap, phase, tokens, batch=1, **_):
    """What has crossed of this run, each way: where in the tap's bytes it begins and ends."""
    marks = []

    def mark(*_):
        marks.append((len(tap.up), len(tap.down)))

    vocab, text = device.part.embedding.num_embeddings, torch.arange(batch * tokens).reshape(batch, tokens)
    device.generate(torch.tensor([[1, 2]]), 2, eos_token_id=-1)  # the connection is open
    if phase == "decode":
        device.generate(torch.tensor([[1, 2]]), tokens + 1, eos_token_id=-1, on_token=mark)
    else:
        mark()
        if phase == "prefill":
            device.generate(text % (vocab - 1) + 1, 1, eos_token_id=-1)
        else:
            device.train_step(text % (vocab - 1) + 1)
        mark()
    return zip(marks[0], marks[-1], strict=True)


def frames(stream, begin, end):
    """HTTP/2's frames in this part of a stream: type and content."""
    at = len(PREFACE) if stream.startswith(PREFACE) else 0
    while at < end:
        length = int.from_bytes(stream[at : at + 3], "big")
        if at >= begin:
            yield stream[at + 3], bytes(stream[at + 9 : at + 9 + length])
        at += 9 + length


def grpc_messages(data, kind):
    """The protobuf messages in the content of DATA frames: bytes of the tensor, and of all."""
    at = 0
    while at < len(data):
        assert data[at] == 0  # not compressed
        length = int.from_bytes(data[at + 1 : at + 5], "big")
        message = kind.FromString(data[at + 5 : at + 5 + length])
        value = getattr(message, message.WhichOneof("content"))
        yield len(value if isinstance(value, bytes) else getattr(value, "hidden", b"") or value.data), length
        at += 5 + length


def records(stream, part):
    """TLS records in this part of a stream, which begins with one: the bytes of each."""
    at, end = part
    while at < end:
        assert stream[at : at + 3] == b"\x17\x03\x03"  # application data
        yield int.from_bytes(stream[at + 3 : at + 5], "big")
        at += 5 + int.from_bytes(stream[at + 3 : at + 5], "big")


@pytest.mark.parametrize("case", CASES)
def test_a_real_socket_carries_what_the_formula_says(adapted, tmp_path, case):
    shape, encrypted, settings = CASES[case]
    ranks = dict(r_c2d=64, r_d2c=48) if shape else dict(r_c2d=5, r_d2c=3)
    model = adapted(shape=shape, **ranks)
    size = ModelShape.from_config(model.get_base_model().config, "small")
    messages = list(communication.low_rank_messages(size, **ranks, **settings))
    expected = communication.on_the_wire(messages, tls=encrypted)
    common, cloud, device = dict(precision="fp16", first_k=settings.get("first_k", 0)), {}, {}
    if encrypted:
        ca = certificate.written(tmp_path / "tls")
        cloud, device = dict(tls=tmp_path / "tls", token="secret"), dict(ca=ca, token="secret")
    with (
        CloudServer(model, **common, **cloud) as server,
        Tap(server.address) as tap,
        DeviceClient(tap.address, model, **common, **device) as client,
    ):
        parts = list(run(client, tap, **settings))
        streams = bytes(tap.up), bytes(tap.down)

    passes = settings["tokens"] if settings["phase"] == "decode" else 1
    beyond = 3 * passes  # no number here is 16,384 or more
    one_frame = expected.window_updates == 26 * len(messages)
    cuts = 0 if one_frame else expected.window_updates // 13
    captured = sum(end - begin for begin, end in parts)
    assert expected.stream - expected.window_updates <= captured <= expected.stream + beyond + (9 + 22) * cuts
    if encrypted:
        count = sum(len(list(records(*each))) for each in zip(streams, parts, strict=True))
        assert len(messages) <= count <= expected.tls // 22 + cuts
        return
    kinds, sent = Counter(), []
    for stream, part, kind in zip(streams, parts, (FromDevice, FromCloud), strict=True):
        found = list(frames(stream, *part))
        kinds.update(number for number, _ in found)
        sent += grpc_messages(b"".join(content for number, content in found if number == DATA), kind)
    payload, packed = map(sum, zip(*sent, strict=True))
    assert (payload, len(sent)) == (expected.payload, len(messages))
    assert expected.protobuf <= packed - payload <= expected.protobuf + beyond
    assert expected.grpc <= 5 * len(sent) + 9 * kinds[DATA] <= expected.grpc + 9 * cuts
    assert 0 < 13 * kinds[WINDOW_UPDATE] <= expected.window_updates
