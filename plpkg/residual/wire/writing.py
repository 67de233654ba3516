"""A text that is being written: how its next token is chosen, and which of some guesses are."""

import operator
from collections.abc import Iterator
from itertools import islice

import torch

from plpkg.residual.drafts import Draft
from plpkg.residual.wire import sampling
from plpkg.residual.wire.wire_pb2 import Choice


class Writing:
    """Sequences under way.

    Parameters
    ----------
    ids
        ``(batch, seq)``: how they begin.
    max_new_tokens, ends
        At most so many more; the tokens that end one.
    guess, vocab
        Who guesses on the device, or ``None``; and how many tokens there are.
    ahead
        The cloud guesses. Then it is told the random numbers with which the device samples.
    generator
        Of what is sampled.
    **choice
        As :func:`plpkg.residual.wire.sampling.warpers` takes it.

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
        guess: Draft | None,
        vocab: int,
        ahead: bool,
        generator: torch.Generator | None,
        **choice,
    ) -> None:
        self.ids, self._stop, self._guess, self._generator = ids, ids.shape[1] + max_new_tokens, guess, generator
        self._vocab = vocab
        self._warp = sampling.warpers(max_new_tokens, **choice)
        self._ends = torch.tensor(ends, dtype=torch.long)
        self._done = torch.zeros(len(ids), dtype=torch.bool)
        self._sampled = choice.pop("do_sample")
        self.choice = None
        if ahead and self._sampled:
            seed = torch.randint(2**62, (), generator=generator).item()
            self.choice = Choice(seed=seed, **choice)

    @property
    def room(self) -> int:
        return self._stop - self.ids.shape[1] - 1

    @property
    def over(self) -> bool:
        """Whether there is nothing more to write."""
        return self.room < 0 or bool(self._done.all())

    def guesses(self, count: int) -> list[int]:
        """At most ``count`` of the device's own.

        Raises
        ------
        ValueError
            What the draft gave are no tokens.
        """
        if self._guess is None or count < 1:
            return []
        given = self._guess(self.ids[0].tolist(), count)
        try:
            tokens = [operator.index(token) for token in islice(given, count)]
        except TypeError:
            tokens = [-1]
        if any(not 0 <= token < self._vocab for token in tokens):
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
        for i, guessed in enumerate([*guesses, None]):
            chosen = torch.where(self._done, self.ids[:, -1], self._chosen(logits[:, i].float()))
            right = guessed is not None and chosen.item() == guessed
            self.ids = torch.cat([self.ids, chosen[:, None]], dim=1)
            self._done |= torch.isin(chosen, self._ends)
            yield chosen, right
            if not right or self.over:
                return

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        scores = self._warp(self.ids, logits)
        if self.choice is not None:
            return sampling.race(scores, self.choice.seed, self.ids.shape[1])
        if self._sampled:
            return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]
        return scores.argmax(-1)
