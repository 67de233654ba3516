"""A text that is being written: how its next token is chosen, which of some guesses are, and what ends it."""

import operator
import sys
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from plpkg import decoding
from plpkg.decoding import rope_changes
from plpkg.residual.drafts import Draft
from plpkg.validation import flag, number, shown, whole_number

LEAST_TEMPERATURE = 1e-30
"""Lower ones are taken as this, which leaves the likeliest token: logits divided by them would be infinite."""


class Writing:
    """Sequences under way.

    Parameters
    ----------
    ids
        ``(batch, seq)``: how they begin.
    max_new_tokens, ends, stops
        At most so many more; the tokens, and the strings, that end one.
    guess, vocab
        Who guesses on the device, or ``None``; and how many tokens there are.
    generator
        Of what is sampled.
    **choice
        As :func:`checked_warpers` takes it.

    Attributes
    ----------
    ids
        ``(batch, seq + new)``.
    room
        How many tokens may still be guessed: after them comes one that is certain.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        max_new_tokens: int,
        ends: list[int],
        stops: StopStringCriteria | None,
        guess: Draft | None,
        vocab: int,
        generator: torch.Generator | None,
        **choice,
    ) -> None:
        self.ids = ids
        self._longest = ids.shape[1] + max_new_tokens
        self._guess = guess
        self._generator = generator
        self._vocab = vocab
        self._warp = checked_warpers(max_new_tokens, **choice)
        self._ends = torch.tensor(ends, dtype=torch.long)
        self._stops = stops
        self._done = torch.zeros(len(ids), dtype=torch.bool)  # (batch,): whose end is written
        self._sampled = choice["do_sample"]

    @property
    def room(self) -> int:
        return self._longest - self.ids.shape[1] - 1

    @property
    def over(self) -> bool:
        """Whether there is nothing more to write."""
        return self.room < 0 or bool(self._done.all())

    def guesses(self, count: int) -> list[int]:
        """At most ``count`` of the device's own.

        Raises
        ------
        ValueError
            The draft's guesses are no tokens.
        """
        if self._guess is None or count < 1:
            return []
        given = self._guess(self.ids[0].tolist(), count)
        try:
            tokens = [operator.index(token) for token in islice(given, count)]
            known = all(0 <= token < self._vocab for token in tokens)
        except TypeError:  # no numbers, or nothing that can be listed
            known = False
        if not known:
            raise ValueError(f"the draft must give tokens from 0 to vocab - 1 = {self._vocab - 1}, got {given!r:.80}")
        return tokens

    def take(self, logits: torch.Tensor, guesses: list[int]) -> Iterator[tuple[torch.Tensor, bool]]:
        """Write the next tokens: as long as the guesses are what is chosen, and one more.

        Parameters
        ----------
        logits
            ``(batch, guesses + 1, vocab)``: of what follows, and what follows each guess.
        guesses
            Of one sequence.

        Yields
        ------
        tuple
            Each new ``(batch,)`` of tokens, and whether it was guessed.
        """
        for place, guess in enumerate([*guesses, None]):  # behind the last guess stands none
            chosen = self._chosen(logits[:, place].float())
            chosen = torch.where(self._done, self.ids[:, -1], chosen)  # behind its end a sequence repeats it
            right = guess is not None and chosen.item() == guess
            self.ids = torch.cat([self.ids, chosen[:, None]], dim=1)
            self._done |= torch.isin(chosen, self._ends)
            if self._stops is not None:
                self._done |= self._stops(self.ids, None)
            yield chosen, right
            if not right or self.over:
                return

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """The next tokens ``(batch,)`` by logits ``(batch, vocab)``."""
        scores = self._warp(self.ids, logits)  # pyright: ignore[reportArgumentType] (LongTensor is no class of its own)
        if self._sampled:
            return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]
        return scores.argmax(-1)


def checked_warpers(
    max_new_tokens: int, *, do_sample: bool = False, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> LogitsProcessorList:
    """The processors that warp logits before a token is sampled; none if none is.

    Raises
    ------
    ValueError
        Arguments of :meth:`plpkg.residual.DeviceClient.generate` that cannot be.
    """
    whole_number("max_new_tokens", max_new_tokens, 1)
    flag("do_sample", do_sample)
    number("temperature", temperature, open_low=do_sample)
    whole_number("top_k", top_k, 0)
    number("top_p", top_p, 0, 1, open_low=True)
    if not do_sample:
        return decoding.warpers()
    return decoding.warpers(temperature=max(temperature, LEAST_TEMPERATURE), top_k=top_k, top_p=top_p)


def ends(model: PreTrainedModel, eos_token_id: int | list[int] | None) -> list[int]:
    """The tokens that end a sequence: those asked for, or the model's own; -1 for none.

    Raises
    ------
    ValueError
        Something that is no token.
    """
    if eos_token_id is None:
        settings = model.config if model.generation_config is None else model.generation_config
        eos_token_id = settings.eos_token_id
    chosen = eos_token_id if isinstance(eos_token_id, list | tuple) else [eos_token_id]
    return [whole_number("eos_token_id", end, -1, 2**63 - 1) for end in chosen if end is not None]


def stops(
    stop_strings: str | Sequence[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria | None:
    """A criterion that sees a text come to one of ``stop_strings``, as in Hugging Face's ``generate``.

    Raises
    ------
    ValueError
        Something that is no string or an empty one, or there is no tokenizer, or one that cannot write any text.
    """
    if stop_strings is None:
        return None
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    if not (isinstance(strings, Sequence) and strings and all(isinstance(each, str) and each for each in strings)):
        raise ValueError(f"stop_strings must be strings that are not empty, got {shown(stop_strings)}")
    if tokenizer is None:
        raise ValueError(f"stop_strings={shown(stop_strings)} are text: give the model's tokenizer as well")
    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError:  # it looks for the tokens of a text of its own
        raise ValueError(f"stop_strings={shown(stop_strings)} need a tokenizer that can write any text") from None


def reads_anew_beyond(model: PreTrainedModel) -> int | None:
    """The length beyond which Hugging Face's ``generate`` reads all of a sequence again: Phi-3's, with other RoPE."""
    if model.config.model_type not in ("phi3", "phimoe"):
        return None
    for kind, length in rope_changes(model.config):
        if kind == "longrope":
            return length
    return None


def guesses_before_rope_turns(changes: list[tuple[str, int]], length: int) -> int:
    """How many guesses may follow ``length`` tokens in one pass: with more, RoPE changes for the whole sequence.

    ``changes`` are the model's :func:`plpkg.decoding.rope_changes`.
    """
    room = sys.maxsize
    for kind, limit in changes:
        if kind == "dynamic":
            room = min(room, max(0, limit - 1 - length))
        elif length <= limit:
            room = min(room, limit - length)
    return room
