"""One layer's adapters for a batch of 32 tokens: the package's product beside every other way to write it.

Microseconds in one thread; each way takes turns within a round, medians. ``error`` is the largest distance from
float64's result, relative to its largest value.

* ``operators``: ``sgmv`` is the package's; ``loop`` multiplies for each segment, ``PEFT`` gathers for each adapter;
  ``gather-BMM`` copies each token its own factors (vLLM's CPU path is of this kind); ``dense`` computes every adapter
  for every token and masks; ``grouped`` is ``torch.nn.functional.grouped_mm``, whose rows after the last group are
  uninitialised and are left out; ``base`` is the layer's own product.

Run: ``python -m benchmarks.serving.operators``, a minute.
"""

import statistics
import time

import torch
from torch.nn.functional import grouped_mm

from benchmarks import record
from plpkg.serving import popularity
from plpkg.serving.segments import Segments, add_sgmv

TOKENS, ROUNDS, CALLS = 32, 15, 20
SHAPES = ((576, 16), (2048, 16), (2048, 64))


def ways(x, weight, downs, ups, chosen: list[int]):
    """Each way's function; the factors are scaled already."""
    index, count = torch.tensor(chosen), len(downs)
    ends = [chosen.index(k) + chosen.count(k) for k in range(count)]
    segments = Segments(zip([0, *ends[:-1]], ends, range(count), strict=True))
    scales, offsets = torch.ones(count, dtype=x.dtype), torch.tensor(ends, dtype=torch.int32)
    mask = torch.nn.functional.one_hot(index, count).to(x.dtype)  # (tokens, adapters)

    def zeros():
        return torch.zeros(TOKENS, ups.shape[1], dtype=x.dtype)

    def ours():
        y = zeros()
        add_sgmv(y, x, downs, ups, scales, segments)
        return y

    def loop():
        y = zeros()
        for start, stop, k in segments:
            y[start:stop].addmm_(x[start:stop] @ downs[k].T, ups[k].T)
        return y

    def peft():
        y = zeros()
        for k in range(count):
            rows = [i for i, c in enumerate(chosen) if c == k]
            y[rows] += x[rows] @ downs[k].T @ ups[k].T
        return y

    def gathered():
        v = torch.bmm(downs[index], x[:, :, None])  # (tokens, rank, 1)
        return torch.bmm(ups[index], v)[:, :, 0]

    def dense():
        v = torch.einsum("th,arh->tar", x, downs) * mask[:, :, None]
        return torch.einsum("tar,aor->to", v, ups)

    def grouped():
        return grouped_mm(grouped_mm(x, downs.mT, offs=offsets), ups.mT, offs=offsets)

    return {"sgmv": ours, "loop": loop, "PEFT": peft, "gather-BMM": gathered, "dense": dense, "grouped": grouped,
            "base": lambda: x @ weight.T}  # fmt: skip


def rows_of(hidden: int, rank: int, kind: str) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    chosen = popularity.adapters(kind, TOKENS)
    count = len(set(chosen))
    sizes = dict(x=(TOKENS, hidden), weight=(hidden, hidden), downs=(count, rank, hidden), ups=(count, hidden, rank))
    tensors = {name: torch.randn(*size, generator=generator) / size[-1] ** 0.5 for name, size in sizes.items()}
    exact = ways(**{name: t.double() for name, t in tensors.items()}, chosen=chosen)["gather-BMM"]()
    functions, seconds = ways(**tensors, chosen=chosen), {}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            began = time.perf_counter()
            for _ in range(CALLS):
                function()
            seconds.setdefault(name, []).append((time.perf_counter() - began) / CALLS)
    rows = []
    for name, function in functions.items():
        error = (function().double() - exact).abs().max() / exact.abs().max() if name != "base" else float("nan")
        pairs = zip(seconds[name], seconds["sgmv"], strict=True)
        rows.append({
            "section": "operators", "case": f"{hidden} wide, rank {rank}", "popularity": kind, "adapters": count,
            "what": name, "microseconds": round(1e6 * statistics.median(seconds[name]), 1),
            "ratio": round(statistics.median(a / b for a, b in pairs), 2), "error": float(f"{error:.1e}"),
        })  # fmt: skip
    return rows


def main() -> None:
    torch.set_num_threads(1)
    cases = [(hidden, rank, kind) for hidden, rank in SHAPES for kind in popularity.POPULARITIES]
    with torch.inference_mode():
        record.write("serving.operators", [row for case in cases for row in rows_of(*case)])


if __name__ == "__main__":
    main()
