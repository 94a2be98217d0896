"""A second engine is one folder and one row of `BACKENDS`, as `stub_engine.py` shows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.backends import BACKENDS, Capability, engine_backend, engine_flag
from penstock.engines.options import EngineOptions
from penstock.engines.serving.pool import start_pool
from penstock.engines.serving.server import ServerSpec
from penstock.flows.config import Flow, derive
from penstock.flows.inspect.dry_run import dry_run
from penstock.flows.options.flags import parse_config
from penstock.flows.options.help import full_help
from penstock.flows.runtime.engine_options import engine_options
from penstock.flows.runtime.preflight import check_options, plan_of, preflight
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
    assert config.engine_facts.context_length == 64 and not config.engine_facts.speculates
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


@pytest.mark.parametrize(
    "name", ["no-such-engine", "SGLang", "tests.engines.stub_engine:Missing", "no.such.module:Class", ""]
)
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


def test_a_backend_refuses_what_is_not_a_flag_of_its_engine() -> None:
    engines = EngineOptions(ServerSpec(model_path="model", args={"digit": 1}), PATH)
    with pytest.raises(EngineError, match="--stub-digit"):
        engine_backend(engines.engine).check_options(engines)


NEEDS = {
    Capability.SEEDS: "--rollout-sampling-seeds",
    Capability.PARAMETERS: "--rollout-sampling min_p=0.1",
    Capability.EXPERTS: "--use-rollout-routing-replay",
    Capability.SCORES: "--opd-teacher-url http://teacher:1",
    Capability.FP32_HEAD: "--fp32-lm-head",
    Capability.QUANTIZED: "--hf-checkpoint {quantized}",
    Capability.SEVERAL_GPUS: "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
    Capability.OFFLOAD: "--colocate",
    Capability.TENSOR: "--update-weight-transport tensor",
    Capability.NCCL: "--update-weight-transport nccl",
    Capability.DISK: "--update-weight-transport disk",
    Capability.BUCKETS: "--update-weight-buffer-size 1000000",
    Capability.CHECKSUMS: "--check-weight-update-equal",
    Capability.RETRACT: "--async-mode streaming",
    Capability.IN_PLACE: "--async-mode streaming --pause-generation-mode in_place",
    Capability.EXTERNAL: "--rollout-external-engine-addrs 127.0.0.1:7",
    Capability.ROUTER: "--router-policy random",
    Capability.IMAGES: "--hf-checkpoint {vision}",
    Capability.PYTHON: "--engine-python /bin/python",
}


@pytest.mark.parametrize("capability", Capability)
def test_an_option_of_the_engine_is_refused_unless_the_backend_has_its_capability(
    capability: Capability, row: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubBackend, "capabilities", frozenset())
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    vision = tmp_path / "vision"
    vision.mkdir()
    (vision / "config.json").write_text('{"vision_config": {}}')
    words = [*WORDS, "--num-rollout", "1", *NEEDS[capability].format(quantized=tmp_path, vision=vision).split()]

    def check(*more: str) -> None:
        check_options(Flow.TRAIN, derive(parse_config([*words, *more])))

    check()  # SGLang accepts all
    option, what, _ = capability.value
    with pytest.raises(EngineError, match=re.escape(f"{option} needs an engine that {what}, and Stub (--engine stub)")):
        check("--engine", "stub")
    monkeypatch.setattr(StubBackend, "capabilities", frozenset({capability}))
    check("--engine", "stub")


def test_the_engine_of_a_teacher_needs_the_capability_of_several_gpus(row: None) -> None:
    words = "--num-rollout 1 --opd-teacher-engine t --opd-teacher-num-gpus 2 --engine"
    check_options(Flow.TRAIN, derive(parse_config([*WORDS, *words.split(), "sglang"])))
    with pytest.raises(EngineError, match=r"a teacher in an engine .* needs"):
        check_options(Flow.TRAIN, derive(parse_config([*WORDS, *words.split(), "stub"])))


def test_a_default_backend_warns_of_all_sampling_parameters_that_may_bias() -> None:
    params = {"top_p": 1.0, "top_k": -1, "min_p": 0.1}
    assert engine_backend(PATH).find_biasing_params(params) == ["min_p=0.1"]
    assert engine_backend(PATH).find_biasing_params(params | {"top_p": 0.9}) == ["top_p=0.9", "min_p=0.1"]


@pytest.mark.parametrize(
    ("is_dry", "words", "message"),
    [
        (True, "--fp32-lm-head", "--fp32-lm-head needs an engine that"),
        (False, "--lora-rank 2 --lora-publish adapter", "--lora-publish adapter is not possible: Stub cannot serve"),
    ],
    ids=["dry run", "preflight"],
)
def test_a_run_is_refused_like_its_dry_run(
    is_dry: bool, words: str, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "label": "3"}\n')
    data = f"--prompt-data {tmp_path}/rows.jsonl --input-key prompt --label-key label --rm-type exact_number"
    run = f"--run r --store {tmp_path}/store --hf-checkpoint {tiny_model} --num-rollout 1 --rollout-max-response-len 8"
    config = parse_config([*run.split(), *data.split(), "--engine", PATH, *words.split()])
    with pytest.raises(InputError, match=message):
        dry_run("train", config) if is_dry else preflight(plan_of("train", config))


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
        assert server.alive(), "a pool does not stop external engines"
    finally:
        server.stop()
