"""What a device has to hold, compute and send."""

from dataclasses import dataclass

from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.cut.device_part import DevicePart
from plpkg.results import Tabular

WIRE_BITS = 16
"""Of each number that crosses, as it is counted: half precision."""


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


def device_cost(device: DevicePart) -> DeviceCost:
    """Count a device's part as it is."""
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
        (hidden + crossing * device.ranks[1]) * WIRE_BITS / 8,
        (device.width + crossing * device.ranks[0]) * WIRE_BITS / 8,
    )
