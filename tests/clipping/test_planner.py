"""The cost model beside FlopCounterMode and MemoryTimeline, and the planner beside every possible plan."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, factors, mixing, plan
from plpkg.clipping.clip import Clip
from plpkg.clipping.factors import Outer
from plpkg.clipping.gradients import _watching
from plpkg.clipping.planner import Matrix, Plan, _fitted, _live, cheapest, watch
from plpkg.memory import MemoryTimeline

MATRICES = {
    "square": Matrix(4, 7, 16, 16),
    "wide": Matrix(3, 12, 40, 8),
    "one position": Matrix(5, 1, 12, 9),
    "groups": Matrix(3, 6, 5, 8, groups=2),
    "table": Matrix(4, 7, 30, 8, one_hot=True),
}


def outer(matrix):
    rows = (matrix.batch, matrix.groups, matrix.positions, matrix.rows)
    rows = torch.randint(0, matrix.rows, rows[::2]) if matrix.one_hot else torch.randn(rows)
    cols = torch.randn(matrix.batch, matrix.groups, matrix.positions, matrix.cols)
    return Outer(rows, cols, torch.Size((matrix.groups * matrix.rows, matrix.cols)))


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("two_passes", [False, True])
def test_operations_are_those_that_pytorch_counts(name, two_passes):
    matrix = MATRICES[name]
    use, weights = outer(matrix), torch.rand(matrix.batch)
    for option in matrix.options(two_passes=two_passes):
        with FlopCounterMode(display=False) as counter:
            if option.choice.keep == "gradient":
                gradient = factors.instantiate([use])
                torch.linalg.vector_norm(gradient.flatten(1), dim=1)
                torch.tensordot(weights, gradient, dims=1)
            else:
                factors.norms_squared([use], option.choice.norm, careful=False)
                use.weighted_sum(weights)
        assert counter.get_total_flops() == option.flops, option


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("chunk", [None, 2000])
def test_bytes_are_those_that_are_live(name, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(factors, "CHUNK_BYTES", chunk)
    matrix = MATRICES[name]
    use = outer(matrix)
    assert matrix.factor_bytes == use.rows.nbytes + use.cols.nbytes
    for option in matrix.options(two_passes=False):
        kept = None
        with MemoryTimeline() as timeline:
            timeline.track(use.rows, use.cols)
            with timeline.phase("norm"):
                if option.choice.keep == "gradient":
                    kept = factors.instantiate([use])
                else:
                    factors.norms_squared([use], option.choice.norm, careful=False)
            end = timeline.live_bytes
        # Vectors of norms, ids in order, the norms of a gradient's rows.
        small = matrix.batch * (40 * (1 + matrix.positions) + 24 * matrix.groups * matrix.rows)
        expected = option.temporary_bytes + (matrix.gradient_bytes if kept is not None else 0)
        assert abs(timeline.phases[0].increase_bytes - expected) <= small
        assert kept is None or end - matrix.factor_bytes == option.kept_bytes


def step(layers=3, hidden=48, seq=40, batch=6):
    sizes = dict(num_layers=layers, hidden=hidden, num_heads=4, intermediate=100, vocab=200)
    model = random_backbone("llama", **sizes).train()
    return model, torch.randint(0, 200, (batch, seq), generator=torch.Generator().manual_seed(0))


def loss(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def peak(model, ids, execution):
    for _ in range(mixing.FIRST):  # in which the guard holds the graph
        clipped_gradients(model, loss, ids, 1.0, execution)
    with MemoryTimeline() as timeline:
        timeline.track(model)
        clipped_gradients(model, loss, ids, 1.0, execution)
    return timeline.peak_bytes


@pytest.fixture
def unguarded(monkeypatch):
    for looks in ("SELDOM", "REPLAYED"):  # nor does it look by chance
        monkeypatch.setattr(mixing, looks, 10**9)


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("shape", [{}, dict(seq=100, batch=3), dict(seq=8, batch=20), dict(hidden=96, layers=2)])
def test_the_peak_is_predicted(shape):
    model, ids = step(**shape)
    free = plan(model, loss, ids, memory_bytes=10**12)
    assert not free.two_passes
    checked = 0
    for share in (None, 10**6, 0.9, 0.95, 0.98):
        budget = share and int(free.peak_bytes * share)
        try:
            planned = plan(model, loss, ids, memory_bytes=budget)
        except ValueError:
            continue
        assert 0.97 * planned.peak_bytes <= peak(model, ids, planned) <= 1.01 * planned.peak_bytes
        assert budget is None or planned.peak_bytes <= budget
        checked += 1
    assert checked >= 2


@pytest.mark.usefixtures("unguarded")
def test_less_memory_never_means_fewer_operations():
    model, ids = step(batch=16)
    ghost = peak(model, ids, "ghost")
    plans = [plan(model, loss, ids, memory_bytes=int(ghost * share)) for share in (3.0, 1.2, 1.1, 1.0)]
    for one, other in itertools.pairwise(plans):
        assert one.flops <= other.flops
        assert one.peak_bytes >= other.peak_bytes


def test_too_little_memory_is_refused_with_what_is_needed():
    model, ids = step()
    with pytest.raises(ValueError, match=r"memory_bytes=1000 is too little for this step: it needs at least \d{6}"):
        plan(model, loss, ids, memory_bytes=1000)
    with pytest.raises(ValueError, match="memory_bytes must be a whole number of at least 1, got 0"):
        plan(model, loss, ids, memory_bytes=0)
    with pytest.raises(ValueError, match="the number of examples must be a whole number of at least 1, got 0"):
        plan(model, loss, ids[:0])


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_nearly_the_best_of_all_plans(share):
    """Greedy against every combination, for a net that is small enough to try them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise((8, 60, 20, 40, 9))))
    x = torch.randn(6, 14, 8)

    def square(model, x):
        return model(x).square().sum((1, 2))

    with _watching(model, square, x, Clip(1.0)) as step:
        _, watched = watch(model, step.recorded)
    budget = int(share * cheapest(watched, 10**9).peak_bytes)
    planned = _fitted(watched, budget, two_passes=False)
    moments = [m for m in watched.moments if m.matrix]

    def fits(combination):
        chosen = {m.key: option for m, option in zip(moments, combination, strict=True)}
        return max(*_live(watched.moments, chosen, False), watched.forward_peak_bytes) <= budget

    every = filter(fits, itertools.product(*(m.matrix.options(two_passes=False) for m in moments)))
    if flops := [sum(option.flops for option in combination) for combination in every]:
        assert planned.peak_bytes <= budget
        assert planned.flops <= 1.1 * min(flops)
    else:
        assert planned.peak_bytes > budget


def test_a_plan_shows_itself():
    model, ids = step()
    planned = plan(model, loss, ids)
    assert isinstance(planned, Plan)
    assert repr(planned).startswith("Plan: one pass, ")
    frame = planned.to_frame()
    assert list(frame.columns) == ["parameter", "positions", "rows", "cols", "norm", "keep", "gflop", "kept_mib"]
    assert len(frame) == 7 * 3 + 2
