"""Is a phone's LM head really a roofline? Measure one, beside the formula that the estimates use.

The LM head of LLaMA-7B's shape at a quarter of the hidden size meets 1 to 256 positions at once.
The roofline gets this machine's own bandwidth (reading the same weights once) and arithmetic
(a product with 1,024 positions, not one of the rows), measured in the same run:
``max(bytes / bandwidth, 2 · parameters · positions / FLOPS)``.

Run: ``python -m benchmarks.throughput [--device cuda]`` (about a minute).
"""

import argparse
import statistics
import time

import torch

from benchmarks import record
from plpkg.catalog import Device
from plpkg.throughput.split import roofline_s

VOCAB, HIDDEN = 32_000, 1_024
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def seconds(function, device: str, repeats: int = 15) -> float:
    """Median time of one call: CPU time of one thread, or synchronised wall time on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    function()
    times = []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        start = clock()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return statistics.median(times)


def main(device: str) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(device)
    inputs = {n: torch.randn(n, HIDDEN, generator=generator).to(device) for n in POSITIONS}
    measured = {n: seconds(lambda n=n: torch.nn.functional.linear(inputs[n], head), device) for n in POSITIONS}

    read_s = seconds(lambda: head.sum(), device)
    wide = torch.randn(1024, HIDDEN, generator=generator).to(device)
    wide_s = seconds(lambda: torch.nn.functional.linear(wide, head), device, repeats=5)
    here = Device(
        "here",
        memory_bandwidth_bytes_per_s=head.numel() * head.element_size() / read_s,
        flops_per_s=2 * head.numel() * len(wide) / wide_s,
        memory_bytes=1e9,
        label="measured",
    )
    rows = []
    for n in POSITIONS:
        roofline = roofline_s(head.numel(), n, here, bits=32)
        rows.append(
            {
                "positions": n,
                "measured_ms": round(1e3 * measured[n], 3),
                "roofline_ms": round(1e3 * roofline, 3),
                "ratio": round(measured[n] / roofline, 2),
                "bandwidth_gb_per_s": round(here.memory_bandwidth_bytes_per_s / 1e9, 2),
                "gflops_per_s": round(here.flops_per_s / 1e9, 1),
            }
        )
    record.write("throughput", rows, device=device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    main(parser.parse_args().device)
