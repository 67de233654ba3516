"""Fetched blocks: exactly full attention when all are fetched, else those that suit the queries."""

import pytest
import torch

from benchmarks.retention import offload
from plpkg.backbones import random_backbone
from plpkg.decoding import cache_argument
from plpkg.retention import watch
from tests.retention.conftest import ATTENTION, in_double

from rounding import assert_as_exact


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
@pytest.mark.parametrize("block", [1, 4])
def test_every_block_fetched_is_full_attention(backbone, ids, family, attention, block):
    model = backbone(family, attention)
    with offload.retrieving(model, block=block, top=99, first=2, local=3) as cache:
        logits = offload.read(model, cache, ids[:, :-1], 6)
        after = model(ids[:, -1:], **cache_argument(cache)).logits[:, -1]
    full = [m(ids).logits for m in (model, in_double(model))]
    assert_as_exact(logits, *(each[:, -2] for each in full))
    assert_as_exact(after, *(each[:, -1] for each in full))


def test_the_blocks_that_suit_the_queries_are_fetched(backbone, monkeypatch):
    """One layer: four blocks of random keys, one query; the block is the one whose mean key it likes best."""
    model, fetched, queries = backbone(num_layers=1), [], []
    ids = torch.arange(1, 21)[None]
    gather, make_units = offload.gather, watch.Units

    def seen(states, chosen):
        fetched.append(chosen)
        return gather(states, chosen)

    def units(**fields):
        queries.append(fields["query"])
        return make_units(**fields)

    with offload.retrieving(model, block=4, top=1, first=1, local=3) as cache:
        offload.read(model, cache, ids, 20)
        keys = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(1))
        # Whatever the query, it likes one of two opposite blocks better than zeros next to the local units.
        keys[:, :, 5:9], keys[:, :, 13:17] = -keys[:, :, 1:5], 0
        cache.layers[0].keys = keys.clone()
        monkeypatch.setattr(offload, "gather", seen)
        monkeypatch.setattr(watch, "Units", units)
        model(ids[:, :1], **cache_argument(cache))
    query = queries[0].unflatten(1, (2, 2)).mean(dim=(2, 3))[0]  # (kv_heads, head_dim)
    best = [max(range(4), key=lambda b: keys[0, h, 1 + 4 * b : 5 + 4 * b].mean(0) @ query[h]) for h in range(2)]
    assert 3 not in best
    assert fetched[0][0].tolist() == [[0, *range(1 + 4 * b, 5 + 4 * b), 17, 18, 19] for b in best]
    assert cache.peak_units == 20


def test_no_more_than_the_budget_is_at_hand(backbone, ids):
    model = backbone()
    with offload.retrieving(model, block=4, top=1, first=2, local=5) as cache:
        offload.read(model, cache, ids, 6)
    assert cache.peak_units <= 2 + 4 + 5 + 3 + 6  # up to three units do not fill a block
    with pytest.raises(RuntimeError, match="within the `with` block of retrieving"):
        model(ids, **cache_argument(cache))
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has layers that are not full attention"):
        offload.retrieving(random_backbone("gemma2")).__enter__()
