"""Messages with their headers: protobuf, gRPC over HTTP/2, TLS 1.3 and TCP/IP, each computed from its format.

They are those of ``plpkg cloud`` and ``plpkg device``. Each layer wraps the bytes of the one above:

==================  ==============================================================================
layer               bytes
==================  ==============================================================================
protobuf            a tag of 1 and a varint for each number beside the tensor, for the tensor's
                    length, and for the length of the whole (``plpkg/residual/wire/wire.proto``)
gRPC, HTTP/2        a prefix of 5 a message; a header of 9 for each DATA frame of at most 16,384
window updates      at most two frames of 9 + 4 for each DATA frame, of the stream and of the connection
TLS 1.3             5 + 1 + 16 for each record (header, type, tag of AES-GCM)
TCP/IP              20 of IPv4, 20 of TCP and 12 of its timestamps for each segment of at most 1,448
==================  ==============================================================================

Sources: protobuf's *Encoding*, gRPC's *PROTOCOL-HTTP2*, RFC 9113 (4.1, 4.2, 6.9), RFC 8446 (5.2), RFC 9293 and 7323.

Left out: what opens a connection (handshakes, SETTINGS, HEADERS, Hello and Welcome), PING after 20 s of silence,
what is sent again after a loss, and Ethernet's or a radio's own headers. IPv6 has 20 bytes a segment more.
Acknowledgements travel with the answer; those that do not are at most one of 52 bytes for every second segment, and
one for an answer that takes longer than 40 ms.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import ceil, prod

from plpkg import results
from plpkg.communication.schedule import Message
from plpkg.validation import flag, keywords, whole_number

FRAME = 16_384
"""Bytes of a DATA frame, of which the first has gRPC's prefix: HTTP/2's default, which gRPC keeps."""

RECORD = 16_284
"""Bytes that gRPC puts into a TLS record: 100 of 16,384 are set aside for what protects them."""

SEGMENT = 1_448
"""Bytes of a segment on Ethernet: 1,500 without 52 of headers."""


@dataclass(frozen=True)
class WireBytes(results.Tabular):
    """Bytes that cross: the payload, and what each layer adds to it.

    Attributes
    ----------
    payload
        The tensors.
    protobuf, grpc, window_updates, tls, tcp_ip
        The bytes that each layer adds; for ``window_updates``, the most that there can be.
    """

    payload: int
    protobuf: int
    grpc: int
    window_updates: int
    tls: int
    tcp_ip: int

    @property
    def stream(self) -> int:
        """Bytes that a socket sends: everything but the headers of TCP/IP."""
        return self.total - self.tcp_ip

    @property
    def total(self) -> int:
        """All layers."""
        return sum(astuple(self))

    @property
    def added(self) -> float:
        """The headers as a share of the payload: 0.2 means 20 % more."""
        return self.total / self.payload - 1

    def rows(self) -> list[dict]:
        return [{"layer": name, "bytes": n, "share": n / self.payload} for name, n in vars(self).items()]

    def __repr__(self) -> str:
        return (
            f"WireBytes: {self.payload:,} of payload, {self.stream:,} in the TCP stream, {self.total:,} with TCP/IP: "
            f"{100 * self.added:.1f} % more"
        )


@keywords()
def on_the_wire(messages: Iterable[Message], bits: int = 16, *, tls: bool = True) -> WireBytes:
    """The bytes of messages on the wire, with the headers of every layer.

    Parameters
    ----------
    messages
        A schedule, such as :func:`~plpkg.communication.low_rank_messages`, or a part of it: one direction, say.
    bits
        Bits of one transmitted value.
    tls
        Whether the connection is encrypted, as it must be beyond one machine.

    Returns
    -------
    WireBytes
        In bytes. The window updates that a message causes cross in the other direction, in front of the answer, and
        are counted with the message.

    Raises
    ------
    ValueError
        There is no message, or ``bits`` is out of range.

    Notes
    -----
    Each message is counted as a write of its own. A pass has two numbers that no schedule has (how many positions came
    before, and how many come back): they are counted as below 128, and take a byte more each from 128 on, another from
    16,384 on. If the sender of a message of several frames has to wait for a window update, it cuts a frame and a
    record in two: at most 31 bytes more for each update. Residuals that come down with the final hidden state (of a
    ladder, or folded) are counted as a message of their own.
    """
    messages = list(messages)
    bits = whole_number("bits", bits, 1, 64)
    tls = flag("tls", tls)
    whole_number("the number of messages", len(messages), 1)
    first = min((message.layer for message in messages if message.layer is not None), default=0)
    each = [astuple(_one_message(message, bits, first, tls)) for message in messages]
    totals = [sum(layer) for layer in zip(*each, strict=True)]
    return WireBytes(*totals)


def _one_message(message: Message, bits: int, first: int, tls: bool) -> WireBytes:
    """The bytes of one message; ``first`` is the decoder layer of the first exchange."""
    payload = ceil(prod(message.shape) * bits / 8)
    packed = _protobuf(message, payload, first)
    frames = ceil((5 + packed) / FRAME)
    grpc = 5 + 9 * frames
    window_updates = 2 * 13 * frames
    stream = packed + grpc + window_updates
    records = 22 * ceil(stream / RECORD) if tls else 0
    segments = ceil((stream + records) / SEGMENT)
    return WireBytes(payload, packed - payload, grpc, window_updates, records, 52 * segments)


def _protobuf(message: Message, payload: int, first: int) -> int:
    """Bytes of the protobuf message that carries a tensor."""
    tensor = _field(payload) + payload
    if message.content == "grad hidden":  # the bytes alone
        return tensor
    if message.content == "grad at the cut":  # and a flag in the Step that asked for them
        return tensor + 2
    if message.content in ("embedding", "hidden at the cut"):  # Step: batch, seq, positions; keep or its like
        batch, seq = message.shape[-3:-1]
        inner = _number(batch) + _number(seq) + 2 + 2 + tensor
    elif message.content == "hidden":  # Final: round trips
        inner = tensor + 2
    elif message.layer is None:  # Part without a group
        inner = tensor
    else:  # Part: group
        inner = tensor + _number(message.layer - first)
    return _field(inner) + inner


def _number(value: int) -> int:
    """Bytes of a number's field: protobuf leaves out a zero."""
    return _field(value) if value else 0


def _field(value: int) -> int:
    """Bytes of a tag below 16 and of a varint, which has 7 bits a byte: a number, or the length of what follows."""
    return 1 + max(1, ceil(value.bit_length() / 7))
