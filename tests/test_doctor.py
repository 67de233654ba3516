"""Doctor must find what is broken, not only praise what is whole."""

import csv
import hashlib
import re
import sys
from importlib import metadata
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from plpkg import catalog, corpora, doctor
from plpkg.cli import app


def test_this_installation_is_whole():
    report = doctor.examine(full=True)
    assert report.ok, [check for check in report.checks if check.status == "FAIL"]
    statuses = {check.name: check.status for check in report.checks}
    assert {"Python", "torch", "[notebooks]", "[test]", "CPU", "GPU", "data", "Jupyter kernel"} <= set(statuses)
    assert statuses["corpora"] in {"OK", "NOTE"}


def test_the_texts_are_read_only_when_one_asks_for_it(monkeypatch):
    monkeypatch.setattr(corpora, "writer", Mock(side_effect=AssertionError("read")))
    (check,) = (check for check in doctor.examine().checks if check.name == "corpora")
    assert check.status == "SKIP"
    assert check.remedy.startswith("plpkg doctor --full")


@pytest.mark.parametrize(("version", "status"), [("3.10.1", "FAIL"), ("3.12.4", "OK")])
def test_old_python_fails(version, status):
    assert doctor.check_python(version).status == status


@pytest.mark.parametrize(
    ("line", "status", "remedy"),
    [
        ("numpy>=1", "OK", ""),
        ("numpy>=99", "FAIL", "pip install 'numpy>=99'"),
        ("no-such-package>=1", "FAIL", "pip install 'no-such-package>=1'"),
    ],
)
def test_dependency(line, status, remedy):
    check = doctor.check_dependency(Requirement(line))
    assert (check.status, check.remedy) == (status, remedy)


def installed_from(monkeypatch, direct_url):
    others, plpkg = metadata.distribution, Mock(read_text=lambda file: direct_url)
    monkeypatch.setattr(metadata, "distribution", lambda name: plpkg if name == "plpkg" else others(name))


CHECKOUT = '{"url": "file:///home/ann/plpkg", "dir_info": {"editable": true}}'
WHEEL = '{"url": "file:///home/ann/plpkg-1.0.0-py3-none-any.whl", "archive_info": {}}'
FOLDER = '{"url": "file:///home/ann/plpkg", "dir_info": {}}'


@pytest.mark.parametrize(
    ("direct_url", "remedy"),
    [
        (CHECKOUT, "in the checkout: pip install -e '.[serve]'"),
        (WHEEL, "pip install 'plpkg[serve]'"),
        (FOLDER, "pip install 'plpkg[serve]'"),
        (None, "pip install 'plpkg[serve]'"),  # from an index
    ],
)
def test_a_missing_extra_is_one_line_whose_remedy_fits_the_installation(monkeypatch, direct_url, remedy):
    installed_from(monkeypatch, direct_url)
    requirements = [Requirement("numpy>=1"), Requirement("no-such-package>=1"), Requirement("nor-this-one>=1")]
    expected = doctor.Check("[serve]", "SKIP", "without no-such-package, nor-this-one", remedy)
    assert doctor.check_extra("serve", requirements) == [expected]


def test_an_extra_that_markers_leave_empty_is_not_called_whole(monkeypatch):
    monkeypatch.setattr(
        metadata.distribution("plpkg").__class__, "requires", ["ray; python_version < '3' and extra == 'scale'"]
    )
    (check,) = (check for check in doctor.check_dependencies() if check.name == "[scale]")
    assert (check.status, check.remedy) == ("SKIP", "none needed")


def test_an_extra_with_a_package_of_another_version_fails():
    (check,) = doctor.check_extra("serve", [Requirement("pandas>=1"), Requirement("numpy>=99")])
    assert (check.name, check.status, check.remedy) == ("numpy", "FAIL", "pip install 'numpy>=99'")
    (check,) = doctor.check_extra("serve", [Requirement("numpy>=1")])
    assert (check.status, check.found) == ("OK", f"numpy {metadata.version('numpy')}")


def test_every_declared_dependency_is_looked_at(monkeypatch):
    looked_at = []

    def check_dependency(requirement):
        looked_at.append(str(requirement))
        return doctor.Check(requirement.name, "OK", "")

    monkeypatch.setattr(doctor, "check_dependency", check_dependency)
    doctor.check_dependencies()
    assert sorted(looked_at) == sorted(str(Requirement(line)) for line in metadata.requires("plpkg"))


def test_changed_and_missing_data_fail(tmp_path, monkeypatch):
    (tmp_path / "good.csv").write_text("a\n")
    (tmp_path / "changed.csv").write_text("b\n")
    right = hashlib.sha256(b"a\n").hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{right}  good.csv\n{right}  changed.csv\n{right}  gone.csv\n")
    monkeypatch.setattr(catalog, "data_path", lambda *parts: tmp_path.joinpath(*parts).resolve(strict=True))
    assert [(check.name, check.status) for check in doctor.check_data()] == [
        ("data/changed.csv", "FAIL"),
        ("data/gone.csv", "FAIL"),
    ]
    for damaged in ("", "half a line"):
        (tmp_path / "SHA256SUMS").write_text(damaged)
        assert [check.status for check in doctor.check_data()] == ["FAIL"]
    (tmp_path / "SHA256SUMS").unlink()
    assert [check.status for check in doctor.check_data()] == ["FAIL"]


def test_what_a_check_raises_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff")
    (tmp_path / "corpora.csv").write_text("writer,split\npublic,test\n")
    monkeypatch.setattr(catalog, "data_path", lambda *parts: tmp_path / parts[-1])
    found = {check.name: check.found for check in doctor.examine(full=True).checks if check.status == "FAIL"}
    assert {name: error.partition(":")[0] for name, error in found.items()} == {
        "data": "UnicodeDecodeError",
        "corpora": "KeyError",
    }


def test_a_kernel_whose_interpreter_is_gone_fails(tmp_path, monkeypatch):
    from jupyter_client import kernelspec

    get_kernel_spec = Mock()
    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", get_kernel_spec)
    gone = kernelspec.KernelSpec(argv=[str(tmp_path / "python")], display_name="old", resource_dir=str(tmp_path))
    get_kernel_spec.return_value = gone
    assert doctor.check_kernel().status == "FAIL"
    assert str(tmp_path) in doctor.check_kernel().remedy
    get_kernel_spec.side_effect = kernelspec.NoSuchKernel("python3")
    assert doctor.check_kernel().found == "no kernel python3"


def test_a_torch_that_does_not_load_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [check.status for check in doctor.check_processors()] == ["OK", "FAIL"]


@pytest.mark.parametrize(
    ("source", "status", "found"),
    [
        (None, "OK", "not installed"),
        ("__version__ = '0.28.0'", "OK", "0.28.0"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "FAIL", "torchvision::nms does not exist"),
        ("import no_such_module", "FAIL", "No module named 'no_such_module'"),
    ],
)
def test_a_torchvision_that_does_not_import_is_reported(tmp_path, monkeypatch, source, status, found):
    if source is None:
        monkeypatch.setattr("sys.path", [])
    else:
        (tmp_path / "torchvision.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    check = doctor.check_torchvision()
    sys.modules.pop("torchvision", None)
    assert check.status == status
    assert check.found.endswith(found)
    assert status == "OK" or "pip uninstall torchvision" in check.remedy


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Write a record of the corpora as it is here, changed by a function, for doctor to compare with."""
    rows = [row for name in ("public", *corpora.writers()) for row in corpora.writer(name).rows()]
    built_with = corpora.described(corpora.versions())

    def write(change):
        changed = [row | {"built_with": built_with} for row in rows]
        change(changed)
        with (tmp_path / "corpora.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(changed[0]))
            writer.writeheader()
            writer.writerows(changed)
        monkeypatch.setattr(catalog, "data_path", lambda *parts: tmp_path / parts[-1])
        return doctor.check_corpora()

    return write


def test_text_as_recorded_is_fine(recorded):
    assert recorded(lambda rows: None) == doctor.Check("corpora", "OK", "30 splits have the recorded text")


def other_version(rows):
    rows[0]["sha256"] = "0"
    rows[0]["built_with"] = rows[0]["built_with"].replace("jinja2 ", "jinja2 0.")


def other_build(rows):
    rows[4]["sha256"] = rows[7]["sha256"] = "0"


@pytest.mark.parametrize(
    ("change", "count", "reason"), [(other_version, 1, r"\(jinja2 .*, not 0\."), (other_build, 2, ".*another build")]
)
def test_other_text_is_noted_with_what_differs(recorded, change, count, reason):
    check = recorded(change)
    assert check.status == "NOTE"
    assert re.match(f"the text of {count} of 30 splits differs from the recorded one {reason}", check.found)


def test_a_missing_package_fails(monkeypatch):
    missing = Mock(side_effect=ModuleNotFoundError("the corpora need the package 'scipy', which is not installed"))
    monkeypatch.setattr(corpora, "writer", missing)
    check = doctor.check_corpora()
    assert check.status == "FAIL"
    assert "'scipy'" in check.found


def test_every_data_file_is_listed():
    listed = {line.split(maxsplit=1)[1] for line in catalog.data_path("SHA256SUMS").read_text().splitlines()}
    folder = catalog.data_path()
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS"}
    assert listed == present


def test_command_prints_a_line_each_and_exits_by_the_worst(monkeypatch):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "0 FAIL" in result.output
    broken = doctor.Diagnosis((doctor.Check("torch", "FAIL", "1.0, supported >=2", "pip install 'torch>=2'"),))
    monkeypatch.setattr(doctor, "examine", lambda full: broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install 'torch>=2'" in result.output


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).output == f"plpkg {metadata.version('plpkg')}\n"
    assert "doctor" in CliRunner().invoke(app, ["--help"]).output
