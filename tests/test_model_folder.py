"""What a stranger's model folder can do to who loads or describes it: nothing, and a sentence says why.

Beside what ``test_strangers_files.py`` does to its files.
"""

import json
import os
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from plpkg.backbones import load_backbone, random_backbone
from plpkg.catalog import ModelShape


@pytest.fixture
def folder(tmp_path):
    random_backbone("llama").save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(tmp_path)
    return tmp_path


def fields(**changes):
    """Changes fields of the configuration."""

    def craft(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return craft


def content(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def pickled(folder):
    torch.save(random_backbone("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


SHAPES = {  # what a description must refuse as well
    "no heads": (fields(num_attention_heads=0), "num_attention_heads must be a whole number from 1"),
    "a negative width": (fields(hidden_size=-5), "hidden_size must be a whole number from 1 to 16,777,216, got -5"),
    "half a width": (fields(hidden_size=1.5), "hidden_size must be .*, got 1.5"),
    "a width that is NaN": (fields(hidden_size=float("nan")), "hidden_size must be .*, got nan"),
    "a width that is text": (fields(hidden_size="64"), "hidden_size must be .*, got '64'"),
    "a width that is true": (fields(intermediate_size=True), "intermediate_size must be .*, got True"),
    "10^12 words": (fields(vocab_size=10**12), "vocab_size must be .*, got 1000000000000"),
    "10^6 layers": (fields(num_hidden_layers=10**6), "num_hidden_layers must be .* to 1,024, got 1000000"),
    "a deep configuration": (content("config.json", b'{"a":' + b"[" * 10**5), "config.json is nested too deeply"),
    "a configuration of 50 MB": (content("config.json", b"{" + b" " * 5 * 10**7), "50,000,001 bytes, at most"),
    "a configuration that is a list": (content("config.json", b"[]"), r"config\.json is not an object, but \[\]"),
    "a configuration that is none": (content("config.json", b"{"), "config.json is not JSON: Expecting"),
}
FOLDERS = SHAPES | {
    "an adapter's configuration beside it": (content("adapter_config.json", b"{}"), "adapter_config.json lies beside"),
    "an adapter's weights beside it": (content("adapter_model.safetensors", b""), "adapter_model.safetensors lies"),
    "pickled weights": (pickled, r"pytorch_model\.bin is a pickle, which is never read: if you trust it, convert"),
    "a pickle that does something": (
        lambda folder: (pickled(folder), (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))),
        "pytorch_model.bin is a pickle",
    ),
    "an index that points elsewhere": (
        content("model.safetensors.index.json", b'{"weight_map": {"a": "../other/model.safetensors"}}'),
        "model.safetensors.index.json points to '../other/model.safetensors'",
    ),
    "an index of pickles": (
        content("model.safetensors.index.json", b'{"weight_map": {"a": "pytorch_model.bin"}}'),
        "points to 'pytorch_model.bin'",
    ),
    "an index of nothing": (content("model.safetensors.index.json", b"{}"), "index.json has no weight_map"),
    "a template that is a pipe": (lambda folder: os.mkfifo(folder / "a.jinja"), "a.jinja is not a regular file"),
    "a tokenizer that is none": (content("tokenizer.json", b"{}"), "tokenizer"),
    "other sizes than its weights": (fields(intermediate_size=96), "the weights of .* do not fit its configuration"),
}
CASES = [(load_backbone, name) for name in FOLDERS] + [(ModelShape.from_config, name) for name in SHAPES]


@pytest.mark.parametrize(("read", "name"), CASES, ids=[f"{read.__name__}, {name}" for read, name in CASES])
def test_a_crafted_folder_is_refused_in_a_sentence(folder, monkeypatch, read, name):
    monkeypatch.chdir(folder.parent)
    craft, said = FOLDERS[name]
    craft(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=said) as refusal:
        read(folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 350 + 2 * len(str(folder))
    assert not (folder.parent / "executed").exists()


def test_an_adapter_of_its_own_kind_is_no_part_of_the_public_model(folder):
    """The folder that PEFT makes where its adapter is saved beside the model."""
    model = load_backbone(folder)[0]
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"adapter_config\.json lies beside the model, and would become"):
        load_backbone(folder)


def test_what_real_downloads_have_besides_is_let_be(folder):
    for name in ("modeling_own.py", "README.md", "LICENSE", ".gitattributes"):
        (folder / name).write_text("raise SystemExit")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.pth").write_bytes(b"")
    fields(time_step_limit=[0.0, float("inf")], head_dim=None)(folder)
    before = random_backbone("llama").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in load_backbone(folder)[0].state_dict().items())
    assert ModelShape.from_config(folder).num_layers == 2
