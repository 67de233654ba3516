"""Counts are compared with the recursion itself, in fractions, over a text that is searched anew each time."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from plpkg.backbones import random_backbone
from plpkg.corpora import Document, encode
from plpkg.ngrams import Counts
from plpkg.pretraining import train_tokenizer
from plpkg.scoring import score, token_log_probs

from rounding import assert_close, relative

VOCAB = 5
ROUNDING = 10
"""An order takes two logarithms, an exponential and some sums, of numbers below SIZE."""
SIZE = 10.0
EPS = torch.finfo(torch.float64).eps


def by_hand(documents, orders, context, token, base, weight):
    """p(token | context), a fraction; ``base`` is the model's."""
    p = base
    for n in orders:
        before = tuple(context[len(context) - n + 1 :])
        if len(before) != n - 1 or len(context) < n - 1:
            continue
        after = [d[i] for d in documents for i in range(max(1, n - 1), len(d)) if tuple(d[i - n + 1 : i]) == before]
        a = weight * max(1, len(set(after)))
        p = (after.count(token) + a * p) / (len(after) + a)
    return p


document = st.lists(st.integers(0, VOCAB - 1), max_size=12)
orders = st.sets(st.integers(1, 5), min_size=1).map(sorted)
weight = st.fractions("1/8", 1000, max_denominator=8)


@given(st.lists(document, max_size=4), orders, document, st.integers(0), weight)
def test_equals_the_recursion_in_fractions(documents, orders, ids, seed, weight):
    base = torch.rand(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**63)) + 0.1
    counts = Counts(map(torch.tensor, [d for d in documents if d]), orders)
    exact = [Fraction(p) for p in base.tolist()]
    expected = [by_hand(documents, orders, ids[:i], ids[i], exact[ids[i]], weight) for i in range(1, len(ids))]
    ids = torch.tensor(ids, dtype=torch.long)
    mixed = counts.log_probs(ids, base.log()[ids[1:]], float(weight))
    expected = torch.tensor([math.log(p) for p in expected], dtype=torch.float64)
    assert_close(mixed, expected, ROUNDING * (len(orders) + 1), SIZE)


@given(st.lists(document, min_size=1, max_size=4), orders, document, weight)
def test_the_distribution_sums_to_one_and_is_that_of_each_token(documents, orders, context, weight):
    base = torch.linspace(-1, 1, VOCAB).log_softmax(0)
    counts, context = Counts([torch.tensor(d).long() for d in documents], orders), torch.tensor(context).long()
    mixed = counts.mix(context, base, float(weight))
    assert mixed.exp().sum().item() == pytest.approx(1, rel=relative(VOCAB))  # the base's own sum, in float32
    if len(context):
        for token in range(VOCAB):
            ids = torch.cat([context, torch.tensor([token])])
            alone = counts.log_probs(ids, base[ids[1:]], float(weight))[-1]
            assert_close(alone, mixed[token], ROUNDING * (len(orders) + 1), SIZE)


@given(st.lists(document, max_size=4), orders, document)
def test_the_likeliest_token_is_the_most_frequent_one_behind_the_longest_context(documents, orders, context):
    expected = (0, -1)
    for n in orders:
        before = tuple(context[len(context) - n + 1 :])
        after = [d[i] for d in documents for i in range(max(1, n - 1), len(d)) if tuple(d[i - n + 1 : i]) == before]
        if after and len(context) >= n - 1:
            expected = n - 1, max(dict.fromkeys(after), key=after.count)
    assert Counts([torch.tensor(d).long() for d in documents], orders).likeliest(context) == expected


@given(st.lists(document, max_size=5), st.integers(0, 5))
def test_counts_that_go_on_are_those_of_all(documents, at):
    documents = [torch.tensor(d).long() for d in documents]
    some, everything = Counts(documents[:at]), Counts(documents)
    for ids in documents[at:]:
        some.add(ids)
    assert (len(some), repr(some)) == (len(everything), repr(everything))
    ids = torch.arange(20) % VOCAB
    base = torch.zeros(19)
    assert torch.equal(some.log_probs(ids, base, 3.0), everything.log_probs(ids, base, 3.0))


def test_a_context_does_not_reach_into_another_document():
    counts = Counts([torch.tensor([0, 1]), torch.tensor([2, 3])], orders=(2, 3))
    assert repr(counts) == "Counts(2 n-grams of orders 2, 3)"
    base = torch.tensor([-1.0, -2.0, -3.0])
    mixed = counts.log_probs(torch.tensor([0, 1, 2, 3]), base, 1.0).exp()
    assert mixed.tolist() == pytest.approx([(1 + math.exp(-1)) / 2, math.exp(-2), (1 + math.exp(-3)) / 2])


def test_no_counts_leave_the_model_as_it_is():
    ids, base = torch.tensor([3, 1, 2]), torch.tensor([-900.0, float("nan")])
    mixed = Counts().log_probs(ids, base, 100)
    assert mixed[0].item() == pytest.approx(-900, rel=4 * EPS)  # e^-900 is no float64
    assert mixed[1].isnan()
    assert Counts().log_probs(ids[:1], base[:0], 100).shape == Counts().log_probs(ids[:0], base[:0], 100).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Counts(orders=()), r"orders must rise, and be one at least, got \(\)"),
        (lambda: Counts(orders=(3, 2)), r"orders must rise.*\(3, 2\)"),
        (lambda: Counts(orders=(2, 2)), r"orders must rise.*\(2, 2\)"),
        (lambda: Counts(orders=(0,)), "order must be a whole number of at least 1, got 0"),
        (lambda: Counts(torch.arange(3)), r"a document must be token ids, .* got \(\) of torch.int64"),
        (lambda: Counts([torch.zeros(3)]), r"token ids, .* got \(3,\) of torch.float32"),
        (lambda: Counts([[3, -100]]), "the id of a token must be at least 0, got -100"),
        (lambda: Counts([[0, 1]], (2,)).mix([0], torch.zeros(1, 2), 1), r"base must be \(vocab,\), got \(1, 2\)"),
        (lambda: Counts([[0, 9]], (2,)).mix([0], torch.zeros(2), 1), "token 9 was counted, .* a vocabulary of 2"),
        (lambda: Counts().log_probs(torch.arange(3), torch.zeros(3), 1), r"one number less than the 3 tokens.*\(3,\)"),
        (lambda: Counts().log_probs(torch.arange(3), torch.zeros(2), 0), "weight must be greater than 0, got 0"),
        (lambda: Counts().mix(torch.arange(3), torch.zeros(2), -1), "weight must be greater than 0, got -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


TEXT = "def load(path): return open(path).read()\n"


@pytest.fixture(scope="module")
def scored():
    """A model, its tokenizer, and documents with a masked span, with one window, and with nothing."""
    documents = [Document("a", TEXT * 5, ((3, 6),)), Document("b", "Short."), Document("c", "")]
    tokenizer = train_tokenizer(documents, 280)
    return random_backbone("llama", vocab=280, hidden=32), tokenizer, encode(documents, tokenizer)


@torch.no_grad()
def test_each_tokens_log_prob_is_that_of_the_window_that_scores_it(scored):
    model, tokenizer, documents = scored
    base = token_log_probs(model, tokenizer, documents, seq=16, stride=16, batch=2)
    for tokens, log_probs in zip(documents, base, strict=True):
        assert log_probs.shape == (len(tokens) - 1,)
        assert torch.equal(log_probs.isnan(), ~tokens.scored[1:])
        for i in tokens.scored[1:].nonzero().flatten().add(1).tolist():
            logits = model(tokens.ids[None, 16 * ((i - 1) // 16) : i]).logits[0, -1].double()
            expected = logits.log_softmax(0)[tokens.ids[i]]
            assert log_probs[i - 1].item() == pytest.approx(expected.item(), rel=relative(280))
    assert base[0].isnan().any()


def test_scores_stand_beside_the_models_own(scored):
    model, tokenizer, documents = scored
    base = token_log_probs(model, tokenizer, documents, seq=16, stride=4)
    plain = score(model, tokenizer, documents, seq=16, stride=4)
    empty, own = Counts().score(documents, base, 100), Counts([d.ids for d in documents])
    assert (empty.tokens, empty.num_bytes) == (plain.tokens, plain.num_bytes)
    assert empty.bits == pytest.approx(plain.bits, rel=relative(plain.tokens + 280))
    bits = {weight: own.score(documents, base, weight).bits for weight in (0.1, 1.0, 1e9)}
    assert bits[0.1] < bits[1.0] < bits[1e9] < empty.bits
    assert own.best_weight(documents, base, (1e9, 0.1, 1.0)) == 0.1
    other = Counts([torch.zeros(50, dtype=torch.long)], orders=(1,))  # tokens that never come
    assert other.best_weight(documents, base, (0.1, 1.0, 1e9)) == 1e9
