"""Real architectures and variants of their configurations, each read three ways: whole, cut, and cut and moved.

The oracles are the models themselves. What a cut leaves is worked out here, and is the same in all layers and heads:
so one mask hides what is evicted, and one list says where the kept units move.
"""

import functools
import sys
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from plpkg.retention import chunked_prefill, scorers
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


def rope(kind, **options):
    return dict(rope_parameters={"rope_type": kind, "rope_theta": 1e4} | options)


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

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
    "gptj": dict(rotary_dim=8),
    "gpt_bigcode": {},
    "gpt_bigcode mha": dict(multi_query=False),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=64),
    "opt after": dict(ffn_dim=64, word_embed_proj_dim=64, do_layer_norm_before=False),
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
    "dots1": ROUTED | dict(first_k_dense_replace=1, n_shared_experts=1),
    "doge": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "minimax_m2": LOCAL,
    "nanochat": {},
    "cwm": FULL,
    "cwm sliding": MIXED,
    "afmoe": EXPERTS | MIXED,
    "solar_open": ROUTED | dict(first_k_dense_replace=1, n_shared_experts=1),
    "jais2": {},
    "hyperclovax": {},
    "hy_v3": EXPERTS,
    "mellum": EXPERTS | FULL,
    "laguna": EXPERTS | FULL,
    "aria_text": dict(moe_num_experts=4, moe_topk=2),
    "granitemoehybrid": dict(layer_types=["attention"] * 4, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32),
    "granitemoehybrid rotary": dict(layer_types=["attention"] * 4, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32, position_embedding_type="rope"),
    "modernbert-decoder": FULL, "modernbert-decoder sliding": MIXED|dict(local_attention=20),
    "qwen3_vl_text":{}, "phi4_multimodal":{}, "glm4_moe_lite":ROUTED, "granite_swa":{},"cohere2_moe":EXPERTS|FULL, "gemma4_text":FULL,
    "kolibri1":{}, "mimo_v2_flash":{}, "flint":{}, "hrm_text":{}, "step3p7":{}, "trocr":{},"bitnet 2":{}, "dots3_note_text":{}, "roc_bert":{},
}


NOT_MOVED = {}


@functools.cache
def models(name):
    """A model and itself in float64. Norms, biases and attention sinks are no longer the ones or zeros they begin as."""
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
        return torch.cat([read.logits[:, None], model(ids[:, PROMPT:], past_key_values=read.cache).logits], dim=1)


def passes():
    """What each forward pass has before it, and its own tokens: the best of all chunks so far, and a chunk."""
    held = []
    for start in range(0, PROMPT, CHUNK):
        chunk = range(start, min(start + CHUNK, PROMPT))
        yield held, chunk
        held = sorted(sorted([*held, *chunk], key=lambda unit: -SCORES[unit].item())[:BUDGET])
    yield held, range(PROMPT, PROMPT + QUESTION)


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
    hooks = [module.register_forward_pre_hook(hide, with_kwargs=True) for module in modules]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, PROMPT - 1 :]
    for hook in hooks:
        hook.remove()
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
        self.norm_modules = [getattr(m, n) for m in model.modules() for n in ("k_norm", "key_layernorm") if hasattr(m, n)]

    @contextmanager
    def watching(self):
        hooks = [module.register_forward_hook(self.normed) for module in self.norm_modules if module is not None]
        self.module.apply_rotary_pos_emb = self.rotated
        yield self
        self.module.apply_rotary_pos_emb = self.rotate
        for hook in hooks:
            hook.remove()

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
            logits.append(model(new, past_key_values=cache, position_ids=places).logits)
            units = [*held, *chunk]
    return torch.cat(logits, dim=1)[:, PROMPT - 1 :]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_whole_it_is_the_full_forward_pass(name):
    ids = tokens(2)
    with torch.no_grad():
        expected, exact = (model(ids).logits[:, PROMPT - 1 :] for model in models(name))
    for positions in ("original",) if name in NOT_MOVED else ("original", "reassigned"):
        assert_as_exact(read_and_go_on(models(name)[0], ids, PROMPT, positions), expected, exact)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_cut_it_is_attention_with_those_units_masked(name):
    got = read_and_go_on(models(name)[0], tokens(), BUDGET, "original")
    assert_as_exact(got, *(masked(model, tokens()) for model in models(name)))


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in NOT_MOVED])
def test_cut_and_moved_it_is_attention_to_raw_keys_in_their_new_places(name):
    got = read_and_go_on(models(name)[0], tokens(), BUDGET, "reassigned")
    assert_as_exact(got, *(moved(model, tokens()) for model in models(name)))
