"""The cache, alone: what is kept, where it stands, and what transformers asks of it."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

from plpkg.backbones import random_backbone
from plpkg.decoding import cache_argument
from plpkg.retention import chunked_prefill
from plpkg.retention.cache.evicting import EvictingCache, ReassignedPositions
from plpkg.retention.cache.rotary import Rotary
from plpkg.retention.eviction import keep_indices
from plpkg.retention.labels import cis_labels
from plpkg.retention.scorers import H2O, KeyNorm
from plpkg.retention.watch import Watch, watching
from tests.retention.conftest import ROTARY, in_double, other_family

from rounding import assert_as_exact, assert_close

LLAMA = random_backbone("llama", num_kv_heads=2)
TURN = 4  # two products, of a cosine and a sine that are themselves rounded
BACK = TURN + 4  # there both are divided by the sum of their squares


def states(n, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, n, 16, generator=generator).to(dtype) for _ in range(2))


NUMBERS = [-1.0, 0.0, 0.5, 2.0, float("inf"), float("-inf"), float("nan")]
LOWEST = torch.finfo(torch.float32).min


@settings(max_examples=300)
@given(
    scores=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=20), budget=st.integers(1, 22), data=st.data(),
    first=st.integers(0, 5), last=st.integers(0, 5), stabilizers=st.integers(0, 5),
)  # fmt: skip
def test_each_head_keeps_its_best_units_in_their_order(scores, budget, data, first, last, stabilizers):
    """Sorted by (protected, score, earlier), NaN the lowest score, then in the order of time."""
    n, at_end = len(scores), max(last, stabilizers)
    marked = data.draw(st.sets(st.integers(0, n - 1), max_size=4))
    if first + at_end + len(marked) > budget:
        return
    heads = torch.tensor([[scores, scores[::-1]]])
    also = torch.tensor([i in marked for i in range(n)]).expand(1, 2, n) if marked else None
    scored = heads.clone()
    kept = keep_indices(scored, budget, first=first, last=last, stabilizers=stabilizers, also=also)
    torch.testing.assert_close(scored, heads, rtol=0, atol=0, equal_nan=True)  # protection works on a copy
    safe = {*marked, *range(first), *range(n - at_end, n)}
    for head, row in zip(heads[0].nan_to_num(nan=LOWEST).tolist(), kept[0].tolist(), strict=True):
        best = sorted(range(n), key=lambda i: (i not in safe, -head[i], i))
        assert row == sorted(best[:budget])


def test_more_protection_than_room_is_refused():
    with pytest.raises(ValueError, match="2 first and 3 last units are protected, more than budget=3"):
        keep_indices(torch.zeros(1, 1, 9), 3, first=2, last=3)
    with pytest.raises(ValueError, match="budget must be a whole number of at least 1, got 0"):
        keep_indices(torch.zeros(1, 1, 9), 0)


def test_by_default_no_unit_is_safe_from_a_cut():
    scores = torch.tensor([[[0.0, 3.0, 2.0, 4.0, 1.0]]])
    assert keep_indices(scores, 2).tolist() == [[[1, 3]]]


@pytest.mark.parametrize("rope", ["yarn", "linear", "dynamic"])
def test_rotary_of_scaled_variants_is_undone(rope):
    parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4}
    rotary, (keys, _) = Rotary(random_backbone("llama", options={"rope_parameters": parameters})), states(7)
    assert_close(rotary.undo(rotary.apply(keys, 300), 300), keys, terms=TURN + BACK)


@pytest.mark.parametrize(("family", "attention"), ROTARY)
def test_rotary_is_each_familys_own(backbone, ids, family, attention):
    """What the cache stores are the key projection's outputs, though it sees them rotated only."""
    model, seen = backbone(family, attention), {}
    cache = EvictingCache(model)
    with torch.no_grad(), watching(model, Watch(lambda units: seen.update({units.layer: units.projected})), cache):
        model(ids, **cache_argument(cache))
    for i, layer in cache.evicting.items():
        keys = seen[i].unflatten(-1, (-1, 16))[:, :, 4:6].transpose(1, 2)  # of 4 query, 2 key and 2 value heads
        assert_close(layer.store.keys, keys, terms=TURN + BACK)


@pytest.mark.parametrize("family", ["stablelm", "phi", "cohere", "qwen3"])
def test_other_families_rotate_as_they_do(family):
    """Part of each head, pairs of neighbours, norms before rotation: an independent check is the model itself."""
    model, ids = other_family(family), torch.randint(1, 64, (1, 20))
    with torch.no_grad():
        expected, exact = (m(ids).logits[:, -1] for m in (model, in_double(model)))
    assert_as_exact(chunked_prefill(model, ids, KeyNorm(), 99, 6).logits, expected, exact)


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
        LLAMA(torch.arange(12).view(2, 6), **cache_argument(cache))
    for layer in cache.layers:
        layer.scores = torch.rand(2, 2, 6)
    return cache


def test_batches_can_be_repeated(cache):
    layer = cache.layers[0]
    cache.beside = {"logits": torch.arange(2)}
    before = layer.positions.clone(), layer.scores.clone(), layer.store.keys.clone()
    cache.batch_repeat_interleave(3)
    assert cache.beside["logits"].tolist() == [0, 0, 0, 1, 1, 1]
    for old, new in zip(before, (layer.positions, layer.scores, layer.store.keys), strict=True):
        assert torch.equal(new, old.repeat_interleave(3, dim=0))


def test_bytes_are_those_of_keys_and_values_and_a_copy_is_independent(cache):
    assert cache.num_bytes == 2 * 2 * 2 * 2 * 6 * 16 * 4  # layers, K and V, batch, heads, units, width, float32
    other = copy.deepcopy(cache)
    other.layers[0].keep(torch.zeros(2, 2, 1, dtype=torch.long))
    assert (other.kept, cache.kept) == (1, 6)
    assert other.num_bytes == (6 + 1) * 2 * 2 * 2 * 16 * 4


def test_reset_forgets_everything(cache):
    cache.reset()
    assert cache.kept == cache.get_seq_length() == cache.num_bytes == 0
    LLAMA(torch.arange(6)[None], **cache_argument(cache))
    assert cache.kept == 6


@pytest.mark.parametrize("method", ["activate_past_recording", "crop", "reorder_cache", "batch_select_indices"])
def test_what_transformers_caches_can_do_and_this_one_cannot(cache, method):
    before = cache.tensors()
    with pytest.raises(ValueError, match=r"this cache (takes no tokens back|has no beams)"):
        getattr(cache, method)(*[-1] * (method != "activate_past_recording"))
    cache.crop(0)  # nothing is to be taken back
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.tensors().items())


@pytest.mark.parametrize("family", ["phi3", "mistral", "gemma2"])
@pytest.mark.parametrize("positions", ["reassigned", "original"])
def test_a_window_longer_than_any_text_bounds_nothing(family, positions):
    """As in Phi-3-mini-128k's configuration."""
    none = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {"sliding_window": None}
    options = [none, {"sliding_window": 64}, {"sliding_window": 63}]
    full, longer, shorter = (
        random_backbone(family, num_kv_heads=2, options={"max_position_embeddings": 64} | each) for each in options
    )
    longer.load_state_dict(full.state_dict())
    ids = torch.arange(40)[None] % full.config.vocab_size
    read = [chunked_prefill(model, ids, H2O(), 12, 8, positions=positions) for model in (full, longer)]
    assert torch.equal(read[0].logits, read[1].logits)
    assert torch.equal(*(cis_labels(model, ids, 30) for model in (full, longer)))
    for refused in (lambda: EvictingCache(shorter), lambda: cis_labels(shorter, ids, 30)):
        with pytest.raises(ValueError, match="sliding window"):
            refused()


def test_sliding_windows_stay_as_they_are_under_original_positions():
    model = random_backbone("gemma2", num_kv_heads=2, options={"sliding_window": 4})
    cache = EvictingCache(model, "original")
    assert list(cache.evicting) == [1]
    with pytest.raises(ValueError, match=r"layer 0 of Gemma2ForCausalLM has a sliding window of 4 tokens"):
        EvictingCache(model, "reassigned")
    with pytest.raises(ValueError, match="every layer of MistralForCausalLM has a sliding window"):
        EvictingCache(random_backbone("mistral", options={"sliding_window": 8}), "original")
