"""What a format and a connection add to a message, beside raw bytes (the ideal).

The published demo pickles its tensors; PEFT and Hugging Face use safetensors. Messages are those
of PrivateLoRA on LLaMA-7B. Also here: how long the calculators take to import, beside torch.

* ``formats``: bytes and CPU time of each.
* ``headers``: a token's and a prompt's messages over a real TLS connection on this machine, in segments as large as
  Ethernet's; bytes and segments as the kernel counts them (``TCP_INFO``, Linux).
* ``imports``: CPU time.

Run: ``python -m benchmarks.communication [SECTION ...]`` (about half a minute).
"""

import math
import pickle
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

import safetensors.torch
import torch

from benchmarks import record
from plpkg import communication

REPEATS = 31
ETHERNET = 1460
"""Bytes of a segment on Ethernet: 1,500 without the headers of IPv4 and TCP; the kernel takes 12 for timestamps."""


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


def counted(connection: ssl.SSLSocket) -> tuple[int, int]:
    """Bytes that the other side has acknowledged, and segments sent, acknowledgements among them."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return struct.unpack_from("Q", info, 120)[0], struct.unpack_from("I", info, 136)[0]


def converse(
    end: ssl.SSLSocket, mine: str, steps: list[tuple[str, int]], together: threading.Barrier, rows: list
) -> None:
    """Send what goes in one's own direction, wait for the rest, and keep what the kernel has counted of it."""
    for number, part in enumerate(([("up", 1), ("down", 1)], steps)):  # the first byte each way ends the handshake
        before = counted(end)
        for direction, size in part:
            if direction == mine:
                end.sendall(bytes(size))
            while direction != mine and size:
                size -= len(end.recv(min(size, 1 << 16)))
        together.wait()
        time.sleep(0.5)  # for the last acknowledgement
        sent, segments = (now - then for now, then in zip(counted(end), before, strict=True))
        if number:
            sizes = [size for direction, size in part if direction == mine]
            told = {"payload_bytes": sum(sizes), "messages": len(sizes), "bytes": sent, "segments": segments}
            rows.append({"format": f"{end.version()}, {mine}"} | told)


def headers() -> list[dict]:
    """What TLS and TCP add to the messages of a token and of a prompt, without the handshake."""
    with tempfile.TemporaryDirectory() as folder:
        new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost"
        files = f"{folder}/cert.pem", f"{folder}/key.pem"
        subprocess.run([*new.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=files[0])
        server.load_cert_chain(*files)
    rows = []
    for case, phase, tokens in (("a token, decoded", "decode", 1), ("a prompt of 256 tokens", "prefill", 256)):
        messages = communication.low_rank_messages("llama-7b", 64, phase=phase, tokens=tokens)
        steps = [(message.direction, 2 * math.prod(message.shape)) for message in messages]
        with socket.socket() as listener, socket.socket() as plain:
            for each in (listener, plain):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, ETHERNET)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            together, both = threading.Barrier(2), []

            def cloud(listener=listener, steps=steps, together=together, both=both):
                with server.wrap_socket(listener.accept()[0], server_side=True) as end:
                    converse(end, "down", steps, together, both)

            thread = threading.Thread(target=cloud)
            thread.start()
            plain.connect(listener.getsockname())
            with client.wrap_socket(plain, server_hostname="localhost") as end:
                converse(end, "up", steps, together, both)
            thread.join()
        rows += [{"case": case} | row for row in sorted(both, key=lambda row: row["format"])]
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("communication", dict(formats=formats, headers=headers, imports=import_times), __doc__)
