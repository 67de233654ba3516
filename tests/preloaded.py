"""Python code in a process of its own, without the seconds that imports take: forked from one that has made them.

For processes that are killed, or that serve. What a test says of a fresh interpreter needs one.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection

from waiting import PATIENCE_S

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "plpkg.autonomy.windows",
        "plpkg.cli",
        "plpkg.clipping.training.make",
        "plpkg.pretraining",
        "plpkg.residual.wire.cloud",
        "plpkg.residual.programs.training",
    ]
)


class Process:
    """``python -c code arguments``; :meth:`close`, or the end of a ``with`` block, kills it.

    Attributes
    ----------
    stdout
        A text file: standard output and error.
    """

    def __init__(self, code: str, *arguments: str) -> None:
        reader, writer = os.pipe()
        self.stdout = os.fdopen(reader)
        with Connection(writer, readable=False) as theirs:
            self._process = CONTEXT.Process(target=_run, args=(theirs, code, arguments), daemon=True)
            self._process.start()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.kill()
        self.stdout.close()

    def kill(self) -> None:
        """End it at once, and wait until it has."""
        self._process.kill()
        self.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        """Its exit status, as :mod:`subprocess` has it; it has to end."""
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None, f"still running after {PATIENCE_S} s"
        return self._process.exitcode


def _run(output: Connection, code: str, arguments: tuple[str, ...]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server that forked this process ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
