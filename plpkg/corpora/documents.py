"""What every corpus is made of: documents, and writers who have some of them in each split."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plpkg.results import Tabular
from plpkg.validation import number, one_of, shown

SPLITS = ("train", "validation", "test")
"""The parts of a writer's documents."""


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
            if not isinstance(value := getattr(self, field), str):
                raise ValueError(f"a document's {field} must be a text, got {shown(value)}")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                where = f"{shown(self.name)[1:-1]}: character {error.start} of its {field}"
                raise ValueError(f"{where} is {value[error.start]!r}") from None
        edges = [edge for span in self.masked for edge in span]
        if any(len(span) != 2 for span in self.masked) or any(a >= b for a, b in itertools.pairwise(edges)):
            raise ValueError(f"{self.name}: masked spans must be ascending and disjoint, got {self.masked!r}")
        if edges and (edges[0] < 0 or edges[-1] > len(self.text)):
            raise ValueError(f"{self.name}: a masked span lies outside its {len(self.text)} characters")

    @property
    def masked_characters(self) -> int:
        """How many characters are not scored."""
        return sum(end - start for start, end in self.masked)

    def unmasked(self) -> list[str]:
        """The pieces of the text that are scored, in order."""
        edges = [0, *(edge for span in self.masked for edge in span), len(self.text)]
        return [self.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

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
        return sum(d.masked_characters for d in documents) / max(1, sum(len(d.text) for d in documents))

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
    return (Document("", d) if isinstance(d, str) else d for d in documents)


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
    needed = [int(share > 0) for share in shares]
    if count < sum(needed):
        wanting = ", ".join(itertools.compress(SPLITS, needed))
        raise ValueError(f"{count} {what}: too few, {wanting} need{'s' * (sum(needed) == 1)} one each")
    edges = [0]
    for i, least in enumerate(needed):
        edge = max(edges[-1] + least, round(count * sum(shares[: i + 1])))
        edges.append(min(edge, count - sum(needed[i + 1 :])) if least else edges[-1])
    return {split: slice(*edge) for split, edge in zip(SPLITS, itertools.pairwise(edges), strict=True)}
