"""Requests: what to continue, and how its next token is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from plpkg.adapters import Adapter
from plpkg.decoding import Text, warpers
from plpkg.inputs import Ids, one_text
from plpkg.serving.attention import KeyValues, Row
from plpkg.validation import number, whole_number


class Scored(NamedTuple):
    """A token, its log-probability (None for a text's first), and those of the likeliest tokens in its place.

    They are the model's own, before temperature and ``top_p``.
    """

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class Reading(Protocol):
    """A prompt that was read elsewhere, of which some may have been forgotten."""

    logits: torch.Tensor  # (1, vocab), after the last token

    def units(self, model) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The next token's position, and each layer's keys and values ``(1, kv_heads, kept, head_dim)``.

        Full attention takes all of them, a sliding window's are the last before the position. ValueError unless this
        model has read.
        """
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue, and how. Of the model's generation config only its end-of-text tokens count.

    Attributes
    ----------
    input_ids
        One prompt's ids, ``(tokens,)`` or ``(1, tokens)``, a tensor or a list; or what a tokenizer gives.
    adapter
        The name of a loaded adapter, or None for the backbone alone.
    max_new_tokens
        The most tokens to write; the model's end-of-text token, which is returned, ends it earlier. It may be 0 where
        tokens are scored.
    temperature, top_p
        As in ``generate``; temperature 0 takes the likeliest token.
    seed
        Of the samples, which are then the same in every batch; None draws one.
    stop
        Strings after which it ends; the tokens that complete one are returned.
    account
        Whose request it is: what was read is shared within an account only.
    logprobs
        Tokens are scored (:class:`Scored`), with so many of the likeliest; None scores none.
    score_prompt
        The prompt's tokens are scored as well.
    reading
        The text that the prompt goes on from, read already: :func:`plpkg.retention.chunked_prefill` gives one, within a
        budget. The same backbone must have read it; whether with the same adapter is not checked. The request takes a
        copy when it is added, unpacked if it is quantized; it forgets and quantizes nothing of what follows.
    """

    input_ids: Ids
    adapter: str | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    account: str = ""
    logprobs: int | None = None
    score_prompt: bool = False
    reading: Reading | None = None

    def check(self, vocab: int, positions: int, tokenizer, read: int = 0) -> list[int]:
        """The prompt's ids; ValueError if they or a setting are not possible."""
        ids = one_text(self.input_ids)
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"ids must be at least 0 and below vocab={vocab}, got {min(ids)} to {max(ids)}")
        if self.logprobs is not None:
            whole_number("logprobs", self.logprobs, 0, vocab)
        if self.score_prompt and self.logprobs is None:
            raise ValueError("score_prompt needs logprobs: how many of the likeliest tokens are told")
        new = whole_number("max_new_tokens", self.max_new_tokens, 1 if self.logprobs is None else 0)
        if read + len(ids) + new > positions:
            behind = f" behind the {read} of the reading" if read else ""
            raise ValueError(f"{len(ids)} ids and {new} new ones{behind} do not fit the model's {positions} positions")
        number("temperature", self.temperature)
        number("top_p", self.top_p, 0, 1, open_low=True)
        if self.seed is not None:
            whole_number("seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.adapter, str | None):
            raise ValueError(f"adapter must be a name or None, got {self.adapter!r}")
        if not isinstance(self.stop, list | tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be strings that are not empty, in a list, got {self.stop!r}")
        if self.stop and tokenizer is None:
            raise ValueError(f"stop={self.stop!r} needs the tokenizer: Engine(model, tokenizer)")
        return ids


@dataclass(eq=False)
class Running:
    """A request under way: ``ids`` are its prompt and what was written, of which ``computed`` are in ``past``.

    The first ``read`` ids are -1: they stand for what the request's reading has read, whose tokens are not known.
    """

    identity: int
    request: Request
    adapter: Adapter | None
    ids: list[int]
    past: KeyValues
    computed: int = 0
    text: Text | None = None
    read: int = 0
    told: int = 0  # ids that were scored

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)
        self.generator = torch.Generator()
        if self.request.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.request.seed)

    @property
    def new(self) -> list[int]:
        """The ids that were written."""
        return self.ids[self.prompt :]

    @property
    def owner(self) -> tuple[str, str]:
        """The adapter's digest and the account: on them its keys and values depend besides its ids."""
        digest = self.adapter.digest if self.adapter else ""
        return digest, self.request.account

    def choose(self, scores: torch.Tensor) -> int:
        """The next token, from the ``(vocab,)`` logits after the last; transformers' own processors warp them."""
        request = self.request
        if request.temperature == 0:
            return int(scores.argmax())
        warp = warpers(temperature=request.temperature, top_p=request.top_p)
        scores = (scores - scores.max()).double().cpu()  # so that no temperature makes them infinite
        ids = torch.tensor([self.ids])
        warped = warp(ids, scores[None])  # pyright: ignore[reportArgumentType] (LongTensor is no class of its own)
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self.generator))

    def score(self, start: int, scores: torch.Tensor) -> list[Scored]:
        """The tokens from ``start`` on, by the ``(tokens, vocab)`` logits before each; a last row may have no token."""
        ids = self.ids[start : start + len(scores)]
        wide = torch.promote_types(scores.dtype, torch.float32)
        logprobs = scores[: len(ids)].to(wide).log_softmax(-1)
        chosen = logprobs[range(len(ids)), ids].tolist()
        top_logprobs, top_tokens = (each.tolist() for each in logprobs.topk(self.request.logprobs or 0))
        scored = []
        for token, logprob, tokens, values in zip(ids, chosen, top_tokens, top_logprobs, strict=True):
            likeliest = [*zip(tokens, values, strict=True)]
            scored.append(Scored(token, logprob, likeliest))
        return scored

    def scored_now(self, row: Row, scores: torch.Tensor) -> list[Scored]:
        """The tokens that a step's logits ``(tokens, vocab)`` score for the first time."""
        begin = self.computed + 1 - len(scores)  # the first that they predict
        scored = self.score(begin, scores)[max(0, self.told - begin) :]  # what is read again was told before
        if row.each and row.start == self.read and not self.told:
            scored = self.first() + scored
        self.told = max(self.told, begin + len(scores))
        return scored

    def first(self) -> list[Scored]:
        """The prompt's first token: nothing but a reading predicts it."""
        reading = self.request.reading
        if reading is None:
            return [Scored(self.ids[0])]
        return self.score(self.read, reading.logits)

    def ended(self, ends: Sequence[int], tokenizer) -> str | None:
        """Why its last token was the last, if it was."""
        if not self.new:
            return "length"
        stopped = False
        if self.request.stop:
            if self.text is None:
                self.text = Text(tokenizer, self.ids[self.read : self.prompt], self.request.stop)
            _, stopped = self.text.add(self.ids[-1])
        if stopped or self.ids[-1] in ends:
            return "stop"
        if len(self.new) == self.request.max_new_tokens:
            return "length"
        return None
