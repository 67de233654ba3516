"""The catalog against transformers itself: every shape is rebuilt without storage and counted."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from plpkg import catalog
from plpkg.catalog import Link, ModelShape


def typed(family, layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, **others):
    """A configuration as its publication has it, each family with its names."""
    dims = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
    if family == "opt":
        dims |= dict(ffn_dim=intermediate, word_embed_proj_dim=hidden)
    elif family != "falcon":
        dims |= dict(num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=intermediate)
    return AutoConfig.for_model(family, **dims | others)


# Where the library's default is the published model, it is the witness; the others are typed a second time.
CONFIGS = {
    "llama-7b": LlamaConfig(),
    "llama-13b": typed("llama", 40, 5120, 40, 40, 128, 13824, 32000),
    "llama-30b": typed("llama", 60, 6656, 52, 52, 128, 17920, 32000),
    "llama-2-7b": typed("llama", 32, 4096, 32, 32, 128, 11008, 32000),
    "llama-2-13b": typed("llama", 40, 5120, 40, 40, 128, 13824, 32000),
    "llama-3.1-8b": typed("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "mistral-7b": transformers.MistralConfig(),
    "phi-3-mini-128k": transformers.Phi3Config(sliding_window=262_144),
    "gemma-2b": typed("gemma", 18, 2048, 8, 1, 256, 16384, 256000),
    "gemma-7b": transformers.GemmaConfig(),
    "gemma-2-2b": transformers.Gemma2Config(),
    "qwen2.5-0.5b": typed("qwen2", 24, 896, 14, 2, 64, 4864, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": typed("qwen2", 28, 3584, 28, 4, 128, 18944, 152064),
    "falcon-rw-1b": typed(
        "falcon", 24, 2048, 32, 32, 64, 8192, 50304, bias=True, alibi=True, multi_query=False, parallel_attn=False
    ),
    "opt-1.3b": typed("opt", 24, 2048, 32, 32, 64, 8192, 50272),
    "gpt2": transformers.GPT2Config(),
    "bert-base": transformers.BertConfig(),
    "stablelm-3b-4e1t": transformers.StableLmConfig(),
}


@pytest.mark.parametrize("name", list(catalog.models()))
def test_catalog_row_equals_the_real_model(name):
    assert replace(ModelShape.from_config(CONFIGS[name], name), source="") == replace(catalog.model(name), source="")


# Small shapes of each architecture family, and the weights that its blocks have in closed form.
D, L, FF, V = 64, 3, 96, 160
TINY = dict(hidden_size=D, num_hidden_layers=L, num_attention_heads=4, intermediate_size=FF, vocab_size=V)


def gated(kv_heads, head_dim=16, qkv_bias=0, norms=2, tied=False):
    query, kv = 4 * head_dim, kv_heads * head_dim
    attention = D * (query + 2 * kv) + query * D + qkv_bias * (query + 2 * kv)
    return L * (attention + 3 * D * FF + norms * D) + D + V * D * (1 if tied else 2)


def gpt2():
    attention = D * 3 * D + 3 * D + D * D + D
    return L * (attention + 2 * D * 4 * D + 4 * D + D + 4 * D) + 2 * D + V * D + 32 * D


FAMILIES = {
    "llama": (dict(num_key_value_heads=2), gated(2)),
    "llama-mha": (dict(num_key_value_heads=4), gated(4)),
    "llama-tied": (dict(num_key_value_heads=1, tie_word_embeddings=True), gated(1, tied=True)),
    "mistral": (dict(num_key_value_heads=2), gated(2)),
    "qwen2": (dict(num_key_value_heads=2), gated(2, qkv_bias=1)),
    "phi3": (dict(num_key_value_heads=2, pad_token_id=0), gated(2)),
    "gemma2": (dict(num_key_value_heads=2, head_dim=32), gated(2, head_dim=32, norms=4, tied=True)),
    "gpt2": (dict(n_positions=32), gpt2()),
}


@pytest.mark.parametrize("case", list(FAMILIES))
def test_from_config_counts_as_the_closed_form_and_as_a_real_instance(case):
    extra, expected = FAMILIES[case]
    family = case.split("-")[0]
    dims = dict(TINY)
    if family == "gpt2":
        dims.pop("intermediate_size")
    config = AutoConfig.for_model(family, **dims | extra)
    shape = ModelShape.from_config(config)
    with torch.device("meta"):
        instance = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == expected == sum(p.numel() for p in instance.parameters())
    assert (shape.num_layers, shape.hidden, shape.vocab, shape.family) == (L, D, V, family)
    assert shape.intermediate == (4 * D if family == "gpt2" else FF)
    head = instance.get_output_embeddings().weight
    assert shape.tied_embeddings == (head is instance.get_input_embeddings().weight)
    assert shape.embedding_parameters == head.numel()

    names = ("qkv_proj", "c_attn", "q_proj", "k_proj", "v_proj")
    projections = [m for n, m in instance.named_modules() if n.split(".")[-1] in names and f".{L - 1}." in n]
    widths = [m.nf if hasattr(m, "nf") else m.out_features for m in projections]
    assert sum(widths) == sum(shape.projection_dims)
    assert len(widths) == 1 or tuple(widths) == shape.projection_dims


# As published: Mixtral 8x7B "46.7B total, 12.9B active", Qwen3-30B-A3B "30.5B, 3.3B", gpt-oss-120b "116.83B, 5.13B"
# (its embedding not counted), Llama 4 Scout "17B active" of its language model's 107.8B; Qwen1.5-MoE "14.3B, 2.7B".
MIXTURES = {
    "mixtral": (transformers.MixtralConfig(), 46.7, 12.9),
    "qwen3_moe": (typed("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, num_experts=128), 30.5, 3.3),
    "gpt_oss": (transformers.GptOssConfig(), 116.83, 5.13 + 201_088 * 2880 / 1e9),
    "llama4_text": (transformers.Llama4TextConfig(), 107.8, 17),
    "qwen2_moe": (transformers.Qwen2MoeConfig(), 14.3, 2.7),
}


@pytest.mark.parametrize("family", list(MIXTURES))
def test_a_mixture_has_the_published_total_and_active_weights(family):
    config, total, active = MIXTURES[family]
    shape = ModelShape.from_config(config, family)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.004)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert repr(shape).endswith(f"{shape.parameters:,} parameters, {shape.active_parameters:,} of them active")
    assert sum(row["parameters"] for row in shape.rows()) == shape.parameters


ROUTED = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40)


@pytest.mark.parametrize(
    ("family", "extra", "one_expert"),
    [
        ("mixtral", dict(num_local_experts=6, num_experts_per_tok=2), L * 3 * D * FF),
        ("granitemoe", dict(num_local_experts=6, num_experts_per_tok=2), L * 3 * D * FF),
        ("qwen3_moe", ROUTED, L * 3 * D * 40),
        ("qwen3_moe", ROUTED | dict(mlp_only_layers=[1]), (L - 1) * 3 * D * 40),
        ("qwen2_moe", ROUTED | dict(shared_expert_intermediate_size=48), L * 3 * D * 40),
    ],
)
def test_only_routed_experts_lie_idle(family, extra, one_expert):
    """Every token meets the shared expert, the router and a dense layer's block; ``one_expert`` is of all layers."""
    config = AutoConfig.for_model(family, **TINY, num_key_value_heads=2, **extra)
    shape = ModelShape.from_config(config)
    with torch.device("meta"):
        instance = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in instance.parameters())
    assert (shape.num_experts, shape.num_experts_per_tok, shape.expert_parameters) == (6, 2, 6 * one_expert)
    assert shape.active_parameters == shape.parameters - 4 * one_expert


def test_sizes_of_few_bits_do_not_overflow():
    wide = dict(vocab=np.int32(2**20), hidden=np.int32(2**15), num_heads=np.int16(300), head_dim=np.int16(300))
    shape = replace(catalog.model("llama-30b"), **wide, num_kv_heads=np.int16(300), parameters=10**12)
    assert (shape.embedding_parameters, shape.kv_dim) == (2**35, 90_000)


def test_experts_that_a_text_leaves_out():
    """Against drawing two of six experts for each token, which is the mean that the formula gives."""
    shape = replace(catalog.model("gpt2"), expert_parameters=6_000_000, num_experts=6, num_experts_per_tok=2)
    drawn, texts = torch.Generator().manual_seed(0), 4000
    for positions in (1, 2, 5):
        choices = torch.rand(texts, positions, 6, generator=drawn).argsort(-1)[..., :2].flatten(1)
        met = torch.stack([(choices == expert).any(-1) for expert in range(6)], -1)
        unread = 1_000_000 * (~met).sum(-1).double()
        error = unread.std() / texts**0.5
        assert abs(shape.unread_parameters(positions) - unread.mean()) <= 4 * error + 1e-6


def test_multi_query_models_have_one_kv_head_and_encoders_are_marked():
    falcon = transformers.FalconConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=32)
    assert ModelShape.from_config(falcon).num_kv_heads == 1
    falcon.update({"new_decoder_architecture": True, "num_kv_heads": 2})  # as in Falcon-40B
    assert ModelShape.from_config(falcon).num_kv_heads == 2
    assert ModelShape.from_config(transformers.RobertaConfig(num_hidden_layers=1)).encoder
    assert set(catalog.models()) - set(catalog.decoders()) == {"bert-base"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_part_of_a_multimodal_model_is_counted_with_its_head(tied):
    text = dict(TINY, num_key_value_heads=2)
    shape = ModelShape.from_config(transformers.Qwen2VLConfig(text_config=text, tie_word_embeddings=tied), "vision")
    assert (shape.hidden, shape.num_layers, shape.tied_embeddings) == (D, L, tied)
    assert shape.parameters == gated(2, qkv_bias=1, tied=tied)
    gemma = transformers.Gemma3Config(text_config=dict(text, head_dim=16))
    assert ModelShape.from_config(gemma, "picture model").projection_dims == shape.projection_dims


@pytest.mark.parametrize("kind", ["Llava", "Gemma3", "Qwen3ASR", "Blip2"])
@pytest.mark.parametrize("tied", [False, True])
def test_whether_a_multimodal_models_head_is_tied(kind, tied):
    """The text's own configuration may say something else, and only some kinds hear it."""
    config = getattr(transformers, f"{kind}Config")(tie_word_embeddings=tied)
    config.get_text_config(decoder=True).tie_word_embeddings = not tied
    with torch.device("meta"):
        instance = transformers.AutoModelForMultimodalLM.from_config(config)
    head = instance.get_output_embeddings().weight
    assert ModelShape.from_config(config).tied_embeddings == (head is instance.get_input_embeddings().weight)


def from_config(kind, **fields):
    return lambda: ModelShape.from_config(getattr(transformers, f"{kind}Config")(**fields))


def changed(good, **fields):
    return lambda: replace(good, **fields)


GPT2, H100, LINK = catalog.model("gpt2"), catalog.device("h100-sxm"), catalog.link("5g")
NO_SHAPE = {
    "DeepseekV3": "attention projections are not 61 layers",
    "Jamba": "layers that are not one attention block each: linear_attention",
    "OlmoHybrid": "one attention block each: linear_attention",  # its projections have the usual names and widths
    "FalconH1": "one attention block each: hybrid",
    "Gemma3nText": "layer 20 of its cache is a DummyLayer, not keys and values of its own alone",
    "Albert": "attention projections are not 12 layers",
    "ViT": "vocab_size",
    "CLIP": "it is not a language model",
    "Mamba": "it has no single number of attention heads",
    "DeepseekV2": "no single number of experts and of those that a token meets, but 64, None",
}
NO_CONFIGURATION = "a configuration is a name, a folder or a PreTrainedConfig object"
TWO_WINDOWS = dict(num_key_value_heads=2, per_layer_config={0: {"sliding_window": 8}, 1: {"sliding_window": 16}})
TWO_WINDOWS |= dict(sliding_window=8)
EXPERTS, OTHER_WORDS = dict(num_experts=4, num_experts_per_tok=2), dict(ffn_dim=FF, word_embed_proj_dim=32)
REFUSED = {
    ValueError: [
        *((from_config(kind), rf"cannot describe \w+ \({kind}Config\): .*{NO_SHAPE[kind]}") for kind in NO_SHAPE),
        (from_config("Llama", **TINY, **EXPERTS), "configuration says 4 experts a layer, and 0 weights are theirs"),
        (from_config("OPT", **TINY, **OTHER_WORDS), "its word embedding is not vocab=160 × hidden=64"),
        (from_config("Mistral", **TINY, **TWO_WINDOWS), r"it has no single sliding window, but \[8, 16\]"),
        (from_config("T5"), r"^t5 \(T5Config\) is an encoder-decoder"),
        (from_config("Bart"), r"^bart \(BartConfig\) is an encoder-decoder"),
        (changed(GPT2, num_kv_heads=13), "num_kv_heads must be between 1 and num_heads=12, got 13"),
        (changed(GPT2, parameters=1000), "leave nothing for the decoder"),
        (changed(GPT2, expert_parameters=10**9), "expert_parameters must be between 0 and decoder_parameters=85842"),
        (changed(GPT2, num_experts_per_tok=5), "num_experts_per_tok must be between 1 and num_experts=1"),
        (
            changed(GPT2, sliding_window=8),
            "sliding_window=8 and num_sliding_layers=0 of gpt2 must both be 0, or neither",
        ),
        (
            changed(GPT2, sliding_window=8, num_sliding_layers=13),
            "num_sliding_layers must be between 0 and num_layers=12",
        ),
        (changed(H100, memory_bandwidth_bytes_per_s=-1), "memory_bandwidth_bytes_per_s must be greater than 0, got -1"),
        (changed(LINK, uplink_bits_per_s=-1), "uplink_bits_per_s must be greater than 0, got -1"),
        (changed(LINK, downlink_bits_per_s=0), "downlink_bits_per_s must be greater than 0, got 0"),
        (changed(LINK, rtt_s=-0.1), "rtt_s must be at least 0, got -0.1"),
        (lambda: catalog.model("llama2-7b"), "unknown .* 'llama2-7b'; near: .*llama-2-7b"),
        (lambda: catalog.device("iphone"), "unknown .* 'iphone'; near: .*iphone-13-pro-max"),
        (lambda: catalog.link("5G"), "unknown .* '5G'; near: .*5g"),
        (lambda: catalog.published("private_lora_accurracy"), "unknown .*accurracy'; near: .*private_lora_accuracy"),
        (lambda: catalog.model("a/b"), r"unknown model 'a/b': .*, ModelShape\.from_config\('a/b'\)$"),
    ],
    TypeError: [
        *((lambda each=each: ModelShape.from_config(each), NO_CONFIGURATION) for each in (None, {}, 3, LlamaConfig)),
        (lambda: catalog.model(7), "a model is a ModelShape or a catalog name, got 7"),
        (lambda: catalog.model(LlamaConfig()), r"got a LlamaConfig: read its shape with ModelShape\.from_config$"),
        (lambda: catalog.model(Path("a")), r"got a \w+Path: read its shape with ModelShape\.from_config$"),
    ],
    FileNotFoundError: [
        (lambda: ModelShape.from_config("no/such-model"), "no configuration for 'no/such-model'"),
        (lambda: catalog.data_path("a", "b.csv"), r"no data file 'a/b\.csv'"),
    ],
}
CASES = [(error, *case) for error, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("error", "call", "message"), CASES, ids=[message for *_, message in CASES])
def test_what_cannot_be_is_refused(error, call, message):
    with pytest.raises(error, match=message):
        call()


def test_a_folder_is_read_and_code_that_comes_with_it_is_not_run(tmp_path):
    transformers.Qwen2Config(**TINY, num_key_value_heads=2).save_pretrained(tmp_path)
    shape = ModelShape.from_config(tmp_path)
    assert (shape.name, shape.parameters) == (str(tmp_path), gated(2, qkv_bias=1))
    (tmp_path / "config.json").write_text('{"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}')
    (tmp_path / "odd.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="cannot describe"):
        ModelShape.from_config(tmp_path)


def test_a_label_is_never_where_the_configuration_is_read(tmp_path, monkeypatch):
    """The label is a folder with another model, here and on the hub."""
    monkeypatch.chdir(tmp_path)
    config = transformers.Qwen2Config(**TINY, num_key_value_heads=2)
    for folder, layers in (("mine", L), ("label", L + 1), ("other", L + 2)):
        transformers.Qwen2Config(**TINY | dict(num_hidden_layers=layers), num_key_value_heads=2).save_pretrained(folder)
    hub = {"owner/mine": "mine", "label": "other"}
    read = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **kw: read(hub.get(name, name), **kw))
    for given, itself in ((config, "qwen2"), ("mine", "mine"), (Path("mine"), "mine"), ("owner/mine", "owner/mine")):
        named, unnamed = ModelShape.from_config(given, name="label"), ModelShape.from_config(given)
        assert (named.name, unnamed.name) == ("label", itself)
        assert replace(named, name="") == replace(unnamed, name="")
        assert named.num_layers == L


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a valid JSON file"),
        ("[]", "Unrecognized model"),
        ('{"a":' + "[" * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "hidden_size": "64"}', "'hidden_size' expected int, got str"),
        (
            '{"model_type": "llama", "num_hidden_layers": 0}',
            "num_hidden_layers must be a whole number",
        ),
        ('{"model_type": "llama", "hidden_act": "evil"}', "hidden_act must be one that transformers knows, got 'evil'"),
        (
            '{"model_type": "llama", "rope_parameters": {"rope_type": "evil", "rope_theta": 1.0}}',
            "rope_type must be one that transformers knows, got 'evil'",
        ),
    ],
    ids=lambda value: value[:60],
)
def test_a_broken_configuration_is_named_in_a_sentence(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"^cannot describe .*: .*{message}") as refusal:
        ModelShape.from_config(tmp_path)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300 + 2 * len(str(tmp_path))


def test_parts_add_up():
    shape, tied = catalog.model("llama-3.1-8b"), catalog.model("gpt2")
    for model in (shape, tied):
        assert sum(row["parameters"] for row in model.rows()) == model.parameters
    assert shape.computing_parameters == shape.parameters - 128256 * 4096
    assert tied.computing_parameters == tied.parameters


def test_objects_pass_through():
    mine = Link("mine", 1e6, 1e6, 0.0)
    assert catalog.link(mine) is mine


def test_every_fact_has_a_source():
    ours = {
        "measured",
        "backbone",
        "smollm2-reader",
        "diary",
        "notes",
        "clipping",
    }  # measured or written by this project
    files = [p for p in catalog.data_path().rglob("*.csv") if not ours & set(p.parts)]
    assert len(files) >= 9
    for path in files:
        sources = pd.read_csv(path)["source"]
        assert sources.str.len().min() > 10, path.name


def test_published_is_a_frame_and_names_known_models():
    frame = catalog.published("private_lora_decode")
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == 36
    for path in catalog.data_path("published").glob("*.csv"):
        assert set(catalog.published(path.stem).get("model", [])) <= set(catalog.models()), path.name
    assert (catalog.link("5g-published").rtt_s, catalog.link("5g").rtt_s) == (0, 0.033)
    assert catalog.link("5g").uplink_bits_per_s == catalog.link("5g-published").uplink_bits_per_s == 60e6


def test_what_notebooks_assume_is_named_with_its_unit_and_its_source():
    names = set(catalog.assumptions())
    assert catalog.assumed("phone_battery_j") == 50e3
    with pytest.raises(ValueError, match="'phone_battery'"):
        catalog.assumed("phone_battery")
    with catalog.data_path("assumptions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == names
    assert all(row["label"] in ("reported", "computed", "assumed") and row["source"] for row in rows)


def test_the_share_of_its_flops_that_a_phone_reaches_is_what_its_source_says():
    reached = 58.2 * 2 * catalog.model("llama-2-7b").parameters / catalog.device("apple-a15").flops_per_s
    assert catalog.assumed("phone_flops_share") == pytest.approx(reached, abs=0.005)
