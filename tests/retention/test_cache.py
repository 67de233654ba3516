"""The cache, alone: what is kept, where it stands, and what transformers asks of it."""

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg.backbones import random_backbone
from plpkg.retention import chunked_prefill
from plpkg.retention.cache import EvictingCache, OriginalPositions, ReassignedPositions, Rotary, keep_indices
from plpkg.retention.scorers import KeyNorm
from plpkg.retention.watch import Watch, watching
from tests.retention.conftest import ROTARY, in_double

from rounding import assert_as_exact, assert_close

LLAMA = random_backbone("llama", num_kv_heads=2)
TURN = 4  # two products, of a cosine and a sine that are themselves rounded
BACK = TURN + 4  # there both are divided by the sum of their squares


def states(n, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, n, 16, generator=generator).to(dtype) for _ in range(2))


# What is kept.


def by_hand(scores, budget, first, last):
    """Sorted by (protected, score, earlier), then in the order of time."""
    n = len(scores)
    rank = sorted(range(n), key=lambda i: (not (i < first or i >= n - last), -scores[i], i))
    return sorted(rank[:budget])


@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("inf"), float("-inf")]), min_size=1, max_size=20),
    budget=st.integers(1, 22),
    first=st.integers(0, 5),
    last=st.integers(0, 5),
)
def test_the_best_units_stay_in_their_order(scores, budget, first, last):
    if first + last > budget:
        return
    kept = keep_indices(torch.tensor(scores)[None, None], budget, first=first, stabilizers=last)
    assert kept[0, 0].tolist() == by_hand(scores, budget, first, last)


@given(data=st.data(), budget=st.integers(1, 12), first=st.integers(0, 2), last=st.integers(0, 2))
def test_marked_units_stay(data, budget, first, last):
    scores = data.draw(st.lists(st.sampled_from([-1.0, 0.0, float("inf")]), min_size=1, max_size=12))
    marked = data.draw(st.sets(st.integers(0, len(scores) - 1), max_size=4))
    if first + last + len(marked) > budget:
        return
    also = torch.tensor([i in marked for i in range(len(scores))])[None, None]
    kept = keep_indices(torch.tensor(scores)[None, None], budget, first=first, last=last, also=also)
    raised = [float("inf") if i in marked else min(score, 1e9) for i, score in enumerate(scores)]
    assert kept[0, 0].tolist() == by_hand(raised, budget, first, last)


def test_each_head_keeps_its_own():
    scores = torch.tensor([[[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]]])
    assert keep_indices(scores, 2).tolist() == [[[0, 2], [1, 2]]]
    assert scores[0, 0].tolist() == [3.0, 1.0, 2.0]  # protection works on a copy


def test_nan_is_the_lowest_score():
    scores = torch.tensor([[[float("nan"), 1.0, float("nan"), 0.0]]])
    assert keep_indices(scores, 2).tolist() == [[[1, 3]]]
    assert keep_indices(scores, 3).tolist() == [[[0, 1, 3]]]


def test_more_protection_than_room_is_refused():
    with pytest.raises(ValueError, match="2 first and 3 last units are protected, more than budget=3"):
        keep_indices(torch.zeros(1, 1, 9), 3, first=2, last=3)
    with pytest.raises(ValueError, match="budget must be a whole number of at least 1, got 0"):
        keep_indices(torch.zeros(1, 1, 9), 0)


def test_protection_leaves_the_scores_as_they_were():
    scores = torch.zeros(1, 1, 4)
    keep_indices(scores, 2, first=1, stabilizers=1)
    assert not scores.any()


# Where it stands.


def rotated(keys, positions):
    """By the textbook: each pair (x_i, x_{i + d/2}) turns by position · base^(-2i/d)."""
    d = keys.shape[-1]
    angle = positions.double()[..., None] * 10_000.0 ** (-torch.arange(0, d, 2).double() / d)
    a, b = keys.double().chunk(2, dim=-1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return turned.to(keys.dtype)


def test_rotary_is_the_textbooks_and_undone_exactly():
    keys, _ = states(7)
    rotary = Rotary(LLAMA)
    turned = rotary.apply(keys, 5)
    angle = 2 * 12  # so many radians come from a frequency and a product that are rounded
    assert_close(turned, rotated(keys, torch.arange(5, 12)), terms=TURN + angle)
    assert_close(rotary.undo(turned, 5), keys, terms=TURN + BACK)


@pytest.mark.parametrize("rope", ["yarn", "linear", "dynamic"])
def test_rotary_of_scaled_variants_is_undone(rope):
    options = {"rope_parameters": {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4}}
    rotary = Rotary(random_backbone("llama", options=options))
    keys, _ = states(7)
    assert_close(rotary.undo(rotary.apply(keys, 300), 300), keys, terms=TURN + BACK)


@pytest.mark.parametrize(("family", "attention"), ROTARY)
def test_rotary_is_each_familys_own(backbone, ids, family, attention):
    """What the cache stores are the key projection's outputs, though it sees them rotated only."""
    model, seen = backbone(family, attention), {}
    cache = EvictingCache(model)
    with torch.no_grad(), watching(model, Watch(lambda units: seen.update({units.layer: units.projected}))):
        model(ids, past_key_values=cache)
    for i, layer in cache.evicting.items():
        keys = seen[i].unflatten(-1, (-1, 16))[:, :, 4:6].transpose(1, 2)  # of 4 query, 2 key and 2 value heads
        assert_close(layer.store.keys, keys, terms=TURN + BACK)


@pytest.mark.parametrize("family", ["stablelm", "phi", "cohere", "qwen3"])
def test_other_families_rotate_as_they_do(family):
    """Part of each head, pairs of neighbours, norms before rotation: an independent check is the model itself."""
    config = AutoConfig.for_model(
        family, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=64,
        num_hidden_layers=2, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.randint(1, 64, (1, 20))
    with torch.no_grad():
        expected, exact = (m(ids).logits[:, -1] for m in (model, in_double(model)))
    assert_as_exact(chunked_prefill(model, ids, KeyNorm(), 99, 6).logits, expected, exact)


def test_part_of_a_head_may_be_rotated():
    model = random_backbone("phi3", options={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                                 "partial_rotary_factor": 0.5}})  # fmt: skip
    rotary, (keys, _) = Rotary(model), states(7)
    turned = rotary.apply(keys, 3)
    assert torch.equal(turned[..., 8:], keys[..., 8:])
    assert not torch.allclose(turned[..., :8], keys[..., :8])
    assert_close(rotary.undo(turned, 3), keys, terms=TURN + BACK)


INDICES = torch.tensor([[[0, 3, 4], [1, 2, 4]]])


def test_reassigned_units_close_ranks():
    layer, rotary = ReassignedPositions(Rotary(LLAMA)), Rotary(LLAMA)
    (keys, values), (more, other) = states(5), states(2, seed=1)
    layer.update(rotary.apply(keys), values)
    layer.keep(INDICES)
    assert layer.get_seq_length() == 3
    assert layer.get_mask_sizes(2) == (5, 0)
    read, _ = layer.update(rotary.apply(more, 3), other)
    kept = keys.gather(2, INDICES[..., None].expand(1, 2, 3, 16))
    expected = rotated(torch.cat([kept, more], dim=2), torch.arange(5))
    angle = 2 * 5
    assert_close(read, expected, terms=TURN + BACK + TURN + angle)
    assert layer.positions.tolist() == [[[0, 3, 4, 5, 6], [1, 2, 4, 5, 6]]]


def test_original_units_stay_where_they_stood():
    layer = OriginalPositions()
    (keys, values), (more, other) = states(5), states(2, seed=1)
    layer.update(keys, values)
    layer.keep(INDICES)
    assert layer.get_seq_length() == 5
    assert layer.get_mask_sizes(2) == (5, 2)
    read, read_values = layer.update(more, other)
    for whole, new, result in ((keys, more, read), (values, other, read_values)):
        assert torch.equal(result, torch.cat([whole.gather(2, INDICES[..., None].expand(1, 2, 3, 16)), new], dim=2))


def test_bfloat16_does_not_drift_over_many_cuts():
    """Each key is rounded twice however many cuts it lives through, since keys wait unrotated."""
    model = random_backbone("llama", num_kv_heads=2, dtype=torch.bfloat16)
    layer, rotary = ReassignedPositions(Rotary(model)), Rotary(model)
    keys, values = states(8, dtype=torch.bfloat16)
    layer.update(rotary.apply(keys), values)
    survivors = layer.store.keys.clone()
    for _ in range(200):
        layer.update(rotary.apply(keys[:, :, :4], 8), values[:, :, :4])
        layer.keep(torch.arange(8).expand(1, 2, 8))
    assert torch.equal(layer.store.keys, survivors)
    assert_close(survivors, keys, terms=2)


# What transformers asks of it.


@pytest.fixture(params=["original", "reassigned"])
def cache(request):
    cache = EvictingCache(LLAMA, request.param)
    with torch.no_grad():
        LLAMA(torch.arange(12).view(2, 6), past_key_values=cache)
    for layer in cache.layers:
        layer.scores = torch.rand(2, 2, 6)
    return cache


def test_batches_can_be_chosen_and_repeated(cache):
    layer = cache.layers[0]
    before = layer.positions.clone(), layer.scores.clone(), layer.store.keys.clone()
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([0, 3, 4]))
    cache.batch_select_indices(torch.tensor([1, 0]))
    for old, new in zip(before, (layer.positions, layer.scores, layer.store.keys), strict=True):
        assert torch.equal(new, old[[1, 0]])


def test_a_copy_is_independent(cache):
    other = copy.deepcopy(cache)
    other.layers[0].keep(torch.zeros(2, 2, 1, dtype=torch.long))
    assert other.kept == 1
    assert cache.kept == 6


def test_bytes_are_those_of_keys_and_values(cache):
    assert cache.num_bytes == 2 * 2 * 2 * 2 * 6 * 16 * 4  # layers, K and V, batch, heads, units, width, float32
    cache.layers[0].keep(torch.zeros(2, 2, 1, dtype=torch.long))
    assert cache.num_bytes == (6 + 1) * 2 * 2 * 2 * 16 * 4


def test_reset_forgets_everything(cache):
    cache.reset()
    assert cache.kept == cache.get_seq_length() == cache.num_bytes == 0
    LLAMA(torch.arange(6)[None], past_key_values=cache)
    assert cache.kept == 6


def test_what_was_evicted_does_not_come_back(cache):
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(-2\) is not possible"):
        cache.crop(-2)


def test_sliding_windows_stay_as_they_are_under_original_positions():
    model = random_backbone("gemma2", num_kv_heads=2, options={"sliding_window": 4})
    cache = EvictingCache(model, "original")
    assert list(cache.evicting) == [1]
    with pytest.raises(ValueError, match=r"layer 0 of Gemma2ForCausalLM has a sliding window of 4 tokens"):
        EvictingCache(model, "reassigned")
    with pytest.raises(ValueError, match="every layer of MistralForCausalLM has a sliding window"):
        EvictingCache(random_backbone("mistral", options={"sliding_window": 8}), "original")


def test_positions_that_are_not_rotary_cannot_be_reassigned():
    with pytest.raises(ValueError, match=r"GPT2Model does not have: take positions='original'"):
        EvictingCache(random_backbone("gpt2"), "reassigned")
    with pytest.raises(ValueError, match="positions must be one of 'reassigned', 'original', got 'both'"):
        EvictingCache(LLAMA, "both")
