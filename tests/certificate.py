"""A certificate and its key, by the line of the tour."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

LINE = re.search(r"^openssl .*?(?=  #|$)", Path(__file__).parents[1].joinpath("docs", "tour.md").read_text(), re.M)[0]


def written(folder):
    """The path of a self-signed ``cert.pem`` for 127.0.0.1, beside its ``key.pem``."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder.mkdir(exist_ok=True)
    line = LINE.replace("tls/", f"{folder}/").replace("DNS:cloud.example.org", "IP:127.0.0.1")
    subprocess.run(shlex.split(line), check=True, capture_output=True)
    return folder / "cert.pem"
