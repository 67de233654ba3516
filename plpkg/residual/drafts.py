r"""Guesses at the next tokens: what they cost is little, and one pass through the cloud verifies all of them.

A draft is any function of the tokens so far and a number; it gives at most so many tokens that may follow.
:meth:`plpkg.residual.DeviceClient.generate` lets them travel with the last token, and keeps those that it would have
chosen itself. Here are drafts that need no model: what followed the same words before in this text
(:func:`lookup`; A. Saxena, "Prompt Lookup Decoding", 2023), and what follows them most often in some other text
(:func:`counted`). Each guess is sent to the cloud, the wrong ones as well: counts of a person's own text tell it what
stands there (1,200 to 2,600 of its four-token pieces for 1,000 new tokens, *measured, recorded*), so that nobody gets
them who does not build them: ``draft=drafts.counted(Counts(tokens.ids for tokens in encoded))``.

A pass with guesses takes a time t_k instead of t_1, and n round trips as before; it yields E tokens. Guesses pay where

.. math:: E > \frac{t_k + n \, RTT}{t_1 + n \, RTT}

and the right side falls to 1 with the delay: what guesses cost is lost in it, and only the tokens that are right count.
So longer guesses pay over longer delays, if slowly: the best length grows with the delay's logarithm (arXiv
2606.20591); and over a long delay a cloud that guesses itself is faster than a device that does (arXiv 2606.25091; of
both only the abstracts were at hand).

Guesses stop when they do not pay (:class:`Acceptance`). If each of k guesses takes a time c and a share s of them is
accepted, then :math:`t_k = t_1 + k c` and E = 1 + k s, so that k drops out, and guesses pay where

.. math:: s > \frac{c}{t_1 + n \, RTT}

The client measures both times of the right side, round trips included, and counts s over the last 16 passes with
guesses. Where at least one guess too few was accepted, it sends no more. From then on every eighth pass has one guess,
and when that is accepted all guesses begin anew. A guess costs bytes as well: one of 16 has to be accepted, however
long the delay. No token depends on any of this, not even one that is sampled with ``"backbone"``: the random numbers
are drawn for the whole text, guessed or not, and a cloud that was told them once knows them to its end.

Left out: guesses that branch (trees), a small model on the device, and fewer guesses at once before there are none.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from plpkg.validation import one_of

Draft = Callable[[Sequence[int], int], Sequence[int]]
"""``draft(ids, count)``: of a text's tokens so far, at most ``count`` guesses at what follows."""

LONGEST = 3
"""The most tokens before a guess that :func:`lookup` compares."""

EVERY = 8
"""Of the public documents, every so-many-th is counted: 0.4 million tokens, a second."""

NAMES = ("lookup", "public", "backbone")

RECENT = 16
"""On so many passes with guesses :class:`Acceptance` looks back: with fewer, good drafts would stop by chance."""

JUDGED = 12
"""Fewer guesses than these are not judged."""

PROBE = 8
"""Of the passes after guesses have stopped, every so-many-th has one guess."""

LEAST = 1 / 16
"""The share of guesses that has to be accepted even where a guess takes no time."""


def lookup(ids: Sequence[int], count: int) -> list[int]:
    """What followed the last occurrence of the last three tokens; else of the last two, else of the last one."""
    return list(_match(ids, count)[1])


def _match(ids: Sequence[int], count: int) -> tuple[int, Sequence[int]]:
    """How many tokens before the guesses are alike, and the guesses."""
    ids = tuple(ids)
    for length in range(min(LONGEST, len(ids) - 1), 0, -1):
        tail = ids[-length:]
        for i in range(len(ids) - length - 1, -1, -1):
            if ids[i : i + length] == tail:
                return length, ids[i + length : i + length + count]
    return 0, ()


def counted(counts) -> Draft:
    """:func:`lookup` where the text repeats two tokens; else what most often follows the longest context that
    :class:`plpkg.counts.Counts` have.

    The person's own text can be counted as well; then the cloud reads pieces of it in the guesses, right or wrong.
    """

    def draft(ids: Sequence[int], count: int) -> list[int]:
        length, guesses = _match(ids, count)
        if length >= 2:
            return list(guesses)
        begin = ids[-max(counts.orders) :]
        written = list(begin)
        while len(written) < len(begin) + count and (token := counts.likeliest(written)[1]) >= 0:
            written.append(token)
        return written[len(begin) :] or list(guesses)

    return draft


@functools.lru_cache(maxsize=4)
def public(tokenizer) -> Draft:
    """:func:`counted` for a part of the public text that comes with this package, in a tokenizer's tokens."""
    from plpkg import corpora  # reading it takes half a minute the first time
    from plpkg.counts import Counts

    return counted(Counts(tokens.ids for tokens in corpora.encode(corpora.public("train")[::EVERY], tokenizer)))


def chosen(draft: str | Draft | None, tokenizer=None) -> Draft | None:
    """The draft that ``generate`` was asked for; ``None`` where the device makes none.

    Raises
    ------
    ValueError
        No such draft, or ``"public"`` without a tokenizer.
    """
    if callable(draft):
        return draft
    if draft is None or one_of("draft", draft, NAMES) == "backbone":
        return None
    if draft == "public" and tokenizer is None:
        raise ValueError("draft='public' counts text: give the model's tokenizer as well")
    return public(tokenizer) if draft == "public" else lookup


class Acceptance:
    """How many of a draft's guesses were accepted lately, and whether more of them pay.

    Parameters
    ----------
    draft
        Who guesses, as ``generate`` was told.
    least
        The share of guesses that has to be accepted; by default what the times of the passes say.

    Attributes
    ----------
    stopped
        Why guesses are not sent any more; empty while they are.
    """

    def __init__(self, draft: str | Draft | None, least: float | None = None) -> None:
        self.draft, self.least, self.stopped = draft, least, ""
        self._recent: deque[tuple[int, int, float | None]] = deque(maxlen=RECENT)  # guesses, those accepted, seconds
        self._without_s: deque[float] = deque(maxlen=RECENT)
        self._sent = self._waited = 0

    def allowed(self, most: int) -> int:
        """How many guesses the next pass may have, of ``most``."""
        if self.stopped:
            return min(most, int(self._waited >= PROBE - 1))
        sent, accepted = self._counted()
        untimed = self.least is None and not self._without_s  # then one pass shows what it takes without guesses
        return 0 if untimed and sent >= JUDGED and accepted < sent else most

    def add(self, sent: int, accepted: int, seconds: float | None) -> None:
        """Judge by one more pass: its guesses, those accepted, and its time unless it has read more than a token."""
        self._sent += sent
        if not sent:
            self._waited += 1
            self._without_s.extend([] if seconds is None else [seconds])
        elif self.stopped:
            self._waited = 0
            if accepted:
                self.stopped = ""
                self._recent.clear()
        else:
            self._recent.append((sent, accepted, seconds))
        sent, accepted = self._counted()
        needed = math.floor(self.needed * sent)
        if not self.stopped and sent >= JUDGED and accepted < needed:
            self._waited = 0
            self.stopped = (
                f"guesses stopped after {self._sent}: {accepted} of {sent} accepted, {needed} of {sent} needed"
            )

    @property
    def needed(self) -> float:
        """The share of guesses that has to be accepted."""
        if self.least is not None:
            return self.least
        timed = [(sent, seconds) for sent, _, seconds in self._recent if seconds is not None]
        if not (timed and self._without_s):
            return LEAST
        one = median(self._without_s)  # a mean would remember a connection that broke
        return min(1.0, max(LEAST, median((seconds / one - 1) / sent for sent, seconds in timed)))

    def _counted(self) -> tuple[int, int]:
        return sum(sent for sent, _, _ in self._recent), sum(accepted for _, accepted, _ in self._recent)
