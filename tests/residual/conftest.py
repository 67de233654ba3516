"""What the tests of this room share."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from plpkg.backbones import random_backbone
from plpkg.residual import PrivateLoraConfig


def _adapted(family="llama", m_scale=1.0, options=None, lora=None, **config):
    kv_heads = 4 if family == "gpt2" else 2
    model = random_backbone(
        family, num_layers=4, num_kv_heads=kv_heads, vocab=64, hidden=32, intermediate=48, options=options
    )
    chosen = PrivateLoraConfig(**dict(r_c2d=5, r_d2c=3) | config) if lora is None else LoraConfig(**lora)
    model = get_peft_model(model, chosen)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "privatelora_M" in name or "lora_" in name:
                parameter.copy_(m_scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _same_gradients(found, expected, rel=1e-6):
    """Pairs in the same order. All as one vector are equal to ``rel``, and each matrix to three times that.

    In float32 a single matrix of one undivided process is up to 1.4e-6 from float64's already.
    """
    error, size = (torch.stack([v.double().norm() for v in values]) for values in (
        [one - other for one, other in zip(found, expected, strict=True)], expected
    ))  # fmt: skip
    assert (error <= 3 * rel * size).all(), (error / size).tolist()
    assert error.norm() <= rel * size.norm(), (error.norm() / size.norm()).item()


@pytest.fixture(scope="session")
def same_gradients():
    """Compares lists of gradients, relative to their norm."""
    return _same_gradients


@pytest.fixture(scope="session")
def adapted():
    """Makes a small random model of any family with an adapter (PrivateLoRA's, or LoRA's) that is random, not zero."""
    return _adapted
