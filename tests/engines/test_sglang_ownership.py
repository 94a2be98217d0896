"""Adoption of servers by another driver, and the report of a dead one. The server's process is a `sleep`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.backend import SGLangServer

SPEC = ServerSpec(model_path="/model")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    server = SGLangServer(SPEC, gpu_ids=("0",), owner="first")
    server._log = tmp_path / "server.log"
    server._log.write_text("".join(f"line {number}\n" for number in range(100)))
    server._process = subprocess.Popen(["sleep", "60"])
    yield server
    server.stop()


def test_a_server_with_an_equal_spec_is_adopted_and_refuses_its_first_owner(server: SGLangServer) -> None:
    assert server.alive("first")
    assert server.adopt("second", SPEC.digest(("0",))) == server.url()
    assert server.alive("second") and server.alive()
    with pytest.raises(RuntimeError, match="another driver"):
        server.alive("first")


def test_a_server_with_another_spec_is_not_adopted(server: SGLangServer) -> None:
    others = [SPEC.model_copy(update=change) for change in ({"args": {"dtype": "float16"}}, {"model_path": "/other"})]
    for digest in [SPEC.digest(("1",)), *(other.digest(("0",)) for other in others)]:
        assert server.adopt("second", digest) is None


def test_a_dead_server_is_not_adopted_and_reports_its_exit_code_and_log_tail(server: SGLangServer) -> None:
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert server.adopt("second", SPEC.digest(("0",))) is None
    report = server.exit_report()
    assert (
        "exit code -9" in report and report.endswith("line 99") and "line 74\n" not in report and "line 75\n" in report
    )
