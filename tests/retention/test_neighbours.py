"""Quantised, offloaded, sparse and merged caches: each has a limit in which it is the plain thing, exactly."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from plpkg.backbones import load_backbone, random_backbone
from plpkg.retention import chunked_prefill, merge, offload, scorers, watch
from plpkg.retention.quantize import ByChannel, ByToken, Packed, quantized
from plpkg.retention.scorers import KeyNorm
from plpkg.retention.sparse import VerticalSlash
from tests.retention.conftest import ATTENTION, in_double

from rounding import assert_as_exact, assert_close, relative

SEQ = 29


# Quantised.


@given(
    bits=st.sampled_from([2, 4]), group=st.sampled_from([4, 8, 16]), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99)
)
def test_rounding_is_within_half_a_step(bits, group, scale, seed):
    numbers = scale * torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(seed))
    packed = Packed(numbers, bits, group)
    step = packed.scale.expand(2, 3, 32 // group, group).flatten(2)
    roundings = 8  # a difference, a quotient, a product and a sum, of up to twice the largest number
    assert ((packed.numbers() - numbers).abs() <= step / 2 + relative(roundings) * numbers.abs().max()).all()
    spread = numbers.unflatten(-1, (-1, group))
    expected = (spread.amax(-1) - spread.amin(-1)) / (2**bits - 1)
    assert_close(packed.scale[..., 0], expected, terms=2, size=expected)
    assert packed.num_bytes == numbers.numel() * bits // 8 + 2 * 4 * numbers.numel() // group


def test_what_lies_on_the_steps_is_kept_exactly():
    numbers = torch.arange(16.0).repeat(3, 1)
    assert torch.equal(Packed(numbers, 4, 16).numbers(), numbers)
    assert torch.equal(Packed(torch.full((2, 8), 3.5), 2, 8).numbers(), torch.full((2, 8), 3.5))


def test_bfloat16_stays_bfloat16():
    packed = Packed(torch.randn(4, 16).bfloat16(), 4, 8)
    assert packed.scale.dtype == packed.numbers().dtype == torch.bfloat16


def states(n=13, width=16, seed=0):
    return torch.randn(2, 2, n, width, generator=torch.Generator().manual_seed(seed))


def test_a_unit_rounded_by_token_is_never_rounded_again():
    store = ByToken(2, 8)
    for part in states().split(4, dim=2):
        store.append(part)
    before = store.read()
    indices = torch.tensor([0, 2, 5, 12]).expand(2, 2, 4)
    store.keep(indices)
    assert len(store) == 4
    assert torch.equal(store.read(), before[:, :, [0, 2, 5, 12]])
    store.change(lambda t: t[1:])
    assert torch.equal(store.read(), before[1:, :, [0, 2, 5, 12]])


def test_channels_are_rounded_in_groups_of_units_and_the_rest_waits():
    store, whole = ByChannel(4, 4), states(11)
    store.append(whole[:, :, :6])
    store.append(whole[:, :, 6:])
    found = store.read()
    assert len(store) == 11
    assert torch.equal(found[:, :, 8:], whole[:, :, 8:])  # three units do not fill a group
    spread = whole[:, :, :4].amax(2) - whole[:, :, :4].amin(2)
    step = spread[:, :, None] / 15
    assert ((found[:, :, :4] - whole[:, :, :4]).abs() <= step / 2 + relative(8) * whole.abs().max()).all()
    other = ByChannel(4, 4)
    other.append(whole)
    other.change(lambda t: t[1:])
    assert torch.equal(other.read(), found[1:])
    store.keep(torch.arange(2, 7).expand(2, 2, 5))
    assert torch.equal(store.read()[:, :, 4:], found[:, :, 6:7])


@pytest.mark.parametrize("scheme", ["token", "kivi"])
@pytest.mark.parametrize("positions", ["original", "reassigned"])
def test_a_quantised_cache_evicts_and_generates(backbone, ids, scheme, positions):
    model = backbone()
    scores = torch.rand(2, 2, 2, SEQ, generator=torch.Generator().manual_seed(0))
    sizes = dict(budget=12, chunk_size=5, positions=positions)
    plain = chunked_prefill(model, ids, scorers.static(scores), **sizes)
    packed = chunked_prefill(model, ids, scorers.static(scores), store=quantized(4, scheme, 8), **sizes)
    assert torch.equal(packed.log[-1].kept, plain.log[-1].kept)
    assert packed.cache.num_bytes < 0.7 * plain.cache.num_bytes
    coarse = chunked_prefill(model, ids, scorers.static(scores), store=quantized(2, scheme, 8), **sizes)
    four, two = ((read.logits - plain.logits).norm() for read in (packed, coarse))
    assert 0 < four < two / 2  # whose steps are five times as wide
    assert model.generate(**packed.inputs(), max_new_tokens=3, do_sample=False).shape == (2, 4)
    packed.cache.reset()
    assert packed.cache.num_bytes == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_rounding_is_no_worse_than_transformers_own(bits):
    """Real weights and text, nothing evicted; transformers' cache keeps its latest units whole and rounds fewer."""
    from transformers import QuantizedCache

    model, tokenizer = load_backbone("plpkg-small")
    ids = tokenizer(
        "Return a new array of given shape and type, filled with zeros. " * 4, return_tensors="pt"
    ).input_ids
    theirs = QuantizedCache(backend="quanto", config=model.config, nbits=bits, q_group_size=32, residual_length=8)
    with torch.no_grad():
        full = model(ids).logits[:, -1]
        for part in ids.split(8, dim=1):
            logits = model(part, past_key_values=theirs).logits[:, -1]
    error = {"theirs": (logits - full).abs().mean().item()}
    for scheme in ("token", "kivi"):
        read = chunked_prefill(model, ids, KeyNorm(), 999, 8, store=quantized(bits, scheme, 32))
        error[scheme] = (read.logits - full).abs().mean().item()
    assert 0 < min(error["token"], error["kivi"]) < 1.25 * error["theirs"], error


def test_bad_sizes_of_groups(backbone, ids):
    for arguments, message in (
        (dict(bits=3), "bits must be one of 2, 4, got 3"),
        (dict(scheme="both"), "scheme must be one of 'token', 'kivi', got 'both'"),
        (dict(group=6), "group must be a multiple of 4, got 6"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized(**arguments)
    with pytest.raises(ValueError, match="heads of 18 numbers do not divide into groups of 18"):
        chunked_prefill(random_backbone("llama", head_dim=18), ids, KeyNorm(), 8, 4, store=quantized(4))
    with pytest.raises(ValueError, match="heads of 16 numbers do not divide into groups of 12"):
        chunked_prefill(backbone(), ids, KeyNorm(), 8, 4, store=quantized(4, "token", 12))


# Sparse.


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


def test_sliding_windows_are_not_rewritten(ids):
    model = random_backbone("mistral", num_kv_heads=2, vocab=64, options={"sliding_window": 8})
    with VerticalSlash(99, 99).on(model), pytest.raises(ValueError, match="layer 0 has a sliding window of 8 tokens"):
        model(ids)


def test_sparse_attention_goes_with_eviction(backbone, ids):
    model = backbone()
    plain = [chunked_prefill(m, ids, KeyNorm(), 9, 4).logits for m in (model, in_double(model))]
    dense = chunked_prefill(model, ids, KeyNorm(), 9, 4, rewrite=VerticalSlash(99, 0))
    sparse = chunked_prefill(model, ids, KeyNorm(), 9, 4, rewrite=VerticalSlash(2, 1))
    assert_as_exact(dense.logits, *plain)
    with pytest.raises(AssertionError, match="times the"):
        assert_as_exact(sparse.logits, *plain)
    with pytest.raises(ValueError, match="vertical must be a whole number of at least 0, got -1"):
        VerticalSlash(-1, 0)


# Offloaded.


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
@pytest.mark.parametrize("block", [1, 4])
def test_every_block_fetched_is_full_attention(backbone, ids, family, attention, block):
    model = backbone(family, attention)
    with offload.retrieving(model, block=block, top=99, first=2, local=3) as cache:
        logits = offload.read(model, cache, ids[:, :-1], 6)
        after = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    full = [m(ids).logits for m in (model, in_double(model))]
    assert_as_exact(logits, *(each[:, -2] for each in full))
    assert_as_exact(after, *(each[:, -1] for each in full))
    assert cache.host_bytes == 2 * 2 * 2 * (4 if family == "gpt2" else 2) * SEQ * 16 * 4


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
        model(ids[:, :1], past_key_values=cache)
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
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="block must be a whole number of at least 1, got 0"):
        offload.retrieving(model, block=0).__enter__()
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has layers that are not full attention"):
        offload.retrieving(random_backbone("gemma2")).__enter__()


# Merged.


def test_gate_zero_is_plain_eviction(backbone, ids):
    model = backbone()
    plain = chunked_prefill(model, ids, KeyNorm(), 9, 4)
    merged = chunked_prefill(model, ids, KeyNorm(), 9, 4, merger=merge.Merger(model, 3))
    assert torch.equal(plain.logits, merged.logits)
    assert torch.equal(plain.log[-1].kept, merged.log[-1].kept)


def test_a_mixture_is_worked_out_by_hand(backbone):
    """Five units, three stay, one is a mixture of itself and the two that go: order, weights and gate."""
    model = backbone(num_layers=1)
    ids = torch.arange(5)[None]
    scores = torch.tensor([5.0, 1.0, 3.0, 4.0, 2.0]).expand(1, 1, 2, 5)
    merger = merge.Merger(model, 1, window=3)
    with torch.no_grad():
        merger.gates.fill_(0.25)
    whole = chunked_prefill(model, ids, scorers.static(scores), 5, 5).cache.layers[0].store
    found = chunked_prefill(model, ids, scorers.static(scores), 3, 5, merger=merger).cache.layers[0].store
    convolution = merger.convolutions[0]
    for head in range(2):
        k, v = whole.keys[0, head], whole.values[0, head]
        assert torch.equal(found.keys[0, head, [0, 2]], k[[0, 3]])
        merging = [1, 2, 4]  # unit 2 is the lowest that stays
        states = torch.cat([k[merging], v[merging]], dim=1)  # (3, 32)
        padded = torch.cat([torch.zeros(1, 32), states, torch.zeros(1, 32)])

        def by_hand(own, dtype, padded=padded, merging=merging):
            own, padded, w = (t.to(dtype) for t in (own, padded, convolution.weight[0].detach()))  # w is (32, 3)
            outputs = [sum(padded[t + i] @ w[:, i] for i in range(3)) + convolution.bias[0].item() for t in range(3)]
            return 0.75 * own[2] + 0.25 * torch.stack(outputs).softmax(0) @ own[merging]

        for own, mixed in ((k, found.keys), (v, found.values)):
            assert_as_exact(mixed[0, head, 1], by_hand(own, torch.float32), by_hand(own, torch.float64))


def test_protected_units_are_no_mixtures(backbone, ids):
    """By position alone the first units have the lowest scores, and are protected."""
    model = backbone(num_layers=1)
    merger = merge.Merger(model, 2)
    with torch.no_grad():
        merger.gates.fill_(1.0)
    plain, merged = (
        chunked_prefill(model, ids, scorers.SinkRecent(), 9, 29, 2, merger=m).cache.layers[0].store
        for m in (None, merger)
    )
    changed = (plain.keys != merged.keys).any(-1)[0, 0].nonzero().flatten().tolist()
    assert changed == [4, 5]


def test_training_lowers_the_loss_and_leaves_the_backbone(backbone):
    model = backbone()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merger = merge.Merger(model, 2)
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    data = [(ids[:, :18], ids[:, 18:])] * 40
    found = merge.train_merger(model, merger, data, KeyNorm(), 6, 4, steps=40, lr=0.05, progress=False)
    assert found[-1] < found[0]
    assert merger.gates.abs().max() > 0.05  # the first step alone goes so far
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    only_last = torch.full((4, 6), -100)
    only_last[:, -1] = ids[:, -1]
    (loss,) = merge.train_merger(
        model, merge.Merger(model, 2), [(*data[0], only_last)], KeyNorm(), 6, 4, steps=1, progress=False
    )

    def by_hand(model):
        read = chunked_prefill(model, ids[:, :18], KeyNorm(), 6, 4)
        logits = model(ids[:, 18:], past_key_values=read.cache).logits[:, -2]
        return torch.nn.functional.cross_entropy(logits, ids[:, -1])

    assert_as_exact(torch.tensor(loss), by_hand(model), by_hand(in_double(model)))
    with pytest.raises(ValueError, match="the data end after 40 of 41 steps"):
        merge.train_merger(model, merger, data, KeyNorm(), 6, 4, steps=41, progress=False)


def test_merging_refuses_what_it_cannot_mix(backbone, ids):
    model = backbone()
    merger = merge.Merger(model, 3)
    for options in (dict(positions="original"), dict(store=quantized())):
        with pytest.raises(ValueError, match="merging needs positions='reassigned' and a store of plain tensors"):
            chunked_prefill(model, ids, KeyNorm(), 9, 4, merger=merger, **options)
    with pytest.raises(ValueError, match="slots=3 are more than the 2 units that stay unprotected"):
        chunked_prefill(model, ids, KeyNorm(sink=1), 3, 4, merger=merger)
    with pytest.raises(ValueError, match="merging needs positions='reassigned'"):  # also at the only cut
        chunked_prefill(model, ids, KeyNorm(), 9, 29, merger=merger, positions="original")
    with pytest.raises(ValueError, match="window must be odd, got 4"):
        merge.Merger(model, 3, window=4)
    assert math.isfinite(chunked_prefill(model, ids, KeyNorm(), 9, 4, merger=merger).logits.sum())
