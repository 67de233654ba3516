"""Every figure of ours in ``data/claims.csv``, computed again, measured again, or read again from what was recorded.

By ``how`` and ``from`` of a row:

* ``computed``: a function of this file with its arguments, ``speed(llama-2-7b, 64)``.
* ``recorded``: rows of a table in ``data/measured`` and what is made of them, as in
  ``residual_baselines gain | method == 'counts' | gain | by case | over method == 'LoRA q k v r=16'``:
  table and section, or the table alone, for all of it; a query, or ``every row``; a column, or an expression in
  columns; then, in any order: ``by``, what the samples are (the rest, such as seeds, is averaged within each; the
  interval is Student's over them, of a ratio that of its linearisation); ``over`` or ``minus`` other rows of the table,
  sample by sample; ``within``, a column that has the half width of the interval; ``largest`` or ``smallest``, where
  several rows are chosen and are not samples; ``saved``, one minus that; ``times`` a number. The column ``published``
  says in the same words where in ``data/published`` the reported figure is.
* ``tested``: a test of ``make check``; it is not run here.

Shares come out as per cent or points where that is the row's unit. A figure that differs from the file's by more
than its tolerance is printed; then the exit status is 1. With ``--write`` figures and verdicts are written instead.

Run: ``make claims``, which is ``python -m benchmarks.claims`` (half a minute on one idle core; another half where no
text has been read yet). ``make checksums`` follows ``--write``. Not part of ``make bench``.
"""

import argparse
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable

import pandas as pd
import torch
from peft import get_peft_model

from plpkg import autonomy, catalog, claims, clipping, communication, corpora, recorded, residual, serving, throughput
from plpkg.backbones import load_backbone
from plpkg.memory import MIB
from plpkg.residual import PrivateLoraConfig, attacks
from plpkg.serving.service import Scheduler
from plpkg.serving.service.simulation import arrivals, simulate

FILE = catalog.data_path("claims.csv")
ORIGIN = ("command", "commit", "machine")
DIGITS = 6
EVERY = "every row"

Figure = tuple[float, float, float]
"""Ours, and both ends of its interval: NaN where nothing was sampled."""

COMPUTED: dict[str, Callable] = {}
SLOW: set[str] = set()
"""Those that take more than a second."""
TOLERANCE: dict[str, float] = {}
"""By how much a figure that is measured here may differ elsewhere, as a share; the rest has to be the same."""


def computed(function: Callable | None = None, *, slow: bool = False, tolerance: float = 0.0) -> Callable:
    """A figure that ``data/claims.csv`` may name; the same arguments are computed once."""

    def named(function: Callable) -> Callable:
        name = function.__name__
        COMPUTED[name] = cached = functools.cache(function)
        TOLERANCE[name] = tolerance
        if slow:
            SLOW.add(name)
        return cached

    return named(function) if function else named


def interval(values) -> Figure:
    """The mean of independent measurements with its interval of 95 %."""
    values = pd.Series(values)
    half = recorded.half_width(values)
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


# Communication: bits and round trips.


@computed
def full_mbit(tokens: int) -> float:
    """As the article counts: one projection, no end points."""
    return tokens * communication.full_activations("llama-7b", projections=1, endpoints=False).total_bits / 1e6


@computed
def low_rank_kbit(rank: int) -> float:
    return communication.low_rank("llama-7b", rank, projections=1, endpoints=False).total_bits / 1e3


@computed
def low_rank_share(rank: int) -> float:
    return 1e-3 * low_rank_kbit(rank) / full_mbit(1)


@computed
def counted_kbit(rank: int) -> float:
    """Every message of a token, serialised."""
    return communication.count(communication.low_rank_messages("llama-7b", rank)).total_bits / 1e3


@computed
def saved(rank: int, baseline: str) -> float:
    """A token's saving over full activations: ``article`` counts one projection, ``split`` what a split LoRA sends."""
    full = {
        "article": communication.full_activations("llama-7b", projections=1, endpoints=False),
        "split": communication.full_activations("llama-7b", baseline="actual"),
    }[baseline]
    return 1 - communication.low_rank("llama-7b", rank).share_of(full)


@computed
def traffic_of_30b_over_7b(rank: int) -> float:
    return communication.low_rank("llama-30b", rank).share_of(communication.low_rank("llama-7b", rank))


@computed
def time_over_a_lan(link: str) -> float:
    """A token's time on a link at rank 64 over that of full activations, as a split LoRA sends them, in a LAN."""
    full = communication.full_activations("llama-7b", baseline="actual").seconds("lan")
    return sum(communication.low_rank("llama-7b", 64).seconds(link).values()) / sum(full.values())


@computed
def round_trips_of_a_cut() -> int:
    return communication.layer_cut("llama-7b", 4).round_trips


@computed
def messages_of_a_layer() -> int:
    """Those of one of the adapted layers."""
    return sum(message.layer == 0 for message in communication.low_rank_messages("llama-7b", 64))


# Throughput: speeds, memory, operations, the score.


@computed
def speed(model: str, rank: int = 64, batch: int = 1, accounting: str = "figure", rtt_ms: int = 0) -> float:
    return throughput.decode(model, rank, accounting, batch=batch, rtt_s=rtt_ms / 1e3).tokens_per_s


@computed
def prefill_speed(rank: int, tokens: int) -> float:
    return throughput.prefill("llama-2-7b", tokens, rank, "figure").tokens_per_s


@computed
def share_of_gpu(model: str, gpu: str = "published") -> float:
    return throughput.decode(model, accounting="figure", gpu=gpu).gpu_fraction


@computed
def share_of_33b_over_7b() -> float:
    return share_of_gpu("llama-30b") / share_of_gpu("llama-2-7b")


@computed
def over_the_phone(alone: str, rtt_ms: int = 0) -> float:
    """Speed over what the article says of the phone alone, in its ``text`` or its ``figure``."""
    return speed("llama-2-7b", rtt_ms=rtt_ms) / phone_alone("decode", alone)


@computed
def phone_alone(stage: str, place: str) -> float:
    """The article's own figure, read from its other place."""
    return published(f"private_lora_claims | claim == 'phone_only_{stage}_{place}' | value")


@computed
def phone_mb(model: str, embedding: str = "without") -> float:
    return throughput.phone_memory(model, embedding=embedding == "with").total_mb


@computed
def whole_mb(model: str, bits: int) -> float:
    return throughput.whole_model_bytes(model, bits) / 1e6


@computed
def phone_gflop(model: str) -> float:
    return throughput.phone_flops(model) / 1e9


@computed
def share_of_operations(model: str) -> float:
    return throughput.phone_flops(model) / throughput.whole_model_flops(model)


@computed
def share_of_m(model: str) -> float:
    return throughput.Split(model, 128).m_parameters / catalog.model(model).parameters


@computed
def share_of_parameters(model: str) -> float:
    """Word embedding, LM head and M of rank 128, of all weights."""
    held = throughput.phone_memory(model, embedding=True)
    return held.total_bytes / 2 / catalog.model(model).parameters


@computed
def m_s(model: str, method: str) -> float:
    """From the other cells of the article's table."""
    scores = throughput.published.scores().set_index(["model", "method"])
    return float(scores.loc[(model, method), "computed"])


@computed
def behind_lora(model: str, benchmark: str) -> float:
    """How far PrivateLoRA is behind LoRA^P in the article's table, as a share."""
    scores = catalog.published("private_lora_accuracy").set_index(["model", "method"])[benchmark]
    return (scores[model, "LoRA^P"] - scores[model, "PL"]) / 100


# Residual: what crosses, measured on plpkg-small with some random M of rank 64.


@functools.cache
def crossing():
    """Adapted model, 256 tokens of a writer's held-out text, and u and v of every M."""
    model, tokenizer = load_backbone("plpkg-small")
    adapted = get_peft_model(model, PrivateLoraConfig(r_c2d=64, r_d2c=64))
    generator = torch.Generator().manual_seed(0)
    for m in residual.matrices(adapted).values():
        torch.nn.init.normal_(m.weight, std=0.02, generator=generator)
    texts = corpora.encode(corpora.writer("seaborn").split("test"), tokenizer)
    ids = torch.cat([text.ids for text in texts])[:256][None]
    return adapted, ids, attacks.exchanges(adapted, [ids])


@computed(slow=True, tolerance=0.5)
def error_of_the_clouds_m() -> Figure:
    """Of M by least squares from what crosses in half precision, relative; samples are the 15 matrices."""
    adapted, _, pairs = crossing()
    solved = {name: attacks.recover_m(*(t.half() for t in pairs[name])) for name in pairs}
    true = residual.matrices(adapted)
    return interval([attacks.relative_error(solved[name], true[name].weight) for name in pairs])


@computed(slow=True)
def tokens_read() -> float:
    """Of what the device sends, by the nearest row of the public table."""
    adapted, ids, _ = crossing()
    table = attacks.public_table(adapted.get_base_model())
    return attacks.token_accuracy(attacks.recover_tokens(residual.split(adapted)[0].embed(ids).half(), table), ids)


# Retention: bytes and weights.

LOCRET = {"phi-3-mini-128k": 6_000, "llama-3.1-8b": 16_384}
"""The paper's budgets."""


@computed
def cache_gib(model: str, bits: int, tokens: int = 131_072) -> float:
    shape = catalog.model(model)
    return 2 * shape.kv_dim * shape.cached_positions(tokens) * bits / 8 / 2**30


@computed
def share_of_heads(model: str, width: int = 1024) -> float:
    """The weights of the retaining heads, of the model's."""
    shape = catalog.model(model)
    heads = shape.num_layers * width * (shape.query_dim + 2 * shape.kv_dim + shape.num_kv_heads)
    return heads / shape.parameters


@computed
def tokens_a_unit(model: str, tokens: int = 131_072) -> float:
    return tokens / LOCRET[model]


# Clipping: bytes on fake tensors, ε, and what is told without noise.


@computed(slow=True)
def two_layers_mib(execution: str, batch: int, phase: str) -> float:
    return clipping.dataflow.emulate(execution, batch).increase_bytes(phase) / MIB


@computed(slow=True)
def cells_that_agree() -> int:
    return int(clipping.published.synthetic_table()["matches"].sum())


@computed(slow=True)
def spare_mib(library: str) -> float:
    """What a whole step of ghost clipping at a batch of 2^17 takes beyond SGD's: of Opacus 1.6, or of this package."""
    step = clipping.costs.two_layer_table((2**17,))[2**17]
    return float(step[f"{library}, ghost"] - step["SGD"])


@computed(slow=True)
def bert_gb(execution: str, batch: int) -> float:
    """With texts of 100 tokens; a GB is 1,000 MiB, as in the article."""
    published = clipping.published
    step = published.opacus_step(published.bert_task(batch, 100), execution)
    return clipping.dataflow.measure(step).phases[-1].increase_bytes / MIB / 1000


@computed(slow=True)
def bert_over_sgd(execution: str, batch: int) -> float:
    return bert_gb(execution, batch) / bert_gb("sgd", batch)


@computed(slow=True)
def largest_batch(execution: str) -> int:
    """The largest power of two that fits 16 GiB beside the model."""
    model_mib, batch = 4 * catalog.model("bert-base").parameters / MIB, 64
    while 1000 * bert_gb(execution, 2 * batch) + model_mib <= 16 * 1024:
        batch *= 2
    return batch


@computed
def bert_millions(part: str) -> float:
    """Weights of BERT-base, all of them or the last layer, pooler and classifier of three labels."""
    shape, labels = catalog.model("bert-base"), 3
    layer = 4 * shape.hidden * (shape.hidden + 1) + 2 * shape.hidden * shape.intermediate + shape.intermediate
    layer += shape.hidden + 2 * 2 * shape.hidden  # a bias and two norms
    ends = shape.hidden * (shape.hidden + 1) + labels * (shape.hidden + 1)
    return {"all": shape.parameters, "tuned": layer + ends}[part] / 1e6


@computed
def longest_gram(width: int) -> int:
    """The most positions for which two Gram matrices take at most the numbers of the gradient: counted on tensors."""
    positions = 1
    while True:
        a = g = torch.empty(positions + 1, width, device="meta")
        if (a @ a.T).numel() + (g @ g.T).numel() > (g.T @ a).numel():
            return positions
        positions += 1


@computed(slow=True)
def breaches_of_opacus() -> int:
    """Of Opacus's ghost clipping, in the 15 cases of the conformance check: where an example moves more than C."""
    return len(clipping.conformance.conformance(clipping.zoo.opacus, checks=["sensitivity"]).breached)


@computed(slow=True)
def epsilon(accountant: str) -> float:
    return clipping.accounting.epsilon_of(1.0, 0.01, 1_000, 1e-5, accountant=accountant)


@computed(slow=True, tolerance=0.1)
def bound_by_scores_over_guesses(canaries: int = 1000) -> Figure:
    """Lower bounds on ε from the same noisy numbers; samples are ten draws of σ = 1 and sensitivity 1."""
    from plpkg.clipping.checks import audit

    bounds, ratios = (audit.gaussian_audit, audit.one_run_audit), []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        included = torch.rand(canaries, generator=generator) < 0.5
        scores = (included + torch.randn(canaries, generator=generator)).numpy()
        by_scores, by_guesses = (bound(scores, included.numpy(), 1e-5) for bound in bounds)
        ratios.append(by_scores.epsilon / by_guesses.epsilon)
    return interval(ratios)


@computed(slow=True, tolerance=0.02)
def auc_of_projections(examples: int = 64, batch: int = 16) -> Figure:
    """How well who took part is told from a sum of gradients of M, random projections of those of ΔW, without noise.

    The attacker knows each candidate's gradient; samples are 20 drawn batches.
    """
    model, tokenizer = load_backbone("plpkg-small")
    adapted = get_peft_model(model, PrivateLoraConfig(r_c2d=16, r_d2c=16))
    texts = corpora.encode(corpora.writer("sklearn").split("train")[:20], tokenizer)
    windows = torch.cat([text.ids for text in texts]).unfold(0, 64, 64)[:examples]
    weights, gradients = [m.weight for m in residual.matrices(adapted).values()], []
    for window in windows:
        loss = adapted(input_ids=window[None], labels=window[None], use_cache=False).loss
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
    gradients = torch.stack(gradients)
    generator = torch.Generator().manual_seed(0)
    aucs = []
    for _ in range(20):
        drawn = torch.randperm(examples, generator=generator)
        scores = torch.linalg.lstsq(gradients.T.double(), gradients[drawn[:batch]].sum(0).double()[:, None]).solution
        aucs.append((scores[drawn[:batch]] > scores[drawn[batch:], 0]).double().mean().item())
    return interval(aucs)


# Serving: the size of an adapter, and what one tells.


@computed
def adapter_mb(rank: int) -> float:
    """Of Llama-2-7B, on all projections, in 16 bits."""
    return serving.popularity.decode([0], rank).adapter_bytes / 1e6


@computed
def wait_of_twice_as_many() -> float:
    """How much longer a first token takes (median, simulated) with sixteen adapters on eight slots than with eight."""
    few, many = (
        simulate(arrivals(2000, 11, adapters, "even"), Scheduler(8, max_queued=2000)).first_token_s()
        for adapters in (8, 16)
    )
    return many / few


@computed(slow=True, tolerance=0.05)
def auc_of_membership() -> Figure:
    """How well windows that seaborn's adapter has learnt are told from held-out ones, by how much their loss falls.

    Samples are 64 windows on each side; the interval is that of an area under the curve (Hanley and McNeil).
    """
    model, tokenizer = load_backbone("plpkg-small")
    windows = {}
    for split, first in (("train", 268), ("test", 0)):
        texts = corpora.encode(corpora.writer("seaborn").split(split), tokenizer)
        batches = corpora.batches(texts, batch=2, seq=128, seed=0)
        windows[split] = torch.cat(list(itertools.islice(batches, first, first + 32)))[:, :64]

    @torch.inference_mode()
    def loss(ids):
        logits = model(ids).logits[:, :-1].log_softmax(-1)
        return -logits.gather(-1, ids[:, 1:, None])[..., 0].mean(1)

    falls = {split: loss(ids) for split, ids in windows.items()}
    serving.merge(model, serving.validate_adapter(catalog.data_path("serving") / "seaborn", model))
    falls = {split: falls[split] - loss(ids) for split, ids in windows.items()}
    members, others = falls["train"], falls["test"]
    auc, m, n = (members[:, None] > others).double().mean().item(), len(members), len(others)
    pairs = (m - 1) * (auc / (2 - auc) - auc**2) + (n - 1) * (2 * auc**2 / (1 + auc) - auc**2)
    half = 1.96 * math.sqrt((auc * (1 - auc) + pairs) / (m * n))
    return auc, auc - half, min(1.0, auc + half)


# Autonomy: time, and what an update tells.


@computed
def days_of_learning(minutes: int) -> float:
    plan = autonomy.widget.compute((10_000, 20), "word LSTM", "last layer", 1.0, minutes)
    return next(way["days"] for way in plan.ways if way["learning"] == "last layer")


@computed
def error_of_an_image_read() -> float:
    """Of one digit, divided out of the gradient of a first linear layer: relative, to four places (it is rounding)."""
    from torch import nn

    digits = corpora.digits()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loss = nn.functional.cross_entropy(network(digits.images[:1]), digits.labels[:1])
    by_weight, by_bias = torch.autograd.grad(loss, [network[1].weight, network[1].bias])
    row = by_bias.abs().argmax()
    return round(attacks.relative_error((by_weight[row] / by_bias[row])[None], digits.images[0].flatten()[None]), 4)


# What a row says it is.


def call(source: str) -> Figure:
    """The figure of ``name(argument, argument)``."""
    name, arguments = re.fullmatch(r"(\w+)\((.*)\)", source).groups()
    parsed = [int(text) if text.isdecimal() else text for text in filter(None, arguments.split(", "))]
    figure = COMPUTED[name](*parsed)
    return figure if isinstance(figure, tuple) else (float(figure), math.nan, math.nan)


MEASURED, PUBLISHED = functools.cache(catalog.measured), functools.cache(catalog.published)


def chosen(source: str, read: Callable = MEASURED) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a table's section, and the words that say what to make of them."""
    place, *words = source.split(" | ")
    name, _, section = place.partition(" ")
    rows = read(name)
    if section:
        rows = rows[rows["section"] == section]
        if rows.empty:
            raise ValueError(f"{name} has no section {section!r}")
    return rows, words


def selected(source: str, read: Callable = MEASURED) -> Figure:
    """The figure that such words say, of a table in ``data/measured``."""
    rows, (query, column, *options) = chosen(source, read)
    asked = dict(option.partition(" ")[::2] for option in options)
    unknown = set(asked) - {"by", "over", "minus", "within", "largest", "smallest", "saved", "times"}
    if unknown or {"over", "minus"} <= set(asked):
        raise ValueError(f"cannot make that of rows: {source!r}")

    def values(query: str) -> pd.Series:
        taken = rows if query == EVERY else rows.query(query)
        some = taken.eval(column).map(_number)
        if "by" in asked:
            some = some.groupby(taken[asked["by"]]).mean()
        for name, pick in (("largest", pd.Series.max), ("smallest", pd.Series.min)):
            some = pd.Series([pick(some)]) if name in asked else some
        if some.empty or some.isna().any() or (len(some) > 1 and "by" not in asked):
            raise ValueError(f"{len(some)} values where one is wanted: {query!r} of {source!r}")
        return some if "by" in asked and len(some) > 1 else some.reset_index(drop=True)

    ours = values(query)
    half = recorded.half_width(ours)
    figure = ours.mean()
    if "minus" in asked:
        difference = ours - values(asked["minus"])
        figure, half = difference.mean(), recorded.half_width(difference)
    if "over" in asked:
        other = values(asked["over"])
        figure = ours.mean() / other.mean()
        half = recorded.half_width(ours - figure * other) / abs(other.mean())
    if "within" in asked:
        half = rows.query(query)[asked["within"]].item()
    if "saved" in asked:
        figure = 1 - figure
    scale = float(asked.get("times", 1))
    return scale * float(figure), scale * float(figure - half), scale * float(figure + half)


def _number(cell) -> float:
    """A cell as a number: of ``"1,142 MB"`` the first; of ``"OOM"`` none."""
    if isinstance(cell, str):
        found = re.search(claims.NUMBER, cell)
        return float(found[0].replace(",", "")) if found else math.nan
    return float(cell)


def published(source: str) -> float:
    """A figure of ``data/published``, in the words of :func:`selected`."""
    return selected(source, PUBLISHED)[0]


def figures(row) -> Figure:
    """Ours of a row that is computed or recorded, in its unit, with as many digits as the file has."""
    figure = {"computed": call, "recorded": selected}[row["how"]](row["from"])
    scale = 100 if row["unit"] in ("%", "points") else 1
    return tuple(float(f"{scale * number:.{DIGITS}g}") for number in figure)


def same(row, figure: Figure) -> bool:
    """Whether a figure is the file's, within the tolerance of what is measured here."""
    allowed = TOLERANCE.get(row["from"].partition("(")[0], 0.0) if row["how"] == "computed" else 0.0
    if allowed:
        return math.isclose(row["ours"], figure[0], rel_tol=allowed)
    before = [row[key] for key in ("ours", "low", "high")]
    return all(
        math.isclose(a, b, rel_tol=10.0 ** (1 - DIGITS)) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(before, figure, strict=True)
    )


def write(rows: pd.DataFrame) -> None:
    """Keep the table with the verdicts that its figures have."""
    rows = rows.assign(verdict=[claims.verdict_on(row) for row in rows.to_dict("records")])
    for column in ("ours", "low", "high"):
        rows[column] = [("" if number != number else f"{number:.10g}") for number in rows[column]]
    rows.to_csv(FILE, index=False, lineterminator="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write figures and verdicts to data/claims.csv")
    parser.add_argument("--quick", action="store_true", help="leave out what takes more than a second")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, moved, origins, began = claims.table(), [], {}, time.perf_counter()
    counts = rows["how"].value_counts()
    for place, row in enumerate(rows.to_dict("records")):
        if row["how"] not in ("computed", "recorded"):
            continue
        if arguments.quick and row["from"].partition("(")[0] in SLOW:
            continue
        figure = figures(row)
        if row["how"] == "recorded":
            taken, (query, *_) = chosen(row["from"])
            taken = taken if query == EVERY else taken.query(query)
            for origin in taken[list(ORIGIN)].drop_duplicates().itertuples(index=False):
                origins.setdefault(tuple(origin), []).append(row["id"])
        if not same(row, figure):
            before, now = (f"{number:.{DIGITS}g}" for number in (row["ours"], figure[0]))
            moved.append(f"{row['id']}: {before} in the file, {now} now, of {row['from']}")
            rows.loc[place, ["ours", "low", "high"]] = figure
    for origin, ids in sorted(origins.items()):
        print(f"recorded by {' | '.join(map(str, origin))}:\n    {', '.join(ids)}")
    print(
        f"{len(rows)} claims: {counts.get('computed', 0)} computed, {counts.get('recorded', 0)} read from what was "
        f"recorded, {counts.get('tested', 0)} tested (make check), {counts.get('none', 0)} without a figure; "
        f"{time.perf_counter() - began:.0f} s"
    )
    print(*moved, sep="\n", end="\n" if moved else "")
    if arguments.write:
        write(rows)
        print(f"{len(moved)} figures written to data/{FILE.name}; run `make checksums` before committing it")
    else:
        sys.exit(1 if moved else 0)


if __name__ == "__main__":
    main()
