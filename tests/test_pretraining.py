"""Training is compared with itself: killed and resumed, in small pieces, in two processes.

Not run in CI: more than one GPU. Two processes on the CPU (gloo) stand in for them.
"""

import collections
import contextlib
import csv
import itertools
import json
import math
import random
import re
import shutil
import signal
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import accelerate
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

from plpkg import cli, corpora, pretraining, training_loop
from plpkg.backbones import load_backbone
from plpkg.corpora import Document
from plpkg.files import checkpoints
from plpkg.pretraining import Recipe, build, pretrain, train_tokenizer
from plpkg.scoring import score

from preloaded import Process
from rounding import assert_as_exact, relative
from waiting import wait_until

TINY = Recipe(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, intermediate=48, vocab=300, max_positions=64,
    seq=32, batch=4, steps=12, warmup=2, seed=3,
)  # fmt: skip
OF_TWO = """
import os, sys
task, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate asks for them; they are not used
from torch import distributed
distributed.init_process_group("gloo", init_method=f"file://{task}.group", rank=int(rank), world_size=2)
"""
SCRIPT = """
import json, sys
from plpkg.corpora import Document
from plpkg.pretraining import Recipe, pretrain
recipe, texts, held_out, out, options = json.load(open(sys.argv[1]))
documents = [[Document(f"{name}{i}", text) for i, text in enumerate(part)] for name, part in
             (("t", texts), ("v", held_out))]
pretrain(Recipe(**recipe), out, train=documents[0], validation=documents[1], device="cpu", progress=False, **options)
"""


def sentences(count, seed):
    words = "the a model key cache token layer private personal device reads writes keeps sends learns of in on"
    draw = random.Random(seed)
    return [" ".join(draw.choices(words.split(), k=60)) + "." for _ in range(count)]


TRAIN = [Document(f"t{i}", text) for i, text in enumerate(sentences(40, 0))]
VALIDATION = [Document(f"v{i}", text) for i, text in enumerate(sentences(4, 1))]


def run(out, recipe=TINY, **options):
    options = {"checkpoint_every": 5, "evaluate_every": 6, "bf16": False, "device": "cpu"} | options
    pretrain(recipe, out, **{"train": TRAIN, "validation": VALIDATION, "progress": False} | options)
    return load_file(out / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_first_step(actual, expected, tmp_path, monkeypatch):
    """Loss and averages of checkpoints after one step: those of the momentum are the gradient."""
    change_models(monkeypatch, torch.nn.Module.double)
    run(tmp_path / "exact", replace(TINY, **{name: actual["identity"][name] for name in vars(TINY)}))
    exact = checkpoint(tmp_path / "exact")
    assert actual["log"][0]["loss"] == pytest.approx(
        expected["log"][0]["loss"], rel=relative(TINY.batch * TINY.seq + TINY.vocab)
    )
    for states in zip(*([o["state"] for o in optimizers(each)] for each in (actual, expected, exact)), strict=True):
        for key in states[1][0]:
            assert_as_exact(*([saved[key] for _, saved in sorted(state.items())] for state in states))


def checkpoint(out):
    return checkpoints.read(out / "checkpoint.safetensors")


def optimizers(state):
    return [part for name, part in state["parts"].items() if name.startswith("optimizer")]


def log(out):
    with (out / "training.csv").open() as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def at_steps(monkeypatch, *numbers, loss=None):
    """Interrupt the coming steps with these numbers, counted from 1 through all runs, or give them a loss."""
    gradient, steps = pretraining._gradient, itertools.count(1)

    def patched(*arguments):
        if next(steps) not in numbers:
            return gradient(*arguments)
        if loss is None:
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(pretraining, "_gradient", patched)


def change_models(monkeypatch, change):
    """Every model that is built from now on goes through a function first."""

    def built(recipe):
        model = build(recipe)
        change(model)
        return model

    monkeypatch.setattr(pretraining, "build", built)


def command(out, *options):
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["pretrain", str(out), "--device", "cpu", *options])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    run(out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.fixture
def public(monkeypatch):
    monkeypatch.setattr(corpora, "public", {"train": TRAIN, "validation": VALIDATION}.__getitem__)


@pytest.fixture
def fresh_accelerate():
    """accelerate as it is in a new process: it keeps its settings for all that come later."""

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


def test_what_a_run_leaves_behind(finished):
    model, tokenizer = load_backbone(finished, dtype=torch.bfloat16)
    assert model.config.model_type == "llama"
    assert model.config.num_key_value_heads == 2
    assert model.config.tie_word_embeddings
    assert {weight.dtype for weight in load_file(finished / "model.safetensors").values()} == {torch.bfloat16}
    assert tokenizer.decode(tokenizer("the key cache: naïve 日本")["input_ids"]) == "the key cache: naïve 日本"
    recipe = json.loads((finished / "recipe.json").read_text())
    assert recipe["hidden"] == 32
    assert recipe["run"]["versions"]["python"]
    assert not list(finished.glob("tmp*"))
    assert [int(row["step"]) for row in log(finished)] == [6, 12]
    assert int(log(finished)[-1]["tokens"]) == 12 * 4 * 32


def test_it_learns(tmp_path):
    run(tmp_path, replace(TINY, steps=60))
    model, tokenizer = load_backbone(tmp_path)
    # Better than knowing, of the very text, how often each token occurs.
    tokens = collections.Counter(torch.cat([t.ids[1:] for t in corpora.encode(VALIDATION, tokenizer)]).tolist())
    entropy = sum(n * math.log2(tokens.total() / n) for n in tokens.values())
    assert entropy < score(build(TINY), tokenizer, VALIDATION).bits
    assert score(model, tokenizer, VALIDATION).bits < entropy


@pytest.mark.parametrize(
    ("recipe", "bf16"),
    [(TINY, False), (TINY, True), (replace(TINY, seed=4), False)],
    ids=["the same", "in bfloat16", "another seed"],
)
def test_a_run_is_as_ever_and_its_log_ends_with_the_score_of_what_was_trained(finished, tmp_path, recipe, bf16):
    run(tmp_path, recipe, bf16=bf16)
    model, state = build(recipe), checkpoint(tmp_path)
    weights = state["parts"]["model"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert same(weights, checkpoint(finished)["parts"]["model"]) is (recipe == TINY and not bf16)
    assert (tmp_path / "tokenizer.json").read_text() == (finished / "tokenizer.json").read_text()
    model.load_state_dict(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        judged = score(model, train_tokenizer(TRAIN, TINY.vocab), VALIDATION, seq=TINY.seq, stride=TINY.seq)
    assert state["log"][-1]["validation_bits_per_byte"] == pytest.approx(judged.bits_per_byte)


@pytest.mark.parametrize("bf16", [False, True])
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch, bf16):
    whole = run(tmp_path / "whole", bf16=bf16)
    at_steps(monkeypatch, 4, 12)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", bf16=bf16)
    assert same(run(tmp_path / "parts", bf16=bf16), whole)
    logs = [checkpoint(tmp_path / name)["log"] for name in ("whole", "parts")]
    for first, second in zip(*logs, strict=True):
        assert first | {"seconds": 0} == second | {"seconds": 0}


def test_the_log_goes_on_where_it_stopped(tmp_path, monkeypatch):
    def clock():  # a second passes from look to look
        monkeypatch.setattr(training_loop, "time", SimpleNamespace(perf_counter=map(float, itertools.count()).__next__))

    clock()
    at_steps(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, evaluate_every=2)
    assert [int(row["step"]) for row in log(tmp_path)] == [2, 4, 6]  # its checkpoint has 2 and 4
    clock()
    run(tmp_path, evaluate_every=2)
    assert [int(row["step"]) for row in log(tmp_path)] == [2, 4, 6, 8, 10, 12]
    seconds = [float(row["seconds"]) for row in log(tmp_path)]
    assert seconds == [1, 2, 4, 5, 6, 8]  # the others are those of the checkpoints


def test_a_finished_run_that_is_started_again_makes_its_log_whole_and_changes_nothing(copy):
    before = contents(copy)
    log = copy / "training.csv"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    run(copy)
    assert contents(copy) == before


def written(folder, recipe, options):
    """The argument of :data:`SCRIPT`."""
    task = folder / "task.json"
    texts, held_out = ([d.text for d in part] for part in (TRAIN, VALIDATION))
    task.write_text(json.dumps([vars(recipe), texts, held_out, str(folder / "out"), options]))
    return str(task)


def test_killed_at_any_moment_it_goes_on(tmp_path):
    recipe = replace(TINY, steps=40, seed=1003)  # large: other processes draw the same
    options = {"checkpoint_every": 1, "evaluate_every": 20, "bf16": False}
    whole = run(tmp_path / "whole", recipe, checkpoint_every=40)
    checkpoint = tmp_path / "out" / "checkpoint.safetensors"
    draw, killed, task = random.Random(0), 0, written(tmp_path, recipe, options)

    def written_at():
        return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0

    for _ in range(3):
        before = written_at()
        with Process(SCRIPT, task) as process:
            wait_until(lambda before=before: process.poll() is not None or written_at() > before)
            time.sleep(draw.uniform(0, 0.1))
        killed += process.wait() == -signal.SIGKILL
    assert killed
    with Process(SCRIPT, task) as process:
        errors = process.stdout.read()
        assert process.wait() == 0, errors
    assert same(load_file(tmp_path / "out" / "model.safetensors"), whole)
    assert not list((tmp_path / "out").glob("*.partial"))


def test_two_processes_make_the_gradient_of_one(tmp_path, monkeypatch):
    recipe = replace(TINY, steps=1, warmup=0, seed=1003)
    options = {"checkpoint_every": 1, "evaluate_every": 1, "bf16": False}
    run(tmp_path / "one", recipe, **options)
    task = written(tmp_path, recipe, options)
    with contextlib.ExitStack() as stack:
        pair = [stack.enter_context(Process(OF_TWO + SCRIPT, task, str(rank))) for rank in range(2)]
        errors = [process.stdout.read() for process in pair]
        assert [process.wait() for process in pair] == [0, 0], errors
    one, two = (checkpoint(tmp_path / name) for name in ("one", "out"))
    assert (one["facts"]["processes"], two["facts"]["processes"]) == (1, 2)
    assert_same_first_step(two, one, tmp_path, monkeypatch)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_small_pieces_make_the_same_gradient(tmp_path, monkeypatch, micro_batch):
    states = []
    for size in (micro_batch, 4):
        run(tmp_path / str(size), replace(TINY, steps=1), micro_batch=size)
        states.append(checkpoint(tmp_path / str(size)))
    assert_same_first_step(*states, tmp_path, monkeypatch)


def test_a_long_gradient_is_cut_to_length_one(tmp_path, monkeypatch):
    change_models(monkeypatch, lambda model: model.model.embed_tokens.weight.data.mul_(50))
    run(tmp_path, replace(TINY, steps=1))
    muon, adamw = optimizers(checkpoint(tmp_path))
    # After one step the averages hold these shares of it.
    gradient = [s["momentum_buffer"] / (1 - muon["param_groups"][0]["momentum"]) for s in muon["state"].values()]
    gradient += [s["exp_avg"] / (1 - adamw["param_groups"][0]["betas"][0]) for s in adamw["state"].values()]
    gradient = torch.cat([g.flatten() for g in gradient])
    assert gradient.double().norm().item() == pytest.approx(1, rel=relative(len(gradient)))


def test_accelerates_environment_variables_change_nothing(finished, tmp_path, monkeypatch, fresh_accelerate):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    run(tmp_path)
    assert same(checkpoint(tmp_path)["parts"]["model"], checkpoint(finished)["parts"]["model"])


FIRST, SECOND, *REST = TRAIN
MOVED = [replace(FIRST, text=FIRST.text + SECOND.text[:1]), replace(SECOND, text=SECOND.text[1:]), *REST]
HASHES = "='[0-9a-f]{64}', now '[0-9a-f]{64}'"


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (dict(recipe=replace(TINY, hidden=64)), "hidden=32, now 64"),
        (dict(train=TRAIN[:-1]), f"train{HASHES}"),
        (dict(train=MOVED), f"train{HASHES}"),
        (dict(validation=VALIDATION[:-1]), f"validation{HASHES}"),
        (dict(validation=[replace(VALIDATION[0], masked=((0, 3),)), *VALIDATION[1:]]), f"validation{HASHES}"),
        (dict(bf16=True), "bf16=False, now True"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_and_nothing_is_changed(finished, options, difference):
    before = contents(finished)
    with pytest.raises(ValueError, match=f"holds a run with {difference}: take another folder"):
        run(finished, **options)
    assert contents(finished) == before


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_before_its_checkpoint(finished, tmp_path, monkeypatch, loss):
    at_steps(monkeypatch, 10, loss=loss)
    with pytest.raises(FloatingPointError, match=f"the loss of step 10 is {loss}, or its gradient"):
        run(tmp_path)
    assert checkpoint(tmp_path)["step"] == 5
    assert same(run(tmp_path), load_file(finished / "model.safetensors"))


def test_a_gradient_that_is_not_finite_updates_nothing(tmp_path, monkeypatch):
    def broken(model):
        model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
        models.append(model)

    models = []
    change_models(monkeypatch, broken)
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan, or its gradient"):
        run(tmp_path)
    assert same(models[0].state_dict(), build(TINY).state_dict())


def test_the_command_trains_on_the_public_text_and_says_that_a_loss_is_not_finite(tmp_path, monkeypatch, public):
    changes = [f"--set={name}={value}" for name, value in vars(replace(TINY, steps=2)).items()]
    result = command(tmp_path / "out", *changes)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").exists()
    change_models(monkeypatch, lambda model: model.model.norm.weight.data.fill_(math.nan))
    result = command(tmp_path / "nan", *changes)
    assert result.exit_code == 2
    assert "the loss of step 1 is nan, or its gradient: take another folder and a lower lr" in result.output
    assert contents(tmp_path / "nan") == {}


def test_what_the_command_refuses_stays_as_it_is(tmp_path, public):
    out = tmp_path / "out"
    for change, message in {
        "width=3": "the field to set must be one of 'num_layers'",
        "hidden=wide": "hidden must be a number, got 'wide'",
        "hidden": "hidden must be a number, got ''",
        "hidden=63": "hidden=63 must be a multiple of num_heads",
    }.items():
        result = command(out, "--set", change)
        assert (result.exit_code, message in result.output) == (2, True), result.output
        assert not out.exists()
    out.write_text("mine")
    with pytest.raises(ValueError, match="out is not a folder"):
        run(out)
    result = command(out)
    assert (result.exit_code, "out is not a folder" in result.output) == (2, True), result.output
    assert contents(tmp_path) == {"out": b"mine"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden=30), "hidden=30 must be a multiple of num_heads=4"),
        (dict(num_kv_heads=3), "num_heads=4 must be a multiple of num_kv_heads=3"),
        (dict(vocab=256), "vocab must be a whole number of at least 257, got 256"),
        (dict(seq=65), "seq must be between 2 and max_positions=64, got 65"),
        (dict(steps=0), "steps must be a whole number of at least 1, got 0"),
        (dict(warmup=-1), "warmup must be a whole number of at least 0, got -1"),
        (dict(seed=2**64), r"seed must be between 0 and \d+, got 18446744073709551616"),
        (dict(hidden=36), "heads of even width, got 9"),
        (dict(lr=0), "lr must be greater than 0, got 0"),
        (dict(weight_decay=-1), "weight_decay must be at least 0, got -1"),
    ],
)
def test_impossible_recipes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_a_recipe_of_numpys_numbers_is_written_as_any_other():
    recipe = replace(TINY, steps=np.int64(3), lr=np.float64(0.5), seed=torch.tensor(7))
    assert json.loads(json.dumps(asdict(recipe))) == asdict(replace(TINY, steps=3, lr=0.5, seed=7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(micro_batch=0), "micro_batch must be a whole number of at least 1, got 0"),
        (dict(checkpoint_every=0), "checkpoint_every must be"),
        (dict(evaluate_every=0), "evaluate_every must be"),
        (dict(recipe=replace(TINY, vocab=5000)), r"the text yields only \d+ tokens, not vocab=5000"),
        (dict(recipe=replace(TINY, batch=1000)), "tokens are too few for one batch of batch=1000"),
        (dict(validation=[]), "nothing to score: no document has an unmasked token after its first"),
        (dict(validation=[""]), "nothing to score"),
        (dict(device="tpu"), "device must be one of 'cpu', 'cuda', got 'tpu'"),
        ({}, "batch=4 must be a multiple of the processes=3"),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing(tmp_path, monkeypatch, options, message):
    if "processes" in message:
        monkeypatch.setattr(accelerate.Accelerator, "num_processes", property(lambda self: 3))
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_last_step_is_always_scored_and_the_rate_is_the_recipes(tmp_path):
    run(tmp_path, evaluate_every=5)
    state = checkpoint(tmp_path)
    assert [row["step"] for row in state["log"]] == [5, 10, 12]
    rates = {group["lr"] for optimizer in optimizers(state) for group in optimizer["param_groups"]}
    assert rates == {TINY.lr_at(TINY.steps - 1)}


def test_a_short_run_warms_up_for_a_tenth_of_it():
    assert [Recipe(steps=50).lr_at(step) == Recipe().lr for step in range(7)] == [False] * 5 + [True, False]
    assert Recipe(steps=1).lr_at(0) == Recipe().lr


def test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay():
    model = build(TINY)
    groups = [group for optimizer in pretraining.optimizers(model, TINY) for group in optimizer.param_groups]
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, model.parameters()))
    decaying = {id(p) for g in groups for p in g["params"] if g["weight_decay"]}
    layers = {id(p) for p in model.model.layers.parameters() if p.ndim == 2}
    assert decaying == layers


def test_the_changes_that_the_help_shows_can_be_made():
    helps = {option.name: option.help for option in get_command(cli.app).commands["pretrain"].params}
    examples = re.findall(r"\w+=[\d.]*\d", helps["changes"])
    assert examples == ["seed=1", "lr=0.004"]
    assert [Recipe.changed([e]) for e in examples] == [Recipe(seed=1), Recipe(lr=0.004)]
    assert Recipe.changed(["steps=50"]) == replace(Recipe(), steps=50)
