"""What the cloud learns of a ladder's M by imitation, and what rejected guesses tell it, on plpkg-small.

* imitation: a writer with a ladder (A from public text), with and without a hidden layer. The cloud has every
  final state and every u, as fp16, and every chosen token; it trains an M of the same shape on 10^3 to 10^5 tokens.
  The owner writes on from validation text, sampling at temperature 1, or greedily. "typed": the owner's own training
  text, which the cloud reads where M is trained over the wire: half of it, and the whole. Each copy's settings are
  those with the least loss on tokens that were held out; for more than 10^4, and for greedy text, the learning rate of
  the copy before. ``kl``: KL(owner || copy), nats a token of test text; ``agreement``: share of the owner's likeliest
  tokens that are the copy's as well; ``stolen``: the copy's gain on the test text by the owner's. ``kl_none`` and
  ``agreement_none`` are of the backbone without M.
  Beside it PrivateLoRA's M by least squares, from 256 tokens of the test text (``--answers``: only that, once more).
* drafts: the nine writers' test text, three prompts each, written on by the backbone without M, greedily and sampled.
  Of six guesses at a time those are rejected that were not chosen. ``private``: different 4-grams of the person's
  training text that the cloud reads where a guess stands in them, and that are not in what was written, per 1,000 new
  tokens; ``only_private``: those of them that the counted public text lacks.

Run: ``python -m benchmarks.residual.imitation`` (about 20 minutes on one idle core). With ``--quick`` a small
part, and nothing is recorded; ``--copies`` measures the first part alone once more, into what is recorded. Not part of
``make bench``.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from peft import get_peft_model
from torch.nn import functional

from benchmarks import record
from benchmarks.residual.methods import ADAPTERS, BATCH, SEQ, STEPS, Method, ladder, personalise, prepared, test_text
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.corpora.tokens import Tokens
from plpkg.ngrams import Counts
from plpkg.residual import attacks, drafts, split
from plpkg.residual.adapter import matrices
from plpkg.scoring import score

WRITERS = ("seaborn",)
PROMPT, NEW, TOGETHER = 32, 125, 80
"""Tokens read and written, and texts at once: 10,000 tokens a batch."""
RATES, LOW = (1e-3, 3e-3), (0.1, 0.3)
"""Learning rates, and temperatures for greedy text."""
GUESSES, GRAM = 6, 4

torch.set_num_threads(1)
MODEL, TOKENIZER = load_backbone("plpkg-small")
MODEL.requires_grad_(False)

Pairs = tuple[torch.Tensor, torch.Tensor]
"""Final states ``(n, hidden + numbers)``, and the tokens ``(n,)`` that followed."""


def openings(texts: Sequence[Tokens], count: int, generator: torch.Generator) -> torch.Tensor:
    """``(count, PROMPT)`` ids from random places."""
    ids = torch.cat([text.ids for text in texts])
    starts = torch.randint(len(ids) - PROMPT, (count,), generator=generator)
    return ids[starts[:, None] + torch.arange(PROMPT)]


@torch.no_grad()
def written(device, cloud, ids: torch.Tensor, new: int, generator: torch.Generator | None) -> Pairs:
    """What the cloud sends and reads while texts are written on, ``(texts · new, …)``; greedily without a generator."""
    kept, mine, finals, tokens = cloud.new_cache(), device.new_cache(), [], []
    for _ in range(new):
        final = cloud(device.embed(ids, cache=mine), cache=kept)[:, -1]  # (texts, width)
        scores = device.logits(final)  # (texts, vocab)
        if generator is not None:
            scores = scores.softmax(-1) / torch.empty_like(scores).exponential_(generator=generator)
        ids = scores.argmax(-1, keepdim=True)
        finals.append(final.half())
        tokens.append(ids[:, 0])
    return torch.stack(finals, 1).flatten(0, 1), torch.stack(tokens, 1).flatten()


class Judge:
    """An owner's distributions on test text, which copies are compared with, and ``none``, a part without M."""

    @torch.no_grad()
    def __init__(self, device, cloud, none, texts: Sequence[Tokens]) -> None:
        spans = [(t, at) for t in texts for at in range(0, len(t) - 1, SEQ) if t.scored[at + 1 : at + SEQ + 1].any()]
        finals, targets = [], []
        for text, at in spans:
            span = slice(at + 1, at + SEQ + 1)
            followers = text.ids[span]
            final = cloud(device.embed(text.ids[at : at + len(followers)][None]))[0]  # (seq, width)
            finals.append(final[text.scored[span]])
            targets.append(followers[text.scored[span]])
        self.finals, self.targets = torch.cat(finals), torch.cat(targets)
        self.owner = device
        self.of_none = self.compare(none)

    @torch.no_grad()
    def compare(self, part) -> dict[str, float]:
        """Nats a token of KL and of the owner's and the copy's loss, and how often their likeliest tokens agree."""
        sums = torch.zeros(4, dtype=torch.float64)
        for final, target in zip(self.finals.split(1024), self.targets.split(1024), strict=True):
            mine, theirs = (each.logits(final).log_softmax(-1) for each in (self.owner, part))  # (tokens, vocab)
            agreed = (mine.argmax(-1) == theirs.argmax(-1)).sum()
            kl = functional.kl_div(theirs, mine, reduction="sum", log_target=True)
            losses = [functional.nll_loss(each, target, reduction="sum") for each in (mine, theirs)]
            sums += torch.stack([kl, agreed, *losses])
        return dict(zip(("kl", "agreement", "mine", "theirs"), (sums / len(self.targets)).tolist(), strict=True))

    def judged(self, part) -> dict[str, float]:
        """The columns of a copy: a share of a gain is the same in nats a token as in bits per byte."""
        got, none = self.compare(part), self.of_none
        stolen = (none["theirs"] - got["theirs"]) / (none["theirs"] - none["mine"])
        cells = {name: got[name] for name in ("kl", "agreement")} | {f"{n}_none": none[n] for n in ("kl", "agreement")}
        return {name: round(value, 4) for name, value in (cells | {"stolen": stolen}).items()}


def imitated(
    width: int | None, pairs: Pairs, rates: Sequence[float], temperatures: Sequence[float], steps: int
) -> tuple:
    """The copy with the least loss on held-out tokens, its learning rate and its temperature."""
    tried = []
    for lr, temperature in itertools.product(rates, temperatures):
        part = fresh(width)
        loss = attacks.imitate_ladder(part, *pairs, lr=lr, temperature=temperature, steps=steps)
        tried.append((loss, lr, temperature, part))
    _, lr, temperature, part = min(tried, key=lambda trial: trial[0])
    return part, lr, temperature


def row(section: str, case: str, what: str, **values) -> dict:
    cells = {"section": section, "case": case, "what": what} | values
    print(cells, f"{time.process_time():.0f} s", flush=True)
    return cells


def fresh(width: int | None):
    """The device's part with an M that has not learnt, and not the random numbers of its owner's."""
    torch.manual_seed(1)
    return split(get_peft_model(copy.deepcopy(MODEL), ladder(width)))[0]


def personal(method: Method, text: Sequence[Tokens], public: list[torch.Tensor], steps: int):
    model = prepared(method, MODEL, iter(public))
    personalise(model, corpora.batches(text, batch=BATCH, seq=SEQ, seed=0), method.lr, steps)
    return model.requires_grad_(False)


def imitation_rows(name: str, width: int | None, public: list[torch.Tensor], steps: int, sizes: Sequence[int]) -> list:
    """One writer, one ladder, everything that the cloud may learn from."""
    texts = {s: corpora.encode(corpora.writer(name).split(s), TOKENIZER) for s in ("train", "validation")}
    method = Method(ladder(width, init="given"), 3e-3 if width else 1e-2, "public")
    device, cloud = split(personal(method, texts["train"], public, steps))
    judge = Judge(device, cloud, fresh(width), corpora.encode(test_text(name), TOKENIZER))
    generator, batches = torch.Generator().manual_seed(0), []
    for _ in range(-(-max(sizes) // (TOGETHER * NEW))):
        batches.append(written(device, cloud, openings(texts["validation"], TOGETHER, generator), NEW, generator))
    sampled = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    greedy = written(device, cloud, openings(texts["validation"], TOGETHER, generator), NEW, None)
    own = torch.cat([text.ids for text in texts["train"]]).split(2 * NEW + 1)[:-1]  # (2 · NEW + 1,) each
    own = torch.stack(own)[torch.randperm(len(own), generator=generator)]
    with torch.no_grad():
        finals = cloud(device.embed(own))[:, :-1].flatten(0, 1).half()
    typed = finals, own[:, 1:].flatten()
    some, most = min(TOGETHER * NEW, max(sizes)), max(sizes)
    cases = [("sampled", sampled, n, (1.0,)) for n in sizes if n < most] + [
        ("greedy", greedy, some, LOW),
        ("sampled", sampled, most, (1.0,)),
        ("typed", typed, some, (1.0,)),
        *([("typed", typed, len(finals), (1.0,))] if most > some else []),
    ]
    rows, lr = [], RATES[0]
    for what, (finals, tokens), n, temperatures in cases:
        began, error = time.process_time(), None
        copy_steps = max(40, min(400, n // 64))
        rates = RATES if n <= some and temperatures == (1.0,) else (lr,)  # else what was best for the sampled ones
        stolen, lr, temperature = imitated(width, (finals[:n], tokens[:n]), rates, temperatures, copy_steps)
        if width is None:
            error = round(attacks.relative_error(stolen.tail.m.weight.detach(), device.tail.m.weight), 4)
        settings = {"lr": lr, "temperature": temperature, "steps": copy_steps}
        rows.append(row(
            "imitation", name, what, method=f"ladder {width or ''}".strip(), tokens=n, error=error,
            **judge.judged(stolen), **settings, cpu_s=round(time.process_time() - began, 1),
        ))  # fmt: skip
    return rows


def solved_rows(name: str, steps: int) -> list[dict]:
    """PrivateLoRA's M from 256 tokens, by least squares, and the gain of the copy.

    The relative error is over all exchanges whose answers cross. Without guesses or with them it is the same; in two
    layers and one layer late the last layer is folded, and the copy lacks its M.
    """
    text, test = (corpora.encode(part, TOKENIZER) for part in (corpora.writer(name).split("train"), test_text(name)))
    ids = next(corpora.batches(test, batch=1, seq=256, seed=0))
    rows, last = [], f".{MODEL.config.num_hidden_layers - 1}."
    none = score(MODEL, TOKENIZER, test, seq=SEQ, stride=SEQ).bits_per_byte
    for label in ("all layers", "two layers", "one layer late"):
        own = list(islice(corpora.batches(text, batch=BATCH, seq=SEQ, seed=1000), 8))
        model = personal(replace(ADAPTERS[label], lr=1e-2), text, own, steps)
        owner = none - score(model, TOKENIZER, test, seq=SEQ, stride=SEQ).bits_per_byte
        seen, wrong, size = attacks.exchanges(model, [ids]), 0.0, 0.0
        for module, m in matrices(model).items():
            if label == "all layers" or last not in module:
                copied = attacks.recover_m(*(t.half() for t in seen[module]))
                wrong += (copied - m.weight.double()).square().sum().item()
                size += m.weight.double().square().sum().item()
                m.weight.data.copy_(copied)
            else:
                m.weight.data.zero_()
        copied = none - score(model, TOKENIZER, test, seq=SEQ, stride=SEQ).bits_per_byte
        values = dict(error=float(f"{(wrong / size) ** 0.5:.3g}"), stolen=round(copied / owner, 4))
        rows.append(row("imitation", name, "answers", method=label, tokens=256, **values))
    return rows


def grams(ids: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)}


def replay(draft: drafts.Draft, ids: Sequence[int]) -> tuple[int, set[tuple[int, ...]]]:
    """What a text that began with a prompt made a draft send: rejected guesses, and 4-grams with a guess in them."""
    at, rejected, read = PROMPT, 0, set()
    while at < len(ids):
        guesses = list(draft(ids[:at], min(GUESSES, len(ids) - at - 1)))
        right = next((i for i, guess in enumerate(guesses) if guess != ids[at + i]), len(guesses))
        rejected += len(guesses) - right
        read |= grams([*ids[at - GRAM + 1 : at], *guesses])
        at += right + 1
    return rejected, read - grams(ids)


def drafts_rows(writers: Sequence[str], new: int = 64) -> list[dict]:
    """Three prompts a writer, all written on together, greedily and sampled; then each draft is replayed."""
    generator, sums = torch.Generator().manual_seed(0), {}
    tests = [corpora.encode(corpora.writer(name).split("test"), TOKENIZER) for name in writers]
    prompts = torch.cat([openings(test, 3, generator) for test in tests])
    device, cloud = split(get_peft_model(copy.deepcopy(MODEL), ladder()))
    texts = {}
    for how, random in (("greedy", None), ("sampled", generator)):
        _, tokens = written(device, cloud, prompts, new, random)
        texts[how] = torch.cat([prompts, tokens.view(len(prompts), new)], 1).view(len(writers), 3, -1).tolist()
    public = {
        gram
        for t in corpora.encode(corpora.public("train")[:: drafts.EVERY], TOKENIZER)
        for gram in grams(t.ids.tolist())
    }
    for at, name in enumerate(writers):
        own = corpora.encode(corpora.writer(name).split("train"), TOKENIZER)
        private = {gram for text in own for gram in grams(text.ids.tolist())}
        guessing = {
            "lookup": drafts.lookup,
            "lookup and public counts": drafts.public(TOKENIZER),
            "lookup and own counts": drafts.counted(Counts(text.ids for text in own)),
        }
        for (what, draft), how in itertools.product(guessing.items(), texts):
            replays = [replay(draft, ids) for ids in texts[how][at]]
            told = set().union(*(read for _, read in replays)) & private
            counted = (sum(rejected for rejected, _ in replays), len(told), len(told - public), 3 * new)
            sums[what, how] = [a + b for a, b in zip(sums.get((what, how), [0] * 4), counted, strict=True)]
    return [
        row(
            "drafts", f"{len(writers)} writers", what, method=how, tokens=tokens,
            rejected_per_token=round(rejected / tokens, 3), private=round(1000 * told / tokens, 1),
            only_private=round(1000 * only / tokens, 1),
        )
        for (what, how), (rejected, told, only, tokens) in sums.items()
    ]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small part, and nothing is recorded")
    parser.add_argument("--answers", action="store_true", help="only PrivateLoRA's M, into what is recorded")
    parser.add_argument("--copies", action="store_true", help="only the copies of ladders, into what is recorded")
    options = parser.parse_args()
    quick = options.quick
    if options.answers:
        kept = catalog.measured("residual_imitation").query("what != 'answers'")
        record.write("residual.imitation", [r for name in WRITERS for r in solved_rows(name, STEPS)], keep=kept)
        raise SystemExit
    writers, widths, steps = (WRITERS[:1], (None, 512), 3) if quick else (WRITERS, (None, 512), STEPS)
    sizes = (500, 1_000) if quick else (1_000, 10_000, 100_000)
    text = corpora.encode(corpora.public("train")[:: drafts.EVERY], TOKENIZER)
    public = list(islice(corpora.batches(text, batch=BATCH, seq=SEQ, seed=1000), 8))
    rows = []
    for name in writers:
        for width in widths:
            rows += imitation_rows(name, width, public, steps, sizes)
        if not options.copies:
            rows += solved_rows(name, steps)
    if options.copies:
        kept = catalog.measured("residual_imitation").query("what == 'answers' or section == 'drafts'")
        record.write("residual.imitation", rows, keep=kept)
        raise SystemExit
    rows += drafts_rows(writers if quick else corpora.writers())
    if not quick:
        record.write("residual.imitation", rows)
