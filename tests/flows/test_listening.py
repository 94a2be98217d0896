"""`penstock doctor` lists every listening port of a run with its protection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.flows.commands import doctor, listening
from penstock.flows.commands.listening import describe_port_authentication, listening_ports

PROGRAM = """import socket, sys
sockets = [socket.create_server((host, 0)) for host in ("127.0.0.1", "0.0.0.0")]
print(*(each.getsockname()[1] for each in sockets), flush=True)
sys.stdin.read()"""


@pytest.mark.parametrize(
    "command, environment, protection",
    [
        (
            "python -P /x/flows/services/prefect_server.py --port 1",
            {"PREFECT_SERVER_API_AUTH_STRING": "x"},
            "login; checks Host and Origin",
        ),
        ("python -P /x/flows/services/prefect_server.py --port 1", {}, ""),
        (
            "python /x/engines/sglang/launch.py --port 1",
            {"PENSTOCK_SERVER_KEY": "x"},
            "API key; none on ports between its processes",
        ),
        ("/x/ray/core/src/ray/gcs/gcs_server --a", {"RAY_AUTH_TOKEN": "x"}, "Ray token"),
        ("/x/ray/core/src/ray/gcs/gcs_server --a", {}, ""),
        ("/x/bin/python /x/bin/penstock train", {}, "Ray token, session keys; none on --prometheus-port"),
        ("python -m penstock.flows.cli train", {}, "Ray token, session keys; none on --prometheus-port"),
        ("/home/penstock/flows/bin/python -c program", {}, ""),
        ("some other program", {}, ""),
    ],
)
def test_protection_is_read_from_command_line_and_environment(
    command: str, environment: dict[str, str], protection: str
) -> None:
    assert describe_port_authentication(command.split(), environment) == protection


def test_doctor_reports_an_open_port_and_accepts_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        inner, outer = child.stdout.readline().split()
        monkeypatch.setattr(listening, "penstock_processes_of_this_user", lambda: [psutil.Process(os.getpid())])
        found = {finding.what: finding for finding in doctor.check_ports()}
        assert found[f"port 127.0.0.1:{inner}"].ok and f"pid {child.pid}" in found[f"port 127.0.0.1:{inner}"].found
        assert not found[f"port 0.0.0.0:{outer}"].ok and "no authentication" in found[f"port 0.0.0.0:{outer}"].found
    finally:
        child.kill()
        child.wait()


def test_doctor_without_a_run_reports_ports_as_fine() -> None:
    assert listening_ports([]) == []
