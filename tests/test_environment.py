"""environment.yml, pyproject.toml and constraints.txt name the same packages and agree on versions.

Conda is not run here: the file is parsed, not solved.
"""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# With the extras that pip is to take.
NOT_ON_CONDA_FORGE = {"math-core": "", "optimum-quanto": "", "playwright": "", "ray": "[serve]", "torch-pruning": ""}
CONDA_NAMES = {"prometheus-client": "prometheus_client", "torch": "pytorch"}
ELSEWHERE = {
    "gpu",  # brought by the build of torch that needs it, in the version that it pins
    "lint",  # type checkers, for who changes the code
}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(extras=("docs", "notebooks", "scale", "serve", "test")):
    extra = [line for name in extras for line in project()["optional-dependencies"][name]]
    return [Requirement(line) for line in project()["dependencies"] + extra]


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "exact versions only"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def pinned(requirement, **names):
    """As a line for conda, whose names for some packages are others than the Python package index's."""
    name = (CONDA_NAMES | names).get(requirement.name, requirement.name)
    return f"{name}={pins()[canonicalize_name(requirement.name)]}"


def environment(path="environment.yml"):
    return yaml.safe_load((ROOT / path).read_text())


def test_constraints_pin_every_requirement_within_its_range():
    for requirement in requirements(["docs", "lint", "notebooks", "scale", "serve", "test"]):
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


def test_conda_lists_the_same_packages_at_the_same_versions():
    listed = {line for line in environment()["dependencies"] if isinstance(line, str)}
    wanted = {pinned(r) for r in requirements() if r.name not in NOT_ON_CONDA_FORGE}
    assert listed == {"python=3.11", "pip"} | wanted


def test_conda_takes_the_rest_from_pip():
    (pip,) = (line["pip"] for line in environment()["dependencies"] if isinstance(line, dict))
    *others, editable = pip
    extras = [name for name in project()["optional-dependencies"] if name not in ELSEWHERE]
    assert editable == f"-e .[{','.join(extras)}]"
    assert dict(line.split("==") for line in others) == {
        name + more: pins()[name] for name, more in NOT_ON_CONDA_FORGE.items()
    }


def test_binder_takes_what_the_notebooks_need_with_torch_for_the_cpu():
    wanted = {pinned(r, torch="pytorch-cpu") for r in requirements(["notebooks", "serve"])}
    assert set(environment("binder/environment.yml")["dependencies"]) == {"python=3.11", "pip"} | wanted


def test_channels():
    for path in ("environment.yml", "binder/environment.yml"):
        assert environment(path)["channels"] == ["conda-forge", "nodefaults"]
    assert environment()["name"] == "plpkg"
