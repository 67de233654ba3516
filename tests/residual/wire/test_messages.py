"""One end of a stream against what the other end can send, without a network."""

import queue

import pytest
from grpc import StatusCode
from hypothesis import given, strategies as st

from plpkg.catalog import Link
from plpkg.residual.wire import link
from plpkg.residual.wire.link import Lane
from plpkg.residual.wire.messages import BACKLOG, TEXT, BrokenStreamError, Counter, Messages, StatusError
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Hello, Part, Step

from waiting import wait_until

HELLO = FromDevice(hello=Hello()).SerializeToString()


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
    sent = device.outgoing()
    for content in (dict(step=Step(seq=1, hidden=bytes(5))), dict(residual=Part(group=3, data=bytes(7))),
                    dict(grad_hidden=bytes(11)), dict(hello=Hello())):  # fmt: skip
        device.send(**content)
        incoming.put(next(sent))
        assert [messages.receive(*content, limit_s=10)] == list(content.values())
    assert traffic.received_bytes == device_traffic.sent_bytes == 5 + 7 + 11
    assert traffic.received_message_bytes == device_traffic.sent_message_bytes > 23


def test_the_end_is_told_however_often_it_is_asked_for(cloud):
    messages, _, incoming = cloud
    incoming.put(HELLO)
    incoming.put(None)
    assert messages.receive("step", "hello", limit_s=10) == Hello()
    for _ in range(2):
        with pytest.raises(BrokenStreamError, match="the device ended the stream"):
            messages.receive("step", limit_s=10)


def test_who_does_not_wait_for_its_turn_is_given_up(cloud):
    messages, _, incoming = cloud
    for _ in range(1000):
        incoming.put(HELLO)
    read = (messages.receive("hello", limit_s=10) for _ in range(1000))
    with pytest.raises(StatusError, match="the device does not wait for its turn"):
        list(read)
    assert incoming.qsize() > 900  # the rest was never read


def test_who_reads_nothing_is_given_up(cloud):
    messages, _, _ = cloud
    sent = (messages.send(grad_hidden=bytes(4)) for _ in range(1000))
    with pytest.raises(StatusError, match="the device reads nothing") as refused:
        list(sent)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert messages._outgoing.qsize() == BACKLOG


def test_a_message_longer_than_is_due_is_refused_and_not_kept(cloud):
    messages, _, incoming = cloud
    messages.longest = len(HELLO)
    incoming.put(HELLO)
    incoming.put(bytes(1000))
    incoming.put(HELLO)
    assert messages.receive("hello", limit_s=10) == Hello()
    for _ in range(2):
        with pytest.raises(StatusError, match=f"^the device sent 1,000 bytes where at most {len(HELLO)} were due$"):
            messages.receive("hello", limit_s=10)
    _, error = messages._inbox.get_nowait()
    assert isinstance(error, StatusError)
    assert messages._inbox.empty()
    assert incoming.qsize() == 1  # what follows was never read


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("x" * 10_000, "x" * TEXT),
        ("\x1b]0;a title\x07 a\r\n\tb", "\ufffd]0;a title\ufffd a\ufffd b"),
        ("\u202e\u2028\xa0\x9b", "\ufffd" * 4),
        ("\t" * TEXT + "x", ""),
    ],
)
def test_a_status_is_one_printable_line_and_short(written, shown):
    status = StatusError(StatusCode.UNKNOWN, written)
    assert status.details == str(status) == shown


def test_a_counter_counts_and_subtracts():
    counter = Counter()
    counter.sent(10, 16)
    earlier = Counter(**vars(counter))
    counter.received(4, 9)
    counter.round_trips += 1
    assert vars(counter - earlier) == vars(Counter(0, 4, 0, 9, 1))
    assert repr(counter) == "10 bytes sent + 4 received, 1 round trips (16 + 9 with protobuf)"
    assert counter.to_frame()["sent_bytes"].item() == 10


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(scope="module")
def clock():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link, "time", Clock())
        patched.setattr(link, "SPIN_S", 0.0)  # nobody may wait for this clock without sleeping
        yield link.time


@given(trace=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=20), delay=st.integers(0, 100))
def test_a_message_arrives_by_the_formula(clock, trace, delay):
    """A byte takes a second. Some message found the lane free, and from then on it was busy until this one had left."""
    lane, arrived = Lane(8, delay), []
    trace.sort(key=lambda message: message[0])
    for sent, size in trace:
        clock.now = sent
        arrived.append(lane.delivery(size))
    expected = [
        max(trace[first][0] + sum(size for _, size in trace[first : last + 1]) for first in range(last + 1)) + delay
        for last in range(len(trace))
    ]
    assert arrived == expected
    assert lane.held_s == sum(expected) - sum(sent for sent, _ in trace)


def test_the_rate_is_shared_and_the_delays_overlap(clock):
    up, down = link.lanes(Link("slow", uplink_bits_per_s=8, downlink_bits_per_s=16, rtt_s=200))
    clock.now = 0.0
    assert [up.delivery(1) for _ in range(3)] == [101, 102, 103]
    assert down.delivery(1) == 100.5  # it has a rate of its own


def test_no_message_is_given_before_its_time(clock):
    clock.now, incoming = 0.0, queue.SimpleQueue()
    messages = Messages(FromCloud, FromDevice, "the device", Counter(), (Lane(8, 50), Lane(8, 100)))
    messages.listen(iter(incoming.get, None))
    for _ in range(2):
        incoming.put(HELLO)
    incoming.put(None)
    wait_until(lambda: messages._inbox.qsize() == 3)
    for count in (1, 2):
        assert messages.receive("hello", limit_s=10) == Hello()
        assert clock.now == 100 + count * len(HELLO)
    clock.now = 1000.0
    messages.send(grad_hidden=bytes(4))
    length = len(next(messages.outgoing()))
    assert clock.now == 1000 + length + 50
