"""How long a notebook takes to read: ``python tests/reading.py NOTEBOOK…`` prints a row for each.

Words at 200 a minute, one minute a code cell, four an exercise; what is folded counts.
"""

import re
import sys
from pathlib import Path

import nbformat

WORDS_A_MINUTE, EXERCISE_MINUTES = 200, 4


def prose(notebook) -> str:
    """What a reader reads: text cells, and text that cells write."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        texts += [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    return "\n".join(texts)


def words(text: str) -> int:
    """Words, without formulas, code, addresses and the lines of tables."""
    text = re.sub(r"\$\$.*?\$\$|```.*?```", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)|</?\w+>|\|[-|]+\|", " ", text)
    return len(re.findall(r"[^\W_][\w'’.,-]*", text))


def folded(text: str) -> int:
    return sum(words(part) for part in re.findall(r"<details>.*?</details>", text, flags=re.S))


def exercises(notebook) -> int:
    """Checkers that are called."""
    return sum(
        len(re.findall(r"\.exercises\.\w+\(", cell.source)) for cell in notebook.cells if cell.cell_type == "code"
    )


def minutes(notebook) -> float:
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    return words(prose(notebook)) / WORDS_A_MINUTE + cells + EXERCISE_MINUTES * exercises(notebook)


def numbers(notebook) -> int:
    """Numbers that stand in text cells."""
    texts = [
        re.sub(r"\$[^$]+\$|`[^`]+`|\]\([^)]*\)", "", c.source) for c in notebook.cells if c.cell_type == "markdown"
    ]
    return sum(len(re.findall(r"(?<![\w.])\d[\d,.]*", text)) for text in texts)


if __name__ == "__main__":
    print("words  folded  numbers  code cells  minutes")
    for path in map(Path, sys.argv[1:]):
        notebook = nbformat.read(path, as_version=4)
        text = prose(notebook)
        cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        row = f"{words(text):5} {folded(text):7} {numbers(notebook):8} {cells:11} {minutes(notebook):8.0f}"
        print(row, path)
