"""Environment variables of the run that an engine's server must not see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.backend import SGLangServer

PRINT = "import os; print(*(f'{name}={value}' for name, value in os.environ.items()), sep='\\n', flush=True)"


class PrintingServer(SGLangServer):
    """Prints its environment into its log, and ends."""

    name = "printing"

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", PRINT]

    def is_ready(self) -> bool:
        return False


def inherited(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **spec: dict[str, str]) -> bool:
    monkeypatch.setenv(name, "12345-of-the-run")
    server = PrintingServer(ServerSpec(model_path="model", log_dir=str(directory), **spec))
    with pytest.raises(RuntimeError, match="failed to start"):
        server.start()
    [log] = directory.glob("*.log")
    assert "PENSTOCK_SERVER_PARENT=" in log.read_text()
    return f"\n{name}=12345-of-the-run" in log.read_text()


@pytest.mark.parametrize(
    "name",
    [
        "DUMPER_SERVER_PORT",  # a port on all interfaces, or a route of the server
        "DUMPER_ENABLE",
        "DUMPER_SOURCE_PATCHER_CONFIG",  # changes SGLang's source
        "DUMPER_GRAFTER_TRANSFORM_PATH",  # a function to call
        "SGLANG_GRPC_PORT",  # a second server, without the key
        "SGLANG_RUST_SERVER",  # another HTTP server
        "SGLANG_PORT",
        "SGLANG_TCP_STORE_PORT",
        "SGLANG_BACKUP_PORT_BASE",
        "SGLANG_HOST_IP",
        "SGLANG_ZBAL_BOOTSTRAP_URL",
        "SGLANG_TEST_SCRIPTED_RUNTIME",  # runs scripts in the scheduler
        "SGLANG_TEST_SCRIPTED_RUNTIME_IPC_ADDR",
        "SGLANG_TEST_SCRIPTED_RUNTIME_SYS_PATH_ENTRY",
        "SGLANG_TEST_RETRACT",
    ],
)
def test_variable_that_opens_a_port_or_runs_code_does_not_reach_an_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not inherited(name, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_HEALTH_CHECK_TIMEOUT",
        "SGLANG_EXTERNAL_MODEL_PACKAGE",
        "SGLANG_WAIT_PORT_TIMEOUT",
        "SGLANG_OPT_SKIP",
        "NCCL_DEBUG",
        "SSL_CERT_FILE",
    ],
)
def test_other_variables_reach_an_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inherited(name, tmp_path, monkeypatch)
