"""The adapter against the formula, PEFT's own operations, and ordinary LoRA, on every architecture family."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from peft import convert_to_lora as peft_convert_to_lora, get_peft_model, set_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from plpkg.backbones import FAMILIES
from plpkg.residual import LadderConfig, PrivateLoraConfig, bases, convert_to_lora
from plpkg.residual.adapter import PrivateLoraLayer, gaussian_projections
from plpkg.residual.config import PRIVATE_LORA
from tests.residual.conftest import IDS, adapted, assert_apart, backbone, logits, normal, precise, reloaded

from rounding import assert_as_exact, sampling_error

LADDER, GATED_LADDER = dict(ladder=dict(r=5)), dict(ladder=dict(r=5, width=16))
OTHERS = pytest.mark.parametrize(
    ("config", "other"),
    [
        ({}, PrivateLoraConfig(r_c2d=4, r_d2c=6, projection_seed=9)),
        (LADDER, LadderConfig(r=3, width=4, layers_to_transform=[0, 2])),
    ],
)


def layers(model):
    return [module for module in model.modules() if isinstance(module, PrivateLoraLayer)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_no_bit(family, dtype):
    model = backbone(family, dtype=dtype)
    before = logits(model)
    assert torch.equal(logits(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3))), before)


def test_only_m_learns_and_it_is_small(family):
    model = get_peft_model(backbone(family), PrivateLoraConfig(r_c2d=5, r_d2c=3))
    model(input_ids=IDS, labels=IDS).loss.backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 * (1 if family in ("phi3", "gpt2") else 3)
    assert all(".privatelora_M.default.weight" in name and p.shape == (3, 5) for name, p in trainable.items())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == (name in trainable), name


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
    assert_apart(logits(backbone(family)), logits(plain), logits(exact))


@pytest.mark.parametrize(
    ("family", "config"), [*((family, {}) for family in FAMILIES), ("llama", LADDER), ("llama", GATED_LADDER)]
)
def test_saved_it_is_m_alone_and_loads_to_the_same_logits(family, config, tmp_path):
    model = adapted(family, **config)
    for low_cpu_mem_usage in (False, True):
        loaded = reloaded(model, tmp_path, family, low_cpu_mem_usage=low_cpu_mem_usage)
        assert type(loaded.peft_config["default"]) is type(model.peft_config["default"])
        assert torch.equal(logits(loaded), logits(model))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    numbers = sum(p.numel() for name, p in model.named_parameters() if "_M.default." in name)
    assert sum(t.numel() for t in saved.values()) == numbers
    assert all("ladder_M." in name if config else name.endswith("privatelora_M.weight") for name in saved)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size < 4 * numbers + 200 * len(saved)  # a header beside M's float32


def test_seed_and_module_decide_the_projections():
    a, b = gaussian_projections(0, "q", 4000, 2000, 8, 16)
    assert a.shape == (8, 4000)
    assert b.shape == (2000, 16)
    for drawn, variance in ((a, 1 / 4000), (b, 1 / 16)):
        assert drawn.std() == pytest.approx(variance**0.5, rel=sampling_error(1 / 2, drawn.numel()))
    for other in ((1, "q"), (0, "k")):
        assert not torch.equal(gaussian_projections(*other, 4000, 2000, 8, 16)[0], a)


def test_the_adapter_can_be_switched_off_and_on_also_when_merged():
    model = adapted()
    with_adapter = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(backbone()))
    assert torch.equal(logits(model), with_adapter)
    model.merge_adapter()
    with model.disable_adapter():
        assert_as_exact(logits(model), logits(backbone()), logits(precise(backbone())))


@OTHERS
def test_what_peft_does_for_lora_alone_is_refused_by_name(config, other, tmp_path):
    model = adapted(**config)
    model.save_pretrained(tmp_path)
    model.add_adapter("other", other)
    before = logits(model)
    with pytest.raises(AttributeError, match="no attribute 'add_weighted_adapter'"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mean")
    with pytest.raises(ValueError, match=r"Hotswapping only supports LORA but (PRIVATELORA|LADDER) was passed"):
        hotswap_adapter(model, str(tmp_path), "default")
    with pytest.raises(ValueError, match="is not compatible with the `PeftMixedModel`"):
        get_peft_model(backbone(), other, mixed=True)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("config", "convertible"), [({}, True), (dict(late=True), False), (LADDER, False)])
def test_what_peft_asks_of_a_method(config, convertible):
    model = adapted(**config)
    assert model.get_model_status().peft_types == {"default": model.peft_config["default"].peft_type.value}
    assert model.supports_lora_conversion() == convertible
    before = logits(model)
    with disable_input_dtype_casting(model):
        assert torch.equal(logits(model), before)
    model.delete_adapter("default")
    assert not [m for m in model.modules() if getattr(m, "late", None) or getattr(m, "taps", None)]


@OTHERS
def test_several_adapters_of_several_ranks_and_none(config, other):
    model, none = adapted(**config), logits(backbone())
    first = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), none)
    model.add_adapter("other", other)
    assert torch.equal(logits(model), first)
    others = [p for name, p in model.named_parameters() if "_M.other." in name]
    assert not any(p.requires_grad for p in others)
    for i, p in enumerate(others):
        p.data = normal(*p.shape, seed=i)
    model.set_adapter("other")
    assert all(p.requires_grad for p in others)
    second = logits(model)
    assert_apart(first, second, logits(precise(model)))
    model.base_model.set_adapter(["default", "other"])
    for single in (first, second):
        assert_apart(single, logits(model), logits(precise(model)))
    for one, another in itertools.combinations([none, first, second, logits(model)], 2):
        assert (one - another).norm() > 1e-3 * none.norm()  # rounding makes less than 1e-5
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model), first)
    assert torch.equal(logits(model.unload()), none)


def test_adapters_agree_on_saving_their_projections():
    model = adapted()
    with pytest.raises(ValueError, match="init='given' for the adapter 'other', but another one for those"):
        model.add_adapter("other", PrivateLoraConfig(r_c2d=4, r_d2c=4, init="given"))


def test_merged_and_unmerged(family):
    model = adapted(family)
    with_adapter, exact = logits(model), logits(precise(model))
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


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's of adapting a tied head, as here
def test_a_tied_weight_is_not_merged():
    tied = new("llama", PrivateLoraConfig(target_modules=["lm_head"]), tie_word_embeddings=True)
    for merge in (tied.merge_adapter, tied.merge_and_unload):
        with pytest.raises(ValueError, match="lm_head shares its weight with the embeddings, which would change"):
            merge()
    untied = new("llama", PrivateLoraConfig(target_modules=["lm_head"]))
    assert not layers(untied.merge_and_unload())


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
        assert_as_exact(logits(lora), logits(model), logits(precise(model)))


def test_chosen_layers_and_modules():
    model = adapted(layers_to_transform=[1], target_modules=["q_proj", "down_proj"])
    assert [layer.module for layer in layers(model)] == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ]
    model = adapted(target_modules=r".*\.0\..*o_proj")
    assert [layer.module for layer in layers(model)] == ["model.layers.0.self_attn.o_proj"]


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


def new(model, config, **options):
    """A tiny model with an adapter."""
    sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    sizes |= dict(ffn_dim=16) if model == "opt" else dict(intermediate_size=16)
    return get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(model, **sizes | options)), config)


def quantised():
    """A backbone with a layer as quantisers leave it: an ``nn.Linear`` of whole numbers."""
    model = backbone()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter((100 * layer.weight).to(torch.int8), requires_grad=False)
    return model


def bases_of(batches=(IDS,), m_scale=0.0, **config):
    bases.from_gradients(adapted(m_scale=m_scale, **config), batches)


GIVEN, GIVEN_LADDER = dict(init="given"), dict(r=4, init="given")
EMBEDDING = dict(target_modules=["embed_tokens"])
NO_LINEAR = "embed_tokens is a Embedding: only nn.Linear and Conv1D can be adapted"
NO_NAMES = "no default target_modules for MambaForCausalLM, which has none of q_proj, k_proj, v_proj; qkv_proj; c_at"
NO_RUNGS = "no default target_modules for OPTForCausalLM, which has none of down_proj; mlp.c_proj: name its linear"
NO_NORM = "OPTDecoder has none of norm, ln_f, .*: not a decoder that can be cut here"
CPU = torch.device("cpu")
IS_QUANTISED = r"the weight of .*q_proj is quantised \(torch.int8\)"
IS_COMPILED = "the model is compiled, .*: adapt it first, then compile it"
NOT_ZERO = "the M of the ladder is not zero"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PrivateLoraConfig(r_c2d=0), "r_c2d must be between 1 and 16384, got 0"),
        (lambda: PrivateLoraConfig(r_d2c=2.5), "r_d2c must be a whole number between 1 and 16384, got 2.5"),
        (lambda: PrivateLoraConfig(projection_seed=-1), "projection_seed must be between 0 and .*, got -1"),
        (lambda: PrivateLoraConfig(projection_seed=2**64), "projection_seed must be .*, got 18446744073709551616"),
        (lambda: PrivateLoraConfig(init="zeros"), "init must be one of 'gaussian', 'given', got 'zeros'"),
        (lambda: PrivateLoraConfig(late=1), "late must be True or False, got 1"),
        (lambda: LadderConfig(r=0), "r must be between 1 and 16384, got 0"),
        (lambda: LadderConfig(width=0), "width must be between 1 and 16384, got 0"),
        (lambda: LadderConfig(width=2.5), "width must be a whole number between 1 and 16384, got 2.5"),
        (lambda: LadderConfig(init="svd"), "init must be one of 'gaussian', 'given', got 'svd'"),
        (lambda: adapted(ladder=dict(r=33)), "r must be between 1 and hidden_size=32, got 33"),
        (lambda: adapted(**EMBEDDING), NO_LINEAR),
        (lambda: adapted(ladder=dict(r=4) | EMBEDDING), NO_LINEAR),
        (lambda: new("mamba", PrivateLoraConfig()), NO_NAMES),
        (lambda: new("opt", LadderConfig()), NO_RUNGS),
        (lambda: new("opt", LadderConfig(target_modules=["fc2"]), do_layer_norm_before=False), NO_NORM),
        (
            lambda: get_peft_model(nn.Sequential(nn.Linear(2, 2)), LadderConfig(target_modules="0")),
            "Sequential has none",
        ),
        (
            lambda: adapted(ladder=dict(r=4, target_modules=["down_proj", "lm_head"])),
            "lm_head is not in the decoder mo",
        ),
        (lambda: get_peft_model(torch.compile(backbone(), backend="eager"), PrivateLoraConfig()), IS_COMPILED),
        (lambda: get_peft_model(torch.compile(backbone(), backend="eager"), LadderConfig(r=4)), IS_COMPILED),
        (
            lambda: get_peft_model(cpu_offload(backbone(), CPU), PrivateLoraConfig()),
            "weights are offloaded, .* adapt it",
        ),
        (lambda: get_peft_model(cpu_offload(backbone(), CPU), LadderConfig(r=4)), "the model's weights are offloaded"),
        (lambda: get_peft_model(quantised(), PrivateLoraConfig()).merge_adapter(), IS_QUANTISED),
        (lambda: bases.from_gradients(get_peft_model(quantised(), PrivateLoraConfig(**GIVEN)), [IDS]), IS_QUANTISED),
        *(
            (functools.partial(get_peft_model, backbone(), config, adapter_name=name), f"'{name}' cannot be an adapter")
            for config in (PrivateLoraConfig(), LadderConfig(r=4))
            for name in ("ann.1", "__base__")
        ),
        (lambda: LadderConfig(target_modules=".*_proj", layers_to_transform=2), "layers_to_transform=2 is for names"),
        (lambda: PrivateLoraConfig(target_modules="all-linear", layers_to_transform=[1]), "is for names: the pattern"),
        (lambda: PrivateLoraConfig(layers_to_transform=1), "layers_to_transform must be a list, got 1"),
        (lambda: PrivateLoraConfig(task_type="SEQ_CLS"), "task_type='SEQ_CLS' trains a part of the backbone"),
        (lambda: LadderConfig(task_type="TOKEN_CLS"), "task_type='TOKEN_CLS' trains a part of the backbone"),
        (lambda: PrivateLoraConfig(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\] trains a part of the"),
        (lambda: LadderConfig(modules_to_save=["wpe"]), r"modules_to_save=\['wpe'\] trains a part of the backbone"),
        (bases_of, "init='given'"),
        (lambda: bases_of(m_scale=1.0, **GIVEN), "the M of model.layers.0.self_attn.q_proj is not zero"),
        (lambda: bases_of(r_c2d=17, **GIVEN), r"r_c2d must be between 1 and the rank of .*k_proj=16, got 17"),
        (lambda: bases_of([], **GIVEN), "no batches"),
        (lambda: bases_of([IDS[:, :1]], **GIVEN), "the gradient of model.layers.0.self_attn.q_proj is zero"),
        (lambda: bases_of([IDS[:, :1]], ladder=GIVEN_LADDER), "the gradient of model.layers.0.mlp.down_proj is zero"),
        (lambda: bases_of(ladder=dict(r=4)), "init='given'"),
        (lambda: bases_of([], ladder=GIVEN_LADDER), "no batches"),
        (lambda: bases_of(m_scale=1.0, ladder=GIVEN_LADDER), NOT_ZERO),
        (lambda: bases_of(m_scale=1.0, ladder=GIVEN_LADDER | dict(width=16)), NOT_ZERO),
    ],
)
def test_what_cannot_be_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", ["gpt_neox", "persimmon", "bloom"])
def test_a_fused_projection_is_a_default(kind):
    assert [layer.module.rpartition(".")[2] for layer in layers(new(kind, PrivateLoraConfig()))] == ["query_key_value"]


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
    assert isinstance(adapted(**LADDER).base_model, PEFT_TYPE_TO_TUNER_MAPPING["LADDER"])


def test_numpys_numbers_are_numbers(tmp_path):
    model = adapted(r_c2d=np.int64(4), r_d2c=np.int64(4), projection_seed=np.int64(2))
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))


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
    return logits(base)


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
        assert_apart(logits(adapted(family, **config)), expected, exact)


def test_a_second_late_adapter_is_late_as_well():
    model, only = adapted(), adapted(late=True)
    model.add_adapter("other", PrivateLoraConfig(r_c2d=5, r_d2c=3, late=True))
    with torch.no_grad():
        for layer, other in zip(layers(model), layers(only), strict=True):
            layer.privatelora_M["other"].weight.copy_(other.privatelora_M["default"].weight)
    model.set_adapter("other")
    assert torch.equal(logits(model), logits(only))


@pytest.mark.parametrize("config", [dict(late=True), LADDER])
def test_a_pass_that_breaks_off_leaves_the_next_as_it_is(tmp_path, config):
    model = adapted(**config)
    before = logits(model)
    assert torch.equal(logits(reloaded(model, tmp_path)), before)
    with pytest.raises(IndexError):
        logits(model.get_base_model().model, torch.tensor([[999]]))
    handle = model.get_base_model().model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a residual was on its way
        logits(model, IDS[:1, :3])
    handle.remove()
    assert torch.equal(logits(model), before)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(backbone()))


LATE = dict(late=True)
NO_SUCH = "is not a PrivateLoRA adapter of this model"
IS_LATE = "'default' is late: what .*q_proj adds is no part of its own weight"


@pytest.mark.parametrize(
    ("model", "call", "message"),
    [
        (adapted(), lambda model: convert_to_lora(model, "other"), rf"'other' {NO_SUCH}: \['default'\]"),
        (backbone(), convert_to_lora, f"'default' {NO_SUCH}"),
        (adapted(**LATE), convert_to_lora, "'default' is late: LoRA has no residual that arrives one layer later"),
        (adapted(**LATE), lambda model: model.merge_adapter(), IS_LATE),
        (adapted(**LATE), lambda model: model.merge_and_unload(), IS_LATE),
    ],
)
def test_what_cannot_be_converted_or_merged_is_named(model, call, message):
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        call(model)
    assert torch.equal(logits(model), before)


def checkpointed(model):
    """In training, each layer computed again on the way back."""
    model.train().activation_checkpointing_enable()
    return model


NO_CHECKPOINTS = "the adapter '{}' is late and needs the layer before, but gradient checkpointing"


def test_a_late_adapter_is_not_made_on_a_model_with_gradient_checkpointing():
    other = PrivateLoraConfig(r_c2d=5, r_d2c=3, late=True)
    with pytest.raises(ValueError, match=NO_CHECKPOINTS.format("default")):
        get_peft_model(checkpointed(backbone()), other)
    model = get_peft_model(checkpointed(backbone()), PrivateLoraConfig(r_c2d=5, r_d2c=3))
    with pytest.raises(ValueError, match=NO_CHECKPOINTS.format("other")):
        model.add_adapter("other", other)
    model.enable_input_require_grads()
    model(input_ids=IDS, labels=IDS).loss.backward()  # the one that is not late


def test_gradient_checkpointing_of_a_late_adapter_is_refused_in_the_first_pass_of_training():
    model = adapted(late=True)
    before = logits(model)
    checkpointed(model.get_base_model())
    model.enable_input_require_grads()
    for mode in (model.train(), model.get_base_model()):  # by PEFT's pass, and by the model's own on the way back
        refusal = ValueError if mode is model else RuntimeError
        with pytest.raises(refusal, match="gradient checkpointing"):
            mode(input_ids=IDS, labels=IDS).loss.backward()
    assert torch.equal(logits(model.eval()), before)
