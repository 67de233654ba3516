"""Do the tests see a fault? Small ones are put into a module, one at a time, and its tests are run.

The mutations are cosmic-ray's (``pip install cosmic-ray``: a tool for this alone, no dependency of the project). The
seed and the module's text decide which are drawn: first a place, then what is done there. Annotations are left alone.
A mutant is killed if a test fails or the tests take ten times as long as without it. Each has a process of its own,
forked from one that has the libraries already.

Run: ``python tests/mutants.py OUT.csv MODULE=TESTS [MODULE=TESTS ...]``, TESTS being files with commas between them;
``--count 10 --seed 0``. Rows that OUT.csv has already are kept, and not run again.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "peft", "opacus", "pandas", "seaborn", "scipy.stats", "fastapi")
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:nbval", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
NEEDED = ("plpkg", "tests", "benchmarks", "data", "notebooks", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md")
KEY = ("module", "seed", "operator", "occurrence", "tests")
FIELDS = (*KEY, "line", "outcome", "mutated")


def places(source: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Where the module can be mutated, ``(line, column)``, and the operators with their occurrences there."""
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    tree = get_ast(source)

    def nodes(node, annotation=False):
        annotation = annotation or node.type in ("annassign", "tfpdef", "import_from", "import_name")
        yield node, annotation
        previous = None
        for child in getattr(node, "children", ()):
            yield from nodes(
                child, annotation or (previous is not None and previous.type == "operator" and previous.value == "->")
            )
            previous = child

    every = list(nodes(tree))
    for name in sorted(name for name in operator_names() if "Variable" not in name):  # those want to be told names
        operator, occurrence = get_operator(name)(), 0
        for node, annotation in every:
            for start, _ in operator.mutation_positions(node):
                if not annotation:
                    found.setdefault(tuple(start), []).append((name, occurrence))
                occurrence += 1
    return found


def drawn(module: str, source: str, count: int, seed: int) -> list[dict]:
    rng, by_place = random.Random(f"{seed} {module}"), places(source)
    rows = []
    for place in rng.sample(sorted(by_place), min(count, len(by_place))):
        name, occurrence = rng.choice(by_place[place])
        rows.append({"module": module, "seed": seed, "operator": name, "occurrence": occurrence, "line": place[0]})
    return rows


def passes(copy: Path, tests: list[str], limit_s: float | None) -> bool:
    """Whether the tests pass, in a process that has all libraries already: to import them takes longer than most tests.

    Nothing of the package is imported before, so it is the copy's with its mutant.
    """
    child = os.fork()
    if not child:
        os.setsid()
        with (copy / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        sys.dont_write_bytecode = True
        code = 3
        try:
            code = pytest.main([*OPTIONS, *tests])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    began = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if limit_s is not None and time.monotonic() - began > limit_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # servers whose test is gone
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in (0, 1, 2, 4):  # 2 and 4: a mutant that cannot be imported
        raise RuntimeError(f"{code}: " + (copy / "output").read_text()[-2000:])
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("pairs", nargs="+", metavar="MODULE=TESTS")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    done = list(csv.DictReader(chosen.out.open(newline=""))) if chosen.out.exists() else []
    known = {tuple(row[field] for field in KEY) for row in done}
    os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}  # as tests/conftest.py has it
    for name in LIBRARIES:
        import_module(name)
    with tempfile.TemporaryDirectory() as folder, chosen.out.open("a", newline="") as file:
        copy, writer = Path(folder), csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for name in NEEDED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        for module, tests in (pair.split("=") for pair in chosen.pairs):
            source = (ROOT / module).read_text()
            rows = [row | {"tests": tests} for row in drawn(module, source, chosen.count, chosen.seed)]
            rows = [row for row in rows if tuple(str(row[field]) for field in KEY) not in known]
            if not rows:
                continue
            began = time.monotonic()
            if not passes(copy, tests.split(","), None):
                sys.exit(f"the tests of {module} fail without any mutant")
            limit_s = 60 + 10 * (time.monotonic() - began)
            for row in rows:
                mutated = mutate_code(source, get_operator(row["operator"])(), row["occurrence"])
                (copy / module).write_text(mutated)
                row["outcome"] = "survived" if passes(copy, tests.split(","), limit_s) else "killed"
                row["mutated"] = mutated.splitlines()[row["line"] - 1].strip()
                writer.writerow(row)
                file.flush()
                print(row["outcome"], module, row["line"], row["mutated"], flush=True)
            (copy / module).write_text(source)


if __name__ == "__main__":
    main()
