"""Dockerfile, .dockerignore, compose.yml and docs/container.md: they agree with the package and with each other.

No image is built here. What the image runs is run in a process of its own, and where Linux lets anybody make
namespaces, as a container would: the first process, on a file system to read only, without a network.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

import plpkg
from plpkg.cli import app

from preloaded import Process
from waiting import PATIENCE_S, line_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "container.md").read_text()
CONTAINED = ROOT / "tests" / "contained.py"
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount-proc", "--net", "--pid", "--fork", "--kill-child"]
COMPOSE = yaml.safe_load((ROOT / "compose.yml").read_text())


def instructions():
    """The Dockerfile's instructions of each stage: pairs of a word and what follows it."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    stages = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, " ".join(rest.split())))
    return stages


_, BUILDER, IMAGE = instructions()


def said(stage, word):
    """What follows each instruction of that name."""
    return [rest for name, rest in stage if name == word]


def one(stage, word):
    (rest,) = said(stage, word)
    return rest


def pairs(stage, word="ENV"):
    return dict(pair.split("=", 1) for rest in said(stage, word) for pair in shlex.split(rest))


def commands(stage):
    """What is run while the image is built."""
    return [command for rest in said(stage, "RUN") for command in re.split(r" && ", rest)]


def in_brackets(text):
    return yaml.safe_load(text[text.index("[") :])  # JSON, which is YAML


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


DEFAULT = in_brackets(one(IMAGE, "CMD"))
PORT = option(DEFAULT, "--listen").rpartition(":")[2]
STORE = option(DEFAULT, "--store")
HEALTH = in_brackets(one(IMAGE, "HEALTHCHECK"))


def of_the_page():
    """What docs/container.md gives ``plpkg`` in a container."""
    runs = re.findall(r"^docker run .*?\bplpkg\b(.*)$", re.sub(r"\\\n *", "", PAGE), re.M)
    return [shlex.split(arguments) for arguments in runs]


def parsed(arguments):
    """The contexts of a command line, as ``plpkg`` has them before anything runs; or the error that it would show."""
    command, context = typer.main.get_command(app), None
    while command is not None:
        context = command.make_context(command.name, list(arguments), parent=context)
        command, arguments = None, [*context._protected_args, *context.args]
        if arguments:
            _, command, arguments = context.command.resolve_command(context, arguments)
    return context


# ---------------------------------------------------------------------------------------------------- the Dockerfile


def test_torch_is_the_pinned_one_for_cpus_and_the_rest_has_the_pins():
    index = dict(rest.split("=", 1) for rest in said(BUILDER, "ARG"))["TORCH_INDEX"]
    assert index == "https://download.pytorch.org/whl/cpu"
    torch, package = (shlex.split(command) for command in commands(BUILDER) if command.startswith("pip install"))
    assert "--no-deps" in torch
    assert option(torch, "--index-url") == "$TORCH_INDEX"
    pin = subprocess.run(re.search(r"\$\((.*)\)", torch[-1])[1], shell=True, cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"torch==[\d.]+\n", pin.stdout)
    assert option(package, "-c") == "constraints.txt"
    assert "--index-url" not in package
    extras = re.fullmatch(r"\.\[(.*)\]", package[-1])[1].split(",")
    assert extras == ["serve"]
    assert {*extras} <= {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


def test_only_what_the_build_copies_leaves_the_checkout():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if line and not line.startswith("#")]
    let_in = {line.removeprefix("!") for line in rest if line.startswith("!")}
    copied = {name for rest in said(BUILDER, "COPY") for name in shlex.split(rest)[:-1]}
    assert first == "*"
    assert let_in == copied
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = [project["project"]["readme"], *project["project"]["license-files"], *wheel["packages"]]
    assert {*named, *wheel["force-include"], "pyproject.toml", "constraints.txt"} == copied


def test_what_is_built_is_where_the_image_has_it():
    cache, keys = pairs(BUILDER)["PLPKG_CACHE"], pairs(IMAGE)["PLPKG_KEYS"]
    assert pairs(IMAGE)["PLPKG_CACHE"] == cache
    assert "plpkg fetch" in commands(BUILDER)
    copied = [shlex.split(rest) for rest in said(IMAGE, "COPY")]
    assert [rest[1:] for rest in copied] == [[cache, cache], ["/opt/plpkg"] * 2]
    assert all(rest[0] == "--from=builder" for rest in copied)
    assert pairs(BUILDER)["PATH"] == pairs(IMAGE)["PATH"] == "/opt/plpkg/bin:$PATH"
    assert "python3 -m venv /opt/plpkg" in commands(BUILDER)
    assert one(BUILDER, "FROM").split()[0] == one(IMAGE, "FROM")  # a virtual environment has its interpreter's path
    assert keys == "/run/secrets/keys"  # where Docker lays a secret of that name


def test_the_user_is_a_number_and_not_root_and_owns_the_store_alone():
    uid, gid = map(int, one(IMAGE, "USER").split(":"))
    assert uid > 0
    assert gid > 0
    (made,) = (shlex.split(command) for command in commands(IMAGE) if command.startswith("install"))
    assert {f"--owner={uid}", f"--group={gid}", "--mode=0700"} < {*made}
    assert made[-1] == one(IMAGE, "VOLUME") == STORE
    assert IMAGE.index(("USER", f"{uid}:{gid}")) > max(
        place for place, (word, _) in enumerate(IMAGE) if word in ("RUN", "COPY")
    )  # nothing else is the user's


def test_the_port_and_the_version_are_the_same_everywhere():
    assert one(IMAGE, "EXPOSE") == PORT
    assert f", {PORT}," in HEALTH[-1]
    assert COMPOSE["services"]["serve"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert pairs(IMAGE, "ARG")["VERSION"] == plpkg.__version__
    assert pairs(IMAGE, "LABEL")["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_service_ends_before_docker_stop_kills():
    assert float(option(DEFAULT, "--grace")) < 10


# ------------------------------------------------------------------------------------------------- the command lines

LINES = {
    "the image": DEFAULT,
    **{name: service["command"] for name, service in COMPOSE["services"].items() if "command" in service},
    **{f"page {number}": line or DEFAULT for number, line in enumerate(of_the_page())},
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_plpkg_takes_every_command_line(line):
    assert in_brackets(one(IMAGE, "ENTRYPOINT")) == ["plpkg"]
    assert parsed(line).info_name == next(word for word in line if word in ("serve", "cloud", "chat", "ask"))


@pytest.mark.parametrize("line", [["serve", "--stores", "/store"], ["serves"], ["device", "chat", "--temp", "0"]])
def test_a_command_line_that_is_wrong_would_be_noticed(line):
    with pytest.raises(typer._click.exceptions.UsageError):
        parsed(line)


def test_the_page_has_such_lines():
    assert len(of_the_page()) >= 2


@pytest.mark.parametrize(
    ("keys", "message"), [(None, "no keys were read from"), ("", "without PLPKG_KEYS only 127.0.0.1")]
)
def test_without_keys_the_default_does_not_open(keys, message, tmp_path):
    keys = str(tmp_path / "keys") if keys is None else keys
    line = placed(DEFAULT, tmp_path, model=str(tmp_path / "no model"), host="0.0.0.0")  # it ends, also if it is let in
    result = CliRunner().invoke(app, line, env=dict(PLPKG_KEYS=keys, COLUMNS="400", TERM="dumb"))
    assert result.exit_code == 2
    assert message in result.output


# ----------------------------------------------------------------------------------------------------- compose.yml


def test_every_service_is_shut_in():
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pull_policy"] == "never"  # somebody else's image may have that name
        assert [mount.partition(":")[0] for mount in service["tmpfs"]] == [pairs(IMAGE)["HOME"]] == ["/tmp"]
        assert not {"privileged", "cap_add", "network_mode", "user"} & {*service}
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def secrets(name):
    """Where a service's secrets lie in it."""
    given = COMPOSE["services"][name]["secrets"]
    full = [each if isinstance(each, dict) else dict(source=each, target=f"/run/secrets/{each}") for each in given]
    assert {each["source"] for each in full} <= {*COMPOSE["secrets"]}
    return {each["target"] for each in full}


def test_the_service_has_its_store_and_its_keys():
    serve = COMPOSE["services"]["serve"]
    (mount,) = serve["volumes"]
    volume, target = mount.split(":")
    assert target == STORE
    assert volume in COMPOSE["volumes"]
    assert secrets("serve") == {pairs(IMAGE)["PLPKG_KEYS"]}
    assert {"command", "healthcheck", "profiles"}.isdisjoint(serve)


def test_cloud_and_device_find_each_other_over_tls():
    cloud, device = (COMPOSE["services"][name] for name in ("cloud", "device"))
    host, port = option(device["command"], "--connect").split(":")
    assert COMPOSE["services"][host] is cloud
    assert option(cloud["command"], "--listen") == f"0.0.0.0:{port}"
    assert f", {port})" in cloud["healthcheck"]["test"][-1]
    folder = option(cloud["command"], "--tls")
    assert secrets("cloud") == {f"{folder}/cert.pem", f"{folder}/key.pem"}
    assert secrets("device") == {option(device["command"], "--ca")}
    for service in (cloud, device):
        assert service["environment"] == ["PLPKG_TOKEN"]
        assert service["profiles"] == ["split"]
        assert [COMPOSE["networks"][name] for name in service["networks"]] == [{"internal": True}]
        adapter = option(service["command"], "--like" if service is cloud else "--adapter")
        assert (ROOT / adapter / "adapter_config.json").exists()
    assert f"subjectAltName=DNS:{host}" in PAGE
    files = {secret["file"] for secret in COMPOSE["secrets"].values()}
    assert all(file in PAGE for file in files)
    assert {file.partition("/")[0] for file in files} == {"secrets"}
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


# ------------------------------------------------------------------------------------------------ what the image runs


def placed(arguments, folder, model="plpkg-small", host="127.0.0.1"):
    """The image's command line with a folder of a test, a free port, and a model that needs no ``plpkg fetch``."""
    others = {"smollm2": model, STORE: str(folder / "store"), f"0.0.0.0:{PORT}": f"{host}:0"}
    assert {*others} < {*arguments}
    return [others.get(argument, argument) for argument in arguments]


def health(port):
    """The image's check, of another port."""
    interpreter, *rest, code = HEALTH
    assert interpreter == "python"
    return [sys.executable, *rest, code.replace(f", {PORT},", f", {port},")]


def test_the_health_check_tells_a_service_from_none(tmp_path):
    with Process("import sys; from plpkg.cli import app; app(sys.argv[1:])", *placed(DEFAULT, tmp_path)) as process:
        port = line_of(process.stdout, r"^serving plpkg-small on http://127\.0\.0\.1:(\d+)$")[1]
        assert subprocess.run(health(port), timeout=60).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    ended = subprocess.run(health(port), timeout=60, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ConnectionRefusedError" in ended.stderr


@pytest.fixture
def contained(tmp_path):
    """A function that runs a command as in a container, and one that runs another beside it; or a skip.

    The command can write to the folders ``store`` and ``tmp`` of the test; what it leaves in ``tmp`` is gone with it.
    """
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("needs unshare and nsenter, of util-linux")
    for name in ("store", "tmp"):
        (tmp_path / name).mkdir()
    within = [str(tmp_path / name) for name in ("store", "tmp")]
    uid = one(IMAGE, "USER").partition(":")[0]
    variables = {name: value.replace("/tmp", within[1]) for name, value in pairs(IMAGE).items() if name != "PATH"}
    variables |= dict(PLPKG_KEYS=str(tmp_path / "keys"), TMPDIR=within[1], OMP_NUM_THREADS="1")
    start = [*UNSHARE, sys.executable, str(CONTAINED), uid, *within]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    options["env"] = {"PATH": os.environ["PATH"]} | variables
    tried = subprocess.run([*start, "true"], **options)
    if tried.returncode:
        pytest.skip(f"this system lets nobody make such namespaces: {tried.stdout.strip().splitlines()[-1]}")

    @contextlib.contextmanager
    def run(*command):
        with subprocess.Popen([*start, *command], **options) as outer:

            def beside(*other):
                """Another command in the same namespaces, as ``docker exec`` runs it."""
                enter = ["nsenter", f"--target={first_process(outer)}", "--user", "--preserve-credentials"]
                return subprocess.run([*enter, "--mount", "--net", "--pid", *other], **options)

            def stop():
                os.kill(first_process(outer), signal.SIGTERM)
                return outer.wait(PATIENCE_S)

            try:
                yield outer.stdout, beside, stop
            finally:
                outer.kill()  # and with it, by --kill-child, what it has started

    return run


def first_process(outer):
    """The one child of ``unshare``, by its number out here."""
    return int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())


ASK = """
import json, pathlib, sys, urllib.request

port, key = sys.argv[1:]
body = dict(model="plpkg-small", prompt="import", max_tokens=4, temperature=0)
head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
call = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), head)
print(json.load(urllib.request.urlopen(call))["usage"]["completion_tokens"])
"""
OUTSIDE = """
import os, pathlib, socket, sys

print(os.getuid(), "1" in os.listdir("/proc") and pathlib.Path("/proc/1/cmdline").read_text().replace(chr(0), " "))
for attempt in (
    lambda: pathlib.Path(sys.argv[1]).touch(), lambda: socket.create_connection(("192.0.2.1", 80), 5)
):
    try:
        print(attempt())
    except OSError as error:
        print(error.strerror)
"""


def test_as_in_a_container_it_serves_and_ends(contained, tmp_path):
    """The first process, not root, on a file system to read only but for store and /tmp, without a network."""
    key = "k" * 16
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(f"ann {key}\n")
    before = {*tmp_path.rglob("*")}
    with contained(sys.executable, "-m", "plpkg", *placed(DEFAULT, tmp_path)) as (output, beside, stop):
        port = line_of(output, r"^serving plpkg-small on http://127\.0\.0\.1:(\d+)$")[1]
        shut = beside(sys.executable, "-c", OUTSIDE, tmp_path / "elsewhere").stdout.splitlines()
        assert shut[0].startswith(f"{one(IMAGE, 'USER').partition(':')[0]} {sys.executable} -m plpkg serve")
        assert shut[1:] == ["Read-only file system", "Network is unreachable"]
        assert beside(*health(port)).returncode == 0
        assert beside(sys.executable, "-c", ASK, port, key).stdout == "4\n"
        assert beside(sys.executable, "-c", ASK, port, "another").returncode == 1
        assert stop() == 0
        assert output.read() == ""
    assert {*tmp_path.rglob("*")} == before
