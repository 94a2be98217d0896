"""Launch arguments of engines: CUDA graphs and their warning, and the data type of the trained policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.backends import engine_backend
from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang import older_release
from penstock.engines.sglang.backend import SGLangServer
from penstock.engines.sglang.checks import graph_limit, graph_mib
from penstock.flows.config import derive
from penstock.flows.options.adapters import with_adapters
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.engine_options import engine_options, teacher_options
from tests.engines.real_models import REAL_MODELS

GIB, MIB = 1 << 30, 1 << 20
HERE = Path(__file__).parent
DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 8}


def warning(num_samples: int, gpu_gib: float, gpus: int = 1, python: str | None = None, **args: Any) -> str | None:
    options = EngineOptions(ServerSpec(model_path="", args=args, python=python), gpus_per_engine=gpus)
    return engine_backend().graph_warning(options, num_samples, round(gpu_gib * GIB))


@pytest.mark.parametrize(
    ("num_samples", "gpu_gib", "gpus", "args", "batch", "limit", "more"),
    [
        (256, 44.5, 1, {}, 256, 32, "0.4 GiB"),
        (300, 79.6, 1, {}, 300, 256, "0.1 GiB"),
        (512, 44.5, 4, {}, 512, 160, "0.7 GiB"),
        (512, 44.5, 1, {"max_running_requests": 64, "cuda_graph_backend_decode": "full"}, 64, 32, "0.1 GiB"),
        (512, 44.5, 1, {"speculative_algorithm": "NEXTN"}, 48, 32, "0.1 GiB"),
        (2048, 44.5, 8, DP_ATTENTION | {"max_running_requests": 1600}, 200, 160, "1.0 GiB"),
        (513 * 8 - 7, 79.6, 8, DP_ATTENTION, 513, 512, "0.1 GiB"),
    ],
)
def test_batches_above_the_default_are_named_with_the_option(
    num_samples: int, gpu_gib: float, gpus: int, args: dict[str, Any], batch: int, limit: int, more: str
) -> None:
    text = warning(num_samples, gpu_gib, gpus, **args)
    assert text and "\n" not in text
    assert f"batches of {batch} samples" in text and f"at most {limit} on" in text
    assert f"--sglang-cuda-graph-max-bs {batch} if each GPU has {more} left" in text and f"or {limit} to keep" in text


def args_of_server(has_gpus: bool = True, python: str | None = None, **args: Any) -> dict[str, Any]:
    options = EngineOptions(ServerSpec(model_path="", args={"dtype": "bfloat16", **args}, python=python))
    of_server = engine_backend().server_args(options, has_gpus=has_gpus)
    return {name: value for name, value in of_server.items() if name != "dtype"}


@pytest.mark.parametrize("args", [{}, {"cuda_graph_max_bs_decode": 512}, {"disable_decode_cuda_graph": True}])
def test_prefills_of_a_gpu_run_without_cuda_graphs_by_default(args: dict[str, Any]) -> None:
    assert args_of_server(**args) == {**args, "cuda_graph_backend_prefill": "disabled"}


@pytest.mark.parametrize(
    "args",
    [
        {"cuda_graph_backend_prefill": "breakable"},
        {"cuda-graph-backend-prefill": "breakable"},
        {"cuda_graph_max_bs_prefill": 512},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
        {"disable_prefill_cuda_graph": False},
        {"enable_breakable_cuda_graph": True},
    ],
    ids=str,
)
def test_flags_of_the_user_choose_the_graphs_of_prefills(args: dict[str, Any]) -> None:
    assert args_of_server(**args) == {name.replace("-", "_"): value for name, value in args.items()}


def test_server_gets_flags_by_the_names_of_the_installed_release() -> None:
    renamed = {"cuda_graph_max_bs_decode": 512, "moe_a2a_backend": "deepep"}
    old = {"cuda_graph_max_bs": 512, "enable_deepep_moe": True}
    assert args_of_server(has_gpus=False, **old) == renamed
    assert args_of_server(has_gpus=False, python="/opt/sglang/bin/python", **old) == old


def test_graphs_of_prefills_are_left_to_a_cpu_server_and_to_another_installation() -> None:
    assert args_of_server(has_gpus=False) == args_of_server(python="/opt/sglang/bin/python") == {}


@pytest.mark.parametrize(
    ("num_samples", "gpu_gib", "gpus", "args"),
    [
        (32, 44.5, 1, {}),
        (256, 79.6, 1, {}),
        (512, 44.5, 1, {"max_running_requests": 32}),
        (512, 79.6, 1, {"speculative_algorithm": "NEXTN"}),
        (160 * 8, 44.5, 8, DP_ATTENTION),
        (512, 44.5, 1, {"cuda_graph_max_bs": 32}),
        (512, 44.5, 1, {"cuda-graph-bs": [1, 2, 4]}),
        (512, 44.5, 1, {"cuda_graph_config": {"decode": {"max_bs": 64}}}),
        (512, 44.5, 1, {"disable_cuda_graph": True}),
    ],
)
def test_no_warning_if_graphs_suffice_or_a_flag_sets_them(
    num_samples: int, gpu_gib: float, gpus: int, args: dict[str, Any]
) -> None:
    assert warning(num_samples, gpu_gib, gpus, **args) is None


def test_limits_are_those_of_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at most 48 on" in str(warning(64, 24))
    monkeypatch.setattr(older_release, "version", lambda package: "0.5.15.post1")
    assert "at most 24 on" in str(warning(64, 24)) and "at most 32 on" in str(warning(64, 44.5))
    assert "at most 48 on" in str(warning(64, 24, python="/elsewhere/python"))  # its release is not known here


@pytest.mark.integration
def test_limits_and_memory_are_those_that_sglang_computes() -> None:
    environment = os.environ | {"PENSTOCK_SERVER_PARENT": str(os.getpid()), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(HERE / "sglang_graph_limits.py")], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == 80
    for mib, gpus, args, limit, reserved in rows:
        assert graph_limit(mib * MIB, gpus) == limit, f"{gpus} GPUs of {mib} MiB"
        assert graph_mib(args, limit) == reserved, f"{args} with batches of {limit}"


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


RUNS: dict[str, tuple[str, str, str | None]] = {
    # options of a run -> dtype of the checkpoint, and of the run's engines on a CPU (None: they need a GPU)
    "default": ("", "bfloat16", "float32"),
    "bf16": ("--params-dtype bf16", "float32", "bfloat16"),
    "fp32": ("--params-dtype fp32", "float16", "float32"),
    "megatron-bf16": ("--bf16", "float16", "bfloat16"),
    "adapter in bf16": ("--lora-rank 4 --params-dtype bf16", "float32", "bfloat16"),
    "merged adapter in fp32": ("--lora-rank 4 --lora-publish merged --params-dtype fp32", "bfloat16", "float32"),
    "offloaded": ("--colocate --offload-rollout", "float16", "float32"),
    "without trainer": ("--debug-rollout-only --params-dtype fp32", "bfloat16", "float32"),
    "seeds": ("--rollout-sampling-seeds", "float32", None),
}


@pytest.mark.parametrize(("words", "stored", "on_cpus"), RUNS.values(), ids=RUNS)
def test_engine_computes_in_the_dtype_of_the_policy_whatever_the_checkpoint_has(
    words: str, stored: str, on_cpus: str | None, tiny_model: Path, tmp_path: Path
) -> None:
    options = options_of(checkpoint(tiny_model, tmp_path, dtype=stored), *words.split())
    assert (options.adapters is not None) == ("lora" in words and "merged" not in words)
    assert values_of(command_of(options, has_gpus=True), "--dtype") == ["bfloat16"]
    if on_cpus is not None:
        assert values_of(command_of(options, has_gpus=False), "--dtype") == [on_cpus]


@pytest.mark.parametrize("given", ["auto", "half", "float32"])
def test_dtype_given_by_the_user_replaces_that_of_the_policy(given: str, tiny_model: Path) -> None:
    command = command_of(options_of(tiny_model, "--params-dtype", "bf16", "--sglang-dtype", given), has_gpus=True)
    assert values_of(command, "--dtype") == [given]


@pytest.mark.parametrize(
    ("entries", "words"),
    [({"quantization_config": FP8}, []), ({}, ["--sglang-quantization", "fp8"])],
    ids=["checkpoint", "flag"],
)
def test_engine_with_fp8_weights_computes_in_bf16(
    entries: dict[str, Any], words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    options = options_of(checkpoint(tiny_model, tmp_path, **entries), "--params-dtype", "fp32", *words)
    command = command_of(options, has_gpus=True)
    assert values_of(command, "--dtype") == ["bfloat16"] and not values_of(command, "--attention-backend")


@pytest.mark.parametrize(("dtype", "on_cpus"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_engine_of_the_teacher_computes_in_the_dtype_of_the_policy(
    dtype: str, on_cpus: str, tiny_model: Path, other_tiny_model: Path
) -> None:
    words = ["--opd-teacher-engine", str(other_tiny_model), "--params-dtype", dtype]
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
        ("fp32", {}, 2),
        ("fp32", {"dtype": "bfloat16"}, 2),
        ("bf16", {"dtype": "float32"}, 4),
    ],
)
def test_estimated_memory_follows_the_dtype_of_the_engine(dtype: Any, args: dict[str, Any], size: int) -> None:
    shape = REAL_MODELS["qwen3-0.6B"].shape
    options = EngineOptions(ServerSpec(model_path="/model", args=args), params_dtype=dtype)
    memory = engine_backend().estimate_memory(options, shape, 80 << 30)
    assert memory.weight_bytes == size * shape.num_parameters
    assert memory.bytes_per_token == 28 * 2 * 8 * 128 * size
