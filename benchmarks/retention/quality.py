"""Retaining heads beside the methods that they are compared with: what is found, in how much memory, how fast.

* budget: pairs in noise, 128 tokens, five models of their own seed; each scorer's accuracy by budget, each model's own
  heads. The oracle keeps by the labels of the answer itself.
* chunk, stabilizers, positions, length: the first of these models; length up to 16,384 tokens.
* asked: by chunk size as well, where the prompt itself ends with a question that is asked again.
* flat: live bytes of keys and values while 1,024 to 65,536 tokens are read, beside the formula.
* lookup: where the question stands, with heads trained for each place, and the question protected or not.
* table: method × tokens per second, peak of live bytes, accuracy, and the longest prompt within one limit of memory.
* text heads, text: heads for plpkg-small, trained on its public text; perplexity of what follows a held-out prompt,
  half of the budget being for the latest units with every method, or (own rules) as each has been published.
* quanto: a full cache in few bits beside transformers' own, by the perplexity of the same text.
* heads, eviction, speed: a random Llama of 12 layers × 768; CPU seconds of a part as a share of the prefill's, and
  tokens per second beside full attention. Medians of runs that take turns.
* space: the peak of live bytes while a prompt is read, by class of method and by length.
* fake: Llama-3.1-8B and Phi-3-mini at 128K with the published sizes, on fake tensors.

Run: ``python -m benchmarks.retention.quality`` (about an hour on one idle core), or some sections by name. It also
writes ``data/retention``: the lookup model with its heads, and plpkg-small's heads. Not part of ``make bench``.
"""

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, QuantizedCache

from benchmarks import record
from benchmarks.retention import merge, offload
from benchmarks.retention.lookup import train_lookup
from benchmarks.retention.sparse import VerticalSlash
from plpkg import catalog
from plpkg.backbones import load_backbone, random_backbone
from plpkg.decoding import cache_among, cache_argument
from plpkg.memory import MemoryTimeline
from plpkg.recorded import half_width
from plpkg.retention import RetainingHeads, chunked_prefill, cis_labels, scorers, text, tiny
from plpkg.retention.cache.quantize import quantized
from plpkg.retention.cache.rotary import Rotary
from plpkg.retention.eviction import Eviction
from plpkg.retention.head import HeadsConfig
from plpkg.retention.scorers import H2O, KeyNorm, Locret, Random, SinkRecent, SirLlm, SnapKv
from plpkg.retention.train import train_heads
from plpkg.retention.trials.tasks import lookup, pairs_in_noise

SEEDS = 5
SHIPPED = record.DATA.parent / "retention"
LENGTH = 128


def pairs_of(length: int) -> Callable[[int], object]:
    return lambda seed: pairs_in_noise(16, length, seed=seed)


@functools.cache
def trained(seed: int):
    """A model that finds pairs in noise, its heads, and the CPU seconds of both. The first comes with the package."""
    began = time.process_time()
    model = tiny.train(seed=seed, progress=False)
    learnt = time.process_time()
    heads = heads_for(model, pairs_of(LENGTH), seed)
    if seed == 0:
        tiny.save(SHIPPED / "pairs.safetensors", model, {"pairs": heads})
    return model, heads, learnt - began, time.process_time() - learnt


def shipped_pairs():
    """The first of these models, and its heads."""
    model, heads = tiny.shipped("pairs")
    return model, heads["pairs"]


def heads_for(model, draw, seed: int = 0) -> RetainingHeads:
    heads = RetainingHeads.attach(model, 64, seed=seed)
    log = train_heads(model, heads, tiny.examples(draw, 400, seed=seed), steps=400, lr=5e-3, warmup=50, progress=False)
    print(log, flush=True)
    return heads


def candidates(heads: RetainingHeads, labels: torch.Tensor) -> dict[str, object]:
    return {
        "Locret": Locret(heads),
        "oracle": scorers.Static(labels),
        "SnapKV": SnapKv(),
        "H2O": H2O(),
        "SirLLM": SirLlm(),
        "random": Random(),
        "sink + recent": SinkRecent(),
        "key norm": KeyNorm(),
    }


def labels_of(model, task) -> torch.Tensor:
    return cis_labels(model, tiny.packed(task.ids), task.prompt.shape[1])


def rows_of_budget() -> Iterator[dict]:
    for seed in range(SEEDS):
        model, heads, model_s, heads_s = trained(seed)
        task = pairs_in_noise(128, LENGTH, seed=10_000 + seed)
        full = tiny.accuracy(model, task, None, 0)
        yield dict(case="full cache", model_seed=seed, accuracy=full, cpu_s=model_s)
        for budget in (8, 12, 16, 24, 32, 48, 64):
            for name, scorer in candidates(heads, labels_of(model, task)).items():
                accuracy = tiny.accuracy(model, task, scorer, budget, stabilizers=min(8, budget // 4))
                cpu = heads_s if name == "Locret" else None
                yield dict(case=name, x=budget, model_seed=seed, accuracy=accuracy, of_full=accuracy / full, cpu_s=cpu)


def rows_of_chunk() -> Iterator[dict]:
    model, heads = shipped_pairs()
    task = pairs_in_noise(128, LENGTH, seed=10_000)
    for chunk_size in (4, 8, 16, 32, 64, LENGTH + 1):
        for name, scorer in candidates(heads, labels_of(model, task)).items():
            yield dict(case=name, x=chunk_size, accuracy=tiny.accuracy(model, task, scorer, 16, chunk_size))


def rows_of_asked() -> Iterator[dict]:
    """Pairs in noise, then the question, all of it cut; the question is asked again: what SnapKV is made for."""
    model, heads = shipped_pairs()
    task = pairs_in_noise(256, LENGTH, seed=50_000).asked_twice
    labels = labels_of(model, task)
    yield dict(case="full cache", accuracy=tiny.accuracy(model, task, None, 0))
    for chunk_size in (8, 16, 32, 64, task.prompt.shape[1]):
        for name, scorer in {
            "Locret": Locret(heads),
            "SnapKV, window 2": SnapKv(window=2, kernel=1),
            "H2O, a quarter recent": H2O(recent_share=0.25),
            "oracle": scorers.Static(labels),
            "random": Random(),
        }.items():
            yield dict(case=name, x=chunk_size, accuracy=tiny.accuracy(model, task, scorer, 16, chunk_size))


def rows_of_stabilizers() -> Iterator[dict]:
    model, heads = shipped_pairs()
    task = pairs_in_noise(128, LENGTH, seed=10_000)
    for budget in (8, 12, 16):
        for stabilizers in (0, 2, 4, 6, 8, 10, 12, 14):
            if stabilizers < budget:
                accuracy = tiny.accuracy(model, task, Locret(heads), budget, stabilizers=stabilizers)
                yield dict(case=f"budget {budget}", x=stabilizers, accuracy=accuracy)
    for sink in (0, 1, 2, 4):
        for name in ("Locret", "random", "H2O"):
            scorer = candidates(heads, labels_of(model, task))[name]
            scorer.sink = sink
            yield dict(case=f"sink, {name}", x=sink, accuracy=tiny.accuracy(model, task, scorer, 16))


def rows_of_positions() -> Iterator[dict]:
    model, heads = shipped_pairs()
    for length in (128, 256, 512, 1024, 2048, 4096):
        task = pairs_in_noise(32, length, seed=20_000)
        for positions in ("reassigned", "original"):
            accuracy = tiny.accuracy(model, task, Locret(heads), 32, positions=positions)
            yield dict(case=positions, x=length, accuracy=accuracy)


def rows_of_length() -> Iterator[dict]:
    model, heads = shipped_pairs()
    for length in (128, 256, 512, 1024, 4096, 16_384):
        task = pairs_in_noise(64 if length < 4096 else 16, length, seed=30_000)
        if length <= 4096:
            yield dict(case="full cache", x=length, accuracy=tiny.accuracy(model, task, None, 0))
        for budget, name, scorer in (
            (16, "Locret, 16 units", Locret(heads)), (32, "Locret, 32 units", Locret(heads)),
            (32, "SnapKV, 32 units", SnapKv()), (32, "H2O, 32 units", H2O()),
            (32, "sink + recent, 32 units", SinkRecent()),
        ):  # fmt: skip
            yield dict(case=name, x=length, accuracy=tiny.accuracy(model, task, scorer, budget))


def rows_of_flat() -> Iterator[dict]:
    """The storages of keys and values, added up before every cut; and the peak of everything beside the weights."""
    model, heads = shipped_pairs()
    budget, chunk_size = 32, 32
    one = 2 * 2 * 16 * 4  # K and V of 2 heads of 16 numbers in float32
    for length in (1024, 4096, 16_384, 65_536):
        ids, sizes = tiny.packed(pairs_in_noise(1, length, seed=40_000).prompt), []

        with MemoryTimeline() as timeline:
            timeline.track(model, heads, ids)
            start = timeline._total
            with weighing(sizes):
                result = chunked_prefill(model, ids, Locret(heads), budget, chunk_size, log_positions=False)
        yield dict(
            case="keys and values", x=length, kib=max(sizes) / 1024, formula_kib=2 * (budget + chunk_size) * one / 1024,
            live_kib=(timeline.peak_bytes - start) / 1024, passes=len(result.log),
        )  # fmt: skip


@contextlib.contextmanager
def weighing(sizes: list[int]) -> Iterator[None]:
    """Before every cut, add up the storages of all keys and values."""
    cut = Eviction.cut

    def weighed(self, *args, **kwargs):
        stores = [layer.store for layer in self.cache.evicting.values()]
        sizes.append(sum(t.untyped_storage().nbytes() for s in stores for t in (s.keys, s.values)))
        return cut(self, *args, **kwargs)

    Eviction.cut = weighed
    try:
        yield
    finally:
        Eviction.cut = cut


def rows_of_lookup() -> Iterator[dict]:
    model = train_lookup(progress=False)
    heads = {q: heads_for(model, lambda seed, q=q: lookup(16, question=q, seed=seed)) for q in ("last", "first")}
    tiny.save(SHIPPED / "lookup.safetensors", model, heads)
    for question, trained_on in (("last", "last"), ("first", "first"), ("both", "first")):
        task = lookup(512, question=question, seed=50_000)
        labels = labels_of(model, task)
        yield dict(case=f"asked {question}, full cache", accuracy=tiny.accuracy(model, task, None, 0))
        for sink in (0, 3):
            for budget in (6, 8, 12, 16, 24, 32):
                for name, scorer in (
                    ("Locret", Locret(heads[trained_on], sink=sink)),
                    ("oracle", scorers.Static(labels, sink=sink)),
                    ("random", Random(sink=sink)),
                ):
                    accuracy = tiny.accuracy(model, task, scorer, budget, 16)
                    case = f"asked {question}, {name}" + (", protected" if sink else "")
                    yield dict(case=case, x=budget, accuracy=accuracy)


LIMIT_KIB = 512
"""The limit of live memory beside the weights, for the table's longest prompt."""


def values_only(drawn) -> Iterator[tuple[torch.Tensor, ...]]:
    """Packed prompts and answers, with the values alone to be learnt."""
    for task in drawn:
        ids, targets = tiny.packed(task.ids), task.answer.clone()
        targets[:, :2] = targets[:, 3::2] = -100
        yield ids[:, : task.prompt.shape[1]], ids[:, task.prompt.shape[1] :], targets


def methods(model, heads) -> dict[str, Callable[[torch.Tensor], object]]:
    """Each reads packed ids ``(batch, seq)`` and returns the cache that answers."""
    mergers = {}
    for name, scorer in (("Locret", Locret(heads)), ("H2O", H2O())):
        mergers[name] = merge.Merger(model, 4)
        data = values_only(pairs_in_noise(16, LENGTH, seed=70_000 + i) for i in range(200))
        nats = merge.train_merger(model, mergers[name], data, scorer, 8, 32, progress=False)
        print(f"merging: loss {statistics.mean(nats[:20]):.3f} → {statistics.mean(nats[-20:]):.3f}", flush=True)
        mergers[name].requires_grad_(False)

    def evicting(scorer, budget: int = 16, **options):
        return lambda ids: chunked_prefill(model, ids, scorer, budget, 32, log_positions=False, **options).cache

    def merging(scorer, merger):
        return lambda ids: merge.merging_prefill(model, ids, scorer, 8, 32, merger).cache

    def full(ids):
        return cache_among(model(ids, use_cache=True, logits_to_keep=1))

    def chunked(ids):
        return chunked_prefill(
            model, ids, SinkRecent(), ids.shape[1], 32, positions="original", log_positions=False
        ).cache

    return {
        "full attention": full,
        "full cache, chunked": chunked,
        "full cache, 2 bit": evicting(SinkRecent(), 10**6, store=quantized(2, "kivi", 16)),
        "sink + recent": evicting(SinkRecent()),
        "SirLLM": evicting(SirLlm()),
        "H2O": evicting(H2O()),
        "SnapKV": evicting(SnapKv()),
        "Locret": evicting(Locret(heads)),
        "Locret, 4 bit": evicting(Locret(heads), store=quantized(4, "token", 16)),
        "Locret, 2 bit": evicting(Locret(heads), store=quantized(2, "token", 16)),
        "Locret, 2 bit KIVI": evicting(Locret(heads), store=quantized(2, "kivi", 8)),
        "Locret, 8 units": evicting(Locret(heads), 8),
        "Locret, 8 units, merged": merging(Locret(heads), mergers["Locret"]),
        "H2O, 8 units": evicting(H2O(), 8),
        "H2O, 8 units, merged": merging(H2O(), mergers["H2O"]),
    }


@torch.no_grad()
def rows_of_table() -> Iterator[dict]:
    """At the length that the model has learnt; speed and memory at 2,048 tokens."""
    model, heads = shipped_pairs()
    task = pairs_in_noise(128, LENGTH, seed=10_000)
    ids, prompt_len = tiny.packed(task.ids), task.prompt.shape[1]
    long = {n: tiny.packed(pairs_in_noise(1, n, seed=60_000).prompt) for n in (2**k for k in range(7, 15))}
    with torch.enable_grad():
        all_methods = methods(model, heads)
    entries = {name: (read, None) for name, read in all_methods.items()}
    entries["InfLLM-like"] = (None, dict(block=8, top=1, first=4, local=4))
    entries["MInference-like"] = (all_methods["full attention"], VerticalSlash(16, 8, last=16))

    def run(read, extra, ids, answer=None):
        if read is None:
            with offload.retrieving(model, **extra) as cache:
                offload.read(model, cache, ids, 32)
                return None if answer is None else model(answer, **cache_argument(cache)).logits
        if isinstance(extra, VerticalSlash):
            with extra.on(model):
                cache = read(ids)
        else:
            cache = read(ids)
        return None if answer is None else model(answer, **cache_argument(cache)).logits

    cpu_s = taking_turns({name: functools.partial(run, *entry, long[2048]) for name, entry in entries.items()}, 9)
    for name, entry in entries.items():
        accuracy = task.accuracy(run(*entry, ids[:, :prompt_len], ids[:, prompt_len:]))
        longest, peak = None, None
        for n, prompt in long.items():
            with MemoryTimeline() as timeline:
                timeline.track(model, heads)
                start = timeline._total
                run(*entry, prompt)
            used = (timeline.peak_bytes - start) / 1024
            longest = n if used <= LIMIT_KIB else longest
            peak = used if n == 2048 else peak
            if n >= 2048 and used > LIMIT_KIB:
                break
        yield dict(
            case=name, accuracy=accuracy, tokens_per_s=2048 / cpu_s[name], live_kib=peak, longest=longest,
            limit_kib=LIMIT_KIB,
        )  # fmt: skip


def rows_of_text_heads() -> Iterator[dict]:
    model, tokenizer = load_backbone("plpkg-small")
    heads, began = RetainingHeads.attach(model), time.process_time()
    data = text.continuations(tokenizer, "train", 400)
    log = train_heads(model, heads, data, steps=400, lr=2e-3, warmup=50, progress=False)
    heads.save_pretrained(SHIPPED / "plpkg-small")
    last = log.to_frame().tail(40).mean()
    yield dict(case="plpkg-small", x=400, loss=last["loss"], overlap=last["overlap"], cpu_s=time.process_time() - began)


def rows_of_text(equal: bool = True) -> Iterator[dict]:
    """Half of the budget for the latest units, or what each method protects by itself; no local tail.

    ``over_random`` is the mean over prompts of the difference to random scores, in nats a token, with its interval.
    """
    model, tokenizer = load_backbone("plpkg-small")
    heads = RetainingHeads.from_pretrained(SHIPPED / "plpkg-small", model)
    held_out = list(text.continuations(tokenizer, "test", 32))
    yield dict(case="full cache", perplexity=text.perplexity(model, held_out, None, 0))
    for budget in (16, 64, 256):
        nats = {}
        for name, (scorer, *arguments) in {
            "random": (Random,),
            "Locret": (Locret, heads),
            "SnapKV": (SnapKv,),
            "H2O": (H2O,),
            "SirLLM": (SirLlm,),
            "sink + recent": (SinkRecent,),
            "key norm": (KeyNorm,),
        }.items():
            chosen = scorer(*arguments, recent=budget // 2 if equal else None)
            nats[name] = pd.Series([math.log(text.perplexity(model, [one], chosen, budget)) for one in held_out])
            over = nats[name] - nats["random"]
            yield dict(
                case=name, x=budget, perplexity=math.exp(nats[name].mean()), over_random=over.mean(),
                half_width=half_width(over),
            )  # fmt: skip


@torch.no_grad()
def rows_of_quanto() -> Iterator[dict]:
    """Full caches in 4 and 2 bit, ours and transformers' own, while plpkg-small reads real text in chunks of 64."""
    model, tokenizer = load_backbone("plpkg-small")
    held_out = list(text.continuations(tokenizer, "test", 16))
    yield dict(case="float32", perplexity=text.perplexity(model, held_out, None, 0))
    for bits in (4, 2):
        for scheme in ("token", "kivi"):
            began = time.process_time()
            perplexity = text.perplexity(model, held_out, SinkRecent(), 10**6, store=quantized(bits, scheme, 32))
            yield dict(case=f"{bits} bit, {scheme}", perplexity=perplexity, cpu_s=time.process_time() - began)
        began, nats = time.process_time(), []
        for prompt, answer in held_out:
            cache = QuantizedCache("quanto", model.config, nbits=bits, q_group_size=32, residual_length=32)
            for ids in prompt.split(64, dim=1):
                first = model(ids, **cache_argument(cache), logits_to_keep=1).logits
            logits = torch.cat([first, model(answer[:, :-1], **cache_argument(cache)).logits], dim=1)
            nats.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten()))
        perplexity = torch.stack(nats).mean().exp().item()
        yield dict(case=f"{bits} bit, transformers' quanto", perplexity=perplexity, cpu_s=time.process_time() - began)


def llama(num_kv_heads: int = 12):
    return random_backbone(
        "llama", num_layers=12, hidden=768, num_heads=12, num_kv_heads=num_kv_heads, intermediate=2048, vocab=1000,
        max_positions=65_536,
    )  # fmt: skip


def taking_turns(actions: dict[str, Callable[[], None]], runs: int) -> dict[str, float]:
    """The median CPU seconds of each action."""
    seconds = {name: [] for name in actions}
    for _ in range(runs):
        for name, action in actions.items():
            began = time.process_time()
            action()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(turns) for name, turns in seconds.items()}


def rows_of_heads() -> Iterator[dict]:
    for kv_heads in (12, 4):
        model = llama(kv_heads)
        heads, ids = RetainingHeads.attach(model), torch.randint(0, 1000, (1, 4096))
        cpu_s = taking_turns(
            {
                name: functools.partial(
                    chunked_prefill, model, ids, scorer, 2048, 512, stabilizers=64, log_positions=False
                )
                for name, scorer in (("recent", SinkRecent()), ("Locret", Locret(heads)))
            },
            5,
        )
        share = cpu_s["Locret"] / cpu_s["recent"] - 1
        yield dict(
            case=f"12 query, {kv_heads} KV heads, d_R {heads.config.hidden}", x=4096, share=share, cpu_s=cpu_s["Locret"]
        )


def rows_of_eviction() -> Iterator[dict]:
    """CPU seconds inside cuts and rotations, of those of the whole prefill."""
    for kv_heads in (4, 12):
        model = llama(kv_heads)
        heads, ids, shares = RetainingHeads.attach(model), torch.randint(0, 1000, (1, 8192)), []
        for _ in range(5):
            inside = {"cut": 0.0, "rotation": 0.0}
            with CpuSecondsInside(
                (Eviction, "cut", "cut"), (Rotary, "apply", "rotation"), (Rotary, "undo", "rotation"), inside=inside
            ):
                began = time.process_time()
                chunked_prefill(model, ids, Locret(heads), 2048, 512, stabilizers=64, log_positions=False)
                whole = time.process_time() - began
            shares.append((sum(inside.values()) / whole, inside["cut"] / whole, inside["rotation"] / whole, whole))
        both, cut, rotation, whole = map(statistics.median, zip(*shares, strict=True))
        yield dict(case=f"12 query, {kv_heads} KV heads", x=8192, share=both, cut=cut, rotation=rotation, cpu_s=whole)


class CpuSecondsInside:
    """Count the CPU seconds inside some methods."""

    def __init__(self, *methods, inside: dict[str, float]) -> None:
        self.methods, self.inside = methods, inside

    def __enter__(self):
        self.saved = [(owner, name, getattr(owner, name)) for owner, name, _ in self.methods]
        for owner, name, key in self.methods:
            setattr(owner, name, self.timed(getattr(owner, name), key))

    def timed(self, function, key):
        def wrapper(*args, **kwargs):
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside[key] += time.process_time() - began

        return wrapper

    def __exit__(self, *error):
        for owner, name, function in self.saved:
            setattr(owner, name, function)


@torch.no_grad()
def rows_of_speed() -> Iterator[dict]:
    model = llama(4)
    heads = RetainingHeads.attach(model)
    for length in (4096, 8192, 16_384, 32_768):
        ids = torch.randint(0, 1000, (1, length))
        cpu_s = taking_turns(
            {
                "full attention": lambda i=ids: model(i, use_cache=True, logits_to_keep=1),
                "Locret": lambda i=ids: chunked_prefill(model, i, Locret(heads), 2048, 512, log_positions=False),
            },
            3 if length < 8192 else 1,
        )
        for name, seconds in cpu_s.items():
            yield dict(case=name, x=length, tokens_per_s=length / seconds, cpu_s=seconds)


@torch.no_grad()
def rows_of_space() -> Iterator[dict]:
    """Eager attention, for the first class is what its matrix costs."""
    for length in (256, 512, 1024, 2048, 4096):
        for name in ("O(n²): whole prompt", "O(B·n): chunks of 64", "O(n/c): chunks, 2 bit", "O(1): chunks, 128 units"):
            model = random_backbone("llama", num_layers=4, hidden=128, num_heads=8, num_kv_heads=8, intermediate=256,
                                    max_positions=8192, options={"attn_implementation": "eager"})  # fmt: skip
            ids = torch.zeros(1, length, dtype=torch.long)
            with MemoryTimeline() as timeline:
                timeline.track(model)
                start = timeline._total
                if name.startswith("O(n²)"):
                    model(ids, use_cache=True, logits_to_keep=1)
                else:
                    budget = 128 if "128" in name else length
                    options = {"store": quantized(2, "kivi", 16)} if "2 bit" in name else {}
                    chunked_prefill(model, ids, SinkRecent(), budget, 64, log_positions=False, **options)
            yield dict(case=name, x=length, live_kib=(timeline.peak_bytes - start) / 1024)


class Unchecked(Locret):
    """Fake tensors have no values, so there is no fingerprint to compare."""

    def check(self, model) -> None:
        pass


def rows_of_fake() -> Iterator[dict]:
    """The publication's models and settings at 128K, on fake tensors: every operation runs, nothing is computed."""
    for name, budget, chunk_size in (
        ("llama-3.1-8b", 16_384, 1024),
        ("phi-3-mini-128k", 6000, 3072),
    ):
        shape = catalog.model(name)
        with FakeTensorMode():
            config = AutoConfig.for_model(
                shape.family, num_hidden_layers=shape.num_layers, hidden_size=shape.hidden,
                num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
                intermediate_size=shape.intermediate, vocab_size=shape.vocab, max_position_embeddings=131_072,
                pad_token_id=0,
            )  # fmt: skip
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
                dims = shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim
                heads = RetainingHeads(HeadsConfig("", *dims, 1024, "silu"))
            finally:
                torch.set_default_dtype(torch.float32)
            ids = torch.zeros(1, 131_072, dtype=torch.long)
            with MemoryTimeline() as timeline:
                timeline.track(model, heads, ids)
                start = timeline._total
                read = chunked_prefill(
                    model, ids, Unchecked(heads), budget, chunk_size, 2500, 100, log_positions=False, progress=True
                )
        one = shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * 2
        yield dict(
            case=name, x=131_072, full_gib=131_072 * one / 2**30, formula_gib=(budget + chunk_size) * one / 2**30,
            end_gib=read.cache.num_bytes / 2**30, live_gib=(timeline.peak_bytes - start) / 2**30,
        )  # fmt: skip


SECTIONS = {
    "lookup": rows_of_lookup,
    "budget": rows_of_budget,
    "chunk": rows_of_chunk,
    "asked": rows_of_asked,
    "stabilizers": rows_of_stabilizers,
    "positions": rows_of_positions,
    "length": rows_of_length,
    "flat": rows_of_flat,
    "table": rows_of_table,
    "text heads": rows_of_text_heads,
    "text": rows_of_text,
    "text, own rules": functools.partial(rows_of_text, equal=False),
    "quanto": rows_of_quanto,
    "heads": rows_of_heads,
    "eviction": rows_of_eviction,
    "speed": rows_of_speed,
    "space": rows_of_space,
    "fake": rows_of_fake,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("retention.quality", SECTIONS, __doc__)
