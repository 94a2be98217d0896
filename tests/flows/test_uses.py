"""What `penstock doctor` finds missing for each planned use, and the command that it names."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.flows.commands import doctor
from penstock.flows.config import RunConfig
from penstock.flows.install import uses
from penstock.flows.install.uses import Targets, Use
from penstock.storage.errors import OptionError
from penstock.storage.store import Store


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU, credentials, Ray's token and MLflow server; all packages are installed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*uses.CREDENTIALS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(uses, "has_cuda", lambda: False)
    monkeypatch.setattr(uses, "missing_packages", lambda kind: [])
    monkeypatch.setattr(uses, "missing_requirements", lambda extras, source, pins: [])
    monkeypatch.setattr(uses, "shared_memory", lambda: 32 << 30)


def lines(use: Use) -> str:
    return "\n".join(f"{found} | {remedy}" for found, remedy in use.lacks)


def test_demo_names_setup_and_the_flag_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses.demo_use(Targets()).command.endswith("penstock demo")
    monkeypatch.setattr(uses, "missing_packages", lambda kind: [("ray: not installed", f"penstock setup --{kind}")])
    monkeypatch.setattr(uses, "shared_memory", lambda: 64 << 20)
    said = lines(uses.demo_use(Targets()))
    assert "ray: not installed | penstock setup --cpu" in said and "docker run --shm-size" in said


def test_one_gpu_needs_a_driver_new_glibc_and_packages_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nvidia-smi lists no GPU" in lines(uses.one_gpu_use(Targets()))
    monkeypatch.setattr(uses, "has_cuda", lambda: True)
    assert not uses.one_gpu_use(Targets()).lacks
    monkeypatch.setattr(uses.platform, "libc_ver", lambda: ("glibc", "2.31"))
    monkeypatch.setattr(uses, "missing_packages", lambda kind: [("torch", f"penstock setup --{kind}")])
    said = lines(uses.one_gpu_use(Targets()))
    assert "glibc 2.31" in said and "penstock setup --cuda" in said


def test_several_nodes_need_a_token_and_a_shared_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = lines(uses.several_nodes_use(Targets(store=RunConfig(store=str(tmp_path)))))
    assert "RAY_AUTH_TOKEN=" in said and "ray start --head" in said and "local directory" in said
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert "no token" in lines(uses.several_nodes_use(Targets()))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    monkeypatch.setattr(uses, "ray_problem", lambda address: "")
    use = uses.several_nodes_use(Targets(ray_address="10.0.0.1:6379", store=RunConfig(store="s3://b/x")))
    assert not use.lacks and use.required and "--ray-address 10.0.0.1:6379" in use.command


def test_s3_needs_credentials_and_a_named_bucket_is_written(object_store: Store, tmp_path: Path) -> None:
    assert "AWS_ACCESS_KEY_ID" in lines(uses.s3_use(Targets()))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    assert not uses.s3_use(Targets()).lacks
    named = RunConfig(store="s3://bucket/store", store_options=object_store.options)
    assert not uses.s3_use(Targets(store=named)).lacks
    gone = RunConfig(store="s3://gone/store", store_options=object_store.options)
    use = uses.s3_use(Targets(store=gone))
    assert "s3://gone/store" in lines(use) and use.required


@pytest.fixture
def health_server() -> Iterator[str]:
    """A server that answers at /mlflow/health only."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/mlflow/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_mlflow_server_is_asked_and_its_password_is_not_shown(
    health_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "mlflow server" in lines(uses.mlflow_server_use(Targets()))
    monkeypatch.setenv("URI", f"http://user:word-of-a-test@{health_server}/mlflow/")
    use = uses.mlflow_server_use(Targets(mlflow_tracking_uri="env:URI"))
    assert not use.lacks and use.required and "word-of-a-test" not in use.command
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:word-of-a-test@{health_server}")
    said = lines(uses.mlflow_server_use(Targets()))
    assert health_server in said and "404" in said and "word-of-a-test" not in said


def test_only_requested_uses_make_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [])
    assert doctor.main([]) == 0
    assert "MLFLOW_TRACKING_URI" in capsys.readouterr().out
    assert doctor.main(["--mlflow-tracking-uri", "http://127.0.0.1:9"]) == 1
    out = capsys.readouterr().out
    assert "1 of 1 checks failed" in out and "does not answer" in out
    for invalid in (["--run", "x"], ["now"], ["--num-gpus", "8"]):
        with pytest.raises(OptionError, match=invalid[0]):
            doctor.main(invalid)
