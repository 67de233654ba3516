"""What two texts share: near-duplicate paragraphs, which are removed, and long common spans, which are masked.

A paragraph counts as a near-duplicate if most of its five-word shingles have been seen before
(Broder 1997; the share of the paragraph, not of the union, so that a part of an earlier text counts too).
Spans are found exactly, by the hash of every window of characters.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from plpkg.corpora.documents import SPLITS, Document, Writer

SHINGLE = 5
"""Words in a shingle."""

SEEN_SHARE = 0.5
"""A paragraph with at least this share of its shingles seen before is a near-duplicate."""

SPAN = 50
"""Characters in the shortest common span that is masked."""


class Deduplicator:
    """Keeps what is new. It remembers all that it has kept, so the order of the calls decides who keeps a text."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self._seen: set[int] = set()

    def __call__(self, docstrings: Iterable[str]) -> str:
        """The docstrings without near-duplicate paragraphs, joined by blank lines.

        Paragraphs of fewer than :data:`SHINGLE` words (headings, say) stay with a docstring of which
        something longer stays, or that is short as a whole and new.
        """
        return "\n\n".join(filter(None, map(self._keep, docstrings)))

    def _keep(self, docstring: str) -> str:
        kept, lost, fresh = [], False, False
        for paragraph in re.split(r"\n\s*\n", docstring):
            shingles = self._shingles(paragraph)
            if len(shingles) and sum(s in self._seen for s in shingles) >= SEEN_SHARE * len(shingles):
                lost = True
                continue
            self._seen.update(shingles)
            fresh |= bool(shingles)
            kept.append(paragraph)
        if fresh:
            return "\n\n".join(kept)
        if lost:
            return ""
        whole = hash((-1, *self._ids(docstring)))
        if whole in self._seen:
            return ""
        self._seen.add(whole)
        return docstring

    def _ids(self, text: str) -> list[int]:
        # Numbers are all alike: two paragraphs that differ in them alone are duplicates.
        # Word numbers, not words, are hashed: Python's hash of a string changes from process to process.
        words = re.findall(r"[^\W\d_]+|\d+", text.lower())
        return [self._words.setdefault("0" if word.isdigit() else word, len(self._words)) for word in words]

    def _shingles(self, paragraph: str) -> list[int]:
        ids = self._ids(paragraph)
        return [hash(tuple(ids[i : i + SHINGLE])) for i in range(len(ids) - SHINGLE + 1)]


def window_hashes(text: str, span: int = SPAN) -> np.ndarray:
    """A 64-bit hash of every window of ``span`` characters: ``(max(0, len(text) - span + 1),)``, uint64.

    A polynomial hash modulo 2^64 over mixed code points, for all windows at once by prefix sums.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    if len(codes) < span:
        return np.empty(0, dtype=np.uint64)
    with np.errstate(over="ignore"):
        codes = (codes + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        codes = (codes ^ (codes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        base = 0xD6E8FEB86659FD93  # odd, so that it has an inverse and the window's position can be divided out
        inverse = pow(base, -1, 2**64)
        prefix = np.zeros(len(codes) + 1, dtype=np.uint64)
        np.cumsum(codes * _powers(base, len(codes)), out=prefix[1:])
        return (prefix[span:] - prefix[:-span]) * _powers(inverse, len(codes) - span + 1)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def mask_scored(writers: Sequence[Writer]) -> list[Writer]:
    """The writers with every span masked, in validation and test, that stands in anybody's training text."""
    training = [window_hashes(d.text) for w in writers for d in w.split("train")]
    hashes = np.sort(np.concatenate([window_hashes(""), *training]))  # there may be no training text
    return [
        Writer(w.name, {s: w.documents[s] if s == "train" else mask(w.documents[s], hashes) for s in SPLITS})
        for w in writers
    ]


def mask(documents: Sequence[Document], training: np.ndarray) -> tuple[Document, ...]:
    """The documents with every span masked that occurs in training text.

    Parameters
    ----------
    documents
        What is to be scored.
    training
        The sorted :func:`window_hashes` of the training text.
    """
    masked = []
    for document in documents:
        hashes = window_hashes(document.text)
        order = hashes.argsort()  # neighbours are found together, which is three times as fast
        at = np.minimum(np.searchsorted(training, hashes[order]), max(0, len(training) - 1))
        starts = np.sort(order[training[at] == hashes[order]]) if len(training) else np.empty(0, dtype=int)
        masked.append(Document(document.name, document.text, _spans(starts)))
    return tuple(masked)


def _spans(starts: np.ndarray) -> tuple[tuple[int, int], ...]:
    if not len(starts):
        return ()
    breaks = np.flatnonzero(np.diff(starts) > SPAN) + 1  # windows that touch or overlap make one span
    return tuple((int(run[0]), int(run[-1]) + SPAN) for run in np.split(starts, breaks))
