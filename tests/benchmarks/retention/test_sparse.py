"""Sparse attention is exactly full attention in the limit, and by hand what its columns and diagonals say."""

import pytest
import torch

from benchmarks.retention.sparse import VerticalSlash
from plpkg.backbones import random_backbone
from tests.retention.conftest import ATTENTION, in_double

from rounding import assert_as_exact

SEQ = 29


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
def test_dense_sparsity_is_full_attention(backbone, ids, family, attention):
    model = backbone(family, attention)
    full = [m(ids).logits for m in (model, in_double(model))]
    with VerticalSlash(vertical=SEQ, slash=0).on(model) as sparse:
        assert_as_exact(model(ids).logits, *full)
    assert sparse.density == 1.0
    with VerticalSlash(vertical=0, slash=SEQ).on(model):
        assert_as_exact(model(ids).logits, *full)


def test_sparse_attention_is_what_its_columns_and_diagonals_say(backbone, ids):
    """One layer: the last query's own attention decides, so the masked softmax can be worked out by hand."""
    model, seen = backbone(num_layers=1), []

    class Recorded(VerticalSlash):
        def __call__(self, units):
            seen.append((units, super().__call__(units)[2]))
            return seen[-1][0].keys, seen[-1][0].values, seen[-1][1]

    with Recorded(vertical=2, slash=2, last=1).on(model):
        model(ids)
    units, allowed = seen[0]
    attention = torch.cat(list(units.logits())).softmax(-1).flatten(1, 2)  # (batch, heads, seq, seq)
    for b in range(2):
        for h in range(4):
            last = attention[b, h, -1]
            columns = set(last.topk(2).indices.tolist())
            backs = {SEQ - 1 - i for i in columns} | {0}  # with one query, its best diagonals are its best columns
            for i in range(SEQ):
                expected = [j for j in range(i + 1) if j in columns or i - j in backs]
                assert allowed[b, h, i].nonzero().flatten().tolist() == expected


def test_sliding_windows_are_not_rewritten():
    model = random_backbone("mistral", num_kv_heads=2, vocab=64, options={"sliding_window": 8})
    with pytest.raises(ValueError, match="layer 0 has a sliding window of 8 tokens"), VerticalSlash(99, 99).on(model):
        pass
