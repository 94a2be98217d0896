"""External engines: checked, waited for and supervised, but never started or stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_servers import serve_json

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
        self.facts: dict[str, Any] = {
            "model_path": model_path,
            "architectures": MODEL["architectures"],
            "version": "0.5.21",
            "tp_size": 1,
        }
        self.port = 0
        self.start()

    def start(self) -> None:
        self.version = "default"
        self.http = serve_json(lambda path: {**self.facts, "weight_version": self.version}, self.port)
        self.port = self.http.server_port

    def die(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


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
    return ExternalReplica(
        external_server.address, ServerSpec(model_path=str(model), start_timeout=timeout), 0, engine_backend()
    )


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "timed out after 10 s"
        time.sleep(0.01)


def test_an_external_engine_gets_the_weights_again_after_its_restart(
    external_server: ExternalServer, model: Path
) -> None:
    published: list[list[str]] = []
    lives: list[list[str]] = []

    def publish(urls: list[str]) -> None:
        published.append(urls)
        external_server.version = VERSION

    url = f"http://{external_server.address}"
    running = Supervisor(
        [engine_at(external_server, model)], VERSION, publish, HealthCheck(interval=0.05), lives.append
    )
    running.restart_and_publish()
    with running:
        assert running.live_urls() == [url] and published == [[url]]
        external_server.die()
        eventually(lambda: running.live_urls() == [])
        external_server.start()
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
    external_server.start()
    engine.launch_server()
    assert engine.wait_for_url() == f"http://{external_server.address}" and engine.alive() and engine.answers_requests()


def test_another_model_is_refused(external_server: ExternalServer, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 65}))
    external_server.facts["model_path"] = str(other)
    with pytest.raises(EngineError, match=r"vocab_size 65.*--hf-checkpoint .* 64"):
        engine_at(external_server, model).wait_for_url()
    external_server.facts |= {"model_path": "/gone", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(EngineError, match=r"architectures \['LlamaForCausalLM'\]"):
        engine_at(external_server, model).wait_for_url()
    external_server.facts |= {"architectures": MODEL["architectures"], "version": "0.4.9.post2"}
    with pytest.raises(EngineError, match=r"SGLang 0\.4\.9"):
        engine_at(external_server, model).wait_for_url()


@pytest.mark.parametrize(
    ("address", "url"), [("10.0.0.7:30000", "http://10.0.0.7:30000"), ("https://host:1/", "https://host:1")]
)
def test_engine_url_accepts_host_port_and_urls(address: str, url: str) -> None:
    assert engine_url(address) == url and not is_on_this_machine(address) and is_on_this_machine("localhost:1")


@pytest.mark.parametrize("address", ["host", "host:port", "ftp://host:1", "host:1/generate", ""])
def test_engine_url_refuses_other_addresses(address: str) -> None:
    with pytest.raises(EngineError, match="--rollout-external-engine-addrs"):
        engine_url(address)
