"""Merging: the product in the weight's place, rounded once, and nothing if the adapter does not fit."""

import pytest
import torch

from plpkg.adapters import Adapter, Factors, targets
from plpkg.backbones import random_backbone
from plpkg.serving.merging import merge, unmerge

from rounding import assert_close


def adapter_for(model, rank=3, **config):
    generator = torch.Generator().manual_seed(0)
    factors = {
        path: Factors(torch.randn(rank, n_in, generator=generator), torch.randn(n_out, rank, generator=generator), 2.0)
        for path, (n_in, n_out) in targets(model).items()
    }
    return Adapter.of(dict(peft_type="LORA", r=rank, lora_alpha=6, target_modules="all-linear") | config, factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merge_adds_the_product_and_unmerge_takes_it_away(family, dtype):
    model = random_backbone(family, dtype=dtype)
    adapter = adapter_for(model, fan_in_fan_out=family == "gpt2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    merge(model, adapter)
    adapted = {f"{path}.weight": each for path, each in adapter.factors.items()}
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for name, weight in model.state_dict().items():
        if name not in adapted:
            assert torch.equal(weight, before[name])
            continue
        each = adapted[name]
        delta = each.scale * each.up.double() @ each.down.double()
        size = each.scale * each.up.double().abs() @ each.down.double().abs()
        delta, size = (delta.T, size.T) if family == "gpt2" else (delta, size)
        # Three products, a scale, two roundings to the weight's dtype.
        assert_close(weight, before[name].double() + delta, 6, size + before[name].abs())
    unmerge(model, adapter)
    for name, weight in model.state_dict().items():
        if name in adapted:  # two additions, each rounded; the two products are the same
            bound = before[name].abs().max().item() + 2 * adapted[name].scale * 3 * 25
            assert_close(weight, before[name], 2, bound)


def test_nothing_is_merged_of_an_adapter_that_does_not_fit():
    model, adapter = random_backbone("llama"), adapter_for(random_backbone("llama", num_layers=3))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for change in (merge, unmerge):
        with pytest.raises(ValueError, match=r"model.layers.2.self_attn.q_proj is absent here"):
            change(model, adapter)
    model.half()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    large = {path: Factors(each.down * 0 + 300, each.up, 2.0) for path, each in adapter_for(model).factors.items()}
    large["model.layers.1.mlp.up_proj"].up.fill_(300)  # the last but one: what comes before it fits
    config = dict(peft_type="LORA", r=3, lora_alpha=6, target_modules="all-linear")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight would not be finite in torch.float16"):
        merge(model, Adapter.of(config, large))
    with pytest.raises(ValueError, match=r"q_proj is \(32, 32\) here"):
        merge(random_backbone("llama", hidden=32), adapter_for(random_backbone("llama")))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
