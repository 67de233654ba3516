"""A transport without a wire: the device's part in the same process, so that the cut can be held against the model."""

import torch

from plpkg.residual.cut.device_part import DevicePart


class Direct:
    def __init__(self, device: DevicePart) -> None:
        self.device = device
        self._answers: dict[int, torch.Tensor] = {}

    def send(self, group: int, u: torch.Tensor) -> None:
        self._answers[group] = self.device.residual(group, u, train=torch.is_grad_enabled())

    def receive(self, group: int) -> torch.Tensor:
        return self._answers.pop(group)

    def backward(self, group: int, grad_v: torch.Tensor, wanted: bool) -> torch.Tensor:
        grad_u, (gradients,) = self.device.residual_backward(group, grad_v)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return grad_u
