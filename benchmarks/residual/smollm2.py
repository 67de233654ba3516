"""PrivateLoRA on a published instruction model, SmolLM2-135M: speed over two processes, what a cloud reads, and ranks.

* speed: the diary's M (``data/diary``) answers its first question over two processes, on SmolLM2 (30 layers, M at all
  seven places) and on plpkg-small (5): tokens per second, round trips and bytes a token, at several round-trip times.
  ``computed`` is the time without delay and of each round trip one RTT more.
* read: of 1,024 tokens of a writer's test text. Tokens from embeddings by the nearest row of the public table; each M
  by least squares from so many different tokens; tokens from the hidden states after the device's first layers by the
  linear inversion, which has 60,000 public tokens. All of it rounded to fp16, as on the wire.
* rank: bits per byte of three writers' test text (its first 20,000 bytes) after 20 steps on 1,024 of their tokens each:
  M of rank 8 and 64 at q, k and v (rate 1e-2), LoRA of rank 8 there (1e-3), and nothing. The rates were not searched.

Run: ``python -m benchmarks.residual.smollm2 [SECTION ...]``: some minutes, some minutes, and an hour of one core. Not
part of ``make bench``.
"""

import time
from collections.abc import Iterator

import torch
from peft import PeftModel, get_peft_model

from benchmarks import record
from benchmarks.residual.methods import lora, low, personalise
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.catalog import Link
from plpkg.corpora import Document
from plpkg.residual import attacks, split
from plpkg.residual.adapter import matrices
from plpkg.residual.programs.chat import prompt
from plpkg.residual.programs.commands import client_of
from plpkg.residual.programs.curious import CuriousCloud
from plpkg.residual.programs.demo import DIARY_ADAPTERS
from plpkg.scoring import score

RTTS_MS, NEW = (0, 5, 20, 80), 12
PUBLIC_TOKENS, WINDOWS, WINDOW = 60_000, 8, 128
WRITERS, STEPS, BATCH, SEQ, TEST_BYTES = ("numpy", "seaborn", "torch"), 20, 4, 256, 20_000
LEARNERS = {"M r=8": (low(8), 1e-2), "M r=64": (low(64), 1e-2), "LoRA r=8": (lora(8), 1e-3), "nothing": (None, 0.0)}


def speed() -> Iterator[dict]:
    for name, adapter in DIARY_ADAPTERS.items():
        folder = catalog.data_path(adapter)
        with CuriousCloud(name, folder) as cloud:
            free = None
            for rtt_ms in RTTS_MS:
                link = Link(f"60/100 Mb/s, RTT {rtt_ms} ms", 60e6, 100e6, rtt_ms / 1e3)
                with client_of(cloud.facts["address"], name, folder, {}, dict(link=link)) as (client, _, tokenizer):
                    ids = prompt(tokenizer, [{"role": "user", "content": corpora.diary().questions[0].question}])
                    client.generate(ids, 1, eos_token_id=-1)  # the connection
                    times, before = [], client.traffic
                    client.generate(
                        ids, NEW + 1, eos_token_id=-1, on_token=lambda _, times=times: times.append(time.perf_counter())
                    )
                    crossed = client.traffic - before
                seconds = times[-1] - times[0]
                trips = crossed.round_trips / crossed.tokens
                free = seconds if free is None else free
                yield {
                    "case": name, "rtt_ms": rtt_ms, "tokens_per_s": round(NEW / seconds, 3),
                    "computed": round(NEW / (free + NEW * trips * rtt_ms / 1e3), 3), "trips_per_token": trips,
                    "bytes_per_token": bytes_of_a_token(client.part),
                }  # fmt: skip


def moments(client, ids: torch.Tensor) -> list[float]:
    """When each token was there; the first comes with the prompt."""
    times = []
    client.generate(ids, NEW + 1, eos_token_id=-1, on_token=lambda _: times.append(time.perf_counter()))
    return times


def bytes_of_a_token(part) -> int:
    return 2 * (part.embedding.embedding_dim + part.width + sum(len(m) * sum(part.ranks) for m in part.matrices))


def on_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().half().float()


def windows(tokenizer, documents: list[Document], count: int, length: int) -> torch.Tensor:
    return next(corpora.batches(corpora.encode(documents, tokenizer), batch=count, seq=length, seed=0))


def read() -> Iterator[dict]:
    base, tokenizer = load_backbone("smollm2")
    victim = PeftModel.from_pretrained(load_backbone("smollm2")[0], catalog.data_path(DIARY_ADAPTERS["smollm2"])).eval()
    text = windows(tokenizer, corpora.writer("seaborn").split("test"), WINDOWS, WINDOW)
    public = windows(tokenizer, corpora.public("train"), PUBLIC_TOKENS // SEQ, SEQ)
    table = attacks.public_table(base)
    with torch.no_grad():
        sent = on_the_wire(split(victim)[0].embed(text))
    share = attacks.token_accuracy(attacks.recover_tokens(sent, table), text)
    yield {"case": "nearest row", "x": 0, "recovered": round(share, 4)}
    for first_k in (2, 4):
        prefix = attacks.public_prefix(base, first_k)
        device, _ = split(victim, first_k)
        with torch.inference_mode():
            theirs = on_the_wire(torch.cat([prefix.embed(some) for some in public.split(8)]))
            sent = on_the_wire(device.embed(text))
        found = attacks.LinearInverter(theirs, public, table).recover(sent)
        yield {"case": "linear inversion", "x": first_k, "recovered": round(attacks.token_accuracy(found, text), 4)}
    seen = attacks.exchanges(victim, text.reshape(-1, WINDOW).split(1))
    flat = text.flatten().tolist()
    firsts = sorted({token: at for at, token in reversed(list(enumerate(flat)))}.values())
    true = {name: m.weight.double() for name, m in matrices(victim).items()}
    for tokens in (32, 63, 64, 65, 80, 128, 256):
        squared, at = 0.0, firsts[:tokens]
        for name, (u, v) in seen.items():
            squared += (attacks.recover_m(on_the_wire(u[at]), on_the_wire(v[at])) - true[name]).square().sum().item()
        error = (squared / sum(m.square().sum().item() for m in true.values())) ** 0.5
        yield {"case": "M by least squares", "x": tokens, "error": float(f"{error:.3g}")}


def rank() -> Iterator[dict]:
    for writer in WRITERS:
        for name, (config, lr) in LEARNERS.items():
            torch.manual_seed(0)
            model, tokenizer = load_backbone("smollm2")
            began = time.process_time()
            if config is not None:
                model = get_peft_model(model, config)
                documents = corpora.encode(corpora.writer(writer).split("train"), tokenizer)
                personalise(model.train(), corpora.batches(documents, batch=BATCH, seq=SEQ, seed=0), lr, STEPS)
            seconds = time.process_time() - began
            test, left = [], TEST_BYTES
            for document in corpora.writer(writer).split("test"):
                if left > 0:
                    test.append(Document(document.name, document.text[:left]))
                    left -= len(test[-1].text)
            bits = score(model.eval(), tokenizer, test, seq=SEQ, stride=SEQ).bits_per_byte
            learned = sum(p.numel() for p in model.parameters() if p.requires_grad) if config else 0
            yield {
                "case": writer, "method": name, "bits_per_byte": round(bits, 4), "numbers": learned,
                "cpu_s": round(seconds),
            }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("residual.smollm2", {"speed": speed, "read": read, "rank": rank}, __doc__)
