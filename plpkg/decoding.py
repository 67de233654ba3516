"""Decoding: changes to logits before sampling, tokens as text, and the longest text of a model."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import (
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from plpkg.validation import whole_number

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What models call the keys and values of what they have read: transformers 5.24 renamed argument and output."""


def cache_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """A cache as the keyword argument of a model, by the name that it has in the installed transformers."""
    return {CACHE: cache}


def cache_among(named: Mapping[str, object]) -> object:
    """The cache among a model's keyword arguments, or in its output, by either name; None where there is none."""
    return named["cache"] if "cache" in named else named.get("past_key_values")


def warpers(*, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> LogitsProcessorList:
    """Hugging Face's processors of logits, in the order in which its ``generate`` applies them."""
    chosen = LogitsProcessorList()
    if temperature != 1:
        chosen.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chosen.append(TopPLogitsWarper(float(top_p)))
    return chosen


BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of SentencePiece's byte fallback. Neighbours are decoded together: a wrong byte spoils all of them."""

UNSETTLED = re.compile("\ufffd$")
CLEANED = re.compile(r"(\ufffd|\s|\sn|'[vr]?)$")
"""An end that the next token may change: half a character or, with ``CLEANED``, what transformers may clean up."""


class Text:
    """The text of tokens that come one by one, in parts; together they are what ``tokenizer.decode`` gives for all.

    The tokens are decoded behind the prompt's last ones, so the first keeps the space that it would lose alone. A
    character that the prompt leaves unfinished is not part of the text.

    Parameters
    ----------
    before
        The prompt's ids.
    stop
        Strings that end the text, and are left out; also a special token's name.

    Attributes
    ----------
    length
        The number of characters that no later token changes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = (), stop: Sequence[str] = ()):
        self._tokenizer: Any = tokenizer  # its own annotations let one text become several
        self._stop = stop
        self._held = ""  # settled, but it may become a stop string
        self.length = 0
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._unsettled = CLEANED if cleans else UNSETTLED
        end = len(before)
        while end and BYTE.fullmatch(self._name(before[end - 1])):
            end -= 1
        self._ids = [int(each) for each in before[max(0, end - 8) : end]]  # the next token is decoded behind these
        while self._ids and self._unsettled.search(self._decoded()):
            self._ids.pop()
        self._anchor()

    def add(self, token: int, last: bool = False) -> tuple[str, bool]:
        """The text that one more token adds for certain, and whether a stop string has ended the text.

        Characters that may still change, or become a stop string, wait for the next token, unless this is the last.
        """
        before = self._text
        self._ids = [*self._ids, token]
        self._text = self._decoded()
        text = self._held + self._text[self._settled :]
        ends = [text.find(each) for each in self._stop if each in text]
        if ends:
            return text[: min(ends)], True
        if last:
            return text, False
        name = self._name(token)
        left_out = self._text == before  # a special token: it settles nothing
        if left_out and name in self._stop:
            return text, True
        if left_out or BYTE.fullmatch(name) or self._unsettled.search(self._text):
            return "", False
        self.length += len(self._text) - self._settled
        self._ids = self._ids[self._known :]
        self._anchor()
        ready = len(text) - _may_become(text, self._stop)
        self._held = text[ready:]
        return text[:ready], False

    def _anchor(self) -> None:
        """Take the text that is decoded now as settled; its tokens stay, as the next ones are decoded behind them."""
        self._known = len(self._ids)
        self._text = self._decoded()
        self._settled = len(self._text)

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _name(self, token: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(int(token)) or ""  # an id beyond the vocabulary has none


def _may_become(text: str, stops: Sequence[str]) -> int:
    """The number of characters at the end of a text that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        most = min(len(stop) - 1, len(text))
        for n in range(1, most + 1):
            if text.endswith(stop[:n]):
                longest = max(longest, n)
    return longest


def rope_changes(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """The kinds of rotary positions whose frequencies depend on the length, each with the length that changes them.

    ``longrope`` changes once, beyond that length; ``dynamic`` again with every token beyond it. Most models have
    neither; some have several, for layers of several kinds. If a configuration names an original length, that is taken,
    although transformers changes ``dynamic`` only beyond ``max_position_embeddings``: the shorter length is safe.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else rope.values()  # one for all layers, or by the kind of a layer
    changes = []
    for kind in kinds:
        name = kind.get("rope_type") if isinstance(kind, dict) else None
        if name in ("longrope", "dynamic"):
            length = kind.get("original_max_position_embeddings") or config.max_position_embeddings
            changes.append((name, length))
    return changes


def longest_text(config: PreTrainedConfig, most: int | None = None) -> int:
    """The most tokens of a text: at most ``most``, and none beyond the lengths of :func:`rope_changes`.

    Beyond those, the longest text of a batch would change the rotary positions of the others.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    bounds = [longest]
    if most is not None:
        bounds.append(whole_number("max_model_len", most, 1))
    bounds += [length for _, length in rope_changes(config)]
    return min(bounds)
