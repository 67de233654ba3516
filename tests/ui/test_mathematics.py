"""JupyterLab sets as mathematics what a notebook means as such: an amount in dollars is none, escaped or not."""

import re

import nbformat
import pytest

pytestmark = pytest.mark.browser
CODE = re.compile(r"^```.*?^```|(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL | re.MULTILINE)
TEX = re.compile(r"\$\$.+?\$\$|\$(?!\s)[^$]+(?<!\s)\$(?!\d)", re.DOTALL)
"""As in Pandoc: a closing dollar has no space before it and no digit after it."""
SENTINEL = "$x$"
"""At the end of each text: JupyterLab sets a cell's mathematics at once, so where this is set, all is."""
IS_SET = """count => {
    const texts = [...document.querySelectorAll(".jp-MarkdownCell .jp-RenderedMarkdown")]
    return texts.length == count && texts.every(text => text.querySelector(":scope > :last-child mjx-container"))
}"""


def meant(text: str) -> int:
    """How many pieces of mathematics a Markdown text has."""
    return len(TEX.findall(CODE.sub("", text).replace(r"\$", "")))


def otherwise_set(lab, page, notebook) -> list[str]:
    """The texts, and the tables among the outputs, where JupyterLab sets other mathematics than they mean."""
    whole = nbformat.read(notebook, 4)
    whole.metadata = {}  # without a kernel's name JupyterLab starts none before it has asked
    texts = [cell for cell in whole.cells if cell.cell_type == "markdown"]
    for cell in texts:
        cell.source += f"\n\n{SENTINEL}"
    nbformat.write(whole, lab.folder / "whole.ipynb")
    page.goto(f"{lab.address}/lab/tree/whole.ipynb?reset")
    page.wait_for_function(IS_SET, arg=len(texts))
    pieces = page.locator(".jp-Notebook .jp-Cell").evaluate_all(
        "cells => cells.map(cell => cell.querySelectorAll('mjx-container').length)"
    )
    return [
        cell.source.removesuffix(SENTINEL)
        for cell, count in zip(whole.cells, pieces, strict=True)
        if count != (meant(cell.source) if cell in texts else 0)
    ]


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
