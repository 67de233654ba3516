"""Waiting for a condition, to an end that only a test that hangs reaches: a busy machine is slow, and no defect.

And helper processes: what they print on standard output and error is part of the message when they fail.
"""

import asyncio
import contextlib
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE_S = 300
"""How long a test waits for what has to come: ten times what anything here takes beside eight busy processes."""


def wait_until(condition):
    """Ask again and again. What the condition gave when it was true, or AssertionError."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"it has not come in {PATIENCE_S} s"
        time.sleep(0.01)
    return result


async def until(condition):
    """The same, while other tasks run."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"it has not come in {PATIENCE_S} s"
        await asyncio.sleep(0.001)
    return result


def line_of(output, pattern):
    """The match in the first line of a process's output that has one; all that it printed, if it ends without."""
    lines = []
    for line in output:
        if match := re.search(pattern, line):
            return match
        lines.append(line)
    raise AssertionError(f"no line has {pattern!r}:\n{''.join(lines)}")


def interpreter(code, *arguments, **options):
    """What a fresh interpreter prints that runs some code, and has to end well; ``options`` are subprocess's."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def typed(*command, first=""):
    """``command`` as a shell starts it: Ctrl+C ends it, even where it is started from a background job.

    ``first`` is a line of Python that its process runs before. Not Popen's ``preexec_fn``: with it gRPC's threads go
    on in the forked child, and about one child in ten aborts before its exec.
    """
    first = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); {first}"
    return [sys.executable, "-c", f"{first}\nos.execv(sys.argv[1], sys.argv[1:])", *command]


def free_ports(count):
    """Ports that nobody is given who asks for any: it takes seconds until they are used."""
    with contextlib.ExitStack() as stack:
        ports = {}
        while len(ports) < count:
            port = random.SystemRandom().randrange(20_000, 32_000)  # Linux gives those from 32,768 on
            with contextlib.suppress(OSError):
                ports[port] = stack.enter_context(socket.create_server(("", port)))
    return [*ports]


WITHOUT_RAY = "Ray, of the extra `scale`, is not installed"


def patient_ray(monkeypatch):
    """Ray, or a skip. Ray 2.60 gives its own processes 15 s to import and 30 s to start, too little on a busy machine.

    It waits for the ports that they choose, so here they are told which; then it asks whether the node is there.
    Once a raylet (the process of a node), and once the server of the cluster's tables, never opened its log, and Ray
    waited for it: such a one is started again.
    """
    ray = pytest.importorskip("ray", reason=WITHOUT_RAY)
    from ray._private import parameter, services

    init, start, get_node = parameter.RayParams.__init__, services.start_ray_process, services.get_node
    listen = "dashboard_agent_listen_port"  # this one Ray tells the agent, and not the process that waits for it
    ports = {}

    def with_ports(params, *arguments, **options):
        init(params, *arguments, **options)
        free = free_ports(4)
        agents = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", listen)
        for agent, port in zip(agents, free, strict=True):
            ports[agent] = getattr(params, agent) or port
            setattr(params, agent, ports[agent])

    def started(command, process_type, *arguments, **options):
        if process_type == "raylet":
            command = [*command, f"--{listen}={ports[listen]}"]
        elif process_type != "gcs_server":
            return start(command, process_type, *arguments, **options)
        (log,) = (Path(each.partition("=")[2]) for each in command if each.startswith("--stdout_filepath="))
        for _ in range(5):
            begun = start(command, process_type, *arguments, **options)
            end = time.monotonic() + PATIENCE_S / 5
            while begun.process.poll() is None and time.monotonic() < end:
                if log.exists():
                    return begun
                time.sleep(0.01)
            begun.process.kill()
        ended = begun.process.wait()
        raise AssertionError(f"five times no {process_type} wrote its first line; the last ended with {ended}")

    def until_it_is_there(*arguments):
        def node():
            with contextlib.suppress(RuntimeError):
                return get_node(*arguments)

        return wait_until(node)

    monkeypatch.setattr(parameter.RayParams, "__init__", with_ports)
    monkeypatch.setattr(services, "start_ray_process", started)
    monkeypatch.setattr(services, "get_node", until_it_is_there)
    for limit in ("gcs_server_port_wait_time_s", "worker_register_timeout_seconds"):
        monkeypatch.setenv(f"RAY_{limit}", str(PATIENCE_S))
    monkeypatch.setenv("RAY_agent_register_timeout_ms", str(1000 * PATIENCE_S))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves its workers a hundredth of a busy core
    return ray
