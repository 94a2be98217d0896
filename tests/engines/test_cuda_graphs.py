"""The warning that engines may decode larger batches than SGLang captures CUDA graphs for by default."""

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
from penstock.engines.sglang.checks import graph_limit, graph_mib

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
        (256, 44.5, 1, {"cuda_graph_backend_decode": "full", "disable_prefill_cuda_graph": True}, 256, 32, "0.4 GiB"),
        (300, 79.6, 1, {}, 300, 256, "0.1 GiB"),
        (512, 44.5, 4, {}, 512, 160, "0.7 GiB"),
        (512, 44.5, 1, {"max_running_requests": 64}, 64, 32, "0.1 GiB"),
        (512, 44.5, 1, {"speculative_algorithm": "NEXTN"}, 48, 32, "0.1 GiB"),
        (2048, 44.5, 8, DP_ATTENTION, 256, 160, "2.4 GiB"),
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


@pytest.mark.parametrize(
    "args", [{}, {"cuda_graph_max_bs_decode": 512}, {"disable_decode_cuda_graph": True}, {"mem_fraction_static": 0.3}]
)
def test_prefills_of_a_gpu_run_without_cuda_graphs_by_default(args: dict[str, Any]) -> None:
    assert args_of_server(**args) == {**args, "cuda_graph_backend_prefill": "disabled"}


@pytest.mark.parametrize(
    "args",
    [
        {"cuda_graph_backend_prefill": "breakable"},
        {"cuda-graph-backend-prefill": "breakable"},
        {"cuda_graph_max_bs_prefill": 512},
        {"cuda_graph_bs_prefill": [64, 128]},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
        {"cuda_graph_tc_compiler": "eager"},
        {"disable_prefill_cuda_graph": False},
        {"enable_breakable_cuda_graph": True},
        {"enforce_piecewise_cuda_graph": True},
        {"piecewise_cuda_graph_max_tokens": 512},
    ],
    ids=str,
)
def test_flags_of_the_user_choose_the_graphs_of_prefills(args: dict[str, Any]) -> None:
    assert args_of_server(**args) == args


def test_graphs_of_prefills_are_left_to_a_cpu_server_and_to_another_installation() -> None:
    assert args_of_server(has_gpus=False) == args_of_server(python="/opt/sglang/bin/python") == {}


@pytest.mark.parametrize(
    ("num_samples", "gpu_gib", "gpus", "args"),
    [
        (32, 44.5, 1, {}),
        (256, 79.6, 1, {}),
        (512, 79.6, 4, {}),
        (512, 178.0, 1, {}),
        (512, 44.5, 1, {"max_running_requests": 32}),
        (512, 79.6, 1, {"speculative_algorithm": "NEXTN"}),
        (160 * 8, 44.5, 8, DP_ATTENTION),
        (512, 44.5, 1, {"cuda_graph_max_bs": 512}),
        (512, 44.5, 1, {"cuda_graph_max_bs": 32}),
        (512, 44.5, 1, {"cuda_graph_max_bs_decode": 32}),
        (512, 44.5, 1, {"cuda-graph-bs": [1, 2, 4]}),
        (512, 44.5, 1, {"cuda_graph_config": {"decode": {"max_bs": 64}}}),
        (512, 44.5, 1, {"cuda_graph_backend_decode": "disabled"}),
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
