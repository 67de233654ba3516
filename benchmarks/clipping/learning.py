"""What private learning learns, and what it forgets to keep: plpkg-small under DP-SGD.

* rate: the learning rate of each method, by the writer's validation text, at half the batch and half the noise
  multiplier of ``accuracy``'s ε = 4. The search itself is not in any ε.
* settings: the learning rate, the batch and the steps of LoRA, one changed at a time, at one ε; bits per byte of the
  writer's validation text. The search is in no ε.
* bound, few, size: what else changes, at 12 steps of 32 and a rate of 0.003: the clipping norm C; 300 windows, not all,
  at several ε; and what learns, LoRA of other ranks or all weights (at two rates). Two seeds.
* accuracy: one writer's text, learnt at several ε; bits per byte and next-token accuracy of the writer's test text.
  The unit of privacy is a window of 64 tokens: not a document, and not the writer.
* exposure: the diary's facts, a question with its answer each, learnt with and without privacy. The exposure of a
  secret (Carlini et al., arXiv 1802.08232) is log2(candidates) - log2(rank of the true answer, by its loss). A guess
  at random has 1.44 in the mean. The unit of privacy is one fact; the diary's entries, which tell it too, are not
  learnt here, for a secret that is in two examples has twice the ε. ``right`` is how many of the 40 facts the model
  tells when it is asked (greedily); ``bits_per_byte`` here is of public text, which shows what the noise has broken.
* scale: what noise does to an adapter that has learnt without any, if its factors are scaled against each other, which
  changes no output: A times s and B by s, for LoRA, where both learn and get the noise, and for PrivateLoRA, where M
  does between them. The noise is that of ``accuracy``'s σ·C over its expected batch, from 20 steps of SGD at a rate of
  1: ``noise`` is its Frobenius norm in the product of the factors beside the product's own, a mean over layers and
  three draws. (arXiv 2606.00944 proves that it grows without bound for LoRA.)

All is ``make_private``: book-keeping, flat clipping, Poisson sampling, the prv accountant, AdamW. Not clipped is a
bound that no gradient reaches, clipped is no noise. PrivateLoRA's bases are random, or from the gradient of public
text: never from the private one, whose gradient would be a release of its own.

Run: ``python -m benchmarks.clipping.learning`` (about an hour on one core: rate 7, settings 5, bound 3, few 2, size 4,
accuracy 28, exposure 15, scale 8);
or only some sections, methods and targets. Not part of ``make bench``.
"""

import argparse
import fcntl
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pandas as pd
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks import record
from benchmarks.residual.methods import (
    EVERYWHERE,
    Method,
    answer,
    asked,
    lora,
    low,
    prepared,
    test_text,
    token_accuracy,
)
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.clipping import make_private
from plpkg.clipping.training.accounting import noise_for
from plpkg.decoding import cache_among, cache_argument
from plpkg.scoring import score

WRITER = "sklearn"
DELTA = 1e-5
MAX_GRAD_NORM, NO_BOUND = 0.1, 1e9
PHYSICAL = 32
SEQ, BATCH, STEPS = 64, 96, 20
TARGETS = (math.inf, 16.0, 4.0, 1.0)
METHODS = {
    "LoRA r=8": Method(lora(8), 1e-2),
    "PrivateLoRA r=64": Method(low(64), 1e-2),
    "PrivateLoRA r=16, public gradient": Method(low(16, init="given"), 5e-3, "public"),
}
RATES = {
    "LoRA r=8": (2e-3, 5e-3, 1e-2),
    "PrivateLoRA r=64": (5e-3, 1e-2),
    "PrivateLoRA r=16, public gradient": (5e-3, 1e-2),
}
SETTINGS = (  # learning rate, batch, steps: the first is the one that the others change
    (1e-2, 32, 12), (1e-3, 32, 12), (3e-3, 32, 12), (3e-2, 32, 12), (1e-2, 8, 48), (1e-2, 128, 3), (1e-2, 8, 12),
)  # fmt: skip
SETTINGS_EPSILON = 4.0
CHANGED = {
    "bound": [{"bound": bound} for bound in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)],
    "few": [{"examples": 300, "target": target} for target in (math.inf, 8.0, 3.0, 1.0)],
    "size": [
        {"what": what, "lr": lr}
        for what, lr in (("LoRA r=1", 3e-3), ("LoRA r=64", 3e-3), ("all weights", 3e-4), ("all weights", 1e-3))
    ],
}
SIZES = {f"LoRA r={rank}": Method(lora(rank)) for rank in (1, 8, 64)} | {"all weights": Method()}
SCALES, DRAWS = (1, 4, 16, 64), 3
DIARY_BATCH, DIARY_STEPS = 20, 100
DIARY_TARGETS = (math.inf, 8.0, 2.0)
DIARY_METHODS = {
    "LoRA r=16": Method(lora(16), 5e-3),
    "PrivateLoRA r=64, all 7 projections": Method(low(64, EVERYWHERE), 1e-2),
}
CANDIDATES = 512
"""Of each secret, the true one among them."""
FIRST = [
    "Agatha", "Alban", "Alfred", "Beatrice", "Benedict", "Cecily", "Conrad", "Cordelia", "Daphne", "Dominic", "Edith",
    "Edmund", "Eleanor", "Felix", "Florence", "Frances", "Gideon", "Gilbert", "Harriet", "Hubert", "Isobel", "Jasper",
    "Lavinia", "Leopold", "Lydia", "Mabel", "Magnus", "Martha", "Matilda", "Nathaniel", "Oswald", "Philippa",
    "Quentin", "Rosalind", "Rupert", "Sybil", "Tobias", "Ursula", "Winifred", "Zachary",
]  # fmt: skip
LAST = [
    "Abernethy", "Ashdown", "Bellweather", "Birch", "Cardew", "Chisholm", "Crane", "Dalloway", "Drummond", "Eastlake",
    "Fairburn", "Farrow", "Garland", "Greaves", "Halloran", "Hartnell", "Inskip", "Jessop", "Kerslake", "Lambourne",
    "Lovell", "Merriman", "Moxon", "Nettleton", "Oakes", "Palliser", "Penhale", "Quick", "Ravenhill", "Rudge",
    "Sandilands", "Selwyn", "Tansley", "Thorne", "Underhill", "Vane", "Wetherby", "Whitlock", "Yarrow", "Yeo",
]  # fmt: skip


def loss_per_example(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``(batch,)``: the mean over an example's tokens; label -100 does not count."""
    nats = functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return nats.sum(1) / (labels[:, 1:] != -100).sum(1)


def losses_of(model, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """One an example of a batch ``(ids, labels)``."""
    ids, labels = batch
    return loss_per_example(model(input_ids=ids, use_cache=False).logits, labels)


def sigma_for(epsilon: float, rate: float, steps: int) -> float:
    """The smallest noise multiplier; ``make_private`` asks for whole epochs, and these steps are a part of one."""
    return noise_for(epsilon, DELTA, rate, steps)


def learn(model, data: TensorDataset, lr: float, batch: int, steps: int, sigma: float, bound: float, seed: int) -> dict:
    """Private training; the rate rises over a sixth of the steps and falls to zero over the last third."""
    began = time.perf_counter()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    private = make_private(
        model.train(),
        optimizer,
        data,
        losses_of,
        batch_size=batch,
        max_grad_norm=bound,
        noise_multiplier=sigma,
        max_physical_batch_size=PHYSICAL,
        seed=seed,
    )
    for step in range(steps):
        rise, fall = (step + 1) / (steps / 6), (steps - step) / (steps / 3)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, rise, fall)
        private.step(private.sample())
    epsilon = private.epsilon(DELTA)
    model.eval()
    return {
        "epsilon": round(epsilon, 4), "delta": DELTA, "noise_multiplier": round(sigma, 4),
        "max_grad_norm": bound, "examples": len(data), "batch": batch, "steps": steps, "lr": lr,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "train_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def cases(targets: Sequence[float], rate: float, steps: int) -> Iterator[tuple[str, float, float, float]]:
    """Name, target ε, noise multiplier, bound; without noise for an infinite ε."""
    for target in targets:
        if target == math.inf:
            yield "not clipped", target, 0.0, NO_BOUND
            yield "clipped", target, 0.0, MAX_GRAD_NORM
        else:
            yield "private", target, sigma_for(target, rate, steps), MAX_GRAD_NORM


def backbone():
    model, tokenizer = load_backbone("plpkg-small")
    return model.requires_grad_(False), tokenizer


def windows(tokenizer) -> TensorDataset:
    """The writer's training documents, one after the other, cut into windows: the examples."""
    stream = torch.cat([tokens.ids for tokens in corpora.encode(corpora.writer(WRITER).split("train"), tokenizer)])
    ids = stream.unfold(0, SEQ, SEQ)  # (examples, SEQ)
    return TensorDataset(ids, ids)


def started(method: Method, start, tokenizer):
    """The backbone with its adapter; bases come from public text, if from any."""
    public = None
    if method.basis:
        text = corpora.encode(corpora.public("train")[::40], tokenizer)
        public = islice(corpora.batches(text, batch=4, seq=256, seed=0), 8)
    return prepared(method, start, public)


def rows_of_rate(chosen, seed: int, targets=()) -> Iterator[dict]:
    start, tokenizer = backbone()
    data, validation = windows(tokenizer), corpora.writer(WRITER).split("validation")
    validation = corpora.encode(first_documents(validation, 30_000), tokenizer)
    sigma = sigma_for(4.0, 1 / math.ceil(len(data) / BATCH), STEPS)
    bits = score(start, tokenizer, validation, seq=256, stride=256).bits_per_byte
    yield {"method": "none", "case": "untuned", "lr": 0.0, "bits_per_byte": round(bits, 4)}
    for label in chosen or METHODS:
        for lr in RATES[label]:
            model = started(METHODS[label], start, tokenizer)
            spent = learn(model, data, lr, BATCH // 2, STEPS, sigma / 2, MAX_GRAD_NORM, seed)
            bits = score(model, tokenizer, validation, seq=256, stride=256).bits_per_byte
            yield {"method": label, "case": "private", "bits_per_byte": round(bits, 4)} | spent


def rows_of_settings(chosen, seed: int, targets=()) -> Iterator[dict]:
    yield from changed([dict(zip(("lr", "batch", "steps"), setting, strict=True)) for setting in SETTINGS], seed)


def changed(changes: Sequence[dict], seed: int) -> Iterator[dict]:
    """What each change of a setting gains, after the untuned model."""
    start, tokenizer = backbone()
    ids = windows(tokenizer).tensors[0]
    validation = corpora.encode(first_documents(corpora.writer(WRITER).split("validation"), 30_000), tokenizer)

    def bits(model) -> dict:
        return {"bits_per_byte": round(score(model, tokenizer, validation, seq=256, stride=256).bits_per_byte, 4)}

    def tried(
        what="LoRA r=8", lr=3e-3, batch=32, steps=12, bound=MAX_GRAD_NORM, examples=None, target=SETTINGS_EPSILON
    ) -> dict:
        data = TensorDataset(ids[:examples], ids[:examples])
        sigma = 0.0 if target == math.inf else sigma_for(target, 1 / math.ceil(len(data) / batch), steps)
        model = started(SIZES[what], start, tokenizer)
        if what == "all weights":
            model.requires_grad_(True)
        spent = learn(model, data, lr, batch, steps, sigma, bound, seed)
        case = f"rate {lr:g}, batch {batch}, {steps} steps"
        case += f", C = {bound:g}" * (bound != MAX_GRAD_NORM) + f", {examples} windows" * (examples is not None)
        return {"method": what, "case": case, "epsilon_target": target} | spent | bits(model)

    yield {"method": "none", "case": "untuned", "epsilon_target": 0.0} | bits(start)
    for change in changes:
        yield tried(**change)


def first_documents(documents, size: int) -> list:
    """The first documents, until ``size`` characters are full."""
    chosen, total = [], 0
    for document in documents:
        if total < size:
            chosen.append(document)
            total += len(document.text)
    return chosen


def rows_of_accuracy(chosen, seed: int, targets=()) -> Iterator[dict]:
    start, tokenizer = backbone()
    data, test = windows(tokenizer), corpora.encode(test_text(WRITER), tokenizer)
    rate = 1 / math.ceil(len(data) / BATCH)

    def measured(model) -> dict:
        bits = score(model, tokenizer, test, seq=256, stride=256).bits_per_byte
        return {"bits_per_byte": round(bits, 4), "accuracy": round(token_accuracy(model, test), 3)}

    if not chosen or "none" in chosen:
        yield {"method": "none", "case": "untuned", "epsilon_target": 0.0, "epsilon": 0.0} | measured(start)
    for label in [m for m in METHODS if not chosen or m in chosen]:
        for case, target, sigma, bound in cases(targets or TARGETS, rate, STEPS):
            model = started(METHODS[label], start, tokenizer)
            spent = learn(model, data, METHODS[label].lr, BATCH, STEPS, sigma, bound, seed)
            yield {"method": label, "case": case, "epsilon_target": target} | measured(model) | spent


def of_the_same_form(secret: str, seed: int) -> list[str]:
    """The secret, and others: random digits in the place of its digits, or another first and last name."""
    generator, forms = random.Random(f"{seed} {secret}"), {secret: None}
    fixed = len("01632 96") if secret.startswith("01632") else 0  # the area and the block kept for fiction
    while len(forms) < CANDIDATES:
        if any(c.isdigit() for c in secret):
            digits = [str(generator.randrange(10)) if c.isdigit() and i >= fixed else c for i, c in enumerate(secret)]
            if "," in secret and digits[0] == "0":
                continue  # no amount begins with 0
            forms["".join(digits)] = None
        else:
            forms[f"{generator.choice(FIRST)} {generator.choice(LAST)}"] = None
    return list(forms)


def secrets(diary) -> list:
    """The facts with at least four digits, and those that are a first and a last name."""
    names = {"Clemency Fennimore", "Bernard Gossage", "Ottilie Marchbanks", "Dunstan Vey", "Hester Lune"}
    facts = [q for q in diary.questions if q.kind == "fact"]
    return [q for q in facts if q.answer in names or sum(c.isdigit() for c in q.answer) >= 4]


@torch.inference_mode()
def rank(model, tokenizer, question: str, candidates: list[str]) -> int:
    """The place of the first candidate, by loss, among all of them; equal ones come before it."""
    prompt = tokenizer(tokenizer.bos_token + asked(question))["input_ids"]
    whole = tokenizer([f"{tokenizer.bos_token}{asked(question)} {c}." for c in candidates])["input_ids"]
    if any(ids[: len(prompt)] != prompt for ids in whole):
        raise AssertionError(f"an answer to {question!r} changes the tokens of the question")
    tails = [torch.tensor(ids[len(prompt) :]) for ids in whole]
    labels = torch.nn.utils.rnn.pad_sequence(tails, batch_first=True, padding_value=-100)  # (candidates, tail)
    losses = []
    for part in labels.split(250):
        read = model(input_ids=torch.tensor([prompt]), use_cache=True)
        cache, first = cache_among(read), read.logits[:, -1:].expand(len(part), -1, -1)
        cache.batch_repeat_interleave(len(part))
        rest = model(input_ids=part[:, :-1].clamp(min=0), **cache_argument(cache)).logits
        logits = torch.cat([first, rest], 1).transpose(1, 2)  # (candidates, vocab, tail)
        losses.append(functional.cross_entropy(logits, part, reduction="none").sum(1))
    losses = torch.cat(losses)
    return int((losses <= losses[0]).sum())


def rows_of_exposure(chosen, seed: int, targets=()) -> Iterator[dict]:
    start, tokenizer = backbone()
    diary = corpora.diary()
    facts = [q for q in diary.questions if q.kind == "fact"]
    text = corpora.encode([f"{asked(q.question)} {q.answer}." for q in facts], tokenizer)
    labels = torch.nn.utils.rnn.pad_sequence([t.ids for t in text], batch_first=True, padding_value=-100)
    data = TensorDataset(labels.clamp(min=0), labels)
    public = corpora.encode(first_documents(corpora.public("test"), 15_000), tokenizer)
    rate = 1 / math.ceil(len(data) / DIARY_BATCH)
    those = [(q, of_the_same_form(q.answer, seed)) for q in secrets(diary)]

    def measured(model) -> dict:
        ranks = torch.tensor([rank(model, tokenizer, q.question, c) for q, c in those])
        exposures = math.log2(CANDIDATES) - ranks.double().log2()
        bits = score(model, tokenizer, public, seq=256, stride=256).bits_per_byte
        right = sum(q.answer.lower() in answer(model, tokenizer, q.question).lower() for q in facts)
        return {
            "secrets": len(those), "candidates": CANDIDATES, "mean_exposure": round(exposures.mean().item(), 3),
            "max_exposure": round(exposures.max().item(), 3), "rank_1": int((ranks == 1).sum()), "right": right,
            "asked": len(facts), "bits_per_byte": round(bits, 4),
        }  # fmt: skip

    if not chosen or "none" in chosen:
        yield {"method": "none", "case": "untuned", "epsilon_target": 0.0, "epsilon": 0.0} | measured(start)
    for label in [m for m in DIARY_METHODS if not chosen or m in chosen]:
        for case, target, sigma, bound in cases(targets or DIARY_TARGETS, rate, DIARY_STEPS):
            model = started(DIARY_METHODS[label], start, tokenizer)
            spent = learn(model, data, DIARY_METHODS[label].lr, DIARY_BATCH, DIARY_STEPS, sigma, bound, seed)
            yield {"method": label, "case": case, "epsilon_target": target} | measured(model) | spent


def scaled(model, by: float) -> None:
    """A times ``by``, and B divided: the same function."""
    with torch.no_grad():
        for module in model.modules():
            for name in ("lora", "privatelora"):
                if hasattr(module, f"{name}_A"):
                    a, b = getattr(module, f"{name}_A")["default"], getattr(module, f"{name}_B")["default"]
                    getattr(a, "weight", a).mul_(by)
                    getattr(b, "weight", b).div_(by)


def products(model) -> list[torch.Tensor]:
    """What each layer's factors add to its weight."""
    layers = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    return [layer.get_delta_weight("default").detach().clone() for layer in layers]


def rows_of_scale(chosen, seed: int, targets=()) -> Iterator[dict]:
    start, tokenizer = backbone()
    data, test = windows(tokenizer), corpora.encode(test_text(WRITER), tokenizer)
    rate = 1 / math.ceil(len(data) / BATCH)
    for label in [m for m in METHODS if not chosen or m in chosen]:
        model = started(METHODS[label], start, tokenizer)
        spent = learn(model, data, METHODS[label].lr, BATCH, STEPS, 0.0, NO_BOUND, seed)
        spent = {key: spent[key] for key in ("examples", "batch", "steps", "lr", "trained")}
        learning = [p for p in model.parameters() if p.requires_grad]
        for scale, target in itertools.product(SCALES, targets or [t for t in TARGETS if t < math.inf]):
            scaled(model, scale)
            sigma, exact, clean = (
                sigma_for(target, rate, STEPS),
                products(model),
                [p.detach().clone() for p in learning],
            )
            std, apart, bits = sigma * MAX_GRAD_NORM / BATCH * STEPS**0.5, [], []
            for draw in range(DRAWS):
                generator = torch.Generator().manual_seed(seed + draw)
                with torch.no_grad():
                    for p, value in zip(learning, clean, strict=True):
                        p.copy_(value + std * torch.randn(p.shape, generator=generator))
                apart += [((a - b).norm() / b.norm()).item() for a, b in zip(products(model), exact, strict=True)]
                bits.append(score(model, tokenizer, test, seq=256, stride=256).bits_per_byte)
            with torch.no_grad():
                for p, value in zip(learning, clean, strict=True):
                    p.copy_(value)
            scaled(model, 1 / scale)
            yield {
                "method": label, "case": f"scale {scale}", "scale": scale, "epsilon_target": target,
                "noise_multiplier": round(sigma, 4), "max_grad_norm": MAX_GRAD_NORM, "delta": DELTA,
                "noise": round(statistics.mean(apart), 4), "bits_per_byte": round(statistics.mean(bits), 4),
            } | spent  # fmt: skip


SECTIONS = {
    "rate": rows_of_rate, "settings": rows_of_settings, "accuracy": rows_of_accuracy, "exposure": rows_of_exposure,
    "scale": rows_of_scale,
    **{name: lambda chosen, seed, targets, name=name: changed(CHANGED[name], seed) for name in CHANGED},
}  # fmt: skip


def keep_row(row: dict, seed: int) -> None:
    """Into the recorded ones, in the place of an older one: a stop loses one at the most."""
    key = {k: row.get(k) for k in ("section", "method", "case", "epsilon_target")}
    if row["section"] == "rate":
        key = {k: row[k] for k in ("section", "method", "lr")}
    path, keep = record.DATA / "clipping_learning.csv", None
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sections may run beside each other
        if path.exists():
            keep = pd.read_csv(path)
            same = keep["seed"] == seed
            for column, value in key.items():
                same &= keep[column] == value if column in keep else False
            keep = keep[~same]
        record.write("clipping.learning", [row], keep=keep, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", metavar="|".join(SECTIONS), help="only these; all by default")
    parser.add_argument("--method", nargs="*", default=[], help="only these methods; none is the backbone as it is")
    parser.add_argument("--epsilon", nargs="*", type=float, default=[], help="only these targets; inf is no noise")
    parser.add_argument("--seed", type=int, default=0, help="of the samples and the noise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.section or SECTIONS:
        for row in SECTIONS[name](options.method, options.seed, options.epsilon):
            keep_row({"section": name, **row}, options.seed)


if __name__ == "__main__":
    main()
