"""What a device holds, computes and sends: the formula, the count, and what really happens."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from plpkg.backbones import random_backbone
from plpkg.catalog import ModelShape
from plpkg.residual import PrivateLoraConfig, split
from plpkg.residual.cost import device_cost, kept_layers_cost
from tests.residual.conftest import CUTS, IDS, backbone

from direct import Direct


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_the_formula_of_the_cost_equals_the_count(family, tied, first_k, last_k):
    model = backbone(family, options=dict(tie_word_embeddings=tied))
    shape = ModelShape.from_config(model.config)
    device, _ = split(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3)), first_k, last_k)
    counted = device_cost(device, wire_bits=32)
    assert kept_layers_cost(shape, first_k, last_k, r_c2d=5, r_d2c=3, wire_bits=32) == counted
    embeddings = {p.data_ptr(): p for p in (device.embedding.weight, device.lm_head.weight)}
    assert len(embeddings) == 1 + (not tied)


@pytest.mark.parametrize(
    "targets", [["down_proj"], ["o_proj", "up_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]]
)
def test_the_formula_knows_every_projection(targets):
    model = backbone("qwen2", options=dict(tie_word_embeddings=True))
    shape = ModelShape.from_config(model.config)
    device, _ = split(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3, target_modules=targets)), 1, 1)
    assert kept_layers_cost(shape, 1, 1, r_c2d=5, r_d2c=3, targets=targets) == device_cost(device)


@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 2)])
def test_the_cost_is_what_is_computed_and_sent(adapted, first_k, last_k):
    device, cloud = split(adapted(), first_k, last_k)
    crossed = {"up": 0, "down": 0}

    class Counted(Direct):
        def send(self, group, u):
            crossed["down"] += u.numel() * 2
            super().send(group, u)

        def receive(self, group):
            v = super().receive(group)
            crossed["up"] += v.numel() * 2
            return v

    cloud.connect(Counted(device))
    with torch.no_grad():
        sent = device.embed(IDS[:1, :1])
        hidden = cloud(sent)
    crossed["up"] += sent.numel() * 2
    crossed["down"] += hidden.numel() * 2
    cost = device_cost(device)
    assert (cost.up_bytes_per_token, cost.down_bytes_per_token) == (crossed["up"], crossed["down"])

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
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


def test_seven_billion_parameters():
    """LM head, embedding and M as the publication counts them: 2·V·d + 3·L·r²."""
    cost = kept_layers_cost("llama-2-7b", r_c2d=128, r_d2c=128)
    assert cost.parameters == 2 * 32000 * 4096 + 3 * 32 * 128**2
    assert cost.flops_per_token == 2 * (32000 * 4096 + 3 * 32 * 128**2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kept_layers_cost("llama-2-7b", 32), "first_k must be between 0 and num_layers - 1=31, got 32"),
        (lambda: kept_layers_cost("llama-2-7b", 2, 30), "last_k must be between 0 and num_layers - 1 - first_k=29"),
        (lambda: kept_layers_cost("llama-2-7b", r_d2c=0), "r_d2c must be a whole number of at least 1, got 0"),
        (lambda: kept_layers_cost("llama-2-7b", targets=["down"]), "a target must be one of 'q_proj', .*, got 'down'"),
        (lambda: kept_layers_cost(ModelShape.from_config(backbone("gemma2").config)), "family must be one of 'llama'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
