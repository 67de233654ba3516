"""Scores are compared with a loop that reads one token at a time."""

import math

import pytest
import torch

from plpkg import scoring
from plpkg.backbones import random_backbone
from plpkg.corpora import Document, Tokens, encode
from plpkg.pretraining import train_tokenizer
from plpkg.scoring import Score, score

from rounding import relative, sampling_error

TEXTS = [
    "Private models keep personal text on the device. " * 3,
    "Short.",
    "Kürzer, not shortest: é. " * 2,
]
VOCAB, HIDDEN = 280, 32


def rounding(judged):
    """Relative, of a sum over its tokens of the logarithms of sums over the vocabulary."""
    return relative(judged.tokens + VOCAB)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([Document("a", " ".join(TEXTS))], VOCAB)


@pytest.fixture(scope="module")
def model():
    return random_backbone("llama", vocab=VOCAB, hidden=HIDDEN, max_positions=512)


@torch.no_grad()
def by_hand(model, tokens, seq, stride):
    """Bits of every token, each predicted from the window that scores it first."""
    bits, done, begin = [], 1, 0
    while done < len(tokens):
        window = tokens.ids[begin : begin + seq + 1]
        for i in range(max(1, done - begin), len(window)):
            logits = model(window[:i][None]).logits[0, -1]
            bits.append(-torch.log_softmax(logits.double(), 0)[window[i]].item() / math.log(2))
        done = begin + len(window)
        begin += stride
    return torch.tensor(bits)


@pytest.mark.parametrize(("seq", "stride"), [(512, None), (16, 4), (16, 16), (2, 1), (7, 7)])
def test_equals_one_token_at_a_time(model, tokenizer, seq, stride):
    documents = [Document("d", text, ((3, 6),)) for text in TEXTS]
    judged = score(model, tokenizer, documents, seq=seq, stride=stride, batch=3)
    encoded = encode(documents, tokenizer)
    expected = [by_hand(model, t, seq, stride or seq // 2)[t.scored[1:]] for t in encoded]
    assert judged.bits == pytest.approx(sum(map(torch.sum, expected)).item(), rel=rounding(judged))
    assert judged.tokens == sum(map(len, expected))
    assert judged.num_bytes == sum(int(t.num_bytes[t.scored].sum()) for t in encoded)


def test_batch_size_order_and_encoding_do_not_matter(model, tokenizer):
    one = score(model, tokenizer, TEXTS, seq=16, batch=1)
    other = score(model, tokenizer, TEXTS[::-1], seq=16, batch=7)
    assert other.bits == pytest.approx(one.bits, rel=rounding(one))
    assert (other.tokens, other.num_bytes) == (one.tokens, one.num_bytes)
    assert score(model, tokenizer, encode(TEXTS, tokenizer)) == score(model, tokenizer, TEXTS)


def test_an_untrained_model_needs_the_logarithm_of_its_vocabulary(model, tokenizer):
    judged = score(model, tokenizer, TEXTS)
    # Its logits are normal numbers, independent for each of the different tokens, as the output matrix is.
    variance = model.config.initializer_range**2 * HIDDEN
    different = len(torch.cat([t.ids for t in encode(TEXTS, tokenizer)]).unique())
    nats = sampling_error(variance, different) + variance / 2  # the mean of e^x is e^(σ²/2)
    assert math.log(judged.perplexity) == pytest.approx(math.log(VOCAB), abs=nats)
    bits = judged.bits_per_byte * judged.num_bytes / judged.tokens
    assert bits == pytest.approx(math.log2(VOCAB), abs=nats / math.log(2))


def test_a_score_is_a_table_and_a_line():
    judged = Score(bits=200.0, tokens=100, num_bytes=400)
    assert repr(judged) == "Score(0.500 bits per byte, perplexity 4.00, 100 tokens)"
    assert judged.rows()[0]["perplexity"] == 4
    assert Score(bits=1e6, tokens=100, num_bytes=400).perplexity == math.inf


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (TEXTS[0], {}, "documents must be several documents"),
        (Document("d", TEXTS[0]), {}, "documents must be several documents"),
        ([""], {}, "nothing to score"),
        ([Document("d", "all masked", ((0, 10),))], {}, "nothing to score"),
        ([], {}, "nothing to score"),
        ([Tokens(torch.arange(2), torch.ones(2, dtype=bool), torch.zeros(2))], {}, "1 unmasked tokens stand for no t"),
        (TEXTS, dict(seq=8, stride=9), "stride must be between 1 and seq=8, got 9"),
        (TEXTS, dict(seq=8, stride=0), "stride must be between 1 and seq=8, got 0"),
        (TEXTS, dict(seq=513), "seq must be between 2 and max_position_embeddings=512, got 513"),
        (TEXTS, dict(batch=0), "batch must be a whole number of at least 1, got 0"),
        (TEXTS, dict(seq=1), "seq must be between 2 and max_position_embeddings=512, got 1"),
    ],
)
def test_bad_input_is_named(model, tokenizer, documents, options, message):
    with pytest.raises(ValueError if isinstance(documents, list) else TypeError, match=message):
        score(model, tokenizer, documents, **options)


def test_a_large_vocabulary_means_small_batches(model, tokenizer, monkeypatch):
    shapes = []
    hook = model.register_forward_hook(lambda module, args, output: shapes.append(output.logits.shape))
    expected = score(model, tokenizer, TEXTS, seq=16)
    monkeypatch.setattr(scoring, "LOGITS", 2 * 16 * VOCAB)
    assert max(shape[0] for shape in shapes) > 2
    shapes.clear()
    judged = score(model, tokenizer, TEXTS, seq=16)
    hook.remove()
    assert max(shape[0] for shape in shapes) == 2
    assert judged.bits == pytest.approx(expected.bits, rel=rounding(judged))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_comes_back_even_after_an_error(tokenizer, training):
    noisy = random_backbone("llama", vocab=VOCAB, hidden=HIDDEN, options={"attention_dropout": 0.5}).train(training)
    assert score(noisy, tokenizer, TEXTS) == score(noisy, tokenizer, TEXTS)
    assert noisy.training is training
    with pytest.raises(ValueError, match="tokens 0 to 999, and the model's vocabulary"):
        score(noisy, tokenizer, [Tokens(torch.tensor([0, 999]), torch.ones(2, dtype=bool), torch.ones(2))])
    assert noisy.training is training


def test_bfloat16_logits_are_added_up_in_float32(tokenizer):
    model = random_backbone("llama", vocab=VOCAB, hidden=HIDDEN, dtype=torch.bfloat16)
    documents = encode(TEXTS * 4, tokenizer)
    judged = score(model, tokenizer, documents, batch=1)
    with torch.no_grad():
        logits = torch.cat([model(t.ids[None, :-1]).logits[0] for t in documents]).double()
    nats = torch.nn.functional.cross_entropy(logits, torch.cat([t.ids[1:] for t in documents]), reduction="sum")
    assert judged.bits == pytest.approx(nats.item() / math.log(2), rel=rounding(judged))


def test_a_model_that_gives_no_number_is_refused(model, tokenizer):
    broken = random_backbone("llama", vocab=VOCAB, hidden=HIDDEN)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="log-probabilities add up to nan"):
        score(broken, tokenizer, TEXTS)
