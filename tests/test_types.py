"""Type checkers see what the front doors give: a script with planted mistakes is refused at these lines, no other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("typed_mistakes.py")
PLANTED = {number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if "# mistake" in line}
CHECKERS = {
    "mypy": ["mypy", "--no-incremental", "--follow-imports=silent"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_planted_mistakes_are_found_and_nothing_else(checker, tmp_path):
    pytest.importorskip(checker, reason="make lint installs the type checkers")
    assert len(PLANTED) == 4
    (tmp_path / "script.py").write_text(SCRIPT.read_text())  # where no configuration of ours is found
    command = [sys.executable, "-m", *CHECKERS[checker], "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {int(line) for line in re.findall(r"script\.py:(\d+)(?::\d+)?(?: -)?:? error", done.stdout)}
    assert found == PLANTED, done.stdout
