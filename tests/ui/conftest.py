"""A real JupyterLab, a real Voila and a real Chromium for the browser tests (``make ui-test``)."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Error, expect, sync_playwright

from waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "test-results"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WITH_WIDGET = [path for path in NOTEBOOKS if any("widget" in tags(cell) for cell in nbformat.read(path, 4).cells)]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


@pytest.fixture(params=WITH_WIDGET, ids=lambda path: path.stem)
def widget_notebook(request):
    return request.param


@pytest.fixture(scope="session")
def browser():
    """Chromium: the installed one, else the one that playwright has installed."""
    installed = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=installed, args=ARGUMENTS)
        except Error as error:
            pytest.fail(
                "the browser tests need Chromium: install your system's package (Debian: apt-get install chromium) "
                f"or run `playwright install chromium`.\n{error}",
                pytrace=False,
            )
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    """A page that leaves a screenshot in ``test-results/`` when its test fails."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(1000 * PATIENCE_S)
    expect.set_options(timeout=1000 * PATIENCE_S)
    yield page
    if request.node.stash.get(FAILED, False):
        RESULTS.mkdir(exist_ok=True)
        page.screenshot(path=RESULTS / f"{request.node.name}.png", full_page=True)
    page.close()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed:
        item.stash[FAILED] = True
    return report


def write_settings(folder: Path) -> None:
    """No pop-up over the page, and no cell hidden because it is out of sight."""
    for extension, text in {
        "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
        "notebook-extension/tracker": '{"windowingMode": "none"}',
    }.items():
        path = folder / "@jupyterlab" / f"{extension}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(command: list[str], port: int, home: Path):
    """The address of a server, which SIGTERM to its process group has to end."""
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    environment.pop("MPLBACKEND", None)  # the kernel chooses its own
    log = home / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:

        def listens():
            assert server.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                return True

        wait_until(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a JupyterLab whose folder holds each widget notebook, cut to what its widget needs."""
    home = tmp_path_factory.mktemp("lab")
    for path in WITH_WIDGET:
        nbformat.write(cut_to_widget(path), home / path.name)
    write_settings(home / "settings")
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={home}"]
    with started(command, port, home) as address:
        yield address


@pytest.fixture
def demo(tmp_path):
    """The address of what ``make demo`` serves; nothing is installed for it."""
    port = free_port()
    options = f"--no-browser --Voila.ip=127.0.0.1 --port={port} --Voila.port_retries=0"
    command = ["make", "--old-file=install", "demo", f"VENV={sys.prefix}", f"DEMO={options}"]
    with started(command, port, tmp_path) as address:
        yield address


def cut_to_widget(path: Path):
    """The notebook with its text, its imports and its widget, all un-run."""
    notebook = nbformat.read(path, 4)
    needed = [cell for cell in notebook.cells if cell.cell_type == "markdown" or {"setup", "widget"} & set(tags(cell))]
    for cell in needed:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells = needed
    return notebook
