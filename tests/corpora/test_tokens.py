import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from plpkg.corpora import Document, Tokens, Vocabulary, batches, encode, word_examples
from plpkg.pretraining import train_tokenizer

TEXT = "A private, personal model: naïve café, 😀 and 日本語.\n    Indented, again private."


@pytest.fixture(scope="module")
def byte_level():
    return train_tokenizer([Document("a", TEXT * 3)], 300)


def sentencepiece_like(**control):
    """A tokenizer that swallows spaces, and has no token that begins a text unless one is named."""
    words = {"[UNK]": 0, "private": 1, "personal": 2, "<s>": 3, "</s>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **control)


@settings(max_examples=100)
@given(text=st.text(max_size=60), data=st.data())
def test_bytes_add_up_and_masked_characters_are_never_scored(byte_level, text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    document = Document("d", text, ((start, end),) if start < end else ())
    (tokens,) = encode([document], byte_level)
    assert tokens.num_bytes.sum() == len(text.encode())
    offsets = byte_level(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    touched = [any(start <= c < end for c in range(a, b)) for a, b in offsets]
    assert (~tokens.scored[1:]).tolist() == touched


def test_a_document_begins_with_end_of_text_which_is_not_scored(byte_level):
    (tokens,) = encode(["private"], byte_level)
    assert tokens.ids[0] == byte_level.eos_token_id
    assert not tokens.scored[0]
    assert tokens.num_bytes[0] == 0
    assert byte_level.decode(tokens.ids[1:]) == "private"
    assert (tokens.ids.dtype, tokens.scored.dtype, tokens.num_bytes.dtype) == (torch.int64, torch.bool, torch.int64)
    assert len(tokens) == len(tokens.ids)


@pytest.mark.parametrize(
    ("control", "first"),
    [
        ({}, []),
        (dict(bos_token="<s>"), [3]),
        (dict(eos_token="</s>"), [4]),
        (dict(bos_token="<s>", eos_token="</s>"), [3]),
    ],
)
def test_a_document_begins_with_the_beginning_of_text_or_else_its_end(control, first):
    (tokens,) = encode(["private"], sentencepiece_like(**control))
    assert tokens.ids.tolist() == [*first, 1]
    assert tokens.scored.tolist() == [False] * len(first) + [True]


def test_what_a_tokenizer_would_add_is_left_out_and_a_control_token_is_read_as_characters(byte_level):
    adding = copy.deepcopy(byte_level)
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    assert len(adding("private")["input_ids"]) == len(byte_level("private")["input_ids"]) + 2
    (expected,), (plain,) = encode(["private"], byte_level), encode(["private"], adding)
    assert all(torch.equal(a, b) for a, b in zip(vars(expected).values(), vars(plain).values(), strict=True))
    text = "private<|endoftext|>personal"
    (tokens,) = encode([text], byte_level)
    assert 0 not in tokens.ids[1:]
    assert byte_level.decode(tokens.ids[1:]) == text
    assert tokens.num_bytes.sum() == len(text)


def test_a_token_that_goes_back_in_the_text_adds_nothing_and_is_scored_as_what_it_touches():
    offsets = [(0, 3), (1, 2), (3, 5)]
    encoded = {"input_ids": [5, 6, 7], "offset_mapping": offsets}
    fields = {"is_fast": True, "bos_token_id": None, "eos_token_id": None, "__call__": lambda self, *_, **__: encoded}
    encoded = encode(
        [Document("d", "abcde", masked) for masked in ((), ((1, 2),), ((3, 4),))], type("GoingBack", (), fields)()
    )
    assert all(tokens.num_bytes.tolist() == [3, 0, 2] for tokens in encoded)
    scored = [tokens.scored.tolist() for tokens in encoded]
    assert scored == [[True, True, True], [False, False, True], [True, True, False]]


@pytest.mark.parametrize("one", ["private", Document("d", "private")])
def test_one_text_instead_of_several_is_refused(byte_level, one):
    with pytest.raises(TypeError, match=f"must be several documents, a list say, got one {type(one).__name__}"):
        encode(one, byte_level)
    with pytest.raises(TypeError, match="got one"):
        word_examples(one, Vocabulary(["<unknown>", "<begin>", "private"]))
    with pytest.raises(TypeError, match="got one"):
        Vocabulary.of(one)


def test_characters_that_a_tokenizer_drops_count_for_the_next_token():
    (tokens,) = encode([Document("d", "private   personal é", ((7, 8),))], sentencepiece_like())
    assert tokens.ids.tolist() == [1, 2, 0]
    assert tokens.num_bytes.tolist() == [7, 11, 3]
    assert tokens.scored.tolist() == [True, False, True]


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match="SlowOne does not tell where its tokens stand"):
        encode(["a"], type("SlowOne", (), {"is_fast": False})())


def documents(*lengths):
    parts = torch.arange(sum(lengths)).split(lengths)
    return [Tokens(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids)) for ids in parts]


def take(count, **options):
    stream = batches(documents(50, 70, 9, 130), **options)
    return [next(stream) for _ in range(count)]


def test_batches_have_the_shape_asked_for_and_hold_consecutive_tokens():
    for batch in take(12, batch=3, seq=8):
        assert batch.shape == (3, 8)
        jumps = (batch.diff(dim=1) != 1).sum(dim=1)
        assert (jumps <= 2).all()  # a window crosses few of the documents' ends


def test_an_epoch_has_no_token_twice_and_the_next_one_has_other_windows():
    per_epoch = (259 - 8 + 1) // (3 * 8)
    drawn = take(2 * per_epoch, batch=3, seq=8)
    first, second = torch.cat(drawn[:per_epoch]), torch.cat(drawn[per_epoch:])
    for epoch in (first, second):
        assert len(epoch.unique()) == epoch.numel() == per_epoch * 24
    assert not torch.equal(first, second)


def test_documents_windows_and_the_place_of_the_cut_are_shuffled():
    def drawn(count, seed, *lengths, seq=8):
        stream = batches(documents(*lengths), batch=1, seq=seq, seed=seed)
        return torch.cat([next(stream) for _ in range(count)])

    assert (drawn(31, 0, 259)[:, 0].diff() < 0).any()  # windows
    assert len({int(drawn(1, seed, 259)[0, 0]) % 8 for seed in range(40)}) > 4  # cut
    assert any((drawn(1, seed, *[8] * 20, seq=71).diff() < 0).any() for seed in range(5))  # documents


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 35])
def test_a_stream_can_start_anywhere(start):
    whole = take(40, batch=3, seq=8, seed=5)
    rest = take(40 - start, batch=3, seq=8, seed=5, start=start)
    assert all(torch.equal(a, b) for a, b in zip(whole[start:], rest, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch=0, seq=8), "batch must be a whole number of at least 1, got 0"),
        (dict(batch=1, seq=0), "seq must be a whole number of at least 1, got 0"),
        (dict(batch=1, seq=8, start=-1), "start must be a whole number of at least 0, got -1"),
        (dict(batch=1, seq=8, seed=-1), "seed must be a whole number of at least 0, got -1"),
        (dict(batch=100, seq=8), "259 tokens are too few for one batch of batch=100 windows of seq=8 tokens"),
    ],
)
def test_impossible_batches_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        batches(documents(259), **options)
