"""A cloud in a process of its own, and devices for it: what the benchmarks over the wire share."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch
from peft import LoraConfig, get_peft_model

from plpkg.backbones import load_backbone, random_backbone
from plpkg.catalog import Link
from plpkg.projections import QKV
from plpkg.residual import CloudServer, DeviceClient, Limits, PrivateLoraConfig
from plpkg.residual.wire import cloud as clouds

MODELS = {
    "12 x 768": dict(num_layers=12, hidden=768, num_heads=12, intermediate=2048, vocab=32_000, max_positions=512),
    "12 x 768, thin": dict(num_layers=12, hidden=768, num_heads=12, intermediate=64, vocab=300, max_positions=512),
    "12 x 768, thinnest": dict(
        num_layers=12, hidden=768, num_heads=12, head_dim=2, intermediate=8, vocab=300, max_positions=512
    ),
    "LLaMA-7B sizes": dict(num_layers=32, hidden=4096, num_heads=32, head_dim=2, intermediate=8, vocab=300),
}
TOKEN = "a token of the usual length: 32 c"
MANY = 256
"""Sequences at once, where a single one's time on the link is lost in what tokens differ among themselves."""


def build(name: str, rank: int, targets: Sequence[str] = QKV):
    """A model with an adapter: PrivateLoRA's of a rank, or LoRA's (rank 0) for full activations."""
    torch.set_num_threads(1)
    model = load_backbone(name)[0] if name == "plpkg-small" else random_backbone("llama", **MODELS[name])
    if rank:
        return get_peft_model(model, PrivateLoraConfig(r_c2d=rank, r_d2c=rank, target_modules=list(targets)))
    return get_peft_model(model, LoraConfig(r=16, target_modules=list(targets)))


@contextlib.contextmanager
def cloud(name: str, rank: int, tls: str | None = None, *, prefix: Sequence[str] = (), **options) -> Iterator[str]:
    """A cloud in a process of its own; gives its address."""
    task = json.dumps({"name": name, "rank": rank, "tls": tls, **options})
    command = [*prefix, sys.executable, "-m", "benchmarks.residual.processes", task]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class OneAfterTheOther(clouds.Stream):
    """Waits for the device's answer before anything else is computed."""

    def send(self, group: int, u: torch.Tensor) -> None:
        super().send(group, u)
        self.answer = super().receive(group)

    def receive(self, group: int) -> torch.Tensor:
        return self.answer


def serve(
    name: str,
    rank: int,
    tls: str | None,
    address: str = "127.0.0.1:0",
    overlap: bool = True,
    targets: Sequence[str] = QKV,
) -> None:
    """What the process of :func:`cloud` does."""
    if not overlap:
        clouds.Stream = OneAfterTheOther
    options = dict(tls=tls, token=TOKEN if tls else None, limits=Limits(batch=MANY))
    with CloudServer(build(name, rank, targets), address, **options) as server:
        print(server.address, flush=True)
        server.wait()


def client(address: str, model, tls: str | None, link: Link | None) -> DeviceClient:
    secure = dict(ca=f"{tls}/cert.pem", token=TOKEN) if tls else {}
    return DeviceClient(address, model, link=link, **secure)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
