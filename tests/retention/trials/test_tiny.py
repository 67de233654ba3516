"""The two-layer model: what its embedding knows, and (trained for a few steps only) that training works."""

import pytest
import torch

from plpkg.retention import RetainingHeads, tiny
from plpkg.retention.scorers import Locret, SinkRecent
from plpkg.retention.train import train_heads
from plpkg.retention.trials.tasks import pairs_in_noise

from rounding import sampling_error


def test_packed_ids_hold_a_token_and_the_one_before():
    ids = torch.tensor([[5, 7, 9]])
    ids_with_before = tiny.packed(ids, 10)
    assert (ids_with_before % 10).tolist() == [[5, 7, 9]]
    assert (ids_with_before // 10).tolist() == [[0, 5, 7]]


def test_the_embedding_knows_both():
    embedding = tiny.PairEmbedding(10, 4)
    ids = torch.tensor([[5, 7, 9]])
    expected = embedding.token(ids) + embedding.previous(torch.tensor([[0, 5, 7]]))
    assert torch.equal(embedding(tiny.packed(ids, 10)), expected)


def test_chunks_are_the_whole():
    model, task = tiny.untrained(), pairs_in_noise(4, 40)
    for positions in ("original", "reassigned"):
        whole = tiny.accuracy(model, task, None, 0)
        assert tiny.accuracy(model, task, SinkRecent(), 64, 7, positions=positions) == whole


@pytest.fixture(scope="module")
def trained():
    """In ten seconds: shorter noise and fewer pairs than the notebook has."""
    return tiny.train(steps=200, tokens=1536, pairs=4, longest=32, progress=False)


def test_training_finds_pairs_and_heads_keep_them(trained):
    task = pairs_in_noise(64, 32, pairs=4, seed=7)
    full, asked = tiny.accuracy(trained, task, None, 0), 64 * 4
    assert full > 0.5 + sampling_error(0.25, asked)  # it finds most; chance is 1 in 93
    heads = RetainingHeads.attach(trained, 32)
    data = tiny.examples(lambda seed: pairs_in_noise(16, 32, pairs=4, seed=seed), 80)
    train_heads(trained, heads, data, steps=80, lr=5e-3, warmup=10, progress=False)
    kept, recent = (tiny.accuracy(trained, task, scorer, 8, 8) for scorer in (Locret(heads), SinkRecent()))
    assert kept > recent + sampling_error(2 * 0.25, asked)
    assert not any(p.requires_grad for p in trained.parameters())
