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
2606.20591, of which only the abstract was at hand).

Left out: guesses that branch (trees), a small model on the device, and guesses by the cloud.
"""

import functools
from collections.abc import Callable, Sequence

from plpkg.validation import one_of

Draft = Callable[[Sequence[int], int], Sequence[int]]
"""``draft(ids, count)``: of a text's tokens so far, at most ``count`` guesses at what follows."""

LONGEST = 3
"""The most tokens before a guess that :func:`lookup` compares."""

EVERY = 8
"""Of the public documents, every so-many-th is counted: 0.4 million tokens, a second."""

NAMES = ("lookup", "public")


def lookup(ids: Sequence[int], count: int) -> list[int]:
    """Tokens that followed the last occurrence of the last three; else of the last two, else of the last one."""
    _, guesses = _match(ids, count)
    return list(guesses)


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
    :class:`plpkg.ngrams.Counts` have.

    The person's own text can be counted as well; then the cloud reads pieces of it in the guesses, right or wrong.
    """

    def draft(ids: Sequence[int], count: int) -> list[int]:
        length, guesses = _match(ids, count)
        if length >= 2:
            return list(guesses)
        context = list(ids[-max(counts.orders) :])
        likely: list[int] = []
        while len(likely) < count:
            _, token = counts.likeliest(context + likely)
            if token < 0:  # they have none of these contexts
                break
            likely.append(token)
        return likely or list(guesses)

    return draft


@functools.lru_cache(maxsize=4)
def public(tokenizer) -> Draft:
    """:func:`counted` for a part of the public text that comes with this package, in a tokenizer's tokens."""
    from plpkg import corpora  # reading it takes half a minute the first time
    from plpkg.ngrams import Counts

    encoded = corpora.encode(corpora.public("train")[::EVERY], tokenizer)
    return counted(Counts(tokens.ids for tokens in encoded))


def chosen(draft: str | Draft | None, tokenizer=None) -> Draft | None:
    """The draft that ``generate`` was asked for, or ``None``.

    Raises
    ------
    ValueError
        No such draft, or ``"public"`` without a tokenizer.
    """
    if callable(draft):
        return draft
    if draft is None:
        return None
    if one_of("draft", draft, NAMES) == "lookup":
        return lookup
    if tokenizer is None:
        raise ValueError("draft='public' counts text: give the model's tokenizer as well")
    return public(tokenizer)
