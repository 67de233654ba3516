"""What personalising brings: each private writer by each method, its speed, a changed backbone.

* quality: plpkg-small, personalised on a writer's training text, scored on the writer's test text. Every method takes
  the same steps; its learning rate was chosen on numpy's and seaborn's validation text. Two seeds, of the order of the
  text and of PrivateLoRA's random A and B.
  Phone only: a model that fits into the memory of PrivateLoRA's device part, trained here on the same public text, and
  plpkg-small rounded to 4 bit, both with LoRA. A method's tokens per second, and with them M_S, are those of how it
  runs without delay: PrivateLoRA's bases do not change them.
* speed: tokens per second of each way to run it, on links of 60/100 Mb/s, two processes, one thread each. This machine
  plays the phone as well: a phone would be slower. Weights rounded to 4 bit are multiplied in float32 here: no faster.
* migration: the backbone goes on learning, from public text and two writers'; what is done with each other writer's M.

Run: ``python -m benchmarks.residual.quality`` (about 45 minutes; the writers in processes of one thread each, on
two idle cores). Not part of ``make bench``.
"""

import argparse
import contextlib
import copy
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig, PeftModel

from benchmarks import record
from benchmarks.residual import processes
from benchmarks.residual.methods import (
    BATCH,
    SEQ,
    STEPS,
    Method,
    lora,
    low,
    personalise,
    prepared,
    test_text,
    token_accuracy,
)
from benchmarks.residual.migration import migrate
from plpkg import catalog, communication, corpora, throughput
from plpkg.backbones import load_backbone
from plpkg.catalog import Link, ModelShape
from plpkg.pretraining import Recipe, pretrain
from plpkg.residual import DeviceClient, PrivateLoraConfig
from plpkg.scoring import score

WRITERS = ("seaborn", "numpy", "sklearn")
READ_ON = ("torch", "pandas")  # whose text the changed backbone has read: nobody's private one there
NEIGHBOUR = "pandas"  # whose text the bases of "another writer" come from
SEEDS = (0, 1)
SMALL = Recipe(num_layers=2, hidden=192, num_heads=6, num_kv_heads=2, intermediate=512, batch=16, steps=400)
LINKS = [Link(f"60/100 Mb/s, RTT {ms} ms", 60e6, 100e6, ms / 1e3) for ms in (0, 5, 20)]


METHODS = {
    "none": Method(),
    "LoRA r=16": Method(lora(16), 5e-3),
    "PrivateLoRA r=4": Method(low(4), 2e-2),
    "PrivateLoRA r=16": Method(low(16), 2e-2),
    "PrivateLoRA r=64": Method(low(64), 5e-3),
    "PrivateLoRA r=16, SVD": Method(low(16, init="given"), 2e-2, "weights"),
    "PrivateLoRA r=16, gradient": Method(low(16, init="given"), 1e-2, "own"),
    "PrivateLoRA v r=48, gradient": Method(low(48, ["v_proj"], init="given"), 1e-2, "own"),
    "PrivateLoRA down r=48": Method(low(48, ["down_proj"]), 2e-2),
    "PrivateLoRA down r=48, gradient": Method(low(48, ["down_proj"], init="given"), 1e-2, "own"),
    "PrivateLoRA down r=48, other's gradient": Method(low(48, ["down_proj"], init="given"), 1e-2, "other"),
    "LoRA v r=2": Method(lora(2, ["v_proj"]), 1e-2),
    "LoRA down r=2": Method(lora(2, ["down_proj"]), 1e-2),
    "head": Method("head", 5e-4),
    "phone only, smaller, LoRA r=16": Method(lora(16), 5e-3, model="smaller"),
    "phone only, 4 bit, LoRA r=16": Method(lora(16), 5e-3, model="4 bit"),
}


def four_bit(model):
    """Every matrix rounded to 15 levels in groups of 32 with one scale each: 4.5 bits a weight with fp16 scales."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                groups = parameter.view(-1, 32)
                scale = groups.abs().amax(1, keepdim=True) / 7
                groups.copy_((groups / scale.clamp(min=1e-12)).round() * scale)
    return model


def bytes_per_token(method: Method, shape: ModelShape) -> float:
    """Both ways, 16 bit, word embedding and final hidden state included: the formulas of ``communication``."""
    if method.model != "plpkg-small" or method.config is None:
        return 0.0
    bits = communication.low_rank(shape, 1, adapted_layers=0).total_bits  # the end points
    if isinstance(method.config, PrivateLoraConfig):
        ranks = method.config.r_c2d + method.config.r_d2c
        bits += 16 * shape.num_layers * len(method.config.target_modules) * ranks
    elif isinstance(method.config, LoraConfig):
        q, k, v = shape.projection_dims
        widths = {
            3: shape.hidden + q + k + v,
            "v_proj": shape.hidden + v,
            "down_proj": shape.intermediate + shape.hidden,
        }
        targets = list(method.config.target_modules)
        bits += 16 * shape.num_layers * widths[3 if len(targets) == 3 else targets[0]]
    return bits / 8


def device_bytes(method: Method, model, shape: ModelShape) -> float:
    """Weights on the device: 16 bit, or 4.5 where rounded."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    if method.config is None:
        return 0.0  # the cloud alone
    if method.model == "4 bit":
        return (everything - trained) * 4.5 / 8 + 2 * trained
    return 2 * (everything if method.model == "smaller" else shape.embedding_parameters + trained)


def quality_rows(name: str, starts: dict, tokenizer, methods=tuple(METHODS)) -> list[dict]:
    """One writer, every method, every seed."""
    shape = ModelShape.from_config(starts["plpkg-small"].config, "plpkg-small")
    actual = communication.full_activations(shape, 3, endpoints=True, baseline="actual").total_bits / 8
    texts = {"own": corpora.writer(name).split("train"), "other": corpora.writer(NEIGHBOUR).split("train")}
    texts = {whose: corpora.encode(text, tokenizer) for whose, text in texts.items()}
    test = corpora.encode(test_text(name), tokenizer)
    rows, untuned = [], 0.0

    def batches(whose: str, seed: int):
        return corpora.batches(texts[whose], batch=BATCH, seq=SEQ, seed=seed)

    for label, seed in itertools.product(methods, SEEDS):
        method = METHODS[label]
        if method.config is None and seed:
            continue
        began = time.perf_counter()
        for_bases = batches(method.basis, 1000 + seed) if method.basis in texts else None
        model = prepared(method, starts[method.model], for_bases, seed)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if method.config is not None:
            personalise(model, batches("own", seed), method.lr)
        bits = score(model, tokenizer, test, seq=SEQ, stride=SEQ).bits_per_byte
        accuracy = token_accuracy(model, test)
        untuned = bits if method.config is None else untuned
        sent = bytes_per_token(method, shape)
        rows.append({
            "section": "quality", "case": name, "method": label, "order": seed,
            "bits_per_byte": round(bits, 4), "gain": round(untuned - bits, 4), "accuracy": round(accuracy, 3),
            "trained": trained, "lr": method.lr, "bytes_per_token": sent, "share_of_actual": round(sent / actual, 4),
            "device_mb": round(device_bytes(method, model, shape) / 1e6, 3),
        })  # fmt: skip
        print(f"{name}, {label}, {seed}: {bits:.4f} ({time.perf_counter() - began:.0f} s)", flush=True)
    return rows


def described(quality: pd.DataFrame) -> pd.DataFrame:
    """Rows of quality with each adapter's rank and the projections that it stands at."""
    configs = {name: m.config for name, m in METHODS.items() if isinstance(m.config, PrivateLoraConfig | LoraConfig)}
    ranks = {name: c.r_c2d if isinstance(c, PrivateLoraConfig) else c.r for name, c in configs.items()}
    targets = {name: " ".join(sorted(config.target_modules)) for name, config in configs.items()}
    return quality.assign(rank=quality["method"].map(ranks), targets=quality["method"].map(targets))


def rated(quality: pd.DataFrame, speed: pd.DataFrame) -> pd.DataFrame:
    """Rows of quality with the tokens per second of how each method runs, and its M_S."""
    at = speed[speed["case"].isin(["one process", LINKS[0].name])].set_index("method")["tokens_per_s"]
    untuned = quality[quality["method"] == "none"].set_index("case")["accuracy"]

    def rates(row: pd.Series) -> pd.Series:
        runs_as = [name for name in at.index if f"{row['method']}, ".startswith(f"{name}, ")]
        if not runs_as:
            return pd.Series({"tokens_per_s": None, "m_s": None})
        m_s = throughput.score(at[runs_as[0]], at["none"], row["accuracy"], untuned[row["case"]])
        return pd.Series({"tokens_per_s": at[runs_as[0]], "m_s": round(m_s, 3)})

    return quality.assign(**quality.apply(rates, axis=1))


def generate_speed(generate, ids: torch.Tensor, tokens: int = 32) -> float:
    began = time.perf_counter()
    generate(ids, tokens)
    return tokens / (time.perf_counter() - began)


def speed_rows(smaller: Path) -> list[dict]:
    """Median of 5 interleaved runs."""
    torch.set_num_threads(1)
    whole = load_backbone("plpkg-small")[0]
    small = load_backbone(smaller)[0]
    ids = torch.randint(1, 8000, (1, 16), generator=torch.Generator().manual_seed(0))

    def alone(model):
        return lambda ids, n: model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)

    def over(device):
        return lambda ids, n: device.generate(ids, n, eos_token_id=-1)

    settings = {
        "LoRA r=16": dict(rank=0), "PrivateLoRA r=16": dict(rank=16), "PrivateLoRA r=64": dict(rank=64),
        "PrivateLoRA v r=48": dict(rank=48, targets=["v_proj"]),
        "PrivateLoRA down r=48": dict(rank=48, targets=["down_proj"]),
    }  # fmt: skip
    rows = []
    with contextlib.ExitStack() as stack:
        phone = {"none": whole, "phone only, smaller": small, "phone only, 4 bit": four_bit(copy.deepcopy(whole))}
        generators = {("one process", label): alone(model) for label, model in phone.items()}
        for label, options in settings.items():
            address = stack.enter_context(processes.cloud("plpkg-small", **options))
            for link in LINKS:
                model = processes.build("plpkg-small", **options)
                device = stack.enter_context(DeviceClient(address, model, link=link))
                generators[link.name, label] = over(device)
        for generate in generators.values():
            generate(ids, 4)
        runs = {key: [] for key in generators}
        for _ in range(5):
            for key, generate in generators.items():
                runs[key].append(generate_speed(generate, ids))
        for (case, label), values in runs.items():
            speed = round(statistics.median(values), 2)
            rows.append({"section": "speed", "case": case, "method": label, "tokens_per_s": speed})
    torch.set_num_threads(1)
    return rows


def updated_backbone(start, tokenizer):
    """The backbone after it has read on: public text, and that of the writers in READ_ON."""
    updated = copy.deepcopy(start).requires_grad_(True)
    new = [document for name in READ_ON for document in corpora.writer(name).split("train")]
    text = corpora.encode([*corpora.public("train")[::8], *new], tokenizer)
    personalise(updated, corpora.batches(text, batch=BATCH, seq=SEQ, seed=7), 5e-4, steps=200)
    return updated.requires_grad_(False)


def on_backbone(adapted: PeftModel, backbone) -> PeftModel:
    """A copy of an adapted model with another backbone's weights."""
    model, weights = copy.deepcopy(adapted), backbone.state_dict()
    for key, tensor in model.get_base_model().state_dict().items():
        if (name := key.replace(".base_layer", "")) in weights:
            tensor.copy_(weights[name])
    return model


def migration_rows(name: str, start, updated, tokenizer) -> list[dict]:
    method = METHODS["PrivateLoRA down r=48, gradient"]
    text = corpora.encode(corpora.writer(name).split("train"), tokenizer)
    public = corpora.encode(corpora.public("train")[1::50], tokenizer)
    test, rows = corpora.encode(test_text(name), tokenizer), []

    def batches(seed: int, text=text):
        return corpora.batches(text, batch=BATCH, seq=SEQ, seed=seed)

    def measure(what: str, model, change: Callable = lambda model: None) -> None:
        began = time.process_time()
        change(model)
        seconds = time.process_time() - began
        bits = score(model, tokenizer, test, seq=SEQ, stride=SEQ).bits_per_byte
        row = {"bits_per_byte": round(bits, 4), "cpu_s": round(seconds, 1)}
        rows.append({"section": "migration", "case": name, "method": what} | row)
        print(rows[-1], flush=True)

    old = prepared(method, start, batches(1000))
    fresh = on_backbone(old, updated)
    personalise(old, batches(0), method.lr)
    kept = on_backbone(old, updated)
    measure("old backbone, no M", start)
    measure("old backbone, its M", old)
    measure("updated backbone, no M", updated)
    measure("M kept", kept)
    anchors, solved = list(islice(batches(5, public), 8)), copy.deepcopy(kept)
    measure("closed form, public text", solved, lambda model: migrate(old, model, anchors))
    for steps in (15, STEPS):
        for what, begin, lr in (("M kept, then", kept, method.lr / 2), ("trained anew,", fresh, method.lr)):
            measure(
                f"{what} {steps} steps",
                copy.deepcopy(begin),
                lambda model, lr=lr, steps=steps: personalise(model, batches(3), lr, steps),
            )
    return rows


def all_migrations(full, tokenizer) -> list[dict]:
    """Every writer whose text the changed backbone has not read, in a process."""
    updated = updated_backbone(full, tokenizer)
    private = [name for name in corpora.writers() if name not in READ_ON]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        jobs = [pool.submit(migration_rows, name, full, updated, tokenizer) for name in private]
        return [distance(full, updated), *(row for job in jobs for row in job.result())]


def distance(start, updated) -> dict:
    """How far the weights have moved, relative to their norm."""
    moved = sum((a - b).square().sum() for a, b in zip(start.parameters(), updated.parameters(), strict=True))
    share = (moved / sum(p.square().sum() for p in start.parameters())).sqrt().item()
    return {
        "section": "migration",
        "case": "the weights",
        "method": "moved by, of their norm",
        "value": round(share, 4),
    }


def all_quality(starts: dict, tokenizer, methods=tuple(METHODS)) -> pd.DataFrame:
    """Every writer in a process."""
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, alone, torch.set_num_threads, (1,)) as pool:
        jobs = [pool.submit(quality_rows, name, starts, tokenizer, methods) for name in WRITERS]
        return pd.DataFrame([row for job in jobs for row in job.result()])


def again(methods: list[str]) -> None:
    """Measure some methods once more and put their rows in the place of the recorded ones."""
    recorded = catalog.measured("residual_quality")
    full, tokenizer = load_backbone("plpkg-small")
    rows = all_quality({"plpkg-small": full.requires_grad_(False)}, tokenizer, ["none", *methods])
    rows = rated(described(rows), recorded.query("section == 'speed'")).query("method in @methods")
    replaced = (recorded["section"] == "quality") & recorded["method"].isin(methods)
    record.write("residual.quality", rows.to_dict("records"), keep=described(recorded[~replaced]))


def speed_again(smaller: Path) -> None:
    """Measure the speeds once more, and put them, with the M_S that follow, in the place of the recorded ones."""
    recorded = catalog.measured("residual_quality")
    rows = speed_rows(smaller)
    kept = recorded[recorded["section"] != "speed"]
    rates = rated(kept[kept["section"] == "quality"], pd.DataFrame(rows))[["tokens_per_s", "m_s"]]
    record.write("residual.quality", rows, keep=kept.assign(**rates))


def smaller_model(folder: Path) -> Path:
    """The phone's own model: as large as PrivateLoRA's part of plpkg-small, from the same public text."""
    pretrain(SMALL, folder, device="cpu", bf16=False, micro_batch=4, evaluate_every=SMALL.steps)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--smaller", type=Path, help="a folder for the smaller model; kept, and used if it is there")
    parser.add_argument("--speed", action="store_true", help="only the speeds, into what is recorded")
    parser.add_argument("--migration", action="store_true", help="only the changed backbone, into what is recorded")
    parser.add_argument("--again", metavar="METHOD", nargs="*", help="only the quality of these, into what is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.again:
        again(options.again)
        raise SystemExit
    if options.migration:
        model, tokenizer = load_backbone("plpkg-small")
        kept = catalog.measured("residual_quality").query("section != 'migration'")
        record.write("residual.quality", all_migrations(model.requires_grad_(False), tokenizer), keep=kept)
        raise SystemExit
    with tempfile.TemporaryDirectory() as folder:
        small = smaller_model(options.smaller or Path(folder, "smaller"))
        if options.speed:
            speed_again(small)
            raise SystemExit
        full, tokenizer = load_backbone("plpkg-small")
        full.requires_grad_(False)
        starts = {
            "plpkg-small": full,
            "4 bit": four_bit(copy.deepcopy(full)),
            "smaller": load_backbone(small)[0].requires_grad_(False),
        }
        if load_backbone(small)[1].get_vocab() != tokenizer.get_vocab():
            raise AssertionError("the smaller model has another tokenizer")
        speed = speed_rows(small)
        rows = [*speed, *all_migrations(full, tokenizer)]
        rows += rated(described(all_quality(starts, tokenizer)), pd.DataFrame(speed)).to_dict("records")
    record.write("residual.quality", rows)
