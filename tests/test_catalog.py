"""The catalog against transformers itself: every shape is rebuilt without storage and counted."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg import catalog
from plpkg.catalog import Device, Link, ModelShape

# What a configuration needs beside the catalog's columns to describe the published model.
EXTRA = {
    "falcon-rw-1b": dict(bias=True, alibi=True, multi_query=False, parallel_attn=False, new_decoder_architecture=False),
    "opt-1.3b": dict(max_position_embeddings=2048, word_embed_proj_dim=2048),
    "qwen2.5-0.5b": dict(tie_word_embeddings=True),
    "gemma-2b": dict(tie_word_embeddings=True),
}


def config_of(shape: ModelShape):
    dims = dict(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied_embeddings,
    )
    if shape.family not in ("gpt2", "falcon", "opt", "bert"):
        dims["num_key_value_heads"] = shape.num_kv_heads
    if shape.family.startswith("gemma"):
        dims["head_dim"] = shape.head_dim
    if shape.family == "opt":
        dims["ffn_dim"] = shape.intermediate
    elif shape.family not in ("gpt2", "falcon"):
        dims["intermediate_size"] = shape.intermediate
    return AutoConfig.for_model(shape.family, **dims | EXTRA.get(shape.name, {}))


@pytest.mark.parametrize("name", list(catalog.models()))
def test_catalog_row_equals_the_real_model(name):
    listed = catalog.model(name)
    read = ModelShape.from_config(config_of(listed), name)
    for field in ModelShape.__dataclass_fields__:
        if field != "source":
            assert getattr(read, field) == getattr(listed, field), field


# Where the library's default configuration is the published model, it is a second witness.
DEFAULTS = {
    "llama-7b": "LlamaConfig",
    "mistral-7b": "MistralConfig",
    "phi-3-mini-128k": "Phi3Config",
    "gemma-7b": "GemmaConfig",
    "gemma-2-2b": "Gemma2Config",
    "gpt2": "GPT2Config",
    "bert-base": "BertConfig",
    "stablelm-3b-4e1t": "StableLmConfig",
}
# The others, typed a second time: layers, hidden, heads, key and value heads, head_dim, intermediate, vocabulary.
TYPED = {
    "llama-13b": (40, 5120, 40, 40, 128, 13824, 32000),
    "llama-30b": (60, 6656, 52, 52, 128, 17920, 32000),
    "llama-2-7b": (32, 4096, 32, 32, 128, 11008, 32000),
    "llama-2-13b": (40, 5120, 40, 40, 128, 13824, 32000),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256),
    "gemma-2b": (18, 2048, 8, 1, 256, 16384, 256000),
    "qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064),
    "falcon-rw-1b": (24, 2048, 32, 32, 64, 8192, 50304),
    "opt-1.3b": (24, 2048, 32, 32, 64, 8192, 50272),
}


def test_every_row_has_a_second_witness():
    assert set(DEFAULTS) | set(TYPED) == set(catalog.models())
    for name, default in DEFAULTS.items():
        read = ModelShape.from_config(getattr(transformers, default)(), name)
        assert replace(read, source="") == replace(catalog.model(name), source=""), name
    for name, dims in TYPED.items():
        row = catalog.model(name)
        listed = (
            row.num_layers,
            row.hidden,
            row.num_heads,
            row.num_kv_heads,
            row.head_dim,
            row.intermediate,
            row.vocab,
        )
        assert listed == dims, name


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
    torch.manual_seed(0)
    instance = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == expected == sum(p.numel() for p in instance.parameters())
    assert (shape.num_layers, shape.hidden, shape.vocab, shape.family) == (L, D, V, family)
    assert shape.intermediate == (4 * D if family == "gpt2" else FF)
    head = instance.get_output_embeddings().weight
    assert shape.tied_embeddings == (head is instance.get_input_embeddings().weight)
    assert shape.embedding_parameters == head.numel()


@pytest.mark.parametrize("case", list(FAMILIES))
def test_projection_dims_are_what_the_weights_say(case):
    extra, _ = FAMILIES[case]
    family = case.split("-")[0]
    dims = {k: v for k, v in TINY.items() if family != "gpt2" or k != "intermediate_size"}
    config = AutoConfig.for_model(family, **dims | extra)
    shape = ModelShape.from_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = ("qkv_proj", "c_attn", "q_proj", "k_proj", "v_proj")
    first = [m for n, m in model.named_modules() if n.split(".")[-1] in names and f".{L - 1}." in n]
    widths = [m.nf if hasattr(m, "nf") else m.out_features for m in first]
    assert sum(widths) == sum(shape.projection_dims)
    if len(widths) == 3:
        assert tuple(widths) == shape.projection_dims


def test_multi_query_models_have_one_kv_head():
    falcon = transformers.FalconConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=32)
    assert ModelShape.from_config(falcon).num_kv_heads == 1
    falcon.update({"new_decoder_architecture": True, "num_kv_heads": 2})  # as in Falcon-40B
    assert ModelShape.from_config(falcon).num_kv_heads == 2


def test_from_config_reads_a_local_folder(tmp_path):
    config = transformers.Qwen2Config(**TINY, num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    shape = ModelShape.from_config(tmp_path)
    assert shape.name == str(tmp_path)
    assert shape.parameters == gated(2, qkv_bias=1)


def test_from_config_describes_the_text_part_of_a_multimodal_model():
    text = dict(TINY, num_key_value_heads=2, head_dim=16)
    shape = ModelShape.from_config(transformers.Gemma3Config(text_config=text), "picture model")
    assert (shape.hidden, shape.num_layers) == (D, L)


def test_head_of_a_multimodal_model_is_counted_with_its_language_part():
    text = dict(TINY, num_key_value_heads=2)
    for tied in (False, True):
        config = transformers.Qwen2VLConfig(text_config=text, tie_word_embeddings=tied)
        shape = ModelShape.from_config(config, "vision")
        assert shape.tied_embeddings is tied
        assert shape.parameters == gated(2, qkv_bias=1, tied=tied)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("DeepseekV3Config", "attention projections are not 61 layers"),
        ("JambaConfig", "attention projections are not 32 layers"),
        ("AlbertConfig", "attention projections are not 12 layers"),
        ("ViTConfig", "vocab_size"),
        ("CLIPConfig", "it is not a language model"),
    ],
)
def test_what_is_not_one_attention_block_a_layer_is_refused(kind, reason):
    with pytest.raises(ValueError, match=rf"cannot describe \w+ \({kind}\): .*{reason}"):
        ModelShape.from_config(getattr(transformers, kind)())


def test_an_embedding_of_another_width_is_refused():
    config = transformers.OPTConfig(**TINY | dict(ffn_dim=FF, word_embed_proj_dim=32))
    with pytest.raises(ValueError, match="its word embedding is not vocab=160 × hidden=64"):
        ModelShape.from_config(config, "narrow")


def test_an_encoder_is_marked():
    assert ModelShape.from_config(transformers.RobertaConfig(num_hidden_layers=1)).encoder
    assert set(catalog.models()) - set(catalog.decoders()) == {"bert-base"}


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}')
    (tmp_path / "odd.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="cannot describe"):
        ModelShape.from_config(tmp_path)


def test_an_unreadable_configuration_is_told_from_a_missing_one(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileNotFoundError, match=r"its config\.json cannot be read"):
        ModelShape.from_config(tmp_path)


@pytest.mark.parametrize("config", [None, {}, 3, transformers.LlamaConfig])
def test_not_a_configuration(config):
    with pytest.raises(TypeError, match="a configuration is a name, a folder or a PreTrainedConfig object"):
        ModelShape.from_config(config)


def test_parts_add_up():
    shape = catalog.model("llama-3.1-8b")
    assert sum(row["parameters"] for row in shape.rows()) == shape.parameters
    assert shape.computing_parameters == shape.parameters - 128256 * 4096
    tied = catalog.model("gpt2")
    assert sum(row["parameters"] for row in tied.rows()) == tied.parameters
    assert tied.computing_parameters == tied.parameters


@pytest.mark.parametrize("config", [transformers.T5Config(), transformers.BartConfig()])
def test_encoder_decoder_is_refused_by_name(config):
    with pytest.raises(ValueError, match=rf"^{config.model_type} \({type(config).__name__}\) is an encoder-decoder"):
        ModelShape.from_config(config)


def test_model_without_attention_heads_is_refused():
    with pytest.raises(ValueError, match=r"mamba \(MambaConfig\): it has no single number of attention heads"):
        ModelShape.from_config(transformers.MambaConfig())


def test_unreachable_name_is_one_sentence():
    with pytest.raises(FileNotFoundError, match=r"no configuration for 'no/such-model'"):
        ModelShape.from_config("no/such-model")


def test_impossible_shape_is_refused():
    good = catalog.model("gpt2")
    with pytest.raises(ValueError, match="num_kv_heads must be between 1 and num_heads=12, got 13"):
        ModelShape(**vars(good) | dict(num_kv_heads=13))
    with pytest.raises(ValueError, match="leave nothing for the decoder"):
        ModelShape(**vars(good) | dict(parameters=1000))


@pytest.mark.parametrize(
    ("look_up", "name", "near"),
    [
        (catalog.model, "llama2-7b", "llama-2-7b"),
        (catalog.device, "iphone", "iphone-13-pro-max"),
        (catalog.link, "5G", "5g"),
        (catalog.published, "private_lora_accurracy", "private_lora_accuracy"),
    ],
)
def test_unknown_name_lists_the_near_ones(look_up, name, near):
    with pytest.raises(ValueError, match=rf"unknown .* '{name}'; near: .*{near}"):
        look_up(name)


def test_objects_pass_through_and_others_do_not():
    link = Link("mine", 1e6, 1e6, 0.0)
    assert catalog.link(link) is link
    with pytest.raises(TypeError, match=r"a model is a ModelShape or a catalog name, got 7"):
        catalog.model(7)


@pytest.mark.parametrize("rates", [(-1, 1, 0), (1, 0, 0), (1, 1, -0.1)])
def test_impossible_link_is_refused(rates):
    with pytest.raises(ValueError, match=r"_s must be (greater than|at least) 0, got"):
        Link("bad", *rates)


def test_impossible_device_is_refused():
    with pytest.raises(ValueError, match="memory_bandwidth_bytes_per_s must be greater than 0, got -1"):
        Device("bad", -1, 1, 1)


def test_every_fact_has_a_source():
    ours = {"measured", "backbone", "diary"}  # measured or written by this project
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


def test_published_link_has_no_delay_and_the_sourced_one_does():
    assert catalog.link("5g-published").rtt_s == 0
    assert catalog.link("5g").rtt_s == 0.033
    assert catalog.link("5g").uplink_bits_per_s == catalog.link("5g-published").uplink_bits_per_s == 60e6


def test_missing_data_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no data file 'published/nothing\.csv'"):
        catalog.data_path("published", "nothing.csv")
