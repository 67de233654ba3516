import pytest

from plpkg import communication
from plpkg.communication import Message, on_the_wire


def test_a_residual_by_hand():
    """384 bytes: Part has a group (2), tag and length (1 + 2); the oneof tag and length (1 + 2)."""
    message = Message("M A x", "up", (3, 1, 1, 64), layer=7)
    first = Message("A x", "down", (3, 1, 1, 64), layer=6)  # group 0, which protobuf leaves out
    both = on_the_wire([first, message])
    assert vars(on_the_wire([first])) == dict(payload=384, protobuf=6, grpc=14, window_updates=26, tls=22, tcp_ip=52)
    assert both.protobuf == 6 + 8
    assert (both.stream, both.total) == (2 * 446 + 14, 2 * (446 + 52) + 14)
    assert on_the_wire([first], tls=False).tls == 0
    assert on_the_wire([first], bits=8).payload == 192
    assert on_the_wire([Message("A x", "down", (1, 1, 1, 1), layer=0)], bits=1).payload == 1  # no half bytes


def test_each_layer_counts_its_own_pieces():
    """Long messages: frames of 16,384 with gRPC's prefix, records of 16,284, segments of 1,448."""
    message = Message("grad hidden", "up", (1, 256, 4096))
    told = on_the_wire([message])
    assert (told.payload, told.protobuf) == (2**21, 1 + 4)  # a tag; a length of 22 bits
    assert (told.grpc, told.window_updates) == (5 + 9 * 129, 26 * 129)  # 2**21 / 2**14 = 128 frames, and 10 bytes more
    assert told.tls == 22 * -(-(2**21 + 10 + 35 * 129) // 16_284)
    assert told.tcp_ip == 52 * -(-told.stream // 1448)


def test_a_token_and_a_prompt():
    token = on_the_wire(communication.low_rank_messages("llama-7b", 64))
    assert token.payload == 40_960
    assert repr(token) == ("WireBytes: 40,960 of payload, 45,582 in the TCP stream, 49,534 with TCP/IP: 20.9 % more")
    assert token.to_frame()["bytes"].sum() == token.total
    prompt = on_the_wire(communication.low_rank_messages("llama-7b", 64, phase="prefill", tokens=256))
    assert prompt.added < token.added / 5


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match="the number of messages must be a whole number of at least 1, got 0"):
        on_the_wire([])
    with pytest.raises(ValueError, match="1 and 64, got 0"):
        on_the_wire(communication.low_rank_messages("gpt2", 8), bits=0)
