"""The repository's name in its place, and the lessons for Colab: what installs the package, and links that lead out."""

import contextlib
import io
import re
import runpy
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
CODE = "plpkg/adapters/config.py"  # its docstring says OWNER/NAME, and means any repository
NAME = "some-body/a.name_1"
ANY_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def publish(checkout, *arguments):
    """Run the script of a checkout: its exit status, and what it says on standard output and error."""
    script = str(checkout / "notebooks" / "publish.py")
    said, wrong, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        patch.setattr(sys, "argv", [script, *arguments])
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    return code, said.getvalue(), wrong.getvalue()


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is published, with the placeholder in all texts that may have it."""
    folder = tmp_path_factory.mktemp("checkout")
    files = ["README.md", "CITATION.cff", "pyproject.toml", CODE, "notebooks/publish.py"]
    files += [path.relative_to(ROOT).as_posix() for path in [*(ROOT / "docs").glob("*.md"), *LESSONS]]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    for file in ("CITATION.cff", "pyproject.toml", "docs/tour.md"):
        with (folder / file).open("ab") as text:
            text.write(b"# https://github.com/OWNER/NAME, OWNER/NAME\r\n")
    return folder


@pytest.fixture(scope="module")
def published(checkout):
    """What was there before, what is there after, and what was said."""
    before = contents(checkout)
    code, said, wrong = publish(checkout, NAME)
    assert (code, wrong) == (0, "")
    return before, contents(checkout), said


def test_the_placeholder_is_filled_and_nothing_else_changes(published):
    before, after, said = published
    changed = {file for file in before if before[file] != after[file]}
    assert changed >= {"CITATION.cff", "pyproject.toml", "docs/tour.md"}
    assert b"OWNER/NAME" in after[CODE]
    for file in before.keys() - {CODE, "notebooks/publish.py"}:
        assert after[file] == before[file].replace(b"OWNER/NAME", NAME.encode()), file
    assert {file.strip() for file in said.removeprefix("filled:").split(",")} == changed
    assert after.keys() - before.keys() == {f"colab/{lesson.name}" for lesson in LESSONS}


def test_again_it_changes_nothing(checkout, published):
    assert publish(checkout, NAME) == (0, "filled: nothing, there is no placeholder left\n", "")
    assert contents(checkout) == published[1]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_copy_is_the_lesson_with_one_more_cell(checkout, published, lesson):
    copy, original = (nbformat.read(file, as_version=4) for file in (checkout / "colab" / lesson.name, lesson))
    nbformat.validate(copy)
    install = copy.cells.pop(1)
    assert install.cell_type == "code"
    assert f'%pip install --quiet "plpkg[notebooks,serve] @ git+https://github.com/{NAME}@main"' in install.source
    assert install.source.endswith("!plpkg fetch")
    assert "whl/cpu" not in install.source
    badge = copy.cells[0].source.splitlines()[2]
    assert badge.endswith(f"(https://colab.research.google.com/github/{NAME}/blob/main/colab/{lesson.name})")
    copy.cells[0].source = copy.cells[0].source.replace(f"\n{badge}\n", "", 1)
    assert len(copy.cells) == len(original.cells)
    for cell, same in zip(copy.cells, original.cells, strict=True):
        for place in ("github.com", "raw.githubusercontent.com"):
            path = rf"https://{place}/{re.escape(NAME)}/(?:blob/)?main/(?:notebooks/)?"
            cell.source = re.sub(path, "", cell.source)
        assert cell.source == same.source.replace("](../", "](")
        assert (cell.cell_type, cell.metadata, cell.id) == (same.cell_type, same.metadata, same.id)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_no_relative_link_is_left_and_each_leads_to_a_file(checkout, published, lesson):
    copy = nbformat.read(checkout / "colab" / lesson.name, as_version=4)
    texts = [cell.source for cell in copy.cells if cell.cell_type == "markdown"]
    for cell in copy.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("data", {}).get("text/markdown", ""))
    links = [markdown or html for markdown, html in ANY_LINK.findall("\n".join(texts))]
    ours = [link for link in links if f"/{NAME}/" in link and "colab." not in link]
    assert len(ours) > 3
    assert all(link.startswith("https://") for link in links)
    for link in ours:
        assert (ROOT / link.partition("/main/")[2].partition("#")[0]).is_file(), link


@pytest.mark.parametrize("name", ["name", "OWNER/NAME", "a/b/c", "https://github.com/a/b", "a b/c", "-a/b", "a/..", ""])
def test_what_is_no_repository_is_refused_in_a_sentence(checkout, published, name):
    sentence = f"a repository is named owner/name, as on GitHub, got {name!r}\n"
    assert publish(checkout, "--", name) == (2, "", sentence)
    assert contents(checkout) == published[1]


def test_copies_go_where_they_are_asked_for(checkout, published, tmp_path):
    assert publish(checkout, NAME, "--colab", str(tmp_path / "lessons"), "--branch", "trunk")[0] == 0
    copy = (tmp_path / "lessons" / LESSONS[0].name).read_text("utf-8")
    assert f"/github/{NAME}/blob/trunk/lessons/{LESSONS[0].name})" in copy
    assert f"github.com/{NAME}/blob/trunk/docs/glossary.md" in copy


def test_pictures_are_files_and_links_in_code_lead_out_as_well(tmp_path):
    text = "![a](figures/a.png) [b](reports/b.ipynb#C,-d) [e](https://e.org/f.md)"
    code = 'Markdown("[g](../docs/g.md)"); table["h"](rows.csv_of)'
    cells = [nbformat.v4.new_markdown_cell(f"# T\n\n{text}"), nbformat.v4.new_code_cell(code)]
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebooks / "00_t.ipynb")
    shutil.copy(ROOT / "notebooks" / "publish.py", notebooks)
    for file in ("README.md", "CITATION.cff", "pyproject.toml"):
        (tmp_path / file).touch()
    assert publish(tmp_path, "a/b")[0] == 0
    first, _, second = nbformat.read(tmp_path / "colab" / "00_t.ipynb", as_version=4).cells
    picture, link, other = first.source.splitlines()[-1].split(" ")
    assert picture == "![a](https://raw.githubusercontent.com/a/b/main/notebooks/figures/a.png)"
    assert link == "[b](https://github.com/a/b/blob/main/notebooks/reports/b.ipynb#C,-d)"
    assert other == "[e](https://e.org/f.md)"
    assert second.source == 'Markdown("[g](https://github.com/a/b/blob/main/docs/g.md)"); table["h"](rows.csv_of)'
