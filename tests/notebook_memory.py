"""For nbval (``-p notebook_memory``): the memory of each notebook, its kernel's children included, has a limit.

Free services that run notebooks give 2 GB, enough with a torch for the CPU. What processes share counts once
(proportional set sizes, on Linux).
"""

import threading
from importlib import metadata

import psutil
import pytest

FOR_CUDA = any(line.startswith(("cuda-", "nvidia-")) for line in metadata.requires("torch") or ())
# That build of torch takes 260 MB more to import (2.15, with transformers), on a machine without a GPU as well.
LIMIT_MB = 2000 + 300 * FOR_CUDA
EVERY_S = 0.1


def tree_mb(pid: int) -> float:
    """What a process and its children hold, at most.

    What they share is told apart only where that decides: it takes reading each of their thousand mappings.
    """
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
        total = sum(process.memory_info().rss for process in processes) / 1e6
        if total > LIMIT_MB:
            full = [process.memory_full_info() for process in processes]
            total = sum(getattr(memory, "pss", memory.rss) for memory in full) / 1e6
    except psutil.NoSuchProcess:
        return 0.0  # one ends while we look, ten times a second
    return total


class Watch(threading.Thread):
    """The most that a kernel held while this thread ran."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak_mb, self.done = pid, 0.0, threading.Event()

    def run(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, tree_mb(self.pid))
            if self.done.wait(EVERY_S):
                return


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    watch = Watch(item.parent.kernel.km.provisioner.pid)
    watch.start()
    try:
        result = yield
    finally:
        watch.done.set()
        watch.join()
        item.user_properties.append(("peak_mb", watch.peak_mb))
    if watch.peak_mb > LIMIT_MB:
        pytest.fail(f"{item.nodeid} takes {watch.peak_mb:,.0f} MB, at most {LIMIT_MB:,} are allowed", pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter):
    peaks = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                notebook = report.nodeid.partition("::")[0]
                peaks[notebook] = max(peaks.get(notebook, 0), value) if name == "peak_mb" else peaks.get(notebook, 0)
    terminalreporter.section("memory of the notebooks")
    for notebook in sorted(peaks):
        terminalreporter.line(f"{notebook}: {peaks[notebook]:,.0f} MB of {LIMIT_MB:,}")
