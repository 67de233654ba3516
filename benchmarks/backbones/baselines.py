"""What a language model's bits per byte have to beat: counting n-grams, and a general compressor.

Interpolated modified Kneser-Ney smoothing (S. F. Chen and J. Goodman, "An empirical study of smoothing
techniques for language modeling", Computer Speech and Language 13, 1999, section 3; the discounts are
equation 26 of their technical report TR-10-98). An n-gram is a context c of n - 1 tokens and a token w::

    p_n(w | c) = (a(c, w) - D_a(c, w)) / A(c) + γ(c) · p_{n-1}(w | c without its first token)
    γ(c)       = (D_1 · N_1(c) + D_2 · N_2(c) + D_3 · N_3(c)) / A(c)
    p_0(w)     = 1 / vocab

a is how often the n-gram occurs in the highest order, and after how many different tokens it occurs in the
orders below; A(c) sums it over all tokens; N_1 and N_2 count the tokens whose a is 1 and 2, N_3 those of 3
and more. D_0 is 0; D_1, D_2 and D_3 (for 3 and more) belong to the order. An n-gram that starts with the
begin symbol has nothing to its left and keeps its occurrences, as in SRILM and KenLM. Unlike there, a
document has order - 1 begin symbols in front, not one, and no symbol for its end is predicted.

Left out: cutoffs and pruning, unknown words (every token id is known), and storage for more than memory holds.
"""

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from plpkg.validation import whole_number

FALLBACK = (0.5, 1.0, 1.5)
"""Discounts of an order for which the closed form has too few counts."""

LOWEST = 1e-3
"""No discount is smaller: with 0, a token not seen after some context would be impossible there."""

XZ_DICTIONARY = 2**26
"""Bytes in which ``xz -9e`` finds repetitions: its dictionary of 64 MiB."""


class Grams(NamedTuple):
    """The distinct n-grams of one order in a text of S symbols."""

    keys: np.ndarray  # (n-grams,) int64, sorted: context id · (vocab + 1) + last symbol
    counts: np.ndarray  # (n-grams,): occurrences
    ends: np.ndarray  # (n-grams,): the position of the first occurrence's last symbol
    ids: np.ndarray  # (S,): the n-gram that ends at each position, -1 where its document is too short for one


class Level(NamedTuple):
    """The n-grams of one order, and what follows each of their contexts.

    An n-gram's id is its place in ``keys``, a context's its place in the order below. The 0 at the end of
    ``counts`` and ``contexts`` answers for id -1, what was never seen.
    """

    keys: np.ndarray  # (n-grams,) int64, sorted: context id · (vocab + 1) + token
    counts: np.ndarray  # (n-grams + 1,) int32: a
    contexts: np.ndarray  # (contexts + 1, 4) int32: A, N_1, N_2, N_3


class Terms(NamedTuple):
    """p_n as a function of the discounts, ``mass - D @ taken + (D @ shares + unseen) · p_{n-1}``, for T tokens."""

    mass: np.ndarray  # (T,): a / A
    taken: np.ndarray  # (3, T): 1 / A in the row of the token's discount
    shares: np.ndarray  # (3, T): N / A
    unseen: np.ndarray  # (T,): 1 where the context was never seen and the order below decides


@dataclass(eq=False)
class KneserNey:
    """An n-gram model of token ids; :meth:`fit` makes one.

    Attributes
    ----------
    vocab
        Number of token ids; the id ``vocab`` itself is the begin symbol and never predicted.
    levels
        One :class:`Level` for each order, from 1 up.
    discounts
        D_1, D_2, D_3 by order, shape (order, 3): of equation 26 until :meth:`tune` replaces them.

    Examples
    --------
    >>> model = KneserNey.fit(documents, vocab=8192)
    >>> model.tune(validation)
    >>> sum(model.bits(document).sum() for document in test) / test_bytes
    """

    vocab: int
    levels: list[Level]
    discounts: np.ndarray

    @classmethod
    def fit(cls, documents: Sequence[np.ndarray], *, vocab: int, order: int = 5) -> "KneserNey":
        """Count the n-grams of ``documents``, 1-d integer arrays of token ids; none crosses a document's end.

        Raises
        ------
        ValueError
            A token id is outside [0, vocab), there is no token at all, or a document is not a 1-d integer array.
        """
        vocab, order = whole_number("vocab", vocab, 1), whole_number("order", order, 1)
        symbols, starts = _stream(documents, vocab, order)
        if not (symbols < vocab).any():
            raise ValueError(f"documents must hold at least one token, got {len(documents)} documents with none")
        orders = list(_grams(symbols, starts, vocab, order))
        for n, (grams, longer) in enumerate(pairwise(orders), start=1):
            extensible = symbols[grams.ends - n + 1] < vocab  # it does not start with the begin symbol
            # Every longer n-gram is one left context of the n-gram that ends where it does.
            grams.counts[extensible] = np.bincount(grams.ids[longer.ends], minlength=len(grams.keys))[extensible]
        contexts = [1, *(len(grams.keys) for grams in orders[:-1])]
        levels = [_level(grams, vocab, size) for grams, size in zip(orders, contexts, strict=True)]
        return cls(vocab, levels, np.array([closed_form(grams.counts) for grams in orders]))

    def tune(self, documents: Sequence[np.ndarray], counted: Sequence[np.ndarray] | None = None) -> float:
        """Choose the discounts that make validation documents most probable; return their mean bits per token.

        Parameters
        ----------
        documents
            Documents that the model was not fitted on.
        counted
            For each document a boolean array of its length: which tokens count. Without it, all do.

        Raises
        ------
        ValueError
            A token id is outside [0, vocab), a mask does not fit its document, or no token counts.
        """
        symbols, starts = _stream(documents, self.vocab, len(self.levels))
        counted = [np.ones(len(document), bool) for document in documents] if counted is None else counted
        for document, mask in zip(documents, counted, strict=True):
            if mask.shape != document.shape or mask.dtype != bool:
                raise ValueError(f"a mask must be {document.shape} booleans, got {mask.shape} of {mask.dtype}")
        chosen = np.flatnonzero(symbols < self.vocab)[np.concatenate(counted)]
        if not len(chosen):
            raise ValueError(f"at least one validation token must count, got 0 in {len(documents)} documents")
        terms = self._terms(symbols, starts, chosen)

        def bits(flat: np.ndarray) -> tuple[float, np.ndarray]:
            discounts = flat.reshape(-1, 3)
            p = _probabilities(discounts, terms, self.vocab)
            gradient = np.empty_like(discounts)
            slope = -1 / (len(chosen) * np.log(2) * p[-1])  # of the mean bits in p_n, from the highest order down
            for n, term in reversed(list(enumerate(terms))):
                gradient[n] = (term.shares * p[n] - term.taken) @ slope
                slope *= discounts[n] @ term.shares + term.unseen
            return -np.log2(p[-1]).mean(), gradient.ravel()

        bounds = [(LOWEST, count) for count in (1, 2, 3)] * len(self.levels)
        found = minimize(bits, self.discounts.ravel(), jac=True, method="L-BFGS-B", bounds=bounds)
        self.discounts = found.x.reshape(-1, 3)
        return float(found.fun)

    def bits(self, document: np.ndarray) -> np.ndarray:
        """-log2 p(token | the order - 1 tokens before it), float64, for each token; errors as in :meth:`fit`."""
        symbols, starts = _stream([document], self.vocab, len(self.levels))
        terms = self._terms(symbols, starts, symbols < self.vocab)
        return -np.log2(_probabilities(self.discounts, terms, self.vocab)[-1])

    def _terms(self, symbols: np.ndarray, starts: np.ndarray, chosen: np.ndarray) -> list[Terms]:
        """By order, what the probabilities of the ``chosen`` symbols (positions or a mask) are made of."""
        terms = []
        prefix = np.zeros(len(symbols), np.int64)
        for level in self.levels:
            key = prefix * (self.vocab + 1) + symbols  # negative, so never found, after an unseen prefix
            place = np.searchsorted(level.keys, key)
            ids = np.where(level.keys.take(place, mode="clip") == key, place, -1)
            count, (total, *kinds) = level.counts[ids[chosen]], level.contexts[prefix[chosen]].T
            each = 1 / np.maximum(total, 1)
            taken = (np.minimum(count, 3) == np.array([[1], [2], [3]])) * each
            terms.append(Terms(count * each, taken, np.array(kinds) * each, (total == 0).astype(float)))
            prefix = np.where(starts, -1, np.roll(ids, 1))
        return terms


def closed_form(counts: np.ndarray) -> tuple[float, ...]:
    """D_1, D_2, D_3 of an order from its counts: ``j - (j + 1) · Y · n_{j+1} / n_j`` with ``Y = n_1 / (n_1 + 2 n_2)``.

    n_j n-grams have count j. Without n_1, n_2 or n_3, or with a D below LOWEST, it is FALLBACK: the text is too small.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6)
    if not n[1:4].all():
        return FALLBACK
    found = tuple(j - (j + 1) * n[1] / (n[1] + 2 * n[2]) * n[j + 1] / n[j] for j in (1, 2, 3))
    return found if min(found) >= LOWEST else FALLBACK


def xz_bits(train: bytes, test: bytes) -> int:
    """Bits that ``test`` adds to ``train`` when both are compressed as by ``xz -9e``: 8 · (|train + test| - |train|).

    The difference cancels what the format adds to every file, but sizes are whole multiples of 4 bytes.
    ``xz -9e`` has a dictionary of 64 MiB, so that all of ``train`` is still in sight at the end of ``test``.

    Raises
    ------
    ValueError
        The two together are larger than the dictionary.
    """
    if len(train) + len(test) > XZ_DICTIONARY:
        raise ValueError(f"xz -9e looks back {XZ_DICTIONARY} bytes, got {len(train)} + {len(test)} of train and test")
    both, alone = (len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) for data in (train + test, train))
    return 8 * (both - alone)


def _stream(documents: Sequence[np.ndarray], vocab: int, order: int) -> tuple[np.ndarray, np.ndarray]:
    """All documents end to end, each after order - 1 begin symbols, and where they start (both (S,))."""
    if not len(documents):
        raise ValueError(f"documents must hold at least one document, got {documents!r}")
    for document in documents:
        if document.ndim != 1 or document.dtype.kind not in "iu":
            raise ValueError(f"a document must be a 1-d integer array, got shape {document.shape} of {document.dtype}")
        for token in document[(document < 0) | (document >= vocab)][:1]:
            raise ValueError(f"token ids must be between 0 and vocab - 1 = {vocab - 1}, got {token}")
    begin = np.full(order - 1, vocab)
    symbols = np.concatenate([part for document in documents for part in (begin, document)]).astype(np.int64)
    starts = np.concatenate([np.arange(len(begin) + len(document)) == 0 for document in documents])
    return symbols, starts


def _grams(symbols: np.ndarray, starts: np.ndarray, vocab: int, order: int) -> Iterator[Grams]:
    """The n-grams of each order from 1 up, named by the one a token shorter, so that keys fit 64 bits at any order."""
    prefix = np.zeros(len(symbols), np.int64)
    for _ in range(order):
        reach = np.flatnonzero(prefix >= 0)
        keys, first, inverse, counts = np.unique(
            prefix[reach] * (vocab + 1) + symbols[reach], return_index=True, return_inverse=True, return_counts=True
        )
        ends = reach[first]
        counts[symbols[ends] == vocab] = 0  # a begin symbol is a context, never predicted
        ids = np.full(len(symbols), -1)
        ids[reach] = inverse
        yield Grams(keys, counts, ends, ids)
        prefix = np.where(starts, -1, np.roll(ids, 1))


def _level(grams: Grams, vocab: int, contexts: int) -> Level:
    summands = (grams.counts, grams.counts == 1, grams.counts == 2, grams.counts >= 3)
    sums = [np.bincount(grams.keys // (vocab + 1), weights=each, minlength=contexts + 1) for each in summands]
    return Level(grams.keys, np.append(grams.counts, 0).astype(np.int32), np.stack(sums, axis=1).astype(np.int32))


def _probabilities(discounts: np.ndarray, terms: list[Terms], vocab: int) -> list[np.ndarray]:
    """p_0 to p_order, each (T,)."""
    p = [np.full(len(terms[0].mass), 1 / vocab)]
    for D, term in zip(discounts, terms, strict=True):
        p.append(term.mass - D @ term.taken + (D @ term.shares + term.unseen) * p[-1])
    return p
