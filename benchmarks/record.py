"""How a benchmark keeps its results: ``data/measured/<room>_<script>.csv``, every row with what produced it."""

import argparse
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch

DATA = Path(__file__).parents[1] / "data" / "measured"


def machine(device: str = "cpu") -> str:
    """The processor that measured, in words."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} thread"


def git(*arguments: str) -> str:
    """What git prints, or nothing outside a checkout."""
    return subprocess.run(["git", *arguments], cwd=DATA.parents[1], capture_output=True, text=True).stdout.strip()


def write(name: str, rows: list[dict], *, device: str = "cpu", seed: int = 0, keep: pd.DataFrame | None = None) -> None:
    """Write what ``benchmarks.<name>`` measured in one run, and print it.

    The rows replace those of the run before, but for what of it is to be kept.
    """
    commit = git("rev-parse", "--short", "HEAD")
    if git("status", "--porcelain", "--", ".", ":!data"):  # data/ changes by measuring
        commit += "-dirty"
    origin = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit or "not a checkout",
        "seed": seed,
        "machine": machine(device),
        "versions": f"python {platform.python_version()}, torch {version('torch')}",
    }
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False))
    DATA.mkdir(exist_ok=True)
    frame = frame.assign(**origin)
    if keep is not None:
        frame = pd.concat([keep, frame])
    file = DATA / f"{name.replace('.', '_')}.csv"
    frame.to_csv(file, index=False, lineterminator="\n")
    print(f"written to data/measured/{file.name} ({origin['machine']}); run `make checksums` before committing it")


def sections(name: str, all_of_them: Mapping[str, Callable[[], Iterable[dict]]], description: str) -> None:
    """Run those sections of a script that its command line names, or all; each replaces its rows of the last run.

    A section ``title: part`` is a part of one that is too long to be lost as a whole. They are written one by one, so
    that a stop loses one at the most.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", metavar="|".join(all_of_them), help="only these; all by default")
    parser.add_argument("--missing", action="store_true", help="only those that the file lacks")
    arguments = parser.parse_args()
    path = DATA / f"{name.replace('.', '_')}.csv"
    for section in arguments.section or all_of_them:
        title, _, part = section.partition(": ")
        if arguments.missing and path.exists() and _rows_of(pd.read_csv(path), title, part).any():
            continue
        rows = []
        for row in all_of_them[section]():
            rows.append({"section": title} | ({"part": part} if part else {}) | row)
            print(rows[-1], flush=True)
        before = pd.read_csv(path) if path.exists() else None
        write(name, rows, keep=None if before is None else before[~_rows_of(before, title, part)])


def _rows_of(frame: pd.DataFrame, title: str, part: str) -> pd.Series:
    """Which rows are a section's."""
    found = frame["section"] == title
    return found & (frame.get("part", "") == part) if part else found
