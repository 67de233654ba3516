"""Merging: gate 0 is plain eviction, and a mixture is worked out by hand."""

import pytest
import torch

from benchmarks.retention.merge import Merger, merging_prefill, train_merger
from plpkg.retention import chunked_prefill, scorers
from plpkg.retention.cache.evicting import EvictingCache
from plpkg.retention.eviction import Eviction
from plpkg.retention.prefill import read_chunks
from plpkg.retention.scorers import KeyNorm

from rounding import assert_as_exact


def read(model, ids, scorer, budget, chunk_size):
    """The first layer's store, as it is between two cuts: its keys wait unrotated."""
    cache = EvictingCache(model)
    eviction = Eviction(model, cache, scorer.started(ids, budget), budget, 0, False)
    with torch.no_grad():
        read_chunks(eviction, ids, chunk_size, 0)
    return cache.layers[0].store


def test_gate_zero_is_plain_eviction(backbone, ids):
    model = backbone()
    plain = chunked_prefill(model, ids, KeyNorm(), 9, 4)
    merged = merging_prefill(model, ids, KeyNorm(), 9, 4, Merger(model, 3))
    assert torch.equal(plain.logits, merged.logits)
    for mine, theirs in zip(plain.cache.layers, merged.cache.layers, strict=True):
        assert torch.equal(mine.positions, theirs.positions)


def test_a_mixture_is_worked_out_by_hand(backbone):
    """Five units, three stay, one is a mixture of itself and the two that go: order, weights and gate."""
    model = backbone(num_layers=1)
    ids = torch.arange(5)[None]
    scores = torch.tensor([5.0, 1.0, 3.0, 4.0, 2.0]).expand(1, 1, 2, 5)
    merger = Merger(model, 1, window=3)
    with torch.no_grad():
        merger.gates.fill_(0.25)
    whole = read(model, ids, scorers.Static(scores), 5, 5)
    merged = merging_prefill(model, ids, scorers.Static(scores), 3, 5, merger).cache.layers[0].store
    convolution = merger.convolutions[0]
    for head in range(2):
        k, v = whole.keys[0, head], whole.values[0, head]
        assert torch.equal(merged.keys[0, head, [0, 2]], k[[0, 3]])
        merging = [1, 2, 4]  # unit 2 is the lowest that stays
        states = torch.cat([k[merging], v[merging]], dim=1)  # (3, 32)
        padded = torch.cat([torch.zeros(1, 32), states, torch.zeros(1, 32)])

        def by_hand(units, dtype, padded=padded, merging=merging):
            units, padded, w = (t.to(dtype) for t in (units, padded, convolution.weight[0].detach()))  # w is (32, 3)
            outputs = [sum(padded[t + i] @ w[:, i] for i in range(3)) + convolution.bias[0].item() for t in range(3)]
            return 0.75 * units[2] + 0.25 * torch.stack(outputs).softmax(0) @ units[merging]

        for units, mixed in ((k, merged.keys), (v, merged.values)):
            assert_as_exact(mixed[0, head, 1], by_hand(units, torch.float32), by_hand(units, torch.float64))


def test_protected_units_are_no_mixtures(backbone, ids):
    """By position alone the first units have the lowest scores, and are protected."""
    model = backbone(num_layers=1)
    merger = Merger(model, 2)
    with torch.no_grad():
        merger.gates.fill_(1.0)
    scorer = scorers.SinkRecent(recent=2)
    plain = read(model, ids, scorer, 9, 29)
    merged = merging_prefill(model, ids, scorer, 9, 29, merger).cache.layers[0].store
    changed = (plain.keys != merged.keys).any(-1)[0, 0].nonzero().flatten().tolist()
    assert changed == [4, 5]


def test_training_lowers_the_loss_and_leaves_the_backbone(backbone):
    model = backbone().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merger = Merger(model, 2)
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    prompt, answer = ids[:, :18], ids[:, 18:]
    data = [(prompt, answer, answer)] * 40
    nats = train_merger(model, merger, data, KeyNorm(), 6, 4, steps=40, lr=0.05, progress=False)
    assert nats[-1] < nats[0]
    assert merger.gates.abs().max() > 0.05  # the first step alone goes so far
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="the data end after 40 of 41 steps"):
        train_merger(model, merger, data, KeyNorm(), 6, 4, steps=41, progress=False)
