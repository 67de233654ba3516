"""A training step's loss and gradients: autograd's engine beside the compiled graph, interpreted and as machine code.

Batches of 16, random weights and data; CPU milliseconds of the process in one thread. The ways take turns within a
round; medians, and the median of the rounds' ratios to ``eager``. ``error`` is the largest distance of a gradient
from autograd's, relative to autograd's largest. What is measured is the program, without the shape check before it.

* ``graphs``: ``eager`` is ``loss.backward()``'s work through ``torch.autograd.grad``; ``interpreter`` runs the loss
  graph node by node in Python; ``AOTInductor`` compiles it to a library, for which it needs g++. ``build_s`` is the
  CPU time of building, g++'s included, once for each device type; ``operators`` are the loss graph's.

Run: ``python -m benchmarks.autonomy.graphs``, about three minutes.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import record
from plpkg.autonomy.compile import three_graphs
from plpkg.autonomy.nets import MobileNet, WordLSTM

BATCH, VOCAB, WORDS, ROUNDS, ROUND_S = 16, 10_000, 12, 15, 0.05


def next_word(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def learners() -> dict:
    """Each learner's model, loss and example."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, BATCH, WORDS), generator=generator)
    y = torch.randint(10, (BATCH,), generator=generator)
    images = {size: torch.randn(BATCH, 1, size, size, generator=generator) for size in (8, 28)}
    torch.manual_seed(0)
    return {
        "LSTM, 10,000 words": (WordLSTM(VOCAB), next_word, (ids[0], ids[1])),
        "CNN, 8 x 8": (MobileNet(), cross_entropy, (images[8], y)),
        "CNN, 28 x 28": (MobileNet(), cross_entropy, (images[28], y)),
    }


def cpu_s() -> float:
    """CPU seconds of this process and of the compilers that it has waited for."""
    return sum(os.times()[:4])


def machine_code(program, folder: Path) -> Callable:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    return aoti_load_package(aoti_compile_and_package(program, package_path=str(folder / "loss.pt2")))


def milliseconds(function: Callable, calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        function()
    return 1e3 * (time.process_time() - began) / calls


def rows_of(name: str, trained: str, model: nn.Module, loss: Callable, example: tuple, folder: Path) -> list[dict]:
    last = list(model.modules())[-1]
    for p in model.parameters():
        p.requires_grad_(trained == "all")
    last.requires_grad_(True)
    leaves = [p for p in model.eval().parameters() if p.requires_grad]
    x, y = example

    def eager():
        value = loss(model(x), y)
        return value, torch.autograd.grad(value, leaves)

    began = cpu_s()
    graphs = three_graphs(model, loss, example)
    interpreter = graphs.programs["loss"].module()
    functions, built, why = {"eager": eager}, {"eager": 0.0, "interpreter": cpu_s() - began}, ""
    functions["interpreter"] = lambda: interpreter(graphs.parameters, x, y)
    began = cpu_s()
    try:
        library = machine_code(graphs.programs["loss"], folder)
        functions["AOTInductor"] = lambda: library(graphs.parameters, x, y)
    except Exception as error:  # a machine without g++, or what the compiler cannot do: the row says it
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    built["AOTInductor"] = cpu_s() - began
    calls = {way: max(1, int(1e3 * ROUND_S / milliseconds(each, 3))) for way, each in functions.items()}
    taken = {way: [] for way in functions}
    for _ in range(ROUNDS):
        for way, each in functions.items():
            taken[way].append(milliseconds(each, calls[way]))
    exact, size = eager()[1], max(g.abs().max() for g in eager()[1])
    row, rows = {"section": "graphs", "case": name, "trained": trained, "operators": graphs.rows()[1]["operators"]}, []
    for way in built:
        measured = dict(milliseconds=float("nan"), ratio=float("nan"), error=float("nan"))
        if way in functions:
            found = functions[way]()[1]
            found = found.values() if isinstance(found, dict) else found
            error = max((f - g).abs().max() for f, g in zip(found, exact, strict=True)) / size
            ratios = [a / b for a, b in zip(taken[way], taken["eager"], strict=True)]
            measured = dict(
                milliseconds=round(statistics.median(taken[way]), 4),
                ratio=round(statistics.median(ratios), 3),
                error=float(f"{error:.1e}"),
            )
        rows.append(
            row
            | {"what": way}
            | measured
            | {"build_s": round(built[way], 1), "why": "" if measured["ratio"] == measured["ratio"] else why}
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # every run compiles anew
        for name, (model, loss, example) in learners().items():
            for trained in ("head", "all"):
                rows += rows_of(name, trained, model, loss, example, Path(folder))
    record.write("autonomy.graphs", rows)


if __name__ == "__main__":
    main()
