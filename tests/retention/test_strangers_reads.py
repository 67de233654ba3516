"""A reading or heads from a stranger: whatever is wrong with them, one sentence says so, and nothing has happened."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from plpkg import checkpoints, retention, untrusted
from plpkg.backbones import digest
from plpkg.retention import RetainingHeads, chunked_prefill
from plpkg.retention.cache import UnitStore
from plpkg.retention.quantize import quantized
from plpkg.retention.reading import FILE, MOST
from plpkg.retention.scorers import KeyNorm

STORES = {"plain": UnitStore, "token": quantized(4, "token", 4), "kivi": quantized(4, "kivi", 4)}
LONG = "x" * 300_000


@pytest.fixture(scope="module")
def reader(backbone):
    """The model that has read."""
    return backbone()


@pytest.fixture(scope="module")
def saved(reader, tmp_path_factory):
    """What it has read: 29 tokens, of which each head keeps ten units; by kind of store and of positions."""
    root, ids = tmp_path_factory.mktemp("saved"), torch.arange(1, 30)[None]
    for name, store in STORES.items():
        chunked_prefill(reader, ids, KeyNorm(), 10, 4, store=store).save(root / name)
    chunked_prefill(reader, ids, KeyNorm(), 10, 4, positions="original").save(root / "original")
    return root


def require_refused(call, message, *, model, folder):
    before, start = digest(model), time.process_time()
    with pytest.raises(ValueError, match=message) as refusal:
        call()
    assert time.process_time() - start < 2
    said = str(refusal.value).replace(str(folder), "")
    assert "\n" not in said
    assert len(said) <= 300
    assert digest(model) == before


def damaged(saved, kind, folder, change):
    """A copy in which ``change`` has altered the state."""
    shutil.copytree(saved / kind, folder)
    state = checkpoints.read(folder / FILE)
    change(state)
    checkpoints.save(folder / FILE, state)


def of(**changes):
    return lambda state: state.update(changes)


def layer(name, change):
    """Changes a tensor of the cache, or adds one."""
    return lambda state: state["layers"].update({name: change(state["layers"].get(name))})


def row(number, **changes):
    return lambda state: state["log"][number].update(changes)


def many(**changes):
    """A log whose columns are tensors, so that the header says nothing of it."""
    return of(log=[{"start": i, "stop": i + 1, "before": i + 1, "after": i + 1, **changes} for i in range(100)])


def fewer(state):
    state["layers"].update({name: t[:, :, :3].clone() for name, t in state["layers"].items() if name[0] == "1"})


SEEN = r"seen must be (a whole number )?between 10 and 16777216, got "
READING = {
    "seen beyond all bounds": (of(seen=2**31 - 1), SEEN + "2147483647"),
    "seen beyond a mask's": (of(seen=10**9), SEEN + "1000000000"),
    "seen true": (of(seen=True), SEEN + "True"),
    "seen half": (of(seen=29.5), SEEN + "Entry|got 29.5"),
    "seen before the log's end": (of(seen=28), r"the log must end .*28 tokens and 10 units, got 29 and 10"),
    "seen after the log's end": (of(seen=1000), r"the log must end .*1,000 tokens and 10 units, got 29 and 10"),
    "units that are not held": (row(-1, after=9), r"the log must end .*29 tokens and 10 units, got 29 and 9"),
    "a gap": (row(1, start=5), r"log\[1\] must go on from 4 tokens and 4 units, got .*'start': 5"),
    "units from nowhere": (row(1, before=9), r"log\[1\] must go on from 4 tokens and 4 units, got .*'before': 9"),
    "a start that is false": (row(0, start=False), r"log\[0\] must go on from 0 tokens .*'start': False"),
    "half a token": (row(0, start=0.5), r"log\[0\] must go on from 0 tokens .*'start': 0.5"),
    "kept given, too": (row(0, kept=3), r"log\[0\] must have start, .*: 'kept' is missing or unknown"),
    "no log": (of(log=[]), "the log must end .* got 0 and 0"),
    "a log that is none": (of(log={"a": 1}), r"log must be a list, got \{'a': 1\}"),
    "a long log of other tokens": (many(), "the log must end .* got 100 and 100"),
    "a long log of less than nothing": (
        many(start=-5, after=10**15),
        r"log\[0\] must go on .*'after': 10000",
    ),
    "a long log of NaN": (
        many(after=float("nan")),
        r"log\[0\] must go on .*'after': nan",
    ),
    "a long log of numbers": (of(log=[1] * 100), r"log\[0\] must have start, stop, before, after, got 1"),
    "too long a log": (of(log=[1] * 2**20), r"log\[0\] must have start, stop, before, after, got 1"),
    "positions of 300,000 letters": (of(positions=LONG), r"positions must be one of 'reassigned', 'original', got 'xx"),
    "identity no dictionary": (of(identity=[1]), r"identity must have backbone, dtype, weights, got \[1\]"),
    "identity with more": (lambda s: s["identity"].update(a=1), "identity must have .*: 'a' is missing or unknown"),
    "backbone a number": (lambda s: s["identity"].update(backbone=5), "backbone with fingerprint 5… in torch.float32"),
    "dtype of 300,000 letters": (lambda s: s["identity"].update(dtype=LONG), "in xxxxxxxxxxxxxx, but LlamaForCausalLM"),
    "another field": (of(zzz=torch.ones(3)), "a reading must have .*: 'zzz' is missing or unknown"),
    "a field missing": (lambda s: s.pop("positions"), "a reading must have .*: 'positions' is missing or unknown"),
    "store of 300,000 letters": (
        of(store={"bits": 4, "scheme": LONG, "group": 4}),
        "scheme must be one of .*'xxx",
    ),
    "store with more": (of(store={"bits": 4, "eval": 1}), "store must have bits, scheme, group alone: "),
    "store no dictionary": (of(store=[1]), r"store must have bits, scheme, group, got \[1\]"),
    "layers no dictionary": (of(layers=[]), r"layers must be a dict, got \[\]"),
    "an unknown tensor": (layer("0.zzz", lambda _: torch.ones(1, 2, 10)), "'0.zzz' is no tensor of such a cache"),
    "a layer that is not": (
        layer("7.positions", lambda _: torch.ones(1)),
        "'7.positions' is no tensor",
    ),
    "another digit": (layer("²", lambda _: torch.ones(1)), "'²' is no tensor of such a cache"),
    "no tensor": (layer("1.positions", lambda _: 5), r"1.positions must be torch.int32 of shape \(1, 2, 10\), got 5"),
    "a tensor missing": (lambda s: s["layers"].pop("1.store.keys"), "1.store.keys must be torch.float32 .* got None"),
    "a layer with fewer units": (fewer, r"1.positions must be torch.int32 of shape \(1, 2, 10\), got .*\(1, 2, 3\)"),
    "NaN scores": (layer("0.scores", lambda t: t * float("nan")), "0.scores has numbers that are not finite"),
    "whole scores": (layer("0.scores", torch.Tensor.long), "0.scores must be torch.float32 .* got I64"),
    "NaN values": (layer("1.store.values", lambda t: t * float("nan")), "1.store.values has numbers .* not finite"),
    "positions that fall": (
        layer("0.positions", lambda t: t.flip(-1)),
        "0.positions must rise within 0 to 28",
    ),
    "positions that wrap": (
        layer("0.positions", lambda t: torch.where(t == t.amin(-1, keepdim=True), 2**31 - 1, -(2**31)).int()),
        "0.positions must rise within 0 to 28, got others, from -2,147,483,648 to 2,147,483,647",
    ),
    **{
        f"logits of {dtype}": (lambda s, d=dtype: s.update(logits=s["logits"].to(d)), f"logits must be .* got .*{name}")
        for dtype, name in {torch.float64: "float64", torch.int64: "I64", torch.bool: "BOOL"}.items()
    },
    "logits a number": (of(logits=1.0), r"logits must be torch.float32 of shape \(batch, 64\), got 1.0"),
    "logits of nobody": (of(logits=torch.ones(0, 64)), r"logits must be .* got torch.float32 of shape \(0, 64\)"),
    "logits of two": (of(logits=torch.ones(2, 64)), r"0.positions must be .* \(2, 2, kept\), got .*\(1, 2, 10\)"),
    "NaN logits": (of(logits=torch.full((1, 64), float("nan"))), "logits has numbers that are not finite"),
}
VALUES = "0.store.values."
PACKED = {
    "a scale for all groups": (
        layer(VALUES + "scale", lambda t: t[..., :1, :].clone()),
        "scale must be .*4, 1",
    ),
    "a dimension more": (layer(VALUES + "scale", lambda t: t[..., None]), VALUES + r"scale must be .* 1, 1\)$"),
    "a scale below 0": (layer(VALUES + "scale", torch.neg), VALUES + "scale must be 0 or more, got -"),
    "a scale of NaN": (layer(VALUES + "scale", lambda t: t * float("nan")), VALUES + "scale has numbers .* not finite"),
    "numbers beyond float32": (layer(VALUES + "scale", lambda t: t * 0 + 3e38), "0.store has numbers .* unpacked"),
    "least in float64": (layer(VALUES + "least", torch.Tensor.double), VALUES + "least must be .* got torch.float64"),
    "codes in int64": (layer(VALUES + "codes", torch.Tensor.long), VALUES + "codes must be torch.uint8 .* got I64"),
    "codes below 0": (layer(VALUES + "codes", lambda t: -t.int() - 7), VALUES + "codes must be .* got torch.int32"),
    "other bits": (lambda s: s["store"].update(bits=2), r"0.store.keys.*codes must be torch.uint8 of shape .*1\), got"),
    "another group": (lambda s: s["store"].update(group=8), r"0.store.keys.*codes must be torch.uint8 of .*4\), got"),
    "no such group": (lambda s: s["store"].update(group=4 * 10**30), r"group must be between 4 and 65536, got 4000"),
    "no store": (of(store=None), "0.store.keys must be torch.float32 .* got None"),
}
CASES = [
    *(pytest.param(kind, *READING[name], id=f"{name}, {kind}") for kind in ("plain", "original") for name in READING),
    *(pytest.param(kind, *PACKED[name], id=f"{name}, {kind}") for kind in ("token", "kivi") for name in PACKED),
]


@pytest.mark.parametrize(("kind", "change", "message"), CASES)
def test_a_reading_that_was_tampered_with(reader, saved, tmp_path, kind, change, message):
    folder = tmp_path / "folder"
    damaged(saved, kind, folder, change)
    message = f"^what was read in .* is not taken: .*({message})"
    require_refused(lambda: retention.load(folder, reader), message, model=reader, folder=folder)


PART = "0.store.keys.0."
GROUPS = {
    "a group fewer": (
        layer(PART + "codes", lambda t: t[:, :, :, :1].clone()),
        r"codes must be .*2, 2\), got .*1, 2\)$",
    ),
    "no group": (layer(PART + "codes", lambda t: t[:, :, :, :0].clone()), r"codes must be .*2, 2\), got .*0, 2\)$"),
    "groups more": (layer(PART + "codes", lambda t: t.repeat(1, 1, 1, 1024, 1)), r"codes must be .*got .*2048, 2\)$"),
    "a part more": (layer("0.store.keys.1.codes", lambda _: torch.ones(1, 2, 16, 1, 2).byte()), "keys.1.codes' is no"),
    "units more": (layer("0.store.keys.rest", lambda t: t.repeat(1, 1, 3, 1)), r"must be .*2, 16\), got .*6, 16\)$"),
}


@pytest.mark.parametrize(("change", "message"), GROUPS.values(), ids=GROUPS)
def test_groups_of_units_that_are_not_those_held(reader, saved, tmp_path, change, message):
    folder = tmp_path / "folder"
    damaged(saved, "kivi", folder, change)
    require_refused(lambda: retention.load(folder, reader), message, model=reader, folder=folder)


@pytest.mark.parametrize("name", ["another field", "an unknown tensor", "a layer with fewer units", "whole scores"])
def test_it_is_refused_before_its_tensors_are_read(reader, saved, tmp_path, monkeypatch, name):
    change, message = READING[name]
    damaged(saved, "plain", tmp_path / "folder", change)
    monkeypatch.setattr(untrusted, "read_file", lambda *_: pytest.fail("the tensors were read"))
    with pytest.raises(ValueError, match=message):
        retention.load(tmp_path / "folder", reader)


def test_a_thousand_parts_are_judged_in_time(reader, saved, tmp_path):
    parts = {f"0.store.keys.{i}.codes": torch.ones(1, 2, 16, 1, 2, dtype=torch.uint8) for i in range(4000)}
    damaged(saved, "kivi", tmp_path / "folder", lambda state: state["layers"].update(parts))
    folder = tmp_path / "folder"
    require_refused(lambda: retention.load(folder, reader), "must be", model=reader, folder=folder)


def test_what_cannot_be_loaded_is_not_saved(reader, tmp_path):
    read = chunked_prefill(reader, torch.arange(1, 30)[None], KeyNorm(), 10, 4)
    read.cache.layers[0].scores[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"0\.scores has numbers that are not finite"):
        read.save(tmp_path / "folder")
    read.cache.layers[0].scores.nan_to_num_()
    reader.generate(**read.inputs(), max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match=r"must|the log must end"):
        read.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert MOST == 16_777_216  # as save's documentation says


@pytest.mark.parametrize("kind", STORES)
def test_after_decoding_it_is_saved_as_well(reader, tmp_path, kind):
    read = chunked_prefill(reader, torch.arange(1, 30)[None], KeyNorm(), 10, 4, local_len=3, store=STORES[kind])
    with read.evicting():
        reader.generate(**read.inputs(), max_new_tokens=70, do_sample=False)
    assert len(read.log) > checkpoints.LONG
    read.save(tmp_path)
    again = retention.load(tmp_path, reader)
    assert again.log.rows() == read.log.rows()
    ours, theirs = again.cache.tensors(), read.cache.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Retaining heads.


def config(**changes):
    def change(folder):
        path = folder / "retaining_heads.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(change):
    def changed(folder):
        path = folder / "retaining_heads.safetensors"
        save_file({name: change(tensor) for name, tensor in load_file(path).items()}, path)

    return changed


HEADS = {
    "beyond float16": (weights(lambda t: t.float() * 0 + 1e30), "'layers.0.0.weight', .* not finite in torch.float16"),
    "NaN": (weights(lambda t: t * float("nan")), "'layers.0.0.weight', .* not finite in float32"),
    "another shape": (weights(lambda t: t[:1].clone()), r"has shape \(1, 128\), and must have \(24, 128\)"),
    "an activation": (config(activation="x"), r"activation must be one that transformers knows \(.*…\), got 'x'"),
    "a long activation": (
        config(activation="x" * 60_000),
        "activation must be one that transformers knows .*'xxx",
    ),
    "no activation": (config(activation=["silu"]), r"activation must be one that .* got \['silu'\]"),
    "a hundred fields": (
        config(**{f"n{i}" + "n" * 500: 1 for i in range(100)}),
        "'n0n.* is not one of the fields",
    ),
    "hidden true": (config(hidden=True), "hidden must be a whole number between 1 and 1048576, got True"),
    "hidden of 39 digits": (config(hidden=10**39), "hidden must be between 1 and 1048576, got 1000"),
    "another hidden": (config(hidden=25), r"has shape \(24, 128\), and must have \(25, 128\)"),
    "layers of another": (config(num_layers=3), r"num_layers, .* must be \(2, 4, 2, 16\), got \(3, 4, 2, 16\)"),
    "a backbone that is none": (config(backbone=5), "backbone must be a fingerprint, got 5"),
    "a long backbone": (config(backbone="a\nb" * 10_000), "these heads belong to a backbone with fingerprint a"),
}


@pytest.mark.parametrize(("change", "message"), HEADS.values(), ids=HEADS)
def test_heads_that_were_tampered_with(backbone, tmp_path, change, message):
    model = backbone().half()
    RetainingHeads.attach(model, 24).save_pretrained(tmp_path)
    change(tmp_path)
    require_refused(lambda: RetainingHeads.from_pretrained(tmp_path, model), message, model=model, folder=tmp_path)
