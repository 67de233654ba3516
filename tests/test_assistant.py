"""The checker of notebook 10, which combines rooms and belongs to none: it stands in a cell."""

import re
from pathlib import Path

import bm25s
import nbformat

from plpkg.exercise import check_function

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "10_private_assistant.ipynb"
CELLS = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}


def verdict(cell, answer):
    """What the cell says of a function, or of the name of one of the solution's."""
    names = dict(bm25s=bm25s, check_function=check_function)
    names["words"] = lambda texts: bm25s.tokenize(texts, stopwords=None, show_progress=False)
    exec(re.search(r"```python\n(.*?)```", CELLS["solution"], flags=re.S)[1], names)
    names["answer"] = names.get(answer, answer)
    setting, _, last = re.sub(r"^(my_\w+) = None$", r"\1 = answer", CELLS[cell], flags=re.M).rpartition("\n")
    exec(setting, names)
    return eval(last, names)


def test_the_solution_is_right():
    assert verdict("bm25", "my_bm25"), verdict("bm25", "my_bm25")


def test_likely_mistakes_are_told():
    counted = verdict("bm25", lambda f, length, mean, notes, having: float(f))
    assert not counted
    assert "logarithm" in counted.message
