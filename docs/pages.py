"""What the site is made of: copies of the notebooks and texts, and a page for each module.

A public name is one that a room's front door, its package, has in ``__all__``. It is described on the page of the
module that defines it, with links to the notebooks that use it.
"""

import ast
import re
import shutil
from functools import cache
from importlib import import_module
from inspect import getdoc, isclass, isfunction, ismodule
from pathlib import Path
from pkgutil import walk_packages
from types import GenericAlias

import nbformat
from sphinx.pycode import ModuleAnalyzer

import plpkg
from plpkg import recorded

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LESSONS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
REPORTS = sorted((ROOT / "notebooks" / "reports").glob("[0-9]*.ipynb"))
NOTEBOOKS = LESSONS + REPORTS
MODELS = [
    "smollm2",
    "smollm2-reader",
    "retention/smollm2-reader",
    "minilm",
    "backbone",
    "serving",
    "people",
    "diary",
    "clipping",
    "autonomy/diary",
]  # each has a card
TEXTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "NOTICE",
    "CITATION.cff",
    *(f"docs/{page}.md" for page in ("container", "epsilon", "glossary", "how", "stability", "tour", "which")),
    *(f"docs/from/{tool}.md" for tool in ("opacus", "kvpress", "vllm", "petals", "ollama")),
    "data/README.md",
    "data/measured/README.md",
    *(f"data/{model}/README.md" for model in MODELS),
    "examples/train_privately.py",
    "data/claims.csv",
    "data/measured/residual_families.csv",
]


def last(name: str) -> str:
    return name.rpartition(".")[2]


# By name, and whether it is a package. Without what `plpkg --help` describes, and what protobuf has written.
MODULES = {
    module.name: module.ispkg
    for module in walk_packages(plpkg.__path__, "plpkg.")
    if last(module.name) not in {"__main__", "cli", "commands", "wire_pb2"}
}


def home(value, name: str) -> str:
    """Where what a dotted name leads to is defined. A constant does not know: it is where its docstring stands."""
    if ismodule(value):
        return value.__name__
    if isclass(value) or isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    inside = [module for module in MODULES if module.startswith(name.removesuffix(last(name)))]
    return next((f"{module}.{last(name)}" for module in inside if last(name) in constants(module)), name)


@cache
def constants(module: str) -> set[str]:
    """What a module defines and describes that is neither function nor class."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return {name for owner, name in analyzer.attr_docs if not owner}


def member(owner, name: str):
    """What ``from owner import name`` gives."""
    if ismodule(owner) and not hasattr(owner, name):
        import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def names_in(code: str) -> set[str]:
    """Homes of what of plpkg some code names, and of what it names on the way there."""
    nodes, bound, names = list(ast.walk(ast.parse(code))), {}, set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "plpkg":
            bound |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in bound:
                place, name = bound[first]
                value = import_module(place)
                for part in (name, *rest):
                    try:
                        value = member(value, part)
                    except (AttributeError, ImportError):  # of an instance, or of what a call returns
                        break
                    place = home(value, f"{place}.{part}")
                    names.add(place)
    return names


@cache
def uses() -> dict[str, list[str]]:
    """For each home the pages of the notebooks that name it, in order: ``02_residual``, ``reports/02_residual``."""
    uses = {}
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        page = path.relative_to(ROOT / "notebooks").with_suffix("").as_posix()
        for name in names_in("\n".join(cell.source for cell in cells if cell.cell_type == "code")):
            uses.setdefault(name, []).append(page)
    return uses


def public(module: str) -> dict[str, object]:
    """What a room's front door, its package, names in ``__all__``."""
    names = getattr(import_module(module), "__all__", []) if MODULES.get(module) else []
    return {f"{module}.{name}": getattr(import_module(module), name) for name in names}


@cache
def doors() -> dict[str, str]:
    """The public name of what has one, by its home."""
    return {home(value, name): name for module in MODULES for name, value in public(module).items()}


def notebooks_of(place: str) -> str:
    """Links to the notebooks that use what has this home; if none does and it is public, to its room's."""
    pages = uses().get(place, [])
    if not pages and place in doors():
        rooms = [room for room in plpkg.ROOMS if doors()[place].startswith(f"plpkg.{room}.")]
        pages = [f"{plpkg.ROOMS[room][0]}_{last(room)}" for room in sorted(rooms, key=len)[-1:]]
    return ", ".join(f":doc:`{titled(page)} </notebooks/{page}>`" for page in pages)


def titled(page: str) -> str:
    """``02 residual``, or ``02 residual (report)``."""
    folder, _, stem = page.rpartition("/")
    return stem.replace("_", " ") + (" (report)" if folder else "")


def add_notebooks(app, what, name, value, options, lines) -> None:
    """Sphinx's hook ``autodoc-process-docstring``: at the end, the public name and the notebooks."""
    if what in {"class", "data", "exception", "function", "module"}:
        place = home(value, name)
        if place in doors() and doors()[place] != name:
            lines += ["", f"*Public as* ``{doors()[place]}``"]
        if links := notebooks_of(place):
            lines += ["", f"*In the notebooks:* {links}", ""]


def find_elsewhere(app, env, node, contnode):
    """Sphinx's hook ``missing-reference``: a docstring may use a public name, or one that its module imports."""
    parts, module = node["reftarget"].split("."), node.get("py:module")
    homes = {name: place for place, name in doors().items()}
    if module and hasattr(import_module(module), parts[0]):
        homes[parts[0]] = home(getattr(import_module(module), parts[0]), f"{module}.{parts[0]}")
    for end in range(len(parts), 0, -1):
        if place := homes.get(".".join(parts[:end])):
            node["reftarget"] = ".".join([place, *parts[end:]])
            resolve = env.domains.python_domain.resolve_xref
            return resolve(env, node["refdoc"], app.builder, node["reftype"], node["reftarget"], node, contnode)
    return None


def skip_alias(app, what, name, value, skip, options) -> bool | None:
    """Sphinx's hook ``autodoc-skip-member``: Sphinx 9 cannot format the signature of ``dict[str, int]``."""
    return True if type(value) is GenericAlias else None


def directive(kind: str, argument: str, *lines: str) -> str:
    return "\n".join([f".. {kind}:: {argument}", *(f"   {line}" for line in lines)])


def summary(value) -> str:
    """A docstring's first paragraph. Its roles name what stands beside it, which a table elsewhere cannot link."""
    said = getdoc(value) if callable(value) or ismodule(value) else ""
    return re.sub(r":\w+:`~?([^`]*)`", r"``\1``", " ".join(said.partition("\n\n")[0].split()))


def write_modules(folder: Path) -> None:
    """Write the modules' pages for autodoc; a room's begins with its public names."""
    folder.mkdir()
    for module in ["plpkg", *MODULES]:
        names = public(module)
        members = () if names else (":members:",)  # a door's names are described where they are defined
        blocks = [f"{module}\n{'=' * len(module)}", directive("automodule", module, *members)]
        if names:
            homes = {name: home(value, name) for name, value in names.items()}
            cells = (
                (f":obj:`{last(name)} <{homes[name]}>`", summary(names[name]), notebooks_of(homes[name]))
                for name in names
            )
            rows = [line for row in cells for line in (f"* - {row[0]}", *(f"  - {cell}" for cell in row[1:]))]
            blocks.append(directive("list-table", "Public names", ":widths: 25 50 25", "", *rows))
        if inner := [f"{last(other)} <{other}>" for other in MODULES if other == f"{module}.{last(other)}"]:
            blocks.append(directive("toctree", "", ":maxdepth: 1", "", *inner))
        (folder / f"{module}.rst").write_text("\n\n".join(blocks) + "\n")


def copy(path: Path, source: Path) -> None:
    """Copy a file to where the relative links expect it."""
    target = source / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def anchored(source: str) -> str:
    """A text cell whose links to headings of notebooks are as the site has them: JupyterLab keeps their capitals."""
    return re.sub(r"(\.ipynb#)([^)]+)", lambda link: link[1] + re.sub(r"[^\w-]", "", link[2].lower()), source)


def described(notebook):
    """Tell myst-nb the pictures' alternative texts, which it takes from the cell and Jupyter from the output."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = anchored(cell.source)
        pictures = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        alts = [picture.metadata["image/png"]["alt"] for picture in pictures]
        cell.metadata |= {"mystnb": {"image": {"alt": " ".join(alts)}}} if alts else {}
    return notebook


FAMILIES = """# Model families

Which can be divided between a device and a cloud, by which method of {doc}`residual </api/plpkg.residual>`. *ok*: over
a connection, the tokens of `generate()` and the gradients of one process. Recorded by
`python -m benchmarks.residual.families`, with [caveats](data/measured/README.md).
"""


def families() -> str:
    """The page of the model families, from what was recorded."""
    table = recorded.section("residual_families", "families").drop(columns="difference").fillna({"reason": ""})
    rows = [list(table), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join([FAMILIES, *(f"| {' | '.join(row)} |" for row in rows), ""])


def write(source: Path) -> None:
    """Lay out all that Sphinx reads, in an empty folder."""
    for path in [*(ROOT / text for text in TEXTS), *ROOT.glob("notebooks/figures/*.[ps][nv]g")]:
        copy(path, source)
    shutil.copy(DOCS / "index.md", source)
    (source / "notebooks" / "reports").mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        nbformat.write(described(nbformat.read(path, as_version=4)), source / path.relative_to(ROOT))
    (source / "families.md").write_text(families())
    write_modules(source / "api")
