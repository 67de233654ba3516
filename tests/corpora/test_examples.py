"""Examples are compared with loops over single labels."""

import itertools
import re

import pytest
import torch
from hypothesis import given, strategies as st

from plpkg.corpora import Document, Tokens, Vocabulary, sentences
from plpkg.corpora.examples import IGNORED, POOL, Examples, token_examples, word_examples
from plpkg.corpora.words import BEGIN, UNKNOWN


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(count, seed=0):
    x = torch.rand(count, 1, 8, 8, generator=generator(seed))
    return Examples(x, torch.randint(10, (count,), generator=generator(seed)))


def sentences_of_ids(count, seq=6):
    """Ids, each row of a length of its own from 1 to ``seq``."""
    ids = torch.randint(2, 48, (count, seq), generator=generator())
    padding = torch.arange(seq) >= torch.randint(1, seq + 1, (count, 1), generator=generator())
    return Examples(ids.masked_fill(padding, 0), ids.masked_fill(padding, IGNORED))


@st.composite
def sequences(draw, most=12):
    """Examples of sequences, some of whose places, at the end or within, have no label."""
    count, seq = draw(st.integers(1, most)), draw(st.integers(1, 7))
    y = torch.tensor(draw(st.lists(st.lists(st.sampled_from([IGNORED, 0, 3]), min_size=seq, max_size=seq),
                                   min_size=count, max_size=count)))  # fmt: skip
    return Examples(torch.arange(count * seq).reshape(count, seq), y)


def lengths(y):
    """Where each row's last label ends, place by place."""
    return [max((place + 1 for place, label in enumerate(row) if label != IGNORED), default=0) for row in y.tolist()]


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(2, 3), torch.ones(3, dtype=torch.int64)),
        (torch.ones(2, 3), torch.ones(2, 4, dtype=torch.int64)),
        (torch.ones(2), torch.ones(2, 1, dtype=torch.int64)),
        (torch.ones(0, 3), torch.ones(0, dtype=torch.int64)),
        (torch.ones(2, 3), torch.ones(2)),
        (torch.ones(()), torch.ones((), dtype=torch.int64)),
        (torch.ones(2, 3), torch.ones(2, dtype=torch.int32)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, y):
    with pytest.raises(ValueError, match=re.escape(f"x {tuple(x.shape)}, y {tuple(y.shape)} of {y.dtype}")):
        Examples(x, y)


@given(sequences(), st.data())
def test_padding_that_no_sample_needs_is_cut_off(examples, data):
    which = data.draw(st.lists(st.integers(0, len(examples) - 1), min_size=1, max_size=5))
    some = examples[torch.tensor(which)]
    needed = max(1, *(lengths(examples.y)[i] for i in which), 0)
    assert torch.equal(some.x, examples.x[which, :needed])
    assert torch.equal(some.y, examples.y[which, :needed])
    assert some.labels == sum(label != IGNORED for i in which for label in examples.y[i].tolist())


def test_images_and_features_are_cut_by_sample_only_and_chunks_keep_their_order():
    images = pictures(5)
    assert torch.equal(images[1:3].x, images.x[1:3])
    states = Examples(torch.rand(2, 4, 3), torch.tensor([[1, 2, IGNORED, IGNORED], [1, IGNORED, IGNORED, IGNORED]]))
    assert torch.equal(states[:].x, states.x[:, :2])
    images = pictures(10)
    chunks = list(images.chunks(4))
    assert [len(chunk) for chunk in chunks] == [4, 4, 2]
    assert torch.equal(torch.cat([chunk.x for chunk in chunks]), images.x)
    assert torch.equal(torch.cat([chunk.y for chunk in chunks]), images.y)


@given(sequences(most=40), st.integers(1, 5), st.integers(0, 99))
def test_an_epoch_has_each_sample_once(examples, batch, seed):
    order = examples.order(batch, generator(seed))
    assert sorted(torch.cat(order).tolist()) == list(range(len(examples)))
    assert max(map(len, order)) <= batch
    assert sum(len(each) < batch for each in order) <= 1
    again = examples.order(batch, generator(seed))
    assert len(order) == len(again)
    assert all(map(torch.equal, order, again))
    long = lengths(examples.y)
    spans = sorted((min(long[i] for i in each), max(long[i] for i in each)) for each in map(torch.Tensor.tolist, order))
    if len(examples) <= batch * POOL:  # all in one pool: no batch reaches into the lengths of the next
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_the_order_is_drawn_anew_each_time_and_in_no_order_of_length():
    texts, images, drawn = sentences_of_ids(64), pictures(64), generator()
    assert len({str(each.order(4, drawn)) for each in (texts, texts, images, images)}) == 4
    long = torch.tensor(lengths(texts.y))
    firsts = [long[texts.order(4, generator(seed))[0]].max().item() for seed in range(20)]
    assert len(set(firsts)) > 2
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        texts.order(0, drawn)


@given(st.lists(sequences(4), min_size=1, max_size=4))
def test_joined_keeps_every_sample_and_pads_on_the_right(parts):
    joined, row = Examples.joined(iter(parts)), 0
    assert joined.labels == sum(part.labels for part in parts)
    for part in parts:
        seq = part.y.shape[1]
        assert torch.equal(joined.x[row : row + len(part), :seq], part.x)
        assert torch.equal(joined.y[row : row + len(part), :seq], part.y)
        assert (joined.y[row : row + len(part), seq:] == IGNORED).all()
        assert (joined.x[row : row + len(part), seq:] == 0).all()
        row += len(part)
    assert row == len(joined)


def test_joined_images_and_the_table():
    one, two = pictures(3), pictures(4, seed=1)
    joined = Examples.joined([one, two])
    assert torch.equal(joined.x, torch.cat([one.x, two.x]))
    assert torch.equal(joined.y, torch.cat([one.y, two.y]))
    assert joined.rows() == [{"samples": 7, "labels": 7, "classes": len(set(joined.y.tolist()))}]
    assert repr(joined) == "Examples(7 samples of (1, 8, 8), 7 labels)"
    texts = Examples(torch.ones(1, 3), torch.tensor([[4, IGNORED, 4]]))
    assert texts.rows() == [{"samples": 1, "labels": 2, "classes": 1}]


WORDS = Vocabulary(["<unknown>", "<begin>", *"abcde"])


def by_hand(documents, seq, limit):
    """What each place of each row reads and has to say, one word after the other."""
    rows, count = [], 0
    for text in documents:
        for sentence in sentences(Document("", text)):
            for start in range(0, len(sentence), seq):
                words = sentence[start : start + seq]
                reads = [BEGIN, *(WORDS.words.index(w) if w in WORDS.words else UNKNOWN for w in words)]
                says = [WORDS.words.index(w) if w in WORDS.words else IGNORED for w in words]
                rows.append((reads[:-1], says))
            count += len(sentence)
            if limit is not None and count >= limit:
                return rows
    return rows


text = st.lists(st.sampled_from(["a", "B", "c", "d", "e", "unheard", ".", "7", "\n\n"]), max_size=25).map(" ".join)


@given(st.lists(text, max_size=4), st.integers(1, 5), st.none() | st.integers(1, 12))
def test_word_examples_are_the_next_words(documents, seq, limit):
    expected = by_hand(documents, seq, limit)
    if not expected:
        with pytest.raises(ValueError, match="there is no word in the documents"):
            word_examples(documents, WORDS, seq=seq, limit=limit)
        return
    examples = word_examples(map(Document, map(str, range(9)), documents), WORDS, seq=seq, limit=limit)
    longest = max(len(reads) for reads, _ in expected)
    assert examples.x.shape == (len(expected), longest)
    for x, y, (reads, says) in zip(examples.x.tolist(), examples.y.tolist(), expected, strict=True):
        assert (x[: len(reads)], y) == (reads, says + [IGNORED] * (longest - len(says)))
    again = word_examples(documents, WORDS, seq=seq, limit=limit)
    assert torch.equal(again.x, examples.x)


def test_what_is_masked_is_no_word():
    assert torch.equal(
        word_examples([Document("", "a b c. d e", ((2, 5),))], WORDS).y, torch.tensor([[2, IGNORED], [5, 6]])
    )


@st.composite
def tokens(draw):
    ids = draw(st.lists(st.integers(0, 9), max_size=12))
    scored = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return Tokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(scored, dtype=torch.bool), torch.ones(len(ids)))


@given(st.lists(tokens(), max_size=4), st.integers(1, 5), st.none() | st.integers(1, 9))
def test_token_examples_are_the_next_tokens(documents, seq, limit):
    rows, count = [], 0
    for document in documents:
        for place in range(len(document) - 1):
            if place % seq == 0:
                if limit is not None and count >= limit:
                    break
                rows.append(([], []))
            rows[-1][0].append(document.ids[place].item())
            rows[-1][1].append(document.ids[place + 1].item() if document.scored[place + 1] else IGNORED)
            count += 1
    if not rows:
        with pytest.raises(ValueError, match="there is no token to predict in the documents"):
            token_examples(documents, seq=seq, limit=limit)
        return
    examples = token_examples(documents, seq=seq, limit=limit)
    longest = max(len(reads) for reads, _ in rows)
    assert examples.x.tolist() == [reads + [0] * (longest - len(reads)) for reads, _ in rows]
    assert examples.y.tolist() == [says + [IGNORED] * (longest - len(says)) for _, says in rows]


@pytest.mark.parametrize(("make", "given_"), [(word_examples, (["a b"], WORDS)), (token_examples, ([],))])
def test_a_sequence_of_no_word_is_refused(make, given_):
    with pytest.raises(ValueError, match="seq must be a whole number of at least 1, got 0"):
        make(*given_, seq=0)
    with pytest.raises(ValueError, match="limit must be a whole number of at least 1, got 0"):
        make(*given_, limit=0)
