"""SGLang's flags: read from its source without importing it, checked, and turned into a command line its own parser
understands."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.sglang.older_release import to_current_flag
from penstock.engines.sglang.passthrough import check_sglang_args, sglang_flags, to_command_line
from penstock.storage.errors import EngineError

DATACLASS = """
class ServerArgs:
    model_path: A[str, Arg(help="x", aliases=["--model"])]
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size"])] = 1
    sleep_on_idle: A[bool, "Sleep."] = False
    gemm_runner: A[str, Arg(help="x", cli_name="--gemm-backend")] = "auto"
    handler: A[Optional[int], Arg(help="x", no_cli=True)] = None
    not_a_flag: int = 3

    def add_cli_args(parser):
        parser.add_argument("--sampling-backend", type=str)
        parser.add_argument("--old-switch", action=DeprecatedStoreTrueAction)
"""


def test_sglang_flags_reads_every_way_of_declaring_a_flag(tmp_path: Path) -> None:
    (tmp_path / "srt/arg_groups/fields").mkdir(parents=True)
    (tmp_path / "srt/server_args.py").write_text(DATACLASS)
    (tmp_path / "srt/arg_groups/fields/more.py").write_text(
        "class More:\n    watchdog: Annotated[float, 'Seconds.'] = 3\n"
    )
    found = {name: (flag.flag, flag.switch) for name, flag in sglang_flags(tmp_path).items()}
    assert found == {
        "model_path": ("--model-path", False),
        "model": ("--model-path", False),
        "tp_size": ("--tp-size", False),
        "tensor_parallel_size": ("--tp-size", False),
        "sleep_on_idle": ("--sleep-on-idle", True),
        "gemm_runner": ("--gemm-backend", False),
        "gemm_backend": ("--gemm-backend", False),
        "sampling_backend": ("--sampling-backend", False),
        "old_switch": ("--old-switch", True),
        "watchdog": ("--watchdog", False),
    }


def test_check_names_the_nearest_flag() -> None:
    assert check_sglang_args({"--mem-fraction-static": 0.7, "log_level": "info"}) == {
        "mem_fraction_static": 0.7,
        "log_level": "info",
    }
    with pytest.raises(EngineError, match=r"--sglang-mem-fraction-static\b"):
        check_sglang_args({"mem_fraction_statics": 0.7})
    with pytest.raises(EngineError, match=r"--sglang-tp-size.*--rollout-num-gpus-per-engine"):
        check_sglang_args({"tp-size": 2})


def test_command_line_spells_every_kind_of_value() -> None:
    args = {
        "mem_fraction_static": 0.7,
        "disable_radix_cache": True,
        "sleep_on_idle": "true",
        "skip_server_warmup": "False",
        "trust_remote_code": False,
        "random_seed": None,
        "cuda_graph_bs_decode": [1, 2],
        "json_model_override_args": {"rope": 1},
    }
    assert to_command_line(args) == [
        *("--mem-fraction-static", "0.7", "--disable-radix-cache", "--sleep-on-idle"),
        *("--cuda-graph-bs-decode", "1", "2", "--json-model-override-args", '{"rope": 1}'),
    ]


LASTING_CACHES = [
    "hicache_storage_backend",
    "hicache_storage_prefetch_policy",
    "enable_lmcache",
    "lmcache_config_file",
    "enable_flexkv",
    "flexkv_config_file",
    "radix_cache_backend",
    "enable_unified_cache_external_linker",
    "enable_streaming_session",
]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("disaggregation-mode", "both prefill and decode"),
        ("nnodes", "--num-gpus-per-node"),
        ("lora_paths", "adapters from the trainer"),
        ("enable_lora", "--lora-rank and --lora-publish"),
        ("max_loaded_loras", "that requests still use"),
        ("load_format", "weights come from --hf-checkpoint"),
        ("enable_ep_moe", "--sglang-ep-size"),
        *((name, "outlive the weights that computed them") for name in LASTING_CACHES),
    ],
)
def test_flag_that_cannot_be_served_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(EngineError, match=reason) as caught:
        check_sglang_args({name: 1})
    assert f"--sglang-{name.replace('_', '-')} is not allowed" in str(caught.value)


def test_flags_of_older_releases_are_translated() -> None:
    given = {"cuda-graph-bs": [1, 2], "enable_deepep_moe": True}
    known = sglang_flags().keys()
    assert {"cuda_graph_bs_decode", "moe_a2a_backend"} <= known and not {"cuda_graph_bs"} & known
    checked = check_sglang_args(given)
    assert checked == {"cuda_graph_bs_decode": [1, 2], "moe_a2a_backend": "deepep"}
    assert to_current_flag("cuda_graph_bs", 4, {"cuda_graph_bs"}) == ("cuda_graph_bs", 4)  # the release has it
