"""Tokens per second against the delay: each scheme of saving round trips, over the wire.

plpkg-small, personalised to each of nine writers (``benchmarks.residual.adapters --adapters DIR`` has trained them),
writes on from a text of that writer's that it has not learnt, in two processes of one thread each, over a link of
60/100 Mb/s. The schemes take turns. Each row is one scheme at one RTT and one temperature, all writers together:

* ``tokens_per_s`` measured; ``computed``: the time at RTT 0 and the counted round trips, each of one RTT more.
* ``trips_per_token``, ``tokens_per_pass``, ``rejected_per_token`` (of the guesses): counted. ``bytes_per_token`` and
  ``up_bytes_per_token``: counted, without those of the prompt but for its last token (:func:`prompt_bytes`), so that
  they do not depend on its length.
* ``device_parameters``: weights on the device, embedding and LM head among them.
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
from plpkg.residual import CloudServer, DeviceClient, DevicePart, LadderConfig, PrivateLoraConfig
from plpkg.residual.cost import device_cost
from plpkg.residual.wire.messages import Counter

GUESSES = 6
AT = (*((rtt_ms, 0.0, GUESSES) for rtt_ms in (0, 5, 20, 33)), (20, 1.0, GUESSES), *((0, 0.0, k) for k in (3, 10)))
"""RTT in milliseconds, temperature, and guesses at once."""
PROMPT, NEW = 32, 32
LARGE = "12 x 768"


@dataclass(frozen=True)
class Scheme:
    """An adapter of ``benchmarks.residual.adapters``, how the model is cut, and who guesses."""

    adapter: str
    fold: bool = False
    draft: str | None = None


SCHEMES = {
    "plain": Scheme("all layers"),
    "lookup": Scheme("all layers", draft="lookup"),
    "lookup and public counts": Scheme("all layers", draft="public"),
    "last layer folded": Scheme("all layers", fold=True),
    "one layer late, folded": Scheme("one layer late", fold=True),
    "two layers, folded": Scheme("two layers", fold=True),
    "two layers, folded, public counts": Scheme("two layers", fold=True, draft="public"),
    "ladder": Scheme("ladder"),
    "ladder 512": Scheme("ladder 512"),
}

LARGE_SCHEMES = {
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
    model = get_peft_model(random_backbone("llama", **MODELS[LARGE]), LARGE_SCHEMES[adapter][0])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.01 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def cuts(cases: list[str]) -> list[tuple[str, str, bool]]:
    """Every case's adapters, and whether the last layer is folded."""
    small = dict.fromkeys((scheme.adapter, scheme.fold) for scheme in SCHEMES.values())
    large = [(name, fold) for name, (_, fold) in LARGE_SCHEMES.items()]
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


def prompt_bytes(part: DevicePart, length: int = PROMPT) -> tuple[float, float]:
    """Up and down for a prompt, but for its last token: no final hidden state comes down for the others."""
    one, others = device_cost(part), length - 1
    return others * one.up_bytes_per_token, others * (one.down_bytes_per_token - 2 * part.width)


def rows_of(name: str, jobs: dict[str, list[tuple]], at: Sequence[tuple[int, float, int]], tokenizer) -> list[dict]:
    """Measure schemes in turn; ``jobs``: for each scheme what :func:`write` needs for each text."""
    measured: dict[tuple, list[tuple]] = {}
    for rtt_ms, temperature, guesses in at:
        link = Link(f"60/100 Mb/s, RTT {rtt_ms} ms", 60e6, 100e6, rtt_ms / 1e3)
        sampling = dict(do_sample=True, temperature=temperature) if temperature else {}
        for text, scheme in itertools.product(range(len(next(iter(jobs.values())))), jobs):
            address, model, ids, fold, draft = jobs[scheme][text]
            if guesses != GUESSES and draft is None:
                continue
            with DeviceClient(address, model, fold=fold, link=link) as client:
                client.generate(ids, 1, eos_token_id=-1, draft=draft, tokenizer=tokenizer)  # the connection, the counts
                generator = torch.Generator().manual_seed(text)
                options = dict(draft=draft, draft_tokens=guesses, tokenizer=tokenizer, generator=generator) | sampling
                run = (*write(client, ids, **options), *prompt_bytes(client.part), device_cost(client.part).parameters)
                measured.setdefault((scheme, rtt_ms, temperature, guesses), []).append(run)
    rows = []
    for (scheme, rtt_ms, temperature, guesses), runs in measured.items():
        seconds, traffic = sum(run[0] for run in runs), [run[1] for run in runs]
        total = {key: sum(vars(t)[key] for t in traffic) for key in traffic[0].rows()[0]}
        up, down = total["sent_bytes"] - sum(r[3] for r in runs), total["received_bytes"] - sum(r[4] for r in runs)
        still = sum(run[0] for run in measured.get((scheme, 0, temperature, guesses), [])) or None
        plain = measured.get((plain_of(scheme, jobs), rtt_ms, temperature, GUESSES), runs)
        same = sum(torch.equal(run[2], other[2]) for run, other in zip(runs, plain, strict=True))
        reference = sum(run[0] for run in measured["plain", rtt_ms, temperature, GUESSES])
        tokens, trips = total["tokens"], total["round_trips"]
        row = {
            "section": "speed", "case": name, "what": scheme, "rtt_ms": rtt_ms, "temperature": temperature,
            "adapter": SCHEMES[scheme].adapter, "draft_tokens": guesses if SCHEMES[scheme].draft else 0,
            "tokens_per_s": round(tokens / seconds, 2), "ratio": round(reference / seconds, 3),
            "computed": still and round(tokens / (still + trips * rtt_ms / 1e3), 2),
            "trips_per_token": round(trips / tokens, 3),
            "tokens_per_pass": round(tokens / (tokens - total["accepted_tokens"]), 3),
            "bytes_per_token": round((up + down) / tokens), "up_bytes_per_token": round(up / tokens),
            "device_parameters": runs[0][5],
            "rejected_per_token": round((total["drafted_tokens"] - total["accepted_tokens"]) / tokens, 2),
            "texts": len(runs), "identical": same,
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return rows


def plain_of(scheme: str, jobs: dict[str, list[tuple]]) -> str:
    """The scheme with the same adapter and no guesses."""
    adapters = {name: SCHEMES[name].adapter for name in jobs if name in SCHEMES}
    return next(
        (name for name in adapters if adapters[name] == adapters.get(scheme) and not SCHEMES[name].draft), scheme
    )


def measure(folder: Path, writers: list[str], at: Sequence[tuple[int, float, int]]) -> list[dict]:
    tokenizer = load_backbone("plpkg-small")[1]
    with clouds(folder, writers) as addresses:
        adapters = dict.fromkeys(scheme.adapter for scheme in SCHEMES.values())
        models = {(case, name): model_of(case, name, folder) for case in writers for name in adapters}
        jobs = {
            name: [
                (addresses[case, scheme.adapter, scheme.fold], models[case, scheme.adapter], beginning(case, tokenizer),
                 scheme.fold, scheme.draft)
                for case in writers
            ]
            for name, scheme in SCHEMES.items()
        }  # fmt: skip
        rows = rows_of("plpkg-small", jobs, at, tokenizer)
    with clouds(folder, [LARGE]) as addresses:
        ids = torch.randint(1, 32_000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        jobs = {
            name: [(addresses[LARGE, name, fold], model_of(LARGE, name, folder), ids, fold, None)] * 2
            for name, (_, fold) in LARGE_SCHEMES.items()
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
    parser.add_argument("adapters", type=Path, help="what benchmarks.residual.adapters has saved")
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
