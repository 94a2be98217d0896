"""Our own Prefect server dies before it answers for the first time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.engines.network import reserve_free_port
from penstock.flows.runtime.child_process import Service
from penstock.flows.runtime.prefect_api import START_TRIES, wait_ready_with_restarts

PROGRAM = """
import http.server, pathlib, sys
port, deaths, diary = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
lives = diary.read_text() if diary.exists() else ""
diary.write_text(lives + "x")
if len(lives) < deaths:
    sys.exit("killed while starting")
http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def service(tmp_path: Path, deaths: int) -> Service:
    port = reserve_free_port()
    command = [sys.executable, "-c", PROGRAM, str(port), str(deaths), str(tmp_path / "diary")]
    return Service("thing", command, tmp_path / "log", ready=f"http://127.0.0.1:{port}/")


def test_server_that_dies_before_it_is_ready_is_restarted(tmp_path: Path) -> None:
    server = service(tmp_path, deaths=1)
    server.start()
    wait_ready_with_restarts(server)
    server.stop()
    assert (tmp_path / "diary").read_text() == "xx"


def test_server_that_always_dies_fails_after_start_tries(tmp_path: Path) -> None:
    server = service(tmp_path, deaths=100)
    server.start()
    with pytest.raises(RuntimeError, match="killed while starting"):
        wait_ready_with_restarts(server)
    assert (tmp_path / "diary").read_text() == "x" * START_TRIES
