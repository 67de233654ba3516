"""Each scorer beside its definition, worked out from attention that the model itself returns."""

import pytest
import torch

from plpkg.retention import chunked_prefill, scorers
from plpkg.retention.scorers import H2O, KeyNorm, Random, SinkRecent, SirLlm, SnapKv
from tests.retention.conftest import in_double

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


def test_h2o_shares_its_budget_with_recent_units(model, ids):
    scorer = H2O(sink=2)
    read = chunked_prefill(model, ids, scorer, 12, 5)
    assert scorer.recent == 0  # the caller's is left as it was
    assert (read.log[-1].kept[..., -5:] == torch.arange(SEQ - 5, SEQ)).all()
    assert (read.log[-1].kept[..., :2] == torch.arange(2)).all()
    more = chunked_prefill(model, ids, H2O(recent=8, recent_share=0.1), 12, 5)
    assert (more.log[-1].kept[..., -8:] == torch.arange(SEQ - 8, SEQ)).all()
    with pytest.raises(ValueError, match=r"recent_share must be at least 0 and at most 1, got 1.5"):
        H2O(recent_share=1.5)


def test_one_scorer_for_two_prompts(model, ids):
    scorer = H2O()
    first = chunked_prefill(model, ids, scorer, 12, 5)
    chunked_prefill(model, ids, scorer, 200, 5)
    with first.evicting():
        model.generate(**first.inputs(), max_new_tokens=5, do_sample=False)
    assert (first.log[-1].kept[..., -6:] == torch.arange(SEQ - 1, SEQ + 5)).all()


def test_sirllm_and_sink_recent_protect_the_first_four():
    assert SirLlm().sink == SinkRecent().sink == 4


def test_snapkv_is_the_last_queries_attention_pooled(model, ids, attentions):
    """The last chunk has nine tokens, so the window of four lies in it."""

    def pooled(attention):
        paid = attention[..., -4:, :].sum(dim=4).mean(dim=3)  # (layers, batch, kv_heads, seq)
        return torch.stack([paid[..., max(0, i - 2) : i + 3].sum(-1) / 5 for i in range(SEQ)], dim=-1)

    assert_as_exact(scores_of(model, ids, SnapKv(window=4)), *map(pooled, attentions))


def test_snapkv_with_fewer_queries_than_its_window(model, ids):
    """A window of 16 on a last chunk of nine takes those nine."""
    wide, nine = (scores_of(model, ids, SnapKv(window=window)) for window in (16, 9))
    assert torch.equal(wide, nine)


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


def test_the_oracle_keeps_what_the_answer_looks_at(model, ids):
    from plpkg.retention import cis_labels

    labels = cis_labels(model, ids, 20)
    read = chunked_prefill(model, ids[:, :20], scorers.Static(labels), 5, 4)
    assert torch.equal(read.log[-1].kept.long(), labels.topk(5).indices.sort().values)


@pytest.mark.parametrize("name", ["sink", "recent"])
def test_protection_is_a_number_of_units(name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 0, got -1"):
        KeyNorm(**{name: -1})
