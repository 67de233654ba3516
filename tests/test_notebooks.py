"""What a notebook of this project has to look like; nbval then re-runs it and compares its outputs.

A lesson, ``notebooks/NN_name.ipynb``, has one thread; ``notebooks/reports/NN_name.ipynb`` holds what does not fit it.
Lessons without a report are of the older kind, both in one. The folder ``bad_notebooks`` holds three that must fail:
proof that the gate bites.
"""

import ast
import importlib
import itertools
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import reading

from plpkg import ROOMS

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPORTS = sorted((ROOT / "notebooks" / "reports").glob("*.ipynb"))
NOTEBOOKS = LESSONS + REPORTS
SHORT = [path for path in LESSONS if path.parent / "reports" / path.name in REPORTS]
"""Lessons whose report stands apart."""
BAD = ROOT / "tests" / "bad_notebooks"
OF_ROOMS = {f"{number}_{room.rpartition('.')[2]}" for room, (number, _) in ROOMS.items()}


def load(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def tags(cell):
    return cell.metadata.get("tags", [])


def name_of(path):
    return path.stem if path in LESSONS else f"report_{path.stem}"


@pytest.fixture(params=NOTEBOOKS, ids=name_of)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return load(path)


def test_there_are_notebooks_named_in_order():
    names = {path.stem for path in LESSONS}
    assert all(re.fullmatch(r"\d\d_[a-z_]+", name) for name in names)
    assert names >= OF_ROOMS
    assert names - OF_ROOMS <= {"00_start_here", "09_trips", "10_private_assistant"}
    assert {path.stem for path in REPORTS} <= names


def executed_in_order(notebook):
    return [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))


def test_valid_small_and_executed_from_top_to_bottom_without_errors(path, notebook):
    nbformat.validate(notebook)
    assert path.stat().st_size < 500_000
    assert executed_in_order(notebook), "run `make notebooks`"
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    for cell in code_cells(notebook):
        if "raises-exception" not in tags(cell):
            assert all(output.output_type != "error" for output in cell.outputs)
        assert all(output.get("name") != "stderr" for output in cell.outputs), "a warning was left in"


def test_one_title_no_skipped_heading_levels_and_what_to_expect(notebook):
    outside_code = re.sub(r"```.*?```", "", text(notebook), flags=re.S)
    levels = [len(mark) for mark in re.findall(r"^(#+) ", outside_code, flags=re.M)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert notebook.cells[0].source.startswith("# ")
    for promise in ("**After this notebook you can**", "**Runs in**", "**Hardware**", ".ipynb)"):
        assert promise in notebook.cells[0].source


def test_cells_and_paragraphs_are_short_and_enough_is_text(notebook):
    cells = notebook.cells
    assert sum(cell.cell_type == "markdown" for cell in cells) / len(cells) >= 0.4
    lengths = [len(cell.source.splitlines()) for cell in code_cells(notebook)]
    assert statistics.median(lengths) <= 8
    assert max(lengths) <= 40
    texts = [each for cell in notebook.cells if cell.cell_type == "markdown" for each in paragraphs(cell)]
    assert not [each for each in texts if len(each.split()) > 100]


def paragraphs(cell):
    """What is read at one go: without solutions, code, formulas that stand alone, and tables."""
    prose = re.sub(r"<details>.*?</details>|```.*?```|\$\$.*?\$\$", "", cell.source, flags=re.S)
    return re.split(r"\n\s*\n", re.sub(r"^\|.*$", "", prose, flags=re.M))


def printed_true(cells):
    """The lines that show ``True`` or ``False`` where a number is meant; ``option=True`` names an argument's value.

    A cell is let off by a tag that begins with ``prints-true:`` and goes on with the reason.
    """
    cells = [cell for cell in cells if not any(re.match(r"prints-true: \w+ \w+", tag) for tag in tags(cell))]
    outputs = [output for cell in cells for output in cell.outputs]
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return [line for each in shown for line in each.splitlines() if re.search(r"(?<![=\w])(True|False)\b", line)]


def test_numbers_are_printed_and_not_true(notebook):
    assert not printed_true(code_cells(notebook))


def test_true_is_found_wherever_a_cell_shows_it():
    def cell(shown, tag="setup", kind="stream"):
        text = dict(name="stdout", text=shown) if kind == "stream" else dict(data={"text/plain": shown}, metadata={})
        output = nbformat.v4.new_output(kind, **text)
        return nbformat.v4.new_code_cell("f()", outputs=[output], metadata=dict(tags=[tag]))

    wrong = [cell("True\n"), cell("below 3: False"), cell("{'a': True}"), cell("False", kind="execute_result")]
    right = [cell("use_dora=True must be empty"), cell("Truest"), cell("True", "prints-true: it is its lesson")]
    assert all(printed_true([each]) for each in [*wrong, cell("True", "prints-true:")])
    assert not printed_true(right)


def test_few_outputs_are_ignored_and_each_is_followed_by_a_checked_one(notebook):
    cells = code_cells(notebook)
    ignored = [any(tag.startswith("nbval-") for tag in tags(cell)) for cell in cells]
    assert sum(ignored) <= 0.2 * len(cells)
    for this, after in zip(ignored, [*ignored[1:], True], strict=True):
        assert not (this and after), "an ignored output needs a checked cell after it"
    assert not any("NBVAL" in cell.source for cell in cells), "use a tag, which learners do not see"


def test_learners_see_only_what_they_can_run(notebook):
    for cell in code_cells(notebook):
        assert not re.search(r"^\s*[!%]", cell.source, flags=re.M), "no shell or magic commands"
        assert not re.search(r"pip install|filterwarnings|https?://(?!127\.0\.0\.1)|cuda", cell.source), cell.source
        assert not cell.source.rstrip().endswith(";"), "end a plot with plt.show()"
        assert not re.search(r"[\"'](/|~/|[A-Z]:\\)", cell.source), "no absolute paths"


def declared_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    return {re.match(r"[\w-]+", line).group().replace("-", "_") for line in lines}


def test_imports_are_declared(notebook):
    allowed = declared_packages() | set(sys.stdlib_module_names) | {"plpkg", "IPython"}
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in code_cells(notebook)))):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed


def headings(path):
    """The anchors of a page's headings, as JupyterLab writes them for a notebook and GitHub for a text."""
    if path.suffix == ".ipynb":
        return {title.strip().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text(load(path)), flags=re.M)}
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve(path, notebook):
    for target in re.findall(r"\]\(([^)]+)\)", text(notebook)):
        file, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        assert (path.parent / file).exists(), target
        if anchor:
            assert anchor in headings(path.parent / file if file else path), target


def test_every_image_is_described_and_stands_beside_something_checked(notebook):
    cells = code_cells(notebook)
    for cell in cells:
        images = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        for image in images:
            assert len(image.metadata["image/png"]["alt"]) > 40
        if images:
            near = [*cell.outputs, *(o for after in cells[cells.index(cell) + 1 :][:1] for o in after.outputs)]
            assert any(o.output_type == "stream" or "image/png" not in o.get("data", {}) for o in near)


def test_sections_that_every_room_has(path, notebook):
    if path.stem in OF_ROOMS and path not in SHORT:
        for section in ("Reported and measured", "What the (paper|article) leaves out", "Your own model"):
            assert re.search(f"^## {section}$", text(notebook), flags=re.M)
    if path in LESSONS:
        assert "## What to remember" in text(notebook)
        assert "<details><summary>Solution</summary>" in text(notebook)


@pytest.fixture(params=SHORT, ids=name_of)
def lesson(request):
    return load(request.param)


def test_a_lesson_takes_forty_minutes_at_most_and_as_long_as_it_says(lesson):
    promised = int(re.search(r"needs some (\d+)\.", lesson.cells[0].source)[1])
    assert promised <= 40
    assert reading.minutes(lesson) <= promised <= reading.minutes(lesson) + 10


def test_a_lesson_lets_the_reader_predict_change_and_compare(lesson):
    cells = code_cells(lesson)
    changed = [k for k, cell in enumerate(cells) if "# change me" in cell.source]
    assert len(changed) >= 2
    for k in changed:
        here_and_after = "\n".join(cell.source for cell in cells[k : k + 3])
        assert re.search(r"my_guess|expected", cells[k].source)
        assert re.search(r"compare\(|the right one is", here_and_after)
    assert sum("widget" in tags(cell) for cell in cells) == 1
    assert "The surprise" in reading.prose(lesson)


UNITS = r"%|ms|s|seconds?|hours?|days?|[kMG]i?B|[kM]bit|Mb/s|bytes|tokens/s|k?J|m?W|USD|dollars?|nats?|points"


def figures(source):
    """Figures with a unit in a text cell, without formulas, code and addresses."""
    plain = re.sub(r"\$[^$]+\$|`[^`]+`|\]\([^)]*\)", "", source)
    return re.findall(rf"\d[\d,.]* ?(?:{UNITS})(?!\w)", plain)


def test_figures_are_found_with_their_unit():
    assert figures("33 ms, 4.19 kbit, 95 % and 2.92 dollars of 3 kB") == [
        "33 ms",
        "4.19 kbit",
        "95 %",
        "2.92 dollars",
        "3 kB",
    ]
    assert not figures("32 layers, $16$ bytes, `RTT 33 ms`, rank 64, 64 tokens, 16 bits a number")


def test_a_figure_with_a_unit_in_a_lessons_text_names_its_source(lesson):
    """A cell's own output computes it; else the cell has a tag ``source: FILE``, or an address."""
    for cell in lesson.cells:
        if cell.cell_type == "markdown" and figures(cell.source):
            sources = [tag.removeprefix("source: ") for tag in tags(cell) if tag.startswith("source: ")]
            assert sources, f"{figures(cell.source)} in: {cell.source[:200]}"
            assert all((ROOT / source).exists() for source in sources if "://" not in source)


def test_widgets_are_tagged_for_the_browser(notebook):
    for cell in code_cells(notebook):
        assert (".explorer()" in cell.source) == ("widget" in tags(cell))
    assert "setup" in tags(code_cells(notebook)[0])


def places(notebook):
    """What ``*In the package*: `Class.member`, `plpkg/room/module.py`.`` names."""
    return re.findall(r"^\*In the package\*: `([\w.]+)`, `(plpkg/[\w/]+\.py)`\.$", text(notebook), flags=re.M)


def test_what_is_done_by_hand_stands_in_the_package(path, notebook):
    assert len(places(notebook)) == text(notebook).count("*In the package*")
    assert places(notebook) or path.stem == "00_start_here"  # its report has no mechanism
    for name, file in places(notebook):
        defined = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            defined = getattr(defined, part)
        assert defined.__module__.replace(".", "/") + ".py" == file, f"{name} is not defined in {file}"


# The gate must bite.


def nbval(*paths):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command += ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", "600"]
    command += ["--nbval-sanitize-with", str(ROOT / "tests" / "nbval.cfg")]
    return subprocess.run([*command, *map(str, paths)], cwd=ROOT, capture_output=True, text=True)


def repair(name, notebook):
    if name == "wrong_number":
        notebook.cells[1].outputs[0]["data"]["text/plain"] = "4"
    elif name == "raising_slider":
        notebook.cells[2].source = "slider.value = 1"
    else:
        for count, cell in enumerate(notebook.cells, start=1):
            cell.execution_count = count


def test_nbval_rejects_a_wrong_number_and_a_slider_that_raises_and_passes_them_repaired(tmp_path):
    """They fail for the one reason that their names give."""
    for name in ("wrong_number", "raising_slider", "out_of_order"):
        notebook = load(BAD / f"{name}.ipynb")
        assert executed_in_order(notebook) is (name != "out_of_order")
        repair(name, notebook)
        assert executed_in_order(notebook)
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    result = nbval(BAD / "wrong_number.ipynb", BAD / "raising_slider.ipynb", *tmp_path.iterdir())
    assert result.returncode == 1, result.stdout
    cells = sum(len(code_cells(load(path))) for path in tmp_path.iterdir())
    cells += sum(len(code_cells(load(BAD / f"{name}.ipynb"))) for name in ("wrong_number", "raising_slider"))
    for complaint in ("2 + 2", "ZeroDivisionError", f"2 failed, {cells - 2} passed"):
        assert complaint in result.stdout, result.stdout
    assert not [line for line in result.stdout.splitlines() if "FAILED" in line and str(tmp_path) in line]
