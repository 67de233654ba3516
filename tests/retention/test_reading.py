"""Read once, ask many: each answer is that of a fresh copy, and what was read stays as it was."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StoppingCriteriaList,
)

from plpkg import retention
from plpkg.backbones import random_backbone
from plpkg.decoding import cache_argument
from plpkg.files import checkpoints
from plpkg.retention import chunked_prefill
from plpkg.retention.cache.quantize import quantized
from plpkg.retention.cache.store import UnitStore
from plpkg.retention.reading import FILE
from plpkg.retention.scorers import H2O, KeyNorm, Random, SinkRecent, SirLlm
from tests.retention.conftest import CONTRACTS, in_double, other_family

from rounding import assert_as_exact

QUESTIONS = [torch.tensor([[5, 6, 7]]), torch.tensor([[40], [2]])]
WAYS = {
    "greedy": dict(do_sample=False),
    "a sample": dict(do_sample=True),
    "a configuration": dict(generation_config=GenerationConfig(max_new_tokens=5, pad_token_id=0)),
}
STORES = {"plain": UnitStore, "token": quantized(4, "token", 16), "kivi": quantized(2, "kivi", 4)}
both_positions = pytest.mark.parametrize("positions", ["original", "reassigned"])
WINDOW = {"gemma2": {"sliding_window": 4}}
every_store = pytest.mark.parametrize("store", STORES.values(), ids=STORES)


@pytest.fixture
def read(model, ids):
    """Two prompts of 29 tokens, of which each head keeps ten units."""
    return chunked_prefill(model, ids, KeyNorm(), 10, 4)


def tensors_of(cache):
    """All that the cache holds, layer by layer."""
    held = []
    for layer in cache.layers:
        for owner in (layer, getattr(layer, "store", None)):
            held += [t.clone() for t in getattr(owner, "__dict__", {}).values() if isinstance(t, torch.Tensor)]
        if hasattr(layer, "store"):
            held += layer.store.read()
            held.append(torch.tensor([layer.seen, len(layer.store), layer.store.num_bytes]))
    return held


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def on_the_whole_text(model, ids, question, **options):
    """The answer of transformers' own generate, without this package's cache."""
    whole = torch.cat([ids, question.expand(len(ids), -1)], dim=1)
    options = dict(attention_mask=torch.ones_like(whole), pad_token_id=0) | options
    return model.generate(whole, **options)[:, whole.shape[1] :]


@pytest.mark.parametrize(("positions", "family", "attention"), CONTRACTS)
def test_with_room_for_all_it_is_generate_on_the_whole_text(backbone, ids, positions, family, attention):
    model = backbone(family, attention)
    read = chunked_prefill(model, ids, SinkRecent(), 40, 5, positions=positions)
    for question in (*QUESTIONS, QUESTIONS[0]):
        options = dict(max_new_tokens=5, pad_token_id=0, do_sample=False)
        answer = read.ask(model, question, **options)
        assert torch.equal(answer, on_the_whole_text(model, ids, question, **options))


@every_store
@both_positions
def test_each_answer_is_a_fresh_copys_and_leaves_no_trace(model, ids, positions, store):
    read = chunked_prefill(model, ids, KeyNorm(), 10, 4, positions=positions, local_len=3, store=store)
    before, spare = tensors_of(read.cache), copy.deepcopy(read)
    for question in QUESTIONS:
        for way in WAYS.values():
            fresh, chosen = copy.deepcopy(spare), {"max_new_tokens": 5, "pad_token_id": 0} | way
            torch.manual_seed(0)
            expected = model.generate(**fresh.inputs(question.expand(2, -1)), **chosen)
            torch.manual_seed(0)
            answer = read.ask(model, question, **chosen)
            assert torch.equal(answer, expected[:, question.shape[1] :])
            assert same(tensors_of(read.cache), before)


def test_sliding_windows_come_back_as_well():
    model = random_backbone("gemma2", num_kv_heads=2, options={"sliding_window": 4})
    ids = torch.arange(1, 20)[None]
    read = chunked_prefill(model, ids, KeyNorm(), 30, 5, positions="original")
    before, options = tensors_of(read.cache), dict(max_new_tokens=6, do_sample=False)
    for _ in range(2):
        answer = read.ask(model, QUESTIONS[0], **options)
        assert torch.equal(answer, on_the_whole_text(model, ids, QUESTIONS[0], **options))
        assert same(tensors_of(read.cache), before)


def test_no_second_copy_lives_while_it_answers(model, read):
    first, alive = [weakref.ref(layer.store.keys) for layer in read.cache.layers], []
    streamer = SimpleNamespace(put=lambda _: alive.append(any(ref() is not None for ref in first)), end=lambda: None)
    read.ask(model, QUESTIONS[0].expand(2, -1), max_new_tokens=3, do_sample=False, streamer=streamer)
    assert alive == [True, False, False, False]  # the question comes first, before anything has run
    keys = read.cache.layers[0].store.keys
    assert keys.untyped_storage().nbytes() == keys.nbytes


def test_the_model_goes_with_the_last_that_uses_it(ids):
    """Without waiting for the garbage collector, which comes when it comes: a model is large."""
    model = random_backbone("llama", num_kv_heads=2, vocab=64)
    alive = weakref.ref(model)
    gc.disable()
    try:
        read = chunked_prefill(model, ids, H2O(), 12, 4)
        read.ask(model, QUESTIONS[0], max_new_tokens=2)
        with read.evicting():
            model.generate(**read.inputs(QUESTIONS[1]), max_new_tokens=2)
        del model, read
        assert alive() is None
    finally:
        gc.enable()


def test_an_answer_that_breaks_leaves_what_was_read(model, read):
    before = tensors_of(read.cache)

    def put(value):
        if value.ndim == 1:  # the question has two dimensions
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read.ask(model, QUESTIONS[0].expand(2, -1), max_new_tokens=3, streamer=SimpleNamespace(put=put))
    assert same(tensors_of(read.cache), before)


@pytest.mark.parametrize(("family", "positions"), [("llama", "reassigned"), ("gemma2", "original")])
def test_a_pass_that_breaks_between_two_layers_is_noticed(ids, family, positions, tmp_path):
    model = random_backbone(family, num_kv_heads=2, vocab=64, options=WINDOW.get(family))
    read = chunked_prefill(model, ids, H2O(), 12, 4, positions=positions)

    def stop(_module, args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        read.ask(model, QUESTIONS[0], max_new_tokens=2)
    assert read.cache.seen == 29  # an answer is taken back
    with pytest.raises(KeyboardInterrupt), read.evicting():
        model.generate(**read.inputs([[1], [2]]), max_new_tokens=2)
    hook.remove()
    for use in (read.inputs, lambda: read.ask(model, QUESTIONS[0]), lambda: read.save(tmp_path)):
        with pytest.raises(ValueError, match="broke off: some layers of this cache have 29 tokens and others 30"):
            use()


def test_eviction_goes_on_after_questions(model, ids):
    asked, plain = (chunked_prefill(model, ids, H2O(), 12, 4) for _ in range(2))
    asked.ask(model, QUESTIONS[0], max_new_tokens=3)
    for read in (asked, plain):
        with read.evicting():
            model.generate(**read.inputs(), max_new_tokens=5, do_sample=False)
    assert same(tensors_of(asked.cache), tensors_of(plain.cache))


def test_other_adapters_may_answer(model, backbone, read):
    adapted = get_peft_model(backbone(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    assert read.ask(adapted, QUESTIONS[0], max_new_tokens=3, do_sample=False).shape == (2, 3)
    with pytest.raises(ValueError, match=r"was read by a backbone with fingerprint .*but LlamaForCausalLM has"):
        read.ask(backbone(seed=1), QUESTIONS[0])
    expected, reader = read.ask(model, QUESTIONS[0], max_new_tokens=3), model  # around whose layers an adapter comes
    adapted = get_peft_model(reader, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])).eval()
    assert torch.equal(read.ask(adapted, QUESTIONS[0], max_new_tokens=3), expected)
    with pytest.warns(UserWarning, match="the adapter of LlamaForCausalLM has changed"):
        assert torch.equal(read.ask(reader, QUESTIONS[0], max_new_tokens=3), expected)


SETTINGS = {
    "no cache": lambda model: setattr(model.generation_config, "use_cache", False),
    "no cache in the configuration": lambda model: setattr(model.config, "use_cache", False),
    "a static cache": lambda model: setattr(model.generation_config, "cache_implementation", "static"),
    "training": lambda model: model.train(),
    "checkpoints": lambda model: (model.train(), model.activation_checkpointing_enable()),
    "dropout": lambda model: (model.train(), [setattr(m, "attention_dropout", 0.9) for m in model.modules()]),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_a_training_leaves_behind(model, ids, setting):
    """It answers as generate does on the whole text, in evaluation mode and with a cache."""
    options = dict(max_new_tokens=6, do_sample=False)
    expected = on_the_whole_text(model, ids, QUESTIONS[1], **options)
    setting(model)
    mode, config = model.training, copy.deepcopy(model.generation_config)
    read = chunked_prefill(model, ids, KeyNorm(), 64, 8)
    assert torch.equal(read.ask(model, QUESTIONS[1], **options), expected)
    assert (model.training, model.generation_config) == (mode, config)


@both_positions
@every_store
def test_a_continuation_is_scored_as_the_model_does(model, ids, positions, store):
    """With room for all it is the whole text's; after eviction that of a cache that reads it token by token."""
    continuation = torch.randint(0, 64, (2, 5), generator=torch.Generator().manual_seed(3))
    exact = chunked_prefill(model, ids, KeyNorm(), 64, 8, positions=positions)

    def whole(model):
        log_p = model(torch.cat([ids, continuation], 1)).logits[:, 28:-1].log_softmax(-1)
        return log_p.gather(-1, continuation[..., None])[..., 0]

    with torch.no_grad():
        assert_as_exact(exact.score(model, continuation), whole(model), whole(in_double(model)))
    read = chunked_prefill(model, ids, KeyNorm(), 10, 4, positions=positions, store=store)
    before, fresh = tensors_of(read.cache), copy.deepcopy(read)
    scores = read.score(model, continuation)
    assert same(tensors_of(read.cache), before)
    assert torch.equal(read.score(model, continuation), scores)
    logits = [fresh.logits]
    with torch.no_grad():
        for token in continuation[:, :-1].split(1, dim=1):
            logits.append(model(token, **cache_argument(fresh.cache)).logits[:, -1])
    expected = torch.stack(logits, 1).log_softmax(-1).gather(-1, continuation[..., None])[..., 0]
    if store is UnitStore:  # others round what stands behind full groups
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)  # float32, two layers
    assert scores.shape == (2, 5)


def test_several_questions_about_one_prompt(model, ids):
    read, several = chunked_prefill(model, ids[:1], KeyNorm(), 10, 4), torch.randint(0, 64, (3, 4))
    # An answer that ends would make the others' tensor shorter.
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)
    together = read.ask(model, several, **options)
    alone = torch.cat([read.ask(model, each, **options) for each in several])
    assert torch.equal(together, alone)
    samples = read.ask(model, several[:1].expand(8, -1), max_new_tokens=5, min_new_tokens=5, do_sample=True)
    assert len(samples.unique(dim=0)) > 1
    scores = read.score(model, several)
    torch.testing.assert_close(scores, torch.cat([read.score(model, each[None]) for each in several]))
    assert read.cache.kept == 10


def test_what_generate_takes_may_be_given(model, ids):
    """A processor of logits, a streamer, and what stops."""
    read, given, streamed = chunked_prefill(model, ids[:1], KeyNorm(), 10, 4), [], []

    def only(tokens, scores):
        given.append(tokens.shape[1])
        return scores.index_fill(1, torch.arange(7), -torch.inf)

    streamer = SimpleNamespace(put=streamed.append, end=lambda: streamed.append(None))
    stopping = StoppingCriteriaList([lambda tokens, scores, **_: torch.tensor([tokens.shape[1] >= 6])])
    answer = read.ask(
        model, QUESTIONS[0], logits_processor=LogitsProcessorList([only]), streamer=streamer,
        stopping_criteria=stopping, do_sample=False, max_new_tokens=20,
    )  # fmt: skip
    assert answer.shape == (1, 3)
    assert answer.min() >= 7
    assert given == [3, 4, 5]
    assert torch.equal(torch.cat([each.flatten() for each in streamed[1:-1]]), answer[0])


def changed_weight(model):
    with torch.no_grad():
        model.get_output_embeddings().weight[0] += 1


def test_a_model_that_has_changed_does_not_answer(backbone, ids, tmp_path):
    model = get_peft_model(backbone(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    read = chunked_prefill(model, ids, KeyNorm(), 10, 4)
    read.save(tmp_path)
    first = read.ask(model, QUESTIONS[0], max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight.mul_(2)
    with pytest.warns(UserWarning, match="the adapter of PeftModel has changed since it read this"):
        assert read.ask(model, QUESTIONS[0], max_new_tokens=3, do_sample=False).shape == first.shape
    with pytest.warns(UserWarning, match="was made with other weights than PeftModel has: another adapter"):
        retention.load(tmp_path, model)
    changed_weight(model)
    uses = [lambda model: read.ask(model, QUESTIONS[0]), lambda model: read.score(model, QUESTIONS[0])]
    for use in (*uses, lambda _: read.save(tmp_path), lambda model: read.units(copy.deepcopy(model))):
        with pytest.raises(ValueError, match="the weights of PeftModel have changed since it read this: read it again"):
            use(model)


def test_others_may_use_the_model_while_somebody_reads(model, ids):
    """Reads, questions, and forward passes without any cache, each in a thread of its own."""
    long = torch.randint(0, 64, (1, 200), generator=torch.Generator().manual_seed(5))

    def reading(scorer):
        read = chunked_prefill(model, long, scorer, 20, 4)
        with read.evicting():
            tokens = model.generate(**read.inputs(), max_new_tokens=8, do_sample=False)
        return tokens, read.cache.layers[0].positions

    answered = chunked_prefill(model, ids, KeyNorm(), 10, 4)
    uses = [
        *(lambda scorer=scorer: reading(scorer) for scorer in (H2O(), SirLlm(), KeyNorm())),
        *[lambda: (answered.ask(model, QUESTIONS[0], max_new_tokens=30, do_sample=False),)] * 2,  # of one reading
        lambda: (answered.score(model, QUESTIONS[0]),),
        lambda: (model(long).logits,),
    ]
    alone = [use() for use in uses]
    with ThreadPoolExecutor(len(uses)) as pool:
        for results in pool.map(lambda use: [use() for _ in range(3)], uses):
            expected = alone.pop(0)
            assert all(same(result, expected) for result in results)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks


def test_images_of_earlier_prompts_move_nothing(ids):
    """Vision-language models remember by how much an image has moved positions, and of how many prompts."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=64)
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
    vision = dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2)
    config = Qwen2VLConfig(text_config=sizes | dict(num_hidden_layers=2, rope_parameters=rope), vision_config=vision)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).eval()
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    expected = on_the_whole_text(model, ids[:1], QUESTIONS[0], **options)
    labels = retention.cis_labels(model, ids[:1], 20, chunk_size=6)
    model.model.rope_deltas = moved = torch.tensor([[-7], [-9]])
    read = chunked_prefill(model, ids[:1], KeyNorm(), 64, 8)
    assert torch.equal(read.ask(model, QUESTIONS[0], **options), expected)
    assert torch.equal(retention.cis_labels(model, ids[:1], 20, chunk_size=6), labels)
    assert model.model.rope_deltas is moved
    assert torch.equal(model.generate(**read.inputs(QUESTIONS[0][0].tolist()), **options)[:, 3:], expected)


def test_what_generate_returns_as_a_dictionary(model, read):
    options = dict(max_new_tokens=3, do_sample=False)
    output = read.ask(model, QUESTIONS[0], return_dict_in_generate=True, output_scores=True, **options)
    assert torch.equal(output.sequences, read.ask(model, QUESTIONS[0], **options))
    assert len(output.scores) == 3


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_what_follows_from_the_cache_cannot_be_given(name, model, read):
    with pytest.raises(ValueError, match=f"ask sets attention_mask, {name} itself"):
        read.ask(model, QUESTIONS[0], **{name: read.cache}, attention_mask=None)


def test_questions_that_cannot_be_asked(model, read):
    with pytest.raises(ValueError, match=r"ids must be \(n,\), \(1, n\) or \(2, n\), got \(3, 4\)"):
        read.ask(model, torch.zeros(3, 4, dtype=torch.long))
    with read.evicting(), pytest.raises(ValueError, match=r"within evicting\(\) would evict what the next question"):
        read.ask(model, QUESTIONS[0])
    with pytest.raises(ValueError, match="this cache is for a batch of 2, got 6 sequences: there are no beams"):
        model.generate(**read.inputs(), num_beams=3, max_new_tokens=3)


MORE_THAN_A_CACHE = {
    "beams": (dict(num_beams=2), "ask gives one answer a row, got num_beams=2"),
    "sequences": (dict(num_return_sequences=3, do_sample=True), "got num_return_sequences=3: for several ask in"),
    "in a configuration": (dict(generation_config=GenerationConfig(num_beams=4)), "got num_beams=4"),
    "looked up": (dict(prompt_lookup_num_tokens=3), "this cache takes no tokens back"),
    "by half of the layers": (dict(assistant_early_exit=1), "this cache takes no tokens back"),
}


@both_positions
@pytest.mark.parametrize(("options", "reason"), MORE_THAN_A_CACHE.values(), ids=MORE_THAN_A_CACHE)
def test_what_the_cache_cannot_do_is_refused_before_the_first_token(model, ids, positions, options, reason):
    read, ran = chunked_prefill(model, ids[:1], KeyNorm(), 40, 4, positions=positions), []
    before = tensors_of(read.cache)
    streamer = SimpleNamespace(put=lambda tokens: ran.append(tokens.ndim == 1), end=lambda: None)
    streamer = {} if "num_beams" in options or "generation_config" in options else {"streamer": streamer}
    with pytest.raises(ValueError, match=reason):
        read.ask(model, QUESTIONS[0], max_new_tokens=3, **options, **streamer)
    assert not any(ran)
    assert same(tensors_of(read.cache), before)


def test_another_models_guesses_are_refused_as_well(model, backbone, ids):
    read = chunked_prefill(model, ids[:1], KeyNorm(), 10, 4)
    with pytest.raises(ValueError, match="this cache takes no tokens back"):
        read.ask(model, QUESTIONS[0], max_new_tokens=3, assistant_model=backbone(seed=1))
    with pytest.raises(ValueError, match="this cache takes no tokens back"):
        model.generate(**read.inputs(), max_new_tokens=3, prompt_lookup_num_tokens=2)


@both_positions
def test_generate_on_the_whole_text_is_caught(model, ids, positions):
    """transformers would take the cache's length for a part of the ids, and read tokens twice without a word."""
    read = chunked_prefill(model, ids, KeyNorm(), 10, 4, positions=positions)
    before = tensors_of(read.cache)
    with pytest.raises(ValueError, match=r"holds 10 units .* read some twice, or none. Take model.generate\(\*\*read"):
        model.generate(ids, **cache_argument(read.cache), max_new_tokens=3)
    assert same(tensors_of(read.cache), before)
    model.generate(**read.inputs(), max_new_tokens=3)
    with pytest.raises(ValueError, match="holds 13 units"):  # once for each call
        model.generate(ids, **cache_argument(read.cache), max_new_tokens=3)
    stale = read.inputs()
    model(ids[:, :2], **cache_argument(read.cache))
    with pytest.raises(ValueError, match="holds 15 units"):
        model.generate(**stale, max_new_tokens=3)


# Spans that are kept.


@both_positions
def test_spans_stay_whatever_their_scores(model, ids, positions):
    def all_kept(read):
        rows = read.log[-1].kept.flatten(0, 2).tolist()
        return all({1, 2, 3, 4, 5, 17} <= set(row) and len(row) == 12 for row in rows)

    options = dict(stabilizers=2, positions=positions, log_positions=True)
    read = chunked_prefill(model, ids, Random(), 12, 4, keep=[(1, 4), (3, 6), (17, 18)], **options)
    assert all_kept(read)
    with read.evicting():
        model.generate(**read.inputs(), max_new_tokens=30, do_sample=False)
    assert all_kept(read)
    assert not all_kept(chunked_prefill(model, ids, Random(), 12, 4, **options))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([(0, 9), (6, 13)], r"sink=2 .* and 11 more in keep=\[\(0, 9\), \(6, 13\)\] that is 13, more than budget=12"),
        ([(3, 3)], r"keep must be spans \(start, stop\) within the 29 tokens of the prompt, got \(3, 3\)"),
        ([(20, 30)], r"got \(20, 30\)"),
        ([(-2, 3)], r"got \(-2, 3\)"),
        ([(1, 2, 3)], r"got \(1, 2, 3\)"),
        ((0, 3), r"prompt, got 0"),
    ],
)
def test_spans_that_cannot_be_kept(model, ids, keep, message):
    with pytest.raises(ValueError, match=message):
        chunked_prefill(model, ids, Random(sink=2), 12, 4, keep=keep)


# What was read outlives the process.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_store
@both_positions
def test_loaded_it_answers_to_the_bit(model, ids, tmp_path, positions, store, dtype):
    model, folder = model.to(dtype), tmp_path / "folder"
    read = chunked_prefill(model, ids, SirLlm(), 10, 4, positions=positions, local_len=3, store=store)
    read.ask(model, QUESTIONS[0], max_new_tokens=3)
    read.save(folder)
    assert [(path.name, path.stat().st_mode & 0o777) for path in folder.iterdir()] == [(FILE, 0o600)]
    again = retention.load(folder, copy.deepcopy(model))
    assert same(tensors_of(again.cache), tensors_of(read.cache))
    assert torch.equal(again.logits, read.logits)
    assert again.log.rows() == read.log.rows()
    options = dict(max_new_tokens=5, return_dict_in_generate=True, output_scores=True)
    for question in QUESTIONS:
        one, other = (each.ask(model, question, do_sample=False, **options) for each in (read, again))
        assert torch.equal(one.sequences, other.sequences)
        assert same(one.scores, other.scores)
    one, other = (model.generate(**each.inputs(), **options) for each in (read, again))
    assert same(one.scores, other.scores)
    with pytest.raises(ValueError, match="what was loaded has no scorer"), again.evicting():
        pass


MIMO = dict(head_dim=24, v_head_dim=16, swa_num_key_value_heads=4, swa_head_dim=24, swa_v_head_dim=16)
MIMO |= dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32)


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt2", {}), ("gpt_bigcode", {}), ("gemma2", {"sliding_window": 4}), ("mimo_v2_flash", MIMO)],
)
def test_other_families_are_saved(tmp_path, family, options):
    """One KV head for all, of which the configuration says another number; values and windows of other sizes."""
    model = other_family(family, num_hidden_layers=4, **options)
    read = chunked_prefill(model, torch.arange(1, 20)[None], KeyNorm(), 9, 5, positions="original")
    read.save(tmp_path)
    again = retention.load(tmp_path, model)
    assert same(tensors_of(again.cache), tensors_of(read.cache))
    assert torch.equal(*(each.ask(model, QUESTIONS[0], max_new_tokens=4) for each in (read, again)))


def test_only_the_model_that_has_read_may_load(backbone, read, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks reading\.safetensors"):
        retention.load(tmp_path, backbone())
    read.save(tmp_path)
    with pytest.raises(ValueError, match=r"was read by a backbone with fingerprint .* but LlamaForCausalLM has"):
        retention.load(tmp_path, backbone(seed=1))
    with pytest.raises(ValueError, match=r"in torch.float32, but LlamaForCausalLM has .* in torch.bfloat16"):
        retention.load(tmp_path, backbone().bfloat16())


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-9] + bytes([7] * 9)])
def test_a_damaged_reading_is_refused(model, read, tmp_path, damage):
    read.save(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path} (cannot be read|is damaged)"):
        retention.load(tmp_path, model)
    checkpoints.save(path, {"identity": {}, "step": 3})
    with pytest.raises(ValueError, match=f"{path} is another kind of file: it has no positions"):
        retention.load(tmp_path, model)


def test_after_the_last_cut_it_is_not_saved_until_the_next(model, ids, tmp_path):
    for repeats in (1, 2):
        read = chunked_prefill(model, ids, KeyNorm(), 10, 4)
        if repeats > 1:
            read.cache.batch_repeat_interleave(repeats)
        else:
            model.generate(**read.inputs(), max_new_tokens=3, do_sample=False)
        with pytest.raises(ValueError, match="has gone on or was repeated since the last cut: save it before"):
            read.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@every_store
def test_after_decoding_it_is_saved_as_well(model, ids, tmp_path, store):
    read = chunked_prefill(model, ids, KeyNorm(), 10, 4, local_len=3, store=store)
    with read.evicting():
        model.generate(**read.inputs(), max_new_tokens=70, do_sample=False)
    read.save(tmp_path)
    again = retention.load(tmp_path, model)
    assert again.log.rows() == read.log.rows()
    assert same(tensors_of(again.cache), tensors_of(read.cache))


def test_a_store_of_ones_own_is_not_saved(model, ids, tmp_path):
    class Mine(UnitStore):
        pass

    with pytest.raises(ValueError, match="a Mine does not say what makes another"):
        chunked_prefill(model, ids, KeyNorm(), 10, 4, store=Mine).save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
