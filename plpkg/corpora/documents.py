"""Documents, and writers who have some of them in each split: every corpus is made of these.

What a text to be scored shares with training text, :data:`SPAN` characters or more, is masked: found exactly, by the
hash of every window of characters.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plpkg.results import Tabular
from plpkg.validation import number, one_of, shown

SPLITS = ("train", "validation", "test")
"""The parts of a writer's documents."""

SPAN = 50
"""Characters in the shortest common span that is masked."""


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes
    ----------
    name
        Where it comes from: ``numpy/linalg/_linalg.py``, a diary's date, a file.
    text
        The text itself.
    masked
        Spans ``(start, end)`` in characters, ascending and disjoint, that must not be scored because
        some training text has them too.

    Raises
    ------
    ValueError
        Spans that are not so; name or text is no text, or has no UTF-8 form (a lone surrogate).
    """

    name: str
    text: str
    masked: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for field in ("name", "text"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise ValueError(f"a document's {field} must be a text, got {shown(value)}")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                where = f"{shown(self.name)[1:-1]}: character {error.start} of its {field}"
                raise ValueError(f"{where} is {value[error.start]!r}") from None
        edges = list(itertools.chain.from_iterable(self.masked))
        all_pairs = all(len(span) == 2 for span in self.masked)
        ascending = all(a < b for a, b in itertools.pairwise(edges))
        if not all_pairs or not ascending:
            raise ValueError(f"{self.name}: masked spans must be ascending and disjoint, got {self.masked!r}")
        if edges and (edges[0] < 0 or edges[-1] > len(self.text)):
            raise ValueError(f"{self.name}: a masked span lies outside its {len(self.text)} characters")

    @property
    def masked_characters(self) -> int:
        """How many characters are not scored."""
        return sum(end - start for start, end in self.masked)

    def unmasked(self) -> list[str]:
        """The pieces of the text that are scored, in order."""
        pieces = []
        position = 0
        for start, end in self.masked:
            pieces.append(self.text[position:start])
            position = end
        pieces.append(self.text[position:])
        return [piece for piece in pieces if piece]

    def __repr__(self) -> str:
        return f"Document({self.name!r}, {len(self.text):,} characters)"


@dataclass(frozen=True)
class Writer(Tabular):
    """One person, or the public: documents in three splits that share no module.

    Attributes
    ----------
    name
        ``public``, or the package whose docstrings these are, or a user of a loaded data set.
    documents
        The documents of each split.
    """

    name: str
    documents: dict[str, tuple[Document, ...]]

    def split(self, split: str) -> list[Document]:
        """The documents of ``"train"``, ``"validation"`` or ``"test"``.

        Raises
        ------
        ValueError
            Another split.
        """
        return list(self.documents[one_of("split", split, SPLITS)])

    def fingerprint(self, split: str) -> str:
        """sha256 of the split: every document's name, text and masked spans."""
        digest = hashlib.sha256()
        for document in self.split(split):
            for part in (document.name, document.text, repr(document.masked)):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def masked_share(self, split: str) -> float:
        """The share of the split's characters that is not scored."""
        documents = self.split(split)
        masked = sum(document.masked_characters for document in documents)
        characters = sum(len(document.text) for document in documents)
        return masked / max(1, characters)

    def rows(self) -> list[dict]:
        return [
            {
                "writer": self.name,
                "split": split,
                "documents": len(self.documents[split]),
                "characters": sum(len(d.text) for d in self.documents[split]),
                "masked_share": round(self.masked_share(split), 4),
                "sha256": self.fingerprint(split),
            }
            for split in SPLITS
        ]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(self.documents[split])}" for split in SPLITS)
        return f"Writer({self.name!r}: {sizes} documents)"


def several(documents: Iterable[Document | str]) -> Iterator[Document]:
    """Documents, or plain strings (nothing masked), as documents, one by one.

    Raises
    ------
    TypeError
        A single one, whose characters would be taken for documents.
    """
    if isinstance(documents, str | Document):
        raise TypeError(f"documents must be several documents, a list say, got one {type(documents).__name__}")
    return (Document("", each) if isinstance(each, str) else each for each in documents)


def cuts(what: str, count: int, shares: tuple[float, ...]) -> dict[str, slice]:
    """Where ``count`` things in a row are cut into the three splits; one stays empty only if its share is 0.

    Parameters
    ----------
    what
        The things, for the message.
    count
        How many there are, at least one for each share above 0.
    shares
        The shares of train, validation and test, rounded to whole things.

    Raises
    ------
    ValueError
        Shares that are not three numbers from 0 on with sum 1, or too few things.
    """
    if len(shares) != len(SPLITS) or not math.isclose(sum(number("share", share) for share in shares), 1):
        raise ValueError(f"shares must be three numbers that add up to 1, for {', '.join(SPLITS)}, got {shares!r}")
    needed = [int(share > 0) for share in shares]  # things that each split must have
    if count < sum(needed):
        wanting = ", ".join(itertools.compress(SPLITS, needed))
        need = "needs" if sum(needed) == 1 else "need"
        raise ValueError(f"{count} {what}: too few, {wanting} {need} one each")
    parts = {}
    start = 0
    for i, split in enumerate(SPLITS):
        end = start
        if needed[i]:
            end = max(start + 1, round(count * sum(shares[: i + 1])))
            end = min(end, count - sum(needed[i + 1 :]))  # one is left for each that comes after
        parts[split] = slice(start, end)
        start = end
    return parts


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
    """``base`` to the power of 0, 1, …: ``(count,)`` uint64, modulo 2^64."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def mask_scored(writers: Sequence[Writer]) -> list[Writer]:
    """The writers with every span masked, in validation and test, that stands in anybody's training text."""
    training = [window_hashes("")]  # there may be no training text
    for writer in writers:
        training += [window_hashes(document.text) for document in writer.split("train")]
    hashes = np.sort(np.concatenate(training))
    masked = []
    for writer in writers:
        documents = {"train": writer.documents["train"]}
        for split in ("validation", "test"):
            documents[split] = mask(writer.documents[split], hashes)
        masked.append(Writer(writer.name, documents))
    return masked


def mask(documents: Sequence[Document], training: np.ndarray) -> tuple[Document, ...]:
    """The documents with every span masked that occurs in training text.

    Parameters
    ----------
    documents
        The documents to be scored.
    training
        The sorted :func:`window_hashes` of the training text.
    """
    return tuple(Document(each.name, each.text, _spans(_shared(each.text, training))) for each in documents)


def _shared(text: str, training: np.ndarray) -> np.ndarray:
    """Where windows of a text begin that the training text has, too: ascending, in characters."""
    if not len(training):
        return np.empty(0, dtype=int)
    hashes = window_hashes(text)
    order = hashes.argsort()  # neighbours are found together, which is three times as fast
    ascending = hashes[order]
    at = np.searchsorted(training, ascending)
    at = np.minimum(at, len(training) - 1)  # a hash above all others is compared with the last
    return np.sort(order[training[at] == ascending])


def _spans(starts: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The spans ``(start, end)`` that windows cover which begin at ``starts``."""
    if not len(starts):
        return ()
    breaks = np.flatnonzero(np.diff(starts) > SPAN) + 1  # windows that touch or overlap make one span
    return tuple((int(run[0]), int(run[-1]) + SPAN) for run in np.split(starts, breaks))
