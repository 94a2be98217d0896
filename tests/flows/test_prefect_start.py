"""Our own Prefect server dies before it answers for the first time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.engines.network import reserve_free_port
from penstock.flows.runtime import child_process
from penstock.flows.runtime.child_process import Service
from penstock.flows.runtime.prefect_api import START_TRIES, wait_ready_with_restarts

PROGRAM = """
import http.server, pathlib, sys
port, diary = int(sys.argv[1]), pathlib.Path(sys.argv[2])
if not diary.exists():
    diary.write_text("killed while starting")
    sys.exit(1)
http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_server_that_dies_before_it_is_ready_is_restarted(tmp_path: Path) -> None:
    port, diary = reserve_free_port(), tmp_path / "diary"
    command = [sys.executable, "-c", PROGRAM, str(port), str(diary)]
    server = Service("thing", command, tmp_path / "log", ready=f"http://127.0.0.1:{port}/")
    server.start()
    wait_ready_with_restarts(server)
    server.stop()
    assert diary.exists()


def test_server_that_always_dies_fails_after_start_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process.time, "sleep", lambda seconds: None)
    command = ["sh", "-c", "echo killed while starting; exit 1"]
    server = Service("thing", command, tmp_path / "log", ready=f"http://127.0.0.1:{reserve_free_port()}/")
    server.start()
    with pytest.raises(RuntimeError, match="killed while starting"):
        wait_ready_with_restarts(server)
    assert server.log.read_text() == "killed while starting\n" * START_TRIES
