"""The published headlines, every term by hand, and the properties that the sums have to have."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoConfig, DynamicCache, Llama4TextConfig, LlamaConfig, LlamaForCausalLM

from plpkg import catalog, communication
from plpkg.catalog import Device, Link, ModelShape
from plpkg.decoding import cache_among
from plpkg.throughput import METHODS, TERMS, Split, decode, prefill


@pytest.mark.parametrize(
    ("model", "literal", "figure", "figure_percent", "roofline", "roofline_percent"),
    [
        ("llama-2-7b", 27.03, 27.78, 74.88, 61.5, 42),
        ("llama-2-13b", 20.51, 21.05, 75.73, 39.8, 53),
        ("llama-30b", 12.92, 13.24, 79.28, 20.3, 68),
    ],
)
def test_headline_speeds(model, literal, figure, figure_percent, roofline, roofline_percent):
    """Of both accountings, and taken apart by the speed that the GPU's bandwidth allows."""
    drawn, bound = (decode(model, accounting="figure", gpu=gpu) for gpu in ("published", "roofline"))
    assert decode(model).tokens_per_s == pytest.approx(literal, abs=0.005)
    assert drawn.tokens_per_s == pytest.approx(figure, abs=0.005)
    assert 100 * drawn.gpu_fraction == pytest.approx(figure_percent, abs=0.005)
    assert bound.tokens_per_s == pytest.approx(roofline, abs=0.05)
    assert 100 * bound.gpu_fraction == pytest.approx(roofline_percent, abs=0.5)


def test_speed_against_round_trip_time():
    for model, speeds in {"llama-2-7b": (14.5, 5.0, 2.7, 1.4, 0.9), "llama-30b": (7.3, 2.6, 1.5, 0.8, 0.5)}.items():
        for rtt_ms, speed in zip((1, 5, 10, 20, 33), speeds, strict=True):
            assert decode(model, accounting="figure", rtt_s=rtt_ms / 1e3).tokens_per_s == pytest.approx(speed, abs=0.05)


SETTINGS = dict(
    model=st.sampled_from([name for name in catalog.models() if name != "bert-base"]),
    rank=st.integers(1, 512),
    accounting=st.sampled_from(["literal", "figure"]),
    link=st.sampled_from(list(catalog.links())),
    batch=st.integers(1, 4096),
    draft_tokens=st.integers(0, 8),
)


@settings(max_examples=150)
@given(**SETTINGS)
def test_breakdown_sums_to_the_total(**arguments):
    if arguments["draft_tokens"]:
        arguments |= dict(tokens_per_pass=1.4, gpu="roofline" if arguments["batch"] > 1 else None)
    estimate = decode(**arguments)
    parts = estimate.breakdown()
    assert tuple(parts) == TERMS
    assert sum(parts.values()) == pytest.approx(1 / estimate.tokens_per_s)
    assert all(parts[term] == 0 for term in estimate.omitted)
    assert all(value >= 0 for value in parts.values())


@settings(max_examples=60)
@given(rank=st.integers(1, 511), rtt_s=st.floats(0, 0.1), tokens=st.integers(1, 4096))
def test_more_rank_more_delay_less_speed(rank, rtt_s, tokens):
    for estimate in (
        lambda r, d: decode("gemma-2-2b", r, rtt_s=d),
        lambda r, d: prefill("gemma-2-2b", tokens, r, rtt_s=d),
    ):
        assert estimate(rank + 1, rtt_s).tokens_per_s < estimate(rank, rtt_s).tokens_per_s
        assert estimate(rank, rtt_s + 0.001).tokens_per_s < estimate(rank, rtt_s).tokens_per_s


@settings(max_examples=40)
@given(rank=st.integers(1, 512), adapted_layers=st.integers(0, 32), rtt_s=st.floats(0, 0.1))
def test_network_terms_are_the_traffic_on_the_link(rank, adapted_layers, rtt_s):
    link = Link("any", 7e6, 90e6, rtt_s)
    parts = decode("llama-3.1-8b", rank, link=link, adapted_layers=adapted_layers).breakdown()
    traffic = communication.low_rank("llama-3.1-8b", rank, adapted_layers=adapted_layers)
    network = sum(parts[term] for term in ("endpoints", "uplink", "downlink", "round_trips"))
    assert network == pytest.approx(sum(traffic.seconds(link).values()))


LINK = Link("any", 7e6, 90e6, 0.004)
PHONE, CLOUD = Device("phone", 50e9, 2e12, 8e9), Device("cloud", 900e9, 100e12, 40e9)
WHERE = dict(link=LINK, device=PHONE, cloud=CLOUD)
HEAD, DECODER = 128_256 * 4096, 8_030_261_248 - 2 * 128_256 * 4096


def test_every_term_by_hand_with_nothing_alike():
    """Grouped queries, two ranks, one projection, few layers, three precisions, guesses: no two factors are equal."""
    ranks = dict(r_c2d=48, r_d2c=24, adapted_layers=5)
    precisions = dict(bits=32, phone_bits=8, cloud_bits=4, cache_bits=12)
    run = dict(**precisions, projections=1, draft_tokens=2, tokens_per_pass=1.75, context=1000)
    estimate = decode("llama-3.1-8b", **WHERE, **ranks, **run)
    positions, produced = 3, 1.75
    expected = {
        "decoder": DECODER * 0.5 / 900e9,
        "lm_head": max(HEAD * 1 / 50e9, 2 * HEAD * positions / 2e12),
        "m": 5 * 48 * 24 * 1 / 50e9,
        "a_and_b": 5 * (4096 * 48 + 4096 * 24) * 0.5 / 900e9,
        "endpoints": positions * 4096 * 32 * (1 / 7e6 + 1 / 90e6),
        "uplink": positions * 5 * 24 * 32 / 7e6,
        "downlink": positions * 5 * 48 * 32 / 90e6,
        "round_trips": 6 * 0.004,
        "kv_cache": 2 * 32 * 1024 * 1000 * 1.5 / 900e9,
    }
    assert estimate.breakdown() == pytest.approx({term: seconds / produced for term, seconds in expected.items()})
    assert estimate.gpu_tokens_per_s == pytest.approx(900e9 / ((DECODER + HEAD) * 0.5 + 2 * 32 * 1024 * 1000 * 1.5))
    three = decode("llama-3.1-8b", **WHERE, **ranks).breakdown()
    assert three["a_and_b"] == pytest.approx(5 * (3 * 4096 * 48 + (4096 + 2 * 1024) * 24) * 2 / 900e9)


MIXTRAL = ModelShape(
    "mixtral-8x7b", "mixtral", 32, 4096, 32, 8, 128, 14336, 32000, False, 46_702_792_704,
    expert_parameters=8 * 32 * 3 * 4096 * 14336, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def test_a_mixture_of_experts_reads_what_its_tokens_meet():
    """Of 46.7 billion weights a token meets 12.9: 76 tokens/s at the roofline, 21 if it read them all."""
    estimate = decode(MIXTRAL)
    active = MIXTRAL.active_parameters - 32000 * 4096
    assert active == 12_879_925_248 - 32000 * 4096
    assert estimate.gpu_tokens_per_s == pytest.approx(1935e9 / (2 * active)) == pytest.approx(75.9, abs=0.05)
    assert estimate.breakdown()["decoder"] == pytest.approx(2 * (active - 32000 * 4096) / 1935e9)
    drafts = decode(MIXTRAL, draft_tokens=2, tokens_per_pass=1).breakdown()["decoder"]
    experts = MIXTRAL.expert_parameters
    assert drafts - estimate.breakdown()["decoder"] == pytest.approx(2 * experts * (0.75 - 0.75**3) / 1935e9)
    share = 32000 * 4096 / active
    assert decode(MIXTRAL, gpu=50).breakdown()["decoder"] == pytest.approx((1 - share) / 50)


def test_a_large_batch_reads_every_expert_and_computes_with_few():
    shape = replace(MIXTRAL, num_experts=64, num_experts_per_tok=2)
    active = shape.active_parameters - 2 * 32000 * 4096
    long = prefill(shape, 10_000).breakdown()
    assert long["decoder"] == pytest.approx(2 * active / 312e12)
    few = prefill(shape, 1_000, cloud=Device("cloud", 1e9, 1e18, 200e9)).breakdown()
    assert few["decoder"] == pytest.approx(2 * shape.decoder_parameters / 1e9 / 1_000)


@pytest.mark.parametrize(
    ("model", "split", "sentences"),
    [
        (MIXTRAL, {}, ("93 GB do not fit the 80 GB of a100-80gb-pcie",)),
        (MIXTRAL, dict(cloud_bits=8), ()),
        ("llama-2-7b", dict(cloud="rtx-4090"), ()),
        ("llama-2-13b", dict(cloud="rtx-4090", rank=1), ("25.4 GB do not fit the 24 GB of rtx-4090",)),
        ("llama-2-7b", dict(device=Device("watch", 1e9, 1e9, 0.5e9)), ("0.525 GB do not fit the 0.5 GB of watch",)),
    ],
)
def test_weights_that_do_not_fit_are_said(model, split, sentences):
    for estimate in (decode(model, **split), prefill(model, **split)):
        assert estimate.unfit == sentences
        assert repr(estimate).endswith("".join(f"; {sentence}" for sentence in sentences) or ")")


@pytest.mark.parametrize("way", [dict(method="ladder"), dict(folded=True, projections=1)])
def test_experts_have_no_down_proj_to_adapt(way):
    with pytest.raises(ValueError, match="mixtral-8x7b has experts, not one down_proj a layer"):
        decode(MIXTRAL, **way)


def test_a_ladder_by_hand_with_nothing_alike():
    split = dict(method="ladder", rank=24, width=96, adapted_layers=5, bits=32, phone_bits=8, cloud_bits=4)
    run = dict(WHERE, **split, draft_tokens=2, tokens_per_pass=1.6, context=300)
    estimate = decode("llama-3.1-8b", **run)
    m = 5 * 24 * 4096 + 2 * (5 * 24 + 1) * 96 + 96 * 4096
    expected = {
        "decoder": DECODER * 0.5 / 900e9,
        "lm_head": HEAD / 50e9,
        "m": m / 50e9,
        "a_and_b": 5 * 14336 * 24 * 0.5 / 900e9,
        "endpoints": 3 * 4096 * 32 * (1 / 7e6 + 1 / 90e6),
        "uplink": 0,
        "downlink": 3 * 5 * 24 * 32 / 90e6,
        "round_trips": 0.004,
        "kv_cache": 2 * 32 * 1024 * 300 * 2 / 900e9,
    }
    assert estimate.breakdown() == pytest.approx({term: seconds / 1.6 for term, seconds in expected.items()})
    crossing = estimate.round_trips_per_token, estimate.up_bytes_per_token, estimate.down_bytes_per_token
    assert crossing == pytest.approx([n / 1.6 for n in (1, 3 * 4096 * 4, 3 * (4096 + 5 * 24) * 4)])


def test_a_folded_late_split_by_hand_with_nothing_alike():
    split = dict(r_c2d=48, r_d2c=24, projections=1, adapted_layers=6, late=True, folded=True)
    estimate = decode("llama-3.1-8b", **WHERE, **split, draft_tokens=3, tokens_per_pass=4, gpu=20)
    expected = {
        "decoder": DECODER / (DECODER + HEAD) / 20,  # one pass checks them all
        "lm_head": HEAD * 2 / 50e9,
        "m": (6 * 48 * 24 + 24 * 4096) * 2 / 50e9,
        "a_and_b": (6 * 48 * 14336 + 5 * 24 * 4096) * 2 / 900e9,
        "endpoints": 4 * 4096 * 16 * (1 / 7e6 + 1 / 90e6),
        "uplink": 4 * 5 * 24 * 16 / 7e6,
        "downlink": 4 * 6 * 48 * 16 / 90e6,
        "round_trips": (1 + 3) * 0.004,
        "kv_cache": 0,
    }
    assert estimate.breakdown() == pytest.approx({term: seconds / 4 for term, seconds in expected.items()})
    crossing = estimate.round_trips_per_token, estimate.up_bytes_per_token, estimate.down_bytes_per_token
    assert crossing == pytest.approx((1, (4096 + 5 * 24) * 2, (4096 + 6 * 48) * 2))


def test_where_arithmetic_counts_a_ladders_a_take_each_position():
    run = dict(method="ladder", rank=8, gpu="roofline", batch=100_000, draft_tokens=3, tokens_per_pass=4)
    assert decode("gpt2", **run).breakdown()["a_and_b"] == pytest.approx(2 * 12 * 3072 * 8 / 312e12)


def test_a_prompt_before_a_ladder():
    """M sees what the LM head sees: each position, which is arithmetic, or the last one, which is reading."""
    run = dict(tokens=400, rank=24, **WHERE, method="ladder", phone_bits=8)
    every, last = (prefill("llama-3.1-8b", **run, logits=logits) for logits in ("all", "last"))
    for term, weights in {"m": 32 * 24 * 4096, "lm_head": HEAD}.items():
        assert every.breakdown()[term] == pytest.approx(2 * weights / 2e12)
        assert last.breakdown()[term] == pytest.approx(weights / 50e9 / 400)
    assert every.down_bytes_per_token == pytest.approx(400 * last.down_bytes_per_token)
    saved_s = every.breakdown()["endpoints"] - last.breakdown()["endpoints"]
    assert saved_s == pytest.approx(4096 * 16 / 90e6 * 399 / 400)
    with pytest.raises(ValueError, match="logits must be one of 'all', 'last', got 'first'"):
        prefill("gpt2", logits="first")


@settings(max_examples=60)
@given(draft_tokens=st.integers(0, 8), share=st.floats(0, 1), method=st.sampled_from(METHODS))
def test_a_pass_that_yields_more_is_faster_by_as_much(draft_tokens, share, method):
    run, yielded = dict(model="llama-2-7b", method=method, draft_tokens=draft_tokens), 1 + share * draft_tokens
    more, one = (decode(tokens_per_pass=tokens, **run).tokens_per_s for tokens in (yielded, 1))
    assert more == pytest.approx(yielded * one)


def test_batches_by_hand():
    given = decode("gpt2", 8, gpu=50, batch=4).breakdown()
    share = (124_439_808 - 50257 * 768) / 124_439_808
    assert given["decoder"] == pytest.approx(share / 50)  # a given speed is not multiplied by the batch
    for batch, decoder_s in {1: 2 * 6_476_271_616 / 1935e9, 16: 2 * 6_476_271_616 / 1935e9 / 16}.items():
        assert decode("llama-2-7b", gpu="roofline", batch=batch).breakdown()["decoder"] == pytest.approx(decoder_s)
    huge = decode("llama-2-7b", gpu="roofline", batch=100_000).breakdown()
    assert huge["decoder"] == pytest.approx(2 * 6_476_271_616 / 312e12, rel=1e-6)  # arithmetic
    whole = prefill("gpt2", 64, 8)
    assert (whole.gpu, whole.gpu_tokens_per_s) == ("roofline", pytest.approx(64 / (124_439_808 * 2 / 1935e9)))


def test_published_gpu_speed_is_used_only_where_there_is_one():
    shorter = replace(catalog.model("llama-2-7b"), num_layers=4, parameters=10**9)
    slower = replace(catalog.device("a100-80gb-pcie"), memory_bandwidth_bytes_per_s=1e9)
    assert decode("llama-2-7b").gpu == "published"
    for cloud in ("h200-sxm", "a100-80gb-sxm", slower):
        assert decode("llama-2-7b", cloud=cloud).gpu == "roofline"
    assert decode("llama-2-7b", cloud_bits=8).gpu == "roofline"
    assert decode(shorter).gpu == "roofline"
    assert decode("qwen2.5-7b").gpu == "roofline"
    assert decode("qwen2.5-7b", gpu=50).gpu_tokens_per_s == 50


def test_a_cache_weighs_what_the_formula_says():
    """Against the storages of a real one, with grouped queries."""
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=50,
    )  # fmt: skip
    with torch.no_grad():
        cache = cache_among(LlamaForCausalLM(config)(torch.zeros(2, 7, dtype=torch.int64), use_cache=True))
    storages = [tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert Split(ModelShape.from_config(config), 8, cache_bits=32).cache_bytes(7, batch=2) == sum(storages)


def published(family, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, **others):
    dims = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, vocab_size=vocab)
    dims |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    return AutoConfig.for_model(family, **dims | others)


UNUSED = dict(use_sliding_window=False, sliding_window=131_072, max_window_layers=28)
EXPERTS = dict(num_local_experts=32, num_experts_per_tok=4)
# Each with its window and the layers that have one, as published: five of six in Gemma 3, every other one in Gemma 2
# and gpt-oss, three of four in Command R7B and (in chunks) Llama 4 Scout, all in Mistral and Phi-3-mini-4k.
WINDOWS = {
    "Gemma-3-1B": (published("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262_144, sliding_window=512), 512, 22),
    "Gemma-3-4B": (published("gemma3_text", 2560, 10_240, 34, 8, 4, 256, 262_208, sliding_window=1024), 1024, 29),
    "Gemma-3-27B": (published("gemma3_text", 5376, 21_504, 62, 32, 16, 128, 262_208, sliding_window=1024), 1024, 52),
    "gpt-oss-20b": (published("gpt_oss", 2880, 2880, 24, 64, 8, 64, 201_088, **EXPERTS, sliding_window=128), 128, 12),
    "Mistral-7B-v0.1": (published("mistral", 4096, 14_336, 32, 32, 8, 128, 32_000, sliding_window=4096), 4096, 32),
    "Gemma-2-9B": (published("gemma2", 3584, 14_336, 42, 16, 8, 256, 256_000, sliding_window=4096), 4096, 21),
    "Phi-3-mini-4k": (published("phi3", 3072, 8192, 32, 32, 32, 96, 32_064, sliding_window=2047), 2047, 32),
    "Command R7B": (published("cohere2", 4096, 14_336, 32, 32, 8, 128, 256_000, sliding_window=4096), 4096, 24),
    "Llama 4 Scout": (Llama4TextConfig(), 8192, 36),  # the library's default
    "Qwen2.5-7B": (published("qwen2", 3584, 18_944, 28, 28, 4, 128, 152_064, **UNUSED), 0, 0),
    "Llama-3.1-8B": (published("llama", 4096, 14_336, 32, 32, 8, 128, 128_256), 0, 0),
    "Qwen3-8B": (published("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936), 0, 0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_cache_with_windows_weighs_what_transformers_holds(name):
    """Keys and values are appended on the meta device: a prompt, and one token."""
    config, window, sliding = WINDOWS[name]
    shape = ModelShape.from_config(config, name)
    assert (shape.sliding_window, shape.num_sliding_layers) == (window, sliding)
    for context in (1, 100, window or 1000, 32_768):
        cache = DynamicCache(config=config)
        for layer, n in itertools.product(range(config.num_hidden_layers), (context - 1, 1)):
            size = (3, config.num_key_value_heads, n, config.head_dim)
            cache.update(*(torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in "kv"), layer)
        held = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
        assert Split(shape, 8).cache_bytes(context, batch=3) == held


def test_a_window_bounds_what_a_context_costs():
    """Gemma-3-1B after 32,768 tokens: four layers of 32,768 positions and 22 of 511, 1,024 bytes each."""
    gemma = ModelShape.from_config(WINDOWS["Gemma-3-1B"][0])
    empty, full = (decode(gemma, gpu="roofline", context=n) for n in (0, 32_768))
    held = 1024 * (4 * 32_768 + 22 * 511)
    assert full.breakdown() == pytest.approx(empty.breakdown() | {"kv_cache": held / 1935e9})


@settings(max_examples=60)
@given(context=st.integers(1, 10**6), batch=st.integers(1, 64), gpu=st.sampled_from(["roofline", 50.0]))
def test_a_context_costs_both_the_same_reading(context, batch, gpu):
    empty, full = (decode("llama-3.1-8b", gpu=gpu, batch=batch, context=n) for n in (0, context))
    read_s = 2 * 2 * 32 * 1024 * context / 1935e9
    assert empty.breakdown()["kv_cache"] == 0
    assert [row["term"] for row in empty.rows()] == list(TERMS[:-1])  # the article's, and the round trips
    assert [row["term"] for row in full.rows()] == list(TERMS)
    assert full.breakdown() == pytest.approx(empty.breakdown() | {"kv_cache": read_s})
    assert batch / full.gpu_tokens_per_s == pytest.approx(batch / empty.gpu_tokens_per_s + batch * read_s)


def test_many_guesses_compute_with_the_cache_longer_than_it_is_read():
    run = dict(model="llama-3.1-8b", context=1000, tokens_per_pass=1)
    assert decode(**run, draft_tokens=999).breakdown()["kv_cache"] == pytest.approx(4 * 32 * 4096 * 10**6 / 312e12)


def test_a_cache_that_does_not_fit_is_said():
    """65,536 numbers a position, two bytes each: half a million of them are 66 GB beside 14 GB of weights."""
    assert decode("llama-3.1-8b", context=495_000).unfit == ()
    estimate = decode("llama-3.1-8b", context=5_000, batch=101)
    assert repr(estimate).startswith("llama-3.1-8b, rank 64, 5g-published, literal, context 5,000: ")
    assert estimate.unfit == ("80.2 GB do not fit the 80 GB of a100-80gb-pcie",)


def test_repr_is_one_stable_line():
    assert repr(decode("llama-2-7b", accounting="figure")) == (
        "llama-2-7b, rank 64, 5g-published, figure: 27.78 tokens/s, 74.9 % of the GPU's 37.1 (published)"
    )
    assert "ranks 32 down, 16 up, 5g with RTT 5 ms" in repr(decode("gpt2", r_c2d=32, r_d2c=16, link="5g", rtt_s=0.005))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rank=0), "rank must be between 1 and hidden=768, got 0"),
        (dict(accounting="honest"), "accounting must be one of 'literal', 'figure', got 'honest'"),
        (dict(link="6g"), "unknown link '6g'"),
        (dict(device="toaster"), "unknown device 'toaster'"),
        (dict(rtt_s=-1), "rtt_s must be at least 0, got -1"),
        (dict(batch=0), "batch must be a whole number of at least 1, got 0"),
        (dict(gpu=-3), "gpu must be greater than 0, got -3"),
        (dict(draft_tokens=-1), "draft_tokens must be a whole number of at least 0, got -1"),
        (dict(projections=2), "projections must be one of 1, 3, got 2"),
        (dict(gpu="Published"), "gpu must be one of 'published', 'roofline', got 'Published'"),
        (dict(bits=0), "bits must be between 1 and 64, got 0"),
        (dict(phone_bits=128), "phone_bits must be between 1 and 64, got 128"),
        (dict(adapted_layers=99), "adapted_layers must be between 0 and .*12, got 99"),
        (dict(gpu="published"), "no published speed of gpt2 on a100-80gb-pcie at 16 bit"),
        (dict(draft_tokens=4), "draft_tokens=4 needs tokens_per_pass, what a pass with them yields"),
        (dict(gpu=9, draft_tokens=3, tokens_per_pass=4, batch=2), "draft_tokens=3 with batch=2 .*: a given speed"),
        (dict(draft_tokens=2, tokens_per_pass=3.5), "tokens_per_pass must be at least 1 and at most 3, got 3.5"),
        (dict(tokens_per_pass=0.5), "tokens_per_pass must be at least 1 and at most 1, got 0.5"),
        (dict(method="lora"), "method must be one of 'low_rank', 'ladder', got 'lora'"),
        (dict(folded=torch.ones(2)), r"folded must be True or False, got tensor\(\[1., 1.\]\)"),
        (dict(width=np.ones(2)), r"width must be a whole number of at least 1, got array\(\[1., 1.\]\)"),
        (dict(rtt_s=np.True_), "rtt_s must be at least 0, got np.True_"),
        (dict(width=512), "width=512 is not for method='low_rank'"),
        (dict(method="ladder", width=0), "width must be a whole number of at least 1, got 0"),
        (dict(method="ladder", r_d2c=8), "r_d2c=8 is not for method='ladder'"),
        (dict(method="ladder", late=True), "late=True is not for method='ladder'"),
        (dict(folded=True), "projections of a folded split must be one of 1, got 3"),
        (dict(late=True, accounting="figure"), "accounting='figure' is the article's: no ladder, nothing late"),
        (dict(context=9, accounting="figure"), "accounting='figure' is the article's: .* no context"),
        (dict(context=-1), "context must be a whole number of at least 0, got -1"),
        (dict(cache_bits=0), "cache_bits must be between 1 and 64, got 0"),
        (dict(model="bert-base", rank=8), "bert-base is an encoder: it does not generate"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        decode(**dict(model="gpt2") | arguments)
