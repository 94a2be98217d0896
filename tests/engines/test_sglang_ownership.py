"""Who may take a server over, and what is said of a dead one. The server's process is a stand-in: none of this asks what it does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.sglang.server import ServerSpec, SGLangServer, last_lines

SPEC = ServerSpec(model_path="/model")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    server = SGLangServer(SPEC, gpu_ids=("0",), owner="first")
    server._log = tmp_path / "server.log"
    server._log.write_text("".join(f"line {number}\n" for number in range(100)))
    server._process = subprocess.Popen(["sleep", "60"])
    yield server
    server.stop()


def test_a_server_of_an_equal_spec_is_taken_over_and_then_denies_its_first_owner(server: SGLangServer) -> None:
    assert server.alive("first")
    assert server.adopt("second", SPEC.digest(("0",))) == server.url()
    assert server.alive("second") and server.alive()
    with pytest.raises(RuntimeError, match="another driver has taken over"):
        server.alive("first")


@pytest.mark.parametrize(
    "digest",
    [
        SPEC.digest(("1",)),
        SPEC.model_copy(update={"args": {"dtype": "float16"}}).digest(("0",)),
        SPEC.model_copy(update={"model_path": "/other"}).digest(("0",)),
    ],
    ids=["other GPU", "other flags", "other model"],
)
def test_another_spec_wants_another_server(server: SGLangServer, digest: str) -> None:
    assert server.adopt("second", digest) is None


def test_a_dead_server_is_not_taken_over_and_says_how_it_ended(server: SGLangServer) -> None:
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert server.adopt("second", SPEC.digest(("0",))) is None
    words = server.last_words()
    assert "ended with code -9" in words and words.endswith("line 99") and "line 74\n" not in words and "line 75\n" in words


def test_a_log_that_is_not_here_has_no_last_lines(tmp_path: Path) -> None:
    assert last_lines(None, 5) == last_lines(tmp_path / "gone.log", 5) == ""
