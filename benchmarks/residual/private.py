"""Differential privacy over the wire: what a private training sends beside the same one without privacy.

plpkg-small learns one writer's windows of 64 tokens with PrivateLoRA, as `clipping.learning` does in one process, with
the cloud behind a socket: ``train_step`` without privacy, ``per_example`` with ``make_private`` at several ε, and what
there was before, a pass for each window. The unit of privacy is a window.

* up, down: payload in MB, of the steps alone; ``looks`` is what crossed beside them to see whether the cloud mixes
  examples.
* nats: a token's, on the writer's test text, before the first step and after the last.

Run: ``python -m benchmarks.residual.private`` (about ten minutes on one core). Not part of ``make bench``.
"""

import math

import torch

from benchmarks import record
from benchmarks.clipping.learning import DELTA, MAX_GRAD_NORM, METHODS, SEQ, STEPS, WRITER, sigma_for
from benchmarks.residual.methods import prepared
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.clipping import make_private
from plpkg.residual import CloudServer, DeviceClient
from plpkg.residual.programs.training import score_of
from plpkg.training_loop import rising

METHOD = METHODS["PrivateLoRA r=64"]
BATCH = 32
TARGETS = (math.inf, 16.0, 4.0)


def learn(target: float) -> dict:
    """One training; a target of infinity is ``train_step``."""
    base, tokenizer = load_backbone("plpkg-small")
    model = prepared(METHOD, base.requires_grad_(False), None)
    texts = {split: corpora.encode(corpora.writer(WRITER).split(split), tokenizer) for split in ("train", "test")}
    windows = torch.cat([text.ids for text in texts["train"]]).unfold(0, SEQ, SEQ)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=METHOD.lr, weight_decay=0.0)
    with CloudServer(model) as cloud, DeviceClient(cloud.address, model) as client:
        case = "no privacy" if math.isinf(target) else f"ε = {target:g}"
        row = {"case": case, "windows": len(windows), "steps": STEPS}
        before = score_of(client, model.config, texts["test"])
        start, ready = client.traffic, None
        if not math.isinf(target):
            sigma = sigma_for(target, BATCH / len(windows), STEPS)
            settings = dict(noise_multiplier=sigma, max_grad_norm=MAX_GRAD_NORM, seed=0, per_example=client.per_example)
            ready = make_private(model, optimizer, windows, batch_size=BATCH, **settings)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = METHOD.lr * rising(step, STEPS // 6)
            if ready:
                ready.step(ready.sample())
            else:
                batch = windows[torch.randperm(len(windows), generator=generator)[:BATCH]]
                client.train_step(batch, batch, optimizer=optimizer)
        crossed = client.traffic - start - client.looks
        after = score_of(client, model.config, texts["test"])
    row |= counted(crossed)
    row["looks_mb"] = round(client.looks.sent_bytes / 1e6 + client.looks.received_bytes / 1e6, 1)
    row["epsilon"] = round(ready.epsilon(DELTA), 2) if ready else None
    row |= {"nats_before": nats(before), "nats_after": nats(after)}
    print(row, flush=True)
    return row


def counted(crossed) -> dict:
    """The columns of a traffic counter."""
    up, down = (round(count / 1e6, 1) for count in (crossed.sent_bytes, crossed.received_bytes))
    return {"up_mb": up, "down_mb": down, "round_trips": crossed.round_trips}


def nats(score) -> float:
    return round(score.bits * math.log(2) / score.tokens, 4)


def a_pass_for_each() -> dict:
    """One step's windows, each in a pass of its own: what clipping costs without each example's gradient."""
    base, tokenizer = load_backbone("plpkg-small")
    model = prepared(METHOD, base.requires_grad_(False), None)
    text = corpora.encode(corpora.writer(WRITER).split("train"), tokenizer)
    windows = torch.cat([each.ids for each in text]).unfold(0, SEQ, SEQ)
    with CloudServer(model) as cloud, DeviceClient(cloud.address, model) as client:
        start = client.traffic
        for window in windows[:BATCH]:
            client.train_step(window[None], window[None])
        return {"case": "a pass for each window", "steps": 1} | counted(client.traffic - start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.write("residual.private", [*map(learn, TARGETS), a_pass_for_each()])
