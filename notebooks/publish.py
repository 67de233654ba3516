"""Put the repository's name where the placeholder stands, and write the lessons for Colab.

``python notebooks/publish.py somebody/plpkg`` fills README.md, CITATION.cff, pyproject.toml and docs, and writes copies
into ``colab/``. Colab opens them once they are pushed to the branch that ``--branch`` names.
"""

import argparse
import posixpath
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "OWNER/NAME"
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}/(?!\.{1,2}$)[\w.-]{1,100}", flags=re.ASCII)
LINK = re.compile(r"(!?)(\[[^][]*\]\()(?!https?:)([^)\s#]+\.(?:csv|ipynb|json|md|png|py|svg|txt)(?:#[^)\s]*)?)\)")
INSTALL = """\
# Colab's own torch stays if it is new enough for plpkg; else pip replaces it (with CUDA, some 3 GB). pip may say that
# other packages of Colab want older versions: the lessons use none of these. torchvision and torchaudio have to match
# torch, and nothing here needs them. If Colab asks for a restart, restart, and go on with the cell below.
%pip install --quiet "plpkg[notebooks,serve] @ git+https://github.com/{name}@{branch}"
%pip uninstall --quiet --yes torchvision torchaudio
!plpkg fetch"""
COLAB = "https://colab.research.google.com"
BADGE = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{{}})"


def fill(root: Path, name: str) -> list[Path]:
    """Replace the placeholder in the texts of a checkout, whose code may say it, too; the texts that had one."""
    texts = [root / file for file in ("README.md", "CITATION.cff", "pyproject.toml")] + sorted(root.glob("docs/*.md"))
    filled = [path for path in texts if PLACEHOLDER.encode() in path.read_bytes()]
    for path in filled:
        path.write_bytes(path.read_bytes().replace(PLACEHOLDER.encode(), name.encode()))
    return filled


def absolute(markdown: str, name: str, branch: str) -> str:
    """The text of a lesson with its relative links as links to the repository; pictures as files of it."""

    def replaced(link: re.Match) -> str:
        picture, text, target = link.groups()
        place = f"raw.githubusercontent.com/{name}" if picture else f"github.com/{name}/blob"
        return f"{picture}{text}https://{place}/{branch}/{posixpath.normpath(f'notebooks/{target}')})"

    return LINK.sub(replaced, markdown)


def for_colab(notebook, name: str, branch: str, path: str):
    """A lesson with a badge below its title, absolute links, and a first code cell that installs the package."""
    for cell in notebook.cells:
        cell.source = absolute(cell.source, name, branch)  # code, too: some of it writes links
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                output.data["text/markdown"] = absolute(output.data["text/markdown"], name, branch)
    title, _, rest = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = f"{title}\n\n{BADGE.format(f'{name}/blob/{branch}/{path}')}\n{rest}"
    install = INSTALL.format(name=name, branch=branch)
    notebook.cells.insert(1, nbformat.v4.new_code_cell(install, id="install-on-colab"))
    return notebook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the repository on GitHub, owner/name")
    parser.add_argument("--colab", type=Path, default=ROOT / "colab", metavar="FOLDER")
    parser.add_argument("--branch", default="main")
    args = parser.parse_args()
    if not REPOSITORY.fullmatch(args.name) or args.name == PLACEHOLDER:
        print(f"a repository is named owner/name, as on GitHub, got {args.name!r}", file=sys.stderr)
        sys.exit(2)
    args.colab.mkdir(parents=True, exist_ok=True)
    for lesson in ROOT.glob("notebooks/[0-9]*.ipynb"):
        notebook = nbformat.read(lesson, as_version=4)
        copy = for_colab(notebook, args.name, args.branch, f"{args.colab.name}/{lesson.name}")
        nbformat.write(copy, args.colab / lesson.name)
    filled = [path.relative_to(ROOT).as_posix() for path in fill(ROOT, args.name)]
    print("filled:", ", ".join(filled) or "nothing, there is no placeholder left")
