"""What a stranger's model folder can do beside what ``test_model_folder.py`` has: fields, sizes and files of all kinds.

And what must still be read: folders of real models, with whatever Hugging Face's downloads have.
"""

import json
import os
import re
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from plpkg.backbones import load_backbone, random_backbone
from plpkg.catalog import ModelShape
from plpkg.model_folder import MAX_MODULES


def save_tokenizer(folder):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    tokenizer.add_tokens([AddedToken("<think>", special=True), AddedToken("</think>")])
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    random_backbone("llama").save_pretrained(folder)
    save_tokenizer(folder)
    load_backbone(folder)  # what is imported late takes no part in the times
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def fields(name="config.json", **changes):
    def craft(folder):
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))

    return craft


def whole(**config):
    return lambda folder: (folder / "config.json").write_text(json.dumps(config))


def tokenizer(**changes):
    return fields("tokenizer_config.json", **changes)


def generation(**changes):
    return fields("generation_config.json", **changes)


def empty(name, size):
    def craft(folder):
        (folder / name).touch()
        os.truncate(folder / name, size)

    return craft


def linked(name, target):
    def craft(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return craft


def without_tokenizer_json(then):
    return lambda folder: ((folder / "tokenizer.json").unlink(), then(folder))


def elsewhere(folder):
    """An index in a sub-folder, which names weights out of the folder."""
    shutil.copy(folder / "model.safetensors", folder.parent / "other.safetensors")
    names = load_file(folder / "model.safetensors")
    (folder / "sub").mkdir()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "../other.safetensors")}
    (folder / "sub" / "x.safetensors.index.json").write_text(json.dumps(index))
    fields(transformers_weights="sub/x.safetensors.index.json")(folder)


def pipe_below(folder):
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "w.safetensors")
    fields(transformers_weights="sub/w.safetensors")(folder)


def cast(kind):
    def craft(folder):
        weights = load_file(folder / "model.safetensors")
        save_file({name: values.to(kind) for name, values in weights.items()}, folder / "model.safetensors")

    return craft


def without_metadata(folder):
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def templates(folder):
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    for i in range(65):
        (folder / "additional_chat_templates" / f"{i}.jinja").touch()


def templates_elsewhere(folder):
    (folder.parent / "templates").mkdir()
    (folder.parent / "templates" / "x.jinja").touch()
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "additional_chat_templates").symlink_to(folder.parent / "templates")


def added_tokens(count):
    def craft(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        rest = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        content["added_tokens"] = [dict(id=i, content=f"<{i}>", **rest) for i in range(count)]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return craft


def encoded(codec):
    return lambda folder: (folder / "config.json").write_bytes((folder / "config.json").read_text().encode(codec))


MERGES = "#version\n" + "a a\n" * 1000
TEMPLATE = "additional_chat_templates/tool_use.jinja"
GPT_NEO = dict(model_type="gpt_neo", num_layers=2, hidden_size=32, num_heads=4, vocab_size=64)
BART = dict(model_type="bart", encoder_layers=1, d_model=16, vocab_size=64, is_encoder_decoder=False)
SMALL = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=16, num_attention_heads=4, vocab_size=64)
CONFIG = {  # what a description must refuse as well
    "labels": (fields(num_labels=10**7), "config.json: num_labels must be .* from 1 to 65,536, got 10000000"),
    "layers in a list": (
        whole(**GPT_NEO, attention_types=[[["global"], 10**8]]),
        "attention_types must be a whole number of at most 2,097,152, got 100000000",
    ),
    "layers of another name": (
        whole(**BART, decoder_layers=10**6),
        "decoder_layers must be a whole number of at most 16,384, got 1000000",
    ),
    "layers of no name that ends so": (
        whole(**SMALL, model_type="llama", text_config={"text_config": {"num_hidden_layers": 10**7}}),
        "num_hidden_layers must be .* from 1 to 1,024, got 10000000",
    ),
    "more modules than any model": (whole(**BART, decoder_layers=16_000), "its sizes must make at most .* modules"),
    "experts": (
        whole(**SMALL, model_type="olmoe", num_experts=10**6),
        "num_experts must be a whole number of at most 16,384, got 1000000",
    ),
    "positions": (
        fields(max_position_embeddings=10**9),
        "max_position_embeddings must .* at most 16,777,216, got 1000",
    ),
    "a token's number": (fields(pad_token_id=10**9), "pad_token_id must be a whole number of at most 2,097,152, got"),
    "an epsilon that is NaN": (
        fields(rms_norm_eps=float("nan")),
        "config.json: rms_norm_eps must be a number, got nan",
    ),
    "an epsilon of 10^9": (fields(rms_norm_eps=1e9), "rms_norm_eps must be a number from 0 to 1, got 1000000000.0"),
    "an activation": (fields(hidden_act="evil"), "config.json: hidden_act must be one that transformers knows, got 'e"),
    "a kind of RoPE": (
        fields(rope_parameters={"rope_type": "evil", "rope_theta": 1.0}),
        "config.json: rope_type must be one that transformers knows, got 'evil'",
    ),
    "a family with a long name": (fields(model_type="x" * 10**5), "has model type `xxx"),
    "a name of 10^6 letters": (fields(**{"x" * 10**6: 10**9}), r"config\.json: x+\.\.\.x+ must be a whole number"),
    "weights in an index below": (
        elsewhere,
        "config.json: transformers_weights must be empty, got 'sub/x.safetensors.i",
    ),
    "a pipe below": (pipe_below, "config.json: transformers_weights must be empty, got 'sub/w.safetensors'"),
    "another configuration": (
        fields(configuration_files=["config.4.0.json"]),
        "configuration_files must be empty, got",
    ),
    "a kernel of the hub": (
        fields(attn_implementation="evil/kernel"),
        "config.json: attn_implementation must be one of 'eager', 'sdpa', 'flex_attention', got 'evil/kernel'",
    ),
    "a package": (
        fields(text_config=dict(_attn_implementation="flash_attention_2")),
        "_attn_implementation must be one",
    ),
    "a kernel for experts": (
        fields(experts_implementation="deepgemm"),
        "experts_implementation must be one of 'eager'",
    ),
    "UTF-16": (encoded("utf-16"), "config.json is not JSON: 'utf-8' codec can't decode"),
    "a byte order mark": (encoded("utf-8-sig"), "config.json is not JSON: Unexpected UTF-8 BOM"),
}
FOLDERS = CONFIG | {
    "far more numbers than weights": (
        fields(vocab_size=2**24),
        "its sizes make .* numbers, but the weights have .* byt",
    ),
    "far more layers than weights": (fields(num_hidden_layers=1024), "its sizes must make at most .* modules"),
    "a token beyond the words": (fields(pad_token_id=5000), "cannot be loaded: Padding_idx must be within"),
    "a quantization that is not here": (
        fields(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "cannot be loaded: .*bitsandbytes",
    ),
    "weights that are yes or no": (
        cast(torch.bool),
        r"model\.safetensors: '.*weight' must be floating-point .* got BOOL",
    ),
    "whole weights": (cast(torch.int64), r"model\.safetensors: '.*weight' must be floating-point numbers, got I64"),
    "an index without metadata": (without_metadata, "model.safetensors.index.json has no metadata"),
    "a pipe among the templates": (
        lambda folder: ((folder / TEMPLATE).unlink(), os.mkfifo(folder / TEMPLATE)),
        "tool_use.jinja is not a regular file",
    ),
    "1 GB among the templates": (empty(TEMPLATE, 10**9), "tool_use.jinja has 1,000,000,000 bytes, at most 1,048,576"),
    "a template out of the folder": (
        linked(TEMPLATE, "/etc/hostname"),
        "tool_use.jinja .* got a link to '/etc/hostname'",
    ),
    "templates out of the folder": (templates_elsewhere, "x.jinja must be a file of this folder, got a link to"),
    "weights out of the folder": (
        lambda folder: (
            (folder / "model.safetensors").rename(folder.parent / "w"),
            linked("model.safetensors", folder.parent / "w")(folder),
        ),
        "model.safetensors must be a file of this folder, got a link to",
    ),
    "too many templates": (templates, "additional_chat_templates has .* files, at most 64 are allowed"),
    "a template of 1 GB": (empty("chat_template.jinja", 10**9), "chat_template.jinja has 1,000,000,000 bytes, at most"),
    "a template not in UTF-8": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"),
        "the tokenizer of .* is damaged: 'utf-8' codec can't decode",
    ),
    "merges of 1 GB": (
        without_tokenizer_json(empty("merges.txt", 10**9)),
        "merges.txt has 1,000,000,000 bytes, at most",
    ),
    "a vocabulary of 3 GB": (empty("tokenizer.model", 3 * 10**9), "tokenizer.model has 3,000,000,000 bytes, at most"),
    "merges that make tokenizers panic": (
        without_tokenizer_json(
            lambda folder: (
                tokenizer(tokenizer_class="GPT2Tokenizer")(folder),
                (folder / "vocab.json").write_text('{"a": 0}'),
                (folder / "merges.txt").write_text(MERGES),
            )
        ),
        "the tokenizer of .* is damaged",
    ),
    "a million objects": (
        lambda folder: (folder / "tokenizer.json").write_text('{"a": [' + "[],{}," * 10**6 + "0]}"),
        r"tokenizer\.json has 4,000,002 of the characters ',\[\{', at most 3,145,728 are allowed",
    ),
    "100,000 added tokens": (
        added_tokens(10**5),
        r"tokenizer\.json has .* characters '\{', at most 32,768 are allowed",
    ),
    "20,000 extra tokens": (
        tokenizer(extra_special_tokens=[f"<{i}>" for i in range(20_000)]),
        "tokenizer_config.json: extra_special_tokens must be at most 4,096 tokens, got",
    ),
    "20,000 named tokens": (
        tokenizer(**{f"{i}_token": f"<{i}>" for i in range(20_000)}),
        "tokenizer_config.json has .* fields, at most 4,096 are allowed",
    ),
    "an added token of number 2^62": (
        tokenizer(added_tokens_decoder={str(2**62): {"content": "<x>"}}),
        "added_tokens_decoder must be tokens by numbers of at most 7 digits, got '4611686018427387904'",
    ),
    "an added token of number -1": (
        tokenizer(added_tokens_decoder={"-1": {"content": "<x>"}}),
        "added_tokens_decoder must be tokens by numbers of at most 7 digits, got '-1'",
    ),
    "a side": (tokenizer(padding_side="up"), "padding_side must be one of 'left', 'right', got 'up'"),
    "another tokenizer.json": (
        tokenizer(fast_tokenizer_files=["../t.json"]),
        "fast_tokenizer_files must be empty, got",
    ),
    "a vocabulary out of the folder": (
        without_tokenizer_json(tokenizer(vocab_file="/etc/hostname")),
        "tokenizer_config.json: vocab_file must be empty, got '/etc/hostname'",
    ),
    "a model for a tokenizer": (
        tokenizer(tokenizer_class="AutoModel"),
        "tokenizer_class must be a tokenizer's, got 'A",
    ),
    "a tokenizer without end": (
        fields(tokenizer_class="AutoTokenizer"),
        "tokenizer_class must be a tokenizer's, got 'A",
    ),
    "beams": (
        generation(num_beams=10**9),
        "generation_config.json: num_beams must be .* at most 2,097,152, got 10000000",
    ),
    "a watermark": (generation(watermarking_config=5), "cannot be loaded: "),
}
CASES = [(load_backbone, name) for name in FOLDERS] + [(ModelShape.from_config, name) for name in CONFIG]


@pytest.mark.parametrize(("read", "name"), CASES, ids=[f"{read.__name__}, {name}" for read, name in CASES])
def test_a_crafted_folder_is_refused_cheaply_and_in_a_sentence(folder, read, name):
    craft, said = FOLDERS[name]
    craft(folder)
    made = []
    counting = register_module_module_registration_hook(lambda *_: made.append(1))
    began = time.process_time()
    try:
        with pytest.raises(ValueError, match=said) as refusal:
            read(folder)
    finally:
        counting.remove()
    if name == "more modules than any model":  # the largest honest model's work, which takes a slow machine seconds
        assert len(made) <= MAX_MODULES + 1
    else:
        assert time.process_time() - began < 2
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value).replace(str(folder), "")) <= 300


def shape(**more):
    return dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64) | more


REAL = {
    "llama": shape(intermediate_size=64, num_key_value_heads=2, rope_theta=10**9, max_position_embeddings=10_485_760),
    "qwen2": shape(intermediate_size=64, num_key_value_heads=2, sliding_window=131_072, pad_token_id=63),
    "mixtral": shape(intermediate_size=64, num_key_value_heads=2, num_local_experts=4),
    "mamba2": dict(
        hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, vocab_size=64
    ),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=2048),
    "gpt_neo": GPT_NEO | dict(attention_types=[[["global", "local"], 1]]),
    "bart": BART | dict(decoder_layers=2, decoder_attention_heads=2, encoder_attention_heads=2),
}


@pytest.mark.parametrize("family", REAL)
def test_real_folders_are_read(family, tmp_path):
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": family} | REAL[family]))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    save_tokenizer(tmp_path)
    tokenizer(model_max_length=int(1e30), extra_special_tokens=[f"<{i}>" for i in range(1000)])(tmp_path)
    fields(_name_or_path="a/b", torch_dtype="float32", id2label={str(i): "a" for i in range(1000)})(tmp_path)
    for name, content in {  # what downloads have besides
        "special_tokens_map.json": '{"unk_token": {"content": "a", "lstrip": false}}',
        "added_tokens.json": '{"<think>": 2}',
        "pytorch_model.bin.index.json": '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}',
        "pytorch_model-00001-of-00002.bin": "pickles",
        "modules.json": '[{"idx": 0}]',
        "trainer_state.json": '{"loss": NaN}',
        "tokenizer.model": "pieces",
        "LICENSE.txt": "MIT",
    }.items():
        (tmp_path / name).write_text(content)
    cached = tmp_path / "snapshots" / "1"  # as the hub's cache has it
    (tmp_path / "blobs").mkdir()
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        link, blob = cached / path.relative_to(tmp_path), tmp_path / "blobs" / re.sub("/", "-", str(path)[-40:])
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(blob)
    for folder in (tmp_path, cached):
        loaded, words = load_backbone(folder)
        assert all(torch.equal(values, loaded.state_dict()[name]) for name, values in model.state_dict().items())
        assert words.convert_tokens_to_ids("</think>") == 3
        assert set(words.chat_template) == {"default", "tool_use"}
