"""Methods of kvpress under chunked prefill: stand-ins of their interface, and kvpress itself where there is one."""

import pytest
import torch

from plpkg.retention import chunked_prefill
from plpkg.retention.presses import SAME_IN_CHUNKS, from_press
from plpkg.retention.scorers import KeyNorm
from plpkg.retention.watch import Watch, watching

SEQ = 29


class KnormPress:
    """As kvpress has it."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class TOVAPress:
    """As kvpress has it: the last query's attention, all heads together. It rotates the query itself."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        group = module.config.num_attention_heads // module.config.num_key_value_heads
        query = module.q_proj(hidden_states[:, -1:]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        cos, sin = (each[:, None, -1:] for each in kwargs["position_embeddings"])
        half = module.head_dim // 2
        query = query * cos + torch.cat([-query[..., half:], query[..., :half]], dim=-1) * sin
        logits = query.unflatten(1, (-1, group)) @ keys[:, :, None].transpose(-1, -2) * module.head_dim**-0.5
        return logits.softmax(-1).mean(dim=(1, 2, 3))[:, None].expand_as(keys[..., 0])


class SnapKVPress(KnormPress):
    """Its name alone is what is judged."""


def kept(model, ids, scorer, budget=12, chunk_size=7, **options):
    return chunked_prefill(model, ids, scorer, budget, chunk_size, log_positions=True, **options).log[-1].kept


@pytest.mark.parametrize("positions", ["original", "reassigned"])
@pytest.mark.parametrize("chunk_size", [5, 10, SEQ])
def test_a_press_under_chunks_is_the_same_method_here(model, ids, chunk_size, positions):
    options = dict(chunk_size=chunk_size, positions=positions)
    assert torch.equal(kept(model, ids, from_press(KnormPress()), **options), kept(model, ids, KeyNorm(), **options))


@pytest.mark.parametrize("press", [KnormPress(), TOVAPress()], ids=lambda press: type(press).__name__)
def test_chunks_get_the_scores_of_the_whole(model, ids, press):
    """Nothing is cut, so that keys and values are the same."""
    whole, chunks = (chunked_prefill(model, ids, from_press(press), SEQ, size).cache for size in (SEQ, 7))
    for one, other in zip(whole.layers, chunks.layers, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=1e-5)  # float32, two layers


def test_a_press_protects_units_as_others_and_may_decode(model, ids):
    read = chunked_prefill(model, ids, from_press(KnormPress(), sink=2, recent=3), 12, 7, log_positions=True)
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


@pytest.mark.parametrize("press", [SnapKVPress(), {}, lambda: None], ids=lambda press: type(press).__name__)
def test_other_presses_are_refused_in_one_sentence(press):
    with pytest.raises(ValueError, match=f"{type(press).__name__} is not known to score chunks as it scores a whole"):
        from_press(press)


def test_scores_of_another_shape_are_refused(model, ids):
    class KeyDiffPress(KnormPress):
        def score(self, *args):
            return torch.zeros(2, 2, 3)

    with pytest.raises(ValueError, match=r"Press must score .* = \(2, 2, 7\) units, got \(2, 2, 3\)"):
        kept(model, ids, from_press(KeyDiffPress()))


@pytest.mark.parametrize("name", SAME_IN_CHUNKS)
def test_kvpress_itself(model, ids, name):
    kvpress = pytest.importorskip("kvpress")
    scorer = from_press(getattr(kvpress, name)())
    whole, chunks = (chunked_prefill(model, ids, scorer, SEQ, size).cache for size in (SEQ, 7))
    for one, other in zip(whole.layers, chunks.layers, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=1e-5)
