"""One end of a stream against what the other end can send, without a network."""

import queue

import pytest
from grpc import StatusCode

from plpkg.residual.wire.messages import BACKLOG, TEXT, BrokenStreamError, Counter, Messages, StatusError
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Goodbye, Part, Step


@pytest.fixture
def cloud():
    """The cloud's end, its counter, and the queue of what the device sends; ``None`` ends the stream."""
    incoming, traffic = queue.SimpleQueue(), Counter()
    messages = Messages(FromCloud, FromDevice, "the device", traffic)
    messages.listen(iter(incoming.get, None))
    yield messages, traffic, incoming
    incoming.put(None)


def test_both_ends_count_the_same(cloud):
    """A tensor's bytes, whatever message carries it, and the message's."""
    messages, traffic, incoming = cloud
    device_traffic = Counter()
    device = Messages(FromDevice, FromCloud, "the cloud", device_traffic)
    for content in (dict(step=Step(number=1, hidden=bytes(5))), dict(residual=Part(group=3, data=bytes(7))),
                    dict(grad_hidden=bytes(11)), dict(goodbye=Goodbye())):  # fmt: skip
        device.send(**content)
        incoming.put(device.outgoing.get())
        assert [messages.receive(*content, limit_s=10)] == list(content.values())
    assert traffic.received_bytes == device_traffic.sent_bytes == 5 + 7 + 11
    assert traffic.received_message_bytes == device_traffic.sent_message_bytes > 23


def test_the_end_is_told_however_often_it_is_asked_for(cloud):
    messages, _, incoming = cloud
    incoming.put(FromDevice(goodbye=Goodbye()).SerializeToString())
    incoming.put(None)
    assert messages.receive("step", "goodbye", limit_s=10) == Goodbye()
    for _ in range(2):
        with pytest.raises(BrokenStreamError, match="the device ended the stream"):
            messages.receive("step", limit_s=10)


def test_who_does_not_wait_for_its_turn_is_given_up(cloud):
    messages, _, incoming = cloud
    for _ in range(1000):
        incoming.put(FromDevice(goodbye=Goodbye()).SerializeToString())
    read = (messages.receive("goodbye", limit_s=10) for _ in range(1000))
    with pytest.raises(StatusError, match="the device does not wait for its turn"):
        list(read)
    assert incoming.qsize() > 900  # the rest was never read


def test_who_reads_nothing_is_given_up(cloud):
    messages, _, _ = cloud
    sent = (messages.send(grad_hidden=bytes(4)) for _ in range(1000))
    with pytest.raises(StatusError, match="the device reads nothing") as refused:
        list(sent)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert messages.outgoing.qsize() == BACKLOG


def test_a_status_is_cut_off():
    status = StatusError(StatusCode.UNKNOWN, "x" * 10_000)
    assert status.details == str(status) == "x" * (TEXT - 1) + "…"


def test_a_counter_counts_and_subtracts():
    counter = Counter()
    counter.sent(10, 16)
    earlier = Counter(**vars(counter))
    counter.received(4, 9)
    counter.round_trips += 1
    assert vars(counter - earlier) == vars(Counter(0, 4, 0, 9, 1))
    assert repr(counter) == "10 bytes sent + 4 received, 1 round trips (16 + 9 with protobuf)"
    assert counter.to_frame()["sent_bytes"].item() == 10
