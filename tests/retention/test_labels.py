"""Labels beside a brute force over the attention that transformers itself returns."""

import sys

import pytest
import torch

from plpkg.backbones import random_backbone
from plpkg.retention import cis_labels, watch
from tests.retention.conftest import ATTENTION, in_double

from rounding import assert_as_exact

PROMPT = 20


def brute_force(model, ids, first=PROMPT, last=29, prompt=PROMPT):
    """From the eager model's hidden states: full logits of each layer by its own projections and rotation."""
    seen = []

    def attention(module, query, key, value, mask, scaling, softcap=None, **_):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query @ keys.transpose(2, 3) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen.append(logits)  # (batch, heads, seq, seq), before mask and softmax
        return original(module, query, key, value, mask, scaling=scaling, softcap=softcap)

    module = sys.modules[type(model).__module__]
    original = module.eager_attention_forward
    module.eager_attention_forward = attention
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        module.eager_attention_forward = original
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    rows = torch.stack(seen)[:, :, :, first:last, :prompt]
    return rows.amax(dim=3).unflatten(2, (heads, -1)).amax(dim=3)


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
@pytest.mark.parametrize(
    ("rows", "prompt", "first", "last"), [("answer", 20, 20, 29), ("predicting", 20, 19, 28), ("predicting", 1, 0, 28)]
)
def test_labels_are_the_brute_force(backbone, ids, family, attention, rows, prompt, first, last):
    eager = backbone(family, "eager")
    expected, exact = (brute_force(m, ids, first, last, prompt) for m in (eager, in_double(eager)))
    for chunk_size in (4096, 6):
        labels = cis_labels(backbone(family, attention), ids, prompt, rows=rows, chunk_size=chunk_size)
        assert_as_exact(labels, expected, exact)


def test_no_more_rows_at_a_time_than_asked(backbone, ids, monkeypatch):
    model = backbone()
    expected, exact = cis_labels(model, ids, PROMPT), brute_force(in_double(backbone(attention="eager")), ids)
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


def test_the_soft_cap_is_in_the_labels(backbone, ids):
    model = backbone("gemma2", "eager", options={"attn_logit_softcapping": 0.05})
    labels = cis_labels(model, ids, PROMPT)
    assert labels.abs().max() <= 0.05
    assert_as_exact(labels, *(brute_force(m, ids) for m in (model, in_double(model))))


def test_the_prompt_runs_in_chunks_without_dropout(backbone, ids):
    model, lengths = backbone("gpt2").train(), []
    model.transformer.h[0].register_forward_hook(lambda _m, _a, output: lengths.append(output.shape[1]))
    one, two = (cis_labels(model, ids, PROMPT, chunk_size=8) for _ in range(2))
    assert lengths == [8, 8, 4, 9] * 2
    assert torch.equal(one, two)
    assert model.training


@pytest.mark.parametrize(
    ("family", "prompt", "options", "message"),
    [
        ("mistral", PROMPT, {}, "MistralForCausalLM has layers with a sliding window"),
        ("llama", 29, {}, "prompt_len must be between 1 and seq - 1=28, got 29"),
        ("llama", 5, dict(rows="all"), "rows must be one of 'answer', 'predicting', got 'all'"),
    ],
)
def test_bad_input_gets_a_sentence(ids, family, prompt, options, message):
    model = random_backbone(family, vocab=64, options={"sliding_window": 8} if family == "mistral" else {})
    with pytest.raises(ValueError, match=message):
        cis_labels(model, ids, prompt, **options)
