"""Retaining heads: what they compute, and that they go with their backbone alone."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM

from plpkg.retention import RetainingHeads, chunked_prefill
from plpkg.retention.head import HeadsConfig
from plpkg.retention.scorers import Locret
from tests.retention.conftest import ATTENTION, in_double, other_family

from rounding import assert_as_exact

FAMILIES = sorted({family for family, _ in ATTENTION})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_is_the_formula(backbone, ids, family):
    """W2 · act(W1 · [q, k, v]), q, k and v from the projections' own weights."""
    model = backbone(family, "eager")
    heads = RetainingHeads.attach(model, 24)
    seen = []

    class Recorded(Locret):
        def score(self, units):
            seen.append(super().score(units))
            return seen[-1]

    chunked_prefill(model, ids, Recorded(heads), 64, 64, positions="original")
    names = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"]}.get(family, ["q_proj", "k_proj", "v_proj"])
    act = functional.silu if family not in ("gemma2", "gpt2") else lambda x: functional.gelu(x, approximate="tanh")

    def by_hand(model, heads):
        hidden = model(ids, output_hidden_states=True).hidden_states[0]
        layer = (model.base_model.h if family == "gpt2" else model.base_model.layers)[0]
        normed = (layer.ln_1 if family == "gpt2" else layer.input_layernorm)(hidden)
        attention = layer.attn if family == "gpt2" else layer.self_attn
        states = torch.cat([getattr(attention, name)(normed) for name in names], dim=-1)
        w1, w2 = heads.layers[0][0].weight, heads.layers[0][2].weight
        assert w1.shape == (24, states.shape[-1])
        assert w2.shape == (4 if family == "gpt2" else 2, 24)
        return (act(states @ w1.T) @ w2.T).transpose(1, 2)

    assert_as_exact(seen[0], by_hand(model, heads), by_hand(in_double(model), in_double(heads)))


def test_the_published_sizes():
    """Llama-3.1-8B: 201.6 million weights with d_R = 1,024, a quarter of the hidden size."""
    with torch.device("meta"):
        heads = RetainingHeads(HeadsConfig("", 32, 32, 8, 128, 1024, "silu"))
    assert sum(p.numel() for p in heads.parameters()) == 32 * ((32 + 16) * 128 * 1024 + 1024 * 8)


def test_attach_takes_the_models_precision_and_its_own_seed(backbone):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    model = backbone(dtype=torch.bfloat16)
    heads, same, other = (RetainingHeads.attach(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert heads.layers[0][0].weight.dtype == torch.bfloat16
    assert heads.config.hidden == 16
    assert torch.equal(heads.layers[1][0].weight, same.layers[1][0].weight)
    assert not torch.equal(heads.layers[1][0].weight, other.layers[1][0].weight)


def test_saved_and_loaded_they_are_the_same(model, tmp_path):
    model.config.hidden_act = "relu"
    heads, folder = RetainingHeads.attach(model, 24, seed=5), tmp_path / "a" / "heads"
    assert heads.config.activation == "relu"
    with pytest.raises(FileNotFoundError, match=r"lacks retaining_heads\.safetensors"):
        RetainingHeads.from_pretrained(folder, model)
    heads.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["retaining_heads.safetensors"]
    loaded = RetainingHeads.from_pretrained(folder, model)
    assert loaded.config == heads.config
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), heads.parameters(), strict=True))
    assert repr(loaded) == "RetainingHeads(2 layers × 2 KV heads, hidden=24, 6,240 weights)"


def test_heads_of_another_backbone_are_refused(model, ids, backbone, tmp_path):
    heads = RetainingHeads.attach(model, 24)
    heads.save_pretrained(tmp_path)
    message = r"belong to a backbone with fingerprint [0-9a-f]{12}…, but LlamaForCausalLM has"
    with pytest.raises(ValueError, match=message):
        RetainingHeads.from_pretrained(tmp_path, backbone(seed=1))
    with pytest.raises(ValueError, match="belong to a backbone"):
        heads.check(backbone("qwen2"))
    chunked_prefill(model, ids, Locret(heads), 10, 4)
    model.lm_head.weight.data.neg_()
    with pytest.raises(ValueError, match="belong to a backbone"):
        chunked_prefill(model, ids, Locret(heads), 10, 4)


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-9] + bytes([7] * 9)])
def test_damaged_heads_are_refused(model, tmp_path, damage):
    RetainingHeads.attach(model, 24).save_pretrained(tmp_path)
    path = tmp_path / "retaining_heads.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path} (cannot be read|is damaged)"):
        RetainingHeads.from_pretrained(tmp_path, model)


def test_heads_of_an_earlier_version_are_refused(model, tmp_path):
    heads = RetainingHeads.attach(model, 24)
    save_file(heads.state_dict(), tmp_path / "retaining_heads.safetensors")
    with pytest.raises(ValueError, match="is of another version of plpkg, or no file of it"):
        RetainingHeads.from_pretrained(tmp_path, model)


def test_bad_input_gets_a_sentence(model):
    with pytest.raises(ValueError, match="hidden must be a whole number of at least 1, got 0"):
        RetainingHeads.attach(model, 0)
    model.config.hidden_act = "square"
    with pytest.raises(ValueError, match=r"activation must be one that transformers knows .*, got 'square'"):
        RetainingHeads.attach(model)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match="BloomAttention computes its attention past transformers' interface"):
        RetainingHeads.attach(bloom)
    gated = other_family("qwen3_5_text", layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM give 192 numbers, and .*=\(4, 2, 16\) are 128"):
        RetainingHeads.attach(gated)
    assert RetainingHeads.attach(other_family("gpt_bigcode")).config.num_kv_heads == 1
