"""Log-probabilities as OpenAI writes them: of a completion's tokens, and of a chat's."""

from collections.abc import Iterable

from transformers.convert_slow_tokenizer import bytes_to_unicode

from plpkg.decoding import BYTE
from plpkg.serving.requests import Scored

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}


class Spelling:
    """Tokens by themselves, of a fast tokenizer."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]  # or some would lose their space
        self._start = len(tokenizer.decode(self._before))
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """A token's text and bytes; the text of a part of a character is ``bytes:`` and its bytes in hex."""
        if token not in self._known:
            self._known[token] = self._spelled(token)
        return self._known[token]

    def _spelled(self, token: int) -> tuple[str, list[int]]:
        """A token's text and bytes, by the tokenizer's vocabulary where they are part of a character."""
        text = self._tokenizer.decode([*self._before, token])[self._start :]
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if "\ufffd" not in text:
            return text, [*text.encode()]
        if BYTE.fullmatch(name):
            content = [int(name[3:5], 16)]
        elif name and all(each in BYTE_LEVEL for each in name):
            content = [BYTE_LEVEL[each] for each in name]
        else:
            return text, [*text.encode()]
        in_hex = "".join(rf"\x{byte:02x}" for byte in content)
        return f"bytes:{in_hex}", content

    def completion(self, scored: Iterable[tuple[int, Scored]]) -> dict:
        """Of tokens and where each begins in the text. The likeliest have the chosen one among them."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float | None] | None] = []
        offsets: list[int] = []
        for offset, (token, logprob, top) in scored:
            likeliest: dict[str, float | None] = {}
            for each, value in [*top, (token, logprob)]:
                text, _ = self(each)
                likeliest.setdefault(text, _said(value))
            text, _ = self(token)
            tokens.append(text)
            values.append(_said(logprob))
            tops.append(None if logprob is None else likeliest)
            offsets.append(offset)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def chat(self, scored: Iterable[tuple[int, Scored]]) -> dict:
        """Of an answer's tokens."""

        def spelled(token: int, logprob: float | None) -> dict:
            text, content = self(token)
            return {"token": text, "bytes": content, "logprob": _said(logprob)}

        content = []
        for _, each in scored:
            likeliest = [spelled(token, logprob) for token, logprob in each.top]
            content.append(spelled(each.token, each.logprob) | {"top_logprobs": likeliest})
        return {"content": content, "refusal": None}


def _said(logprob: float | None) -> float | None:
    """A log-probability as JSON can say it."""
    return None if logprob is None else max(logprob, LEAST)
