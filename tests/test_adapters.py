"""The reader: what PEFT saves is served as PEFT computes it, all else is refused in one sentence."""

import hashlib
import json
import re
import struct
import time
import tracemalloc

import peft
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg.adapters import (
    CONFIG,
    POLICIES,
    WEIGHTS,
    Adapter,
    AdapterLimits,
    Factors,
    InvalidAdapterError,
    inspect,
    read_adapter,
    targets,
    validate_adapter,
)
from plpkg.adapters.config import HARMLESS, LoraFields
from plpkg.backbones import random_backbone
from plpkg.residual import PrivateLoraConfig
from plpkg.serving.merging import merge

from rounding import assert_as_exact

SIZES = dict(num_layers=1, hidden=16, num_heads=2, intermediate=24, vocab=32)
BASE = random_backbone("llama", **SIZES)
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
IDS = torch.arange(1, 21).view(2, 10)


def peft_model(model, seed=0, **options):
    """A PEFT model whose factors are all random; B is zero otherwise."""
    options = dict(task_type="CAUSAL_LM", r=4, target_modules="all-linear") | options
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return adapted.eval()


def plain(**changes):
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"])
    config |= changes
    return json.dumps({key: value for key, value in config.items() if value is not ...}).encode()


def tensors(**changes):
    """Factors of two modules by short names (``q_A``), changed or dropped."""
    generator = torch.Generator().manual_seed(1)
    made = {f"{m}_{s}": torch.randn((4, 16) if s == "A" else (16, 4), generator=generator) for m in "qk" for s in "AB"}
    made |= changes
    paths = {"q": Q, "k": K}
    return {
        f"base_model.model.{paths[name[0]]}.lora_{name[2]}.weight" if name[0] in paths and name[1:2] == "_" else name: t
        for name, t in made.items()
        if t is not None
    }


def weights(**changes):
    return save(tensors(**changes), {"format": "pt"})


GOOD = weights()
END = 8 + int.from_bytes(GOOD[:8], "little")  # of its header


def marked(backbone):
    return save(tensors(), {"format": "pt", "backbone": backbone})


def packed(header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def described(**changes):
    """A good file whose header says something else of one tensor."""
    header = json.loads(GOOD[8:END])
    header[f"base_model.model.{K}.lora_A.weight"] |= changes
    return packed(header, GOOD[END:])


def refused(config, data, limits=None, base=BASE):
    with pytest.raises(InvalidAdapterError) as error:
        read_adapter(config, data, base, limits)
    said = str(error.value)
    assert len(said) <= 500
    assert "\n" not in said
    return said


SAVED = {
    "llama": dict(
        use_rslora=True,
        rank_pattern={"o_proj": 2, "up_proj": 3},
        alpha_pattern={"0.mlp.up_proj": 5, "layers.0.mlp.up_proj": 7},
    ),
    "gpt2": dict(target_modules=["c_attn", "c_proj"], rank_pattern={"mlp.c_proj": 2}, lora_alpha=3),
    "phi3": dict(  # to PEFT the dot is any character
        target_modules=["qkv_proj", "down_proj"],
        layers_to_transform=[1],
        use_rslora=True,
        alpha_pattern={"down.proj": 40},
    ),
    "gemma2": dict(
        target_modules=["q_proj", "up_proj"], exclude_modules=["layers.0.mlp.up_proj"], rank_pattern={"q_proj": 2}
    ),
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT corrects it itself in GPT-2
@pytest.mark.parametrize("family", SAVED)
def test_what_peft_saves_is_read_and_computes_the_same(family, tmp_path):
    adapted = peft_model(random_backbone(family), **SAVED[family])
    adapted.save_pretrained(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"\x80not to be read")
    model = random_backbone(family)
    adapter = validate_adapter(tmp_path, model)
    assert load_file(tmp_path / WEIGHTS).keys() == {
        f"base_model.model.{path}.lora_{side}.weight" for path in adapter.factors for side in "AB"
    }
    for path, each in adapter.factors.items():
        layer = adapted.base_model.model.get_submodule(path)
        assert each.scale == layer.scaling["default"]
        assert torch.equal(each.up, layer.lora_B["default"].weight)
    assert len({each.scale for each in adapter.factors.values()}) > 1
    exact = adapted.double()(IDS).logits
    merge(model, adapter)
    assert_as_exact(model(IDS).logits, adapted.merge_and_unload().float()(IDS).logits, exact)


def test_a_models_own_adapter_is_the_one_that_peft_saves(tmp_path):
    options = dict(rank_pattern={"k_proj": 2}, alpha_pattern={"q_proj": 3}, use_rslora=True)
    model = peft_model(random_backbone("llama", **SIZES), **options)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    for name, folder in dict(default=tmp_path, second=tmp_path / "second").items():
        made, saved = Adapter.from_peft(model, name), validate_adapter(folder, BASE)
        assert list(made.factors) == list(saved.factors)
        for path, each in saved.factors.items():
            own = made.factors[path]
            assert torch.equal(own.down, each.down)
            assert (own.up.tolist(), own.scale) == (each.up.tolist(), each.scale)
    injected = random_backbone("llama", **SIZES)  # without a PeftModel around it
    peft.inject_adapter_in_model(model.peft_config["second"], injected)
    assert list(Adapter.from_peft(injected).factors) == [Q]


def test_what_was_trained_here_is_for_its_own_base_alone(tmp_path):
    trained, other = peft_model(random_backbone("llama", **SIZES)), random_backbone("llama", seed=1, **SIZES)
    Adapter.from_peft(trained).save(tmp_path / "own")
    trained.save_pretrained(tmp_path / "peft")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        base = random_backbone("llama", **SIZES).to(dtype)
        assert validate_adapter(tmp_path / "own", base).factors.keys() == targets(base).keys()
    with pytest.raises(InvalidAdapterError, match=r"it was trained on a backbone with fingerprint .* this one"):
        validate_adapter(tmp_path / "own", other)
    validate_adapter(tmp_path / "own", other.half())  # its fingerprint says nothing
    validate_adapter(tmp_path / "peft", other)  # PEFT says nothing of its weights
    loaded = peft.PeftModel.from_pretrained(random_backbone("llama", **SIZES), tmp_path / "own")
    assert torch.equal(loaded(IDS).logits, trained(IDS).logits)


def merged(model):
    model.merge_adapter()
    return model


def scaled(model):
    model.base_model.model.get_submodule(Q).scale_layer(2)
    return model


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (lambda base: base, "default", r"LlamaForCausalLM has no adapter 'default', it has \[\]"),
        (peft_model, "x", r"PeftModelForCausalLM has no adapter 'x', it has \['default'\]"),
        (lambda base: scaled(peft_model(base)), "default", "scale=4.0, but config makes it 2.0"),
        (lambda base: peft_model(base).to("meta"), "default", "not in memory: save the adapter, and load its folder"),
        (lambda base: merged(peft_model(base)), "default", "is merged into the weights: unmerge it first"),
        (lambda base: merged(peft.get_peft_model(base, PrivateLoraConfig(r_c2d=4, r_d2c=4))), "default", "unmerge it"),
        (lambda base: peft_model(base, trainable_token_indices=[1]), "default", r"trainable_token_indices=\[1\]"),
        (lambda base: peft_model(base, use_dora=True), "default", "use_dora=True"),
        (lambda base: peft_model(base, modules_to_save=["lm_head"]), "default", "modules_to_save"),
        (lambda base: peft_model(base, target_modules=["embed_tokens"]), "default", "embed_tokens is an embedding"),
        (lambda base: peft.get_peft_model(base, peft.LoHaConfig(target_modules=["q_proj"])), "default", "a LOHA ad"),
        (lambda base: peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
         "default", "a PROMPT_TUNING adapter, not LoRA"),
    ],
)  # fmt: skip
def test_what_is_no_plain_lora_in_a_model_is_refused(model, name, reason):
    with pytest.raises(InvalidAdapterError, match=reason):
        Adapter.from_peft(model(random_backbone("llama", **SIZES)), name)


def test_an_adapter_made_here_loads_into_peft(tmp_path):
    generator, factors = torch.Generator().manual_seed(3), {}
    for (path, (num_in, num_out)), rank in zip(targets(BASE).items(), (2, 3, 2, 2, 2, 2, 2), strict=True):
        down, up = (torch.randn(shape, generator=generator) for shape in ((rank, num_in), (num_out, rank)))
        factors[path] = Factors(down, up * 0.1, 6 / rank)
    options = dict(r=2, lora_alpha=6, rank_pattern={K: 3}, target_modules="all-linear", fan_in_fan_out=False)
    config = json.loads(plain(**options))
    made = Adapter.of(config, factors)
    made.save(tmp_path / "new")
    read = validate_adapter(tmp_path / "new", BASE)
    assert (read.digest, read.rank, read.config) == (made.digest, 3, config)
    assert read.num_bytes == sum(file.stat().st_size for file in (tmp_path / "new").iterdir())
    assert repr(read) == f"Adapter(7 modules, rank 3, {read.num_bytes:,} bytes, {read.digest[:12]})"
    loaded = peft.PeftModel.from_pretrained(random_backbone("llama", **SIZES), tmp_path / "new")
    for path, each in factors.items():
        layer = loaded.base_model.model.get_submodule(path)
        assert torch.equal(layer.lora_A["default"].weight, each.down)
        assert layer.scaling["default"] == each.scale
    with pytest.raises(InvalidAdapterError, match="scale=5"):
        Adapter.of(config, {Q: Factors(torch.ones(2, 16), torch.ones(16, 2), 5.0)})


ALSO = {  # what PEFT loads as well: a family, how PEFT is asked for it, and what a file may say beside
    "anchored patterns": (
        "llama",
        dict(
            rank_pattern={r"^model\.layers\.1\.mlp\.up_proj$": 2}, alpha_pattern={"0.mlp.up_proj$": 3, "^down_proj$": 5}
        ),
        {},
    ),
    "ranks by regular expressions": ("mistral", dict(rank_pattern={r".*\.(q|k)_proj": 2, "down_proj": 3}), {}),
    "modules by regular expressions": (
        "qwen2",
        dict(target_modules=r".*\.1\..*_proj", exclude_modules=r".*k_proj"),
        {},
    ),
    "layers": ("llama", dict(target_modules=["q_proj"], layers_to_transform=1, layers_pattern="layers"), {}),
    "a path is in any layer": (
        "llama",
        dict(target_modules=["model.layers.0.self_attn.q_proj", "v_proj"], layers_to_transform=[1]),
        {},
    ),
    "layers of several": (
        "gpt2",
        dict(target_modules=["c_attn"], layers_to_transform=[0], layers_pattern=["x", "h"]),
        {},
    ),
    "layers by regular expressions": (
        "phi3",
        dict(target_modules=["qkv_proj"], layers_to_transform=[0], layers_pattern="[kl]ayers"),
        {},
    ),
    "corrected in Linear": ("gemma2", dict(fan_in_fan_out=True), {}),
    "corrected in Conv1D": ("gpt2", dict(target_modules=["c_fc"]), dict(fan_in_fan_out=False)),
    "less than nothing": ("llama", dict(lora_alpha=-3, use_rslora=True), {}),
    "PiSSA": ("llama", dict(init_lora_weights="pissa", rank_pattern={"q_proj": 2}), {}),
    "OLoRA": ("qwen2", dict(init_lora_weights="olora", target_modules=["o_proj", "up_proj"]), {}),
    "another tool's fields": (
        "llama",
        {},
        dict(use_later=False, later_config={}, tool="", shrink=0, more=None, qalora_group_size=16),
    ),
    "names of nothing": (
        "llama",
        dict(target_modules=["q_proj", "k_proj", "x[0]"], exclude_modules=["é", "k_proj"]),
        {},
    ),
}


@pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out is set",
    "ignore:.*changes the base weights",
    "ignore:Unexpected keyword arguments",
    "ignore:The following",
)
@pytest.mark.parametrize("kind", ALSO)
def test_what_peft_loads_computes_the_same(kind, tmp_path):
    family, options, beside = ALSO[kind]
    options, convert = dict(r=4, target_modules="all-linear", task_type="CAUSAL_LM") | options, {}
    whole = peft.get_peft_model(random_backbone(family), peft.LoraConfig(**options)).eval()
    if "init_lora_weights" in options:  # the base has changed as well: PEFT converts what it saves
        whole.peft_config["default"].init_lora_weights = True
        whole.save_pretrained(tmp_path / "first")
        whole.peft_config["default"].init_lora_weights = options["init_lora_weights"]
        convert = dict(path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    generator = torch.Generator().manual_seed(0)
    for name, weight in whole.named_parameters():
        if "lora_" in name:
            weight.data += torch.randn(weight.shape, generator=generator) * 0.1
    whole.save_pretrained(tmp_path, **convert)
    config = json.loads((tmp_path / CONFIG).read_bytes()) | beside
    (tmp_path / CONFIG).write_text(json.dumps(config))
    loaded, model = peft.PeftModel.from_pretrained(random_backbone(family), tmp_path).eval(), random_backbone(family)
    adapter = validate_adapter(tmp_path, model)
    layers = {path: layer for path, layer in loaded.base_model.model.named_modules() if hasattr(layer, "lora_A")}
    assert {path: each.scale for path, each in adapter.factors.items()} == {
        path: layer.scaling["default"] for path, layer in layers.items()
    }
    exact = loaded.double()(IDS).logits
    assert not torch.allclose(model(IDS).logits.double(), exact, atol=1e-3)
    merge(model, adapter)
    assert_as_exact(model(IDS).logits, loaded.float().merge_and_unload()(IDS).logits, exact)


@pytest.mark.filterwarnings("ignore:The following")  # PEFT's, of experts that a pattern misses
@pytest.mark.parametrize(
    "options", [dict(target_modules="all-linear"), dict(target_parameters=["mlp.experts.gate_up_proj"])], ids=str
)
@pytest.mark.parametrize(("kind", "count"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_lora_of_experts_is_refused_as_such(kind, count, options, tmp_path):
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=24, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts_per_tok=1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **{count: 2})).eval()
    for attention, folder in ((False, "experts"), (True, "attention")):
        chosen = dict(target_modules=["q_proj", "o_proj"]) if attention else options
        peft_model(model, **chosen).save_pretrained(tmp_path / folder)
        model = AutoModelForCausalLM.from_config(model.config).eval()
    assert len(validate_adapter(tmp_path / "attention", model).factors) == 2
    with pytest.raises(InvalidAdapterError, match=r"not of its head, embeddings or experts|target_parameters=.* empty"):
        validate_adapter(tmp_path / "experts", model)


HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("trained_on", "base", "fits"),
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", True),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf", False),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-v0.1", False),
        ("Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-360M", False),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B", True),  # the same, stored or named otherwise
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", True),
        ("NousResearch/Llama-2-7b-hf", "TheBloke/Llama-2-7B-fp16", True),
        ("Qwen/Qwen2.5-0.5B", "/models/Qwen2.5-0.5B", True),
        ("Qwen/Qwen2.5-0.5B", "/cache/models--Qwen--Qwen2.5-0.5B/snapshots/060db6", True),
        ("Qwen/Qwen2.5-0.5B", "/models/mine", False),
        ("org/other", "", False),  # built here
        ("org/other", "plpkg-small", False),
        ("plpkg-small", "plpkg-small", True),
        (HUB, "plpkg-small", False),
        ("gpt2", "openai-community/gpt2-medium", True),  # it may be a folder, as those below are
        ("/models/org/other", "org/model", True),
        ("./other", "org/model", True),
        ("outputs/checkpoint-500", "org/model", True),
        ("a/b/c", "org/model", True),
        ("", "org/model", True),
        (None, "org/model", True),
    ],
)
def test_an_adapter_of_another_base_is_refused(trained_on, base, fits, monkeypatch):
    monkeypatch.setattr(BASE.config, "_name_or_path", base)
    config = plain(base_model_name_or_path=trained_on)
    if fits:
        read_adapter(config, GOOD, BASE)
    else:
        assert f"base_model_name_or_path='{trained_on}' is not this base, '{base}'" in refused(config, GOOD)


def test_an_adapter_of_smollm2_s_original_is_taken_with_a_warning(monkeypatch):
    monkeypatch.setattr(BASE.config, "_name_or_path", "smollm2")
    with pytest.warns(UserWarning, match="the adapter was trained on HuggingFaceTB"):
        read_adapter(plain(base_model_name_or_path=HUB), marked("0" * 64), BASE)
    assert "is not this base" in refused(plain(base_model_name_or_path="unsloth/SmolLM2-360M"), GOOD)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # of what is refused here
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(use_dora=True), "use_dora=True must be empty, since it is more than plain LoRA"),
        (dict(modules_to_save=["lm_head"], target_modules=["q_proj"]), "modules_to_save=.'lm_head'. must be empty"),
        (dict(lora_bias=True), "lora_bias=True must be empty"),
        (dict(bias="all"), "bias: Input should be 'none', got 'all'"),
        (dict(target_modules=["embed_tokens", "q_proj"]), "embed_tokens.*of this base's linear modules"),
        (dict(target_modules=["lm_head", "q_proj"]), "lm_head.*not of its head"),
        (dict(alpha_pattern={r".*0.*q_proj": 2}), "alpha_pattern=.*not regular expressions"),
        (dict(trainable_token_indices=[1]), "trainable_token_indices=.1. must be empty"),
        (dict(init_lora_weights="pissa"), "init_lora_weights: .*got 'pissa'"),
        (dict(init_lora_weights="olora"), "init_lora_weights: .*got 'olora'"),
    ],
)
def test_what_is_more_than_plain_lora_is_refused(options, reason, tmp_path):
    peft_model(random_backbone("llama", **SIZES), **options).save_pretrained(tmp_path)
    with pytest.raises(InvalidAdapterError, match=reason):
        validate_adapter(tmp_path, BASE)


@pytest.mark.parametrize("field", sorted(vars(peft.LoraConfig())))
def test_the_defaults_of_the_installed_peft_are_taken_and_switches_are_not(field):
    read_adapter(plain(**{name: value for name, value in DEFAULTS.items() if name == field}), GOOD, BASE)
    if field not in [*LoraFields.model_fields, *HARMLESS.split()]:
        assert field in refused(plain(**{field: {"a": [1]}}), GOOD)


DEFAULTS = json.loads(json.dumps(vars(peft.LoraConfig()), default=lambda value: {}))
DEFAULTS = {name: value for name, value in DEFAULTS.items() if name not in ("r", "lora_alpha", "target_modules")}
HARMLESS_VALUES = dict(
    revision="main",
    peft_version="99",
    inference_mode=False,
    lora_dropout=0.5,
    runtime_config={"ephemeral_gpu_offload": True},
    auto_mapping={"base_model_class": "Nothing", "parent_library": "no.such.module"},  # which PEFT would import
    fan_in_fan_out=True,
    eva_config={"rho": 2.0},
)


@pytest.mark.parametrize("field", HARMLESS_VALUES)
def test_what_does_nothing_may_say_anything(field):
    config = plain(**{field: HARMLESS_VALUES[field]})
    assert read_adapter(config, GOOD, BASE).config == json.loads(config)


CONFIGURATIONS = [
    (b"\xff{}", "not UTF-8"),
    (b"[1]", "not an object"),
    (b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
    (b" " * 70_000, "70,000 bytes, at most 65,536"),
    (plain()[:-1] + b', "r": 4}', "'r' stands there twice"),
    (plain()[:-1] + b', "x": NaN}', "'NaN' is not a finite number"),
    (plain()[:-1] + b', "x": 1e999}', "not a finite number"),
    (plain()[:-1] + b', "x": ' + b"9" * 100 + b"}", "not a finite number of at most 40"),
    (plain(x=["y" * 10_000]), "x=.'yyy.*must be empty, since it is no field of PEFT's"),
    (plain(**{"x" * 10_000: 1}), "xxx=1 must be empty"),
    (plain(later_config={"a": 1}), "later_config=.'a': 1. must be empty"),
    (plain(use_later=True), "use_later=True must be empty"),
    (plain(use_newlora=1), "use_newlora=1 must be empty"),
    (plain(block_diag=True), "block_diag=True must be empty"),
    (plain(enable_newlora="on"), "enable_newlora='on' must be empty"),
    (plain(lora_scale=0.5), "lora_scale=0.5 must be empty"),
    (plain(model_extra=1, model_config={"a": 1}), "model_extra=1 must be empty"),
    (plain(__class__="x"), "__class__='x' must be empty"),
    (plain(megatron_core="os.path"), "megatron_core='os.path' must be empty, since it is more than plain"),
    (plain(qalora_group_size=8), "qalora_group_size=8 must be"),
    (plain(corda_config={"a": 1}), "corda_config"),
    (plain(target_parameters=["mlp.w"]), "target_parameters"),
    (plain(layer_replication=[[0, 1]]), "layer_replication"),
    (plain(peft_type=...), "peft_type: Field required"),
    (plain(peft_type="LOHA"), "peft_type: Input should be 'LORA', got 'LOHA'"),
    (plain(task_type="SEQ_CLS"), "task_type: Input should be 'CAUSAL_LM'"),
    (plain(use_rslora=1), "use_rslora: Input should be a valid boolean, got 1"),
    (plain(r=True), "r: Input should be a valid integer, got True"),
    (plain(r=0), "r: Input should be greater than or equal to 1, got 0"),
    (plain(r=4.0), "r: Input should be a valid integer"),
    (plain(r=...), "r: Field required"),
    (plain(r=8), "q_proj': the rank is 4, but the configuration says 8"),
    (plain(rank_pattern={"q_proj": 2}), "q_proj': the rank is 4, but the configuration says 2"),
    (plain(rank_pattern={"q_proj": True}), "rank_pattern: .*integer, got True"),
    (plain(rank_pattern={"^q_proj$": 2, "k_proj$": 2}), "k_proj': the rank is 4, but the configuration says 2"),
    (plain(alpha_pattern={"(a+)+$": 4}), "alpha_pattern.*not regular expressions"),
    (plain(alpha_pattern={"q_proj": 0}), "q_proj': the scale 0 is 0 or out of range in float32"),
    (plain(alpha_pattern=[8]), "alpha_pattern: Input should be a valid dictionary"),
    (plain(alpha_pattern={"q_proj": "8"}), "alpha_pattern: Input should be a valid number, got '8'"),
    *((plain(lora_alpha=a), "lora_alpha: Input should be a valid number") for a in ("16", True, None)),
    *((plain(lora_alpha=a), "the scale -?0 is 0 or out of range in float32") for a in (0, -0.0)),
    (plain(lora_alpha=1e300), "the scale 2.5e.299 is 0 or out of range in float32"),
    (plain(lora_alpha=1e-300), "the scale 2.5e-301 is 0 or out of range in float32"),
    (plain(lora_alpha=1e39), "the scale 2.5e.38 .*|not finite"),
    (plain(target_modules=[1]), "target_modules: Input should be a valid string"),
    (plain(target_modules=""), "target_modules: .*at least 1"),
    (plain(target_modules=[]), "target_modules: .*at least 1"),
    (plain(target_modules=...), "target_modules: Field required"),
    (plain(target_modules=["q_proj"]), "k_proj': the configuration does not have it adapted"),
    (plain(target_modules=["q_proj", "k_proj", "v_proj"]), "v_proj': the weights lack it"),
    (plain(target_modules=["q_proj", "k_proj", "lm_head"]), "lm_head': the weights lack it"),
    (plain(target_modules=["q_proj", "k_proj", "mlp"]), "mlp': the weights lack it"),
    (plain(target_modules="all-linear"), "v_proj': the weights lack it"),
    (plain(target_modules="(a+)+$", exclude_modules=["k_proj"]), "k_proj': the configuration does not have it"),
    (plain(target_modules="(a+)+$", layers_to_transform=[0]), "layers_to_transform must be empty where"),
    (plain(exclude_modules=["k_proj"]), "k_proj': the configuration does not have it adapted"),
    (plain(exclude_modules=3), "exclude_modules: Input should be a valid string"),
    (plain(layers_to_transform=[1]), "q_proj': the configuration does not have it adapted"),
    (plain(layers_to_transform=[True]), "layers_to_transform: Input should be a valid integer"),
    (plain(layers_to_transform=1), "the configuration does not have it"),
    (plain(layers_pattern={"a": 1}), "layers_pattern: Input should be a valid string"),
    (plain(layers_pattern="blocks", layers_to_transform=[0]), "the configuration does not have it"),
    (plain(layers_pattern="layers$", layers_to_transform=[0, 1]), "the configuration does not have it"),
    (plain(layers_pattern=["a"] * 100, layers_to_transform=[0]), "layers_pattern: .*at most 32"),
    (plain(target_modules=["q"] * 2000), "target_modules: .*"),
    (plain(model_type="mistral"), "model_type='mistral' must be the base's, 'llama'"),
]
NAN, INF = (torch.full((4, 16), value) for value in (float("nan"), float("inf")))
FILES = [
    (b"", "are 0 bytes, and no header"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", "begin like a pickle"),
    (b"PK\x03\x04\x00\x00\x08\x08", "begin like a zip archive"),
    (packed({}, length=2**62), "4,611,686,018,427,387,904 bytes, and no header"),
    (packed({}, length=0), "give their header 0 bytes"),
    (packed({}, length=100), "ends after 10 of 108 bytes"),
    (packed({}), "adapt no module"),
    (packed([]), "begins with b'.', not with a brace"),
    (packed(b'{"a": ' * 5000 + b"1" + b"}" * 5000), "nested too deeply"),
    (packed({f"t{i}": 0 for i in range(5000)}), "5,000 tensors, at most 4,096"),
    (packed({"__metadata__": {"a": 1}}), "__metadata__ may only hold strings"),
    (packed({"a": 1}), "'a': an entry is"),
    (GOOD[:-1], "is no range of the"),
    (GOOD + b"\0", "leave a gap"),
    (described(data_offsets=[0, 255]), "data_offsets=.0, 255"),
    (described(data_offsets=[256, 512]), "leave a gap|overlap"),
    (described(data_offsets=[True, 256]), "data_offsets=.True, 256. is no range"),
    (described(dtype="I64"), "dtype='I64' is not one of"),
    (described(dtype=["F32"]), "is not one of"),
    (described(shape=[0, 16], data_offsets=[0, 0]), "shape=.0, 16. is not a tensor's"),
    (described(shape=[-4, -16]), "shape=.-4, -16. is not a tensor's"),
    (described(shape=[2**60, 2**60]), "is not a tensor's"),
    (described(shape=[1] * 100_000), "is not a tensor's"),
    (weights(**{"../../etc/passwd": torch.ones(1)}), "'../../etc/passwd': only lora_A.weight"),
    (weights(**{"x.experts.0.w1.lora_A.weight": torch.ones(1)}), "^'x.experts.0.w1.*of its head, embeddings or exp"),
    (weights(**{f"{Q}.lora_A.weight": torch.ones(1)}), "q_proj.lora_A.weight': only lora_A.weight"),  # not wrapped
    (weights(q_A=torch.ones(4, 15)), "shapes ..4, 15., .16, 4.., this base needs"),
    (weights(q_B=torch.ones(16, 5)), "shapes ..4, 16., .16, 5.."),
    (weights(q_A=torch.ones(64)), "shapes ..64."),
    (weights(q_A=torch.tensor(1.0)), "shape=.. is not a tensor's"),
    (weights(q_B=None), "q_proj': lora_B.weight is missing"),
    (weights(q_A=None), "q_proj': lora_A.weight is missing"),
    (weights(k_A=None, k_B=None), "k_proj': the weights lack it, and the configuration has it adapted"),
    (weights(q_A=NAN, k_A=INF), "q_proj': has values that are not finite"),
    (weights(q_A=torch.full((4, 16), 1e300, dtype=torch.float64)), "not finite in torch.float32"),
    (weights(q_B=torch.full((16, 4), 3e38)), "not finite in torch.float32"),
]
HOSTILE = [(config, GOOD, reason) for config, reason in CONFIGURATIONS]
HOSTILE += [(plain(), data, reason) for data, reason in FILES]


@pytest.mark.parametrize(("config", "data", "reason"), HOSTILE, ids=[reason for *_, reason in HOSTILE])
def test_a_wrong_configuration_or_file_of_weights_is_refused(config, data, reason):
    text = refused(config, data)
    assert re.search(reason, text), text


def layered(*places, **options):
    """An adapter of a base with three layers that has (layer, kind) alone."""
    pair = {"A": torch.ones(4, 16), "B": torch.ones(16, 4)}
    named = {
        f"base_model.model.model.layers.{layer}.self_attn.{kind}_proj.lora_{side}.weight": pair[side].clone()
        for layer, kind in places
        for side in "AB"
    }
    return plain(**options), save(named)


@pytest.mark.parametrize(
    ("places", "options", "lacks"),
    [
        (["0q", "1q", "2q"], dict(target_modules=["q_proj"]), None),
        (["0q"], dict(target_modules=["q_proj"]), "1.self_attn.q"),
        (["0q", "2q"], dict(target_modules=["q_proj"]), "1.self_attn.q"),
        (["0q", "2q"], dict(target_modules=["q_proj"], layers_to_transform=[0, 2]), None),
        (["0q"], dict(target_modules=["q_proj"], layers_to_transform=[0, 2]), "2.self_attn.q"),
        (["0q"], dict(target_modules=["0.self_attn.q_proj"]), None),
        (["0q", "1q"], dict(target_modules=["q_proj"], exclude_modules=["2.self_attn.q_proj"]), None),
        (["0q", "1q"], dict(target_modules=["q_proj"], exclude_modules=r".*2.*"), None),
        (["0q", "2q"], dict(target_modules=r".*\.[02]\..*q_proj"), None),
        (["0q", "0k", "1q"], dict(target_modules=r".*\.[01]\..*"), "1.self_attn.k"),
        (["0q", "0k", "1q"], dict(target_modules=r".*[01].*", exclude_modules=["1.self_attn.k_proj"]), None),
        (["0q"], dict(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="layer."), None),
        (["0q"], dict(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="layer[s]"), None),
    ],
    ids=str,
)
def test_a_part_of_what_the_configuration_names_is_refused(places, options, lacks):
    base = random_backbone("llama", **SIZES | dict(num_layers=3))
    config, data = layered(*places, **options)
    if lacks is None:
        assert len(read_adapter(config, data, base).factors) == len(places)
    else:
        assert f"{lacks}_proj': the weights lack it" in refused(config, data, base=base)


def test_what_an_expression_chose_here_is_written_by_name(tmp_path):
    base = random_backbone("llama", **SIZES | dict(num_layers=2))
    chosen = r".*(0\.self_attn\.q|0\.mlp\.up|1\.self_attn\.q)_proj"  # a kind lacks a layer
    peft_model(base, target_modules=chosen).save_pretrained(tmp_path / "peft")
    base = random_backbone("llama", **SIZES | dict(num_layers=2))
    with pytest.raises(InvalidAdapterError, match=r"1\.mlp\.up_proj': the weights lack it"):
        validate_adapter(tmp_path / "peft", base)
    made = Adapter.from_peft(peft.PeftModel.from_pretrained(base, tmp_path / "peft"))
    made.save(tmp_path / "own")
    base = random_backbone("llama", **SIZES | dict(num_layers=2))
    assert validate_adapter(tmp_path / "own", base).digest == made.digest
    assert len(made.factors) == 3


def test_values_must_be_finite_in_the_base_s_precision():
    half = random_backbone("llama", **SIZES, dtype=torch.float16)
    for change in (dict(q_A=torch.full((4, 16), 7e4)), dict(q_B=torch.full((16, 4), 4e4))):
        read_adapter(plain(), weights(**change), BASE)
        assert "not finite in torch.float16, scaled" in refused(plain(), weights(**change), base=half)


def test_a_header_may_begin_with_any_bytes():
    for length in (0x280, 0x4B50):  # as a pickle begins, and as a zip archive begins
        read_adapter(plain(), packed(GOOD[8:END].ljust(length), GOOD[END:]), BASE)
    odd = packed(GOOD[8:END] + b" " * ((4 - END) % 4 + 1), GOOD[END:])  # values that are not aligned
    up = read_adapter(plain(), odd, BASE).factors[Q].up
    assert up.data_ptr() % 4 == 0
    assert torch.equal(up, tensors()[f"base_model.model.{Q}.lora_B.weight"])


def test_the_tensors_are_views_of_the_files():
    data = bytearray(GOOD)
    adapter = read_adapter(plain(), data, BASE)
    assert adapter.files[WEIGHTS] is data
    before = adapter.factors[Q].down.clone()
    data[-64 * 16 :] = bytes(64 * 16)
    assert not torch.equal(adapter.factors[Q].down, before)


def test_policies():
    config, header, size = plain(model_type="llama"), GOOD[:END], len(GOOD)
    for name, limit in POLICIES.items():
        inspect(config, header, size, BASE, name)
        with pytest.raises(InvalidAdapterError, match="bytes, at most"):
            inspect(config, header, limit.max_bytes + 1, BASE, name)
        with pytest.raises(InvalidAdapterError, match="model_type=None must be one of"):
            inspect(plain(), header, size, BASE, name)
    assert limit.max_bytes == 299_999_999
    assert "the rank is 4, at most 3" in refused(plain(), GOOD, AdapterLimits(max_rank=3))
    assert "model_type='llama' must be one of gemma" in refused(config, GOOD, AdapterLimits(model_types=("gemma",)))
    with pytest.raises(ValueError, match="limits must be one of 'workers_ai_launch'"):
        inspect(config, header, size, BASE, "workers_ai")
    assert "lm_head" not in targets(BASE)
    assert targets(random_backbone("gpt2"))["transformer.h.0.mlp.c_fc"] == (64, 128)


def test_the_digest_is_of_every_byte_and_its_place():
    changed = bytearray(GOOD)
    changed[-1] ^= 1
    read = [(plain(), GOOD), (plain(), GOOD), (plain(), changed), (plain() + b" ", GOOD)]
    digests = [read_adapter(config, data, BASE).digest for config, data in read]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    lengths = [len(content).to_bytes(8, "little") for content in (plain(), GOOD)]
    assert digests[0] == hashlib.sha256(lengths[0] + plain() + lengths[1] + GOOD).hexdigest()


@settings(max_examples=100)
@given(st.data())
def test_a_mutated_adapter_is_refused_or_fits(data):
    config, content = bytearray(plain()), bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        file, stop = data.draw(st.sampled_from([(config, len(config)), (content, END), (content, len(content))]))
        file[data.draw(st.integers(0, stop - 1))] = data.draw(st.integers(0, 255))
    try:
        adapter = read_adapter(bytes(config), content, BASE)
    except InvalidAdapterError:
        return
    for path, each in adapter.factors.items():
        assert targets(BASE)[path] == (each.down.shape[1], each.up.shape[0])
        assert each.down.isfinite().all()
        assert (each.up * each.scale).isfinite().all()


def test_what_cannot_be_read_in_a_folder_is_refused_and_a_link_is_read(tmp_path):
    (tmp_path / CONFIG).write_bytes(plain())
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(InvalidAdapterError, match=f"{WEIGHTS} is missing; .* a pickle, which is never read"):
        validate_adapter(tmp_path, BASE)
    Adapter.of(json.loads(plain()), read_adapter(plain(), GOOD, BASE).factors).save(tmp_path / "blobs")
    (tmp_path / WEIGHTS).symlink_to(tmp_path / "blobs" / WEIGHTS)
    assert validate_adapter(tmp_path, BASE).rank == 4
    (tmp_path / CONFIG).write_bytes(b" " * 70_000)
    with pytest.raises(InvalidAdapterError, match=f"{CONFIG} has 70,000 bytes, at most 65,536"):
        validate_adapter(tmp_path, BASE)


MANY = {f"self_attn.n{i}": 1 for i in range(1000)}
COSTLY = [  # a configuration, and what is said of it
    (dict(rank_pattern={f"n{i}": 1 for i in range(5000)}), "rank_pattern: Dictionary should have at most 1024"),
    (dict(rank_pattern=MANY, alpha_pattern=MANY, r=5), "the rank is 4, but the configuration says 5"),
    (dict(target_modules=[f"m{i}" for i in range(1000)]), "does not have it adapted"),
    (dict(target_modules="(.*)*" * 5000 + "$", exclude_modules="(a|aa)+$"), None),
]


@pytest.mark.parametrize(("options", "reason"), COSTLY, ids=["patterns", "most patterns", "names", "expressions"])
def test_a_costly_configuration_is_refused_cheaply(options, reason):
    begin = time.process_time()
    if reason:
        assert reason in refused(plain(**options), GOOD)
    else:  # an expression is not run: the weights say what is adapted
        read_adapter(plain(**options), GOOD, BASE)
    assert time.process_time() - begin < 2


def test_many_tensors_in_a_large_file_are_refused_cheaply(tmp_path):
    entry = dict(dtype="F32", shape=[1], data_offsets=[0, 4])
    header = {f"base_model.model.m{i}.lora_A.weight": entry for i in range(4000)}
    (tmp_path / CONFIG).write_bytes(plain())
    (tmp_path / WEIGHTS).write_bytes(packed(header, bytes(50 * 10**6)))
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(InvalidAdapterError) as error:
        validate_adapter(tmp_path, BASE)
    took, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(error.value)) < 500
    assert peak < 40 * 2**20  # the values are not read
    assert took < 10  # tracemalloc slows it down
