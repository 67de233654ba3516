"""Pieces of somebody's own notes: what a search finds, a model reads, and a person is shown with file and line.

A file is cut where a person would cut it: by headings and paragraphs, and into lines where each says something of its
own. What is found is read from the file at that moment, verbatim.
"""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plpkg.corpora.folder import named, read_utf8

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


def of_file(root: Path, file: Path) -> list[Excerpt]:
    """The passages of a file as it is now; what cannot be read raises OSError or ValueError."""
    return passages(file, read_utf8(root / file, MAX_FILE_BYTES))


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
                    found += of_file(root, file)
                except (ValueError, OSError) as error:
                    reason = error.strerror if isinstance(error, OSError) else str(error)
                    skipped[file] = reason.removeprefix(named(path)).strip()
    return found, skipped
