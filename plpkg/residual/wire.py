"""What both ends of the connection share: terms, tensors as bytes, limits, counters, and who may talk in the clear.

The messages are in ``wire.proto``. A tensor crosses as its raw little-endian values; its shape follows from what
was agreed and from the step that it belongs to, so a payload of any other size is refused before it is read.
"""

import hashlib
import ipaddress
import re
import threading
from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from plpkg.backbones import fingerprint
from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.parts import DevicePart
from plpkg.residual.split import is_adapted
from plpkg.residual.wire_pb2 import Terms
from plpkg.results import Tabular
from plpkg.validation import host_and_port, number, one_of, whole_number

PROTOCOL = 1
"""Raised whenever an older peer would misunderstand."""

METHOD = "/plpkg.residual.v1.Residual/Connect"

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Limits:
    """What a cloud allows.

    Attributes
    ----------
    sessions
        At the same time, those included that wait for their device to come back.
    tokens
        Of a sequence, its KV cache and the step together.
    batch
        Sequences in a step.
    message_bytes
        Of one message.
    answer_s
        How long a device may take to answer within a step.
    idle_s
        How long it may say nothing between two steps.
    resume_s
        How long a session waits for a device whose connection broke.
    """

    sessions: int = 16
    tokens: int = 4096
    batch: int = 64
    message_bytes: int = 64 * 2**20
    answer_s: float = 30.0
    idle_s: float = 600.0
    resume_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("sessions", "tokens", "batch", "message_bytes"):
            whole_number(name, getattr(self, name), 1)
        for name in ("answer_s", "idle_s", "resume_s"):
            number(name, getattr(self, name), open_low=True)


_COUNTING = threading.Lock()  # the cloud's sessions count in one counter


@dataclass
class Counter(Tabular):
    """What has crossed so far, seen from the side that counts.

    Attributes
    ----------
    sent_bytes, received_bytes
        Payload: the tensors' bytes.
    sent_message_bytes, received_message_bytes
        The protobuf messages that carried them, and those of the handshake.
    round_trips
        How many times the device sent something and waited for the cloud's answer.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_message_bytes: int = 0
    received_message_bytes: int = 0
    round_trips: int = 0

    def sent(self, payload: bytes, message) -> None:
        """Count one message on its way out."""
        with _COUNTING:
            self.sent_bytes += len(payload)
            self.sent_message_bytes += message.ByteSize()

    def received(self, payload: bytes, message) -> None:
        """Count one message that came in."""
        with _COUNTING:
            self.received_bytes += len(payload)
            self.received_message_bytes += message.ByteSize()

    def __sub__(self, earlier: "Counter") -> "Counter":
        """What has crossed since ``earlier``, a copy made then."""
        return Counter(**{name: value - vars(earlier)[name] for name, value in vars(self).items()})

    def rows(self) -> list[dict]:
        return [vars(self).copy()]

    def __repr__(self) -> str:
        return (
            f"{self.sent_bytes:,} bytes sent + {self.received_bytes:,} received, {self.round_trips} round trips "
            f"({self.sent_message_bytes:,} + {self.received_message_bytes:,} with protobuf)"
        )


def fingerprint_of_bases(model: nn.Module, adapter_name: str) -> str:
    """What identifies every A and B of an adapter: their signs, which are the same in every precision."""
    digest = hashlib.sha256()
    for layer in model.modules():
        if isinstance(layer, PrivateLoraLayer) and adapter_name in layer.privatelora_M:
            for buffers in (layer.privatelora_A, layer.privatelora_B):
                digest.update(torch.signbit(buffers[adapter_name]).cpu().numpy().tobytes())
    return digest.hexdigest()


def terms(model: PeftModel, device: DevicePart, adapter_name: str, cut: tuple[int, int], precision: str) -> Terms:
    """What the other side must have as well.

    Parameters
    ----------
    model
        The adapted model.
    device
        The device's part of it.
    adapter_name
        Which adapter.
    cut
        ``(first_k, last_k)``.
    precision
        One of :data:`PRECISIONS`.
    """
    one_of("precision", precision, tuple(PRECISIONS))
    config = model.peft_config[adapter_name]
    adapted = [name for name, module in model.named_modules() if is_adapted(module, adapter_name)]
    layers = {int(number) for name in adapted for number in re.findall(r"\.(\d+)\.", name)}
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
    return Terms(
        protocol=PROTOCOL,
        model=fingerprint(model.get_base_model()),
        hidden=device.embedding.embedding_dim,
        targets=f"{kinds} of layers {', '.join(map(str, sorted(layers)))}",
        projections=[len(group) for group in device.matrices],
        r_c2d=device.ranks[0],
        r_d2c=device.ranks[1],
        init=getattr(config, "init", "lora"),
        projection_seed=getattr(config, "projection_seed", 0),
        precision=precision,
        first_k=cut[0],
        last_k=cut[1],
        bases=fingerprint_of_bases(model, adapter_name),
    )


def differences(device: Terms, cloud: Terms) -> str:
    """A sentence for each field in which the two differ, both values in it; empty if they agree."""
    found = []
    for field in Terms.DESCRIPTOR.fields:
        here, there = getattr(device, field.name), getattr(cloud, field.name)
        if here != there and not (field.name == "bases" and found):  # they follow from all the others
            shown = (list(v) if field.is_repeated else v for v in (here, there))
            found.append("{} is {!r} on the device and {!r} on the cloud".format(field.name, *shown))
    return "; ".join(found)


def pack(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    """The tensor's values as raw bytes.

    Raises
    ------
    OverflowError
        A finite value is too large for float16.
    """
    narrowed = tensor.detach().to("cpu", dtype)
    if dtype == torch.bfloat16:  # NumPy has none
        return narrowed.contiguous().view(torch.int16).numpy().tobytes()
    values = narrowed.numpy()
    if dtype == torch.float16 and not np.isfinite(values).all() and torch.isfinite(tensor).all():
        raise OverflowError(f"a value of {tensor.abs().max().item():g} is too large for fp16: take bf16 or fp32")
    return values.tobytes()


def unpack(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of raw bytes, ``shape`` and ``dtype``.

    Raises
    ------
    ValueError
        The bytes are not as many as the shape needs.
    """
    expected = torch.Size(shape).numel() * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"a tensor of shape {tuple(shape)} has {expected} bytes, got {len(data)}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` never leaves this machine; errors as in :func:`plpkg.validation.host_and_port`."""
    host, _ = host_and_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_protection(address: str, *, encrypted: bool, token: str | None) -> None:
    """Refuse to talk in the clear, or to anybody, across a network.

    Raises
    ------
    ValueError
        The address is not a loopback one, and TLS or the token is missing.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ValueError("the token must be printable ASCII, not empty")
    if is_loopback(address):
        return
    missing = [what for what, there in (("TLS", encrypted), ("a token", token is not None)) if not there]
    if missing:
        raise ValueError(f"{address} is not on this machine: {' and '.join(missing)} needed")
