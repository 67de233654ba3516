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
    ("autonomy.cached_share", 53.5, 8.76, "reads twelve words"),
    ("autonomy.cached_share", 53.5, 43.4, "needs no gradient"),
    ("autonomy.cached_share", 53.5, 69.7, "needed twice"),
    ("autonomy.cached_share", 53.5, 46.5, "the share that stays"),
    ("autonomy.cached_share", 53.5, 30, "too small"),
    ("clipping.crossover_positions", 384, 543, "rule of bytes"),
    ("clipping.crossover_positions", 384, 768, "both Gram"),
    ("clipping.crossover_positions", 384, 192, "two operations"),
    ("clipping.crossover_positions", 384, 100, "too small"),
    ("communication.kv_heads", 3145.728, 6291.456, "keys and values have only 8 heads"),
    ("communication.half_from_endpoints", 42.7, 128, "counts one projection"),
    ("communication.round_trips", 820, 41, "one pass"),
    ("communication.round_trips", 820, 861, "already gives the first"),
    ("residual.tokens_until_m", 64, 4096, "how many entries"),
    ("residual.tokens_until_m", 64, 96, "in practice"),
    ("residual.tokens_until_m", 64, 63, "one direction open"),
    ("residual.tokens_until_m", 64, 1, "a single u"),
    ("residual.late_round_trips", 17, 33, "its own answer"),
    ("residual.late_round_trips", 17, 16, "one more"),
    ("residual.late_round_trips", 17, 5, "too small"),
    ("retention.peak_units", 17_408, 16_384, "left after a cut"),
    ("retention.peak_units", 17_408, 16_484, "left at the end"),
    ("retention.peak_units", 17_408, 131_072, "full cache"),
    ("retention.peak_units", 17_408, 17_508, "has been cut"),
    ("retention.peak_units", 17_408, 12, "too small"),
    ("serving.adapters_per_backbone", 1607, 3213, "an A and a B"),
    ("serving.adapters_per_backbone", 1607, 803, "two projections"),
    ("serving.adapters_per_backbone", 1607, 51_410, "32 layers"),
    ("serving.adapters_per_backbone", 1607, 500, "too small"),
    ("serving.service.share_in_slots", 57.5, 8, "asked for alike"),
    ("serving.service.share_in_slots", 57.5, 42.5, "all the others"),
    ("serving.service.share_in_slots", 57.5, 99.8, "geometric law"),
    ("serving.service.share_in_slots", 57.5, 100, "184 adapters"),
    ("throughput.rtt_for_half", 1.12, 0.00112, "another unit"),
    ("throughput.rtt_for_half", 1.1, 1.09, "figure accounting"),
    ("throughput.rtt_for_half", 1.12, 37.0, "1 + 32"),
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


def gradient_of_x(g, downs, ups, scales, segments, scaled=True):
    dx = g.new_zeros(len(g), downs[0].shape[1])
    for start, stop, i in segments:
        if i is not None:
            dx[start:stop] = (scales[i] if scaled else 1) * g[start:stop] @ ups[i] @ downs[i]
    return dx


def bound(waiting, k, patience_s, longest_s, of=set):
    return patience_s + waiting[: k + 1].count(waiting[k]) * len(of(waiting)) * longest_s


def leak(members, others):
    pairs = [(a[1] - a[0], b[1] - b[0]) for a in members for b in others]
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)


def strict(members, others):
    return sum(a[1] - a[0] > b[1] - b[0] for a in members for b in others) / len(members) / len(others)


def gram_norm(a, g, bias=1):
    return ((g @ g.mT) * (a @ a.mT + bias)).sum((1, 2))


def built(a, g):
    return ((g.mT @ a) ** 2).sum((-2, -1)) + (g.sum(-2) ** 2).sum(-1)


def clipped_sum(a, g, norms, C, most=1.0):
    factors = (C / norms).clamp(max=most)
    return (factors[:, None, None] * g).flatten(0, 1).T @ a.flatten(0, 1)


def averaged(states, labels):
    pairs = list(zip(states, labels, strict=True))
    return {key: sum(n * state[key] for state, n in pairs) / sum(labels) for key in states[0]}


def guarded(public, personal, right, allowance, lead=0):
    shown, spent = [], 0
    for one, other, truth in zip(public, personal, right, strict=True):
        shown.append(other if lead > 0 and spent < allowance else one)
        lead += (other == truth) - (one == truth)
        spent += (one == truth) - (shown[-1] == truth)
    return shown


def token_bytes(hidden, num_layers, rank, bits, projections=3):
    return ((hidden + projections * num_layers * rank) * bits / 8,) * 2


def turns(directions):
    return sum(a != b for a, b in itertools.pairwise(["", *directions])) // 2


def roofline(parameters, positions, bits, bytes_per_s, flops_per_s, of=max):
    return of((parameters * bits / 8 / bytes_per_s, 2 * parameters * positions / flops_per_s))


def break_even(tokens_per_s, num_layers, phone_tokens_per_s):
    return (1 / phone_tokens_per_s - 1 / tokens_per_s) / (1 + num_layers)


def best_units(scores, budget, stabilizers, in_order=True):
    n = scores.shape[1]
    raised = scores.clone()
    raised[:, n - stabilizers :] = 2
    best = raised.topk(min(n, budget)).indices
    return best.sort().values if in_order else best


def labels(q, k, scale=True, how="amax", interleaved=False):
    group = len(q) // len(k)
    keys = k.repeat(group, 1, 1) if interleaved else k.repeat_interleave(group, dim=0)
    logits = q @ keys.transpose(1, 2) / (q.shape[-1] ** 0.5 if scale else 1)
    logits = logits.unflatten(0, (group, -1)).transpose(0, 1) if interleaved else logits.unflatten(0, (-1, group))
    return getattr(logits, how)(dim=(1, 2))


def steal(u, v):
    return torch.linalg.lstsq(u, v).solution.T


def nearest_row(queries, rows):
    return torch.cdist(queries, rows).argmin(-1)


def read_labels(hidden, gradient, head):
    return nearest_row((hidden @ head.T).softmax(-1) @ head - gradient, head)


def pays_from(tokens, t_1, t_k, round_trips, low=0.0):
    return max(low, (t_k - tokens * t_1) / (tokens - 1) / round_trips)


def accept(guesses, choices):
    for k, guess in enumerate(guesses):
        if choices[k] != guess:
            return choices[: k + 1]
    return choices


def keeps_the_guess(guesses, choices):
    written = accept(guesses, choices)
    return [*written[:-1], guesses[len(written) - 1]] if len(written) <= len(guesses) else written


FUNCTIONS = [  # the right function above is called as its checker is
    ("communication.token_bytes", lambda h, *a: token_bytes(0, *a), "the embedding goes up"),
    ("communication.token_bytes", lambda *a: token_bytes(*a, projections=1), "each have a residual"),
    ("communication.token_bytes", lambda h, n, r, b: token_bytes(h, n, r, 8 * b), "those are bits"),
    ("communication.token_bytes", lambda *a: 2 * token_bytes(*a)[0], "both directions together"),
    ("communication.token_bytes", lambda *a: token_bytes(*a)[0], "a tuple (up, down)"),
    ("communication.token_bytes", lambda *a: list(token_bytes(*a)), "a tuple (up, down)"),
    ("communication.turns", lambda d: d.count("up"), "wait only once"),
    ("communication.turns", lambda d: 2 * turns(d), "one round trip"),
    ("communication.turns", len, "one round trip"),
    ("communication.turns", lambda d: sum(a != b for a, b in itertools.pairwise(d)), "one round trip"),
    ("throughput.roofline", lambda *a: roofline(*a, of=min), "not the shorter"),
    ("throughput.roofline", lambda *a: roofline(*a, of=sum), "not the sum"),
    ("throughput.roofline", lambda p, n, b, *a: roofline(p, n, 8 * b, *a), "8 bits"),
    ("throughput.break_even", lambda t, n, p: break_even(t, n - 1, p), "one more round trip"),
    ("throughput.break_even", lambda *a: 1e3 * break_even(*a), "not milliseconds"),
    ("autonomy.averaged", lambda s, n: averaged(s, [1] * len(n)), "more labels counts for more"),
    (
        "autonomy.averaged",
        lambda s, n: {key: value * sum(n) for key, value in averaged(s, n).items()},
        "divide the sum",
    ),
    ("autonomy.averaged", lambda s, n: {}, "the keys of the states"),
    ("autonomy.averaged", lambda s, n: dict.fromkeys(s[0], math.nan), "Not yet"),
    ("autonomy.guarded", lambda public, personal, right, a: guarded(public, personal, right, len(right)), "Not yet"),
    ("autonomy.guarded", lambda *a: guarded(*a, lead=1), "lead > 0"),
    ("autonomy.guarded", lambda public, personal, right, a: guarded(public, personal, right, a + 1), "spent < allow"),
    ("autonomy.guarded", lambda public, personal, right, a: personal, "Not yet"),
    ("autonomy.guarded", lambda public, personal, right, a: [], "a list of"),
    ("clipping.gram_norm", lambda a, g: gram_norm(a, g).sqrt(), "their squares"),
    ("clipping.gram_norm", lambda a, g: gram_norm(a, g, bias=0), "a bias is a weight"),
    ("clipping.gram_norm", lambda a, g: (a.square().sum(2) * g.square().sum(2)).sum(1), "T × T products"),
    ("clipping.gram_norm", lambda a, g: gram_norm(a, g).sum(), "It gives 120.159, not ["),
    ("clipping.gram_norm", built, "leave it unbuilt"),
    (
        "clipping.gram_norm",
        lambda a, g: np.stack([built(*(one.numpy() for one in each)) for each in zip(a, g, strict=True)]),
        "unbuilt",
    ),
    ("clipping.gram_norm", lambda a, g: torch.stack([built(*each) for each in zip(a, g, strict=True)]), "unbuilt"),
    ("clipping.gram_norm", lambda a, g, left=[1] * 4: left.pop() and gram_norm(a, g), "called again it raises Inde"),
    ("clipping.clipped_sum", lambda *a: clipped_sum(*a, most=9.0), "is at most 1"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(g, a, n, C), "it is transposed"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n / n, C), "nothing is clipped"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, g, n, C) / len(a), "a sum is asked for"),
    ("clipping.clipped_sum", lambda a, g, n, C: clipped_sum(a, n[:, None, None] * g, n / n, C), "not with"),
    ("retention.best_units", lambda s, b, k: best_units(s, b, k or s.shape[1]), "[:, -0:] is all of them"),
    ("retention.best_units", lambda s, b, k: best_units(s, b, 0), "whatever their score"),
    ("retention.best_units", lambda *a: best_units(*a, in_order=False), "their order of time"),
    ("retention.best_units", lambda scores, budget, stabilizers: scores[:, :budget], "not the scores that stay"),
    ("retention.best_units", lambda s, b, k: s > s.median(), "not a mask"),
    ("retention.best_units", lambda s, b, k: best_units(s, b + k, k), "count within the budget"),
    ("retention.labels", lambda q, k: labels(q, k, scale=False), "the root of d"),
    ("retention.labels", lambda q, k: labels(q, k, how="mean"), "not the mean"),
    ("retention.labels", lambda q, k: labels(q, k, interleaved=True), "neighbouring query heads"),
    ("retention.labels", lambda q, k: labels(q, k, how="sum"), "not the sum"),
    ("retention.labels", lambda q, k: q @ k.repeat_interleave(len(q) // len(k), 0).mT, "that share it"),
    ("retention.labels", lambda q, k: q, "Not yet"),
    ("residual.accept", keeps_the_guess, "device's own choice"),
    ("residual.accept", lambda guesses, choices: choices, "behind a wrong guess nothing counts"),
    ("residual.accept", lambda guesses, choices: accept(guesses, choices)[:-1], "one token more"),
    ("residual.accept", lambda *a: tuple(accept(*a)), "wanted as a list"),
    ("residual.accept", lambda *a: np.array(accept(*a)), "wanted as a list"),
    ("residual.accept", lambda guesses, choices: [7, *choices], "all guesses before it counted"),
    ("residual.read_labels", lambda h, g, head: (h @ head.T).argmax(-1), "would have written"),
    ("residual.read_labels", lambda h, g, head: nearest_row(-g, head), "without the softmax"),
    (
        "residual.read_labels",
        lambda h, g, head: nearest_row(g - (h @ head.T).softmax(-1) @ head, head),
        "other way round",
    ),
    ("residual.pays_from", lambda *a: pays_from(*a, low=-1), "never negative"),
    ("residual.pays_from", lambda *a: 1e3 * pays_from(*a), "not milliseconds"),
    ("residual.pays_from", lambda e, t_1, t_k, n: pays_from(e, t_1, t_k, 1), "several round trips"),
    ("residual.steal", lambda u, v: steal(u, v).T, "M transposed"),
    ("residual.steal", lambda u, v: steal(u[: u.shape[1]], v[: u.shape[1]]), "all tokens count"),
    ("serving.segments", lambda o, n: [(*run[:2], o[run[2]]) for run in segments(range(len(o)), n)], "neighbours"),
    ("serving.segments", lambda owners, lengths: segments(owners, [1] * len(owners)), "not requests"),
    ("serving.segments", lambda *a: [(i, j - i, owner) for i, j, owner in segments(*a)], "where it stops"),
    ("serving.segments", lambda *a: [(i, j - 1, owner) for i, j, owner in segments(*a)], "as in a slice"),
    ("serving.segments", lambda *a: np.array(segments(*a), dtype=object).tolist(), "a list of tuples"),
    ("serving.segments", lambda *a: None, "returns nothing"),
    ("serving.gradient_of_x", lambda *a: gradient_of_x(*a, scaled=False), "the scale"),
    ("serving.gradient_of_x", lambda g, *a: g, "a tensor (6, 7), not a tensor (6, 5)"),
    ("serving.gradient_of_x", lambda *a: -gradient_of_x(*a), "off by up to"),
    ("serving.gradient_of_x", lambda *a: gradient_of_x(*a[:4], [run for run in a[4] if run[2]]), "adapter 0 is one"),
    ("serving.gradient_of_x", lambda *a: gradient_of_x(*a[:4], [(i, j, k or 0) for i, j, k in a[4]]), "stay zero"),
    ("serving.gradient_of_x", lambda *a: [a[1][i] for *_, i in a[4]] and gradient_of_x(*a), "None has no adapter"),
    ("serving.service.bound", lambda w, k, p, t: bound(w, k, 0, t), "nothing is reserved"),
    ("serving.service.bound", lambda *a: bound(*a, of=list), "accounts, not requests"),
    ("serving.service.bound", lambda w, k, p, t: p + (k + 1) * len(set(w)) * t, "of its own account"),
    ("serving.service.bound", lambda w, k, p, t: bound(w, k, p, t) - len(set(w)) * t, "not its zeroth"),
    ("serving.service.bound", lambda w, k, p, t: [], "Not yet"),
    ("serving.service.leak", lambda m, o: 1 - leak(m, o), "learned texts fall more"),
    (
        "serving.service.leak",
        lambda m, o: leak([(a, 0) for a, _ in m], [(a, 0) for a, _ in o]),
        "a hard text stays hard",
    ),
    ("serving.service.leak", strict, "a half counts"),
    ("serving.service.leak", lambda m, o: leak(m, o) * len(m) * len(o), "the number of pairs"),
    ("serving.service.leak", lambda m, o: math.nan, "Not yet"),
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


def test_every_checker_is_tested():
    checkers = {
        f"{room}.{name}"
        for room in ROOMS
        for name, _ in inspect.getmembers(exercises(room), inspect.isfunction)
        if inspect.getmodule(getattr(exercises(room), name)) is exercises(room) and not name.startswith("_")
    }
    assert checkers == {checker for checker, *_ in CASES}
