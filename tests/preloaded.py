"""Python code in a process of its own, without the seconds that imports take: forked from one that has made them.

For processes that are killed, or that serve. What a test says of a fresh interpreter needs one.
"""

import multiprocessing
import os
import sys

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["plpkg.clipping", "plpkg.cli", "plpkg.pretraining", "plpkg.residual"])


class Process:
    """``python -c code arguments``.

    Attributes
    ----------
    output
        A text file: its standard output and error.
    """

    def __init__(self, code: str, *arguments: str, **environment: str) -> None:
        reader, writer = os.pipe()
        self.output = os.fdopen(reader)
        theirs = multiprocessing.connection.Connection(writer, readable=False)
        self._process = CONTEXT.Process(target=_run, args=(theirs, code, arguments, environment), daemon=True)
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        """End it at once, and wait until it has."""
        self._process.kill()
        self.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 300) -> int:
        """Its exit status, as :mod:`subprocess` has it; it has to end within ``timeout`` seconds."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s"
        return self._process.exitcode


def _run(output, code: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    sys.argv = ["-c", *arguments]
    os.environ.update(environment)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
