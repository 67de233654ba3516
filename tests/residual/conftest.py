"""What the tests of this room share."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from plpkg.backbones import random_backbone
from plpkg.residual import PrivateLoraConfig

from rounding import assert_as_exact


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


def _same_gradients(found, whole, *batches, labels=None):
    """Gradients are the undivided model's own for these batches; ``found`` by name, or in its parameters' order."""
    expected, exact = (_gradients(model, batches, labels) for model in (whole, copy.deepcopy(whole).double()))
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found = [found[name] for name in expected]
    sizes = [gradient.norm() for gradient in exact.values()]  # so that a small matrix counts as much as a large one
    relative = (
        [g / size for g, size in zip(gs, sizes, strict=True)] for gs in (found, expected.values(), exact.values())
    )
    assert_as_exact(*relative)


def _gradients(model, batches, labels):
    model.zero_grad()
    for ids in batches:
        model(input_ids=ids, labels=ids if labels is None else labels).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="session")
def same_gradients():
    """Compares gradients with those of a model in one process, matrix by matrix."""
    return _same_gradients


@pytest.fixture(scope="session")
def adapted():
    """Makes a small random model of any family with an adapter (PrivateLoRA's, or LoRA's) that is random, not zero."""
    return _adapted
