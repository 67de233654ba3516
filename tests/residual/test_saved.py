"""A saved adapter is exact, or a sentence says why it is refused."""

import functools
import hashlib
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from plpkg import residual
from plpkg.backbones import fingerprint
from plpkg.residual import LadderConfig, PrivateLoraConfig
from plpkg.residual.config import CONFIG, WEIGHTS
from plpkg.residual.programs.loading import adapted_model
from tests.residual.conftest import IDS, adapted, backbone, logits, reloaded

from rounding import assert_close

M = "base_model.model.model.layers.0.self_attn.q_proj.privatelora_M.weight"
LM_HEAD = "base_model.model.lm_head.weight"
NOT_HERE = "does not belong here"


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fields(changes, *, removed=()):
    """Changes fields of a configuration."""

    def craft(folder):
        fields = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in fields.items() if key not in removed}))

    return craft


def text(content):
    """Another configuration."""
    return lambda folder: (folder / CONFIG).write_bytes(b'{"peft_type":"PRIVATELORA",' + content)


def tensors(change):
    """Changes the tensors; the configuration's digest is of the result."""

    def craft(folder):
        given = load_file(folder / WEIGHTS)
        change(given)
        save_file(given, folder / WEIGHTS)
        fields({"weights_sha256": digest(folder / WEIGHTS)})(folder)

    return craft


def beside(name, *shape):
    """One tensor more."""
    return tensors(lambda given: given.update({name: torch.zeros(shape)}))


def value(number, dtype):
    """One number of an M is another one, and the M has this dtype."""
    return tensors(lambda given: given.update({M: given[M].to(dtype).index_fill(0, torch.tensor([1]), number)}))


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def of_another_run(folder):
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"format": "pt", "run": "2"})


CRAFTED = {  # for each kind of adapter what is done to its folder, and what is said
    "privatelora": [
        (beside(LM_HEAD, 64, 32), f"{LM_HEAD!r}: {NOT_HERE}"),
        (beside(M.replace("privatelora_M", "base_layer"), 32, 32), f"q_proj.base_layer.weight': {NOT_HERE}"),
        (beside(M.replace("M.w", "M.other.w"), 3, 5), NOT_HERE),
        (beside(M.replace("M.weight", "A"), 5, 32), f"privatelora_A': {NOT_HERE}"),
        (tensors(lambda t: t.update({M: t[M].T.contiguous()})), "has shape (5, 3), and must have (3, 5)"),
        (tensors(lambda t: t.update({M: t[M].flatten()})), "has shape (15,), and must have (3, 5)"),
        # The o is Cyrillic.
        (tensors(lambda t: t.update({M.replace("q_proj", "q_pr\u043ej"): t.pop(M)})), "privatelora_M.weight': is miss"),
        (value(-float("inf"), torch.bfloat16), "has values that are not finite"),
        (value(1e300, torch.float64), "has values that are not finite"),
        (value(3, torch.int8), "dtype='I8' is not one of"),
        (value(1, torch.bool), "dtype='BOOL' is not one of"),
        (pickled, "holds no adapter: it has no adapter_model.safetensors"),
        (of_another_run, "one of them is of another adapter"),
        (text(b'"a":[' + b"1," * 450_000 + b"1]}"), "bytes, at most 65,536 are allowed"),
        (text(b'"r_c2d":4,"r_c2d":5}'), "crafted: adapter_config.json: 'r_c2d' stands there twice"),
        (text(b'"r_c2d":NaN}'), "is not a finite number"),
        (fields({"r_c2d": 10**400}), "is not a finite number of at most 40 characters"),
        (fields({"r_c2d": 10**38}), "r_c2d must be between 1 and 16384"),
        (fields({"r_c2d": 2**24, "r_d2c": 2**24}), "r_c2d must be between 1 and 16384, got 16777216"),
        (fields({"r_c2d": 128, "r_d2c": 128}), "and must have (128, 128)"),
        (fields({"r_c2d": "64"}), "r_c2d must be a whole number between 1 and 16384, got '64'"),
        (fields({"r_d2c": True}), "r_d2c must be a whole number between 1 and 16384, got True"),
        (fields({"target_modules": ".*_proj"}), "target_modules='.*_proj' must be a list of names"),
        (fields({"target_modules": 7}), "target_modules must be a list, got 7"),
        (fields({"target_modules": [1]}), "target_modules must be names of modules, got [1]"),
        (fields({"target_modules": ["nothing"]}), "Target modules {'nothing'} not found in the base model"),
        (fields({"target_modules": ["norm"]}), "only nn.Linear and Conv1D can be adapted"),
        (fields({"target_modules": ["q_proj"]}), NOT_HERE),
        (fields({"layers_to_transform": "0"}), "layers_to_transform must be a list, got '0'"),
        (fields({"layers_to_transform": [1]}), NOT_HERE),
        (fields({"modules_to_save": ["lm_head"]}), "modules_to_save=['lm_head'] trains a part of the backbone"),
        (fields({"task_type": "SEQ_CLS"}), "task_type='SEQ_CLS' trains a part of the backbone"),
        (fields({"init": "x" * 60_000}), "init must be one of 'gaussian', 'given', got 'xxx"),
        (fields({"init": "given"}), "privatelora_A' and 21 more: is missing"),
        (fields({"exclude_modules": ["k_proj"]}), "'exclude_modules'=['k_proj'] must be empty: it is unknown"),
        (fields({"scale": 3}), "'scale'=3 must be empty: it is unknown"),
        (fields({"peft_type": "LORA"}), "holds a LORA adapter, not a PrivateLoRA one"),
        (fields({"peft_type": ["LORA"]}), "holds a ['LORA'] adapter"),
        (fields({}, removed=["peft_type"]), "holds a None adapter, not a PrivateLoRA one"),
        (fields({"peft_type": "MINE"}), "holds a MINE adapter, not a PrivateLoRA one"),
        (fields({"backbone": "0" * 64}), "belongs to a backbone with fingerprint 000000000000"),
        (fields({"backbone": 7}), "belongs to a backbone with fingerprint 7"),
        (fields({}, removed=["backbone"]), "belongs to a backbone with fingerprint None"),
        (fields({"weights_sha256": []}), "one of them is of another adapter"),
    ],
    "ladder": [
        (fields({"r": 2**24}), "r must be between 1 and 16384, got 16777216"),
        (fields({"width": 2**30}), "width must be between 1 and 16384"),
        (fields({"width": 2**14}), "and must have (16384,)"),
        (beside(LM_HEAD, 64, 32), f"{LM_HEAD!r}: {NOT_HERE}"),
        (tensors(lambda t: t.pop("base_model.model.model.norm.ladder_M.up.bias")), "is missing"),
    ],
}
CASES = [(kind, craft, message) for kind, cases in CRAFTED.items() for craft, message in cases]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, and a sound folder of each kind."""
    root = tmp_path_factory.mktemp("saved")
    backbone().save_pretrained(root / "model")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(root / "model")
    adapted().save_pretrained(root / "privatelora")
    adapted(ladder=dict(r=5, width=16)).save_pretrained(root / "ladder")
    return root


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")  # as is meant
@pytest.mark.parametrize(("kind", "craft", "message"), CASES, ids=[f"{kind}: {message}" for kind, _, message in CASES])
def test_a_folder_that_was_changed_is_refused_in_a_sentence_and_leaves_nothing(root, tmp_path, kind, craft, message):
    folder = shutil.copytree(root / kind, tmp_path / "crafted")
    craft(folder)
    base = backbone()
    for read in (
        lambda: residual.load(base, folder),
        lambda: adapted_model(str(root / "model"), folder, dtype="fp32", device="cpu"),
    ):
        with pytest.raises((ValueError, OSError)) as refused:
            read()
        said = str(refused.value)
        assert message in said
        assert len(said) < 1500
        assert "\n" not in said
    assert torch.equal(logits(base), logits(backbone()))
    assert torch.equal(logits(residual.load(base, root / kind)), logits(residual.load(backbone(), root / kind)))


def test_a_saved_adapter_knows_its_backbone_and_its_weights(tmp_path):
    config, model = PrivateLoraConfig(r_c2d=5, r_d2c=3), backbone()
    mine = get_peft_model(model, config)
    get_peft_model(backbone(seed=1), config)  # the same object for another model
    mine.save_pretrained(tmp_path)
    written = json.loads((tmp_path / CONFIG).read_text())
    assert written["backbone"] == fingerprint(mine) == fingerprint(backbone())
    assert written["weights_sha256"] == digest(tmp_path / WEIGHTS)
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o600
    PeftModel.from_pretrained(backbone(dtype=torch.bfloat16), tmp_path)
    with pytest.raises(ValueError, match="belongs to a backbone with fingerprint"):
        PeftModel.from_pretrained(backbone(seed=1), tmp_path)


def test_weights_for_an_adapter_that_is_there_already_are_exactly_its_own(tmp_path):
    model = adapted()
    before = logits(model)
    given = get_peft_model_state_dict(model)
    name = next(iter(given))
    for tensors, message in (
        (given | {LM_HEAD: torch.zeros(64, 32)}, NOT_HERE),
        ({key: each for key, each in given.items() if key != name}, "is missing"),
        (given | {name: given[name].T}, "has shape"),
        (given | {name: given[name] / 0}, "has values that are not finite"),
        (given | {name: given[name].char()}, "dtype='I8' is not one of"),
    ):
        model.save_pretrained(tmp_path)
        save_file({key: each.contiguous() for key, each in tensors.items()}, tmp_path / WEIGHTS)
        fields({"weights_sha256": digest(tmp_path / WEIGHTS)})(tmp_path)
        with pytest.raises(ValueError, match=message):
            model.load_adapter(tmp_path, "default")
        assert torch.equal(logits(model), before)


def test_a_merged_adapter_takes_no_weights(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    before = logits(backbone())
    model.merge_adapter()
    with pytest.raises(ValueError, match="'default' is merged into the weights: unmerge it before another M"):
        model.load_adapter(tmp_path, "default")
    model.unmerge_adapter()
    assert_close(logits(model.unload()), before, terms=32)


@pytest.mark.parametrize(
    ("saved_one", "there", "message"),
    [
        ({}, {}, None),
        (dict(init="given"), dict(init="given"), None),
        (dict(init="given"), {}, "with init='given', but 'default' has 'gaussian'"),
        ({}, dict(projection_seed=9), "with projection_seed=0, but 'default' has 9: load it under another name"),
        ({}, dict(late=True), "with late=False, but 'default' has True"),
        (dict(ladder=dict(r=5)), dict(ladder=dict(r=5, projection_seed=9)), "with projection_seed=0"),
        (
            dict(ladder=dict(r=5, layers_to_transform=[0, 2])),
            dict(ladder=dict(r=5, layers_to_transform=[1, 3])),
            "of other modules than 'default': model.layers.1.mlp.down_proj",
        ),
        (dict(target_modules=["q_proj", "v_proj"]), {}, "of other modules than 'default': model.layers.0.self_attn.k"),
        ({}, dict(target_modules=["q_proj", "v_proj"]), f"k_proj.privatelora_M.weight'.*: {NOT_HERE}"),
        (
            dict(ladder=dict(r=6, layers_to_transform=[0, 2])),
            dict(ladder=dict(r=12, layers_to_transform=[0])),
            "with r=6, but 'default' has 12",
        ),
        (dict(target_modules="all-linear"), dict(target_modules=r".*layers.*_proj"), None),
        (dict(shape=dict(seed=1)), {}, "holds an adapter with backbone="),
    ],
)
def test_an_adapter_that_is_there_takes_weights_of_its_like_alone(saved_one, there, message, tmp_path):
    """PEFT reads no configuration then."""
    model, other = adapted(**saved_one), adapted(m_scale=2.0, **there)
    model.save_pretrained(tmp_path)
    before = logits(other)
    if message is None:
        other.load_adapter(tmp_path, "default")
        assert torch.equal(logits(other), logits(model))
        return
    with pytest.raises(ValueError, match=message):
        other.load_adapter(tmp_path, "default")
    assert torch.equal(logits(other), before)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")  # as is meant
@pytest.mark.parametrize("kind", [PrivateLoraConfig, functools.partial(LadderConfig, r=4)])
@pytest.mark.parametrize("adapter_name", ["default", "other"])
def test_an_attempt_that_failed_leaves_nothing(kind, adapter_name, tmp_path):
    """It came as far as the norm."""
    base = backbone()
    model = get_peft_model(base, kind()) if adapter_name == "other" else None
    adapt = model.add_adapter if model else lambda name, config: get_peft_model(base, config, name)
    with pytest.raises(ValueError, match="norm is a LlamaRMSNorm: only"):
        adapt(adapter_name, kind(target_modules=["o_proj", "down_proj", "norm"]))
    model = adapt(adapter_name, kind(target_modules=["down_proj"])) or model
    model.set_adapter(adapter_name)
    for name, parameter in model.named_parameters():
        if f"_M.{adapter_name}." in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(backbone(), tmp_path / ("" if adapter_name == "default" else adapter_name))
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("config", [PrivateLoraConfig(task_type="FEATURE_EXTRACTION"), LadderConfig(r=4)])
def test_an_adapter_of_a_decoder_without_its_head(config, tmp_path):
    model = get_peft_model(backbone().model, config)
    for name, parameter in model.named_parameters():
        if "_M." in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(backbone().model, tmp_path)
    assert torch.equal(loaded(input_ids=IDS).last_hidden_state, model(input_ids=IDS).last_hidden_state)


@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=["lm_head"]),  # with which PEFT would save the head's own weight
        dict(target_modules=r".*\.0\..*o_proj"),
        dict(target_modules="all-linear"),
        dict(target_modules=r".*(?<!k)_proj"),
    ],
)
def test_a_pattern_is_saved_as_the_names_that_it_chose(options, tmp_path):
    model = adapted(**options)
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))
    assert isinstance(json.loads((tmp_path / CONFIG).read_text())["target_modules"], list)


@pytest.mark.parametrize(
    "options",
    [
        dict(layers_to_transform=range(2)),
        dict(layers_to_transform={1}, target_modules=("q_proj",)),
        dict(target_modules={"q_proj": 1}.keys()),
    ],
)
def test_what_configures_an_adapter_is_saved_in_whatever_form_it_was_given(options, tmp_path):
    model = adapted(**options)
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))


@pytest.mark.parametrize("config", [{}, dict(ladder=dict(r=4))])
def test_what_nobody_could_load_is_not_saved(config, tmp_path):
    model = adapted(**config)
    model.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad)[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"_M\.weight': has values that are not finite"):
        model.save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("option", [dict(save_embedding_layers=True), dict(safe_serialization=False)])
def test_what_is_never_loaded_is_not_saved_with_an_adapter(tmp_path, option):
    with pytest.raises(ValueError, match="only safetensors are loaded, and no part of the backbone; leave both out"):
        adapted().save_pretrained(tmp_path, **option)
    assert not list(tmp_path.iterdir())


def test_a_gated_ladder_is_saved_under_one_name_and_loaded_under_another(tmp_path):
    model = adapted(ladder=dict(r=5, width=16))
    assert torch.equal(logits(reloaded(model, tmp_path, adapter_name="other")), logits(model))
    assert not any("default" in name for name in load_file(tmp_path / WEIGHTS))


def test_a_configuration_alone_can_be_had_by_a_cloud(tmp_path):
    adapted().save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    config = PrivateLoraConfig.from_pretrained(tmp_path)
    assert get_peft_model(backbone(), config).peft_config["default"].r_c2d == 5
    with pytest.raises(ValueError, match="belongs to a backbone with fingerprint"):
        get_peft_model(backbone(seed=1), config)


@pytest.mark.parametrize("kind", [PrivateLoraConfig, LadderConfig])
def test_ranks_and_names_are_bounded_in_the_configuration(kind):
    rank = "r" if kind is LadderConfig else "r_c2d"
    with pytest.raises(ValueError, match=f"{rank} must be between 1 and 16384, got 16385"):
        kind(**{rank: 2**14 + 1})
    with pytest.raises(ValueError, match=r"target_modules must be names of modules, got \[1\]"):
        kind(target_modules=[1])


def test_what_is_not_this_rooms_is_read_by_peft_as_ever(tmp_path):
    config = LoraConfig(r=3, target_modules=["q_proj"], runtime_config={"ephemeral_gpu_offload": 1})
    config.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LoraConfig)
    assert (loaded.r, loaded.target_modules) == (3, {"q_proj"})
    assert {each.from_json_file.__func__.__module__ for each in PEFT_TYPE_TO_CONFIG_MAPPING.values()} == {"peft.config"}


def test_two_saved_adapters_in_one_model(tmp_path):
    model = adapted()
    expected = logits(model)
    model.save_pretrained(tmp_path)
    model = residual.load(backbone(), tmp_path, "ann")
    assert residual.load(model, tmp_path, "bob") is model
    for name in ("ann", "bob"):
        model.set_adapter(name)
        assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match="the model has an adapter 'bob' already: ann, bob"):
        residual.load(model, tmp_path, "bob")
    with pytest.raises(FileNotFoundError, match=r"holds no adapter: it has no adapter_config\.json"):
        residual.load(model, tmp_path / "none", "cyd")
    beside(LM_HEAD, 64, 32)(tmp_path)
    for load in (model.load_adapter, lambda *arguments: residual.load(model, *arguments)):
        with pytest.raises(ValueError, match=NOT_HERE):
            load(tmp_path, "cyd")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no adapter: it has no adapter_model\.safetensors"):
        residual.load(model, tmp_path, "cyd")
    assert sorted(model.peft_config) == ["ann", "bob"]
