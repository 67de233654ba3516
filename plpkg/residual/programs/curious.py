"""A cloud in a process of its own that reads along, for ``plpkg demo``.

It serves the layers as ``plpkg cloud`` does, and has the same to go by as any cloud: the public model, and what has
crossed. The attack runs here, on the bytes that came through the socket: the nearest rows of the public embedding
(:func:`plpkg.residual.attacks.recover_tokens`). The device only asks what it has read, through a pipe.

Left out: M, which it could solve for as well (``attacks.recover_m``).
"""

import contextlib
import functools
import json
import subprocess
import sys
import weakref
from collections import deque
from pathlib import Path
from typing import Any

PASSES = 64
"""Through the layers, the last of which are kept: an answer has fewer, a training any number."""


class CuriousCloud:
    """Starts the process; a context manager that ends it.

    Parameters
    ----------
    model
        As for :func:`plpkg.backbones.load_backbone`.
    like
        A folder with a saved adapter, whose configuration the cloud gets; else a new one.

    Raises
    ------
    ValueError
        The error of the process: no such model, say.
    """

    def __init__(self, model: str, like: Path | None = None) -> None:
        command = [sys.executable, "-m", __name__, json.dumps([model, like and str(like)])]
        self._process: Any = subprocess.Popen(  # whose pipes are typed as perhaps None
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl+C is not meant for it
        )
        self._end = weakref.finalize(self, end_process, self._process)

    def __enter__(self) -> "CuriousCloud":
        return self

    def __exit__(self, *_) -> None:
        self._end()

    @functools.cached_property
    def facts(self) -> dict:
        """Its ``address``, and the bytes of its ``layers`` and of its ``bases``, A and B, once the model is loaded."""
        return self._answer()

    def read(self) -> dict:
        """The ``tokens`` that it has read since it was last asked, and their ``text``."""
        self._process.stdin.write("read\n")
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise ConnectionError(f"the cloud's process has ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def end_process(process: subprocess.Popen) -> None:
    """Kill a process, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with contextlib.suppress(OSError):  # what the process did not read
            pipe.close()


def tokens_of(received, public) -> list[int]:
    """The tokens whose embeddings came, each pass ``(1, seq, hidden)``, by the device's part as anyone can build it."""
    import torch

    from plpkg.residual.attacks import recover_tokens

    if not received:
        return []
    rows = torch.cat([hidden.flatten(0, 1) for hidden in received])  # (seq, hidden)
    with torch.no_grad():
        some = torch.zeros(1, len(rows), dtype=torch.long)
        positions = public.embed(some)[0] - public.embedding(some)[0]  # nothing, but GPT-2's and OPT's
        table = public.embedding(torch.arange(public.embedding.num_embeddings))
    return recover_tokens(rows - positions, table).tolist()


def serve(name: str, like: str | None) -> None:
    """The process: its first line says where it listens, and each line of standard input is answered by another."""
    from plpkg.residual import CloudServer, release, split
    from plpkg.residual.programs.loading import adapted_model

    try:
        model, tokenizer = adapted_model(name, None, "fp32", "cpu", like=Path(like) if like else None)
        server = CloudServer(model)
    except (ValueError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    received = deque(maxlen=PASSES)
    part = server.part
    public, _ = split(model)
    release(model, part, public)
    part.register_forward_pre_hook(lambda _, given: received.append(given[0].detach()))
    layers = sum(weight.nbytes for weight in part.parameters())
    bases = sum(projection.nbytes for projection in part.buffers())
    with server:
        print(json.dumps(dict(address=server.address, layers=layers, bases=bases)), flush=True)
        for _ in sys.stdin:
            tokens = tokens_of(received, public)
            received.clear()
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            print(json.dumps(dict(tokens=tokens, text=text)), flush=True)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
