"""Methods of kvpress under chunked prefill: stand-ins of their interface, and kvpress itself where there is one."""

import pytest
import torch

from plpkg.retention import chunked_prefill
from plpkg.retention.scorers import H2O, KeyNorm, SnapKv, from_press
from plpkg.retention.watch import Watch, watching

SEQ, WINDOW = 29, 4


class Norm:
    compression_ratio = 0.5

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class WindowAttention:
    """SnapKV as a press has it: it projects the window's queries again, rotates them, and finds the keys itself."""

    def post_init_from_model(self, model):
        self.group = model.config.num_attention_heads // model.config.num_key_value_heads

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        n, width = hidden_states.shape[1], keys.shape[2]
        assert n >= WINDOW, f"{n} queries are fewer than the window's {WINDOW}"
        assert attentions is None
        query = module.q_proj(hidden_states[:, -WINDOW:]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        cos, sin = (each[:, None, -WINDOW:] for each in kwargs["position_embeddings"])
        half = module.head_dim // 2
        query = query * cos + torch.cat([-query[..., half:], query[..., :half]], dim=-1) * sin
        logits = query.unflatten(1, (-1, self.group)) @ keys[:, :, None].transpose(-1, -2) * module.head_dim**-0.5
        future = torch.ones(WINDOW, width, dtype=torch.bool).triu(width - WINDOW + 1)
        vote = logits.masked_fill(future, float("-inf")).softmax(-1)[..., :-WINDOW].mean(dim=(2, 3))
        pooled = torch.nn.functional.avg_pool1d(vote, 5, stride=1, padding=2)
        return torch.nn.functional.pad(pooled, (0, WINDOW), value=pooled.max().item() + 1)


class AttentionSum:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert attentions is not None, "attention weights are needed"
        batch, kv_heads, _ = keys.shape[:3]
        return attentions.view(batch, kv_heads, -1, *attentions.shape[2:]).sum(dim=(2, 3))


def kept(model, ids, scorer, budget=12, chunk_size=7, **options):
    return chunked_prefill(model, ids, scorer, budget, chunk_size, log_positions=True, **options).log[-1].kept


@pytest.mark.parametrize("positions", ["original", "reassigned"])
@pytest.mark.parametrize("chunk_size", [5, 10, SEQ])
def test_a_press_under_chunks_is_the_same_method_here(model, ids, chunk_size, positions):
    options = dict(chunk_size=chunk_size, positions=positions)
    for press, ours in ((Norm(), KeyNorm()), (WindowAttention(), SnapKv(WINDOW))):
        assert torch.equal(kept(model, ids, from_press(press), **options), kept(model, ids, ours, **options))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_press_may_have_attention_weights(backbone, ids, attention):
    model = backbone(attention=attention)
    press = from_press(AttentionSum(), attentions=True)
    assert torch.equal(kept(model, ids, press, chunk_size=SEQ), kept(model, ids, H2O(recent=0), chunk_size=SEQ))
    with pytest.raises(ValueError, match=r"AttentionSum does not score a chunk of 7 tokens .*: attention weights are"):
        kept(model, ids, from_press(AttentionSum()))


def test_a_press_finds_the_models_rotation_and_leaves_nothing(model, ids):
    seen = []

    class Looks(Norm):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append((module.rotary_emb is model.model.rotary_emb, hidden_states.shape, kwargs["past_key_values"]))
            return super().score(module, hidden_states, keys, values, attentions, kwargs)

    names = [name for name, _ in model.named_modules()]
    read = chunked_prefill(model, ids, from_press(Looks()), 12, 7)
    assert all(found and cache is read.cache for found, _, cache in seen)
    assert {tuple(shape) for _, shape, _ in seen} == {(2, 7, 64), (2, 1, 64)}
    assert [name for name, _ in model.named_modules()] == names
    assert not any("rotary_emb" in module.__dict__ for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_press_protects_units_as_others_and_may_decode(model, ids):
    read = chunked_prefill(model, ids, from_press(Norm(), sink=2, recent=3), 12, 7, log_positions=True)
    kept = read.log[-1].kept
    assert (kept[..., :2] == torch.arange(2)).all()
    assert (kept[..., -3:] == torch.arange(SEQ - 3, SEQ)).all()
    with read.evicting():
        model.generate(**read.inputs(), max_new_tokens=3, do_sample=False)
    assert read.cache.kept == 12


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gemma2"])
def test_other_families_show_what_they_were_called_with(backbone, ids, family):
    model, seen = backbone(family, "eager"), []
    with torch.no_grad(), watching(model, Watch(lambda units: seen.append(units))):
        hidden = model(ids, output_hidden_states=True).hidden_states
    assert [units.inputs["hidden_states"].shape for units in seen] == [hidden[0].shape] * 2
    assert all(hasattr(units.module, "layer_idx") for units in seen)


def test_bad_presses_get_a_sentence(model, ids):
    class Wrong(Norm):
        def score(self, *args):
            return torch.zeros(2, 2, 3)

    with pytest.raises(ValueError, match=r"a press must have score\(module, .*\), which dict has not"):
        from_press({})
    with pytest.raises(ValueError, match=r"Wrong must score .* = \(2, 2, 7\) units, got \(2, 2, 3\)"):
        kept(model, ids, from_press(Wrong()))
    few = "WindowAttention does not score a chunk of 1 tokens that sees 13 units: 1 quer"
    with pytest.raises(ValueError, match=few):
        kept(model, ids, from_press(WindowAttention()))


# Not run in CI, where kvpress, which excludes this transformers, is not installed.


def own_choice(kvpress, model, ids, press):
    """What the press keeps of one prompt by its own ``compress``: ``(layers, batch, kv_heads, kept)`` positions."""
    chosen = []

    def hook(module, _args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        keys, _ = press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
        same = (keys[:, :, :, None] == layer.keys[:, :, None]).all(dim=-1)  # (batch, kv_heads, kept, seq)
        chosen.append(same.float().argmax(-1).sort().values)

    press.post_init_from_model(model)
    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.rotary_emb = model.model.rotary_emb
        model(ids, use_cache=True)
    for layer, handle in zip(layers, hooks, strict=True):
        handle.remove()
        del layer.rotary_emb
    return torch.stack(chosen)


@pytest.mark.parametrize(
    ("name", "options", "attention"),
    [
        ("KnormPress", {}, "sdpa"),
        ("KeyDiffPress", {}, "sdpa"),
        ("TOVAPress", {}, "sdpa"),
        ("ExpectedAttentionPress", dict(n_future_positions=8, n_sink=2, use_covariance=False), "sdpa"),
        ("SnapKVPress", dict(window_size=WINDOW, kernel_size=1), "sdpa"),
        ("SnapKVPress", dict(window_size=WINDOW, kernel_size=5), "sdpa"),
        ("SnapKVPress", dict(window_size=WINDOW, kernel_size=7), "eager"),
        ("ObservedAttentionPress", {}, "eager"),
    ],
)
@pytest.mark.parametrize("ratio", [0.3, 0.6])
def test_in_one_chunk_it_is_the_presss_own_choice(backbone, ids, name, options, attention, ratio):
    kvpress = pytest.importorskip("kvpress", exc_type=ImportError)
    model, press = backbone(attention=attention), getattr(kvpress, name)(compression_ratio=ratio, **options)
    expected = own_choice(kvpress, model, ids, press)
    budget = expected.shape[-1]
    scorer = from_press(press, attentions=attention == "eager")
    assert torch.equal(kept(model, ids, scorer, budget, SEQ, positions="original").long(), expected)
    if name == "SnapKVPress":
        ours = SnapKv(WINDOW, options["kernel_size"])
        assert torch.equal(kept(model, ids, ours, budget, SEQ).long(), expected)
