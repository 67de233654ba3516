"""The site's links from a public name to the notebooks that use it, and what goes into it. ``make docs`` builds it."""

import importlib
import os
import re
from pathlib import Path

import nbformat
import pytest

from plpkg import recorded

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("pages")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from plpkg import communication\ncommunication.low_rank('gpt2')", "plpkg.communication.formulas.low_rank"),
        ("from plpkg.communication import low_rank as f\nf('gpt2')", "plpkg.communication.formulas.low_rank"),
        ("from plpkg import communication\nprint(communication.PHASES[0])", "plpkg.communication.run.PHASES"),
        ("from plpkg import autonomy\nautonomy.fleet()", "plpkg.autonomy.fleet.fleet"),
        ("from plpkg.serving import service\nservice.plots.tiers", "plpkg.serving.service.plots"),
        (
            "from plpkg.retention import RetainingHeads\nRetainingHeads.attach(m).save('h')",
            "plpkg.retention.head.RetainingHeads",
        ),
    ],
)
def test_a_name_is_found_whatever_door_it_comes_by(pages, code, name):
    assert name in pages.names_in(code)


def test_names_that_are_only_imported_or_somebody_elses_are_not_used(pages):
    assert pages.names_in("from plpkg.communication import low_rank\nimport numpy as np\nnp.ones(2)") == set()


def test_links_to_headings_are_as_the_site_has_them(pages):
    link = "[see](reports/01_communication.ipynb#What-the-connection-adds) and [that](../docs/glossary.md#nat)"
    assert pages.anchored(link) == link.replace("What-the-connection-adds", "what-the-connection-adds")


def described(pages, name, value, what="function"):
    lines = ["What it says."]
    pages.add_notebooks(None, what, name, value, {}, lines)
    return "\n".join(lines)


def test_the_hook_links_a_name_to_the_notebooks_that_use_it_or_to_that_of_its_room(pages, monkeypatch):
    from plpkg.communication import low_rank

    monkeypatch.setattr(pages, "uses", lambda: {"plpkg.communication.formulas.low_rank": ["02_residual"]})
    text = described(pages, "plpkg.communication.formulas.low_rank", low_rank)
    assert text.startswith("What it says.\n\n*Public as* ``plpkg.communication.low_rank``\n\n")
    assert ":doc:`02 residual </notebooks/02_residual>`" in text
    assert "01_communication" not in text
    from plpkg.clipping import Clip, clip
    from plpkg.serving.service import Store

    monkeypatch.setattr(pages, "uses", dict)
    assert "</notebooks/05_clipping>" in described(pages, "plpkg.clipping.clip.Clip", Clip, "class")
    assert "</notebooks/07_service>" in described(pages, "plpkg.serving.service.store.Store", Store, "class")
    assert described(pages, "plpkg.clipping.clip", clip, "module") == "What it says."


def test_every_notebook_is_linked_from_a_name_that_it_uses(pages):
    named = {page for those in pages.uses().values() for page in those}
    folder = ROOT / "notebooks"
    assert named == {path.relative_to(folder).with_suffix("").as_posix() for path in pages.NOTEBOOKS}
    assert "reports/02_residual" in pages.uses()["plpkg.residual.config.PrivateLoraConfig"]


def test_every_text_of_docs_is_on_the_site_and_so_is_what_it_links(pages):
    figures = ROOT.glob("notebooks/figures/*.[ps][nv]g")
    on_the_site = {*(ROOT / text for text in pages.TEXTS), *pages.NOTEBOOKS, *figures}
    listed = (ROOT / "docs" / "index.md").read_text().split()
    texts = [path for path in ROOT.glob("docs/**/*.md") if path.name != "index.md" and "_build" not in path.parts]
    assert len(texts) > 9
    for text in texts:
        assert text in on_the_site, text
        assert text.relative_to(ROOT).with_suffix("").as_posix() in listed, text
        for link in re.findall(r"\]\(((?!https?:|#)[^)#]+)", text.read_text()):
            assert (text.parent / link).resolve() in on_the_site, (text, link)


def test_the_pages_are_the_notebooks_the_texts_and_a_page_a_module(pages, tmp_path):
    pages.write(tmp_path)
    for path in pages.NOTEBOOKS:
        copy = nbformat.read(tmp_path / path.relative_to(ROOT), as_version=4)
        for cell, original in zip(copy.cells, nbformat.read(path, as_version=4).cells, strict=True):
            assert cell.get("outputs") == original.get("outputs")
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    assert output.metadata["image/png"]["alt"] in cell.metadata["mystnb"]["image"]["alt"]
    room = (tmp_path / "api" / "plpkg.communication.rst").read_text()
    assert ":obj:`low_rank <plpkg.communication.formulas.low_rank>`" in room
    assert {"plpkg.rst", "plpkg.catalog.rst", "plpkg.residual.wire.cloud.rst"} <= set(os.listdir(tmp_path / "api"))
    assert (tmp_path / "data" / "measured" / "README.md").exists()
    page = (tmp_path / "families.md").read_text()
    for row in recorded.section("residual_families", "families").itertuples():
        cells = ["" if isinstance(cell, float) else cell for cell in (*row[1:-2], row.reason)]  # without the difference
        assert f"| {' | '.join(cells)} |" in page
