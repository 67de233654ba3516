"""Samples with their labels, from which a model learns, and a person's share of them.

A label of -100 is neither learnt nor scored (torch's ``ignore_index``): padding, words that the vocabulary lacks, text
that stands in somebody's training part too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from plpkg.corpora.documents import Document, several
from plpkg.corpora.tokens import Tokens
from plpkg.corpora.words import BEGIN, UNKNOWN, Vocabulary, sentences
from plpkg.inputs import IGNORED, ids_and_labels
from plpkg.results import Tabular
from plpkg.validation import whole_number

POOL = 8
"""Batches among which samples are sorted by length."""


@dataclass(frozen=True, eq=False)
class Examples(Tabular):
    """Samples with labels.

    Attributes
    ----------
    x
        ``(samples, ...)``: images, ids of words or tokens, or features of these.
    y
        ``(samples,)`` or, where each place of a sequence has one, ``(samples, seq)``; int64.
    """

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        sound = self.y.dim() in (1, 2) and self.y.numel() > 0 and self.y.dtype == torch.int64
        if not sound or self.x.shape[: self.y.dim()] != self.y.shape:
            shapes = f"x {tuple(self.x.shape)}, y {tuple(self.y.shape)} of {self.y.dtype}"
            raise ValueError(f"examples need a sample, and an int64 label for each sample or place of it, got {shapes}")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: slice | torch.Tensor) -> Self:
        """Some of the samples; padding that none of them needs is cut off."""
        x = self.x[which]
        y = self.y[which]
        if y.dim() == 2:
            longest = max(1, int(_lengths(y).max()))
            x = x[:, :longest]
            y = y[:, :longest]
        return type(self)(x, y)

    @property
    def labels(self) -> int:
        """The labels that count."""
        return int((self.y != IGNORED).sum())

    def order(self, batch: int, generator: torch.Generator) -> list[torch.Tensor]:
        """The samples of each batch of an epoch, drawn at random; of sequences alike lengths come together."""
        whole_number("batch", batch, 1)
        order = torch.randperm(len(self), generator=generator)
        if self.y.dim() == 1:
            return list(order.split(batch))
        lengths = _lengths(self.y)
        batches = []
        for pool in order.split(batch * POOL):
            by_length = pool[lengths[pool].argsort(stable=True)]
            batches += by_length.split(batch)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator)]

    def chunks(self, batch: int = 64) -> Iterator[Self]:
        """All samples in their order, ``batch`` of them at a time."""
        for start in range(0, len(self), batch):
            yield self[start : start + batch]

    @classmethod
    def of(cls, batch) -> Self:
        """A batch of texts, such as ``corpora.batch`` makes, each place labelled with the next token.

        Raises
        ------
        ValueError
            As :func:`plpkg.inputs.ids_and_labels`, or there is nothing to predict.
        """
        ids, labels = ids_and_labels(batch)
        return cls(ids[:, :-1], labels[:, 1:])

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The examples of several people as one; shorter sequences are padded on the right."""
        parts = list(parts)
        if not parts:
            raise ValueError("there are no examples to join")
        if parts[0].y.dim() == 2:
            longest = max(part.y.shape[1] for part in parts)
            parts = [cls(_padded(part.x, longest, 0), _padded(part.y, longest, IGNORED)) for part in parts]
        x = torch.cat([part.x for part in parts])
        y = torch.cat([part.y for part in parts])
        return cls(x, y)

    def rows(self) -> list[dict]:
        classes = self.y[self.y != IGNORED].unique()
        return [{"samples": len(self), "labels": self.labels, "classes": len(classes)}]

    def __repr__(self) -> str:
        return f"Examples({len(self):,} samples of {tuple(self.x.shape[1:])}, {self.labels:,} labels)"


def _lengths(y: torch.Tensor) -> torch.Tensor:
    """The places of each row of ``(samples, seq)`` up to its last label: ``(samples,)``, 0 if it has none."""
    places = torch.arange(1, y.shape[1] + 1)
    return ((y != IGNORED) * places).amax(1)


def _padded(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    """Rows ``(samples, seq, ...)`` that are ``length`` long, filled up on the right."""
    samples, seq, *rest = values.shape
    padding = values.new_full((samples, length - seq, *rest), fill)
    return torch.cat([values, padding], 1)


class Person(NamedTuple):
    """One device's owner. Validation is later than training: it decides when learning stops, unless there is none."""

    train: Examples
    validation: Examples | None
    test: Examples


def word_examples(
    documents: Iterable[Document | str], vocabulary: Vocabulary, *, seq: int = 24, limit: int | None = None
) -> Examples:
    """Sentences as ids ``(samples, seq)``, each place labelled with the next word; unknown words are no labels.

    Parameters
    ----------
    documents, vocabulary
        The text, and the words that a model knows.
    seq
        Words that are read at once: a longer sentence is cut.
    limit
        The number of words at which to stop.

    Raises
    ------
    ValueError
        No word at all, or settings out of range.
    TypeError
        A single text instead of several.
    """
    whole_number("seq", seq, 1)
    limit = limit if limit is None else whole_number("limit", limit, 1)
    rows = []
    count = 0  # of words
    for document in several(documents):
        for words in sentences(document):
            ids = vocabulary.ids(words)
            for i in range(0, len(ids), seq):
                rows.append(torch.tensor([BEGIN, *ids[i : i + seq]]))
            count += len(ids)
            if limit is not None and count >= limit:
                return _next(rows)
    return _next(rows)


def _next(rows: list[torch.Tensor]) -> Examples:
    """Each place of the rows labelled with the word that comes next."""
    if not rows:
        raise ValueError("there is no word in the documents")
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (samples, seq + 1); padding is UNKNOWN
    following = ids[:, 1:]
    return Examples(ids[:, :-1], following.masked_fill(following == UNKNOWN, IGNORED))


def token_examples(documents: Sequence[Tokens], *, seq: int = 128, limit: int | None = None) -> Examples:
    """Tokens, from ``corpora.encode``, as a causal language model learns them: windows ``(samples, seq)``.

    A document's last window is padded; what is masked is no label. Parameters as for :func:`word_examples`.
    """
    whole_number("seq", seq, 1)
    limit = limit if limit is None else whole_number("limit", limit, 1)
    x = []
    y = []
    count = 0  # of tokens
    for inputs, labels in _windows(documents, seq):
        x.append(inputs)
        y.append(labels)
        count += len(labels)
        if limit is not None and count >= limit:
            break
    if not x:
        raise ValueError("there is no token to predict in the documents")
    pad = torch.nn.utils.rnn.pad_sequence
    return Examples(pad(x, batch_first=True), pad(y, batch_first=True, padding_value=IGNORED))


def _windows(documents: Iterable[Tokens], seq: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels ``(at most seq,)`` of each window; a document's last token has no label to predict."""
    for document in documents:
        inputs = document.ids[:-1]
        labels = document.ids.masked_fill(~document.scored, IGNORED)[1:]
        for i in range(0, len(inputs), seq):
            yield inputs[i : i + seq], labels[i : i + seq]
