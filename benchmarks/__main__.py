"""``make bench``: every script that says how it is run, and not that it is no part of this."""

import ast
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def scripts() -> list[str]:
    """Their names, as after ``python -m``."""
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        name = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        says = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        if f"``python -m {name}" in says and "Not part of ``make bench``" not in says:
            found.append(name)
    return found


if __name__ == "__main__":
    for name in scripts():
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", name], check=True)
