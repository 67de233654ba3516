"""The cost of a device: what it has to hold, compute and send."""

from dataclasses import dataclass

import torch

from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.cut.device_part import DevicePart
from plpkg.results import Tabular

WIRE_BITS = 16
"""Of each number that crosses, as it is counted: half precision."""


@dataclass(frozen=True)
class DeviceCost(Tabular):
    """Weights that a device holds, FLOPs that it computes, bytes that it sends and gets.

    Attributes
    ----------
    parameters
        Weights on the device, A and B of adapters in its own layers among them.
    flops_per_token
        Two for each weight that a token is multiplied with; attention between tokens comes on top.
    up_bytes_per_token, down_bytes_per_token
        Bytes that cross for each token: hidden state and every M's output; every M's input and final hidden state.
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
    projections: list[torch.Tensor] = []  # which are no parameters
    for module in device.modules():
        if isinstance(module, PrivateLoraLayer):
            projections += module.privatelora_A.values()
            projections += module.privatelora_B.values()
    if device.tail is not None:
        projections += device.tail.buffers()
    parameters = sum(tensor.numel() for tensor in (*device.parameters(), *projections))
    looked_up = [] if device.positions is None else [device.positions.weight]
    if device.embedding.weight is not device.lm_head.weight:
        looked_up.append(device.embedding.weight)
    multiplied = parameters - sum(weight.numel() for weight in looked_up)
    num_matrices = sum(len(group) for group in device.matrices)
    r_c2d, r_d2c = device.ranks
    up = device.embedding.embedding_dim + num_matrices * r_d2c
    down = device.width + num_matrices * r_c2d
    return DeviceCost(parameters, 2 * multiplied, up * WIRE_BITS / 8, down * WIRE_BITS / 8)
