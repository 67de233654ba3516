"""JupyterLab sets as mathematics what a notebook means as such: an amount in dollars is none, escaped or not."""

import re

import nbformat
import pytest

pytestmark = pytest.mark.browser
CODE = re.compile(r"^```.*?^```|(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL | re.MULTILINE)
TEX = re.compile(r"\$\$.+?\$\$|\$(?!\s)[^$]+(?<!\s)\$(?!\d)", re.DOTALL)
"""As in Pandoc: a closing dollar has no space before it and no digit after it."""
SENTINEL = "$x$"
"""At the end of each text: JupyterLab sets a text's mathematics at once, so where this is set, all is."""
IS_SET = """count => {
    const texts = [...document.querySelectorAll(".jp-Notebook .jp-RenderedMarkdown, .jp-Notebook .jp-RenderedHTML")]
    return texts.length == count && texts.every(text => text.querySelector(":scope > :last-child mjx-container"))
}"""


def meant(text: str) -> int:
    """How many pieces of mathematics a Markdown text has."""
    return len(TEX.findall(CODE.sub("", text).replace(r"\$", "")))


def texts(cell) -> list[tuple[dict, str]]:
    """Where a cell holds a text that JupyterLab shows, and may set as mathematics: its own, or an output's."""
    if cell.cell_type == "markdown":
        return [(cell, "source")]
    shown = [output.data for output in cell.outputs if "data" in output]
    return [(data, kind) for data in shown for kind in ("text/html", "text/markdown") if kind in data]


def otherwise_set(lab, page, notebook) -> list[str]:
    """The sources of the cells where JupyterLab sets other mathematics than they mean."""
    whole = nbformat.read(notebook, 4)
    whole.metadata = {}  # without a kernel's name JupyterLab starts none before it has asked
    expected = []
    for cell in whole.cells:
        for holder, kind in texts(cell):
            holder[kind] += f"<p>{SENTINEL}</p>" if kind == "text/html" else f"\n\n{SENTINEL}"
        expected.append([meant(holder[kind]) for holder, kind in texts(cell)])
    nbformat.write(whole, lab.folder / "whole.ipynb")
    page.goto(f"{lab.address}/lab/tree/whole.ipynb?reset")
    page.wait_for_function(IS_SET, arg=sum(map(len, expected)))
    pieces = page.locator(".jp-Notebook .jp-Cell").evaluate_all(
        "cells => cells.map(cell => cell.querySelectorAll('mjx-container').length)"
    )
    triples = zip(whole.cells, expected, pieces, strict=True)
    return [cell.source.removesuffix(SENTINEL) for cell, counts, count in triples if count != sum(counts)]


def test_no_prose_is_set_as_mathematics(lab, page, notebook):
    assert otherwise_set(lab, page, notebook) == []


def test_prose_between_two_dollars_is_found(lab, page, tmp_path):
    wrong = [
        r"A month costs \$2.92 if 1,000 share, \$14.60 if 100 do.",
        "A month costs $2.92 if 1,000 share, $14.60 if 100 do.",
        r"They cost \$0.53 and \$0.28.",
    ]
    right = ["$r$ dollars, `$2` and `$5`, *an* $x_1$:\n\n$$y = 2 x$$", "```\n$2 and $5\n```", r"It costs \$2."]
    cells = [nbformat.v4.new_markdown_cell(text) for text in wrong + right]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "prose.ipynb")
    assert [text.strip() for text in otherwise_set(lab, page, tmp_path / "prose.ipynb")] == wrong
