"""What the cloud learns from plpkg-small's messages, and what each defence costs and achieves.

The victim writes as the test text of one writer, with an M of rank 64 that was trained on that writer's training text
(at the rate that suits rank 16; what a better one gains is in residual_quality.py); the cloud has the public weights
and public text. Everything that is sent is rounded to fp16, as on the wire.

* m: M by least squares, against the number of different tokens seen; its relative error over all exchanges.
* inversion: tokens from hidden states after the device's first layers, by three attackers, with the layers' cost.
* noise: Gaussian noise on the embeddings, against the quality that is left; attackers who know it. A greedy search
  with known weights would find the nearest row, which is the likeliest.
* answers: Gaussian noise on what every M answers; M by least squares from a page and from the whole text, and what the
  cloud's copy gains with it.
* embedding: a secret embedding (PrivateLoRA's "cold start"), learnt on public text; four attackers, judged on the
  same 95 % of the writer's training text; one of them knows the first 5 %.
* nonlinear: a function in the place of M, a copy of each learnt from its answers, and the quality with the copies.

Each defence with what its device holds, computes and sends (``plpkg.residual.cost``).

Run: ``python -m benchmarks.residual.attacks`` (about 35 minutes on one idle core). Not part of ``make bench``.
"""

import argparse
import copy
import time

import torch
from torch.nn import functional

from benchmarks import record
from benchmarks.residual import defences
from benchmarks.residual.attackers import MlpInverter, frequency_attack, greedy_search, prediction_attack, symbols_of
from benchmarks.residual.cold_start import private_embedding
from benchmarks.residual.methods import BATCH, SEQ, Method, low, personalise, prepared
from benchmarks.residual.nonlinear import Stolen, make_nonlinear, steal_function
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.catalog import ModelShape
from plpkg.residual import attacks, split
from plpkg.residual.adapter import PrivateLoraLayer, matrices
from plpkg.residual.attacks import LinearInverter
from plpkg.residual.cost import device_cost
from plpkg.scoring import score

WRITER = "seaborn"
ATTACKER_TOKENS = 60_000
WINDOWS, WINDOW = 8, 128
"""Of the victim's text, on which attacks are judged: 1,024 tokens."""
LITTLE = 2
"""Windows of ``SEQ`` public tokens, for an attacker who has no more."""

torch.set_num_threads(1)
MODEL, TOKENIZER = load_backbone("plpkg-small")
MODEL.requires_grad_(False)
TABLE = attacks.public_table(MODEL)
SHAPE = ModelShape.from_config(MODEL.config, "plpkg-small")


def windows(documents, count: int, length: int, seed: int = 0) -> torch.Tensor:
    """``(count, length)`` ids."""
    stream = corpora.batches(corpora.encode(documents, TOKENIZER), batch=count, seq=length, seed=seed)
    return next(stream)


PUBLIC = windows(corpora.public("train"), ATTACKER_TOKENS // SEQ, SEQ)
TRAIN = corpora.writer(WRITER).split("train")
VICTIM = windows(corpora.writer(WRITER).split("test"), WINDOWS, WINDOW)
FIRST_TIMES = sorted({token: at for at, token in reversed(list(enumerate(VICTIM.flatten().tolist())))}.values())
"""Where in the victim's text each of its tokens stands for the first time."""


def on_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().half().float()


def bits(model) -> float:
    """Per byte of the writer's test text."""
    test = corpora.writer(WRITER).split("test")
    return round(score(model, TOKENIZER, test, seq=SEQ, stride=SEQ).bits_per_byte, 4)


def row(section: str, case: str, **values) -> dict:
    cells = {"section": section, "case": case} | values
    print(cells, f"{time.process_time():.0f} s", flush=True)
    return cells


def cost_of(device) -> dict:
    cost = device_cost(device)
    sent = cost.up_bytes_per_token + cost.down_bytes_per_token
    return {
        "device_parameters": cost.parameters, "flops_per_token": cost.flops_per_token, "bytes_per_token": sent
    }  # fmt: skip


def personal(rank: int = 64, hidden: int = 0):
    """plpkg-small with the writer's M, or with a function of ``hidden`` units in its place."""
    model = prepared(Method(low(rank), 0.0), MODEL)
    if hidden:
        make_nonlinear(model, hidden)
    stream = corpora.batches(corpora.encode(TRAIN, TOKENIZER), batch=BATCH, seq=SEQ, seed=0)
    personalise(model, stream, 3e-3 if hidden else 2e-2)
    return model


def m_rows() -> list[dict]:
    rows = []
    for rank in (16, 64):
        model = personal(rank)
        true = {name: m.weight for name, m in matrices(model).items()}
        seen = attacks.exchanges(model, VICTIM.reshape(-1, WINDOW).split(1))
        for tokens in (rank // 2, rank - 1, rank, rank + 1, rank * 5 // 4, rank * 2, rank * 4):
            squared, at = 0.0, FIRST_TIMES[:tokens]
            for name, (u, v) in seen.items():
                recovered = attacks.recover_m(on_the_wire(u[at]), on_the_wire(v[at]))
                squared += (recovered - true[name].double()).square().sum().item()
            error = (squared / sum(m.double().square().sum().item() for m in true.values())) ** 0.5
            rows.append(row("m", f"r={rank}", x=tokens, error=float(f"{error:.3g}")))
    return rows


def inversion_rows(victim) -> list[dict]:
    rows = []
    for first_k in range(SHAPE.num_layers):
        public = attacks.public_prefix(MODEL, first_k)
        device, _ = split(victim, first_k)
        with torch.no_grad():
            theirs = on_the_wire(public.embed(PUBLIC))
            sent = on_the_wire(device.embed(VICTIM))
        linear = LinearInverter(theirs, PUBLIC, TABLE)
        mlp = MlpInverter(theirs, PUBLIC, TABLE, steps=1000)
        with_little = LinearInverter(theirs[:LITTLE], PUBLIC[:LITTLE], TABLE)
        recovered = {
            f"linear, {LITTLE * SEQ:,} tokens": with_little.recover(sent),
            "linear": linear.recover(sent),
            "MLP": mlp.recover(sent),
        }
        # The greedy search starts from what the MLP thinks likely; two windows, since it takes long.
        few = 2
        shortlist = mlp.candidates(sent[:few], 256)
        searched = torch.stack(
            [greedy_search(public, s, c, tolerance=1e-3) for s, c in zip(sent[:few], shortlist, strict=True)]
        )
        recovered |= {"greedy": searched}
        for attacker, tokens in recovered.items():
            share = round(attacks.token_accuracy(tokens, VICTIM[: len(tokens)]), 4)
            rows.append(
                row("inversion", attacker, x=first_k, recovered=share, tokens=tokens.numel(), **cost_of(device))
            )
    return rows


def most_probable(received: torch.Tensor, std: float, log_prior: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens under Gaussian noise and what was expected before, ``(vocab,)`` or ``(…, vocab)``."""
    squared = TABLE.double().square().sum(1)
    return (received.double() @ TABLE.double().T - squared / 2 + std**2 * log_prior.double()).argmax(-1)


def noise_rows(victim) -> list[dict]:
    rows, size, cost = [], defences.rms(TABLE), cost_of(split(victim)[0])
    frequency = torch.bincount(PUBLIC.flatten(), minlength=len(TABLE)).float() + 0.5
    unigram = (frequency / frequency.sum()).log()
    for scale in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        noise = defences.NoisySender(scale, size)
        with defences.sending(victim, noise=noise):
            quality = bits(victim)
        sent = on_the_wire(noise(TABLE[VICTIM]))
        recovered = {"nearest row": attacks.recover_tokens(sent, TABLE)}
        if scale:
            # The cloud goes on computing with what it received: its own prediction is the prior.
            with torch.inference_mode():
                expected = MODEL(inputs_embeds=sent, use_cache=False).logits.log_softmax(-1)
            prior = torch.cat([unigram.expand(WINDOWS, 1, -1), expected[:, :-1]], dim=1)  # (windows, seq, vocab)
            theirs = on_the_wire(noise(TABLE[PUBLIC]))
            recovered["linear"] = LinearInverter(theirs, PUBLIC, TABLE).recover(sent)
            recovered["MLP"] = MlpInverter(theirs, PUBLIC, TABLE, steps=1000).recover(sent)
            recovered["unigram prior"] = most_probable(sent, noise.std, unigram)
            recovered["model's prior"] = most_probable(sent, noise.std, prior)
        for attacker, tokens in recovered.items():
            share = round(attacks.token_accuracy(tokens, VICTIM), 4)
            rows.append(row("noise", attacker, x=scale, recovered=share, bits_per_byte=quality, **cost))
    return rows


def answers_rows(victim) -> list[dict]:
    rows, true, copied = [], matrices(victim), copy.deepcopy(victim)
    cost = cost_of(split(victim)[0])
    whole = windows(TRAIN, 64, SEQ, seed=3)
    for scale in (0.0, 0.1, 0.3, 1.0, 3.0):
        noise = defences.NoisySender(scale)
        with defences.sending(victim, answers=noise):
            quality = bits(victim)
            seen = attacks.exchanges(victim, whole.split(4))
        for tokens in (WINDOW * 2, whole.numel()):
            squared = size = 0.0
            for name, m in matrices(copied).items():
                u, v = (on_the_wire(t[:tokens]) for t in seen[name])
                stolen = attacks.recover_m(u, v)
                squared += (stolen - true[name].weight.double()).square().sum().item()
                size += true[name].weight.double().square().sum().item()
                m.weight.data.copy_(stolen)
            rows.append(
                row(
                    "answers", f"{tokens:,} tokens seen", x=scale, error=float(f"{(squared / size) ** 0.5:.3g}"),
                    bits_per_byte=quality, copy_bits_per_byte=bits(copied), tokens=tokens, **cost,
                )
            )  # fmt: skip
    return rows


def embedding_rows(victim) -> list[dict]:
    rows = []
    text = torch.cat([t.ids for t in corpora.encode(TRAIN, TOKENIZER)])  # what the cloud sees over time: 20,000 tokens
    for start, cosine in (("perturbed", 0.3), ("perturbed", 0.1), ("rotated", 0.3)):
        stream = corpora.batches(corpora.encode(corpora.public("train"), TOKENIZER), batch=BATCH, seq=SEQ, seed=0)
        steps = 150
        table = private_embedding(copy.deepcopy(MODEL), stream, start=start, max_cosine=cosine, steps=steps)
        case = f"{start}, cosine up to {cosine}"
        device, _ = split(victim)
        device.embedding = torch.nn.Embedding.from_pretrained(table)  # beside the LM head
        cost = cost_of(device)
        with defences.sending(victim, table=table):
            quality = bits(victim)
        sent, known = on_the_wire(table[text]), len(text) // 20  # 5 % leaked in clear, in a quotation say
        linear = LinearInverter(sent[:known], text[:known], TABLE)
        symbols = symbols_of(sent)
        with torch.inference_mode():
            chunks = text[: len(text) // SEQ * SEQ].view(-1, SEQ)
            expected = torch.cat([MODEL(inputs_embeds=table[c[None]]).logits.log_softmax(-1) for c in chunks])
        recovered = {
            "nearest row": attacks.recover_tokens(sent, TABLE),
            "5 % known pairs": linear.recover(sent),
            "frequency": frequency_attack(symbols, PUBLIC.flatten()),
            "model's prediction": prediction_attack(expected, symbols[: chunks.numel()].view(-1, SEQ)).flatten(),
        }
        judged = slice(known, chunks.numel())  # the same for all
        for attacker, tokens in recovered.items():
            share = round(attacks.token_accuracy(tokens[judged], text[judged]), 4)
            rows.append(row("embedding", case, attacker=attacker, recovered=share, bits_per_byte=quality, **cost))
    return rows


class Copied(torch.nn.Module):
    """A learnt copy where an M was."""

    def __init__(self, m: torch.nn.Module, stolen: Stolen) -> None:
        super().__init__()
        self.weight, self.function = m.weight, stolen.function

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.function(u).to(u)


def nonlinear_rows() -> list[dict]:
    rows = []
    seen_text = windows(TRAIN, 32, SEQ, seed=3)
    for case, rank, hidden in (("M", 16, 0), ("64 units", 16, 64), ("256 units", 16, 256)):
        model = personal(rank, hidden)
        quality, cost = bits(model), cost_of(split(model)[0])
        pairs = attacks.exchanges(model, seen_text.split(4))
        stolen = {name: steal_function(*map(on_the_wire, pair)) for name, pair in pairs.items()}
        for layer in model.modules():
            if isinstance(layer, PrivateLoraLayer):
                layer.privatelora_M["default"] = Copied(layer.privatelora_M["default"], stolen[layer.module])
        mean = {
            name: round(sum(getattr(s, name) for s in stolen.values()) / len(stolen), 4)
            for name in ("relative_error", "linear_error")
        }
        rows.append(
            row(
                "nonlinear", f"{case}, r={rank}", x=seen_text.numel(), bits_per_byte=quality,
                error=mean["relative_error"], linear_error=mean["linear_error"], copy_bits_per_byte=bits(model), **cost,
            )
        )  # fmt: skip
    return rows


def quality_rows(victim) -> list[dict]:
    return [row("quality", "no M", bits_per_byte=bits(MODEL)), row("quality", "M, r=64", bits_per_byte=bits(victim))]


def plain_rows() -> list[dict]:
    with torch.inference_mode():
        hidden = on_the_wire(MODEL.model(input_ids=VICTIM).last_hidden_state)
        written = MODEL.lm_head(hidden).argmax(-1)
    head = MODEL.lm_head.weight
    torch.manual_seed(0)
    sampled = torch.distributions.Categorical(logits=functional.linear(hidden, head)).sample()
    likeliest = functional.linear(hidden.double(), head.double()).topk(10).indices
    among_likeliest = (likeliest == sampled[..., None]).any(-1).double().mean().item()
    recovered = {
        "tokens in": attacks.token_accuracy(attacks.recover_tokens(on_the_wire(TABLE[VICTIM]), TABLE), VICTIM),
        "tokens out, greedy": attacks.token_accuracy(likeliest[..., 0], written),
        "tokens out, sampled, in the likeliest 10": round(among_likeliest, 4),
    }
    return [row("plain", case, recovered=share) for case, share in recovered.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="these sections alone, into what is recorded")
    only = parser.parse_args().only
    victim = personal()
    sections = {
        "quality": lambda: quality_rows(victim), "plain": plain_rows, "m": m_rows,
        "inversion": lambda: inversion_rows(victim), "noise": lambda: noise_rows(victim),
        "answers": lambda: answers_rows(victim), "embedding": lambda: embedding_rows(victim),
        "nonlinear": nonlinear_rows,
    }  # fmt: skip
    rows = [cells for section in only or sections for cells in sections[section]()]
    kept = catalog.measured("residual_attacks").query("section not in @only") if only else None
    record.write("residual.attacks", rows, keep=kept)
