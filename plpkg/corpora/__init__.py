"""Text and digits to learn from, without a download: the public's, each person's own, a diary."""

from plpkg.corpora.diary import Diary, Question, diary
from plpkg.corpora.documents import SPLITS, Document, Writer
from plpkg.corpora.library import public, versions, writer, writers
from plpkg.corpora.tokens import Tokens, batches, encode

__all__ = [
    "SPLITS",
    "Diary",
    "Document",
    "Question",
    "Tokens",
    "Writer",
    "batches",
    "diary",
    "encode",
    "public",
    "versions",
    "writer",
    "writers",
]
