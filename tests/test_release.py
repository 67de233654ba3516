"""What a release says of itself agrees: its version, whom to cite, versions that were tried, formats of files."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import plpkg
from plpkg.files import checkpoints
from plpkg.residual.wire import terms

ROOT = Path(__file__).parents[1]
STABILITY = (ROOT / "docs" / "stability.md").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
SYSTEMS = ["PrivateLoRA", "Locret", "Ghost Clipping", "Workers AI", "Punica", "Autonomous Learning", "SmolLM2"]


def test_the_newest_entry_of_the_changelog_is_this_version():
    number, date = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M).groups()
    assert number == plpkg.__version__
    assert (CITATION["version"], str(CITATION["date-released"])) == (number, date)


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_can_be_cited(system):
    (reference,) = (each for each in CITATION["references"] if system in each["title"])
    assert reference["authors"]
    assert re.fullmatch(r"10\.\d+/\S+", reference.get("doi", "")) or reference["url"].startswith("https://")


def tried():
    """The table of libraries: for each its version in CI."""
    return dict(re.findall(r"^\| (Python|torch|transformers|PEFT|Opacus) \| (\S+) \|", STABILITY, flags=re.M))


def test_the_versions_that_ci_runs_are_those_of_the_constraints():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    versions = tried()
    assert versions.pop("Python") in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert versions == {name: pins[name.lower()] for name in ("torch", "transformers", "PEFT", "Opacus")}


def test_the_versions_of_formats_are_those_that_are_written():
    assert re.search(rf"`plpkg\.files\.checkpoints` \| {checkpoints.VERSION}, in its metadata", STABILITY)
    assert re.search(rf"\(protobuf\) \| protocol {terms.PROTOCOL} \|", STABILITY)


def test_the_public_modules_are_there():
    (listed,) = re.findall(r"^- \*\*Names\*\*: (.*)$", STABILITY, flags=re.M)
    for name in re.findall(r"`([\w.]+)`", listed):
        if name != "__all__":
            __import__(f"plpkg.{name.removeprefix('plpkg.')}")


def test_the_package_says_who_made_it_and_where_it_is_and_that_it_is_typed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(project["urls"])
    assert (Path(plpkg.__path__[0]) / "py.typed").is_file()
    assert "Typing :: Typed" in metadata.metadata("plpkg").get_all("Classifier")


def test_the_notice_can_be_read_as_the_docstring_says():
    notice = metadata.distribution("plpkg").read_text("licenses/NOTICE")
    assert "SmolLM2-135M-Instruct" in notice
