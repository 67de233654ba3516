"""How tokens become text: the parts are the whole, whatever spans tokens, and nothing of the prompt."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plpkg.backbones import random_backbone
from plpkg.decoding import Text, _may_become, cache_among, cache_argument

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<s>", "a", "▁", "▁a", "▁▁", "b", "▁漢", "é", "\ufffd", ".", "'", "▁."]
WORDS = ["<s>", "a", "##a", "##b", "n", "'", "##'", "t", "##t", "s", "m", "ve", ".", "##.", ",", "do", "not", "漢", "�"]
SPACED = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def sentencepiece(decoder, model=models.BPE):
    """A vocabulary with a token for each byte; the specials and the first letter come first."""
    names = [*PIECES, *BYTES]
    if model is models.Unigram:
        return made(models.Unigram([(name, 0.0) for name in names], unk_id=0, byte_fallback=True), decoder)
    return made(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True), decoder)


def made(model, decoder, **options):
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", **options)


def words(model, decoder, **options):
    return made(model({name: n for n, name in enumerate(WORDS)}, unk_token="<s>"), decoder, **options)


def byte_level():
    names = ["<s>", "a", *(set(pre_tokenizers.ByteLevel.alphabet()) - {"a"}), "Ġa", "ðŁ", "ĻĤ"]
    return made(models.BPE({name: n for n, name in enumerate(names)}, []), decoders.ByteLevel())


@torch.no_grad()
def test_a_model_goes_on_with_what_it_has_read():
    """By a name that the installed transformers does not warn of: 5.24 has another than 5.23."""
    model, ids = random_backbone("llama"), torch.arange(8)[None]
    cache = cache_among(model(ids[:, :5], use_cache=True))
    after = model(ids[:, 5:], **cache_argument(cache))
    assert cache_among(after) is cache
    assert cache.get_seq_length() == 8
    assert cache_among({"cache": cache}) is cache_among({"past_key_values": cache}) is cache
    assert cache_among({}) is cache_among(model(ids, use_cache=False)) is None
    torch.testing.assert_close(after.logits, model(ids).logits[:, 5:])


KINDS = {
    "byte-level": byte_level(),
    "Llama-2": sentencepiece(decoders.Sequence([SPACED, decoders.Strip(" ", 1, 0)])),
    "Gemma": sentencepiece(SPACED),
    "Unigram": sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), models.Unigram),
    "WordPiece": words(models.WordPiece, decoders.WordPiece()),
    "WordPiece, cleaned": words(models.WordPiece, decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True),
    "WordLevel": words(models.WordLevel, None, clean_up_tokenization_spaces=True),
    "words' ends": made(models.BPE({"<s>": 0, "a": 1, "a</w>": 2, "b</w>": 3}, []), decoders.BPEDecoder("</w>")),
}


def written(tokenizer, prompt, ids, stop=()):
    """The parts, and whether a stop string ended them."""
    text, parts = Text(tokenizer, prompt, stop), []
    for n, token in enumerate(ids, 1):
        part, stopped = text.add(token, n == len(ids))
        parts.append(part)
        if stopped:
            break
    return parts, stopped


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(data=st.data())
def test_parts_are_what_the_tokenizer_makes_of_all(kind, data):
    """Of any ids, also of those that it has not; and cut before the first stop string that is complete."""
    tokenizer = KINDS[kind]
    tokens = st.lists(st.integers(0, 30) | st.integers(0, len(tokenizer) + 3), min_size=1, max_size=12)
    prompt = data.draw(st.just([]) | tokens.map(lambda ids: [*ids, 1]))  # which ends in a letter
    ids, head = data.draw(tokens), len(tokenizer.decode(prompt, skip_special_tokens=True))

    def whole(count):
        return tokenizer.decode([*prompt, *ids[:count]], skip_special_tokens=True)[head:]

    text, stop = whole(len(ids)), []
    if text and data.draw(st.booleans()):
        starts = st.integers(0, len(text) - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(at + 1, at + 4)))
        stop = [text[slice(*each)] for each in data.draw(st.lists(starts, max_size=3))]
    expected = text, False
    for count in range(1, len(ids) + 1):
        if ends := [whole(count).find(each) for each in stop if each in whole(count)]:
            expected = whole(count)[: min(ends)], True
            break
    parts, stopped = written(tokenizer, prompt, ids, stop)
    assert ("".join(parts), stopped) == expected


@pytest.mark.parametrize(
    ("kind", "prompt", "ids", "text"),
    [
        ("Llama-2", ["a"], ["▁a"], " a"),  # alone, a first token would lose its space
        ("Llama-2", ["a", "<0xC3>"], ["<0xA9>", "b"], "\ufffdb"),  # the prompt's half of a character is not its
        ("Llama-2", ["a", "<0x0A>"], ["<0xC3>", "<0xA9>", "▁a"], "é a"),
        ("Llama-2", ["b", *["<0x0A>"] * 20], ["▁a"], " a"),
        ("WordPiece", ["a"], ["a", "##b"], " ab"),
        ("WordPiece, cleaned", ["a", "'"], ["s"], " s"),
        ("byte-level", ["a", "ðŁ"], ["ĻĤ"], "\ufffd\ufffd"),
    ],
)
def test_a_text_goes_on_after_its_prompt(kind, prompt, ids, text):
    prompt, ids = (KINDS[kind].convert_tokens_to_ids(each) for each in (prompt, ids))
    assert "".join(written(KINDS[kind], prompt, ids)[0]) == text


def test_a_special_token_that_is_left_out_can_be_a_stop_string():
    tokenizer = KINDS["Llama-2"]
    assert written(tokenizer, [1], tokenizer.convert_tokens_to_ids(["a", "<s>", "a"]), ["<s>"]) == (["a", ""], True)


def test_a_long_stop_string_costs_no_more_than_the_text():
    class Counted(str):
        slices = 0

        def __getitem__(self, key):
            Counted.slices += 1
            return str(self)[key]

    assert _may_become("text ab", [Counted("abc" * 1000)]) == 2
    assert Counted.slices <= len("text ab")
