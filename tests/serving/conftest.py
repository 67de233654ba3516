"""What the tests of this room share: adapters that PEFT makes, so that PEFT is the reference."""

import copy
import warnings

import peft
import pytest
import torch

from plpkg.adapters import Adapter, Factors, targets
from plpkg.backbones import random_backbone

SIZES = dict(num_layers=2, hidden=16, num_heads=2, intermediate=24, vocab=48, max_positions=96)


def backbone(family="llama", dtype=torch.float64, **options):
    """A tiny random model, in float64 so that no two orders of a sum choose another token; it never ends a text."""
    model = random_backbone(family, dtype=dtype, **SIZES | options)
    model.generation_config.eos_token_id = None
    return model


def adapted(model, rank, seed=0, std=0.3, **options):
    """A PEFT model on a copy, all its factors random; and the adapter that it is."""
    names = sorted({name.rpartition(".")[2] for name in targets(model)})
    options = dict(r=rank, lora_alpha=8, target_modules=names) | options
    options.setdefault("fan_in_fan_out", model.config.model_type == "gpt2")
    whole = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, layer in whole.named_modules():
        if hasattr(layer, "lora_A"):
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            for weight, size in ((down, down.shape[1] ** -0.5), (up, std)):
                value = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.data = (value * size).to(model.dtype)
            factors[name.removeprefix("base_model.model.")] = Factors(down.data, up.data, layer.scaling["default"])
    config = peft.LoraConfig(**options).to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return whole, Adapter.of(config, factors)


def alone(model, ids, new, **options):
    """What ``generate`` writes after one prompt."""
    ids = torch.as_tensor(ids)[None]
    options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)) | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(input_ids=ids, **options)[0, ids.shape[1] :].tolist()


def texts(*lengths, seed=0, vocab=48):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator) for length in lengths]


class Tools:
    backbone, adapted, alone, texts = map(staticmethod, (backbone, adapted, alone, texts))


@pytest.fixture(scope="session")
def tools():
    return Tools
