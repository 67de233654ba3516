"""A real JupyterLab, a real Voila and a real Chromium for the browser tests (``make ui-test``)."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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


FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted([*FOLDER.glob("*.ipynb"), *FOLDER.glob("reports/*.ipynb")])
WITH_WIDGET = [path for path in NOTEBOOKS if any("widget" in tags(cell) for cell in nbformat.read(path, 4).cells)]


def name_of(path: Path) -> str:
    """A lesson and its report have the same stem."""
    return "-".join(path.relative_to(FOLDER).with_suffix("").parts)


@pytest.fixture(params=NOTEBOOKS, ids=name_of)
def notebook(request):
    return request.param


@pytest.fixture(params=WITH_WIDGET, ids=name_of)
def widget_notebook(request):
    """Its name in JupyterLab's folder."""
    return f"{name_of(request.param)}.ipynb"


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


HELD = """
def hold_explorers(begin, hold):
    from time import sleep

    def held(explorer, controls, compute, *others):
        def waiting(**values):
            while hold.exists():
                sleep(0.01)
            return compute(**values)

        begin(explorer, controls, waiting, *others)

    return held


import pathlib
import plpkg.show.explorer

plpkg.show.explorer.Explorer.__init__ = hold_explorers(plpkg.show.explorer.Explorer.__init__, pathlib.Path({hold!r}))
"""
"""What each kernel runs first: as long as there is a file, no explorer comes to its result."""


class Server(NamedTuple):
    """Where it listens, its folder, and the file there that holds its explorers."""

    address: str
    folder: Path
    hold: Path


@contextlib.contextmanager
def started(command: list[str], port: int, home: Path):
    """A server, which SIGTERM to its process group has to end."""
    hold = home / "hold"
    startup = home / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "held.py").write_text(HELD.format(hold=str(hold)))
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
        yield Server(f"http://127.0.0.1:{port}", home, hold)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A JupyterLab whose folder holds each widget notebook, cut to what its widget needs."""
    home = tmp_path_factory.mktemp("lab")
    for path in WITH_WIDGET:
        nbformat.write(cut_to_widget(path), home / f"{name_of(path)}.ipynb")
    write_settings(home / "settings")
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={home}"]
    # Its default reads files in threads, and an idle one can keep the server from ending.
    manager = "jupyter_server.services.contents.largefilemanager.LargeFileManager"
    command.append(f"--ServerApp.contents_manager_class={manager}")
    with started(command, port, home) as server:
        yield server


@pytest.fixture
def demo(tmp_path):
    """What ``make demo`` serves; nothing is installed for it."""
    port = free_port()
    options = f"--no-browser --Voila.ip=127.0.0.1 --port={port} --Voila.port_retries=0"
    command = ["make", "--old-file=install", "demo", f"VENV={sys.prefix}", f"DEMO={options}"]
    with started(command, port, tmp_path) as server:
        yield server


def cut_to_widget(path: Path):
    """The notebook with its text, its imports and its widget, all un-run."""
    notebook = nbformat.read(path, 4)
    needed = [cell for cell in notebook.cells if cell.cell_type == "markdown" or {"setup", "widget"} & set(tags(cell))]
    for cell in needed:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells = needed
    return notebook
