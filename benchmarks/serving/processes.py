"""``plpkg serve`` as a process of its own, to measure at a distance."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def serving(*options: str, keys: Mapping[str, str] | None = None) -> Iterator[tuple[int, str]]:
    """A service on one thread, until the context ends: the number of its process, and its address.

    ``keys`` gives accounts by their names; without them every program is ``local``.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if keys:
            path = Path(folder, "keys")
            path.touch(0o600)
            path.write_text("".join(f"{account} {key}\n" for account, key in keys.items()))
            environment["PLPKG_KEYS"] = str(path)
        command = [sys.executable, "-m", "plpkg", "serve", "--listen", "127.0.0.1:0", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as service:
            try:
                yield service.pid, re.search(r"http://\S+", service.stdout.readline())[0]
            finally:
                service.terminate()
