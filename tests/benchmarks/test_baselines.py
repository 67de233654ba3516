import lzma
import random
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks.backbones import baselines

from rounding import assert_close, relative

VOCAB = 5


class Slow:
    """The paper's recursion, word for word: tuples in dictionaries, one probability at a time."""

    def __init__(self, documents, order):
        self.order = order
        self.occurrences = Counter()
        for document in documents:
            padded = [VOCAB] * (order - 1) + list(document)
            for end in range(order - 1, len(padded)):
                for n in range(1, order + 1):
                    self.occurrences[tuple(padded[end - n + 1 : end + 1])] += 1
        self.discounts = [self.closed_form(n) for n in range(1, order + 1)]

    def a(self, gram):
        if len(gram) == self.order or gram[0] == VOCAB:
            return self.occurrences[gram]
        return sum(self.occurrences[(left, *gram)] > 0 for left in range(VOCAB + 1))

    def closed_form(self, n):
        have = Counter(self.a(gram) for gram in self.occurrences if len(gram) == n)
        if not (have[1] and have[2] and have[3]):
            return [0.5, 1.0, 1.5]
        y = have[1] / (have[1] + 2 * have[2])
        d1, d2, d3 = 1 - 2 * y * have[2] / have[1], 2 - 3 * y * have[3] / have[2], 3 - 4 * y * have[4] / have[3]
        return [d1, d2, d3] if min(d1, d2, d3) >= 0.001 else [0.5, 1.0, 1.5]

    def p(self, token, context):
        lower = self.p(token, context[1:]) if context else 1 / VOCAB
        following = {w: self.a((*context, w)) for w in range(VOCAB)}
        total = sum(following.values())
        if not total:
            return lower
        discounts = self.discounts[len(context)]
        discount = {w: discounts[min(a, 3) - 1] if a else 0.0 for w, a in following.items()}
        left_over = sum(discount.values()) / total
        return (following[token] - discount[token]) / total + left_over * lower

    def bits(self, document):
        padded = [VOCAB] * (self.order - 1) + list(document)
        ends = range(self.order - 1, len(padded))
        return [-np.log2(self.p(padded[end], tuple(padded[end - self.order + 1 : end]))) for end in ends]


def assert_equal(found, expected, train):
    """But for rounding: an n-gram's count less its discount may be as little as one by the number of tokens."""
    found, expected = (torch.tensor(np.array(numbers), dtype=torch.float64) for numbers in (found, expected))
    highest_order = 5
    terms = highest_order * (VOCAB + 1) * sum(map(len, train))
    assert_close(found, expected, terms, size=np.abs(expected.numpy()).max(initial=1))


def arrays(documents):
    return [np.array(document, dtype=np.int64) for document in documents]


def markov(seed, documents=6, length=60):
    """Texts with something to learn: mostly the next token is the one after the last."""
    rng = np.random.default_rng(seed)
    return [np.cumsum(rng.choice(VOCAB, length, p=[0.1, 0.6, 0.2, 0.05, 0.05])) % VOCAB for _ in range(documents)]


texts = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=12), min_size=1, max_size=5).filter(any)


@given(train=texts, test=texts, order=st.integers(1, 4))
def test_tiny_texts_agree_with_the_recursion(train, test, order):
    model, slow = baselines.KneserNey.fit(arrays(train), vocab=VOCAB, order=order), Slow(train, order)
    assert_equal(model.discounts, slow.discounts, train)
    for document in test:
        assert_equal(model.bits(np.array(document, dtype=np.int64)), slow.bits(document), train)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_texts_with_large_counts_agree_with_the_recursion(seed, order):
    train, test = markov(seed), markov(seed + 10, documents=2)
    model, slow = baselines.KneserNey.fit(train, vocab=VOCAB, order=order), Slow(train, order)
    assert_equal(model.discounts, slow.discounts, train)
    model.discounts = np.random.default_rng(seed).uniform(0.1, [0.9, 1.9, 2.9], (order, 3))
    slow.discounts = model.discounts.tolist()
    for document in test:
        assert_equal(model.bits(document), slow.bits(document), train)


def test_discounts_by_hand():
    # Four tokens once, two twice, one three times, one four times, one five: n = 4, 2, 1, 1 and Y = 4 / (4 + 2 · 2).
    model = baselines.KneserNey.fit([np.repeat(np.arange(9), [1, 1, 1, 1, 2, 2, 3, 4, 5])], vocab=20, order=1)
    assert model.discounts.tolist() == [[1 - 2 / 2 * 2 / 4, 2 - 3 / 2 * 1 / 2, 3 - 4 / 2 * 1 / 1]]
    left_over = (4 * 0.5 + 2 * 1.25 + 3 * 1.0) / 20
    expected = [left_over / 20, (2 - 1.25) / 20 + left_over / 20, (5 - 1.0) / 20 + left_over / 20]
    assert_equal(model.bits(np.array([15, 4, 8])), -np.log2(expected), [range(20)])


def test_an_order_with_few_counts_gets_the_fallback():
    model = baselines.KneserNey.fit([np.arange(VOCAB)], vocab=VOCAB, order=2)
    assert model.discounts.tolist() == [[0.5, 1.0, 1.5]] * 2


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("context", [[], [0], [0, 1, 2, 3], [4, 4, 4, 4], [6, 6, 6, 6], [0, 6, 1]])
def test_probabilities_sum_to_one(context, tuned):
    model = baselines.KneserNey.fit(markov(0), vocab=8, order=4)  # 5, 6 and 7 are in no text
    if tuned:
        model.tune(markov(1))
    bits = [model.bits(np.array([*context, token]))[-1] for token in range(8)]
    rounded = 8 * (4 * 8 + max(bits))  # each p by its orders' sums, and as 2 to a number of bits
    assert np.exp2(-np.array(bits)).sum() == pytest.approx(1, rel=relative(rounded, torch.float64))


def mean_bits(model, documents):
    return np.concatenate([model.bits(document) for document in documents]).mean()


@pytest.mark.parametrize("order", [1, 3, 5])
def test_tuning_gains_within_bounds(order):
    train, validation = markov(0), markov(1)
    model = baselines.KneserNey.fit(train, vocab=VOCAB + 3, order=order)  # of which three are in no text
    before = mean_bits(model, validation)
    tuned = model.tune(validation)
    tokens = sum(map(len, validation))
    assert tuned == pytest.approx(mean_bits(model, validation), rel=relative(tokens, torch.float64))
    assert tuned < before
    assert (model.discounts > 0).all()
    assert (model.discounts <= [1, 2, 3]).all()


def test_tuned_discounts_cannot_be_improved_one_by_one():
    validation = markov(1)
    model = baselines.KneserNey.fit(markov(0, documents=2), vocab=VOCAB, order=4)  # too few for every context
    best = model.tune(validation)
    tuned = model.discounts
    slope = 1e-5  # where L-BFGS-B ends; bits are convex in each discount
    for place in np.ndindex(tuned.shape):
        for step in (-0.05, 0.05):
            model.discounts = tuned.copy()
            model.discounts[place] = np.clip(tuned[place] + step, 0.001, place[1] + 1)
            assert mean_bits(model, validation) >= best - slope * abs(step)


def test_tuning_looks_at_the_counted_tokens_only():
    validation = [np.concatenate([markov(1, documents=1)[0], np.zeros(40, np.int64)])]
    counted = [np.arange(100) < 60]
    masked, short, whole = (baselines.KneserNey.fit(markov(0), vocab=VOCAB, order=3) for _ in range(3))
    assert masked.tune(validation, counted) == short.tune([validation[0][:60]])
    np.testing.assert_array_equal(masked.discounts, short.discounts)
    assert whole.tune(validation) > masked.tune(validation, counted)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_ngrams_do_not_cross_documents(order):
    apart, together = [[0, 1], [2, 3]], [[0, 1, 2, 3]]
    two, one = (baselines.KneserNey.fit(arrays(texts), vocab=VOCAB, order=order) for texts in (apart, together))
    assert two.bits(np.array([0, 1, 2]))[-1] > one.bits(np.array([0, 1, 2]))[-1]
    # Nothing follows 1 within its document, so the order below decides, as after a token never seen.
    assert two.bits(np.array([0, 1, 2]))[-1] == pytest.approx(two.bits(np.array([4, 2]))[-1])
    # Which document comes first makes no difference.
    swapped = baselines.KneserNey.fit(arrays(apart[::-1]), vocab=VOCAB, order=order)
    assert_equal(swapped.bits(np.arange(5)), two.bits(np.arange(5)), apart)


def test_the_first_token_knows_that_it_is_the_first():
    model = baselines.KneserNey.fit(arrays([[0, 1, 1, 1]] * 8), vocab=VOCAB, order=3)
    assert model.bits(np.array([0]))[0] < 1 < model.bits(np.array([1]))[0]


@pytest.mark.parametrize("tuned", [False, True])
def test_unseen_tokens_cost_finite_bits(tuned):
    model = baselines.KneserNey.fit(markov(0), vocab=1000, order=5)
    if tuned:
        model.tune(markov(1))
    bits = model.bits(np.array([0, 999, 998, 1, 2, 997]))
    assert bits.dtype == np.float64
    assert np.isfinite(bits).all()
    assert (bits[[1, 2, 5]] > np.log2(1000)).all()


def test_long_ngrams_are_not_confused():
    # Packed 14 bits a token, five tokens need 70 bits, and in 64 these two contexts would be one.
    texts = [[0, 1, 2, 3, 4], [2**13, 1, 2, 3, 5]]
    model = baselines.KneserNey.fit(arrays(texts), vocab=2**14, order=5)
    for text, other in (texts, texts[::-1]):
        assert model.bits(np.array(text))[-1] < 1 < 2 < model.bits(np.array([*text[:4], other[4]]))[-1]


def test_an_empty_document_has_no_bits():
    model = baselines.KneserNey.fit(markov(0), vocab=VOCAB)
    assert model.bits(np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        ([[0, 7, 5]], {}, "between 0 and vocab - 1 = 4, got 7"),
        ([[0, 1], [-3]], {}, "between 0 and vocab - 1 = 4, got -3"),
        ([], {}, r"at least one document, got \[\]"),
        ([[], []], {}, "at least one token, got 2 documents with none"),
        ([[[0, 1]]], {}, r"1-d integer array, got shape \(1, 2\)"),
        ([[0, 1]], {"order": 0}, "order must be a whole number of at least 1, got 0"),
        ([[0, 1]], {"vocab": 0}, "vocab must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_text_is_named(documents, arguments, message):
    with pytest.raises(ValueError, match=message):
        baselines.KneserNey.fit(arrays(documents), **{"vocab": VOCAB, "order": 2, **arguments})


@pytest.mark.parametrize(
    ("document", "mask", "message"),
    [
        ([0, 5], [True, True], "got 5"),
        ([0, 1], [True], r"must be \(2,\) booleans, got \(1,\) of bool"),
        ([0, 1], [1, 1], r"must be \(2,\) booleans, got \(2,\) of int64"),
        ([0, 1], [False, False], "at least one validation token must count, got 0 in 1 documents"),
    ],
)
def test_bad_validation_is_named(document, mask, message):
    model = baselines.KneserNey.fit(markov(0), vocab=VOCAB)
    with pytest.raises(ValueError, match=message):
        model.tune([np.array(document)], [np.array(mask)])


def test_bits_and_floats_are_named():
    model = baselines.KneserNey.fit(markov(0), vocab=VOCAB)
    with pytest.raises(ValueError, match="got 5"):
        model.bits(np.array([1, 5]))
    with pytest.raises(ValueError, match="of float64"):
        model.bits(np.array([1.0]))


def words(count):
    rng = random.Random(0)
    lexicon = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(2000)]
    return " ".join(rng.choices(lexicon, k=count)).encode()


def test_xz_repetition_is_almost_free():
    text = random.Random(0).randbytes(50_000)
    assert baselines.xz_bits(text, text) < 0.2 * len(text)


def test_xz_noise_costs_eight_bits_a_byte():
    train, test = random.Random(1).randbytes(20_000), random.Random(2).randbytes(20_000)
    assert baselines.xz_bits(train, test) == pytest.approx(8 * len(test), rel=0.01)


def test_xz_counts_what_the_test_text_adds():
    text = words(20_000)
    train, test = text[:80_000], text[80_000:]
    added = baselines.xz_bits(train, test)
    assert 0.1 * len(test) < added / 8 < len(lzma.compress(test, preset=9 | lzma.PRESET_EXTREME))


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs the xz command")
def test_xz_command_line():
    text = words(20_000)
    train, test = text[:80_000], text[80_000:]

    def size(data):
        return len(subprocess.run(["xz", "-9e", "--stdout"], input=data, capture_output=True, check=True).stdout)

    assert baselines.xz_bits(train, test) / 8 == pytest.approx(size(train + test) - size(train), abs=8)


def test_xz_beyond_its_window_is_refused():
    with pytest.raises(ValueError, match=r"looks back 67108864 bytes, got 67108860 \+ 5 of train and test"):
        baselines.xz_bits(bytes(2**26 - 4), b"tests")
