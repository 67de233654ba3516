"""Every checker knows the right answer, and says of each likely slip what it is."""

import importlib
import inspect
import itertools
import math

import numpy as np
import pytest
import torch

from plpkg import ROOMS

SLIPS = [
    ("clipping.crossover_positions", 384, 543, "rule of bytes"),
    ("clipping.crossover_positions", 384, 768, "both Gram"),
    ("clipping.crossover_positions", 384, 192, "two operations"),
    ("clipping.crossover_positions", 384, 100, "too small"),
    ("communication.round_trips", 820, 41, "one pass"),
    ("communication.round_trips", 820, 20, "that is the passes"),
    ("communication.round_trips", 820, 801, "in every pass"),
    ("communication.round_trips", 820, 800, "each pass has one more"),
    ("communication.round_trips", 820, 840, "messages 1 and 4 are missing"),
    ("communication.round_trips", 820, 4920, "crosses in one pass"),
    ("communication.round_trips", 820, 1640, "is one round trip"),
    ("communication.round_trips", 820, 861, "already gives the first"),
    ("residual.tokens_until_m", 64, 4096, "how many entries"),
    ("residual.tokens_until_m", 64, 96, "in practice"),
    ("residual.tokens_until_m", 64, 63, "one direction open"),
    ("residual.tokens_until_m", 64, 1, "a single u"),
    ("retention.peak_units", 17_408, 16_384, "left after a cut"),
    ("retention.peak_units", 17_408, 16_484, "left at the end"),
    ("retention.peak_units", 17_408, 131_072, "full cache"),
    ("retention.peak_units", 17_408, 18_884, "the stabilizers are among"),
    ("retention.peak_units", 17_408, 19_908, "the stabilizers are among"),
    ("retention.peak_units", 17_408, 17_508, "has been cut"),
    ("retention.peak_units", 17_408, 12, "too small"),
    ("serving.adapters_per_backbone", 1607, 3213, "an A and a B"),
    ("serving.adapters_per_backbone", 1607, 12_852, "the rank is missing"),
    ("serving.adapters_per_backbone", 1607, 803, "two projections"),
    ("serving.adapters_per_backbone", 1607, 1071, "two projections"),
    ("serving.adapters_per_backbone", 1607, 6.28, "the whole update"),
    ("serving.adapters_per_backbone", 1607, 51_410, "32 layers"),
    ("serving.adapters_per_backbone", 1607, 500, "too small"),
    ("throughput.rtt_for_half", 1.12, 0.00112, "another unit"),
    ("throughput.rtt_for_half", 1.1, 1.09, "figure accounting"),
    ("throughput.rtt_for_half", 1.12, 37.0, "1 + 32"),
    ("throughput.rtt_for_half", 1.12, 0.56, "twice the time"),
    ("throughput.rtt_for_half", 1.12, 1.0, "now compute it"),
    ("throughput.rtt_for_half", 1.14, 1.156, "one more round trip"),
]


def segments(owners, lengths):
    runs, end = [], 0
    for owner, length in zip(owners, lengths, strict=True):
        if runs and runs[-1][2] == owner:
            runs[-1] = (runs[-1][0], end + length, owner)
        else:
            runs.append((end, end + length, owner))
        end += length
    return runs


def one_segment_for_each_owner(owners, lengths, drop=()):
    spans = {}
    for start, stop, owner in segments(owners, lengths):
        spans[owner] = spans.get(owner, (start,))[0], stop
    return [(*span, owner) for owner, span in spans.items() if owner not in drop]


def bound(waiting, k, patience_s, longest_s, of=set):
    return patience_s + waiting[: k + 1].count(waiting[k]) * len(of(waiting)) * longest_s


def clipped_sum(a, g, norms, C, most=1.0, factors=None):
    factors = (C / norms).clamp(max=most) if factors is None else factors
    return (factors[:, None, None] * g).flatten(0, 1).T @ a.flatten(0, 1)


def sum_clipped_as_one(a, g, norms, C):
    total = torch.einsum("btp,btd->pd", g, a)
    return total * min(1, C / float(total.norm()))


def membership(own, public):
    return public / own


def guarded(public, personal, right, allowance, lead=0):
    shown, spent = [], 0
    for one, other, truth in zip(public, personal, right, strict=True):
        shown.append(other if lead > 0 and spent < allowance else one)
        lead += (other == truth) - (one == truth)
        spent += (one == truth) - (shown[-1] == truth)
    return shown


def follows(received, rules, passes=99, enough=all):
    known = set(received)
    for _ in range(passes):
        known |= {conclusion for needed, conclusion in rules if enough(each in known for each in needed)}
    return known


def turns(directions):
    return sum(a != b for a, b in itertools.pairwise(["", *directions])) // 2


def break_even(tokens_per_s, num_layers, phone_tokens_per_s):
    return (1 / phone_tokens_per_s - 1 / tokens_per_s) / (1 + num_layers)


def labels(q, k, scale=True, how="amax", repeat=False, far=False, of=lambda logits: logits):
    group = len(q) // len(k)
    keys = k.repeat(group, 1, 1) if repeat else k.repeat_interleave(group, dim=0)
    logits = of(q @ keys.transpose(1, 2) / (q.shape[-1] ** 0.5 if scale else 1))
    logits = logits.unflatten(0, (group, -1)).transpose(0, 1) if far else logits.unflatten(0, (-1, group))
    return getattr(logits, how)(dim=(1, 2))


def nearest_row(queries, rows):
    return torch.cdist(queries, rows).argmin(-1)


def read_labels(hidden, gradient, head):
    return nearest_row((hidden @ head.T).softmax(-1) @ head - gradient, head)


def pays_from(tokens, t_1, t_k, round_trips, low=0.0):
    return max(low, (t_k - tokens * t_1) / (tokens - 1) / round_trips)


def peeks(public, personal, right, allowance):
    shown, lead, spent = [], 0, 0
    for one, other, truth in zip(public, personal, right, strict=True):
        lead += (other == truth) - (one == truth)
        shown.append(other if lead > 0 and spent < allowance else one)
        spent += (one == truth) - (shown[-1] == truth)
    return shown


def sees_who_is_right(public, personal, right, allowance):
    return [other if other == truth else one for one, other, truth in zip(public, personal, right, strict=True)]


def pays_for_every_error(public, personal, right, allowance, own=True):
    shown, lead, spent = [], 0, 0
    for one, other, truth in zip(public, personal, right, strict=True):
        shown.append(other if lead > 0 and spent < allowance else one)
        lead += (other == truth) - (one == truth)
        spent += shown[-1] != truth if own else (one == truth) - (other == truth)
    return shown


def pays_unseen_errors(*case):
    return pays_for_every_error(*case, own=False)


FUNCTIONS = [  # the right function above is called as its checker is
    ("communication.follows", lambda received, rules: list(follows(received, rules)), "a set is wanted"),
    ("communication.follows", lambda received, rules: follows(received, rules) - received, "is known, too"),
    ("communication.follows", lambda received, rules: follows(received, rules, passes=1), "until nothing new follows"),
    ("communication.follows", lambda received, rules: follows(received, rules, passes=2), "until nothing new"),
    ("communication.follows", lambda received, rules: follows(received, rules, enough=any), "not one of it"),
    ("communication.turns", lambda d: d.count("up"), "wait only once"),
    ("communication.turns", lambda d: 2 * turns(d), "one round trip"),
    ("communication.turns", len, "one round trip"),
    ("communication.turns", lambda d: -(-len(list(itertools.groupby(d))) // 2), "no down answers"),
    ("communication.turns", lambda d: sum(way == "up" for way, _ in itertools.groupby(d)), "no down answers"),
    ("communication.turns", lambda d: len(d) // 2, "wait only once"),
    ("communication.turns", lambda d: sum(a != b for a, b in itertools.pairwise(d)) // 2, "the first message begins"),
    ("communication.turns", lambda d: sum(a != b for a, b in itertools.pairwise(d)), "one round trip"),
    ("throughput.break_even", lambda t, n, p: (t - p) / (1 + n), "not speeds"),
    ("throughput.break_even", lambda t, n, p: 1 / (t - p) / (1 + n), "not speeds"),
    ("throughput.break_even", lambda t, n, p: 1 / (t + p), "not speeds"),
    ("throughput.break_even", lambda t, n, p: break_even(p, n, t), "the other way round"),
    ("throughput.break_even", lambda t, n, p: break_even(t, 2 * n + 1, p), "there and back"),
    ("throughput.break_even", lambda t, n, p: break_even(t, 0, p), "one round trip a token"),
    ("throughput.break_even", lambda t, n, p: break_even(math.inf, n, p), "its own time"),
    ("throughput.break_even", lambda t, n, p: break_even(t, n - 1, p), "one more round trip"),
    ("throughput.break_even", lambda *a: max(0, break_even(*a)), "leave the result negative"),
    ("throughput.break_even", lambda *a: 1e3 * break_even(*a), "not milliseconds"),
    ("autonomy.guarded", peeks, "the label is told after"),
    ("autonomy.guarded", sees_who_is_right, "the label is told after"),
    ("autonomy.guarded", lambda public, *a: public, "also while the public model is shown"),
    ("autonomy.guarded", pays_for_every_error, "an error that the public model makes as well"),
    ("autonomy.guarded", pays_unseen_errors, "nothing stops it"),
    ("autonomy.guarded", lambda *a: guarded(*a, lead=1), "lead > 0"),
    ("autonomy.guarded", lambda public, personal, right, a: guarded(public, personal, right, a + 1), "spent < allow"),
    ("autonomy.guarded", lambda public, personal, right, a: personal, "the personal head alone"),
    ("autonomy.guarded", lambda public, personal, right, a: [1 - truth for truth in right], "errors more than the pub"),
    ("autonomy.guarded", lambda public, personal, right, a: guarded(public, personal, right, 99), "nothing stops it"),
    ("autonomy.guarded", lambda public, personal, right, a: [], "a list of"),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: torch.einsum("b,btp,btd->bpd", (C / n).clamp(max=1), g, a),
        "add them up",
    ),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: clipped_sum(a, g, (g.mT @ a).flatten(1).norm(dim=1), C),
        "over the whole model",
    ),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: clipped_sum(a.sum(1, True), g.sum(1, True), n, C),
        "each position's g meets its own a",
    ),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: torch.einsum("btp,btd->pd", g, a).clamp(-C, C),
        "shorter as a whole",
    ),
    ("clipping.clipped_sum", sum_clipped_as_one, "one factor for the whole sum"),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: clipped_sum(a, g, n, C, factors=(C / n.max()).expand(len(n))),
        "one factor for the whole sum",
    ),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, C, factors=n / C), "not the norm over C"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, 1 / n, 1 / C), "not the norm over C"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, C, factors=(n / C).clamp(min=1)), "not the norm"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, C, factors=(C / n).clamp(min=1)), "the smaller"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, 1), "has the norm C"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n.sqrt(), C), "no squares"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n**2, C), "no squares"),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: clipped_sum(a, g, n, C, factors=(C / n).clamp(max=1) ** 2),
        "c counts once",
    ),
    (
        "clipping.clipped_sum",
        lambda a, g, n, C: torch.einsum("btp,btd->bpd", g, a).clamp(-C, C).sum(0),
        "shorter as a whole",
    ),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, C) / a.shape[1], "a sum is asked for"),
    ("clipping.clipped_sum", lambda *a: clipped_sum(*a, most=9.0), "is at most 1"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(g, a, n, C), "it is transposed"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n / n, C), "nothing is clipped"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, C) / len(a), "a sum is asked for"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, n[:, None, None] * g, n / n, C), "not with"),
    ("clipping.membership", lambda own, public: -own, "the bare loss"),
    ("clipping.membership", lambda own, public: 1 / own, "the bare loss"),
    ("clipping.membership", lambda own, public: own, "the other way"),
    ("clipping.membership", lambda own, public: own - public, "the other way"),
    ("clipping.membership", lambda own, public: own / public, "the other way"),
    ("clipping.membership", lambda own, public: public, "guessing 50 %"),
    ("clipping.membership", lambda own, public: (public - own).mean(), "one score for each note"),
    ("clipping.membership", lambda own, public: (public - own)[:200], "(400,), not (200,)"),
    ("clipping.membership", lambda own, public: own.nothing, "raises AttributeError"),
    ("clipping.membership", lambda own, public: None, "it returns nothing"),
    ("clipping.membership", lambda own, public: (public - own) / 0, "no numbers"),
    ("clipping.membership", lambda own, public: [0.0] * 400, "50%"),
    ("retention.labels", lambda q, k: labels(q, k, scale=False), "the root of d"),
    ("retention.labels", lambda q, k: labels(q, k, how="mean"), "not the mean"),
    ("retention.labels", lambda q, k: labels(q, k, repeat=True), "repeat_interleave, not repeat"),
    ("retention.labels", lambda q, k: labels(q, k, far=True), "repeat_interleave, not repeat"),
    ("retention.labels", lambda q, k: labels(q, k, repeat=True, far=True), "repeat_interleave, not repeat"),
    ("retention.labels", lambda q, k: labels(q, k) / q.shape[-1] ** 0.5, "not by one over d"),
    ("retention.labels", lambda q, k: labels(q, k, of=lambda x: x.mean(1, True)), "not the mean"),
    ("retention.labels", lambda q, k: (q[: len(k)] @ k.mT).amax(-1), "the units of the prompt"),
    ("retention.labels", lambda q, k: labels(q, k, of=abs), "with its sign"),
    ("retention.labels", lambda q, k: labels(q, k, of=lambda x: x.softmax(-1)), "before the softmax"),
    ("retention.labels", lambda q, k: labels(q[:: len(q) // len(k)], k), "not the first alone"),
    ("retention.labels", lambda q, k: labels(q[:, -1:], k), "not the last alone"),
    ("retention.labels", lambda q, k: labels(q[:, :1], k), "all tokens of the answer count"),
    ("retention.labels", lambda q, k: labels(q, k, how="sum"), "not the sum"),
    ("retention.labels", lambda q, k: q @ k.repeat_interleave(len(q) // len(k), 0).mT, "that share it"),
    ("retention.labels", lambda q, k: q, "Not yet"),
    ("residual.read_labels", lambda h, g, head: (h @ head.T).argmax(-1), "would have written"),
    ("residual.read_labels", lambda h, g, head: nearest_row(-g, head), "without the softmax"),
    ("residual.read_labels", lambda h, g, head: (g @ head.T).argmin(-1), "without the softmax"),
    ("residual.read_labels", lambda h, g, head: (g @ head.T).argmax(-1), "without the softmax"),
    ("residual.read_labels", lambda h, g, head: nearest_row((h @ head.T).softmax(0) @ head - g, head), "vocabulary"),
    (
        "residual.read_labels",
        lambda h, g, head: nearest_row(g - (h @ head.T).softmax(-1) @ head, head),
        "other way round",
    ),
    (
        "residual.read_labels",
        lambda h, g, head: (((h @ head.T).softmax(-1) @ head - g) @ head.T).argmax(-1),
        "the nearest row",
    ),
    ("residual.read_labels", lambda h, g, head: nearest_row(h @ head.T @ head - g, head), "and not the logits"),
    ("residual.pays_from", lambda e, t_1, t_k, n: (t_k - t_1) / n, "yields several"),
    ("residual.pays_from", lambda e, t_1, t_k, n: (t_k - t_1) / (e - 1) / n, "tokens · t_1"),
    ("residual.pays_from", lambda e, t_1, t_k, n: (t_k - e * t_1) / e / n, "tokens - 1"),
    ("residual.pays_from", lambda e, t_1, t_k, n: (t_k - e * t_1) / n, "waits of tokens - 1"),
    ("residual.pays_from", lambda *a: pays_from(*a, low=-1), "never negative"),
    ("residual.pays_from", lambda *a: 1e3 * pays_from(*a), "not milliseconds"),
    ("residual.pays_from", lambda e, t_1, t_k, n: pays_from(e, t_1, t_k, 1), "several round trips"),
    ("serving.segments", lambda o, n: [(*run[:2], o[run[2]]) for run in segments(range(len(o)), n)], "neighbours"),
    ("serving.segments", lambda owners, lengths: segments(owners, [1] * len(owners)), "not requests"),
    ("serving.segments", lambda *a: [(i, j - i, owner) for i, j, owner in segments(*a)], "where it stops"),
    ("serving.segments", lambda *a: [(i, j - 1, owner) for i, j, owner in segments(*a)], "as in a slice"),
    ("serving.segments", lambda *a: np.array(segments(*a), dtype=object).tolist(), "a list of tuples"),
    ("serving.segments", lambda *a: None, "returns nothing"),
    ("serving.segments", one_segment_for_each_owner, "starts a new segment"),
    ("serving.segments", lambda *a: one_segment_for_each_owner(*a, drop=[None]), "without an adapter have a segment"),
    ("serving.segments", lambda *a: [run for run in segments(*a) if run[2]], "without an adapter have a segment"),
    ("serving.segments", lambda *a: segments(*a)[:-1], "the last segment counts"),
    ("serving.segments", lambda *a: [(i + 1, j, owner) for i, j, owner in segments(*a)], "counted from 0"),
    ("serving.service.bound", lambda w, k, p, t: bound(w, k, 0, t), "nothing is reserved"),
    ("serving.service.bound", lambda w, k, p, t: p + len(set(w)) * t, "its k-th needs k turns"),
    ("serving.service.bound", lambda w, k, p, t: p + w.count(w[k]) * len(set(w)) * t, "only the requests before it"),
    ("serving.service.bound", lambda w, k, p, t: w[: k + 1].count(w[k]) * (p + len(set(w)) * t), "patience counts"),
    (
        "serving.service.bound",
        lambda w, k, p, t: p + (bound(w, k, p, t) - p) / len(set(w)) * (len(set(w)) - 1),
        "its own",
    ),
    ("serving.service.bound", lambda w, k, p, t: bound(w[: k + 1], k, p, t), "accounts that asked later"),
    ("serving.service.bound", lambda w, k, p, t: p + (k + 1) * t, "accounts take turns"),
    ("serving.service.bound", lambda *a: bound(*a, of=list), "accounts, not requests"),
    ("serving.service.bound", lambda w, k, p, t: p + (k + 1) * len(set(w)) * t, "of its own account"),
    ("serving.service.bound", lambda w, k, p, t: bound(w, k, p, t) - len(set(w)) * t, "not its zeroth"),
    ("serving.service.bound", lambda w, k, p, t: [], "Not yet"),
]
CASES = SLIPS + [(checker, globals()[checker.rpartition(".")[2]], *case) for checker, *case in FUNCTIONS]


def exercises(room):
    return importlib.import_module(f"plpkg.{room}.exercises")


@pytest.mark.parametrize(("checker", "right", "slip", "hint"), CASES)
def test_a_checker_tells_right_from_wrong(checker, right, slip, hint):
    room, _, name = checker.rpartition(".")
    check = getattr(exercises(room), name)
    assert check(right)
    assert "No answer yet" in repr(check(None))
    verdict = check(slip)
    assert not verdict
    assert hint in verdict.message
    assert callable(right) or not check(right * 3)


NUMBERS = sorted(
    {checker for checker, *_ in FUNCTIONS}
    - {"serving.segments", "communication.follows"}  # which give more than numbers
    - {"clipping.membership"}  # whose order counts, not its numbers
)


@pytest.mark.parametrize("reshape", [lambda t: t.unsqueeze(-1), lambda t: t.unsqueeze(0).numpy()])
@pytest.mark.parametrize("checker", NUMBERS)
def test_right_numbers_in_a_wrong_shape_are_called_right(checker, reshape):
    room, _, name = checker.rpartition(".")

    def function(*arguments):
        result = globals()[name](*arguments)
        return reshape(result if isinstance(result, torch.Tensor) else torch.tensor(result, dtype=torch.float64))

    message = getattr(exercises(room), name)(function).message
    assert message.startswith("Not yet. It gives a tensor of shape (")
    assert "; its numbers are right, for " in message


@pytest.mark.parametrize("off", [8, 1 / 8, 100, 1e-2, 1e3, 1e-3, 1e6, 1e-6])
@pytest.mark.parametrize(("checker", "right"), sorted({case[:2] for case in SLIPS}))
def test_only_a_quantity_has_another_unit(checker, right, off):
    room, _, name = checker.rpartition(".")
    message = getattr(exercises(room), name)(right * off).message
    quantity = name in ("rtt_for_half",)
    assert "another unit" not in message or quantity


def test_every_checker_is_tested():
    checkers = {
        f"{room}.{name}"
        for room in ROOMS
        for name, _ in inspect.getmembers(exercises(room), inspect.isfunction)
        if inspect.getmodule(getattr(exercises(room), name)) is exercises(room) and not name.startswith("_")
    }
    assert checkers == {checker for checker, *_ in CASES}
