"""External engines: checked, waited for and supervised, but never started or stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_servers import JsonServer, eventually

from penstock.engines.backends import engine_backend
from penstock.engines.options import HealthCheck
from penstock.engines.serving import replica, supervisor
from penstock.engines.serving.endpoints import engine_url, is_on_this_machine
from penstock.engines.serving.replica import ExternalReplica
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import Supervisor
from penstock.storage.errors import EngineError

VERSION = "run/3"
MODEL = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 32}


class ExternalServer:
    """The HTTP answers of an external engine, which can die and restart."""

    def __init__(self, model_path: str) -> None:
        self.facts: dict[str, Any] = {"model_path": model_path, "version": "0.5.21", "tp_size": 1}
        self.facts["architectures"] = MODEL["architectures"]
        self.start()

    def start(self, port: int = 0) -> None:
        self.version = "default"
        self.http = JsonServer(lambda path: {**self.facts, "weight_version": self.version}, port=port)
        self.url, self.die = self.http.url, self.http.die

    def restart(self) -> None:
        self.start(self.http.server_port)

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def external_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExternalServer]:
    monkeypatch.setattr(supervisor, "TICK", 0.01)
    monkeypatch.setattr(replica, "POLL_SECONDS", 0.01)
    engine = ExternalServer(str(model))
    yield engine
    engine.die()


def engine_at(external_server: ExternalServer, model: Path, timeout: float = 10) -> ExternalReplica:
    spec = ServerSpec(model_path=str(model), start_timeout=timeout)
    return ExternalReplica(external_server.address, spec, 0, engine_backend())


def test_an_external_engine_gets_the_weights_again_after_its_restart(
    external_server: ExternalServer, model: Path
) -> None:
    published: list[list[str]] = []
    lives: list[list[str]] = []

    def publish(urls: list[str]) -> None:
        published.append(urls)
        external_server.version = VERSION

    engine, url = engine_at(external_server, model), external_server.url
    running = Supervisor([engine], VERSION, publish, HealthCheck(interval=0.05), lives.append)
    running.restart_and_publish()
    with running:
        assert running.live_urls() == [url] and published == [[url]]
        external_server.die()
        eventually(lambda: running.live_urls() == [])
        external_server.restart()
        eventually(lambda: running.live_urls() == [url])
    assert published == [[url], [url]] and lives == [[url], [], [url]], "the listener gets every change"


def test_an_external_engine_that_stays_dead_is_named_in_the_error(external_server: ExternalServer, model: Path) -> None:
    external_server.die()
    engine = engine_at(external_server, model, timeout=0.2)
    with pytest.raises(ConnectionError, match=f"{external_server.address}.*0 s.*--rollout-external-engine-addrs"):
        engine.wait_for_url()
    running = Supervisor([engine], VERSION, lambda urls: None, HealthCheck())
    engine.launch_server()
    with pytest.raises(ConnectionError, match="--rollout-external-engine-addrs"):
        running.restart_and_publish()
    external_server.restart()
    engine.launch_server()
    assert engine.wait_for_url() == external_server.url and engine.alive() and engine.answers_requests()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"model_path": "{tmp_path}/other"}, r"vocab_size 65.*--hf-checkpoint .* 64"),
        ({"model_path": "/gone", "architectures": ["LlamaForCausalLM"]}, r"architectures \['LlamaForCausalLM'\]"),
        ({"model_path": "/gone", "version": "0.4.9.post2"}, r"SGLang 0\.4\.9"),
    ],
    ids=["config", "architecture", "release"],
)
def test_another_model_or_release_is_refused(
    facts: dict[str, Any], message: str, external_server: ExternalServer, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(MODEL | {"vocab_size": 65}))
    external_server.facts |= facts | {"model_path": facts["model_path"].format(tmp_path=tmp_path)}
    with pytest.raises(EngineError, match=message):
        engine_at(external_server, model).wait_for_url()


def test_addresses_are_host_port_and_urls() -> None:
    for address, url in (("10.0.0.7:30000", "http://10.0.0.7:30000"), ("https://host:1/", "https://host:1")):
        assert engine_url(address) == url and not is_on_this_machine(address) and is_on_this_machine("localhost:1")
    for address in ("host", "host:port", "ftp://host:1", "host:1/generate", ""):
        with pytest.raises(EngineError, match="--rollout-external-engine-addrs"):
            engine_url(address)
