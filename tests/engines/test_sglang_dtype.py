"""Engines compute in the data type of the trained policy on CPUs, and in bf16 on GPUs: their launch arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.backends import engine_backend
from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.backend import SGLangServer
from penstock.flows.config import derive
from penstock.flows.options.adapters import with_adapters
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.engine_options import engine_options, teacher_options
from tests.engines.real_models import REAL_MODELS

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def checkpoint(model: Path, directory: Path, **entries: Any) -> Path:
    """A directory with the tiny model's config and these entries; its weights are not read."""
    directory.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text()) | entries
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def options_of(model: Path, *words: str) -> EngineOptions:
    config = derive(parse_config(["--run", "r", "--hf-checkpoint", str(model), "--num-rollout", "1", *words]))
    return with_adapters(engine_options(config), config, None)


def command_of(options: EngineOptions, *, has_gpus: bool) -> list[str]:
    """The command line of an engine's server."""
    args = engine_backend().server_args(options, has_gpus=has_gpus)
    return SGLangServer(options.spec.model_copy(update={"args": args})).command(30000)


def values_of(command: list[str], flag: str) -> list[str]:
    return [command[at + 1] for at, word in enumerate(command) if word == flag]


RUNS: dict[str, tuple[str, str | None]] = {  # options of a run -> dtype of its engines on a CPU; None: they need a GPU
    "default": ("", "float32"),
    "bf16": ("--params-dtype bf16", "bfloat16"),
    "fp32": ("--params-dtype fp32", "float32"),
    "megatron-bf16": ("--bf16", "bfloat16"),
    "adapter in bf16": ("--lora-rank 4 --params-dtype bf16", "bfloat16"),
    "adapter in fp32": ("--lora-rank 4 --params-dtype fp32", "float32"),
    "merged adapter in bf16": ("--lora-rank 4 --lora-publish merged --params-dtype bf16", "bfloat16"),
    "merged adapter in fp32": ("--lora-rank 4 --lora-publish merged --params-dtype fp32", "float32"),
    "reference": ("--use-kl-loss --ref-load {other}", "float32"),
    "critic": ("--advantage-estimator ppo", "float32"),
    "offloaded": ("--colocate --offload-rollout", "float32"),
    "without trainer": ("--debug-rollout-only --params-dtype fp32", "float32"),
    "seeds": ("--rollout-sampling-seeds", None),
}


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("words", "on_cpus"), RUNS.values(), ids=RUNS)
def test_engine_computes_in_the_dtype_of_the_policy_whatever_the_checkpoint_has(
    words: str, on_cpus: str | None, stored: str, tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    words = words.format(other=other_tiny_model)
    options = options_of(checkpoint(tiny_model, tmp_path, dtype=stored), *words.split())
    assert (options.adapters is not None) == ("lora" in words and "merged" not in words)
    assert values_of(command_of(options, has_gpus=True), "--dtype") == ["bfloat16"]
    if on_cpus is not None:
        assert values_of(command_of(options, has_gpus=False), "--dtype") == [on_cpus]


@pytest.mark.parametrize("given", ["auto", "half", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("words", [[], ["--params-dtype", "fp32"]], ids=["bf16", "fp32"])
def test_dtype_given_by_the_user_replaces_that_of_the_policy(words: list[str], given: str, tiny_model: Path) -> None:
    command = command_of(options_of(tiny_model, *words, "--sglang-dtype", given), has_gpus=True)
    assert values_of(command, "--dtype") == [given]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("entries", "words"),
    [({"quantization_config": FP8}, []), ({}, ["--sglang-quantization", "fp8"])],
    ids=["checkpoint", "flag"],
)
def test_engine_with_fp8_weights_computes_in_bf16(
    entries: dict[str, Any], words: list[str], dtype: str, tiny_model: Path, tmp_path: Path
) -> None:
    options = options_of(checkpoint(tiny_model, tmp_path, **entries), "--params-dtype", dtype, *words)
    command = command_of(options, has_gpus=True)
    assert values_of(command, "--dtype") == ["bfloat16"] and not values_of(command, "--attention-backend")


@pytest.mark.parametrize(("dtype", "on_cpus"), [(None, "float32"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_engine_of_the_teacher_computes_in_the_dtype_of_the_policy(
    dtype: str | None, on_cpus: str, tiny_model: Path, other_tiny_model: Path
) -> None:
    words = ["--use-opd", "--opd-type", "engine", "--opd-teacher-load", str(other_tiny_model)]
    words += ["--params-dtype", dtype] if dtype else []
    words += ["--sglang-dtype", "half"]  # of the policy's engines only
    config = parse_config(["--run", "r", "--hf-checkpoint", str(tiny_model), "--num-rollout", "1", *words])
    teacher = teacher_options(config)
    assert teacher is not None and teacher.spec.model_path == str(other_tiny_model.resolve())
    assert values_of(command_of(teacher, has_gpus=True), "--dtype") == ["bfloat16"]
    assert values_of(command_of(teacher, has_gpus=False), "--dtype") == [on_cpus]


@pytest.mark.parametrize(
    ("dtype", "args", "size"),
    [
        (None, {}, 2),
        ("bf16", {}, 2),
        ("fp32", {}, 2),
        ("fp32", {"dtype": "auto"}, 2),
        ("fp32", {"dtype": "bfloat16"}, 2),
        ("bf16", {"dtype": "float32"}, 4),
        ("bf16", {"dtype": "float"}, 4),
    ],
)
def test_estimated_memory_follows_the_dtype_of_the_engine(dtype: Any, args: dict[str, Any], size: int) -> None:
    shape = REAL_MODELS["qwen3-0.6B"].shape
    options = EngineOptions(ServerSpec(model_path="/model", args=args), params_dtype=dtype)
    memory = engine_backend().estimate_memory(options, shape, 80 << 30)
    assert memory.weight_bytes == size * shape.num_parameters
    assert memory.bytes_per_token == 28 * 2 * 8 * 128 * size
