"""What a device holds, computes and sends: the formula, the count, and what really happens."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from plpkg.backbones import random_backbone
from plpkg.catalog import ModelShape
from plpkg.residual import PrivateLoraConfig, split
from plpkg.residual.cost import DeviceCost, device_cost
from tests.residual.conftest import IDS, backbone, connected


def cost_by_formula(shape, first_k=0, last_k=0, *, r_c2d, r_d2c, targets=("q_proj", "k_proj", "v_proj")):
    """What PrivateLoRA costs a device that keeps layers at either end; for RMSNorm and separate q, k and v."""
    hidden, q, kv, mlp = shape.hidden, shape.query_dim, shape.kv_dim, shape.intermediate
    widths = dict(q_proj=(hidden, q), k_proj=(hidden, kv), v_proj=(hidden, kv), o_proj=(q, hidden))
    widths |= dict(gate_proj=(hidden, mlp), up_proj=(hidden, mlp), down_proj=(mlp, hidden))
    adapted, kept = [widths[name] for name in targets], first_k + last_k
    layer = (shape.decoder_parameters - hidden) // shape.num_layers
    layer += sum(r_c2d * inputs + r_d2c * outputs for inputs, outputs in adapted)  # A and B
    held = kept * layer + (hidden if last_k else 0) + len(adapted) * shape.num_layers * r_c2d * r_d2c  # and every M
    head, crossing = shape.embedding_parameters, len(adapted) * (shape.num_layers - kept)
    return DeviceCost(
        held + head * (1 if shape.tied_embeddings else 2),
        2 * (held + head),
        (hidden + crossing * r_d2c) * 2,
        (hidden + crossing * r_c2d) * 2,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_the_formula_of_the_cost_equals_the_count(family, tied, cut):
    model = backbone(family, options=dict(tie_word_embeddings=tied))
    shape = ModelShape.from_config(model.config)
    device, _ = split(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3)), *cut)
    assert cost_by_formula(shape, *cut, r_c2d=5, r_d2c=3) == device_cost(device)
    embeddings = {p.data_ptr(): p for p in (device.embedding.weight, device.lm_head.weight)}
    assert len(embeddings) == 1 + (not tied)


@pytest.mark.parametrize(
    "targets", [["down_proj"], ["o_proj", "up_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]]
)
def test_the_formula_knows_every_projection(targets):
    model = backbone("qwen2", options=dict(tie_word_embeddings=True))
    shape = ModelShape.from_config(model.config)
    device, _ = split(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3, target_modules=targets)), 1, 1)
    assert cost_by_formula(shape, 1, 1, r_c2d=5, r_d2c=3, targets=targets) == device_cost(device)


@pytest.mark.parametrize("cut", [(0, 0), (1, 2)])
@torch.no_grad()
def test_the_cost_is_what_is_computed_and_sent(adapted, cut):
    device, cloud, transport = connected(adapted(), *cut)
    sent = device.embed(IDS[:1, :1])
    hidden = cloud(sent)
    to_device, to_cloud = (
        2 * sum(math.prod(shape) for kind, _, shape in transport.log if kind == way) for way in ("up", "down")
    )
    cost = device_cost(device)
    assert cost.up_bytes_per_token == to_cloud + 2 * sent.numel()
    assert cost.down_bytes_per_token == to_device + 2 * hidden.numel()
    with FlopCounterMode(display=False) as counter:
        device.logits(hidden)
        device.embed(IDS[:1, :1])
        for group, matrices in enumerate(device.matrices):
            device.residual(group, torch.zeros(len(matrices), 1, 1, 5))
    norms = sum(p.numel() for p in device.parameters() if p.ndim == 1)  # multiplied with as well, but in no product
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == cost.flops_per_token - 2 * norms


def test_the_cost_of_ordinary_lora_is_its_full_width(adapted):
    model = adapted(lora=dict(target_modules=["q_proj", "v_proj"], r=2))
    cost = device_cost(split(model)[0])
    assert cost.up_bytes_per_token == 2 * (32 + 4 * (32 + 16))
    assert cost.down_bytes_per_token == 2 * (32 + 4 * 32)
    assert isinstance(model.peft_config["default"], LoraConfig)


def test_position_embeddings_are_held_and_not_multiplied():
    device, _ = split(get_peft_model(random_backbone("gpt2", max_positions=100), PrivateLoraConfig(r_c2d=5, r_d2c=3)))
    cost = device_cost(device)
    matrices, embedding = 2 * 5 * 3, 256 * 64
    assert cost.parameters == embedding + 100 * 64 + matrices
    assert cost.flops_per_token == 2 * (embedding + matrices)
    assert cost.to_frame().parameters.item() == cost.parameters
    assert repr(cost) == "DeviceCost(22,814 parameters, 32,828 FLOPs per token, 140 bytes up and 148 down)"
