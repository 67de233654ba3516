"""What a device has to hold, compute and send: counted, and by formula."""

from collections.abc import Sequence
from dataclasses import dataclass

from plpkg import catalog
from plpkg.catalog import ModelShape
from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.device_part import DevicePart
from plpkg.residual.methods import QKV
from plpkg.results import Tabular
from plpkg.validation import one_of, whole_number


@dataclass(frozen=True)
class DeviceCost(Tabular):
    """What a device has to hold, compute and send.

    Attributes
    ----------
    parameters
        Weights on the device, A and B of adapters in its own layers among them.
    flops_per_token
        Two for each weight that a token is multiplied with; attention between tokens comes on top.
    up_bytes_per_token, down_bytes_per_token
        What crosses for each token: hidden state and every M's output; every M's input and final hidden state.
    """

    parameters: int
    flops_per_token: int
    up_bytes_per_token: float
    down_bytes_per_token: float

    def rows(self) -> list[dict]:
        return [dict(vars(self))]

    def __repr__(self) -> str:
        return (
            f"DeviceCost({self.parameters:,} parameters, {self.flops_per_token:,} FLOPs per token, "
            f"{self.up_bytes_per_token:,g} bytes up and {self.down_bytes_per_token:,g} down)"
        )


def device_cost(device: DevicePart, *, wire_bits: int = 16) -> DeviceCost:
    """Count a device's part as it is: :func:`kept_layers_cost` is the formula."""
    whole_number("wire_bits", wire_bits, 1)
    adapters = [m for m in device.modules() if isinstance(m, PrivateLoraLayer)]
    projections = [t for m in adapters for part in (m.privatelora_A, m.privatelora_B) for t in part.values()]
    projections += [] if device.tail is None else device.tail.buffers()
    parameters = sum(t.numel() for t in (*device.parameters(), *projections))
    looked_up = [] if device.positions is None else [device.positions.weight]
    if device.embedding.weight is not device.lm_head.weight:
        looked_up.append(device.embedding.weight)
    crossing, hidden = sum(map(len, device.matrices)), device.embedding.embedding_dim
    return DeviceCost(
        parameters,
        2 * (parameters - sum(t.numel() for t in looked_up)),
        (hidden + crossing * device.ranks[1]) * wire_bits / 8,
        (device.width + crossing * device.ranks[0]) * wire_bits / 8,
    )


def kept_layers_cost(
    model: str | ModelShape,
    first_k: int = 0,
    last_k: int = 0,
    *,
    r_c2d: int = 64,
    r_d2c: int = 64,
    targets: Sequence[str] = QKV,
    wire_bits: int = 16,
) -> DeviceCost:
    """What PrivateLoRA costs a device that keeps layers at either end: ``split(first_k, last_k)``.

    Parameters
    ----------
    model
        A name of the catalog, or a shape. Families with RMSNorm and separate q, k and v: Llama, Mistral, Qwen2.
    first_k, last_k
        Decoder layers on the device; at least one stays in the cloud.
    r_c2d, r_d2c
        Ranks of each M.
    targets
        The adapted projections of a layer: ``"q_proj"`` to ``"down_proj"``.
    wire_bits
        Bits of each number on the wire.
    """
    shape = catalog.model(model)
    one_of("the model's family", shape.family, ("llama", "mistral", "qwen2"))
    whole_number("first_k", first_k, 0, shape.num_layers - 1, "num_layers - 1")
    whole_number("last_k", last_k, 0, shape.num_layers - 1 - first_k, "num_layers - 1 - first_k")
    for name, value in dict(r_c2d=r_c2d, r_d2c=r_d2c, wire_bits=wire_bits).items():
        whole_number(name, value, 1)
    hidden, q, kv, mlp = shape.hidden, shape.query_dim, shape.kv_dim, shape.intermediate
    widths = {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden),
    }  # fmt: skip
    adapted = [widths[one_of("a target", name, tuple(widths))] for name in targets]
    kept, norm = first_k + last_k, hidden
    layer = (shape.decoder_parameters - norm) // shape.num_layers
    layer += sum(r_c2d * inputs + r_d2c * outputs for inputs, outputs in adapted)  # A and B
    every_m = len(adapted) * shape.num_layers * r_c2d * r_d2c
    held = kept * layer + (norm if last_k else 0) + every_m
    head = shape.embedding_parameters
    crossing = len(adapted) * (shape.num_layers - kept)
    return DeviceCost(
        held + head * (1 if shape.tied_embeddings else 2),
        2 * (held + head),
        (hidden + crossing * r_d2c) * wire_bits / 8,
        (hidden + crossing * r_c2d) * wire_bits / 8,
    )
