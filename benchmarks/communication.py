"""What a format adds to a message, in bytes and in CPU time, beside raw bytes (the ideal).

The published demo pickles its tensors; PEFT and Hugging Face use safetensors. Messages are those
of PrivateLoRA on LLaMA-7B. Also here: how long the calculators take to import, beside torch.

Run: ``python -m benchmarks.communication`` (about half a minute).
"""

import pickle
import statistics
import subprocess
import sys
import time

import safetensors.torch
import torch

from benchmarks import record
from plpkg import communication

REPEATS = 31


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def raw_back(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float16)


FORMATS = {
    "raw": (raw, raw_back),
    "safetensors": (lambda t: safetensors.torch.save({"t": t}), lambda b: safetensors.torch.load(b)["t"]),
    "pickle": (pickle.dumps, pickle.loads),
}


def cpu_us(function, argument, inner: int) -> float:
    """Median CPU microseconds of one call."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(inner):
            function(argument)
        times.append((time.process_time() - start) / inner * 1e6)
    return statistics.median(times)


def messages() -> dict[str, tuple[int, ...]]:
    """The three kinds of message by name, with their shapes."""
    by_message = {}
    for tokens in (1, 256):
        steps = communication.low_rank_messages("llama-7b", 64, phase="prefill", tokens=tokens, adapted_layers=1)
        for step in steps:
            if step.content in ("embedding", "A x"):
                by_message[f"{step.content}, {tokens} token{'s' if tokens > 1 else ''}"] = step.shape
    return by_message


def formats() -> list[dict]:
    rows = []
    generator = torch.Generator().manual_seed(0)
    for name, shape in messages().items():
        tensor = torch.randn(shape, generator=generator).half()
        payload = tensor.numel() * tensor.element_size()
        inner = 200 if payload < 1e5 else 20
        base = None
        for label, (dump, load) in FORMATS.items():
            data = dump(tensor)
            micros = cpu_us(dump, tensor, inner) + cpu_us(load, data, inner)
            base = base or micros
            rows.append(
                {
                    "case": name,
                    "format": label,
                    "payload_bytes": payload,
                    "bytes": len(data),
                    "bytes_ratio": round(len(data) / payload, 4),
                    "cpu_us": round(micros, 2),
                    "cpu_ratio": round(micros / base, 2),
                }
            )
    return rows


def import_times() -> list[dict]:
    """Median CPU time of a whole process that imports a module, less one that imports nothing."""
    cases = {"nothing": "pass", "calculators": "import plpkg.communication, plpkg.throughput", "torch": "import torch"}
    seconds = {name: [] for name in cases}
    for _ in range(7):  # interleaved, so that a slow moment of the machine hits all of them
        for name, code in cases.items():
            script = f"import time\n{code}\nprint(time.process_time())"
            output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
            seconds[name].append(float(output))
    medians = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    torch_us = medians["torch"] - medians["nothing"]
    return [
        {
            "case": f"import {name}",
            "format": "process",
            "cpu_us": round(medians[name] - medians["nothing"]),
            "cpu_ratio": round((medians[name] - medians["nothing"]) / torch_us, 4),
        }
        for name in ("torch", "calculators")
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.write("communication", formats() + import_times())
