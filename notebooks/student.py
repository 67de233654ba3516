"""Notebooks for a class, without outputs and solutions: ``python notebooks/student.py FOLDER NOTEBOOK…``."""

import re
import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor

SOLUTION = re.compile(r"<details><summary>Solution</summary>.*?</details>\n*", flags=re.DOTALL)


def for_students(notebook):
    """Take from a notebook its outputs, execution counts and solutions, and the cells that held nothing else."""
    notebook, _ = ClearOutputPreprocessor().preprocess(notebook, {})
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = SOLUTION.sub("", cell.source)
    notebook.cells = [cell for cell in notebook.cells if cell.source]
    return notebook


if __name__ == "__main__":
    folder, *paths = map(Path, sys.argv[1:])
    folder.mkdir(exist_ok=True)
    for path in paths:
        nbformat.write(for_students(nbformat.read(path, as_version=4)), folder / path.name)
