"""The loss of a training step, without a cloud."""

import pytest
import torch
from peft import get_peft_model

from plpkg.residual import PrivateLoraConfig, split
from plpkg.residual.wire.training_step import _losses
from tests.residual.conftest import backbone


def test_each_chunk_has_its_own_loss_and_scale():
    device, _ = split(get_peft_model(backbone(num_layers=2, vocab=32), PrivateLoraConfig(r_c2d=6, r_d2c=6)), last_k=1)
    beside_m = [parameter for parameter in device.last.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(2, 5, device.width, generator=generator)  # (batch, seq, width)
    targets = torch.tensor([[1, 2, 3, 4], [5, -100, -100, -100]])  # (batch, seq - 1)
    first, second = _losses(device, final, targets, [4, 1], beside_m)
    for chunk, (loss, row, predicted) in enumerate(((first, targets[0], 4), (second, targets[1], 1))):
        states = final[chunk : chunk + 1].clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(device.logits(states)[0, :-1], row)
        gradient, *others = torch.autograd.grad(expected, [states, *beside_m])
        assert (row != -100).sum() == predicted
        assert loss.value == pytest.approx(expected.item())
        assert torch.allclose(loss.grad_final / loss.scale, gradient, atol=1e-6)
        assert 0.5 <= loss.grad_final.abs().max() < 1
        for parameter, other in zip(beside_m, others, strict=True):
            assert torch.allclose(loss.gradients[parameter], other, atol=1e-6)


def test_a_loss_that_is_not_finite_is_refused():
    device, _ = split(get_peft_model(backbone(num_layers=2, vocab=32), PrivateLoraConfig(r_c2d=6, r_d2c=6)))
    final = torch.full((1, 3, device.width), torch.nan)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        _losses(device, final, torch.tensor([[1, 2]]), [2], [])
