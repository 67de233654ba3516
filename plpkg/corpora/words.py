"""From documents to words, as a keyboard knows them: small letters, no numbers, no signs."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from plpkg.corpora.documents import Document, several
from plpkg.validation import whole_number

UNKNOWN = 0
"""The id of a word that is not in the vocabulary."""

BEGIN = 1
"""The id of a sentence's beginning."""


class Vocabulary:
    """The most frequent words of a public text.

    Parameters
    ----------
    words
        In the order of their ids; the first two stand for an unknown word and a sentence's beginning.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: i for i, word in enumerate(self.words)}

    @classmethod
    def of(cls, documents: Iterable[Document | str], size: int = 10_000) -> Self:
        """The ``size`` most frequent words of documents; among equally frequent ones, the alphabet decides."""
        whole_number("size", size, 3)
        counts = Counter()
        for document in several(documents):
            for words in sentences(document):
                counts.update(words)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(["<unknown>", "<begin>", *frequent[: size - 2]])

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, words: Iterable[str]) -> list[int]:
        """The id of each word, 0 where it is not known."""
        return [self._ids.get(word, UNKNOWN) for word in words]

    @property
    def sha256(self) -> str:
        """The hash that an LSTM's file names, so that no other vocabulary is taken for its own."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()


def sentences(document: Document) -> Iterator[list[str]]:
    """The words of each sentence, in small letters, without numbers and signs; nothing that is masked."""
    for piece in document.unmasked():
        for sentence in re.split(r"[.!?:;](?=\s)|\n\s*\n", piece.lower()):
            words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", sentence)
            if words:
                yield words
