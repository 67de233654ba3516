import contextlib
import copy
import gc
import json
import os
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from plpkg import catalog, corpora, fingerprints
from plpkg.backbones import FAMILIES, fingerprint, load_backbone, random_backbone
from plpkg.catalog import ModelShape
from plpkg.fingerprints import digest, stamp
from plpkg.pretraining import Recipe
from plpkg.scoring import score

from rounding import assert_as_exact

IDS = torch.arange(12).reshape(2, 6)


OTHER_WIDTHS = [(family, 32) for family in ("llama", "mistral", "qwen2", "gemma2")]


@pytest.mark.parametrize(("family", "head_dim"), [(family, None) for family in FAMILIES] + OTHER_WIDTHS)
def test_random_backbone_has_the_shape_asked_for(family, head_dim):
    dims = dict(num_layers=3, hidden=48, num_kv_heads=4 if family == "gpt2" else 2, intermediate=80, vocab=100)
    model = random_backbone(family, **dims, head_dim=head_dim)
    shape = ModelShape.from_config(model.config, family)
    assert (shape.num_heads, shape.head_dim) == (4, head_dim or 12)
    assert {name: getattr(shape, name) for name in dims} == dims
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert not model.training
    with torch.no_grad():
        assert model(IDS).logits.shape == (2, 6, 100)


def test_the_seed_decides_the_weights_and_nothing_else_is_touched():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, again, other = (random_backbone("llama", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    weights = [model.lm_head.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("rwkv", {}, "family must be one of 'llama'.*, got 'rwkv'"),
        ("llama", dict(hidden=0), "hidden must be a whole number of at least 1, got 0"),
        ("llama", dict(hidden=66), "hidden=66 must be a multiple of num_heads=4"),
        ("llama", dict(num_kv_heads=3), "num_heads=4 must be a multiple of num_kv_heads=3"),
        ("llama", dict(num_kv_heads=8), "num_kv_heads must be between 1 and num_heads=4, got 8"),
        ("gpt2", dict(num_kv_heads=2), "gpt2 has a key and value head for every head: num_kv_heads=2"),
        ("phi3", dict(head_dim=32), "phi3 has heads of hidden/num_heads=16, got head_dim=32"),
    ],
)
def test_impossible_shapes_are_named(family, shape, message):
    with pytest.raises(ValueError, match=message):
        random_backbone(family, **shape)


@pytest.fixture
def folder(tmp_path):
    """A model and a tokenizer as ``save_pretrained`` writes them."""
    random_backbone("llama", vocab=4).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "private": 1, "personal": 2, "model": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_loads_as_it_was(folder):
    model, tokenizer = load_backbone(folder)
    ids = tokenizer("private personal model", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[1, 2, 3]]
    saved = random_backbone("llama", vocab=4)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), saved.state_dict().values(), strict=True))
    with torch.no_grad():
        assert_as_exact(model(ids).logits, *(m(ids).logits for m in (saved, copy.deepcopy(saved).double())))
    assert not model.training


def test_dtype_and_options_reach_the_model(folder):
    options = {"attn_implementation": "eager"}
    loaded, _ = load_backbone(folder, dtype=torch.bfloat16, **options)
    for model in (loaded, random_backbone("llama", dtype=torch.bfloat16, options=options)):
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.config._attn_implementation == "eager"


def without_one_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def an_encoder_decoder(folder):
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=10)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def fields(**changes):
    """Changes fields of the configuration."""

    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def content(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def one_nan(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def an_adapter_beside_it(folder):
    """What PEFT makes where its adapter is saved beside the model."""
    get_peft_model(random_backbone("llama"), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def pickled(folder):
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (one_nan, ValueError, r"the weights of .* are not finite: model\.norm\.weight"),
        (an_adapter_beside_it, ValueError, "has an adapter beside its weights: load it with PEFT"),
        (pickled, ValueError, r"has pytorch_model\.bin, a pickle, which is never read: if you trust it, convert it"),
        (fields(intermediate_size=96), ValueError, "the weights of .* do not fit its configuration"),
        (
            fields(hidden_size="64"),
            ValueError,
            "not a causal language model: .* 'hidden_size' expected int, got str",
        ),
        (fields(hidden_act="evil"), ValueError, "hidden_act must be one that transformers knows, got 'evil'"),
        (content("config.json", b"{"), ValueError, "is not a valid JSON file"),
        (content("config.json", b"[]"), ValueError, "is not a causal language model: Unrecognized model"),
        (content("tokenizer.json", b"{}"), ValueError, "the tokenizer of .* is damaged"),
        (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, r"the folder lacks a config\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, "no model .* folder lacks weights"),
        (without_tokenizer, FileNotFoundError, "no tokenizer for .* the folder lacks tokenizer files"),
        (an_encoder_decoder, ValueError, "is not a causal language model"),
        (without_one_weight, ValueError, r"the weights of .* lack model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), ValueError, "the weights of .* are damaged"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(folder, monkeypatch, damage, error, message):
    monkeypatch.chdir(folder.parent)
    damage(folder)
    with pytest.raises(error, match=message) as refusal:
        load_backbone(folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300 + 2 * len(str(folder))
    assert not Path("executed").exists()


def test_code_that_comes_with_a_model_is_not_run(folder):
    fields(auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"})(folder)
    (folder / "own.py").write_text("raise SystemExit('ran')")
    assert load_backbone(folder)[0].config.model_type == "llama"
    fields(model_type="own")(folder)
    with pytest.raises(ValueError, match="contains custom code"):
        load_backbone(folder)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("no/such-model", {}, FileNotFoundError, "no model 'no/such-model': it is not a folder .* and the hub did not"),
        ("plpkg-reader", {}, FileNotFoundError, "^plpkg-reader is gone since plpkg 1.0: load smollm2-reader"),
        ("plpkg-small", dict(attn_implementation="psychic"), ValueError, "attn_implementation"),
        *(
            ("plpkg-small", dict(device=device), ValueError, f"^device='{device}' cannot be used: [^\n]+$")
            for device in ("foo", "", "cuda:99", "meta", "hpu", "vulkan")
        ),
    ],
)
def test_what_cannot_be_loaded_so_is_named(name, options, error, message):
    with pytest.raises(error, match=message):
        load_backbone(name, **options)


@pytest.fixture(scope="module")
def small():
    return load_backbone("plpkg-small")


def test_the_models_own_files():
    folder = catalog.data_path("backbone")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16 * 2**20
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    recipe = json.loads((folder / "recipe.json").read_text())
    assert {field: recipe[field] for field in vars(Recipe())} == vars(Recipe())
    if corpora.versions().items() <= recipe["run"]["versions"].items():
        assert recipe["train"] == corpora.writer("public").fingerprint("train")


def test_the_small_model_is_a_llama_with_grouped_queries(small):
    model, tokenizer = small
    shape = ModelShape.from_config(model.config, "plpkg-small")
    assert (shape.family, shape.tied_embeddings) == ("llama", True)
    assert 1 < shape.num_kv_heads < shape.num_heads
    assert len(tokenizer) == shape.vocab
    assert tokenizer.decode(tokenizer("naïve 日本\n    text")["input_ids"]) == "naïve 日本\n    text"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("If the file does not", "exist"),
        ("Raise a :exc:`TypeError` if the argument", "is"),
        ("Args:\n    input_ids (`torch.LongTensor` of shape", "`(batch_size"),
        ("Returns\n-------\nTrue if the", ("given", "graph", "object", "matrix", "expression")),
    ],
)
def test_the_small_model_completes_a_documentation_sentence(small, prompt, expected):
    model, tokenizer = small
    ids = tokenizer(prompt, return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0][ids["input_ids"].shape[1] :])
    assert text.strip().startswith(expected), text


def test_the_small_model_beats_the_compressor_and_finds_every_private_writer_harder():
    recorded = catalog.measured("backbones_scores").set_index(["text", "model"])["bits_per_byte"]
    ours = recorded["public", "plpkg-small"]
    assert ours < recorded["public", "xz -9e"]
    assert all(recorded[name, "plpkg-small"] > ours for name in corpora.writers())


def test_the_readers_own_files():
    folder = catalog.data_path("smollm2-reader")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 10 * 2**20
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.float16}
    config, recipe = (json.loads((folder / name).read_text()) for name in ("adapter_config.json", "recipe.json"))
    assert (config["base_model_name_or_path"], config["peft_type"]) == ("smollm2", "LORA")
    assert (config["r"], config["lora_alpha"]) == (recipe["rank"], recipe["alpha"])
    logged = [[*range(10, run["steps"], 10), run["steps"]] for run in (recipe["begin"], recipe)]
    steps = logged[0] + [recipe["begin"]["steps"] + step for step in logged[1]]
    assert list(pd.read_csv(folder / "log.csv")["step"]) == steps


def test_recorded_scores_are_those_of_the_shipped_model(small):
    scores = catalog.measured("backbones_scores").set_index(["text", "model"])
    for name in ("seaborn", "opacus"):
        recorded = scores.loc[(name, "plpkg-small"), "bits_per_byte"]
        judged = score(*small, corpora.writer(name).split("test"))
        assert judged.bits_per_byte == pytest.approx(recorded, rel=0.01)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ],
)
def test_a_saved_copy_has_the_same_fingerprint(tmp_path, family, options):
    model = random_backbone(family, options=options)
    model.save_pretrained(tmp_path)
    copied = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprint(copied) == fingerprint(model) == fingerprint(model.bfloat16())
    with torch.no_grad():
        next(copied.parameters())[0, 0] += 1
    assert fingerprint(copied) != fingerprint(model)


def test_what_an_adapter_trains_besides_and_a_compiler_do_not_count():
    model = random_backbone("llama")
    before = fingerprint(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        adapted.get_output_embeddings().weight.add_(1)
    assert fingerprint(adapted.get_base_model()) == before
    compiled = torch.compile(adapted, backend="eager")
    assert fingerprint(compiled) == fingerprint(torch.compile(random_backbone("llama"), backend="eager")) == before
    assert digest(compiled) == digest(adapted)


def with_lora(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return get_peft_model(random_backbone("llama"), config)


def weight(model):
    return model.get_base_model().model.layers[0].mlp.up_proj.weight


def learning(model):
    return [p for p in model.parameters() if p.requires_grad]


def scaled(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2


def replaced(model):
    """Freed before the next is made, which may then have its address."""
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    shape = layer.weight.shape
    del layer.weight
    layer.weight = torch.nn.Parameter(torch.zeros(shape))


@torch.no_grad()
def stepped(model):
    for p in learning(model):
        p.add_(0.5)


def optimized(**options):
    def step(model):
        for p in learning(model):
            p.grad = torch.ones_like(p)
        torch.optim.AdamW(learning(model), lr=0.1, **options).step()

    return step


CHANGES = {
    "AdamW": optimized(),
    "AdamW, foreach": optimized(foreach=True),
    "AdamW, fused": optimized(fused=True),
    "within inference mode": torch.inference_mode()(stepped),
    "through data": lambda model: weight(model).data.mul_(2),
    "other data": lambda model: setattr(weight(model), "data", weight(model).data + 1),
    "a vector of all parameters": lambda model: vector_to_parameters(
        parameters_to_vector(learning(model)) + 1, learning(model)
    ),
    "an optimizer's step": stepped,
    "one number of the base": lambda model: weight(model).detach().view(-1)[3:4].add_(1),
    "other weights are loaded": lambda model: model.load_state_dict(with_lora(1).state_dict()),
    "another type": lambda model: model.bfloat16(),
    "another tensor": replaced,
    "a buffer": lambda model: model.get_base_model().model.rotary_emb.inv_freq.mul_(2),
    "merged": lambda model: model.merge_adapter(),
    "another adapter": lambda model: model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"])),
    "switched off": lambda model: model.base_model.disable_adapter_layers(),
    "scaled": scaled,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_logits_changes_stamp_and_digest(change):
    model = with_lora()
    before, content = stamp(model), digest(model)
    with torch.no_grad():
        model(input_ids=IDS)
    model.train()
    model.eval()
    assert stamp(model) == before
    assert digest(model) == content == digest(with_lora())
    change(model)
    assert stamp(model) != before
    assert digest(model) != content


@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_frequencies_of_the_last_text_are_no_change(family, kind):
    rope = dict(rope_type=kind, rope_theta=1e4, factor=4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    options = dict(rope_parameters=rope, max_position_embeddings=64, original_max_position_embeddings=64)
    model = random_backbone(family, options=options)
    before, content = stamp(model), digest(model)
    for length in (3, 80, 90, 3):
        model(input_ids=IDS[:1, :1].expand(1, length))
        assert stamp(model) == before
        assert digest(model) == content


def test_a_stamp_is_of_one_model_and_keeps_no_tensor():
    model = with_lora()
    seen = stamp(model)
    assert stamp(copy.deepcopy(model)) != seen
    weight(model).data.mul_(2)
    assert stamp(model, values=False) == seen != stamp(model)
    reference = seen._refs[0]
    del model
    gc.collect()
    assert reference() is None


def test_a_stamp_of_sizes_alone_reads_no_value_and_spoils_no_later_one():
    seen = {}
    fingerprints._places.cache_clear()
    for mode in (FakeTensorMode(), torch.device("meta"), contextlib.nullcontext()):
        with mode, warnings.catch_warnings():
            warnings.simplefilter("error")
            model = torch.nn.Linear(5, 7)
            seen[mode] = stamp(model)
            assert stamp(model) == seen[mode]
            model.bias = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
            assert stamp(model) != seen[mode]
    fake, meta, real = (each._values for each in seen.values())
    assert fake == meta == []
    assert [len(each) for each in real] == [2 * 16 * 4]
