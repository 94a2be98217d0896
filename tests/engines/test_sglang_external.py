"""Engines that somebody else has started: found, checked, watched and waited for; nothing here starts or ends them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_servers import serve_json

from engines.sglang import external, supervisor
from engines.sglang.external import ExternalEngine, is_on_this_machine, url_of
from engines.sglang.server import ServerSpec
from engines.sglang.supervisor import HealthCheck, Supervisor

VERSION = "run/3"
MODEL = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 32}


class SomebodysEngine:
    """What an engine's HTTP side says of itself; it can go away and come back."""

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

    def go_away(self) -> None:
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
def somebodys(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SomebodysEngine]:
    monkeypatch.setattr(supervisor, "TICK", 0.01)
    monkeypatch.setattr(external, "LOOK_EVERY", 0.01)
    engine = SomebodysEngine(str(model))
    yield engine
    engine.go_away()


def engine_at(somebodys: SomebodysEngine, model: Path, timeout: float = 10) -> ExternalEngine:
    return ExternalEngine(somebodys.address, ServerSpec(model_path=str(model), start_timeout=timeout), 0)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in 10 s"
        time.sleep(0.01)


def test_it_is_given_the_weights_and_given_them_again_when_it_comes_back(somebodys: SomebodysEngine, model: Path) -> None:
    published: list[list[str]] = []
    lives: list[list[str]] = []

    def publish(urls: list[str]) -> None:
        published.append(urls)
        somebodys.version = VERSION

    url = f"http://{somebodys.address}"
    running = Supervisor([engine_at(somebodys, model)], VERSION, publish, HealthCheck(interval=0.05), lives.append)
    running.bring_up()
    with running:
        assert running.live() == [url] and published == [[url]]
        somebodys.go_away()
        eventually(lambda: running.live() == [])
        somebodys.start()
        eventually(lambda: running.live() == [url])
    assert published == [[url], [url]] and lives == [[url], [], [url]], "a router is told of every change"


def test_it_is_waited_for_and_then_named(somebodys: SomebodysEngine, model: Path) -> None:
    somebodys.go_away()
    engine = engine_at(somebodys, model, timeout=0.2)
    with pytest.raises(ConnectionError, match=f"the engine at {somebodys.address}.*for 0 s: start it again, or take it out of"):
        engine.url()
    running = Supervisor([engine], VERSION, lambda urls: None, HealthCheck())
    engine.begin()
    with pytest.raises(ConnectionError, match="--rollout-external-engine-addrs"):
        running.bring_up()
    somebodys.start()
    engine.begin()
    assert engine.url() == f"http://{somebodys.address}" and engine.alive() and engine.answers()


def test_another_model_is_refused(somebodys: SomebodysEngine, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 65}))
    somebodys.facts["model_path"] = str(other)
    with pytest.raises(
        ValueError, match=r"serves a model with vocab_size 65, but --hf-checkpoint .* has 64: start it with that model"
    ):
        engine_at(somebodys, model).url()
    somebodys.facts |= {"model_path": "/gone", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match=r"architectures \['LlamaForCausalLM'\]"):
        engine_at(somebodys, model).url()
    somebodys.facts |= {"architectures": MODEL["architectures"], "version": "0.4.9.post2"}
    with pytest.raises(RuntimeError, match=r"runs SGLang 0\.4\.9: Penstock needs"):
        engine_at(somebodys, model).url()


@pytest.mark.parametrize(("address", "url"), [("10.0.0.7:30000", "http://10.0.0.7:30000"), ("https://host:1/", "https://host:1")])
def test_addresses(address: str, url: str) -> None:
    assert url_of(address) == url and not is_on_this_machine(address) and is_on_this_machine("localhost:1")


@pytest.mark.parametrize("address", ["host", "host:port", "ftp://host:1", "host:1/generate", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="an engine's address is host:port"):
        url_of(address)
