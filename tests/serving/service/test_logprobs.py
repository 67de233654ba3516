"""Tokens by themselves: each keeps its space, and parts of characters are bytes."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from plpkg.serving.requests import Scored
from plpkg.serving.service.http.logprobs import LEAST, Spelling


@pytest.fixture(scope="module")
def llama():
    """A vocabulary as Llama-2's: a first token loses its space, and rare characters are bytes."""
    names = ["<s>", "a", "▁a", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*parts])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_what_a_token_says_alone(llama, base):
    for name, text, content in (
        ("a", "a", b"a"),
        ("▁a", " a", b" a"),
        ("<0x41>", "A", b"A"),
        ("<0xF0>", r"bytes:\xf0", b"\xf0"),
        ("\ufffd", "\ufffd", "\ufffd".encode()),
        ("<s>", "<s>", b"<s>"),
    ):
        assert Spelling(llama)(llama.convert_tokens_to_ids(name)) == (text, [*content])
    spelled = [Spelling(base[1])(token) for token in base[1]("🙂")["input_ids"]]
    assert bytes(byte for _, content in spelled for byte in content) == "🙂".encode()
    assert all(text.startswith("bytes:") for text, _ in spelled)


def test_json_has_no_infinity(llama):
    told = Spelling(llama).completion([(0, Scored(1)), (1, Scored(2, float("-inf"), [(1, -0.5)]))])
    assert told == {
        "tokens": ["a", " a"],
        "token_logprobs": [None, LEAST],
        "top_logprobs": [None, {"a": -0.5, " a": LEAST}],
        "text_offset": [0, 1],
    }
