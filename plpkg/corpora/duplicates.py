"""Paragraphs that were there before, word for word or nearly so, are left out."""

import re
from collections.abc import Iterable

SHINGLE = 5
"""Words in a shingle."""

SEEN_SHARE = 0.5
"""A paragraph with at least this share of its shingles seen before is a near-duplicate."""


class Deduplicator:
    """Keeps what is new. It remembers all that it has kept, so the order of the calls decides who keeps a text.

    A paragraph counts as a near-duplicate if most of its five-word shingles have been seen before
    (Broder 1997; the share of the paragraph, not of the union, so that a part of an earlier text counts too).
    """

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self._seen: set[int] = set()

    def __call__(self, docstrings: Iterable[str]) -> str:
        """The docstrings without near-duplicate paragraphs, joined by blank lines.

        Paragraphs of fewer than :data:`SHINGLE` words (headings, say) stay with a docstring of which
        something longer stays, or that is short as a whole and new.
        """
        kept = map(self._keep, docstrings)
        return "\n\n".join(text for text in kept if text)

    def _keep(self, docstring: str) -> str:
        """The part of a docstring that stays; nothing if nothing in it is new."""
        kept = []
        some_lost = False
        some_long = False  # of those that are kept
        for paragraph in re.split(r"\n\s*\n", docstring):
            shingles = self._shingles(paragraph)
            seen = sum(shingle in self._seen for shingle in shingles)
            if shingles and seen >= SEEN_SHARE * len(shingles):
                some_lost = True
                continue
            self._seen.update(shingles)
            kept.append(paragraph)
            if shingles:
                some_long = True
        if some_long:
            return "\n\n".join(kept)
        if some_lost:
            return ""
        # Nothing in it is long enough for a shingle: it is new if the whole is.
        whole = hash((-1, *self._ids(docstring)))
        if whole in self._seen:
            return ""
        self._seen.add(whole)
        return docstring

    def _ids(self, text: str) -> list[int]:
        """A number for each word. Python's hash of a string would be another one in each process."""
        ids = []
        for word in re.findall(r"[^\W\d_]+|\d+", text.lower()):
            if word.isdigit():  # all alike: two paragraphs that differ in numbers alone are duplicates
                word = "0"
            ids.append(self._words.setdefault(word, len(self._words)))
        return ids

    def _shingles(self, paragraph: str) -> list[int]:
        """The hash of each five words in a row."""
        ids = self._ids(paragraph)
        return [hash(tuple(ids[i : i + SHINGLE])) for i in range(len(ids) - SHINGLE + 1)]
