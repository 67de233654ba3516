"""What a stranger's folder can do to a reader: nothing, within 100 MiB and two seconds, and a sentence says why."""

import json
import os
import shutil
import struct

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from plpkg import residual
from plpkg.backbones import fingerprint
from plpkg.residual import LadderConfig, PrivateLoraConfig, saved
from plpkg.residual.saved import CONFIG, WEIGHTS
from plpkg.retention import RetainingHeads
from tests.residual.conftest import IDS, adapted_backbone, backbone

from preloaded import Process

MIB, LARGE = 2**20, 50 * 10**6
HEADS_CONFIG, HEADS_WEIGHTS = "retaining_heads.json", "retaining_heads.safetensors"
M = "base_model.model.model.layers.0.self_attn.q_proj.privatelora_M.weight"
BOMB = "(a|a?)+" * 12 + "(.*.*)*b"


def config(changes, *, removed=(), file=CONFIG):
    """Changes fields of a configuration; a function gets the whole."""

    def craft(folder):
        fields = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps({key: value for key, value in fields.items() if key not in removed}))

    return craft


def tensors(change, file=WEIGHTS, name=CONFIG):
    """Changes the tensors; the configuration's digest is of the result."""

    def craft(folder):
        given = load_file(folder / file)
        change(given)
        save_file(given, folder / file)
        if file == WEIGHTS:
            config({"weights_sha256": saved.digest(folder / file)}, file=name)(folder)

    return craft


def content(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def packed(header, body=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def value(number, dtype=torch.float32):
    return tensors(lambda given: given.update({M: given[M].to(dtype).index_fill(0, torch.tensor([1]), number)}))


def large(folder):
    """50 MB, sparse: nearly all of it is one tensor that has no place in the model."""
    header, body = (folder / WEIGHTS).read_bytes(), LARGE
    size = struct.unpack("<Q", header[:8])[0]
    table, data = json.loads(header[8 : 8 + size]), header[8 + size :]
    table["base_model.model.lm_head.weight"] = entry("F32", [body // 4], len(data), len(data) + body)
    (folder / WEIGHTS).write_bytes(packed(table, data))
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + body)
    config({"weights_sha256": None})(folder)


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


KINDS = {  # of adapter, and for each what is done to its folder, and what is said
    "privatelora": {
        "an lm_head beside it": (
            tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(64, 32)})),
            "'base_model.model.lm_head.weight': does not belong here",
        ),
        "a q_proj beside it": (
            tensors(lambda t: t.update({M.replace("privatelora_M", "base_layer"): torch.zeros(32, 32)})),
            "q_proj.base_layer.weight': does not belong here",
        ),
        "an embedding in its place": (
            tensors(lambda t: (t.clear(), t.update({"model.embed_tokens.weight": torch.zeros(64, 32)}))),
            "is missing",
        ),
        "another adapter's name in it": (
            tensors(lambda t: t.update({M.replace("M.w", "M.other.w"): torch.zeros(3, 5)})),
            "does not belong here",
        ),
        "no M of one projection": (tensors(lambda t: t.pop(M)), "privatelora_M.weight': is missing"),
        "an M transposed": (
            tensors(lambda t: t.update({M: t[M].T.contiguous()})),
            "has shape (5, 3), and must have (3, 5)",
        ),
        "an M flattened": (tensors(lambda t: t.update({M: t[M].flatten()})), "has shape (15,), and must have (3, 5)"),
        "a projection nobody asked for": (
            tensors(lambda t: t.update({M.replace("M.weight", "A"): torch.zeros(5, 32)})),
            "privatelora_A': does not belong here",
        ),
        "a name in Cyrillic": (
            tensors(lambda t: t.update({M.replace("q_proj", "q_pr\u043ej"): t.pop(M)})),
            "is missing",
        ),
        "inf": (value(float("inf")), "has values that are not finite"),
        "-inf in bfloat16": (value(-float("inf"), torch.bfloat16), "has values that are not finite"),
        "float64 beyond float32": (value(1e300, torch.float64), "has values that are not finite"),
        "int8": (value(3, torch.int8), "dtype='I8' is not one of"),
        "bool": (value(1, torch.bool), "dtype='BOOL' is not one of"),
        "complex": (value(1, torch.complex64), "dtype='C64' is not one of"),
        "a pickle beside it": (pickled, "adapter_model.bin is a pickle, which is never read: save it as safetensors"),
        "50 MB that do not belong": (large, "'base_model.model.lm_head.weight': does not belong here"),
        "a configuration of 900 kB of numbers": (
            content(CONFIG, b'{"peft_type":"PRIVATELORA","a":[' + b"1," * 450_000 + b"1]}"),
            "bytes, at most 65,536 are allowed",
        ),
        "a rank twice": (
            content(CONFIG, b'{"peft_type":"PRIVATELORA","r_c2d":4,"r_c2d":5}'),
            "'r_c2d' stands there twice",
        ),
        "a rank of 2^24": (config({"r_c2d": 2**24, "r_d2c": 2**24}), "r_c2d must be between 1 and 16384, got 16777216"),
        "ranks of 2^7": (config({"r_c2d": 128, "r_d2c": 128}), "and must have (128, 128)"),
        "a rank of 400 digits": (config({"r_c2d": 10**400}), "is not a finite number of at most 40 characters"),
        "a rank of 38 digits": (config({"r_c2d": 10**38}), "r_c2d must be between 1 and 16384"),
        "a rank that is text": (config({"r_c2d": "64"}), "r_c2d must be a whole number of at least 1, got '64'"),
        "a rank that is true": (config({"r_d2c": True}), "r_d2c must be a whole number of at least 1, got True"),
        "a rank that is NaN": (content(CONFIG, b'{"peft_type":"PRIVATELORA","r_c2d":NaN}'), "is not a finite number"),
        "a rank that is endless": (config({"r_c2d": 1e308 * 10}), "is not a finite number"),
        "a pattern that backtracks": (config({"target_modules": BOMB}), "a pattern is not evaluated"),
        "one in the list": (config({"target_modules": [BOMB]}), "a pattern is not evaluated"),
        "one of layers": (config({"layers_pattern": BOMB, "layers_to_transform": [0]}), "a pattern is not evaluated"),
        "4,000 names of lists of layers": (
            config({"layers_pattern": [f"layer{i}" for i in range(4000)], "layers_to_transform": [0]}),
            "must be plain module names",
        ),
        "an auto_mapping that is deep": (
            config({"auto_mapping": {"a": json.loads("[" * 400 + "]" * 400)}}),
            "must be an object of text",
        ),
        "ranks far above the model": (
            (
                lambda f: (
                    tensors(lambda t: [t.update({n: torch.ones(1, 2**14)}) for n in t])(f),
                    config({"r_c2d": 2**14, "r_d2c": 1})(f),
                )
            ),
            "r_c2d must be between 1 and 4 times the width of model.layers.0.self_attn.q_proj=128, got 16384",
        ),
        "one to leave out": (config({"exclude_modules": BOMB}), "a pattern is not evaluated"),
        "a pattern that is none": (config({"target_modules": "(("}), "a pattern is not evaluated"),
        "a number for a target": (
            config({"target_modules": 7}),
            "target_modules=7 must be a list of plain module names",
        ),
        "numbers for targets": (
            config({"target_modules": [1]}),
            "target_modules=[1] must be a list of plain module names",
        ),
        "a target that is not there": (config({"target_modules": ["nothing"]}), "does not belong here"),
        "targets that are no layers": (
            config({"target_modules": ["norm"]}),
            "only nn.Linear and Conv1D can be adapted",
        ),
        "targets in Cyrillic": (config({"target_modules": ["q_pr\u043ej"]}), "must be a list of plain module names"),
        "7,000 targets": (
            config({"target_modules": [f"t{i}" for i in range(7000)]}),
            "must be a list of plain module names",
        ),
        "layers that are text": (
            config({"layers_to_transform": "0"}),
            "layers_to_transform must be a whole number of at least 0, got '0'",
        ),
        "another layer": (config({"layers_to_transform": [1]}), "does not belong here"),
        "a part of the backbone": (
            config({"modules_to_save": ["lm_head"]}),
            "modules_to_save=['lm_head'] must be empty",
        ),
        "a task with a head of its own": (
            config({"task_type": "SEQ_CLS"}),
            "task_type='SEQ_CLS' must be absent or CAUSAL_LM",
        ),
        "60,000 letters": (config({"init": "x" * 60_000}), "init must be one of 'gaussian', 'svd', 'given', got 'xxx"),
        "a flag that is text": (config({"save_projection": "no"}), "save_projection must be True or False, got 'no'"),
        "a field that is unknown": (config({"scale": 3}), "'scale'=3 must be empty: it is unknown"),
        "another method": (config({"peft_type": "LORA"}), "holds a LORA adapter"),
        "a method that is a list": (config({"peft_type": ["LORA"]}), "['LORA']"),
        "no method": (content(CONFIG, b'{"r_c2d":4}'), "None"),
        "a method that is none": (config({"peft_type": "MINE"}), "MINE"),
        "another backbone's": (config({"backbone": "0" * 64}), "belongs to a backbone with fingerprint 000000000000"),
        "a backbone that is a number": (config({"backbone": 7}), "backbone=7 must be text"),
        "weights of another run": (
            lambda f: save_file(load_file(f / WEIGHTS), f / WEIGHTS, {"format": "pt", "run": "2"}),
            "one of them is of another adapter",
        ),
        "a digest that is a list": (config({"weights_sha256": []}), "weights_sha256=[] must be text"),
    },
    "ladder": {
        "a rank of 2^24": (config({"r": 2**24}), "r must be between 1 and 16384, got 16777216"),
        "a width of 2^30": (config({"width": 2**30}), "width must be between 1 and 16384"),
        "a width of 2^14": (config({"width": 2**14}), "and must have (16384,)"),
        "an lm_head beside it": (
            tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(64, 32)})),
            "'base_model.model.lm_head.weight': does not belong here",
        ),
        "a part of M missing": (tensors(lambda t: t.pop("base_model.model.model.norm.ladder_M.up.bias")), "is missing"),
    },
    "heads": {
        "2^40 layers": (config({"num_layers": 2**40}, file=HEADS_CONFIG), "num_layers must be between 1 and 1048576"),
        "2^20 layers": (
            config({"num_layers": 2**20}, file=HEADS_CONFIG),
            "does not have the dimensions of LlamaForCausalLM",
        ),
        "a hidden layer of 2^20": (config({"hidden": 2**20}, file=HEADS_CONFIG), "and must have (1048576,"),
        "layers that are true": (config({"num_layers": True}, file=HEADS_CONFIG), "'num_layers': it has backbone"),
        "a backbone that is a number": (config({"backbone": 7}, file=HEADS_CONFIG), "'backbone': it has backbone"),
        "a backbone of 60,000 letters": (
            config({"backbone": "x" * 60_000}, file=HEADS_CONFIG),
            "belong to a backbone with fingerprint xxx",
        ),
        "a function of 60,000 letters": (
            config({"activation": "x" * 60_000}, file=HEADS_CONFIG),
            "activation must be one of",
        ),
    },
}
CASES = [(kind, name) for kind, cases in KINDS.items() for name in cases]
READER = """
import json, sys, time, warnings
from pathlib import Path
import torch
from plpkg import residual
from plpkg.backbones import random_backbone
from plpkg.residual.wire.loading import adapted_model
from plpkg.retention import RetainingHeads
torch.set_num_threads(1)
warnings.simplefilter("ignore")
root = Path(sys.argv[1])

def memory(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def model():
    shape = dict(num_layers=4, num_kv_heads=2, vocab=64, hidden=32, intermediate=48)
    return random_backbone("llama", **shape)

def command(folder):
    adapted_model(str(root / "model"), folder, "fp32", "cpu", rank=4)

def load(folder):
    residual.load(base, folder)

def heads(folder):
    RetainingHeads.from_pretrained(folder, base)

def refusal(read, folder):
    global base
    base = model()
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted anew
    before, began = memory("VmRSS"), time.process_time()
    try:
        read(folder)
        said = None
    except (ValueError, OSError) as error:
        said = str(error)
    except BaseException as error:
        said = f"!{type(error).__name__}: {error}"
    return said, memory("VmHWM") - before, time.process_time() - began

for good, reads in (("privatelora", (command, load)), ("ladder", (command, load)), ("heads", (heads,))):
    for read in reads:
        said = refusal(read, root / good)
        assert said[0] is None, said
for kind, name in json.loads((root / "cases.json").read_text()):
    reads = [heads] if kind == "heads" else [command, load]
    for read in reads:
        print(json.dumps([kind, name, read.__name__, *refusal(read, root / f"{kind}, {name}".replace("/", "_"))]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, a sound folder of each kind, and one for each case."""
    root = tmp_path_factory.mktemp("saved")
    base = backbone()
    base.save_pretrained(root / "model")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(root / "model")
    adapted_backbone().save_pretrained(root / "privatelora")
    adapted_backbone(ladder=dict(r=5, width=16)).save_pretrained(root / "ladder")
    RetainingHeads.attach(base, 24).save_pretrained(root / "heads")
    for kind, name in CASES:
        folder = shutil.copytree(root / kind, root / f"{kind}, {name}".replace("/", "_"))
        KINDS[kind][name][0](folder)
    (root / "cases.json").write_text(json.dumps(CASES))
    return root


@pytest.fixture(scope="module")
def refusals(folders):
    """What is said, and the bytes and CPU seconds until then, by case and by who reads."""
    result = {}
    with Process(READER, str(folders)) as process:
        for line in process.stdout:
            assert line.startswith("["), line + process.stdout.read()
            kind, name, reader, *measured = json.loads(line)
            result.setdefault((kind, name), {})[reader] = measured
        assert process.wait() == 0
    return result


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_crafted_folder_is_refused_cheaply_and_in_a_sentence(refusals, kind, name):
    for reader, (said, more_bytes, cpu_s) in refusals[kind, name].items():
        assert said is not None, f"{reader} reads it"
        assert not said.startswith("!"), (reader, said)
        assert KINDS[kind][name][1] in said, (reader, said)
        assert len(said) < 1500
        assert "\n" not in said
        print(f"{more_bytes / MIB:.0f} MiB, {cpu_s:.2f} s of {reader}: {said}")
        assert more_bytes < 100 * MIB, (reader, more_bytes / MIB)
        assert cpu_s < 2, (reader, cpu_s)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def test_a_saved_adapter_knows_its_backbone_and_its_weights(tmp_path):
    config, model = PrivateLoraConfig(r_c2d=5, r_d2c=3), backbone()
    mine = get_peft_model(model, config)
    get_peft_model(backbone(seed=1), config)  # the same object for another model
    mine.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / CONFIG).read_text())
    assert fields["backbone"] == fingerprint(mine) == fingerprint(backbone())
    assert fields["weights_sha256"] == saved.digest(tmp_path / WEIGHTS)
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o600
    PeftModel.from_pretrained(backbone(dtype=torch.bfloat16), tmp_path)
    with pytest.raises(ValueError, match="belongs to a backbone with fingerprint"):
        PeftModel.from_pretrained(backbone(seed=1), tmp_path)


def test_an_adapter_without_a_backbone_loads_with_a_warning_and_then_has_one(tmp_path):
    model = adapted_backbone()
    model.save_pretrained(tmp_path)
    config({}, removed=("backbone", "weights_sha256"))(tmp_path)
    with pytest.warns(UserWarning, match="the adapter names no backbone"):
        loaded = PeftModel.from_pretrained(backbone(), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path)
    PeftModel.from_pretrained(backbone(), tmp_path)


def test_tensors_are_looked_at_again_where_peft_loads_them(tmp_path):
    """Also into an adapter that is there already, for which PEFT reads no configuration."""
    model = adapted_backbone()
    before = logits(model)
    given = get_peft_model_state_dict(model)
    name = next(iter(given))
    crafted = [
        (given | {"base_model.model.lm_head.weight": torch.zeros(64, 32)}, "does not belong here"),
        ({key: each for key, each in given.items() if key != name}, "is missing"),
        (given | {name: given[name].T}, "has shape"),
        (given | {name: given[name] / 0}, "has values that are not finite numbers here"),
        (given | {name: given[name].char()}, "has values that are not finite numbers here"),
    ]
    for tensors, message in crafted:
        with pytest.raises(ValueError, match=message):
            set_peft_model_state_dict(model, tensors)
        model.save_pretrained(tmp_path)
        save_file({key: each.contiguous() for key, each in tensors.items()}, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            model.load_adapter(tmp_path, "default")
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=r".*\.0\..*o_proj"),
        dict(exclude_modules=r".*k_proj"),
        dict(target_modules="all-linear"),
        dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1], layers_pattern="layers"),
    ],
)
def test_a_pattern_is_saved_as_the_names_that_it_chose(options, tmp_path):
    model = adapted_backbone(**options)
    model.save_pretrained(tmp_path)
    assert isinstance(json.loads((tmp_path / CONFIG).read_text())["target_modules"], list)
    assert torch.equal(logits(PeftModel.from_pretrained(backbone(), tmp_path)), logits(model))


def test_a_part_of_the_backbone_comes_back_for_who_asks_for_it(tmp_path):
    model = adapted_backbone(modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"modules_to_save=\['lm_head'\] must be empty"):
        PeftModel.from_pretrained(backbone(), tmp_path)
    asked = PrivateLoraConfig(r_c2d=5, r_d2c=3, modules_to_save=["lm_head"])
    assert torch.equal(logits(PeftModel.from_pretrained(backbone(), tmp_path, config=asked)), logits(model))


def test_a_gated_ladder_is_saved_under_one_name_and_loaded_under_another(tmp_path):
    model = adapted_backbone(ladder=dict(r=5, width=16))
    model.save_pretrained(tmp_path)
    assert not any("default" in name for name in load_file(tmp_path / WEIGHTS))
    loaded = PeftModel.from_pretrained(backbone(), tmp_path, adapter_name="other")
    assert torch.equal(logits(loaded), logits(model))


def test_a_second_adapter_is_as_exact(tmp_path):
    model = adapted_backbone()
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "other")
    first = logits(model)
    model.set_adapter("other")
    assert torch.equal(logits(model), first)
    tensors(lambda given: given.update({"base_model.model.lm_head.weight": torch.zeros(64, 32)}))(tmp_path)
    with pytest.raises(ValueError, match="does not belong here"):
        model.load_adapter(tmp_path, "third")


def test_a_configuration_alone_can_be_had_by_a_cloud(tmp_path):
    adapted_backbone().save_pretrained(tmp_path)
    os.rename(tmp_path / WEIGHTS, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin is a pickle, which is never read"):
        PrivateLoraConfig.from_pretrained(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    config = PrivateLoraConfig.from_pretrained(tmp_path)
    assert get_peft_model(backbone(), config).peft_config["default"].r_c2d == 5
    with pytest.raises(ValueError, match="belongs to a backbone with fingerprint"):
        get_peft_model(backbone(seed=1), config)


def test_an_adapter_of_the_hub_is_read_alike(tmp_path, monkeypatch):
    model = adapted_backbone()
    model.save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(saved, "hf_hub_download", lambda name, file, **_: asked.append((name, file)) or tmp_path / file)
    assert PrivateLoraConfig.from_pretrained("ann/mine").r_c2d == 5
    assert asked == [("ann/mine", CONFIG), ("ann/mine", WEIGHTS)]


@pytest.mark.parametrize("kind", [PrivateLoraConfig, LadderConfig])
def test_ranks_and_names_are_bounded_in_the_configuration(kind):
    rank = "r" if kind is LadderConfig else "r_c2d"
    with pytest.raises(ValueError, match=f"{rank} must be between 1 and 16384, got 16385"):
        kind(**{rank: 2**14 + 1})
    for field in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
        with pytest.raises(ValueError, match=rf"{field} must be names of modules, got \[1\]"):
            kind(**{field: [1]})


def test_what_is_not_this_rooms_is_read_by_peft_as_ever(tmp_path):
    config = LoraConfig(r=3, target_modules=["q_proj"], runtime_config={"ephemeral_gpu_offload": 1})
    config.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LoraConfig)
    assert (loaded.r, loaded.target_modules) == (3, {"q_proj"})
    assert {each.from_json_file.__func__.__module__ for each in PEFT_TYPE_TO_CONFIG_MAPPING.values()} == {"peft.config"}


def test_two_saved_adapters_in_one_model(tmp_path):
    adapted_backbone().save_pretrained(tmp_path / "one")
    model = residual.load(backbone(), tmp_path / "one", "ann")
    assert residual.load(model, tmp_path / "one", "bob") is model
    assert sorted(model.peft_config) == ["ann", "bob"]
    with pytest.raises(ValueError, match="the model has an adapter 'bob' already: ann, bob"):
        residual.load(model, tmp_path / "one", "bob")
    with pytest.raises(FileNotFoundError, match=r"holds no adapter: it has no adapter_config\.json"):
        residual.load(model, tmp_path / "none", "cyd")
    (tmp_path / "one" / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no adapter: it has no adapter_model\.safetensors"):
        residual.load(model, tmp_path / "one", "cyd")
    assert sorted(model.peft_config) == ["ann", "bob"]
