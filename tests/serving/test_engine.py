"""The engine against PEFT's generate, one request at a time; float64, so that a token is never a matter of rounding."""

import contextlib
import dataclasses
import gc
import json
import weakref

import peft
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from plpkg.adapters import Adapter, Factors, InvalidAdapterError, targets
from plpkg.backbones import FAMILIES, load_backbone
from plpkg.decoding import cache_among, longest_text
from plpkg.residual import LadderConfig, PrivateLoraConfig, convert_to_lora, matrices
from plpkg.serving import attention
from plpkg.serving.engine import Engine, Request
from plpkg.serving.merging import merge
from plpkg.serving.prefixes import BLOCK

from rounding import sampling_error

SLIDING = ("mistral", "phi3", "gemma2")
POSITION = 2 * 2 * 16 * 8
"""Bytes of one in the world's model: two layers, keys and values, 16 numbers of float64."""


@pytest.fixture(scope="module")
def world(tools):
    """A model, PEFT's twins of it by name (None is the model), and their adapters."""
    model = tools.backbone()
    pairs = {name: tools.adapted(model, rank, seed) for name, rank, seed in (("a", 2, 1), ("b", 4, 2), ("c", 4, 3))}
    twins, (ids,) = {None: model} | {name: pair[0] for name, pair in pairs.items()}, tools.texts(9)
    assert len({tuple(tools.alone(twin, ids, 8)) for twin in twins.values()}) == len(twins)
    return model, twins, {name: pair[1] for name, pair in pairs.items()}


@pytest.fixture
def make(world):
    """Makes an engine with the world's adapters; nothing may be left in it."""
    made = []

    def engine(loaded="abc", model=world[0], **options):
        made.append(Engine(model, **dict(max_batch=4, max_step_tokens=8) | options))
        for name in loaded:
            made[-1].load(name, world[2][name])
        return made[-1]

    yield engine
    for each in made:
        each.close()
        assert left(each) == ([], [], [], {})


def left(engine):
    users = [pool.users for pool in engine._pools.values() if pool.users]
    return list(engine._waiting), engine._running, users, engine.finished


def run(engine, *identities):
    """Steps until nothing is left to do; each one's tokens and reason."""
    tokens = {identity: [] for identity in identities}
    while engine._waiting or engine._running:
        for identity, token in engine.step():
            tokens[identity].append(token)
    return [(tokens[identity], engine.finished.pop(identity)) for identity in identities]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT corrects it itself in GPT-2
def test_a_mixed_batch_writes_what_each_writes_alone(family, tools, monkeypatch):
    monkeypatch.setattr(attention, "LONG", 16)  # some texts reach it
    model = tools.backbone(family, options=dict(sliding_window=4) if family in SLIDING else {})
    pairs = {f"{k}": tools.adapted(model, rank, k, use_rslora=bool(k % 2)) for k, rank in enumerate((2, 4, 4, 64))}
    engine = Engine(model, max_batch=5, max_step_tokens=7)
    for name, (_, adapter) in pairs.items():
        engine.load(name, adapter)
    names = ("0", None, "1", "2", "3", "1", None, "0")
    ids = tools.texts(3, 11, 1, 9, 12, 2, 5, 20)
    twins = {None: model} | {name: pair[0] for name, pair in pairs.items()}
    expected = [tools.alone(twins[name], text, 7) for name, text in zip(names, ids, strict=True)]
    assert engine.generate([Request(t, n, 7) for n, t in zip(names, ids, strict=True)]) == expected
    assert left(engine) == ([], [], [], {})


@pytest.mark.parametrize(("shared", "again"), [(1000, 5), (60, 5), (30, 37), (0, 37)])
def test_what_is_shared_is_not_read_again(shared, again, world, make, tools):
    engine, ids, read = make(shared_bytes=shared * POSITION), tools.texts(2 * BLOCK + 5)[0], []
    hook = world[0].get_input_embeddings().register_forward_hook(lambda _, args, out: read.append(args[0].numel()))
    first = engine.generate([Request(ids, "a", 4)])
    assert sum(read) == len(ids) + 3
    read.clear()
    assert engine.generate([Request(ids, "a", 4)]) == first == [tools.alone(world[1]["a"], ids, 4)]
    hook.remove()
    assert sum(read) == again + 3
    assert engine._prefixes.num_bytes == min(2, shared // (len(ids) + 4)) * (len(ids) + 4) * POSITION


def test_what_is_unloaded_is_let_go(world, make, tools):
    engine, adapter = make(""), tools.adapted(world[0], 3)[1]
    engine.load("new", adapter)
    engine.generate([Request([1, 2], "new", 2)])
    (pool,) = engine._pools.values()
    assert next(iter(pool.factors.values()))[2][0].item() == 8 / 3  # the scale, as it is
    references = [weakref.ref(adapter), weakref.ref(pool)]
    engine.unload("new")
    del adapter, pool
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("names", ["cb", "bc"])
def test_no_slot_keeps_what_is_unloaded(names, world, make):
    """Nor a copy of what moved into a gap, though ``b``, of the same form, is in use: behind ``c``, or before it."""
    engine, (going, stays) = make(), (world[2][name] for name in "cb")
    identities = {name: engine.add(Request([1, 2], name, 2 if name == "c" else 9)) for name in names}
    for _ in range(4):
        engine.step()
    assert identities["c"] in engine.finished
    engine.unload("c")
    (pool,) = engine._pools.values()
    assert pool.users == {stays.digest: 1}
    for name, (downs, ups, _) in pool.factors.items():
        for each, copies in ((going, 0), (stays, 1)):
            factors = each.factors[name]
            assert (downs == factors.down).flatten(1).all(1).sum() == copies
            assert (ups == factors.up).flatten(1).all(1).sum() == copies
    for identity in identities.values():
        engine.cancel(identity)


def test_streams(world, make, tools):
    engine, ids = make(), tools.texts(11, 4, 6)
    wanted = [tools.alone(world[1][name], text, 6) for name, text in zip("abc", ids, strict=True)]
    one, two, closed = (engine.stream(Request(text, name, 6)) for name, text in zip("abc", ids, strict=True))
    assert next(closed) == wanted[2][0]
    got = [next(one), next(two), next(two), next(one)]
    closed.close()
    assert [*got, *one, *two] == [wanted[0][0], *wanted[1][:2], *wanted[0][1:], *wanted[1][2:]]
    assert len(engine._running) == 0
    cancelled = engine.stream(Request(ids[0], "a", 6))
    next(cancelled)
    engine.cancel(engine._running[0].identity)
    assert list(cancelled) == []


def test_texts_may_be_shorter_than_the_model_s(make):
    engine = make(max_model_len=9)
    assert len(engine.check(Request([1] * 5, max_new_tokens=4))) == 5
    with pytest.raises(ValueError, match="5 ids and 5 new ones do not fit the model's 9 positions"):
        engine.check(Request([1] * 5, max_new_tokens=5))
    for length in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_model_len must be"):
            make(max_model_len=length)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(adapter="z"), r"no adapter 'z' is loaded; there are a, b, c"),
        (dict(input_ids=[]), r"input_ids must be .* got \(0,\)"),
        (dict(input_ids=[[1], [2]]), r"one text.s ids, .* got \(2, 1\)"),
        (dict(input_ids=[0.5]), "torch.float32"),
        (dict(input_ids=[48]), "below vocab=48, got 48 to 48"),
        (dict(input_ids=[-1, 3]), "got -1 to 3"),
        (dict(input_ids=[1] * 90, max_new_tokens=7), "90 ids and 7 new ones do not fit the model's 96"),
        (dict(max_new_tokens=0), "max_new_tokens must be .* got 0"),
        (dict(temperature=-1), "temperature must be .* got -1"),
        (dict(temperature=float("nan")), "temperature must be .* got nan"),
        (dict(top_p=0), "top_p must be .* got 0"),
        (dict(top_p=1.5), "top_p must be .* got 1.5"),
        (dict(stop=["x"]), r"stop=\['x'\] needs the tokenizer"),
        (dict(stop="x"), "stop must be strings .* got 'x'"),
        (dict(stop=[""]), r"stop must be strings .* got \[''\]"),
        (dict(logprobs=-1), "logprobs must be .* got -1"),
        (dict(score_prompt=True), "score_prompt needs logprobs"),
    ],
)
def test_one_bad_request_leaves_nothing_behind(change, message, make):
    engine = make()
    with pytest.raises(ValueError, match=message):
        engine.generate([Request([1, 2], "a"), dataclasses.replace(Request([1]), **change)])
    assert left(engine) == ([], [], [], {})


def test_what_cannot_be_paused(make):
    engine = make()
    for call, reason in ((engine.pause, "no request 7 waits or runs"), (engine.drop, "no request 7 is paused")):
        with pytest.raises(ValueError, match=reason):
            call(7)
    with pytest.raises(ValueError, match="no request 7 is paused"):
        engine.resume(7)


@pytest.mark.parametrize("dropped", [None, False, True])
@pytest.mark.parametrize("new", [0, 5])
def test_tokens_are_scored_as_the_model_alone_scores_them(world, make, tools, new, dropped):
    """Also in a batch, in a prompt read in parts, where its beginning was read before, and if it is paused."""
    engine, (ids, other) = make(), (each.tolist() for each in tools.texts(30, 5))
    engine.generate([Request(ids, "a", 1)])
    scored = engine.add(Request(ids, "a", new, logprobs=3, score_prompt=True))
    written = engine.add(Request(ids, "a", 5, logprobs=0, temperature=1.5, seed=1))
    beside = engine.add(Request(other, "b", 9))
    before = {identity: [] for identity in (scored, written, beside)}
    for k in range(0 if dropped is None else 12):
        for identity, token in engine.step():
            before[identity].append(token)
        identity = (scored, written)[k % 2]
        if identity in {each.identity for each in engine._running}:
            engine.pause(identity)
            if dropped:
                engine.drop(identity)
            engine.resume(identity)
    ran = run(engine, scored, written, beside)
    tokens = {key: (before[i] + wrote, reason) for key, i, (wrote, reason) in zip("swo", before, ran, strict=True)}
    assert (len(tokens["s"][0]), tokens["s"][1]) == (new, "length")
    for identity, key, first, most in ((scored, "s", 1, 3), (written, "w", 30, 0)):
        text = ids + tokens[key][0]
        with torch.no_grad():
            logprobs = world[1]["a"](torch.tensor([text])).logits[0].log_softmax(-1)
        told = engine.scored.pop(identity)
        if first == 1:
            assert told.pop(0) == (ids[0], None, ())
        assert [each.token for each in told] == text[first:]
        for at, each in enumerate(told, first):
            assert each.logprob == pytest.approx(logprobs[at - 1, text[at]].item(), abs=1e-9)  # float64
            top = logprobs[at - 1].topk(most)
            assert [token for token, _ in each.top] == top.indices.tolist()
            assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), abs=1e-9)


def test_how_a_request_ends(tools):
    small, tokenizer = load_backbone("plpkg-small")
    engine, ids = Engine(small, tokenizer), tokenizer("Once there was a dog").input_ids
    (free,) = engine.generate([Request(ids, None, 24)])
    text = tokenizer.decode(free)
    stop = text[7:12]  # neither on a token's border, nor one token
    want = next(k for k in range(1, 25) if stop in tokenizer.decode(free[:k]))
    ended = free[: free.index(free[5]) + 1]
    cases = [(None, ["§", stop], free[:want], "stop"), (None, ["§"], free, "length")]
    cases += [(ends, [], ended, "stop") for ends in ([free[5], 3], (3, free[5]), torch.tensor(free[5]), free[5])]
    for ends, stops, tokens, reason in cases:  # which may change at any time
        small.generation_config.eos_token_id = ends
        assert run(engine, engine.add(Request(ids, None, 24, stop=stops))) == [(tokens, reason)]


def test_samples_are_the_seed_s_in_every_batch(make, tools):
    engine, ids = make(), tools.texts(5)[0]
    request = Request(ids, "a", 12, temperature=1.5, top_p=0.9, seed=7)
    (first,) = engine.generate([request])
    others = [Request(text, name, 15, temperature=2.0) for text, name in zip(tools.texts(3, 17), "ac", strict=True)]
    assert engine.generate([others[0], request, others[1]])[1] == first
    assert engine.generate([dataclasses.replace(request, seed=8)]) != [first]
    assert len({tuple(each) for each in engine.generate([dataclasses.replace(request, seed=None)] * 3)}) > 1


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.6), (3.0, 0.8)])
def test_samples_follow_transformers_probabilities(temperature, top_p, tools):
    model, draws = tools.backbone(vocab=6), 1500
    model.get_output_embeddings().weight.data.mul_(8)
    engine = Engine(model, max_batch=250)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
    wanted = warpers(None, model(torch.tensor([[1, 2]])).logits[:, -1].detach())[0].softmax(-1)
    requests = [Request([1, 2], None, 1, temperature=temperature, top_p=top_p, seed=10**4 + k) for k in range(draws)]
    counts = torch.tensor(engine.generate(requests)).flatten().bincount(minlength=6)
    for share, p in zip((counts / draws).tolist(), wanted.tolist(), strict=True):
        rare = 25 / 3 / draws if p else 0  # Bernstein's second term, at five standard errors: where p is no normal's
        assert abs(share - p) <= sampling_error(p * (1 - p), draws) + rare
    assert (wanted > 0).sum() > 1


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_the_smallest_temperature_takes_the_likeliest(temperature, world, make, tools):
    engine, ids = make(), tools.texts(5)[0]
    requests = [Request(ids, "a", 3, temperature=temperature, seed=1), Request(ids, "b", 3)]
    assert engine.generate(requests) == [tools.alone(world[1][name], ids, 3) for name in "ab"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300])
def test_an_overflow_ends_its_own_requests_only(value, world, make, tools):
    engine, ids, good = make(), tools.texts(4)[0], world[2]["b"]
    factors = {
        n: Factors(torch.full_like(f.down, value), torch.full_like(f.up, value), 1.0) for n, f in good.factors.items()
    }
    engine.load("bad", Adapter(good.config, factors, {}, "bad"))
    names = ("b", "bad", None, "c", "bad")
    identities = [engine.add(Request(ids, name, 5)) for name in names]
    for name, (tokens, reason) in zip(names, run(engine, *identities), strict=True):
        if name == "bad":
            assert (tokens, reason) == ([], "error: the logits are not finite")
        else:
            assert (tokens, reason) == (tools.alone(world[1][name], ids, 5), "length")
    with pytest.raises(RuntimeError, match="ended with an error: the logits are not finite"):
        engine.generate([Request(ids, "b", 5), Request(ids, "bad", 5)])


def test_the_model_is_as_it_was_between_steps_and_afterwards(world, make, tools):
    model, (ids,) = world[0], tools.texts(6)
    state, before = {k: v.clone() for k, v in model.state_dict().items()}, model.config._attn_implementation
    expected, engine = tools.alone(model, ids, 5), make()
    identity = engine.add(Request(ids, "a", 5))
    for _ in range(3):
        engine.step()
        assert (model.config._attn_implementation, tools.alone(model, ids, 5)) == (before, expected)
    run(engine, identity)
    engine.close()
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises((ValueError, RuntimeError), match="closed"):  # nothing is answered under an adapter's name
        engine.generate([Request([1, 2], "a", 2)])


def test_a_model_of_several_parts_is_as_it_was(tools):
    """Each part has its own kind of attention."""
    text = {**tools.backbone("gemma2").config.to_dict(), "model_type": "gemma3_text"}
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    ids = dict(image_token_index=47, boi_token_index=45, eoi_token_index=46, mm_tokens_per_image=1)
    config = Gemma3Config(text_config=text, vision_config=vision | dict(patch_size=14), **ids)
    model, (prompt,) = Gemma3ForConditionalGeneration(config).double().eval(), tools.texts(9)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    assert Engine(model).generate([Request(prompt, None, 5)]) == [tools.alone(model, prompt, 5)]
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [each._attn_implementation for each in parts] == ["sdpa", "eager", "sdpa"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda tools: tools.backbone().train(), "training mode"),
        (lambda _: load_backbone("plpkg-small"), r"language model is needed, got \(LlamaForCausalLM"),
        (lambda _: None, "language model is needed, got None"),
    ],
)
def test_what_is_no_model_that_answers_is_refused(model, said, tools):
    with pytest.raises(ValueError, match=said):
        Engine(model(tools))


def test_autocast_does_not_reach_in(tools):
    model, (ids,) = tools.backbone(dtype=torch.float32), tools.texts(9)
    twin, adapter = tools.adapted(model, 2, 1)
    expected = tools.alone(twin, ids, 5)
    with torch.autocast("cpu", torch.bfloat16):
        engine = Engine(model)
        engine.load("a", adapter)
        assert engine.generate([Request(ids, "a", 5)]) == [expected]


UNPACKED = {  # a kind of model: its options, and why it is refused
    "bloom": (dict(n_layer=2, n_head=4), "cannot read .* its attention does not go"),
    "mamba": (dict(state_size=4), "has recurrent"),
    "falcon": (dict(alibi=True, new_decoder_architecture=False), "cannot read .* its attention does not go"),
    "gpt_oss": (dict(num_key_value_heads=2, head_dim=8, num_local_experts=2), "cannot read .*s_aux"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", UNPACKED)
def test_what_cannot_be_packed_is_refused_in_every_precision(kind, dtype):
    common = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_experts_per_tok=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, intermediate_size=16, **common | UNPACKED[kind][0])
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{type(model).__name__} {UNPACKED[kind][1]}"):
        Engine(model)
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())


def test_what_answers_otherwise_when_it_is_packed_is_refused(tools):
    model = tools.backbone()
    model.model.norm.register_forward_hook(lambda _, arguments, output: output.cumsum(1))
    with pytest.raises(ValueError, match="LlamaForCausalLM answers otherwise when requests are packed"):
        Engine(model)


@pytest.mark.parametrize(
    ("family", "options", "cache", "changes", "reason"),
    [  # a layer changes what it computes at some positions, which it counts with the tokens in its cache, or without
        ("llama", dict(rope_scaling_begins=40), True, lambda at: at >= 40, "at positions 40 to 45"),
        ("mistral", dict(middle={"first": [33.0]}), True, lambda at: (at >= 33) & (at < 41), "at positions 33 to 38"),
        ("qwen2", {}, True, lambda at: at >= 77, "at positions 90 to 95"),
        ("gpt2", {}, True, lambda at: (at + 1).float().log() >= 4, "at positions 90 to 95"),
        ("phi3", {}, False, lambda at: at >= 400, "its logits"),
    ],
)
def test_a_layer_that_counts_positions_itself_is_refused(family, options, cache, changes, reason, tools):
    def count(_, arguments, kwargs):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else arguments[0]
        past = cache_among(kwargs).get_seq_length() if cache and cache_among(kwargs) else 0
        hidden.mul_(1 + changes(past + torch.arange(hidden.shape[1]))[:, None])

    model, row = tools.backbone(family, options=options), dict(max_batch=8, max_step_tokens=8) if cache else {}
    Engine(model, **row).close()
    for name, module in model.named_modules():
        if name.endswith((".self_attn", ".attn")):
            module.register_forward_pre_hook(count, with_kwargs=True)
    with pytest.raises(ValueError, match=f"answers otherwise when requests are packed: {reason}"):
        Engine(model, **row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_half_precision_tips_over_for_one_text_is_no_reason(dtype, tools):
    model = tools.backbone(dtype=dtype)
    model.model.embed_tokens.register_forward_hook(
        lambda _, arguments, output: output + (arguments[0].shape[1] > 6) * (arguments[0] == 5)[..., None]
    )
    half = dtype == torch.bfloat16
    with contextlib.nullcontext() if half else pytest.raises(ValueError, match="answers otherwise"):
        Engine(model)


@pytest.mark.parametrize("options", [dict(floor_scale=8), dict(floor_scale=55), dict(floor_scale=515), None], ids=str)
def test_llama_4_is_served_where_it_is_as_it_is_alone(options, tools):
    sizes = dict(vocab_size=48, hidden_size=16, intermediate_size=24, intermediate_size_mlp=24, head_dim=8)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=96)
    sizes |= dict(moe_layers=[], no_rope_layers=[1, 0], attention_chunk_size=13, attn_scale=2.0, eos_token_id=None)
    config = AutoConfig.for_model("llama4_text", **sizes, attn_temperature_tuning=bool(options), **options or {})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    if options and options["floor_scale"] < 96:
        with pytest.raises(ValueError, match="Llama4ForCausalLM answers otherwise when requests are packed"):
            Engine(model)
    else:
        ids = tools.texts(5, 30, 88)
        alone = [tools.alone(model, each, 8) for each in ids]
        assert Engine(model).generate([Request(each, None, 8) for each in ids]) == alone


@pytest.mark.parametrize(
    ("kind", "rope", "limit"),
    [
        ("llama", dict(rope_type="default"), 64),
        ("llama", dict(rope_type="linear", factor=2.0), 64),
        ("llama", dict(rope_type="dynamic", factor=2.0), 64),
        ("llama", dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=32), 32),
        ("phi3", dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8), 16),
    ],
)
def test_texts_are_as_long_as_rotary_tables_stay_the_same(kind, rope, limit):
    sizes = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0)
    sizes |= dict(original_max_position_embeddings=16) if kind == "phi3" else {}
    config = AutoConfig.for_model(kind, **sizes, rope_parameters=rope | dict(rope_theta=1e4))
    assert longest_text(config) == limit


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (3, ValueError), ("x", InvalidAdapterError)])
def test_what_cannot_be_loaded(name, error, make, tools):
    other = tools.adapted(tools.backbone(hidden=32), 2)[1]
    engine = make("")
    with pytest.raises(error):
        engine.load(name, other)
    assert engine.adapters == {}


NAME, PROMPTS = st.sampled_from("pq"), [1, 4, BLOCK + 2, 2 * BLOCK + 1]  # the lengths of those that are asked
ADD = st.tuples(st.just("add"), NAME | st.none(), st.sampled_from(PROMPTS), st.integers(1, 4), st.sampled_from("xy"))
STEP, LOAD = st.just(("step",)), st.tuples(st.just("load"), NAME, st.sampled_from("abc"))
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")
BREAK = st.tuples(st.just("break"), st.sampled_from(MODULES))
CHANGE = LOAD | BREAK | st.tuples(st.just("unload"), NAME) | st.tuples(st.just("cancel"), st.integers(0, 9))
PAUSE = st.tuples(st.just("pause"), st.integers(0, 9), st.booleans()) | st.just(("resume",))
LONG, SHORT = ("add", "p", 2 * BLOCK + 1, 4, "x"), ("add", "p", 4, 4, "x")
BEGUN = [("load", "p", "a"), LONG, SHORT, LONG, SHORT]  # three of which run, and one waits
ALONE: dict = {}


@settings(max_examples=25)
@example([*BEGUN, ("step",), ("load", "p", "b"), LONG, *[("step",)] * 30, LONG], 8, 500)  # the name is given anew
@example([*BEGUN, ("step",), ("unload", "p"), SHORT, ("unload", "p")], 8, 500)  # and forgotten, while it answers
@example([*BEGUN, *[("cancel", 0), ("cancel", 3), ("cancel", 99)] * 2, LONG], 8, 500)  # cancelled while it waits
@example([*BEGUN, ("step",), ("cancel", 0), ("cancel", 1), LONG, SHORT], 8, 500)  # while it reads
@example([*BEGUN, *[("step",)] * 4, ("cancel", 0), ("cancel", 1), LONG, SHORT], 8, 500)
@example([*BEGUN, *[("step",)] * 7, ("cancel", 0), ("cancel", 1), LONG, SHORT], 8, 500)  # while it writes
@example([*BEGUN, *[("step",)] * 40, *[("cancel", k) for k in (0, 1, 1)], LONG], 8, 500)  # when it has ended
@example([*BEGUN, *[each for module in MODULES for each in (("step",), ("break", module))]], 8, 500)
@example(
    [*BEGUN, *[each for k in range(12) for each in (("pause", k % 3, k % 2 == 0), ("step",), ("resume",))]], 8, 500
)
@example([*BEGUN, ("step",), ("pause", 0, False), ("unload", "p"), ("step",), ("cancel", 1), ("resume",)], 8, 500)
@example([*BEGUN, ("step",), ("pause", 0, True), ("pause", 1, False), ("cancel", 0), ("step",), ("resume",)], 3, 0)
@given(st.lists(ADD | STEP | CHANGE | PAUSE, max_size=25), st.sampled_from([3, 8, 64]), st.sampled_from([0, 40, 500]))
def test_any_order_of_things(world, tools, actions, max_step_tokens, shared):
    model, twins, adapters = world
    prompts = dict(zip(PROMPTS, tools.texts(*PROMPTS), strict=True))
    engine = Engine(model, max_batch=3, max_step_tokens=max_step_tokens, shared_bytes=shared * POSITION)
    versions, tokens, wanted, cancelled, paused = {}, {}, {}, set(), []

    def step():
        over = engine.finished.keys() | cancelled
        for identity, token in engine.step():
            assert identity not in over
            tokens[identity].append(token)

    def known(name):
        there = ", ".join(sorted(versions)) or "none"
        absent = pytest.raises(ValueError, match=f"no adapter '{name}' is loaded; there are {there}$")
        return contextlib.nullcontext() if name is None or name in versions else absent

    for action in actions:
        match action:
            case "add", name, prompt, new, account:
                with known(name):
                    identity = engine.add(Request(prompts[prompt], name, new, account=account))
                    tokens[identity], wanted[identity] = [], (versions.get(name), prompt, new)
            case "load", name, version:
                engine.load(name, adapters[version])
                versions[name] = version
            case "unload", name:
                with known(name):
                    engine.unload(name)
                    del versions[name]
            case "cancel", identity:
                engine.cancel(identity)
                cancelled |= {identity} & tokens.keys()
            case "pause", identity, dropped:
                if any(each.identity == identity for each in [*engine._running, *engine._waiting]):
                    engine.pause(identity)
                    if dropped:
                        engine.drop(identity)
                    paused.append(identity)
            case ("resume",):
                for identity in paused:
                    if identity in engine._paused:
                        engine.resume(identity)
                paused.clear()
            case "break", module:
                busy = engine._running or engine._waiting
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(model.get_submodule(module), "forward", lambda *_: 1 / 0)
                    with pytest.raises(ZeroDivisionError) if busy else contextlib.nullcontext():
                        engine.step()
            case _:
                step()
    for identity in [*engine._paused]:
        engine.resume(identity)
    while engine._waiting or engine._running:
        step()
    assert engine.finished == dict.fromkeys(tokens.keys() - cancelled, "length")
    engine.finished.clear()
    for name in versions:
        engine.unload(name)
    assert engine._pools == {}
    engine.close()
    assert left(engine) == ([], [], [], {})
    for identity, (version, prompt, new) in wanted.items():
        if (version, prompt) not in ALONE:
            ALONE[version, prompt] = tools.alone(twins[version], prompts[prompt], 4)
        written = tokens[identity]
        assert written == ALONE[version, prompt][: len(written) if identity in cancelled else new]


def test_private_lora_is_served_as_the_lora_that_it_is(tools, tmp_path):
    config = PrivateLoraConfig(r_c2d=3, r_d2c=4, target_modules=["q_proj", "down_proj"])
    private, engine, (ids,) = peft.get_peft_model(tools.backbone(), config), Engine(tools.backbone()), tools.texts(7)
    for k, m in enumerate(matrices(private.eval()).values()):
        torch.nn.init.normal_(m.weight, generator=torch.Generator().manual_seed(k))
    expected = tools.alone(private, ids, 8)
    before = [(name, p.requires_grad) for name, p in engine.model.named_parameters()]
    private.save_pretrained(tmp_path)
    engine.load("folder", tmp_path)
    engine.load("live", Adapter.from_peft(private))
    engine.load("converted", Adapter.of(*convert_to_lora(private)))
    names = ["folder", "live", "converted", None]
    *written, base = engine.generate([Request(ids, name, 8) for name in names])
    assert written == [expected] * 3 != [base] * 3
    assert [(name, p.requires_grad) for name, p in engine.model.named_parameters()] == before
    engine.close()


def test_a_prompt_may_be_a_batch_of_one(world, make, tools):
    (ids,) = tools.texts(6)
    forms = (
        ids,
        ids[None],
        ids.tolist(),
        [ids.tolist()],
        {"input_ids": ids[None], "attention_mask": ids[None] * 0 + 1},
    )
    written = make().generate([Request(form, "a", 4) for form in forms])
    assert written == [tools.alone(world[1]["a"], ids, 4)] * len(forms)


def test_folders_that_cannot_be_lora_are_refused_in_a_sentence(tools, tmp_path):
    engine = Engine(tools.backbone())
    peft.get_peft_model(tools.backbone(), LadderConfig(r=2)).save_pretrained(tmp_path / "ladder")
    late = PrivateLoraConfig(r_c2d=2, r_d2c=2, late=True, target_modules=["o_proj"])
    peft.get_peft_model(tools.backbone(), late).save_pretrained(tmp_path / "late")
    other = peft.get_peft_model(tools.backbone(seed=9), PrivateLoraConfig(r_c2d=2, r_d2c=2))
    other.save_pretrained(tmp_path / "other")
    peft.get_peft_model(tools.backbone(), peft.LoHaConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "loha")
    for name, reason in dict(
        ladder="a ladder, which cannot be LoRA: what it adds at the final norm depends on the inputs of every layer",
        late="is late: LoRA has no residual",
        other="belongs to a backbone with fingerprint",
        loha="peft_type: Input should be 'LORA', got 'LOHA'",
    ).items():
        with pytest.raises(InvalidAdapterError, match=reason):
            engine.load("x", tmp_path / name)
    config = json.loads((tmp_path / "loha" / "adapter_config.json").read_text()) | {"peft_type": "NEW"}
    (tmp_path / "loha" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "other" / "adapter_model.safetensors").unlink()
    for name, reason in dict(loha="PEFT does not know 'NEW'", other="has no adapter_model.safetensors").items():
        with pytest.raises(InvalidAdapterError, match=reason):
            engine.load("x", tmp_path / name)
    assert not engine.adapters
    engine.close()


def test_a_failing_tokenizer_ends_its_own_request_only(world, make, tools):
    class Broken:
        def decode(self, ids, **_):
            raise IndexError("piece id is out of range")

        convert_ids_to_tokens = decode

    engine, ids = make(), tools.texts(4, 5)
    engine.tokenizer = Broken()
    bad, good = engine.add(Request(ids[0], "a", 4, stop=["x"])), engine.add(Request(ids[1], "b", 4))
    written = [token for _ in range(6) for identity, token in engine.step() if identity == good]
    assert written == tools.alone(world[1]["b"], ids[1], 4)
    assert (engine.finished.pop(bad), engine.finished.pop(good)) == ("error: piece id is out of range", "length")


def test_layers_of_several_precisions(tools):
    model = tools.backbone(dtype=torch.float32)
    adapter = tools.adapted(model, 3)[1]
    model.model.layers[0].mlp.double()
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = model.model.layers[0].mlp.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    model.model.layers[0].mlp.register_forward_hook(lambda *arguments: arguments[-1].float())
    engine = Engine(model)
    engine.load("a", adapter)
    assert len(engine.generate([Request([1, 2, 3], "a", 4)])[0]) == 4
    engine.close()


def test_an_engine_that_is_forgotten_leaves_no_hooks(tools):
    model = tools.backbone()
    Engine(model)
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules())


def _trained(model, **options):
    model.get_input_embeddings().requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, **options)
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def _replaced(model):
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.flip(0))


CHANGES = {
    "merge": lambda model, adapter: merge(model, adapter),
    "optimizer": lambda model, _: _trained(model, foreach=True),
    "fused optimizer": lambda model, _: _trained(model, fused=True),
    "another precision": lambda model, _: model.to(torch.float32),
    "load_state_dict": lambda model, _: model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}),
    "through data": lambda model, _: [p.data.mul_(0.9) for p in model.parameters()],
    "another parameter": lambda model, _: _replaced(model),
    "merged in inference mode": torch.inference_mode()(lambda model, adapter: merge(model, adapter)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_base_that_has_changed_is_served_as_it_is_now(change, tools):
    model, (long, short) = tools.backbone(), tools.texts(2 * BLOCK + 3, 5)
    engine, adapter = Engine(model, max_batch=4), tools.adapted(model, 2, 1)[1]
    engine.load("a", adapter)
    requests = [Request(long, None, 6), Request(long, "a", 6), Request(short, "a", 6)]
    before = engine.generate(requests)
    stream = engine.stream(requests[0])
    next(stream)
    CHANGES[change](model, tools.adapted(model, 3, 2)[1])
    twin = tools.adapted(model, 2, 1)[0]
    after = [tools.alone(which, each.input_ids, 6) for which, each in zip((model, twin, twin), requests, strict=True)]
    assert engine.generate(requests) == after
    assert change == "another precision" or after != before
    with pytest.raises(RuntimeError, match="ended with an error: the model has changed since it began"):
        list(stream)
    assert left(engine) == ([], [], [], {})


def test_a_base_that_can_no_longer_be_served_is_refused_until_it_can(world, tools):
    model, (ids,) = tools.backbone(), tools.texts(6)
    engine, alone = Engine(model), tools.alone(world[1]["a"], ids, 5)
    engine.load("a", world[2]["a"])
    private = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    refused = {"training mode": (model.train, model.eval), "has an adapter already, in .*q_proj": (None, None)}
    for message, (change, back) in refused.items():
        tuned = None if change else peft.get_peft_model(model, private)
        change and change()
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                engine.generate([Request(ids, "a", 5)])
        back() if back else tuned.unload()
        assert engine.generate([Request(ids, "a", 5)]) == [alone]
    assert left(engine) == ([], [], [], {})


TUNED = {  # how a model comes to have an adapter
    "LoRA": lambda model: peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])),
    "switched off": lambda model: (
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj"])).base_model.model
    ),
    "IA3": lambda m: peft.get_peft_model(m, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
    "prompts": lambda m: peft.get_peft_model(m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
    "a head": lambda m: peft.get_peft_model(m, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "injected": lambda m: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up_proj"]), m),
    "transformers": lambda m: m.add_adapter(peft.LoraConfig(target_modules=["o_proj"])) or m,
    "PrivateLoRA": lambda m: peft.get_peft_model(m, PrivateLoraConfig(r_c2d=2, r_d2c=2)),
}


@pytest.mark.parametrize("how", TUNED)
def test_a_base_that_has_an_adapter_is_refused(how, tools):
    if how == "transformers" and Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters by PEFT {MIN_PEFT_VERSION} and later")
    model = TUNED[how](tools.backbone()).eval()
    if how == "switched off":
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.enable_adapters(False)
    named = "" if how == "prompts" else r", in [\w.]*\.\w+_"
    for use in (Engine, targets):
        with pytest.raises(ValueError, match=rf"this \w+ has an adapter already{named}"):
            use(model)
