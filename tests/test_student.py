"""The notebooks for a class: no outputs, no solutions, and otherwise the notebooks."""

import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SCRIPT = Path(__file__).parents[1] / "notebooks" / "student.py"
NOTEBOOKS = sorted(SCRIPT.parent.glob("[0-9]*.ipynb"))
START, END = "<details><summary>Solution</summary>", "</details>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "class"
    subprocess.run([sys.executable, str(SCRIPT), str(folder), *map(str, NOTEBOOKS)], check=True)
    return folder


def without_solutions(source: str) -> str:
    while START in source:
        before, _, rest = source.partition(START)
        source = before + rest.partition(END)[2].lstrip("\n")
    return source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_outputs_and_solutions_are_gone(folder, path):
    notebook, original = (nbformat.read(place, as_version=4) for place in (folder / path.name, path))
    nbformat.validate(notebook)
    assert START in "".join(cell.source for cell in original.cells)
    assert START not in "".join(cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    expected = [(cell.cell_type, without_solutions(cell.source), cell.metadata) for cell in original.cells]
    assert [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells] == [e for e in expected if e[1]]
    assert path.read_bytes() != (folder / path.name).read_bytes()


def test_a_cell_that_held_only_a_solution_goes_and_other_details_stay():
    new = nbformat.v4
    hint = "<details><summary>Hint</summary>\n\nCount.\n\n</details>"
    cells = [f"{START}\n\n41\n{END}\n", f"{hint}\n\n{START}\n\n41\n{END}\n\nNext {START}\n42{END}"]
    notebook = new.new_notebook(cells=[new.new_markdown_cell(cell) for cell in cells])
    (cell,) = runpy.run_path(str(SCRIPT))["for_students"](notebook).cells
    assert cell.source == f"{hint}\n\nNext "
