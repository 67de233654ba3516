"""Algorithm 1: a cut cache computes what attention with the evicted units masked computes, and its size is bounded."""

import copy
import itertools
import threading

import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from plpkg import decoding
from plpkg.backbones import random_backbone
from plpkg.decoding import cache_argument
from plpkg.retention import RetainingHeads, chunked_prefill, cis_labels, scorers
from plpkg.retention.cache.evicting import EvictingCache
from plpkg.retention.layers import attention_layers
from plpkg.retention.scorers import H2O, KeyNorm, Locret, Random, SinkRecent, SirLlm, SnapKv
from tests.retention.conftest import ATTENTION, CONTRACTS, in_double, other_family

from rounding import assert_as_exact

SEQ = 29
LLAMA = random_backbone("llama", num_kv_heads=2, vocab=64)


def given_scores(model, batch=2, seq=SEQ, seed=0):
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shape = config.num_hidden_layers, batch, heads, seq
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("positions", "family", "attention"), CONTRACTS)
@pytest.mark.parametrize("chunk_size", [1, 5, 29, 40])
def test_without_eviction_it_is_the_full_forward_pass(backbone, ids, family, attention, positions, chunk_size):
    model = backbone(family, attention)
    read = chunked_prefill(model, ids, SinkRecent(), SEQ, chunk_size, positions=positions, local_len=3)
    assert_as_exact(read.logits, *(m(ids).logits[:, -1] for m in (model, in_double(model))))
    assert model.config._attn_implementation == attention


def dense(model, ids, scores, budget, chunk_size, stabilizers, local_len):
    """The same by masks: every layer and head sees what a list, kept by hand, says; no cache, no package code.

    For original positions. Returns the last logits, and ``(layers, batch, kv_heads, …)`` what is kept at the end.
    """
    seq, end = SEQ, SEQ - local_len
    chunks = [range(start, min(start + chunk_size, end)) for start in range(0, end, chunk_size)]
    visible = torch.zeros(*scores.shape, seq, dtype=torch.bool)
    kept = torch.zeros(*scores.shape[:3], budget + local_len, dtype=torch.int32)
    for place in itertools.product(*map(range, scores.shape[:3])):
        units = []
        for chunk in [*chunks, range(end, seq)]:
            for row in chunk:
                visible[(*place, row, [*units, *range(chunk.start, row + 1)])] = True
            units = [*units, *chunk]
            if chunk.start < end and len(units) > budget:
                safe = units[len(units) - (0 if chunk.stop == end else stabilizers) :]
                best = sorted(units, key=lambda unit: (unit not in safe, -scores[(*place, unit)].item(), unit))
                units = sorted(best[:budget])
        kept[place] = torch.tensor(units)
    group = model.config.num_attention_heads // scores.shape[2]
    zeros = torch.zeros(visible.shape, dtype=model.dtype)
    masks = zeros.masked_fill(~visible, torch.finfo(model.dtype).min).repeat_interleave(group, dim=2)

    def masked(module, args, kwargs):
        return args, kwargs | {"attention_mask": masks[module.layer_idx]}

    hooks = [layer.module.register_forward_pre_hook(masked, with_kwargs=True) for layer in attention_layers(model)]
    logits = model(ids, use_cache=False).logits[:, -1]
    for hook in hooks:
        hook.remove()
    return logits, kept


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
def test_eviction_is_attention_with_those_units_masked(backbone, ids, family, attention):
    model = backbone(family, attention)
    scores = given_scores(model)
    sizes = dict(budget=9, chunk_size=4, stabilizers=2, local_len=3)
    read = chunked_prefill(model, ids, scorers.Static(scores), positions="original", log_positions=True, **sizes)
    logits, kept = dense(model, ids, scores, **sizes)
    assert_as_exact(read.logits, logits, dense(in_double(model), ids, scores, **sizes)[0])
    assert torch.equal(read.log[-1].kept, kept)
    assert kept[0, 0, 0, -3:].tolist() == list(range(SEQ - 3, SEQ))


def llama_by_hand(model, ids, scores, budget, chunk_size):
    """Reassigned positions, written out for Llama: one sequence, keys kept unrotated in a list for each head."""
    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kept = {(i, j): [] for i in range(config.num_hidden_layers) for j in range(kv_heads)}  # (position, k, v)

    def turn(x, position):
        angle = position * 10_000.0 ** (-torch.arange(0, width, 2).double() / width)
        a, b = x.double().chunk(2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]).to(x.dtype)

    for start in range(0, len(ids), chunk_size):
        positions = range(start, min(start + chunk_size, len(ids)))
        x = model.model.embed_tokens(ids[positions.start : positions.stop])
        for i, layer in enumerate(model.model.layers):
            normed = layer.input_layernorm(x)
            attention = layer.self_attn
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (projection(normed).unflatten(-1, (-1, width)) for projection in projections)
            out = torch.zeros(len(positions), heads, width, dtype=x.dtype)
            for j in range(kv_heads):
                held = kept[i, j]
                before = len(held)
                held += [(p, k[n, j], v[n, j]) for n, p in enumerate(positions)]
                for n in range(len(positions)):
                    units = held[: before + n + 1]
                    keys = torch.stack([turn(unit[1], slot) for slot, unit in enumerate(units)])
                    for h in range(j * heads // kv_heads, (j + 1) * heads // kv_heads):
                        weights = (keys @ turn(q[n, h], before + n) / width**0.5).softmax(-1)
                        out[n, h] = weights @ torch.stack([unit[2] for unit in units])
                best = sorted(held, key=lambda unit: (-scores[i, 0, j, unit[0]].item(), unit[0]))[:budget]
                kept[i, j] = sorted(best, key=lambda unit: unit[0])
            x = x + attention.o_proj(out.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))[-1]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_reassigned_positions_are_llama_by_hand(backbone, ids, attention):
    model = backbone(attention=attention)
    scores = given_scores(model, batch=1)
    read = chunked_prefill(model, ids[:1], scorers.Static(scores), 7, 5)
    with torch.no_grad():
        expected, exact = (llama_by_hand(m, ids[0], scores, 7, 5) for m in (model, in_double(model)))
    assert_as_exact(read.logits[0], expected, exact)
    other = chunked_prefill(model, ids[:1], scorers.Static(scores), 7, 5, positions="original")
    with pytest.raises(AssertionError, match="times the"):  # the contracts differ
        assert_as_exact(other.logits[0], expected, exact)


@settings(max_examples=60)
@given(
    seq=st.integers(1, 24), budget=st.integers(1, 26), chunk_size=st.integers(1, 26), local_len=st.integers(0, 26),
    share=st.floats(0, 1, exclude_max=True), positions=st.sampled_from(["original", "reassigned"]), data=st.data(),
)  # fmt: skip
def test_sizes_are_bounded_and_nothing_returns(seq, budget, chunk_size, local_len, share, positions, data):
    stabilizers, tail = int(share * budget), min(local_len, seq)
    ids = torch.randint(0, 64, (1, seq), generator=torch.Generator().manual_seed(seq))
    scores = given_scores(LLAMA, 1, seq, seed=data.draw(st.integers(0, 99))).mul(4).round()  # many equal ones
    options = dict(stabilizers=stabilizers, local_len=local_len, positions=positions, log_positions=True)
    if local_len >= seq > budget:
        with pytest.raises(ValueError, match=f"local_len={local_len} covers all {seq} tokens of the prompt: nothing"):
            chunked_prefill(LLAMA, ids, scorers.Static(scores), budget, chunk_size, **options)
        return
    read = chunked_prefill(LLAMA, ids, scorers.Static(scores), budget, chunk_size, **options)
    assert read.log.peak <= budget + max(chunk_size, local_len)
    cut = [step for step in read.log if step.stop <= seq - tail]
    assert all(step.after == min(step.before, budget) for step in cut)
    assert read.log[-1].after == read.cache.kept == min(budget, seq - tail) + tail
    before = itertools.repeat(set())
    for step in read.log:
        rows = step.kept.flatten(0, 2)  # (layers · batch · heads, after)
        assert (rows.diff(dim=-1) > 0).all()
        held = [set(row) for row in rows.tolist()]
        assert all(now <= old | {*range(step.start, step.stop)} for now, old in zip(held, before, strict=False))
        before = held
    for step in cut[:-1]:
        safe = torch.arange(max(0, step.stop - min(stabilizers, step.after)), step.stop)
        assert (step.kept[..., step.after - len(safe) :] == safe).all()
    assert [step.stop for step in read.log][-1] == seq
    assert torch.isfinite(read.logits).all()


@settings(max_examples=40)
@given(seq=st.integers(1, 24), budget=st.integers(1, 24), chunk_size=st.integers(1, 24), seed=st.integers(0, 99))
def test_streaming_the_best_is_keeping_the_best_of_all(seq, budget, chunk_size, seed):
    """Theorem N.4: with scores that do not change and no stabilizers, the chunks do not matter."""
    ids = torch.zeros(1, seq, dtype=torch.long)
    scores = given_scores(LLAMA, 1, seq, seed).mul(5).round()
    read = chunked_prefill(LLAMA, ids, scorers.Static(scores), budget, chunk_size, log_positions=True)
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget].sort(dim=-1).values
    assert torch.equal(read.log[-1].kept.long(), expected)


SCORERS = [KeyNorm(sink=2), Random(3, recent=2), SinkRecent(), H2O(sink=1), SnapKv(window=4), SirLlm()]


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: type(scorer).__name__)
@pytest.mark.parametrize("positions", ["original", "reassigned"])
def test_every_scorer_keeps_its_budget_and_what_it_protects(model, ids, scorer, positions):
    read = chunked_prefill(model, ids, scorer, 10, 4, stabilizers=3, positions=positions, log_positions=True)
    assert [step.after for step in read.log] == [4, 8, *[10] * 6]
    kept, recent = read.log[-1].kept, scorer.started(ids, 10).recent
    assert (kept[..., : scorer.sink] == torch.arange(scorer.sink)).all()
    assert (kept[..., 10 - recent :] == torch.arange(SEQ - recent, SEQ)).all()


# Generation goes on from the cache.


@pytest.mark.parametrize("form", [torch.Tensor.tolist, torch.Tensor.int, lambda row: {"input_ids": row.tolist()}])
def test_one_text_is_a_batch_of_one(model, ids, form):
    options = dict(scorer=scorers.KeyNorm(), budget=16, chunk_size=8)
    one, other = (chunked_prefill(model, each, **options) for each in (ids[:1], form(ids[0])))
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(cis_labels(model, ids[:1], 5), cis_labels(model, form(ids[0]), 5))


@pytest.mark.parametrize("positions", ["original", "reassigned"])
def test_generate_after_eviction_is_a_loop_over_the_model(model, ids, positions):
    by_hand, other = (chunked_prefill(model, ids, KeyNorm(), 8, 4, positions=positions, local_len=2) for _ in range(2))
    tokens = [by_hand.logits.argmax(-1, keepdim=True)]
    for _ in range(4):
        logits = model(tokens[-1], **cache_argument(by_hand.cache)).logits[:, -1]
        tokens.append(logits.argmax(-1, keepdim=True))
    answer = model.generate(**other.inputs(), max_new_tokens=4, do_sample=False)
    assert torch.equal(answer, torch.cat(tokens, dim=1))
    assert other.cache.kept == 8 + 2 + 4  # nothing is evicted while decoding unless asked


@pytest.mark.parametrize("scorer", [KeyNorm(), H2O(), SirLlm()], ids=lambda scorer: type(scorer).__name__)
@pytest.mark.parametrize("positions", ["original", "reassigned"])
def test_decoding_can_stay_within_the_budget_in_any_thread(model, ids, scorer, positions):
    """Another thread decodes, as with transformers' streamers."""
    read = chunked_prefill(model, ids, scorer, 12, 4, stabilizers=3, positions=positions, log_positions=True)
    options = dict(max_new_tokens=6, do_sample=False)
    with read.evicting():
        thread = threading.Thread(target=model.generate, kwargs=read.inputs() | options)
        thread.start()
        thread.join()
    decoded = read.log[8:]
    assert [(step.start, step.before, step.after) for step in decoded] == [(SEQ + i, 13, 12) for i in range(6)]
    assert (read.log[-1].kept[..., -3:] == torch.arange(SEQ + 3, SEQ + 6)).all()
    assert not model._forward_hooks


def test_decoding_with_eviction_is_prefilling_in_chunks_of_one(model, ids):
    scorer = scorers.Static(given_scores(model))
    read, other = (chunked_prefill(model, ids[:, :20], scorer, 8, 4, log_positions=True) for _ in range(2))
    with read.evicting():
        logits = [model(ids[:, i : i + 1], **cache_argument(read.cache)).logits[:, -1] for i in range(20, SEQ)][-1]
    for i in range(20, SEQ):
        with torch.no_grad(), other._eviction.watching():
            expected = other._eviction.forward(ids[:, i : i + 1])
        other._eviction.cut(i, i + 1, budget=8)
    assert torch.equal(logits, expected)
    assert torch.equal(read.log[-1].kept, other.log[-1].kept)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # transformers 5.24
@pytest.mark.parametrize("name", [decoding.CACHE, "past_key_values"])
def test_units_are_evicted_by_whichever_name_the_cache_is_given(name, model, ids):
    read = chunked_prefill(model, ids, SirLlm(), 12, 4)
    with read.evicting():
        model(ids[:, :3], **{name: read.cache})
    assert read.cache.kept == 12


def test_a_copy_decodes_for_itself(model, ids):
    read = chunked_prefill(model, ids, SirLlm(), 12, 4, log_positions=True)
    copied = copy.deepcopy(read)
    for one, untouched in ((copied, (12, 8)), (read, (12, 11))):
        with one.evicting():
            model.generate(**one.inputs(), max_new_tokens=3, do_sample=False)
        assert (one.cache.kept, len(one.log)) == (12, 11)
        assert (read.cache.get_seq_length(), len(read.log)) == untouched
    assert torch.equal(read.log[-1].kept, copied.log[-1].kept)


def test_peft_models_are_watched_as_well(backbone, ids):
    heads = RetainingHeads.attach(backbone(), 8)
    model = get_peft_model(backbone(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    read = chunked_prefill(model, ids, Locret(heads), 12, 4)
    with read.evicting():
        model.generate(**read.inputs(), max_new_tokens=3, do_sample=False)
        model(ids[:, :1], **cache_argument(read.cache))
    assert (read.cache.kept, len(read.log)) == (12, 8 + 3 + 1)


def test_dropout_is_off(backbone, ids):
    model = backbone("gpt2").train()
    one, two = (chunked_prefill(model, ids, KeyNorm(), 12, 4, positions="original").logits for _ in range(2))
    assert torch.equal(one, two)
    assert model.training


# Half precision, and frequencies that change.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3"])
def test_in_half_precision_chunks_are_transformers_own(backbone, ids, family, dtype):
    """Without eviction nothing may be rounded otherwise: reassigned keys are the model's, to the bit."""
    model = backbone(family).to(dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for chunk in ids.split(5, dim=1):
            expected = model(chunk, **cache_argument(cache), logits_to_keep=1).logits[:, -1]
    assert torch.equal(chunked_prefill(model, ids, KeyNorm(), 40, 5).logits, expected)


def test_in_half_precision_what_was_projected_is_kept(model, ids):
    model, given = model.bfloat16(), []
    EvictingCache(model)  # asks once what the layers do with positions
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *args: given.append(args[2]))
    layer = chunked_prefill(model, ids, KeyNorm(), 8, 5).cache.layers[0]
    hook.remove()
    keys = torch.cat(given, dim=1).unflatten(-1, (2, 16)).transpose(1, 2)  # (batch, kv_heads, seq, head_dim)
    index = layer.positions.long()[..., None].expand(-1, -1, -1, 16)
    assert torch.equal(layer.store.keys, keys.gather(2, index))
    assert layer.projected is None


def test_where_and_how_weights_are_does_not_hide_that_layers_rotate(model, ids):
    """accelerate keeps them elsewhere until they are used; autocast rounds keys of float32 as half precision does."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # as large as those of models that have learnt
    with torch.autocast("cpu", torch.bfloat16):
        assert chunked_prefill(model, ids, KeyNorm(), 10, 4).cache.kept == 10
    expected = chunked_prefill(model, ids, KeyNorm(), 10, 4).logits
    read = chunked_prefill(cpu_offload(model, execution_device="cpu"), ids, KeyNorm(), 10, 4)
    assert torch.equal(read.logits, expected)


def test_a_norm_before_rotation_is_in_what_is_kept(ids):
    model = other_family("qwen3")
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.k_norm.weight, 1, 3)
    with torch.no_grad():
        exact = model(ids).logits[:, -1]
    half = chunked_prefill(model.bfloat16(), ids, KeyNorm(), 99, 6).logits
    assert ((half - exact).norm(dim=-1) < 0.05 * exact.norm(dim=-1)).all()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
NTK = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "options", "limit"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 20}, 20),
        ("llama", {"rope_parameters": NTK, "max_position_embeddings": 16}, 16),
    ],
    ids=["longrope", "dynamic"],
)
def test_frequencies_that_change_on_the_way_are_said(backbone, ids, family, options, limit):
    model = backbone(family, options=options)
    told = f"changes its frequencies beyond {limit} positions .* and this prompt reaches {SEQ}"
    for budget, positions in ((6, "original"), (40, "reassigned")):
        with pytest.warns(UserWarning, match=told):
            chunked_prefill(model, ids, KeyNorm(), budget, 4, positions=positions)
    chunked_prefill(model, ids, KeyNorm(), 6, 4)  # never more than ten: a warning would be an error
    chunked_prefill(model, ids, KeyNorm(), 6, SEQ, positions="original")
    chunked_prefill(model, ids, KeyNorm(), 40, 4, positions="original", local_len=SEQ)  # all at once
    read = chunked_prefill(model, ids[:, :limit], KeyNorm(), 6, 4, positions="original")
    assert read.ask(model, ids[0, :3], max_new_tokens=2, min_new_tokens=2).shape == (2, 2)
    chunked_prefill(backbone(), ids, KeyNorm(), 6, 4, positions="original")


def test_heads_in_another_precision_are_told_so(model, ids):
    heads = RetainingHeads.attach(model, 8)
    model.bfloat16()
    with pytest.raises(ValueError, match=r"heads are in torch.float32, LlamaForCausalLM in torch.bfloat16: take heads"):
        chunked_prefill(model, ids, Locret(heads), 12, 4)
    chunked_prefill(model, ids, Locret(heads.to(model.dtype)), 12, 4)


def test_units_that_nobody_scored_are_refused(model, ids):
    read = chunked_prefill(model, ids, KeyNorm(), 12, 4)
    model(ids[:, :3], **cache_argument(read.cache))
    with read.evicting(), pytest.raises(ValueError, match="3 units of the cache have no score"):
        model(ids[:, :1], **cache_argument(read.cache))


def deepseek(**options):
    """Its attention has no key projection, and with ``q_lora_rank`` no query projection."""
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2)
    return other_family("deepseek_v3", num_key_value_heads=4, **experts, **options)


def flash():
    model = random_backbone("llama")
    model.config._attn_implementation = "flash_attention_2"
    return model


LATENT = "DeepseekV3ForCausalLM has attention that can be watched in 0 of its 2 layers"
ZEROS = torch.zeros(1, 300, dtype=torch.long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(budget=0), "budget must be a whole number of at least 1, got 0"),
        (dict(chunk_size=-1), "chunk_size must be a whole number of at least 1, got -1"),
        (dict(stabilizers=6), "stabilizers must be between 0 and budget - 1=5, got 6"),
        (dict(local_len=-3), "local_len must be a whole number of at least 0, got -3"),
        (dict(positions="new"), "positions must be one of 'reassigned', 'original', got 'new'"),
        (dict(scorer=SinkRecent(sink=5), stabilizers=2), "sink=5 and recent=0 units, with stabilizers=2 that is 7"),
        (dict(input_ids=ZEROS[None]), r"input_ids must be .* \(batch, seq\), got \(1, "),
        (dict(input_ids=ZEROS[:, :0]), r"must be token ids, .* got \(1, 0\)"),
        (dict(attention_mask=torch.ones(2, 7)), r"attention_mask is \(2, 7\), input_ids \(1, 3\)"),
        (dict(attention_mask=torch.tensor([[0, 0, 1]])), "2 tokens of input_ids are padding"),
        (dict(scorer=scorers.Static(torch.zeros(2, 1, 2, 2))), "2 layers and 2 positions, got layer 0 and position 2"),
        (dict(scorer=scorers.Static(torch.zeros(2, 5, 2, 9))), "scores are for a batch of 5, got 1 sequences"),
        (
            dict(scorer=Locret(RetainingHeads.attach(random_backbone("llama", seed=1)))),
            "these heads belong to a backbone with fingerprint",
        ),
        (
            dict(model=random_backbone("gpt2"), input_ids=ZEROS, positions="original"),
            "GPT2LMHeadModel has 256 learnt positions, got 300 tokens",
        ),
        (dict(model=flash()), "attention must be 'eager' or 'sdpa' to be watched, got 'flash_attention_2'"),
        (dict(model=deepseek(q_lora_rank=None), positions="original"), LATENT),
        (dict(model=deepseek(q_lora_rank=16), positions="original"), LATENT),
        (dict(model=random_backbone("gpt2")), "GPT2LMHeadModel has none, or another form: take positions='original'"),
        (
            dict(model=other_family("gpt_oss", num_local_experts=4, num_experts_per_tok=2)),
            "which GptOssForCausalLM does not have: take positions='original'",
        ),
    ],
)
def test_bad_input_gets_a_sentence(changes, message):
    good = dict(model=LLAMA, input_ids=ZEROS[:, :3], scorer=Random(), budget=6, chunk_size=4)
    with pytest.raises(ValueError, match=message):
        chunked_prefill(**good | changes)


def test_an_error_on_the_way_leaves_the_model_as_it_was(model, ids):
    class Broken(Random):
        def score(self, units):
            raise OSError("out of luck")

    with pytest.raises(OSError, match="out of luck"):
        chunked_prefill(model, ids, Broken(), 6, 4)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())
    chunked_prefill(model, ids, Random(), 6, 4)


def test_the_log_is_a_table(model, ids):
    read = chunked_prefill(model, ids, Random(), 8, 10, local_len=4)
    assert repr(read.log) == "Log: 4 forward passes, at most 18 units a head, 12 at the end"
    assert read.log.rows()[1] == {"start": 10, "stop": 20, "before": 18, "after": 8}
    assert read.log[0].kept is None
