"""Each scorer beside its definition, worked out from attention that the model itself returns."""

import re

import pytest
import torch

from plpkg.retention import chunked_prefill, cis_labels, scorers
from plpkg.retention.scorers import H2O, KeyNorm, Random, SinkRecent, SirLlm, SnapKv
from plpkg.retention.watch import Units
from tests.retention.conftest import in_double, other_family

from rounding import assert_as_exact

SEQ, CHUNK = 29, 10


def scores_of(model, ids, scorer, **options):
    """What is stored after all chunks if nothing is evicted: ``(layers, batch, kv_heads, seq)``."""
    read = chunked_prefill(model, ids, scorer, 64, CHUNK, positions="original", **options)
    return torch.stack([layer.scores for layer in read.cache.layers])


@pytest.fixture
def model(backbone):
    return backbone(attention="eager")


@pytest.fixture
def attentions(model, ids):
    """``(layers, batch, kv_heads, group, seq, seq)``, in float32 and float64."""
    with torch.no_grad():
        attentions = [m(ids, output_attentions=True).attentions for m in (model, in_double(model))]
    return [torch.stack(each).unflatten(2, (2, 2)) for each in attentions]


def test_h2o_is_all_attention_that_a_unit_ever_got(model, ids, attentions):
    assert_as_exact(scores_of(model, ids, H2O()), *(each.sum(dim=(3, 4)) for each in attentions))


def test_a_sink_takes_its_part_of_all_attention(ids):
    """gpt-oss has a logit of nobody beside those of the units: what its own eager attention returns is the oracle."""
    full = dict(layer_types=["full_attention"] * 2, attn_implementation="eager", experts_implementation="eager")
    model = other_family("gpt_oss", num_local_experts=4, **full)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(std=2)
        expected = [torch.stack(m(ids, output_attentions=True).attentions) for m in (model, in_double(model))]
    scores = scores_of(model, ids, H2O())
    assert_as_exact(scores, *(each.unflatten(2, (2, 2)).sum(dim=(3, 4)) for each in expected))
    assert scores.sum(dim=-1).max() < 2 * SEQ - 1  # of two heads; without a sink it is 2 · SEQ


def test_attention_with_tensors_that_nobody_knows_is_refused(model, ids):
    units = Units(3, torch.arange(2), ids, unknown=["slopes"], module=model.model.layers[0].self_attn)
    with pytest.raises(ValueError, match=r"layer 3 \(LlamaAttention\) gives its attention slopes, of which nobody"):
        next(units.probabilities())
    own = other_family("doge")
    for use in (lambda: chunked_prefill(own, ids, H2O(), 10, 4), lambda: cis_labels(own, ids, 20)):
        with pytest.raises(ValueError, match=r"\(DogeAttention\) gives its attention a mask of its own, of which"):
            use()
    assert chunked_prefill(own, ids, KeyNorm(), 10, 4).cache.kept == 10


def test_one_scorer_for_two_prompts_shares_its_budget_with_recent_units(model, ids):
    scorer = H2O(sink=2)
    first = chunked_prefill(model, ids, scorer, 12, 5, log_positions=True)
    chunked_prefill(model, ids, scorer, 200, 5)
    with first.evicting():
        model.generate(**first.inputs(), max_new_tokens=5, do_sample=False)
    assert scorer.recent is None  # the caller's is left as it was
    for number, stop in ((5, SEQ), (-1, SEQ + 5)):
        kept = first.log[number].kept
        assert (kept[..., :2] == torch.arange(2)).all()
        assert (kept[..., -5:] == torch.arange(stop - 5, stop)).all()


RULES = {
    "Locret": (lambda: object.__new__(scorers.Locret), 0, 0),
    "Static": (lambda: scorers.Static(torch.zeros(2, 2, 2, SEQ)), 0, 0),
    "Random": (Random, 0, 0),
    "KeyNorm": (KeyNorm, 0, 0),
    "SinkRecent": (SinkRecent, 0, 0),  # its scores are positions
    "SirLlm": (SirLlm, 10, 1000),
    "H2O": (H2O, 12, 4096),
    "H2O with a sink": (lambda: H2O(sink=2), 11, 4095),
    "SnapKv": (SnapKv, 12, 16),
}


@pytest.mark.parametrize(("make", "of_24", "of_8192"), RULES.values(), ids=RULES)
def test_every_method_says_how_many_recent_units_it_protects(make, of_24, of_8192):
    assert [make().recency(budget) for budget in (1, 24, 8192)] == [0, of_24, of_8192]
    assert "Recency: " in make().__doc__


@pytest.mark.parametrize("recent", [0, 7])
def test_one_rule_for_all(model, ids, recent):
    given = torch.arange(SEQ, 0, -1.0).expand(2, 2, 2, SEQ)  # the older, the better
    static = scorers.Static(given, recent=recent)
    for scorer in (static, H2O(recent=recent, recent_share=0.1), SnapKv(recent=recent), SirLlm(recent=recent)):
        assert scorer.started(ids, 12).recent == scorer.recent == recent
    kept = chunked_prefill(model, ids, static, 12, 5, log_positions=True).log[-1].kept
    assert (kept == torch.tensor([*range(12 - recent), *range(SEQ - recent, SEQ)])).all()


def test_snapkv_is_the_last_queries_attention_pooled_before_the_window(model, ids, attentions):
    """The last chunk has nine tokens, so the window of four lies in it."""

    def pooled(attention):
        paid = attention[..., -4:, :].sum(dim=4).mean(dim=3)  # (layers, batch, kv_heads, seq)
        before = paid[..., :-4]
        near = [before[..., max(0, i - 2) : i + 3].sum(-1) / 5 for i in range(SEQ - 4)]
        return torch.cat([torch.stack(near, dim=-1), paid[..., -4:]], dim=-1)

    assert_as_exact(scores_of(model, ids, SnapKv(window=4)), *map(pooled, attentions))


@pytest.mark.parametrize("kernel", [1, 5, 7])
def test_snapkv_chooses_as_published(model, ids, attentions, kernel):
    """The vote of the window's queries for the units before it, pooled by convolution; the window itself stays."""
    window, budget = 4, 12
    vote = attentions[1][..., -window:, :-window].mean(dim=4)  # (layers, batch, kv_heads, group, before), in float64
    ones = torch.ones(1, 1, kernel, dtype=vote.dtype) / kernel
    pooled = torch.conv1d(vote.reshape(-1, 1, SEQ - window), ones, padding=kernel // 2).view(vote.shape).mean(dim=3)
    best = pooled.topk(budget - window).indices.sort().values
    read = chunked_prefill(model, ids, SnapKv(window, kernel), budget, SEQ, log_positions=True)
    assert torch.equal(read.log[-1].kept[..., : budget - window].long(), best)
    assert (read.log[-1].kept[..., budget - window :] == torch.arange(SEQ - window, SEQ)).all()


def test_snapkv_with_fewer_tokens_than_its_window(model, ids):
    """A window of 16 on a last chunk of nine takes those nine."""
    wide, nine = (scores_of(model, ids, SnapKv(window=window)) for window in (16, 9))
    assert torch.equal(wide, nine)
    assert chunked_prefill(model, ids[:, :3], SnapKv(window=4), 64, 3).cache.kept == 3


def test_sirllm_is_the_surprise_at_each_token(model, ids):
    def surprise(model):
        with torch.no_grad():
            log_p = model(ids).logits.log_softmax(-1)
        after_the_first = -log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros(2, 1), after_the_first], dim=1)[None, :, None].expand(2, 2, 2, SEQ)

    scores = scores_of(model, ids, SirLlm(), local_len=4)
    assert_as_exact(scores, surprise(model), surprise(in_double(model)))


def test_key_norm_is_the_projections_norm(model, ids):
    def by_hand(model):
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        keys = model.model.layers[0].self_attn.k_proj(hidden).unflatten(-1, (2, 16))
        return -keys.norm(dim=-1).transpose(1, 2)

    assert_as_exact(scores_of(model, ids, KeyNorm())[0], by_hand(model), by_hand(in_double(model)))


def test_recent_is_the_position(model, ids):
    assert (scores_of(model, ids, SinkRecent()) == torch.arange(SEQ)).all()


def test_random_is_uniform_seeded_and_different_in_every_head(model, ids):
    a, same, other = (scores_of(model, ids, Random(seed)) for seed in (0, 0, 1))
    assert torch.equal(a, same)
    assert not torch.equal(a, other)
    assert a.unique().numel() == a.numel()
    assert 0 <= a.min() < 0.1
    assert 0.9 < a.max() < 1


@pytest.mark.parametrize("shape", [(2, 3, 4), (4,), (1, 2, 2, 4), (2, 2, 1)], ids=str)
def test_scores_of_another_shape_are_named(model, ids, shape):
    class Mine(scorers.AttentionScorer):
        def rescore(self, units, stored):
            return torch.zeros(shape)

    got = re.escape(f"Mine must score (batch, num_kv_heads, kept + n) = (2, 2, 4) units, got {shape}")
    with pytest.raises(ValueError, match=got):
        chunked_prefill(model, ids, Mine(), 10, 4)


def test_the_oracle_keeps_what_the_answer_looks_at(model, ids):
    labels = cis_labels(model, ids, 20)
    read = chunked_prefill(model, ids[:, :20], scorers.Static(labels), 5, 4, log_positions=True)
    assert torch.equal(read.log[-1].kept.long(), labels.topk(5).indices.sort().values)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (KeyNorm, dict(sink=-1), "sink must be a whole number of at least 0, got -1"),
        (KeyNorm, dict(recent=-1), "recent must be a whole number of at least 0, got -1"),
        (H2O, dict(recent_share=1.5), "recent_share must be at least 0 and at most 1, got 1.5"),
        (SnapKv, dict(kernel=4), "kernel must be odd, got 4"),
        (scorers.Static, dict(scores=torch.tensor([[[[1, torch.nan]]]])), r"NaN, got \(1, 1, 1, 2\) with 1 NaN"),
    ],
)
def test_settings_out_of_range_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
