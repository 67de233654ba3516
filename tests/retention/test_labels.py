"""Labels beside a brute force over the attention that transformers itself returns."""

import pytest
import torch

from plpkg.backbones import random_backbone
from plpkg.retention import cis_labels, watch
from tests.retention.conftest import ATTENTION, in_double

from rounding import assert_as_exact

PROMPT = 20


def brute_force(model, ids, first, last):
    """From the eager model's hidden states: full logits of each layer by its own projections and rotation."""
    seen = {}

    def attention(module, query, key, value, mask, scaling, softcap=None, **_):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query @ keys.transpose(2, 3) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen[module.layer_idx] = logits  # (batch, heads, seq, seq), before mask and softmax
        return original(module, query, key, value, mask, scaling=scaling, softcap=softcap)

    import sys

    attention_class = type(next(m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "head_dim")))
    module = sys.modules[attention_class.__module__]
    original = module.eager_attention_forward
    module.eager_attention_forward = attention
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        module.eager_attention_forward = original
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    rows = torch.stack([seen[i] for i in sorted(seen)])[:, :, :, first:last, :PROMPT]
    return rows.amax(dim=3).unflatten(2, (heads, -1)).amax(dim=3)


@pytest.mark.parametrize("family", sorted({family for family, _ in ATTENTION}))
@pytest.mark.parametrize(("rows", "first", "last"), [("answer", 20, 29), ("predicting", 19, 28)])
def test_labels_are_the_brute_force(backbone, ids, family, rows, first, last):
    model = backbone(family, "eager")
    expected, exact = (brute_force(m, ids, first, last) for m in (model, in_double(model)))
    for chunk_size in (4096, 6):
        assert_as_exact(cis_labels(model, ids, PROMPT, rows=rows, chunk_size=chunk_size), expected, exact)


def test_no_more_rows_at_a_time_than_asked(backbone, ids, monkeypatch):
    model = backbone()
    expected, exact = cis_labels(model, ids, PROMPT), brute_force(in_double(backbone(attention="eager")), ids, 20, 29)
    sizes = []
    monkeypatch.setattr(watch, "LOGITS", 2 * 4 * 29 * 2)  # batch, heads, columns: two rows
    logits = watch.Units.logits

    def counted(self, first=0):
        for part in logits(self, first):
            sizes.append(part.shape[3])
            yield part

    monkeypatch.setattr(watch.Units, "logits", counted)
    assert_as_exact(cis_labels(model, ids, PROMPT), expected, exact)
    assert max(sizes) == 2


def test_sdpa_gives_the_same_labels(backbone, ids):
    labels = [cis_labels(backbone(attention=kind), ids, PROMPT) for kind in ("eager", "sdpa")]
    assert_as_exact(*labels, brute_force(in_double(backbone(attention="eager")), ids, 20, 29))


def test_prompts_of_one_token(backbone, ids):
    assert cis_labels(backbone(), ids, 1, rows="predicting").shape == (2, 2, 2, 1)


def test_the_soft_cap_is_in_the_labels(backbone, ids):
    model = backbone("gemma2", "eager", options={"attn_logit_softcapping": 0.05})
    labels = cis_labels(model, ids, PROMPT)
    assert labels.abs().max() <= 0.05
    assert_as_exact(labels, *(brute_force(m, ids, 20, 29) for m in (model, in_double(model))))


def test_the_prompt_runs_in_chunks(backbone, ids):
    model, lengths = backbone(), []
    hook = model.model.layers[0].register_forward_hook(lambda _m, _a, output: lengths.append(output.shape[1]))
    cis_labels(model, ids, PROMPT, chunk_size=8)
    hook.remove()
    assert lengths == [8, 8, 4, 9]


def test_dropout_is_off(backbone, ids):
    model = backbone("gpt2").train()
    assert torch.equal(cis_labels(model, ids, PROMPT), cis_labels(model, ids, PROMPT))
    assert model.training


def test_bad_input_gets_a_sentence(backbone, ids):
    with pytest.raises(ValueError, match="MistralForCausalLM has layers with a sliding window"):
        cis_labels(random_backbone("mistral", vocab=64, options={"sliding_window": 8}), ids, PROMPT)
    with pytest.raises(ValueError, match="prompt_len must be between 1 and seq - 1=28, got 29"):
        cis_labels(backbone(), ids, 29)
    with pytest.raises(ValueError, match="rows must be one of 'answer', 'predicting', got 'all'"):
        cis_labels(backbone(), ids, 5, rows="all")
