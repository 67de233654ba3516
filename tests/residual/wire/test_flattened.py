"""Modules that see the places of a text in other dimensions: all at once, as a shared expert, or those of its cache."""

import copy

import pytest
import torch
from peft import get_peft_model
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from plpkg.residual import CloudServer, DeviceClient, LadderConfig, PrivateLoraConfig, RefusedError

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, moe_intermediate_size=16)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
EXPERT = ["shared_expert.gate_proj", "shared_expert.up_proj"]


def shared_expert():
    options = dict(num_key_value_heads=2, intermediate_size=64, num_experts=4, shared_expert_intermediate_size=32)
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **options))


def latent_attention():
    options = dict(num_key_value_heads=4, intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2, n_group=1)
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **options, **LATENT, topk_group=1, first_k_dense_replace=1))


def private_lora(targets, **options):
    return PrivateLoraConfig(r_c2d=4, r_d2c=4, target_modules=targets, **options)


CUT = {
    "M": (shared_expert, lambda: private_lora(EXPERT)),
    "M, late": (shared_expert, lambda: private_lora(EXPERT, late=True)),
    "M, beside others": (shared_expert, lambda: private_lora([*EXPERT, "shared_expert.down_proj", "q_proj"])),
    "ladder": (shared_expert, lambda: LadderConfig(r=4)),
    "ladder, latent attention": (latent_attention, lambda: LadderConfig(r=4)),
}


def models(make, config):
    """The device's model, trained a little, and the cloud's."""
    torch.manual_seed(0)
    whole = make().eval()
    mine, cloud = (get_peft_model(copy.deepcopy(whole), config()).eval() for _ in range(2))
    for p in mine.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    return mine, cloud


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("make", "config"), CUT.values(), ids=CUT)
def test_over_the_wire_it_is_the_whole_model(make, config, batch):
    mine, cloud = models(make, config)
    ids = torch.randint(1, 97, (batch, 7), generator=torch.Generator().manual_seed(1))
    learning = [p for p in mine.parameters() if p.requires_grad]
    output = mine(input_ids=ids, labels=ids)
    expected = torch.autograd.grad(output.loss, learning)
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    written = mine.generate(ids, attention_mask=torch.ones_like(ids), **options)
    with CloudServer(cloud, precision="fp32") as server, DeviceClient(server.address, mine, precision="fp32") as client:
        with torch.no_grad():
            torch.testing.assert_close(client.logits(ids), output.logits, rtol=1e-4, atol=1e-4)  # float32 on the wire
        assert torch.equal(client.generate(ids, max_new_tokens=5), written)
        loss = client.train_step(ids, ids)
    assert loss == pytest.approx(output.loss.item(), rel=1e-4)
    for p, gradient in zip(learning, expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


def test_what_reads_its_cache_again_is_refused_by_a_sentence():
    mine, cloud = models(latent_attention, lambda: private_lora(["kv_b_proj"]))
    ids = torch.randint(1, 97, (1, 7), generator=torch.Generator().manual_seed(1))
    with (
        CloudServer(cloud, precision="fp32") as server,
        DeviceClient(server.address, mine, precision="fp32") as client,
        pytest.raises(RefusedError, match=r"an adapted module reads \(1, 1, 8\) places where the text has \(1, 1\)"),
    ):
        client.generate(ids, max_new_tokens=3)
