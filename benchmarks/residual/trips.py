"""Tokens per second against the delay: each way of saving round trips, over the wire.

plpkg-small, personalised to each of nine writers (``benchmarks.residual.ways --adapters DIR`` has trained them), writes
on from a text of that writer's that it has not learnt, in two processes of one thread each, through a relay of
60/100 Mb/s. The ways take turns. Each row is one way at one RTT and one temperature, all writers together:

* ``tokens_per_s`` measured; ``computed``: the time at RTT 0 and the counted round trips, each of one RTT more.
* ``trips_per_token``, ``bytes_per_token``, ``tokens_per_pass``, ``accepted`` (of the guesses): counted.
* ``identical``: of so many ``texts`` those whose tokens are the same as the same adapter's without guesses.

At most six guesses travel at once; at RTT 0 also 3 and 10. A temperature of 1 is measured at 20 ms alone. 12 x 768
is a random model with a random M: only its time means anything, and it makes no guesses.

Run: ``python -m benchmarks.residual.trips DIR`` (about 20 minutes on two idle cores); with ``--still`` only RTT 0 is
measured once more, into what is recorded. What was recorded with a delay ran beside other benchmarks of a lower
priority, which computed while it waited. Not part of ``make bench``.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from peft import PeftModel, get_peft_model

from benchmarks import record
from benchmarks.residual.processes import MODELS
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone, random_backbone
from plpkg.catalog import Link
from plpkg.residual import CloudServer, DeviceClient, LadderConfig, PrivateLoraConfig
from plpkg.residual.wire.messages import Counter

GUESSES = 6
AT = (*((rtt_ms, 0.0, GUESSES) for rtt_ms in (0, 5, 20, 33)), (20, 1.0, GUESSES), *((0, 0.0, k) for k in (3, 10)))
"""RTT in milliseconds, temperature, and guesses at once."""
PROMPT, NEW = 32, 32
LARGE = "12 x 768"


@dataclass(frozen=True)
class Way:
    """An adapter of ``benchmarks.residual.ways``, how the model is cut, and who guesses."""

    adapter: str
    fold: bool = False
    draft: str | None = None


WAYS = {
    "plain": Way("all layers"),
    "lookup": Way("all layers", draft="lookup"),
    "lookup and public counts": Way("all layers", draft="public"),
    "the cloud's backbone guesses": Way("all layers", draft="backbone"),
    "last layer folded": Way("all layers", fold=True),
    "one layer late, folded": Way("one layer late", fold=True),
    "two layers, folded": Way("two layers", fold=True),
    "two layers, folded, public counts": Way("two layers", fold=True, draft="public"),
    "ladder": Way("ladder"),
    "ladder 512": Way("ladder 512"),
    "ladder, cloud ahead": Way("ladder", draft="backbone"),
    "ladder 512, cloud ahead": Way("ladder 512", draft="backbone"),
}

LARGE_WAYS = {
    "plain": (PrivateLoraConfig(r_c2d=48, r_d2c=48, target_modules=["down_proj"]), False),
    "two layers, folded": (
        PrivateLoraConfig(r_c2d=48, r_d2c=48, target_modules=["down_proj"], layers_to_transform=[0, 11]),
        True,
    ),
    "one layer late, folded": (
        PrivateLoraConfig(r_c2d=48, r_d2c=48, target_modules=["down_proj"], late=True),
        True,
    ),
    "ladder": (LadderConfig(r=96), False),
}


def model_of(case: str, adapter: str, folder: Path) -> PeftModel:
    """A writer's model with one of their adapters, or the large one with a random M."""
    torch.set_num_threads(1)
    if case != LARGE:
        return PeftModel.from_pretrained(load_backbone("plpkg-small")[0], folder / case / adapter).eval()
    model = get_peft_model(random_backbone("llama", **MODELS[LARGE]), LARGE_WAYS[adapter][0])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.01 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def cuts(cases: list[str]) -> list[tuple[str, str, bool]]:
    """Every case's adapters, and whether the last layer is folded."""
    small = dict.fromkeys((way.adapter, way.fold) for way in WAYS.values())
    large = [(name, fold) for name, (_, fold) in LARGE_WAYS.items()]
    return [(case, *cut) for case in cases for cut in (large if case == LARGE else small)]


def serve(folder: Path, cases: list[str]) -> None:
    """A process with a cloud for each of :func:`cuts`; prints their addresses."""
    with contextlib.ExitStack() as stack:
        clouds = [
            stack.enter_context(CloudServer(model_of(case, adapter, folder), fold=fold))
            for case, adapter, fold in cuts(cases)
        ]
        print(json.dumps([cloud.address for cloud in clouds]), flush=True)
        clouds[0].wait()


@contextlib.contextmanager
def clouds(folder: Path, cases: list[str]) -> Iterator[dict[tuple[str, str, bool], str]]:
    command = [sys.executable, "-m", "benchmarks.residual.trips", str(folder), "--serve", json.dumps(cases)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield dict(zip(cuts(cases), json.loads(process.stdout.readline()), strict=True))
    finally:
        process.kill()
        process.wait()


def beginning(case: str, tokenizer) -> torch.Tensor:
    """The first tokens of a writer's first test text that is long enough: ``(1, PROMPT)``."""
    for document in corpora.writer(case).split("test"):
        ids = tokenizer(tokenizer.bos_token + document.text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if ids.shape[1] >= PROMPT:
            return ids[:, :PROMPT]
    raise ValueError(f"{case} has no text of {PROMPT} tokens")


def write(client: DeviceClient, ids: torch.Tensor, **options) -> tuple[float, Counter, torch.Tensor]:
    """Seconds for :data:`NEW` tokens, what crossed meanwhile, and the text."""
    before, began = client.traffic, time.perf_counter()
    text = client.generate(ids, NEW, eos_token_id=-1, **options)
    return time.perf_counter() - began, client.traffic - before, text


def rows_of(name: str, jobs: dict[str, list[tuple]], at: Sequence[tuple[int, float, int]], tokenizer) -> list[dict]:
    """Measure ways in turn; ``jobs``: for each way what :func:`write` needs for each text."""
    measured: dict[tuple, list[tuple]] = {}
    for rtt_ms, temperature, guesses in at:
        link = Link(f"60/100 Mb/s, RTT {rtt_ms} ms", 60e6, 100e6, rtt_ms / 1e3)
        sampling = dict(do_sample=True, temperature=temperature) if temperature else {}
        for text, way in itertools.product(range(len(next(iter(jobs.values())))), jobs):
            address, model, ids, fold, draft = jobs[way][text]
            if guesses != GUESSES and draft is None:
                continue
            with DeviceClient(address, model, fold=fold, link=link) as client:
                client.generate(ids, 1, eos_token_id=-1, draft=draft, tokenizer=tokenizer)  # the connection, the counts
                generator = torch.Generator().manual_seed(text)
                options = dict(draft=draft, draft_tokens=guesses, tokenizer=tokenizer, generator=generator) | sampling
                measured.setdefault((way, rtt_ms, temperature, guesses), []).append(write(client, ids, **options))
    rows = []
    for (way, rtt_ms, temperature, guesses), runs in measured.items():
        seconds, traffic = sum(run[0] for run in runs), [run[1] for run in runs]
        total = {key: sum(vars(t)[key] for t in traffic) for key in vars(traffic[0])}
        still = sum(run[0] for run in measured.get((way, 0, temperature, guesses), [])) or None
        plain = measured.get((plain_of(way, jobs), rtt_ms, temperature, GUESSES), runs)
        same = sum(torch.equal(run[2], other[2]) for run, other in zip(runs, plain, strict=True))
        reference = sum(run[0] for run in measured["plain", rtt_ms, temperature, GUESSES])
        tokens, trips = total["tokens"], total["round_trips"]
        row = {
            "section": "speed", "case": name, "what": way, "rtt_ms": rtt_ms, "temperature": temperature,
            "adapter": WAYS[way].adapter, "draft_tokens": guesses if WAYS[way].draft else 0,
            "tokens_per_s": round(tokens / seconds, 2), "ratio": round(reference / seconds, 3),
            "computed": still and round(tokens / (still + trips * rtt_ms / 1e3), 2),
            "trips_per_token": round(trips / tokens, 3),
            "tokens_per_pass": round(tokens / (tokens - total["accepted_tokens"]), 3),
            "bytes_per_token": round((total["sent_bytes"] + total["received_bytes"]) / tokens),
            "up_bytes_per_token": round(total["sent_bytes"] / tokens),
            "rejected_per_token": round((total["drafted_tokens"] - total["accepted_tokens"]) / tokens, 2),
            "texts": len(runs),
            # who samples with random numbers that the cloud knows, samples other ones
            "identical": None if temperature and WAYS[way].draft == "backbone" else same,
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return rows


def plain_of(way: str, jobs: dict[str, list[tuple]]) -> str:
    """The way with the same adapter and no guesses."""
    adapters = {name: WAYS[name].adapter for name in jobs if name in WAYS}
    return next((name for name in adapters if adapters[name] == adapters.get(way) and not WAYS[name].draft), way)


def measure(folder: Path, writers: list[str], at: Sequence[tuple[int, float, int]]) -> list[dict]:
    tokenizer = load_backbone("plpkg-small")[1]
    with clouds(folder, writers) as addresses:
        adapters = dict.fromkeys(way.adapter for way in WAYS.values())
        models = {(case, name): model_of(case, name, folder) for case in writers for name in adapters}
        jobs = {
            name: [
                (addresses[case, way.adapter, way.fold], models[case, way.adapter], beginning(case, tokenizer),
                 way.fold, way.draft)
                for case in writers
            ]
            for name, way in WAYS.items()
        }  # fmt: skip
        rows = rows_of("plpkg-small", jobs, at, tokenizer)
    with clouds(folder, [LARGE]) as addresses:
        ids = torch.randint(1, 32_000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        jobs = {
            name: [(addresses[LARGE, name, fold], model_of(LARGE, name, folder), ids, fold, None)] * 2
            for name, (_, fold) in LARGE_WAYS.items()
        }
        rows += rows_of(LARGE, jobs, [a for a in at if not a[1]], tokenizer)
    return rows


def still_again(rows: list[dict]) -> None:
    """Put rows of RTT 0 in the place of the recorded ones, and compute the others from them."""
    recorded = catalog.measured("residual_trips").query("rtt_ms > 0")
    still = {(row["case"], row["what"], row["draft_tokens"]): 1 / row["tokens_per_s"] for row in rows}

    def computed(row: pd.Series) -> float | None:
        seconds = still[row["case"], row["what"], row["draft_tokens"]] + row["trips_per_token"] * row["rtt_ms"] / 1e3
        return None if row["temperature"] else round(1 / seconds, 2)

    record.write("residual.trips", rows, keep=recorded.assign(computed=recorded.apply(computed, axis=1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("adapters", type=Path, help="what benchmarks.residual.ways has saved")
    parser.add_argument("--writers", nargs="*", help="only these, and nothing is written")
    parser.add_argument("--still", action="store_true", help="only RTT 0, into what is recorded")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(options.adapters, json.loads(options.serve))
    elif options.still:
        still_again(measure(options.adapters, corpora.writers(), [at for at in AT if not at[0]]))
    elif options.writers:
        measure(options.adapters, options.writers, AT[::2])
    else:
        record.write("residual.trips", measure(options.adapters, corpora.writers(), AT))
