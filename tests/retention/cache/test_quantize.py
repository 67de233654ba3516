"""Packed numbers are within half a step, and a quantised cache evicts as a plain one does."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from plpkg.backbones import load_backbone, random_backbone
from plpkg.decoding import cache_argument
from plpkg.retention import chunked_prefill, scorers
from plpkg.retention.cache.quantize import ByChannel, ByToken, Packed, quantized
from plpkg.retention.cache.store import UnitStore
from plpkg.retention.scorers import KeyNorm

from rounding import assert_close, relative

SEQ = 29


@given(st.sampled_from([2, 4]), st.sampled_from([4, 8, 16]), st.floats(1e-3, 1e3), st.integers(0, 99))
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
    constant = torch.full((2, 8), 3.5).bfloat16()
    packed = Packed(constant, 2, 8)
    assert torch.equal(packed.numbers(), constant)
    assert packed.scale.dtype == packed.numbers().dtype == torch.bfloat16


def states(n=13, width=16, seed=0):
    return torch.randn(2, 2, n, width, generator=torch.Generator().manual_seed(seed))


def test_a_unit_rounded_by_token_is_never_rounded_again():
    store = ByToken(2, 8)
    for part in states().split(4, dim=2):
        store.append(part)
    before = store.read()
    kept = [0, 2, 5, 12]
    store.keep(torch.tensor(kept).expand(2, 2, 4))
    assert len(store) == 4
    assert torch.equal(store.read(), before[:, :, kept])
    store.change(lambda t: t[1:])
    assert torch.equal(store.read(), before[1:, :, kept])


def test_channels_are_rounded_in_groups_of_units_and_the_rest_waits():
    store, whole = ByChannel(4, 4), states(11)
    store.append(whole[:, :, :6])
    store.append(whole[:, :, 6:])
    rounded = store.read()
    assert len(store) == 11
    assert torch.equal(rounded[:, :, 8:], whole[:, :, 8:])  # three units do not fill a group
    step = (whole[:, :, :4].amax(2) - whole[:, :, :4].amin(2))[:, :, None] / 15
    assert ((rounded[:, :, :4] - whole[:, :, :4]).abs() <= step / 2 + relative(8) * whole.abs().max()).all()
    other = ByChannel(4, 4)
    other.append(whole)
    other.change(lambda t: t[1:])
    assert torch.equal(other.read(), rounded[1:])
    store.keep(torch.arange(2, 7).expand(2, 2, 5))
    assert torch.equal(store.read()[:, :, 4:], rounded[:, :, 6:7])


@pytest.mark.parametrize("scheme", ["token", "kivi"])
@pytest.mark.parametrize("positions", ["original", "reassigned"])
def test_a_quantised_cache_evicts_and_generates(model, ids, scheme, positions):
    scorer = scorers.Static(torch.rand(2, 2, 2, SEQ, generator=torch.Generator().manual_seed(0)))
    sizes = dict(budget=12, chunk_size=5, positions=positions, log_positions=True)
    plain, packed, coarse = (
        chunked_prefill(model, ids, scorer, store=store, **sizes)
        for store in (UnitStore, quantized(4, scheme, 8), quantized(2, scheme, 8))
    )
    assert torch.equal(packed.log[-1].kept, plain.log[-1].kept)
    assert packed.cache.num_bytes < 0.7 * plain.cache.num_bytes
    four, two = ((read.logits - plain.logits).norm() for read in (packed, coarse))
    assert 0 < four < two / 2  # whose steps are five times as wide
    assert model.generate(**packed.inputs(), max_new_tokens=3, do_sample=False).shape == (2, 4)
    packed.cache.reset()
    assert packed.cache.num_bytes == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_rounding_is_no_worse_than_transformers_own(bits, monkeypatch):
    """Real weights and text, nothing evicted; transformers' cache keeps its latest units whole and rounds fewer."""
    from optimum.quanto.library.extensions import get_extension
    from transformers import QuantizedCache

    def unpack(packed, bits):  # as quanto's kernel does, which it would first compile for a minute
        return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])

    monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", SimpleNamespace(unpack=unpack))
    model, tokenizer = load_backbone("plpkg-small")
    text = "Return a new array of given shape and type, filled with zeros. " * 4
    ids = tokenizer(text, return_tensors="pt").input_ids
    theirs = QuantizedCache(backend="quanto", config=model.config, nbits=bits, q_group_size=32, residual_length=8)
    with torch.no_grad():
        full = model(ids).logits[:, -1]
        for part in ids.split(8, dim=1):
            logits = model(part, **cache_argument(theirs)).logits[:, -1]
    error = {"theirs": (logits - full).abs().mean().item()}
    for scheme in ("token", "kivi"):
        read = chunked_prefill(model, ids, KeyNorm(), 999, 8, store=quantized(bits, scheme, 32))
        error[scheme] = (read.logits - full).abs().mean().item()
    assert 0 < min(error["token"], error["kivi"]) < 1.25 * error["theirs"], error


@pytest.mark.parametrize(
    ("head_dim", "options", "message"),
    [
        (16, dict(bits=3), "bits must be one of 2, 4, got 3"),
        (16, dict(scheme="both"), "scheme must be one of 'token', 'kivi', got 'both'"),
        (16, dict(group=6), "group must be a multiple of 4, got 6"),
        (18, {}, "heads of 18 numbers do not divide into groups of 18"),
        (16, dict(group=12), "heads of 16 numbers do not divide into groups of 12"),
    ],
)
def test_bad_sizes_of_groups(ids, head_dim, options, message):
    model = random_backbone("llama", head_dim=head_dim)
    with pytest.raises(ValueError, match=message):
        chunked_prefill(model, ids, KeyNorm(), 8, 4, store=quantized(**options))
