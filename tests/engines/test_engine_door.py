"""A second engine is one folder and one row of `BACKENDS`, as `stub_engine.py` shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.backends import BACKENDS, engine_backend, engine_flag
from penstock.engines.options import EngineOptions
from penstock.engines.serving.pool import start_pool
from penstock.engines.serving.server import ServerSpec
from penstock.flows.options.flags import parse_config
from penstock.flows.options.help import full_help
from penstock.flows.runtime.engine_options import engine_options
from penstock.storage.errors import EngineError, InputError, OptionError
from tests.engines.stub_engine import StubBackend, StubServer

PATH = "tests.engines.stub_engine:StubBackend"
WORDS = ["--run", "r", "--hf-checkpoint", "model"]


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(BACKENDS, "stub", PATH)
    yield
    engine_backend.cache_clear()


def test_a_row_makes_an_engine_selectable_with_its_own_flags(row: None) -> None:
    config = parse_config([*WORDS, "--engine", "stub", "--stub-first-digit", "7", "--stub-context-length", "64"])
    assert config.rollout.engine_options == {"first_digit": 7, "context_length": 64}
    assert config.engine_facts.context_length == 64 and not config.speculates
    options = engine_options(config)
    assert isinstance(engine_backend(options.engine), StubBackend)
    engine_backend(options.engine).check_options(options)
    assert engine_flag("stub", "first_digit") == "--stub-first-digit"
    text = full_help("train", "")
    assert "OPTIONS OF STUB" in text and "--stub-first-digit N" in text


def test_an_engine_outside_of_the_table_is_selected_by_its_class() -> None:
    config = parse_config([*WORDS, "--engine", PATH, "--engine-options", "first_digit=7"])
    assert isinstance(engine_backend(engine_options(config).engine), StubBackend)
    assert config.rollout.engine_options == {"first_digit": 7}


@pytest.mark.parametrize("name", ["vllm", "SGLang", "tests.engines.stub_engine:Missing", "no.such.module:Class", ""])
def test_an_unknown_engine_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"--engine .*give one of sglang"):
        engine_backend(name)


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "stub", "--sglang-context-length", "64"],
        ["--stub-first-digit", "7"],  # the default engine is another
        ["--engine", "sglang", "--stub-first-digit", "7"],
    ],
    ids=" ".join,
)
def test_flags_of_another_engine_are_refused(row: None, words: list[str]) -> None:
    with pytest.raises(InputError, match="is an option of --engine"):
        parse_config([*WORDS, *words])


@pytest.mark.parametrize(
    ("options", "message"), [({"args": {"digit": 1}}, "--stub-digit"), ({"router": {}}, "Stub has no router")]
)
def test_a_backend_refuses_what_its_engine_does_not_have(options: dict[str, Any], message: str) -> None:
    spec = ServerSpec(model_path="model", args=options.pop("args", {}))
    engines = EngineOptions(spec, PATH, **options)
    with pytest.raises(EngineError, match=message):
        engine_backend(engines.engine).check_options(engines)


def test_the_pool_serves_another_engine_and_publishes_to_it(tmp_path: Path) -> None:
    spec = ServerSpec(model_path="model", args={"api_key": "a-key-of-the-stub"}, log_dir=str(tmp_path))
    server = StubServer(spec)
    address = server.start().removeprefix("http://")
    try:
        options = EngineOptions(spec, PATH, external=(address,))
        cluster: Any = SimpleNamespace(
            num_gpus=0, spans_nodes=False, check_alive=lambda: None, find_actor=lambda name: None
        )
        pool = start_pool(cluster, options)
        client = engine_backend(options.engine).connect(lambda: pool.urls)

        def publish(urls: list[str]) -> None:
            engine_backend(options.engine).connect(urls).update_weights([], "run/1")

        with pool.serving("run/1", publish) as urls:
            [generation] = asyncio.run(engine_backend(options.engine).connect(urls).generate([1, 2, 3], {}))
        assert generation.token_ids == [9, 6, 7, 8] and generation.weight_versions == [("run/1", 4)]
        assert client.weight_version(f"http://{address}") == "run/1"
        pool.stop()
    finally:
        server.stop()
