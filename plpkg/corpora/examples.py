"""What a model learns from: samples with their labels, and a person's share of them.

A label of -100 is neither learnt nor scored (torch's ``ignore_index``): padding, words that the vocabulary lacks, text
that stands in somebody's training part too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from plpkg.batch import IGNORED, ids_and_labels
from plpkg.corpora.documents import Document, several
from plpkg.corpora.tokens import Tokens
from plpkg.corpora.words import BEGIN, UNKNOWN, Vocabulary, sentences
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
        fits = self.y.dim() in (1, 2) and self.y.numel() and self.x.shape[: self.y.dim()] == self.y.shape
        if not fits or self.y.dtype != torch.int64:
            shapes = f"x {tuple(self.x.shape)}, y {tuple(self.y.shape)} of {self.y.dtype}"
            raise ValueError(f"examples need a sample, and an int64 label for each sample or place of it, got {shapes}")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: slice | torch.Tensor) -> Self:
        """Some of the samples; padding that none of them needs is cut off."""
        x, y = self.x[which], self.y[which]
        if y.dim() == 2:
            longest = max(1, int(_lengths(y).max()))
            x, y = x[:, :longest], y[:, :longest]
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
        pools = [pool[lengths[pool].argsort(stable=True)].split(batch) for pool in order.split(batch * POOL)]
        batches = [each for pool in pools for each in pool]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator)]

    def chunks(self, batch: int = 64) -> Iterator[Self]:
        """All samples in their order, so many at a time."""
        for start in range(0, len(self), batch):
            yield self[start : start + batch]

    @classmethod
    def of(cls, batch) -> Self:
        """A batch of texts, such as ``corpora.batch`` makes, each place labelled with the next token.

        Raises
        ------
        ValueError
            As :func:`plpkg.batch.ids_and_labels`, or there is nothing to predict.
        """
        ids, labels = ids_and_labels(batch)
        return cls(ids[:, :-1], labels[:, 1:])

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The examples of several people as one; shorter sequences are padded on the right."""
        if not (parts := list(parts)):
            raise ValueError("there are no examples to join")
        if parts[0].y.dim() == 2:
            longest = max(part.y.shape[1] for part in parts)
            parts = [cls(_padded(part.x, longest, 0), _padded(part.y, longest, IGNORED)) for part in parts]
        return cls(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def rows(self) -> list[dict]:
        return [{"samples": len(self), "labels": self.labels, "classes": len(self.y[self.y != IGNORED].unique())}]

    def __repr__(self) -> str:
        return f"Examples({len(self):,} samples of {tuple(self.x.shape[1:])}, {self.labels:,} labels)"


def _lengths(y: torch.Tensor) -> torch.Tensor:
    """Where the last label of each row of ``(samples, seq)`` ends: ``(samples,)``."""
    return ((y != IGNORED) * torch.arange(1, y.shape[1] + 1)).amax(1)


def _padded(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return torch.cat([values, values.new_full((len(values), length - values.shape[1], *values.shape[2:]), fill)], 1)


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
    rows, count = [], 0
    for document in several(documents):
        for words in sentences(document):
            ids = vocabulary.ids(words)
            rows += [torch.tensor([BEGIN, *ids[i : i + seq]]) for i in range(0, len(ids), seq)]
            count += len(ids)
            if limit is not None and count >= limit:
                return _next(rows)
    return _next(rows)


def _next(rows: list[torch.Tensor]) -> Examples:
    if not rows:
        raise ValueError("there is no word in the documents")
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (samples, seq + 1); padding is UNKNOWN
    return Examples(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == UNKNOWN, IGNORED))


def token_examples(documents: Sequence[Tokens], *, seq: int = 128, limit: int | None = None) -> Examples:
    """What ``corpora.encode`` made of a text, as a causal language model learns it: windows ``(samples, seq)``.

    A document's last window is padded; what is masked is no label. Parameters as for :func:`word_examples`.
    """
    whole_number("seq", seq, 1)
    limit = limit if limit is None else whole_number("limit", limit, 1)
    x, y, count = [], [], 0
    for document in documents:
        labels = document.ids.masked_fill(~document.scored, IGNORED)
        for i in range(0, len(document) - 1, seq):
            x.append(document.ids[i : i + seq][: len(document) - 1 - i])
            y.append(labels[i + 1 : i + 1 + seq])
            count += len(y[-1])
            if limit is not None and count >= limit:
                break
        if limit is not None and count >= limit:
            break
    if not x:
        raise ValueError("there is no token to predict in the documents")
    pad = torch.nn.utils.rnn.pad_sequence
    return Examples(pad(x, batch_first=True), pad(y, batch_first=True, padding_value=IGNORED))
