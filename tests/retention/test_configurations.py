"""Real architectures and variants of their configurations, read whole, cut, and cut and moved.

The oracles are the models themselves. What a cut leaves is worked out here, and is the same in all layers and heads:
so one mask hides what is evicted, and one list says where the kept units move.
"""

import functools
import itertools
import sys
from contextlib import contextmanager

import peft
import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.gptj import modeling_gptj
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from plpkg.decoding import cache_among, cache_argument
from plpkg.retention import chunked_prefill, cis_labels, scorers
from plpkg.retention.watch import Watch, watching
from tests.retention.conftest import in_double, other_family

from rounding import assert_as_exact

PROMPT, QUESTION, CHUNK, BUDGET = 70, 5, 16, 24

LAYERS = 4
FULL = dict(layer_types=["full_attention"] * LAYERS)
MIXED = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20)
CHUNKED = ["chunked_attention", "full_attention"] * 2
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32)
SHARED = dict(first_k_dense_replace=1, n_shared_experts=1)
HYBRID = dict(layer_types=["attention"] * LAYERS, shared_intermediate_size=32) | LOCAL
PER_LAYER = dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=64)
OPT = dict(ffn_dim=64, word_embed_proj_dim=64)
DBRX = dict(d_model=64, n_heads=4, n_layers=LAYERS)
DBRX |= dict(attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0})
DBRX |= dict(ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2})


def rope(kind, **options):
    return dict(rope_parameters={"rope_type": kind, "rope_theta": 1e4} | options)


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

CONFIGURATIONS = {
    "llama": {},
    "llama mha": dict(num_key_value_heads=4),
    "llama mqa": dict(num_key_value_heads=1),
    "llama wide heads": dict(head_dim=32),
    "llama biases": dict(attention_bias=True, mlp_bias=True),
    "llama tied": dict(tie_word_embeddings=True),
    "llama linear": rope("linear", factor=4.0),
    "llama yarn": YARN,
    "llama llama3": LLAMA3,
    "llama eager": dict(attn_implementation="eager"),
    "internlm3": {},
    "iquestcoder": {},
    "phi": rope("default", partial_rotary_factor=0.5),
    "phi qk_layernorm": dict(qk_layernorm=True) | rope("default", partial_rotary_factor=0.5),
    "phi3": {},
    "phi3 partial": rope("default", partial_rotary_factor=0.75),
    "phimoe": LOCAL,
    "mistral": dict(sliding_window=None),
    "ministral": FULL,
    "ministral sliding": MIXED,
    "ministral3": {},
    "qwen2": {},
    "qwen2 sliding": dict(use_sliding_window=True, sliding_window=20, max_window_layers=2),
    "qwen2_moe": EXPERTS | dict(shared_expert_intermediate_size=32),
    "qwen3": {},
    "qwen3 yarn": YARN,
    "qwen3_moe": EXPERTS,
    "gemma": {},
    "gemma2": FULL,
    "gemma2 sliding": MIXED,
    "gemma3_text": FULL,
    "gemma3_text sliding": MIXED,
    "vaultgemma": FULL,
    "gpt_oss": LOCAL | FULL,
    "gpt_oss sliding": LOCAL | MIXED,
    "olmo": dict(clip_qkv=1.0),
    "olmo2": {},
    "olmo3": FULL,
    "olmo3 sliding": MIXED,
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "cohere": {},
    "cohere qk_norm": dict(use_qk_norm=True),
    "cohere2": FULL,
    "cohere2 sliding": MIXED,
    "stablelm": rope("default", partial_rotary_factor=0.25),
    "stablelm parallel": dict(use_parallel_residual=True, qk_layernorm=True),
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED | dict(first_k_dense_replace=1, use_qk_norm=True),
    "granite": dict(attention_multiplier=0.5, residual_multiplier=0.5, logits_scaling=2.0),
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL | dict(shared_intermediate_size=32),
    "mixtral": LOCAL,
    "smollm3": {},
    "smollm3 all rotary": dict(no_rope_layers=[1] * LAYERS),
    "llama4_text": LOCAL | dict(layer_types=CHUNKED, attention_chunk_size=20, floor_scale=8, intermediate_size_mlp=64),
    "llama4_text full": LOCAL | FULL | dict(no_rope_layers=[1] * LAYERS, intermediate_size_mlp=64),
    "starcoder2": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_bigcode mha": dict(multi_query=False),
    "opt": OPT,
    "opt after": OPT | dict(do_layer_norm_before=False),
    "biogpt": {},
    "nemotron": {},
    "exaone4": FULL,
    "exaone4 no window": FULL | dict(sliding_window=None),
    "exaone4 sliding": MIXED,
    "exaone_moe": EXPERTS | MIXED,
    "apertus": {},
    "arcee": {},
    "ernie4_5": {},
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    "helium": {},
    "seed_oss": {},
    "bitnet": {},
    "dots1": ROUTED | SHARED,
    "doge": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "minimax_m2": LOCAL,
    "nanochat": {},
    "cwm": FULL,
    "cwm sliding": MIXED,
    "afmoe": EXPERTS | MIXED,
    "solar_open": ROUTED | SHARED,
    "jais2": {},
    "hyperclovax": {},
    "hy_v3": EXPERTS,
    "mellum": EXPERTS | FULL,
    "laguna": EXPERTS | FULL,
    "aria_text": dict(moe_num_experts=4, moe_topk=2),
    "granitemoehybrid": HYBRID,
    "granitemoehybrid rotary": HYBRID | dict(position_embedding_type="rope"),
    "modernbert-decoder": FULL,
    "modernbert-decoder sliding": MIXED | dict(local_attention=20),
    "granite_swa": FULL,
    "granite_swa sliding": MIXED,
    "kolibri1": EXPERTS | FULL | dict(shared_expert_intermediate_size=32),
    "flint": EXPERTS | FULL | dict(shared_expert_intermediate_size=32),
    "flint sliding": EXPERTS | MIXED | dict(shared_expert_intermediate_size=32),
    "cohere2_moe": EXPERTS | FULL,
    "exaone_moe full": EXPERTS | FULL,
    "afmoe full": EXPERTS | FULL,
    "gemma4_text": PER_LAYER | FULL,
    "gemma4_text sliding": PER_LAYER | MIXED,
    "granitemoe_swa": LOCAL | FULL,
    "mimo_v2_flash": ROUTED,
    "gpt_neox": {},
    "gpt_neox all rotary": dict(use_parallel_residual=False) | rope("default", partial_rotary_factor=1.0),
    "persimmon": {},
    "persimmon no norm": dict(qk_layernorm=False),
    "dbrx": DBRX,
    "bert": dict(is_decoder=True),
    "roberta": dict(is_decoder=True),
    "ctrl": dict(n_embd=64, n_head=4, n_layer=LAYERS, dff=64),
}

GPTJ = hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS")  # from transformers 5.24 on
if GPTJ:
    CONFIGURATIONS["gptj"] = dict(rotary_dim=8)

WINDOW = "has a sliding window of .* tokens, which needs the original distances: take positions='original'"
NOT_ONE = (
    "needs rotary positions in the form that Llama has them.*; {}.* has none, or another form: take positions='orig"
)
COSINES = "needs one cosine for each number of a head that is rotated, which GptOssForCausalLM does not have"

NOT_MOVED = {name: WINDOW for name in CONFIGURATIONS if name.endswith("sliding")} | {
    "exaone_moe": WINDOW,
    "afmoe": WINDOW,
    "gpt_oss": COSINES,
    "gpt_oss sliding": COSINES,
    # Another set for each kind of layer.
    "gemma3_text sliding": NOT_ONE.format("Gemma3"),
    "gemma4_text sliding": NOT_ONE.format("Gemma4"),
    "olmo3 sliding": NOT_ONE.format("Olmo3"),
    "mimo_v2_flash": NOT_ONE.format("MiMoV2Flash"),
    # None.
    "gpt2": NOT_ONE.format("GPT2"),
    "gpt_bigcode": NOT_ONE.format("GPTBigCode"),
    "gpt_bigcode mha": NOT_ONE.format("GPTBigCode"),
    "opt": NOT_ONE.format("OPT"),
    "opt after": NOT_ONE.format("OPT"),
    "biogpt": NOT_ONE.format("BioGpt"),
    "granitemoehybrid": NOT_ONE.format("GraniteMoeHybrid"),
    "bert": NOT_ONE.format("Bert"),
    "roberta": NOT_ONE.format("Roberta"),
    "ctrl": NOT_ONE.format("CTRL"),
    # A function of another form.
    **({"gptj": NOT_ONE.format("GPTJ")} if GPTJ else {}),
    # Each layer a copy of its own, as complex numbers, or under the name of the one kind of layer there is.
    "llama4_text": NOT_ONE.format("Llama4"),
    "llama4_text full": NOT_ONE.format("Llama4"),
    "gemma3_text": NOT_ONE.format("Gemma3"),
    "gemma4_text": NOT_ONE.format("Gemma4"),
    "olmo3": NOT_ONE.format("Olmo3"),
    "mellum": NOT_ONE.format("Mellum"),
    "laguna": NOT_ONE.format("Laguna"),
    "modernbert-decoder": NOT_ONE.format("ModernBertDecoder"),
    "modernbert-decoder sliding": NOT_ONE.format("ModernBertDecoder"),
    # A norm with weights follows the rotation.
    "hunyuan_v1_dense": "layer 0 of HunYuanDenseV1ForCausalLM does something else with positions than rotate its keys",
    "hunyuan_v1_moe": "layer 0 of HunYuanMoEV1ForCausalLM does something else with positions than rotate its keys",
}
"""What ``positions="reassigned"`` says to these."""

READ_ALL_WAYS = [name for name in CONFIGURATIONS if name.split()[0] in ("llama", "phi", "gemma2", "gpt_oss", "opt")]
"""The others are read cut alone; moved as well, if they can be."""


@functools.cache
def models(name):
    """A model and itself in float64. Norms, biases and attention sinks are no longer the ones or zeros they were."""
    always = dict(num_hidden_layers=LAYERS, initializer_range=0.1, experts_implementation="eager")
    model = other_family(name.split()[0], **always | CONFIGURATIONS[name])
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model, in_double(model)


def tokens(batch=1):
    return torch.randint(1, 64, (batch, PROMPT + QUESTION), generator=torch.Generator().manual_seed(1))


SCORES = torch.rand(PROMPT, generator=torch.Generator().manual_seed(2))


def read_and_go_on(model, ids, budget, positions):
    """The logits after the prompt, and those of a question: ``(batch, 1 + QUESTION, vocab)``."""
    scorer = scorers.Static(SCORES.expand(LAYERS, len(ids), 1, PROMPT))
    read = chunked_prefill(model, ids[:, :PROMPT], scorer, budget, CHUNK, positions=positions)
    with torch.no_grad():
        return torch.cat([read.logits[:, None], model(ids[:, PROMPT:], **cache_argument(read.cache)).logits], dim=1)


def passes():
    """What each forward pass has before it, and its own tokens: the best of all chunks so far, and a chunk."""
    held = []
    for start in range(0, PROMPT, CHUNK):
        chunk = range(start, min(start + CHUNK, PROMPT))
        yield held, chunk
        held = sorted(sorted([*held, *chunk], key=lambda unit: -SCORES[unit].item())[:BUDGET])
    yield held, range(PROMPT, PROMPT + QUESTION)


@contextmanager
def hooked(hooks):
    """The models are shared: what was hooked is unhooked, whatever happens."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def masked(model, ids):
    """One forward pass; layers without a window see what a mask says."""
    visible = torch.zeros(ids.shape[-1], ids.shape[-1], dtype=torch.bool)
    for held, chunk in passes():
        for row in chunk:
            visible[row, [*held, *range(chunk.start, row + 1)]] = True
    mask = torch.zeros(1, 1, *visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * LAYERS
    evicting, done = {i for i, kind in enumerate(types) if kind == "full_attention"}, set()

    def hide(module, args, kwargs):
        if module.layer_idx in evicting and "attention_mask" in kwargs:
            done.add(module.layer_idx)
            return args, kwargs | {"attention_mask": mask}
        return args, kwargs

    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    with torch.no_grad(), hooked([module.register_forward_pre_hook(hide, with_kwargs=True) for module in modules]):
        logits = model(ids, use_cache=False).logits[:, PROMPT - 1 :]
    assert done == evicting
    return logits


class CutByHand(DynamicCache):
    """transformers' own cache; beside a layer's keys, what was given to the model's rotary function, if anything was.

    Raw keys may be a part of each key, where that is all that the model rotates; and a norm may follow.
    """

    def __init__(self, model):
        super().__init__(config=model.config)
        decoder = model.get_decoder()
        self.module = sys.modules[type(decoder).__module__]
        self.angles, self.rotate = decoder.rotary_emb, self.module.apply_rotary_pos_emb
        self.given, self.raw, self.norms, self.norm = None, [None] * LAYERS, [None] * LAYERS, None
        names = "k_norm", "key_layernorm"
        self.found = [getattr(module, name, None) for module in model.modules() for name in names]

    @contextmanager
    def watching(self):
        hooks = [module.register_forward_hook(self.normed) for module in self.found if module is not None]
        with hooked(hooks), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(self.module, "apply_rotary_pos_emb", self.rotated)
            yield self

    def rotated(self, query, keys, *args, **kwargs):
        self.given, self.norm = keys, None
        return self.rotate(query, keys, *args, **kwargs)

    def normed(self, module, _args, _output):
        self.norm = module

    def update(self, keys, values, layer_idx, *args, **kwargs):
        given, self.given, before = self.given, None, self.raw[layer_idx]
        self.norms[layer_idx] = self.norm or torch.nn.Identity()
        self.raw[layer_idx] = given if given is None or before is None else torch.cat([before, given], dim=2)
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def cut(self, slots):
        places = torch.arange(len(slots))[None]
        for i, (layer, raw) in enumerate(zip(self.layers, self.raw, strict=True)):
            layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]
            if raw is not None:
                self.raw[i] = raw = raw[:, :, slots]
                turned = self.norms[i](self.rotate(raw, raw, *self.angles(raw, places))[1])
                layer.keys = torch.cat([turned, layer.keys[..., raw.shape[-1] :]], dim=-1)


def moved(model, ids):
    """Pass by pass; before each one the kept units move to 0, 1, …, and the new ones follow."""
    units, logits = [], []
    with CutByHand(model).watching() as cache, torch.no_grad():
        for held, chunk in passes():
            if held != units:
                cache.cut([units.index(unit) for unit in held])
            places = torch.arange(len(held), len(held) + len(chunk))[None]
            new = ids[:, chunk.start : chunk.stop]
            logits.append(model(new, **cache_argument(cache), position_ids=places).logits)
            units = [*held, *chunk]
    return torch.cat(logits, dim=1)[:, PROMPT - 1 :]


@pytest.mark.parametrize("name", READ_ALL_WAYS)
def test_whole_it_is_the_full_forward_pass(name):
    ids = tokens(2)
    with torch.no_grad():
        expected, exact = (model(ids).logits[:, PROMPT - 1 :] for model in models(name))
    for positions in ("original",) if name in NOT_MOVED else ("original", "reassigned"):
        assert_as_exact(read_and_go_on(models(name)[0], ids, PROMPT, positions), expected, exact)


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name in NOT_MOVED or name in READ_ALL_WAYS])
def test_cut_it_is_attention_with_those_units_masked(name):
    got = read_and_go_on(models(name)[0], tokens(), BUDGET, "original")
    assert_as_exact(got, *(masked(model, tokens()) for model in models(name)))


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in NOT_MOVED])
def test_cut_and_moved_it_is_attention_to_raw_keys_in_their_new_places(name):
    got = read_and_go_on(models(name)[0], tokens(), BUDGET, "reassigned")
    assert_as_exact(got, *(moved(model, tokens()) for model in models(name)))


def test_the_oracles_tell_apart_what_is_read():
    rough, exact = models("llama")
    results = [(masked(rough, tokens()), masked(exact, tokens())), (moved(rough, tokens()), moved(exact, tokens()))]
    with torch.no_grad():
        results.append(tuple(model(tokens()).logits[:, PROMPT - 1 :] for model in (rough, exact)))
    for one, other in itertools.permutations(results, 2):
        with pytest.raises(AssertionError, match="times the"):
            assert_as_exact(one[0], *other)


@pytest.mark.parametrize(("name", "message"), NOT_MOVED.items(), ids=NOT_MOVED)
def test_what_cannot_move_is_told_so(name, message):
    with pytest.raises(ValueError, match=message):
        read_and_go_on(models(name)[0], tokens(), BUDGET, "reassigned")


# Models that cannot be read, whatever the positions.


def family(name, **options):
    return functools.partial(other_family, name, **options)


def made(model, config, **options):
    return lambda: model(config(vocab_size=64, pad_token_id=0, **options)).eval()


def bart(encoder_layers, decoder_layers):
    sizes = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    layers = dict(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    return made(transformers.BartForCausalLM, transformers.BartConfig, d_model=64, **sizes, **layers)


def falcon(**options):
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    return made(transformers.FalconForCausalLM, transformers.FalconConfig, **sizes, **options)


def tuned(config, **options):
    options |= dict(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return lambda: peft.get_peft_model(other_family("llama"), config(**options)).eval()


T5 = dict(d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
MLLAMA = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
MLLAMA |= dict(num_hidden_layers=3, cross_attention_layers=[1])
MLA = ROUTED | dict(num_key_value_heads=4)
GPT = dict(n_embd=64, n_head=4, n_layer=2)

FULL2 = ["full_attention"] * 2
UNWATCHED = "has attention that can be watched in 0 of its 2 layers: each needs a module of its own with query"
PAST = "Attention computes its attention past transformers' interface: it cannot be watched"
CROSS = "layer .* attends to something else than its own text so far .*: plpkg.retention reads with decoders alone"
VIRTUAL = r"puts virtual tokens before the prompt \({}\), which have no ids"
LINEAR = "has a LinearAttentionLayer, which cannot evict|in [01] of its 2 layers"

REFUSED = {
    "diffllama": (family("diffllama"), "DiffLlamaAttention calls its attention more than once: it cannot be watched"),
    "codegen": (family("codegen", rotary_dim=8, **GPT), f"{PAST}|has its fused projection's outputs in another order"),
    "t5": (made(transformers.T5ForConditionalGeneration, transformers.T5Config, **T5), UNWATCHED),
    "bart": (bart(2, 2), CROSS),
    "bart, more decoder": (bart(1, 2), CROSS),
    "gemma3_text, both ways": (family("gemma3_text", use_bidirectional_attention=True), CROSS),
    "gemma4_text, no values": (
        family("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=FULL2, **PER_LAYER),
        UNWATCHED,
    ),
    "deepseek_v3": (family("deepseek_v3", **MLA), UNWATCHED),
    "deepseek_v2": (family("deepseek_v2", **MLA), UNWATCHED),
    "minicpm3": (family("minicpm3"), UNWATCHED),
    "mllama": (made(transformers.MllamaForCausalLM, MllamaTextConfig, **MLLAMA), CROSS),
    "gpt_neo": (family("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global"], 2]]), UNWATCHED),
    "openai-gpt": (family("openai-gpt", **GPT), UNWATCHED),
    "falcon": (falcon(), PAST),
    "falcon alibi": (falcon(alibi=True), PAST),
    "bloom": (family("bloom", n_head=4, n_layer=2), PAST),
    "mpt": (family("mpt", d_model=64, n_heads=4, n_layers=2), PAST),
    "jetmoe": (family("jetmoe"), UNWATCHED),
    "bert": (family("bert"), CROSS),
    "xglm": (family("xglm", d_model=64, ffn_dim=64, attention_heads=4, num_layers=2), PAST),
    "mamba": (family("mamba"), LINEAR),
    "lfm2": (family("lfm2", layer_types=["conv", "full_attention"]), LINEAR),
    "qwen3_next": (family("qwen3_next", shared_expert_intermediate_size=32, **EXPERTS), LINEAR),
    "minimax": (family("minimax", **LOCAL), LINEAR),
    "bamba": (family("bamba", mamba_n_heads=8, attn_layer_indices=[1]), LINEAR),
    "zamba2": (family("zamba2", n_mamba_heads=8, layers_block_type=["mamba", "hybrid"]), LINEAR),
    "zaya": (family("zaya"), LINEAR.replace("AttentionL", "AttentionAndFullAttentionL")),
    "mistral, all sliding": (family("mistral", sliding_window=20), "every layer of MistralForCausalLM has a sliding"),
    "no head": (
        lambda: other_family("llama").model,
        "LlamaModel has no head for a language: give the causal language model itself",
    ),
    "data parallel": (lambda: torch.nn.DataParallel(other_family("llama")), "DataParallel has no head for a language"),
    "prompt tuning": (tuned(peft.PromptTuningConfig), VIRTUAL.format("PROMPT_TUNING")),
    "p-tuning": (tuned(peft.PromptEncoderConfig, encoder_hidden_size=32), VIRTUAL.format("P_TUNING")),
    "prefix tuning": (tuned(peft.PrefixTuningConfig), VIRTUAL.format("PREFIX_TUNING")),
}

if not GPTJ:
    REFUSED["gptj"] = (family("gptj", rotary_dim=8), PAST)

NOT_SO = ("take positions='original'", "came while nobody watched", "in 2 of its 1 layers")
"""What no true sentence says to these: the original positions are refused as well, and nobody was away."""


@functools.cache
def unreadable(name):
    return REFUSED[name][0]()


@pytest.mark.parametrize("positions", ["original", "reassigned"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_told_so(name, positions):
    with pytest.raises(ValueError, match=REFUSED[name][1]) as told:
        chunked_prefill(unreadable(name), tokens(), scorers.SinkRecent(), BUDGET, CHUNK, positions=positions)
    assert not any(part in str(told.value) for part in NOT_SO)
    if "tuning" in name:
        with pytest.raises(ValueError, match=REFUSED[name][1]):
            cis_labels(unreadable(name), tokens(), 9)


def read(model, length):
    ids = torch.ones(1, length, dtype=torch.long)
    return chunked_prefill(model, ids, scorers.SinkRecent(), BUDGET, 100, positions="original")


def ask(model, tokens=30, new=1):
    return read(model, 500).ask(model, torch.ones(1, tokens, dtype=torch.long), max_new_tokens=new)


FEW = dict(max_position_embeddings=512)


@pytest.mark.parametrize(
    ("make", "use", "got"),
    [
        (family("gpt2", n_positions=512), lambda model: read(model, 600), 600),
        (family("gpt_bigcode", n_positions=512), lambda model: read(model, 600), 600),
        (family("opt", **OPT | FEW), lambda model: read(model, 600), 600),
        (family("biogpt", **FEW), lambda model: read(model, 600), 600),
        (family("bert", is_decoder=True, **FEW), lambda model: read(model, 600), 600),
        (family("roberta", is_decoder=True, max_position_embeddings=513), lambda model: read(model, 513), 513),
        (family("gpt2", n_positions=512), ask, 530),
        (family("opt", **OPT | FEW), ask, 530),
        (family("biogpt", **FEW), lambda model: (ask(model, 3, 10), ask(model, 3, 11)), 513),
    ],
    ids=["gpt2", "gpt_bigcode", "opt", "biogpt", "bert", "roberta", "gpt2 asked", "opt asked", "biogpt answers"],
)
def test_beyond_learnt_positions_there_are_none(make, use, got):
    model = make()
    with pytest.raises(ValueError, match=f"has 512 learnt positions, got {got} tokens"):
        use(model)


class OfItsOwn(LlamaAttention):
    def forward(self, hidden_states, **named):
        states = (projection(hidden_states).unflatten(-1, (2, 16)) for projection in (self.k_proj, self.v_proj))
        cache_among(named).update(*(each.transpose(1, 2) for each in states), self.layer_idx)
        return hidden_states, None


def test_attention_that_nobody_shows_is_refused():
    model = other_family("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = OfItsOwn
    with pytest.raises(ValueError, match="OfItsOwn computes its attention past transformers' interface"):
        read(model, 10)


FUSED = ["phi3", "gpt2", "gpt_bigcode", "gpt_bigcode mha", "gpt_neox", "gpt_neox all rotary", "persimmon no norm"]


@pytest.mark.parametrize("name", ["llama", "bert", *FUSED])
def test_projections_are_shown_side_by_side(name):
    """At position 0 nothing is rotated: there they are query, key and value as the attention gets them."""
    _, model = models(name)
    ids, shown = tokens()[:, :1], []
    with watching(model, Watch(shown.append, torch.tensor([0]), ids)), torch.no_grad():
        model(ids, position_ids=torch.tensor([[0]]))
    assert len(shown) == LAYERS
    for units in shown:
        states = [each.transpose(1, 2).flatten(2) for each in (units.query, units.keys, units.values)]
        torch.testing.assert_close(units.projected, torch.cat(states, dim=-1))


def test_what_a_tokenizer_gives_may_be_read():
    model, ids = other_family("llama"), tokens()
    encoded = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    both = [chunked_prefill(model, given, scorers.KeyNorm(), BUDGET, CHUNK).logits for given in (ids, encoded)]
    assert torch.equal(*both)
    with pytest.raises(ValueError, match="1 tokens of input_ids are padding"):
        chunked_prefill(
            model, {**encoded, "attention_mask": (ids != ids[0, 0]).long()}, scorers.KeyNorm(), BUDGET, CHUNK
        )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"input_ids must be token ids, \(tokens,\) or \(batch, seq\), got \(0,\)"),
        ("a text", "got 'a text'"),
        (torch.ones(1, 3), r"got \(1, 3\) of torch.float32"),
        (torch.tensor([[1, 64]]), "input_ids must be within the 64 tokens of LlamaForCausalLM, got 1 to 64"),
        (torch.tensor([[-1, 3]]), "got -1 to 3"),
    ],
)
def test_what_are_no_ids_is_told_so(ids, message):
    with pytest.raises(ValueError, match=message):
        chunked_prefill(other_family("llama"), ids, scorers.KeyNorm(), BUDGET, CHUNK)
