"""Clipping each example's gradient: what it costs beside plain SGD and beside Opacus.

* cost: a decoder (width 256, 4 layers, 128 tokens, batch 16): CPU time, operations and peak of a step's gradients, for
  SGD, ``torch.func``'s vmap(grad), Opacus's hooks, fast and ghost modes, and every execution here.
* lora: the same with LoRA r=8 on all linear layers (width 256, 256 tokens, batch 8), backbone frozen.
* long: one width, longer and longer sequences: where ghost clipping's T² shows.
* step: of the same two, a whole step of a training, its optimizer (SGD) and noise included.
* short: of LoRA on one layer and two texts of 32 tokens, where Python takes more time than matrices.
* guard: what the guard of a private training takes in each step, when it looks at rows, when it makes a step again, and
  on average.

Times are CPU seconds of one thread, medians of interleaved runs, every ratio against SGD of the same round.
The C library is told to keep memory that is freed, as CUDA's allocator does; ``--default-malloc`` leaves that out, and
names its sections so: then each large tensor costs page faults, most where most is kept.

Run: ``python -m benchmarks.clipping.costs`` (about 10 minutes on an idle core).
"""

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from operator import truediv
from unittest import mock

import pandas as pd
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import record
from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.guard import mixing
from plpkg.clipping.hooks import recorder
from plpkg.clipping.training.private import Private
from plpkg.memory import MIB, MemoryTimeline

MAX_GRAD_NORM = 0.1
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
VOCAB = 2000
REPEATS = 9


class Block(nn.Module):
    """A pre-norm transformer layer of modules that Opacus has rules for as well."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Decoder(nn.Module):
    """A causal language model; gives the logits of the next tokens, ``(batch, vocab, seq - 1)``."""

    def __init__(self, hidden: int, num_layers: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).repeat(len(ids), 1)  # Opacus cannot take one row for all
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))[:, :-1].mT


def decoder(hidden: int, num_layers: int, seq: int, *, lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(hidden, num_layers, seq)
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q", "k", "v", "o", "up", "down"]))
    return model.train()


def losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids), ids[:, 1:], reduction="none").mean(1)


def sgd(model: nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    def step():
        losses(model, ids).mean().backward()
        for p in model.parameters():
            p.grad = None

    return step


def whole(model: nn.Module, ids: torch.Tensor, **private) -> Callable[[], object]:
    """A training's step; of a private one with ``private``, what :func:`make_private` takes."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if private:
        shape = dict(max_grad_norm=MAX_GRAD_NORM, sample_rate=0.01, batch_size=len(ids))
        training = make_private(model, optimizer, None, losses, **shape, **private)
        return lambda: training.step([ids])
    criterion = nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad()
        criterion(model(ids), ids[:, 1:]).backward()
        optimizer.step()

    return step


def vmapped(model: nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    """Per-sample gradients by torch.func, clipped and added up: all that a reader would have to write."""
    learning = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters, example):
        logits = torch.func.functional_call(model, parameters, (example[None],))
        return nn.functional.cross_entropy(logits, example[None, 1:])

    def step():
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(learning, ids)
        norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
        factors = (MAX_GRAD_NORM / norms).clamp(max=1)
        return {name: torch.tensordot(factors, g, dims=1) for name, g in gradients.items()}

    return step


def opacus(model: nn.Module, ids: torch.Tensor, execution: str) -> Callable[[], object]:
    """A step's gradients in Opacus, up to the noise, which is not taken."""
    model = copy.deepcopy(model)
    options = dict(noise_multiplier=0.0, max_grad_norm=MAX_GRAD_NORM, expected_batch_size=len(ids))
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    criterion = nn.CrossEntropyLoss()
    if execution == "hooks":
        model, optimizer = GradSampleModule(model), DPOptimizer(inner, **options)
    else:
        ghost = execution == "ghost"
        model = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM, use_ghost_clipping=ghost)
        optimizer = DPOptimizerFastGradientClipping(inner, **options)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)

    def step():
        optimizer.zero_grad()
        logits, targets = model(ids).mT.flatten(0, 1), ids[:, 1:].flatten()
        shape = {} if execution == "hooks" else {"shape": (len(ids), ids.shape[1] - 1)}
        loss = criterion(logits, targets, **shape)
        loss.backward()
        if execution == "hooks":
            optimizer.clip_and_accumulate()
        else:
            optimizer.accumulate()
        for p in optimizer.params:
            p.grad = p.summed_grad = p.grad_sample = None

    return step


def ours(model: nn.Module, ids: torch.Tensor, execution) -> Callable[[], object]:
    return lambda: clipped_gradients(model, losses, ids, MAX_GRAD_NORM, execution)


def peak(model: nn.Module, step: Callable[[], object]) -> int:
    with MemoryTimeline(label_saved=False) as timeline:
        timeline.track(model)
        step()
    return timeline.peak_bytes


def flops(step: Callable[[], object]) -> int:
    """Without what the guard looks at in some of the steps."""
    counts = []
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            step()
        counts.append(counter.get_total_flops())
    return min(counts)


def cpu_seconds(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Of each step in each round, in another order every round."""
    for step in steps.values():
        step()
    seconds = {name: [] for name in steps}
    for turn in range(repeats):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(0))


def compared(section: str, case: str, model: nn.Module, ids: torch.Tensor, *, peers: bool, repeats: int) -> list[dict]:
    steps = {"SGD": sgd(model, ids)}
    if peers:
        steps["vmap(grad)"] = vmapped(model, ids)
        steps |= {f"Opacus, {execution}": opacus(model, ids, execution) for execution in ("hooks", "fast", "ghost")}
    steps |= {name: ours(model, ids, name) for name in EXECUTIONS}
    seconds = cpu_seconds(steps, repeats)
    base_flops, base_peak = flops(steps["SGD"]), peak(model, steps["SGD"])
    rows = []
    for name, step in steps.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["SGD"], strict=True))
        operations = flops(step)
        # Opacus's steps own a copy of the model, which is theirs to count.
        top = peak(model, step) if not name.startswith("Opacus") else opacus_peak(model, ids, name)
        rows.append({
            "section": section, "case": case, "what": name, "cpu_ms": round(1e3 * statistics.median(seconds[name]), 1),
            "ratio": round(ratio, 3), "gflop": round(operations / 1e9, 3),
            "flop_ratio": round(operations / base_flops, 3), "peak_mib": round(top / MIB, 1),
            "peak_ratio": round(top / base_peak, 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def opacus_peak(model: nn.Module, ids: torch.Tensor, name: str) -> int:
    twin = copy.deepcopy(model)
    step = opacus(twin, ids, name.split(", ")[1])
    step()
    with MemoryTimeline(label_saved=False) as timeline:
        timeline.track(twin)  # as large as the copy that steps
        step()
    return timeline.peak_bytes


CASES = {
    "decoder, width 256, 4 layers, T=128, B=16": lambda: (decoder(256, 4, 128), tokens(16, 128)),
    "LoRA r=8, width 256, 4 layers, T=256, B=8": lambda: (decoder(256, 4, 256, lora=True), tokens(8, 256)),
}


def timed(section: str, case: str, what: str, seconds: list[float], base: list[float]) -> dict:
    ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
    milliseconds = round(1e3 * statistics.median(seconds), 1)
    row = {"section": section, "case": case, "what": what, "cpu_ms": milliseconds, "ratio": round(ratio, 3)}
    print(row, flush=True)
    return row


def rows_of_step(repeats: int) -> list[dict]:
    rows = []
    for case, make in CASES.items():
        model, ids = make()
        steps = {
            "plain": whole(model, ids),
            "private, without noise": whole(model, ids, noise_multiplier=0.0, seed=0),
            "private": whole(model, ids, noise_multiplier=1.0, seed=0),
            "private, secure": whole(model, ids, noise_multiplier=1.0, secure=True),
        }
        for step in steps.values():
            for _ in range(mixing.FIRST):
                step()
        seconds = cpu_seconds(steps, repeats)
        rows += [timed("step", case, name, seconds[name], seconds["plain"]) for name in steps]
    return rows


def rows_of_guard(repeats: int) -> list[dict]:
    """With a look in each step, and in none; what is looked at in every step is timed where it is called.

    After the first three steps, at shapes that are known. The mean is over many steps, of which one in fifty looks at
    rows, and one in a hundred is made again.
    """
    rows, spent = [], [0.0]
    rare = {name: getattr(mixing, name) for name in ("SELDOM", "REPLAYED")}

    def timing(function: Callable) -> Callable:
        def timed(*args, **kwargs):
            begun = time.process_time()
            try:
                found = function(*args, **kwargs)
                return list(found) if isinstance(found, Iterator) else found  # a graph's nodes, found as they are read
            finally:
                spent[0] += time.process_time() - begun

        return timed

    checks = ((mixing.Guard, "_judge"), (mixing.Guard, "is_new"), (mixing, "state"))
    checks += ((recorder, "behind"), (Private, "_check"))
    for case, make in CASES.items():
        model, ids = make()
        step = whole(model, ids, noise_multiplier=1.0, seed=0)

        def every(look: str = "", step=step) -> Callable[[], object]:
            def steps():
                for name in rare:
                    setattr(mixing, name, 1 if name == look else 10**9)
                step()

            return steps

        for _ in range(mixing.FIRST):
            step()
        seconds = cpu_seconds({"never": every()} | {name: every(name) for name in rare}, repeats)
        with contextlib.ExitStack() as stack:
            for owner, name in checks:
                stack.enter_context(mock.patch.object(owner, name, timing(getattr(owner, name))))
            spent[0] = 0.0
            for _ in range(repeats):
                every()()
        each = [spent[0] / repeats] * repeats
        looks, again = ([a - b for a, b in zip(seconds[name], seconds["never"], strict=True)] for name in rare)
        once = rare.values()
        mean = [sum(map(truediv, (*costs, each[0]), (*once, 1))) for costs in zip(looks, again, strict=True)]
        whats = {"in each step": each, "a look at rows": looks, "a step made again": again, "mean of a step": mean}
        rows += [timed("guard", case, what, some, seconds["never"]) for what, some in whats.items()]
    for name, value in rare.items():
        setattr(mixing, name, value)
    return rows


def rows_of_short(repeats: int) -> list[dict]:
    case = "LoRA r=8, width 256, 1 layer, T=32, B=2"
    return compared("short", case, decoder(256, 1, 32, lora=True), tokens(2, 32), peers=True, repeats=10 * repeats)


def rows_of_cost(repeats: int) -> list[dict]:
    case = next(iter(CASES))
    return compared("cost", case, *CASES[case](), peers=True, repeats=repeats)


def rows_of_lora(repeats: int) -> list[dict]:
    case = list(CASES)[1]
    return compared("lora", case, *CASES[case](), peers=True, repeats=repeats)


def rows_of_long(repeats: int) -> list[dict]:
    rows = []
    for seq, batch in ((128, 16), (512, 4), (1024, 2)):
        case = f"decoder, width 128, 2 layers, T={seq}, B={batch}"
        rows += compared("long", case, decoder(128, 2, seq), tokens(batch, seq), peers=True, repeats=repeats)
    return rows


SECTIONS = {
    "cost": rows_of_cost,
    "lora": rows_of_lora,
    "step": rows_of_step,
    "short": rows_of_short,
    "guard": rows_of_guard,
    "long": rows_of_long,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; all without")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--default-malloc", action="store_true")
    arguments = parser.parse_args()
    if not arguments.default_malloc and not KEEP_FREED.items() <= os.environ.items():
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.clipping.costs", *sys.argv[1:]], os.environ | KEEP_FREED
        )
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus, whose inputs need no gradient
    chosen = arguments.sections or list(SECTIONS)
    rows = [row for name in chosen for row in SECTIONS[name](arguments.repeats)]
    if arguments.default_malloc:
        rows = [row | {"section": f"{row['section']}, default malloc"} for row in rows]
    recorded, keep = record.DATA / "clipping_costs.csv", None
    if (arguments.sections or arguments.default_malloc) and recorded.exists():
        old = pd.read_csv(recorded)
        keep = old[~old["section"].isin({row["section"] for row in rows})]
    record.write("clipping.costs", rows, keep=keep)


if __name__ == "__main__":
    main()
