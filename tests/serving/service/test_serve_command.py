"""``plpkg serve``: what it refuses before it listens, what it says when it does, and that it leaves nothing behind."""

import contextlib
import functools
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from typer.testing import CliRunner

from plpkg.catalog import data_path
from plpkg.cli import app
from plpkg.serving.service import Store
from plpkg.serving.service.commands import loaded, replica

from preloaded import Process
from waiting import PATIENCE_S, line_of, wait_until

KEYS = "alice " + "a" * 16 + "\n"


@contextlib.contextmanager
def serving(tmp_path, *arguments, keys=""):
    """A process that serves, its address, and the folder where its temporary files are."""
    code = "import os, sys, tempfile, torch; torch.set_num_threads(1); os.environ.update(TMPDIR=sys.argv.pop(1))\n"
    code += "os.environ['PLPKG_KEYS'] = sys.argv.pop(1); from plpkg.cli import app; app()"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with Process(code, str(temporary), keys, "serve", "--listen", "127.0.0.1:0", *arguments) as process:
        yield process, line_of(process.stdout, r"^serving plpkg-small on (http://127\.0\.0\.1:\d+)$")[1], temporary


def test_it_serves_a_folders_adapter_and_ends_on_sigterm(tmp_path):
    folders = [str(data_path("serving") / name) for name in ("numpy", "torch")]
    options = [part for folder in folders for part in ("--adapter", folder)]
    with serving(tmp_path, *options, "--max-model-len", "12", "--positions", "11") as (process, url, temporary):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert {each.max_model_len for each in client.models.list()} == {12}
            with pytest.raises(openai.BadRequestError, match="do not fit the model's 12 positions"):
                client.completions.create(model="numpy", prompt=[5] * 4, max_tokens=9)
            with pytest.raises(openai.BadRequestError, match="may fill 12 positions, 11 are there"):
                client.completions.create(model="numpy", prompt=[5] * 4, max_tokens=8)
            assert sorted(each.id for each in client.models.list()) == ["numpy", "plpkg-small", "torch"]
            answers = [
                client.completions.create(model=name, prompt="import", max_tokens=8, temperature=0).choices[0].text
                for name in ("plpkg-small", "numpy", "torch")
            ]
            assert len({*answers}) > 1
        assert [*temporary.glob("plpkg*")]  # where the adapters are
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not [*temporary.glob("plpkg*")]
        assert process.stdout.read() == ""


@pytest.mark.parametrize(("keys", "each"), [("", 9), ("a file", 2)])
def test_with_keys_an_account_fills_a_quarter_of_the_queue(keys, each, tmp_path, monkeypatch):
    monkeypatch.setenv("PLPKG_KEYS", keys)
    options = dict(limits=None, slots=2, batch=3, positions=50, max_queued=9)
    scheduler = replica(*loaded("plpkg-small", "fp32", "cpu"), Store("memory:///"), tmp_path, **options).scheduler
    assert (scheduler.num_slots, scheduler.places, scheduler.positions) == (2, 3, 50)
    assert (scheduler.max_queued, scheduler.max_queued_each) == (9, each)


def stopped(process, url, number):
    """Send a signal, and wait until nobody is let in any more."""
    process.send_signal(number)

    def refused():
        try:
            httpx.get(f"{url}/health", timeout=PATIENCE_S)
        except httpx.TransportError as error:
            return isinstance(error, httpx.ConnectError)

    wait_until(refused)


def test_who_is_being_answered_on_sigterm_is_answered(tmp_path):
    """Also who has waited for a place meanwhile; nobody else is let in."""
    body = dict(model="plpkg-small", prompt="import", max_tokens=1000, temperature=0)
    with serving(tmp_path, "--grace", str(PATIENCE_S), "--batch", "1") as (process, url, temporary):
        with (
            ThreadPoolExecutor(1) as pool,
            httpx.stream("POST", f"{url}/v1/completions", json=body | dict(stream=True), timeout=PATIENCE_S) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body | dict(max_tokens=8), timeout=PATIENCE_S)
            measured = functools.partial(httpx.get, f"{url}/metrics", timeout=PATIENCE_S)
            wait_until(lambda: 'num_requests_waiting{engine="0"} 1.0' in measured().text)
            stopped(process, url, signal.SIGTERM)
            *_, last, end = filter(None, lines)
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert end == "data: [DONE]"
            assert whole.result().json()["choices"][0]["finish_reason"] == "length"
        assert process.wait() == 0
        assert process.stdout.read() == ""
        assert not [*temporary.glob("plpkg*")]


@pytest.mark.parametrize(
    ("number", "grace", "again"),
    [(signal.SIGINT, PATIENCE_S, False), (signal.SIGTERM, 0.5, False), (signal.SIGHUP, PATIENCE_S, True)],
)
def test_a_signal_ends_it_in_the_middle_of_streams(number, grace, again, tmp_path):
    """Ctrl-C, the end of the grace, and a second signal. Who is being answered is told; cleaning up goes on."""
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "keys").chmod(0o600)
    store = tmp_path / "store"
    options = ["--store", str(store), "--grace", str(grace)]
    with serving(tmp_path, *options, keys=str(tmp_path / "keys")) as (process, url, temporary):
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 401
        headers = {"Authorization": f"Bearer {KEYS.split()[1]}"}
        # Greedy, these two end by their length alone: a sampled answer may have ended before the signal.
        body = dict(model="plpkg-small", prompt=["import", "def"], max_tokens=1000, temperature=0, stream=True)
        options = dict(json=body, headers=headers, timeout=PATIENCE_S)
        with contextlib.ExitStack() as stack:
            answers = [stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", **options)) for _ in range(3)]
            lines = [answer.iter_lines() for answer in answers]
            assert all(next(each).startswith("data: ") for each in lines)
            stopped(process, url, number)
            if again:
                process.send_signal(number)
            for each in lines:
                *_, error, end = filter(None, each)
                assert "the service was closed" in json.loads(error.removeprefix("data: "))["error"]["message"]
                assert end == "data: [DONE]"
            for each in (signal.SIGTERM, signal.SIGHUP):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(each)
        assert process.wait() == 0
        assert process.stdout.read() == ""
        assert not [*temporary.glob("plpkg*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well_from_its_first_line_on(number, tmp_path):
    """Here it comes while the line is being written."""
    code = "import signal, sys, tempfile, typer; tempfile.tempdir = sys.argv.pop(1); number = int(sys.argv.pop(1))\n"
    code += "typer.echo = lambda line: print(line, flush=True) or signal.raise_signal(number)\n"
    code += "from plpkg.cli import app; app()"
    with Process(code, str(tmp_path), str(int(number)), "serve", "--listen", "127.0.0.1:0") as process:
        assert line_of(process.stdout, "^serving plpkg-small on ")
        assert process.wait() == 0
        assert process.stdout.read() == ""
        assert not [*tmp_path.glob("plpkg*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_while_it_starts(number, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = "import sys, tempfile; tempfile.tempdir = sys.argv.pop(1)\n"
    code += "from plpkg.serving.service import commands\n"
    code += "commands.loaded = lambda *_: print('loading', flush=True) or __import__('time').sleep(1000)\n"
    code += "from plpkg.cli import app; app()"
    with Process(code, str(temporary), "serve", "--listen", "127.0.0.1:0") as process:
        line_of(process.stdout, "^loading$")
        assert [*temporary.glob("plpkg*")]
        process.send_signal(number)
        assert process.wait() == 130
        assert "Traceback" not in process.stdout.read()
        assert not [*temporary.glob("plpkg*")]


@pytest.fixture
def refused(monkeypatch):
    """A call with the command's options, which it must refuse: what it says, in one line."""
    for name, value in dict(COLUMNS="400", TERM="dumb", PLPKG_KEYS="").items():
        monkeypatch.setenv(name, value)

    def run(*arguments, keys=""):
        monkeypatch.setenv("PLPKG_KEYS", str(keys))
        result = CliRunner().invoke(app, ["serve", "--listen", "127.0.0.1:0", *arguments])
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        return [line for line in result.output.splitlines() if "Usage" not in line and set(line) & set("abcdef")][-1]

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            (f"--listen {listen}", f"got '{listen}'")
            for listen in ("0.0.0.0:8000", "192.168.1.1:0", ":8000", "8000", "[::]:0", "example.org:80")
        ),
        ("--listen 127.0.0.1:http", "HOST:PORT"),
        ("--listen 127.0.0.1:TAKEN", "in use"),
        ("--limits none", "workers_ai"),
        ("--dtype int3", "dtype"),
        ("--model FOLDER", "no model"),
        ("--batch 0", "batch"),
        ("--adapter FOLDER", "--adapter FOLDER: adapter_config.json is missing"),
        ("--store s3://", "s3://"),
        ("--store nowhere://x", "nowhere://x"),
        ("--store FILE", "FILE"),
        ("--store FOLDER --disk FOLDER/../folder", "is the store"),
        ("--store FOLDER --disk file://FOLDER/disk", "is the store, or in it"),
        ("--disk s3://bucket/disk", "disk must be a folder"),
        ("--disk FOLDER --adapter FOLDER/ann", "is the disk, or in it"),
        ("--adapter FOLDER --model folder", "the model's name"),
    ],
)
def test_what_it_refuses(arguments, said, refused, tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in dict(FILE=file, FOLDER=folder, TAKEN=taken.getsockname()[1]).items():
            arguments, said = (text.replace(name, str(value)) for text in (arguments, said))
        assert said in refused(*arguments.split())
    assert not [*folder.iterdir()]


def test_it_refuses_a_store_above_the_temporary_folder_or_in_what_a_killed_process_left(refused, tmp_path, monkeypatch):
    left = tmp_path / "tmp/plpkg-adapters-left"
    (left / "store").mkdir(parents=True)
    (left / "lock").touch()
    monkeypatch.setattr("tempfile.tempdir", str(left.parent))
    assert "TMPDIR" in refused("--store", str(tmp_path))
    assert "temporary folder" in refused("--store", str(left / "store"))
    assert (left / "store").exists()


def test_wrong_keys_are_refused_and_not_told(refused, tmp_path):
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text("alice secret\n")
    said = refused(keys=tmp_path / "keys")
    assert "line 1" in said
    assert "secret" not in said
    assert "nowhere" in refused(keys=tmp_path / "nowhere")
