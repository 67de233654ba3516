"""Text and digits to learn from, without a download: the public's, each person's own, a diary, your own files."""

from plpkg.corpora.diary import Diary, Question, diary
from plpkg.corpora.docstrings import changed, described, public, versions, writer, writers
from plpkg.corpora.documents import SPLITS, Document, Writer
from plpkg.corpora.examples import Examples, Person, token_examples, word_examples
from plpkg.corpora.folder import text_folder
from plpkg.corpora.images import Digits, Images, digits, printed_digits
from plpkg.corpora.notes import ABSENT, Asked, Notes, notes
from plpkg.corpora.tokens import Tokens, batch, batches, encode
from plpkg.corpora.words import Vocabulary, sentences

__all__ = [
    "ABSENT",
    "SPLITS",
    "Asked",
    "Diary",
    "Digits",
    "Document",
    "Examples",
    "Images",
    "Notes",
    "Person",
    "Question",
    "Tokens",
    "Vocabulary",
    "Writer",
    "batch",
    "batches",
    "changed",
    "described",
    "diary",
    "digits",
    "encode",
    "notes",
    "printed_digits",
    "public",
    "sentences",
    "text_folder",
    "token_examples",
    "versions",
    "word_examples",
    "writer",
    "writers",
]
