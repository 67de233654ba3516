"""Methods of kvpress under chunked prefill: stand-ins of their interface, and kvpress itself where there is one."""

import numpy as np
import pytest
import torch

from plpkg.retention import chunked_prefill, prefill
from plpkg.retention.cache import EvictingCache
from plpkg.retention.presses import from_press
from plpkg.retention.scorers import H2O, KeyNorm, SinkRecent, SnapKv
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
    in_chunks = [shape for found, shape, cache in seen if found and cache is read.cache]
    assert in_chunks == [shape for _, shape, _ in seen[-10:]]  # two layers, five chunks; what came before were trials
    assert {tuple(shape) for shape in in_chunks} == {(2, 7, 64), (2, 1, 64)}
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


class ReadsRatio(Norm):
    """StreamingLLM as a press has it: it puts zeros where its own ratio says."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        pruned = keys.shape[2] - int(keys.shape[2] * (1 - self.compression_ratio))
        scores = torch.ones_like(keys[..., 0])
        scores[:, :, 2 : 2 + pruned] = 0
        return scores


class WrapsWithScores:
    """CriticalKV as a press has it: the ratio that it reads is that of the press within."""

    def __init__(self):
        self.press = Norm()

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        return scores + self.press.compression_ratio * values.norm(dim=-1)


class Wraps:
    """AdaKV as a press has it: it evicts by what another one scores."""

    def __init__(self):
        self.press = Norm()

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys, values


class OwnBudgets(Norm):
    """PyramidKV as a press has it: another press's scores, and a budget of its own for each layer."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys, values


class Expected:
    """Expected attention as a press has it: the mean query, without the sink's, at positions after the last one."""

    def __init__(self, sink=0, all_of_them=True):
        self.sink, self.all_of_them = sink, all_of_them

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        n = hidden_states.shape[1]
        hidden = hidden_states[:, self.sink :] if self.all_of_them else hidden_states[:, -1:]
        query = module.q_proj(hidden).mean(dim=1).view(len(keys), -1, 1, module.head_dim)
        cos, sin = module.rotary_emb(query, torch.arange(n, n + 1)[None])
        half = module.head_dim // 2
        query = query * cos[:, None] + torch.cat([-query[..., half:], query[..., :half]], dim=-1) * sin[:, None]
        logits = query.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].transpose(-1, -2)
        return logits.softmax(-1).mean(dim=(2, 3))


class ByLength(Norm):
    """What is nearer to the chunk's length counts more: positions that begin anew at each chunk."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -(torch.arange(keys.shape[2]) - hidden_states.shape[1]).abs().expand(keys.shape[:3]) - keys.norm(dim=-1)


class PrefillOnly(Norm):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] == keys.shape[2], "this press only supports prefill"
        return super().score(module, hidden_states, keys, values, attentions, kwargs)


class Draws:
    """Random scores, from its own generator or from torch's."""

    def __init__(self, seed=None):
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.rand(keys.shape[:3], generator=self.generator)


class SumsUp(AttentionSum):
    """It keeps what it saw of earlier chunks."""

    seen = 0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        self.seen = self.seen + 1
        return self.seen * super().score(module, hidden_states, keys, values, attentions, kwargs)


class Alternates(Norm):
    """It keeps whether it was asked before, by a layer or a prompt."""

    sign = 1

    def score(self, *args):
        self.sign = -self.sign
        return self.sign * super().score(*args)


class Overwrites(Norm):
    def score(self, module, hidden_states, keys, *args):
        scores = super().score(module, hidden_states, keys, *args)
        keys.zero_()
        return scores


class DrawsElsewhere:
    def score(self, module, hidden_states, keys, *args):
        return torch.from_numpy(np.random.default_rng().random(keys.shape[:3]))


class Latest:
    """Sink and recent units, by their order alone."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        order = torch.arange(keys.shape[2], dtype=keys.dtype)
        return order.masked_fill(order < 4, 1e4).expand(keys.shape[:3])


class LastQuery:
    """TOVA as a press has it: the last query's attention."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return attentions[:, :, -1].unflatten(1, (keys.shape[1], -1)).mean(dim=2)


class LastQueryHere(H2O):
    def rescore(self, units, stored):
        return next(units.logits(len(units.positions) - 1)).softmax(-1).mean(dim=(2, 3))


@pytest.fixture
def untouched(model, ids):
    """Whether the model reads nothing with a cache that evicts while something is refused."""

    def check(press, match, *, ids=ids, **options):
        EvictingCache(model)  # asks once what the layers do with positions
        passes, chunk_size = [], options.pop("chunk_size", 7)
        options = dict(attentions=False) | options
        rng, before = torch.random.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
        handle = model.register_forward_hook(lambda *_: passes.append(1))
        with pytest.raises(ValueError, match=match) as caught:
            chunked_prefill(model, ids, from_press(press, **options), 12, chunk_size)
        handle.remove()
        assert type(press).__name__ in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not passes, "a chunk was read to its end"
        assert torch.equal(torch.random.get_rng_state(), rng)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert not any("rotary_emb" in module.__dict__ for module in model.modules())
        return caught.value

    return check


@pytest.mark.parametrize(
    ("press", "ours", "options"),
    [
        (Norm(), KeyNorm(), {}),
        (Latest(), SinkRecent(), {}),
        (LastQuery(), LastQueryHere(recent=0), {"attentions": True}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_sound_press_is_taken_for_all_sizes_and_may_decode(model, ids, press, ours, options):
    reads = []
    for scorer in (from_press(press, **options), ours):
        for positions in ("original", "reassigned"):
            read = chunked_prefill(model, ids, scorer, 12, 7, positions=positions, local_len=3, log_positions=True)
            with read.evicting():
                model.generate(**read.inputs(), max_new_tokens=4, do_sample=False)
            reads.append([step.kept for step in read.log])
    for got, expected in zip(reads[:2], reads[2:], strict=True):
        assert len(got) == 9
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("press", "match", "options"),
    [
        (ReadsRatio(), "ReadsRatio reads compression_ratio", {}),
        (ReadsRatio(), "ReadsRatio reads compression_ratio", {"chunk_size": SEQ}),
        (WrapsWithScores(), "WrapsWithScores reads compression_ratio", {}),
        (Wraps(), "which Wraps has not: it wraps Norm and evicts by rules of its own", {}),
        (OwnBudgets(), "OwnBudgets has its scores from a base class and evicts by a compress of its own", {}),
        (Expected(1), r"Expected gives \d+ of \d+ scores that are not finite for a chunk of 1 tokens", {}),
        (Expected(), r"it places queries by the chunk's length, from position 1 on .* and from 1\d on", {}),
        (Expected(0, False), r"it places queries by the chunk's length, from position 1 on .* and from 1\d on", {}),
        (ByLength(), "another method chunk by chunk.*same queries: it goes by the chunk's length", {}),
        (PrefillOnly(), "does not score a chunk of 7 tokens that sees 19 units: this press only supports prefill", {}),
        (WindowAttention(), "does not score a chunk of 1 tokens that sees 13 units: 1 quer", {}),
        (Draws(), "do not follow their units, as random ones", {}),
        (Draws(3), "do not follow their units, as random ones", {}),
        (Alternates(), "gives other scores once it has given some: it keeps what it saw", {}),
        (Overwrites(), "gives other scores when it is asked the same again: it changes keys", {"chunk_size": SEQ}),
        (DrawsElsewhere(), "gives other scores when it is asked the same again: .* not torch's", {"chunk_size": SEQ}),
        (AttentionSum(), "chunk by chunk.*where the queries before the chunk count as well", {"attentions": True}),
        (SumsUp(), "it keeps what it saw", {"attentions": True}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unsound_press_is_refused_before_the_first_chunk(untouched, press, match, options):
    held = {k: v for k, v in vars(press).items() if k != "group"}  # which the press takes from the model
    error = untouched(press, match, **options)
    assert {k: v for k, v in vars(press).items() if k != "group"} == held
    assert len(str(error)) < 320


def test_what_is_the_same_in_one_chunk_only_is_taken_for_one(model, ids):
    for press in (Expected(), Expected(1), PrefillOnly(), Draws(3), ByLength(), WindowAttention()):
        read = chunked_prefill(model, ids, from_press(press), 12, SEQ)
        assert read.cache.kept == 12
        with read.evicting(), pytest.raises(ValueError, match=rf"decoding within .*: {type(press).__name__} "):
            model.generate(**read.inputs(), max_new_tokens=3, do_sample=False)


def test_what_a_press_keeps_of_one_prompt_is_not_for_another(model, ids):
    press = from_press(Alternates())
    assert torch.equal(*(kept(model, ids, press, chunk_size=SEQ) for _ in range(2)))
    chunked_prefill(model, ids[:, :3], press, 2, SEQ)
    assert not vars(press.press)


def test_the_sizes_of_all_chunks_are_known_before_the_first(untouched, ids):
    for seq, local_len in ((22, 0), (24, 0), (23, 2)):  # three chunks of 7, and what is left over
        chunked = dict(budget=12, chunk_size=7, local_len=local_len)
        sizes = prefill._sizes(seq, **chunked)
        assert sizes[:3] == [(7, 7), (7, 14), (7, 19)]
        assert [n for n, _ in sizes[3:]] == {(22, 0): [1], (24, 0): [3], (23, 2): [2]}[seq, local_len]
    untouched(WindowAttention(), "a chunk of 3 tokens that sees 15 units: 3 queries", ids=ids[:, :24])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen2"])
def test_the_trial_is_of_the_model_that_reads(backbone, ids, family, dtype):
    model = backbone(family).to(dtype)
    options = dict(positions="original")
    same = torch.equal(kept(model, ids, from_press(Norm()), **options), kept(model, ids, KeyNorm(), **options))
    assert same or dtype != torch.float32  # the press's norms are rounded to bfloat16, ours are not
    kept(model, ids, from_press(LastQuery(), attentions=True), **options)
    with pytest.raises(ValueError, match="the queries before the chunk count as well"):
        kept(model, ids, from_press(AttentionSum(), attentions=True), **options)
    with pytest.raises(ValueError, match="as random ones"):
        kept(model, ids, from_press(Draws()), **options)


def test_the_trial_leaves_frequencies_that_change_with_the_length(backbone):
    """Dynamic NTK scaling keeps the longest length that it saw, and the trial sees the longest before the first."""
    ids = torch.randint(0, 64, (1, 60), generator=torch.Generator().manual_seed(0))
    options = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
    reads = []
    for scorer in (KeyNorm(), from_press(Norm())):
        model = backbone(options=options, max_positions=16)
        with pytest.warns(UserWarning, match="changes its frequencies"):
            reads.append(chunked_prefill(model, ids, scorer, 20, 20).logits)
    assert torch.equal(*reads)


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
