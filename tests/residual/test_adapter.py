"""The adapter against the formula, PEFT's own operations, and ordinary LoRA, on every architecture family."""

import copy
import functools

import numpy as np
import pytest
import torch
from peft import PeftModel, convert_to_lora as peft_convert_to_lora, get_peft_model, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.pytorch_utils import Conv1D

from plpkg.backbones import FAMILIES
from plpkg.residual import LadderConfig, PrivateLoraConfig, convert_to_lora
from plpkg.residual.adapter import PrivateLoraLayer, gaussian_projections, svd_projections
from plpkg.residual.config import PRIVATE_LORA
from tests.residual.conftest import IDS, adapted_backbone as adapted, backbone, normal, precise

from preloaded import Process
from rounding import assert_as_exact, assert_close, sampling_error
from waiting import interpreter


def layers(model):
    return [module for module in model.modules() if isinstance(module, PrivateLoraLayer)]


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def exact_logits(model):
    return logits(precise(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_no_bit(family, dtype):
    model = backbone(family, dtype=dtype)
    before = logits(model)
    assert torch.equal(logits(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3))), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_m_learns_and_it_is_small(family):
    model = get_peft_model(backbone(family), PrivateLoraConfig(r_c2d=5, r_d2c=3))
    model(input_ids=IDS, labels=IDS).loss.backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 * (1 if family in ("phi3", "gpt2") else 3)
    assert all(".privatelora_M.default.weight" in name and p.shape == (3, 5) for name, p in trainable.items())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == (name in trainable), name


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_formula_at_every_projection(family):
    model = adapted(family)
    plain, exact = backbone(family), precise(backbone(family))
    with torch.no_grad():
        for name, layer in model.named_modules():
            if not isinstance(layer, PrivateLoraLayer):
                continue
            a, b = gaussian_projections(0, layer.module, layer.in_features, layer.out_features, 5, 3)
            delta = b.double() @ layer.privatelora_M["default"].weight.double() @ a.double()
            for whole in (plain, exact):
                target = whole.get_submodule(name.removeprefix("base_model.model."))
                target.weight += delta.T if isinstance(target, Conv1D) else delta
    assert_as_exact(logits(model), logits(plain), logits(exact))
    with pytest.raises(AssertionError, match="apart"):
        assert_as_exact(logits(backbone(family)), logits(plain), logits(exact))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_it_is_m_alone_and_loads_to_the_same_logits(family, tmp_path):
    model = adapted(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    numbers = sum(layer.privatelora_M["default"].weight.numel() for layer in layers(model))
    assert sum(t.numel() for t in saved.values()) == numbers
    assert all(name.endswith("privatelora_M.weight") for name in saved)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size < 4 * numbers + 200 * len(saved)  # a header beside M's float32
    for low_cpu_mem_usage in (False, True):
        loaded = PeftModel.from_pretrained(backbone(family), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
        assert isinstance(loaded.peft_config["default"], PrivateLoraConfig)
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_svd_projections_are_saved_and_loaded(tmp_path, monkeypatch, low_cpu_mem_usage):
    model = adapted(init="svd", r_c2d=4, r_d2c=4)
    model.save_pretrained(tmp_path)
    names = {name.rsplit(".", 1)[-1] for name in load_file(tmp_path / "adapter_model.safetensors")}
    assert names == {"weight", "privatelora_A", "privatelora_B"}

    def other_machine(weight, rank):  # where some singular vectors come out with the other sign
        a, b = svd_projections(weight, rank)
        signs = torch.tensor([1.0, -1.0] * (rank // 2))
        return signs[:, None] * a, b * signs

    monkeypatch.setattr("plpkg.residual.adapter.svd_projections", other_machine)
    loaded = PeftModel.from_pretrained(backbone(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded), logits(model))


def test_saved_projections_win_over_the_seed(tmp_path):
    model = adapted(save_projection=True)
    with torch.no_grad():
        for layer in layers(model):
            layer.privatelora_A["default"].mul_(-2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(backbone(), tmp_path)), logits(model))


def test_a_fresh_process_draws_the_same_projections():
    arguments = (7, "model.layers.0.self_attn.q_proj", 12, 8, 5, 3)
    code = (
        "from plpkg.residual.adapter import gaussian_projections as g\n"
        f"a, b = g(*{arguments!r})\nprint([x.hex() for x in (*a.flatten().tolist(), *b.flatten().tolist())])"
    )
    with Process(code) as process:
        output = process.stdout.read()
    drawn = [x.hex() for p in gaussian_projections(*arguments) for x in p.flatten().tolist()]
    assert output.strip() == str(drawn)


def test_seed_and_module_decide_the_projections():
    a, b = gaussian_projections(0, "q", 4000, 2000, 8, 16)
    assert a.shape == (8, 4000)
    assert b.shape == (2000, 16)
    for drawn, variance in ((a, 1 / 4000), (b, 1 / 16)):
        assert drawn.std() == pytest.approx(variance**0.5, rel=sampling_error(1 / 2, drawn.numel()))
    for other in ((1, "q"), (0, "k")):
        assert not torch.equal(gaussian_projections(*other, 4000, 2000, 8, 16)[0], a)


def test_svd_projections_are_the_best_approximation():
    weight = normal(20, 12)
    a, b = svd_projections(weight, 5)
    singular = torch.linalg.svdvals(weight)
    error, size = torch.linalg.matrix_norm(weight - b @ a), weight.norm().item()
    assert_close(error, singular[5:].norm(), terms=weight.numel(), size=size)
    assert_close(a @ a.T, torch.eye(5), terms=weight.numel())
    with pytest.raises(ValueError, match=r"rank must be between 1 and min\(out_features, in_features\)=12, got 13"):
        svd_projections(weight, 13)


def test_the_adapter_can_be_switched_off_and_on_also_when_merged():
    model = adapted()
    with_adapter = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(backbone()))
    assert torch.equal(logits(model), with_adapter)
    model.merge_adapter()
    with model.disable_adapter():
        assert_as_exact(logits(model), logits(backbone()), exact_logits(backbone()))


def test_several_adapters_of_several_ranks():
    model = adapted()
    first = logits(model)
    model.add_adapter("other", PrivateLoraConfig(r_c2d=4, r_d2c=6, projection_seed=9))
    assert torch.equal(logits(model), first)
    assert not any(layer.privatelora_M["other"].weight.requires_grad for layer in layers(model))
    with torch.no_grad():
        for i, layer in enumerate(layers(model)):
            layer.privatelora_M["other"].weight.copy_(normal(6, 4, seed=i))
    model.set_adapter("other")
    second = logits(model)
    with pytest.raises(AssertionError, match="apart"):
        assert_as_exact(first, second, exact_logits(model))
    assert all(layer.privatelora_M["other"].weight.requires_grad for layer in layers(model))
    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    for single in (first, second):
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(single, both, exact_logits(model))
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model), first)


def test_adapters_agree_on_saving_their_projections():
    model = adapted()
    with pytest.raises(ValueError, match="save_projection=True for the adapter 'other', but False for those"):
        model.add_adapter("other", PrivateLoraConfig(r_c2d=4, r_d2c=4, save_projection=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_unmerged(family):
    model = adapted(family)
    with_adapter, exact = logits(model), exact_logits(model)
    model.merge_adapter(safe_merge=True)
    assert_as_exact(logits(model), with_adapter, exact)
    model.unmerge_adapter()
    assert_as_exact(logits(model), with_adapter, exact)
    plain = model.merge_and_unload()
    assert not layers(plain)
    assert_as_exact(logits(plain), with_adapter, exact)


def test_a_safe_merge_refuses_what_is_not_finite():
    model = adapted()
    with torch.no_grad():
        layers(model)[1].privatelora_M["default"].weight[0, 0] = float("inf")
    before = layers(model)[1].get_base_weight().clone()
    with pytest.raises(ValueError, match=r"merging 'default' into model.layers.0.self_attn.k_proj gives values"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layers(model)[1].get_base_weight(), before)


def test_singular_vectors_of_a_merged_weight_are_refused():
    model = adapted(init="svd", r_c2d=4, r_d2c=4)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"\['default'\] merged into it: unmerge first"):
        model.add_adapter("other", PrivateLoraConfig(r_c2d=4, r_d2c=4, init="svd"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("r_c2d", "r_d2c"), [(5, 3), (3, 5)])
def test_as_ordinary_lora_it_gives_the_same_logits(family, r_c2d, r_d2c):
    model = adapted(family, r_c2d=r_c2d, r_d2c=r_d2c)
    conversions = [convert_to_lora(model)]
    if family == "llama":
        conversions.append(peft_convert_to_lora(model, rank=3))
    for config, state in conversions:
        assert config.r == 3
        lora = get_peft_model(backbone(family), config)
        missing = set_peft_model_state_dict(lora, state)
        assert not missing.unexpected_keys
        assert len(state) == 2 * len(layers(model))
        assert_as_exact(logits(lora), logits(model), exact_logits(model))


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (adapted(), "other", r"'other' is not a PrivateLoRA adapter of this model: \['default'\]"),
        (adapted(modules_to_save=["lm_head"]), "default", r"modules_to_save=\['lm_head'\] are no part of LoRA"),
        (backbone(), "default", "'default' is not a PrivateLoRA adapter of this model"),
    ],
)
def test_what_cannot_be_converted_is_named(model, name, message):
    with pytest.raises(ValueError, match=message):
        convert_to_lora(model, name)


def test_chosen_layers_and_modules():
    model = adapted(layers_to_transform=[1], target_modules=["q_proj", "down_proj"])
    assert [layer.module for layer in layers(model)] == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ]
    model = adapted(target_modules=r".*\.0\..*o_proj")
    assert [layer.module for layer in layers(model)] == ["model.layers.0.self_attn.o_proj"]
    model = adapted(exclude_modules=["k_proj"])
    assert {layer.module.rsplit(".", 1)[-1] for layer in layers(model)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False])
def test_projections_are_the_same_in_every_precision(autocast_adapter_dtype):
    config = PrivateLoraConfig(r_c2d=5, r_d2c=3)
    whole = get_peft_model(backbone(), config)
    half = get_peft_model(backbone(dtype=torch.bfloat16), config, autocast_adapter_dtype=autocast_adapter_dtype)
    for full, coarse in zip(layers(whole), layers(half), strict=True):
        assert torch.equal(full.privatelora_A["default"], coarse.privatelora_A["default"])
        assert torch.equal(full.privatelora_B["default"], coarse.privatelora_B["default"])
        torch.nn.init.normal_(coarse.privatelora_M["default"].weight)
    assert {p.dtype for p in half.parameters() if p.requires_grad} == {
        torch.float32 if autocast_adapter_dtype else torch.bfloat16
    }
    assert logits(half).dtype == torch.bfloat16
    assert logits(half).isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(r_c2d=0), "r_c2d must be a whole number of at least 1, got 0"),
        (dict(r_d2c=2.5), "r_d2c must be a whole number of at least 1, got 2.5"),
        (dict(projection_seed=-1), "projection_seed must be a whole number of at least 0, got -1"),
        (dict(init="zeros"), "init must be one of 'gaussian', 'svd', 'given', got 'zeros'"),
        (dict(init="svd", r_c2d=4, r_d2c=5), "init='svd' takes one rank for both ways, got r_c2d=4, r_d2c=5"),
        (dict(init="svd", save_projection=False), "init='svd' needs save_projection=True"),
        (dict(init="given", save_projection=False), "init='given' needs save_projection=True"),
        (dict(layers_pattern="layers"), "layers_pattern='layers' needs layers_to_transform"),
    ],
)
def test_impossible_configurations_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        PrivateLoraConfig(**config)


def test_what_cannot_be_adapted_is_named():
    with pytest.raises(ValueError, match=r"embed_tokens is a Embedding: only nn.Linear and Conv1D can be adapted"):
        adapted(target_modules=["embed_tokens"])
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    )
    named = "no default target_modules for GPTNeoXForCausalLM, which has none of q_proj, k_proj, v_proj; qkv_proj; c_at"
    with pytest.raises(ValueError, match=named):
        get_peft_model(neox, PrivateLoraConfig())
    assert layers(get_peft_model(neox, PrivateLoraConfig(target_modules=["query_key_value"])))


TINY = dict(
    hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2,
    vocab_size=9, head_dim=8, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "olmo2", "cohere2", "granite", "starcoder2", "smollm3"])
def test_every_architecture_with_these_names_has_them_as_default(kind):
    """None of them is among the six families."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY))
    adapted = get_peft_model(copy.deepcopy(model), PrivateLoraConfig(r_c2d=2, r_d2c=2))
    assert adapted.peft_config["default"].target_modules == {"q_proj", "k_proj", "v_proj"}
    assert len(layers(adapted)) == 6
    if kind != "starcoder2":  # whose MLP is GPT-2's in other words
        ladder = get_peft_model(model, LadderConfig(r=2))
        assert ladder.peft_config["default"].target_modules == {"down_proj"}


def test_what_is_relied_on_in_peft_is_there():
    """PEFT has no public way to register a method; these are the three dictionaries it looks into."""
    assert PEFT_TYPE_TO_CONFIG_MAPPING[PRIVATE_LORA] is PrivateLoraConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING[PRIVATE_LORA].tuner_layer_cls is PrivateLoraLayer
    assert PEFT_TYPE_TO_PREFIX_MAPPING[PRIVATE_LORA] == "privatelora_"
    code = "from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as m; print('PRIVATELORA' in m)"
    output = interpreter(code)
    assert output == "False\n"  # if PEFT gets one of this name, ours must not replace it


def test_numpys_numbers_are_numbers(tmp_path):
    model = adapted(r_c2d=np.int64(4), r_d2c=np.int64(4), projection_seed=np.int64(2))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(backbone(), tmp_path)), logits(model))


def late_by_hooks(base, model):
    """Logits where what each projection's M makes of its input is added to the same projection one layer later."""
    groups = {}
    for layer in layers(model):
        groups.setdefault(layer.module.rpartition(".")[2], []).append(layer)
    before, handles = {}, []

    def add(name, first, last, layer, _, arguments, output):
        a, b = gaussian_projections(0, layer.module, layer.in_features, layer.out_features, 5, 3)
        m = layer.privatelora_M["default"].weight.to(output.dtype)
        own = arguments[0] @ a.to(m).T @ m.T @ b.to(m).T
        added = (0 if first else before[name]) + (own if last else 0)
        before[name] = own
        return output + added

    for name, same in groups.items():
        for layer in same:
            hook = functools.partial(add, name, layer is same[0], layer is same[-1], layer)
            handles.append(base.get_submodule(layer.module).register_forward_hook(hook))
    with torch.no_grad():
        return base(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", dict(layers_to_transform=[0, 1, 3])),
        ("llama", dict(layers_to_transform=[2])),
        ("llama", dict(target_modules=["o_proj", "down_proj"])),
    ],
)
def test_late_each_residual_is_added_one_layer_later(family, config):
    model = adapted(family, late=True, **config)
    expected, exact = late_by_hooks(backbone(family), model), late_by_hooks(precise(backbone(family)), model)
    assert_as_exact(logits(model), expected, exact)
    if config.get("layers_to_transform") != [2]:  # alone, it is the first and the last
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(logits(adapted(family, **config)), expected, exact)


def test_a_second_late_adapter_is_late_as_well():
    model, only = adapted(), adapted(late=True)
    model.add_adapter("other", PrivateLoraConfig(r_c2d=5, r_d2c=3, late=True))
    with torch.no_grad():
        for layer, other in zip(layers(model), layers(only), strict=True):
            layer.privatelora_M["other"].weight.copy_(other.privatelora_M["default"].weight)
    model.set_adapter("other")
    assert torch.equal(logits(model), logits(only))


def test_a_late_adapter_is_saved_and_loaded_and_left(tmp_path):
    model = adapted(late=True)
    model.save_pretrained(tmp_path)
    before = logits(model)
    assert torch.equal(logits(PeftModel.from_pretrained(backbone(), tmp_path)), before)
    handle = model.get_base_model().model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a residual was on its way
        logits(model)
    handle.remove()
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(copy.deepcopy(model)), before)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(backbone()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.merge_adapter(), "'default' is late: what .*q_proj adds is no part of its own weight"),
        (lambda model: model.merge_and_unload(), "'default' is late: what .*q_proj adds is no part of its own weight"),
        (convert_to_lora, "'default' is late: LoRA has no residual that arrives one layer later"),
        (lambda _: PrivateLoraConfig(late=1), "late must be True or False, got 1"),
    ],
)
def test_what_a_late_adapter_cannot_is_named(call, message):
    model = adapted(late=True)
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        call(model)
    assert torch.equal(logits(model), before)


def test_a_late_adapter_takes_no_gradient_checkpointing():
    model = adapted(late=True).train()
    model.get_base_model().activation_checkpointing_enable()
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="a late adapter takes no gradient checkpointing"):
        model(input_ids=IDS, labels=IDS).loss.backward()
