"""`penstock doctor` sums up the listening ports of each run, names open ones, and lists all with --ports."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from penstock.flows.commands import doctor
from penstock.flows.commands.doctor import describe_command, describe_port_authentication, listening_ports

PROGRAM = """import socket, sys
sockets = [socket.create_server((host, 0)) for host in ("127.0.0.1", "0.0.0.0")]
print(*(each.getsockname()[1] for each in sockets), flush=True)
sys.stdin.read()"""


PREFECT = "/x/flows/services/prefect_server.py --port 1"
SGLANG = "/x/engines/sglang/launch.py --port 1"
DRIVER_PORTS = "Ray token, session keys, the token of a link; none on --prometheus-port"


@pytest.mark.parametrize(
    "command, environment, protection",
    [
        (f"python -P {PREFECT}", {"PREFECT_SERVER_API_AUTH_STRING": "x"}, "login; checks Host and Origin"),
        (f"python -P {PREFECT}", {}, ""),
        (f"python {SGLANG}", {"PENSTOCK_SERVER_KEY": "x"}, "API key; none on ports between its processes"),
        ("/x/ray/core/src/ray/gcs/gcs_server --a", {"RAY_AUTH_TOKEN": "x"}, "Ray token"),
        ("python -m penstock.flows.cli train", {}, DRIVER_PORTS),
        ("/home/penstock/flows/bin/python -c program", {}, ""),
    ],
)
def test_protection_is_read_from_command_line_and_environment(
    command: str, environment: dict[str, str], protection: str
) -> None:
    assert describe_port_authentication(command.split(), environment) == protection


@pytest.mark.parametrize(
    "command, name",
    [
        ("/v/bin/python /v/bin/penstock train --config a.toml --run mine --num-rollout 3", "train mine"),
        ("/v/bin/python -m penstock resume mine --store s", "resume mine"),
        ("/v/bin/python -m penstock up", "up"),
        ("/v/bin/python program.py", "python"),
    ],
)
def test_command_is_named_by_its_run(command: str, name: str) -> None:
    assert describe_command(command.split()) == name


def test_doctor_has_a_line_for_a_command_and_one_for_each_open_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        inner, outer = child.stdout.readline().split()
        ports = listening_ports([psutil.Process(child.pid)])
        monkeypatch.setattr(doctor, "listening_ports", lambda: ports)
        command, port = doctor.port_findings()
        assert command.ok and f"(pid {child.pid})" in command.what
        assert command.found.startswith("2, 1 of them for this machine only")
        assert not port.ok and port.what == f"port 0.0.0.0:{outer}" and "no authentication" in port.found
        assert doctor.main(["--ports"]) == 0
        printed = capsys.readouterr().out
        assert f"127.0.0.1:{inner}" in printed and f"0.0.0.0:{outer}" in printed
    finally:
        child.kill()
        child.wait()


def test_doctor_without_a_run_reports_ports_as_fine() -> None:
    assert listening_ports([]) == []
