"""The documentation site: ``make docs``. Sphinx reads what ``pages.py`` lays out in ``_build/source``."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

DOCS = Path(__file__).parent

project = "plpkg"
extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc"]
html_theme = "furo"
html_title = "plpkg"
html_static_path = [str(DOCS / "static")]
html_css_files = ["plpkg.css"]
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"

exclude_patterns = ["README.md"]  # index.md includes it
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the outputs are committed
nb_mime_priority_overrides = [("*", "application/vnd.jupyter.widget-view+json", None)]  # there is no kernel

add_module_names = False  # each page has its module as its title
autodoc_inherit_docstrings = False  # a docstring of pytest's or torch's links to their pages
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
numpydoc_show_class_members = False  # autodoc describes them
toc_object_entries_show_parents = "hide"

OTHERS = sorted({*sys.stdlib_module_names, *packages_distributions()} - {"plpkg"})
# Every name in a docstring or a signature leads somewhere, but for
nitpick_ignore_regex = [
    # what others define: offline there is no inventory of their pages
    ("py:.*", rf"({'|'.join(map(re.escape, OTHERS))})\..*"),
    # protobuf's messages, type variables, and what has no docstring of its own
    ("py:class", r"plpkg\.residual\.wire\.(wire_pb2\..*|connection\.Result)"),
    ("py:class", r"plpkg\.validation\.T|Arguments"),
    ("py:data", r"(.*\.)?[A-Z_]+"),
    ("py:attr", r"address|users"),
    # pieces of signatures that are no Python, for the default values that pydantic and PEFT give
    (
        "py:class",
        r"(Min|Max)Len|[GL][et]|FailFast|FieldInfo|NoneType|PeftType|Pydantic\w+|TaskType|dict\[str|t\.Any|plpkg\.(adapters\.config\._listed|serving\.service\.http\.bodies\._one)",
    ),
]


def mathml(display: bool):
    """What renders a formula: as MathML, which browsers show without a script."""
    from docutils import nodes
    from math_core import LatexError, LatexToMathML
    from sphinx.util import logging

    convert = LatexToMathML(fancy_error=False).convert_with_local_state

    def visit(translator, node):
        try:
            translator.body.append(convert(node.astext(), displaystyle=display))
        except LatexError as error:
            logging.getLogger(__name__).warning("%s in %s", error, node.astext(), location=node)
        raise nodes.SkipNode

    return visit, None


def setup(app) -> None:
    sys.path.insert(0, str(DOCS))
    import pages

    pages.write(Path(app.srcdir))
    app.add_html_math_renderer("mathml", mathml(display=False), mathml(display=True))
    app.connect("autodoc-process-docstring", pages.add_notebooks, priority=900)  # after numpydoc
    app.connect("autodoc-skip-member", pages.skip_alias)
    app.connect("missing-reference", pages.find_elsewhere)
