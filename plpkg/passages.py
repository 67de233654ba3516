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
class Passage:
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
        """The heading, then the text: as models get it."""
        return f"{self.heading}\n{self.text}"


def passages(file: Path, text: str) -> list[Passage]:
    """Cut a file: paragraphs, as many together as are shorter than :data:`LONGEST`; in a file of lines, its lines.

    Each section has passages of its own. What is longer is cut between lines or sentences, with some overlap.
    """
    found = []
    for heading, blocks in _sections(file, text):
        for begin, end in _packed(text, blocks):
            line = text.count("\n", 0, begin) + 1
            found.append(Passage(file, line, heading, text[begin:end]))
    return found


def _sections(file: Path, text: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Each section's heading and blocks; where nothing follows a heading, it is the block itself."""
    name = os.fsencode(file.stem).decode(errors="replace")  # models take no name that is not UTF-8
    heading = name.replace("-", " ").replace("_", " ")
    above: dict[int, str] = {}  # the headings above, by their levels
    blocks = []
    heading_line = None  # begin and end of the heading over these blocks; a file may begin without one
    for begin, end in _blocks(text):
        opened = HEADING.match(text[begin:end])
        if not opened:
            blocks.append((begin, end))
            continue
        level = len(opened[1])
        if blocks:
            yield heading, blocks
        elif heading_line and level <= max(above):  # nothing follows it; over a lower one it stands above its text
            yield heading, [heading_line]
        above = {k: v for k, v in above.items() if k < level} | {level: opened[2]}
        heading = "\n".join(above.values())
        heading_line = (begin, end)
        blocks = []
    if blocks:
        yield heading, blocks
    elif heading_line:
        yield heading, [heading_line]


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end, in the text, of each heading and of what blank lines divide; those within code divide nothing."""
    begin = None  # of the block that is open
    end = 0
    in_code = False
    for line in re.finditer(r".*\n?", text):
        stripped = line[0].rstrip()
        line_end = line.start() + len(stripped)
        is_heading = not in_code and HEADING.match(stripped)
        is_blank = not in_code and not stripped
        if begin is not None and (is_heading or is_blank):
            yield begin, end
            begin = None
        if is_heading:
            yield line.start(), line_end
        elif stripped:
            if begin is None:
                begin = line.start()
            end = line_end
            if FENCE.match(stripped):
                in_code = not in_code
    if begin is not None:
        yield begin, end


def _packed(text: str, blocks: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join short blocks, cut long ones, and take lines apart that have nothing to do with each other."""
    begin = end = blocks[0][0]  # of the short blocks that wait for more: as long as none does, they are equal
    for block_begin, block_end in blocks:
        of_lines = _is_lines(text[block_begin:block_end])
        waiting = end > begin
        if waiting and (of_lines or block_end - begin > LONGEST):
            yield begin, end
            begin = block_begin
            waiting = False
        if of_lines:
            yield from _lines(text, block_begin, block_end)
            begin = end = block_end
        elif block_end - begin > LONGEST:
            yield from _cut(text, begin, block_end)
            begin = end = block_end
        else:
            if not waiting:
                begin = block_begin
            end = block_end
    if end > begin:
        yield begin, end


def _is_lines(block: str) -> bool:
    """Whether each line says something of its own: not wrapped prose, a list, a table, or code."""
    lines = block.split("\n")
    if len(lines) < 3 or any(STRUCTURED.match(line) or FENCE.match(line) for line in lines):
        return False
    # Prose that an editor has wrapped at a margin: the first word of the next line would not have fitted.
    margin = 0.85 * min(MARGIN, max(map(len, lines)))
    full = 0
    for line, after in itertools.pairwise(lines):
        next_word = after.split()[0]
        if len(line) + 1 + len(next_word) > margin:
            full += 1
    wrapped = full >= len(lines) / 2 and max(map(len, lines)) >= MARGIN / 2
    words = sum(len(line.split()) for line in lines)
    return not wrapped and words >= 4 * len(lines)


def _lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each line between, without the white space that it begins with."""
    for line in re.compile(r"\S.*").finditer(text, begin, end):
        yield line.start(), line.end()


def _cut(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Windows of whole lines, or of sentences where a line is long, or of words where a sentence is."""
    ends = {end, *(found.end() for found in ENDS.finditer(text, begin, end))}
    while begin < end:
        fitting = [each for each in ends if begin < each <= begin + LONGEST]
        space = text.rfind(" ", begin + 1, begin + LONGEST)
        if fitting:
            last = max(fitting)
        elif space > 0:
            last = space + 1
        else:
            last = min(end, begin + LONGEST)
        yield begin, begin + len(text[begin:last].rstrip())
        if last >= end:
            return
        shared = [each for each in ends if max(begin, last - OVERLAP - 1) < each < last]
        begin = min(shared, default=last)


def pieces(text: str) -> Iterator[str]:
    """Cut a passage: whole lines and sentences, as many together as :data:`PIECE` characters hold."""
    begin = 0
    last = 0  # the end of the last sentence that fits
    ends = [found.end() for found in ENDS.finditer(text)]
    for end in [*ends, len(text)]:
        if end - begin > PIECE and last > begin:
            yield text[begin:last].rstrip()
            begin = last
        last = end
    if text[begin:].strip() or not begin:
        yield text[begin:].rstrip()


def of_file(root: Path, file: Path) -> list[Passage]:
    """The passages of a file as it is now; what cannot be read raises OSError or ValueError."""
    return passages(file, read_utf8(root / file, MAX_FILE_BYTES))


def read_folder(folder: str | Path) -> tuple[list[Passage], dict[Path, str]]:
    """The passages of the ``.txt`` and ``.md`` files in a folder and below, and why other files are left out.

    Hidden files and folders (``.git``) are passed over, and links are not followed.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is no such folder.
    """
    root = Path(folder)
    found = []
    skipped = {}
    if not root.is_dir():
        missing = NotADirectoryError if root.exists() else FileNotFoundError
        raise missing(f"{root} is not a folder")

    def unread(error: OSError) -> None:
        skipped[Path(error.filename).relative_to(root)] = error.strerror

    for where, subfolders, names in os.walk(root, onerror=unread):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            path = Path(where, name)
            file = path.relative_to(root)
            if path.suffix.lower() not in SUFFIXES:
                skipped[file] = "neither .txt nor .md"
            elif path.is_symlink():
                skipped[file] = "a link"
            else:
                try:
                    found += of_file(root, file)
                except (ValueError, OSError) as error:
                    reason = getattr(error, "strerror", None) or str(error)
                    skipped[file] = reason.removeprefix(named(path)).strip()
    return found, skipped
