"""SGLang's flags and sampling parameters: read from its source, checked, and turned into a command line."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from penstock.engines import sources
from penstock.engines.sglang.older_release import to_current_flag
from penstock.engines.sglang.passthrough import (
    check_sampling,
    check_sglang_args,
    find_biasing_params,
    sampling_parameter_names,
    sglang_flags,
    to_command_line,
)
from penstock.engines.sources import parse_source
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import config_warnings, plan_of, preflight
from penstock.flows.runtime.resolve import resolve
from penstock.storage.errors import EngineError, InputError
from penstock.storage.store import Store

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
        ("hicache_storage_backend", "outlive the weights that computed them"),
        ("enable_lmcache", "outlive the weights that computed them"),
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


STORE = Store("memory://", probe=False)


def test_sampling_names_of_the_installed_sglang() -> None:
    assert {"min_p", "frequency_penalty", "logit_bias", "stop_regex", "ignore_eos"} <= sampling_parameter_names()
    set_by_sglang = [name for name in sampling_parameter_names() if name.startswith(("stop_str", "is_"))]
    assert not set_by_sglang


def test_sampling_names_of_an_older_release(tmp_path: Path) -> None:
    (tmp_path / "srt/sampling").mkdir(parents=True)
    source = "class SamplingParams:\n    def __init__(self, max_new_tokens=128, min_p=0.0, *, n=1):\n        pass\n"
    (tmp_path / "srt/sampling/sampling_params.py").write_text(source)
    assert sampling_parameter_names(tmp_path) == {"max_new_tokens", "min_p", "n"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("min_pp", "min_p?"),
        ("temperature", "--rollout-temperature"),
        ("sampling_seed", "--rollout-sampling-seeds"),
        ("logit_bias", "--use-router"),
    ],
)
def test_unsuitable_parameters_are_refused(name: str, hint: str) -> None:
    check_sampling({"min_p": 0.1, "ignore_eos": True}, False, {}, routed=True)
    check_sampling({"logit_bias": {"1": 1.0}}, False, {}, routed=False)
    with pytest.raises(EngineError, match=f"--rollout-sampling {name} .*{re.escape(hint)}"):
        check_sampling({name: 1}, False, {}, routed=True)


def test_sampling_seeds_and_deterministic_engines_require_each_other() -> None:
    deterministic = {"enable_deterministic_inference": True}
    check_sampling({}, True, deterministic, routed=False)
    check_sampling({"min_p": 0.1}, False, {}, routed=False)
    with pytest.raises(EngineError, match=r"--sglang-enable-deterministic-inference .*--rollout-sampling-seeds"):
        check_sampling({}, False, deterministic, routed=False)
    with pytest.raises(EngineError, match=r"min_p=0.1 .*--rollout-sampling-seeds"):
        check_sampling({"min_p": 0.1}, True, {}, routed=False)


def test_biased_sampling_lists_only_parameters_that_change_the_distribution() -> None:
    assert find_biasing_params({"top_p": 1.0, "top_k": -1, "min_p": 0, "ignore_eos": True, "temperature": 0.5}) == []
    assert find_biasing_params({"top_p": 0.9, "repetition_penalty": 1.1}) == ["top_p=0.9", "repetition_penalty=1.1"]


def test_preflight_checks_engine_options_and_warns_of_biased_sampling(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input": f"{i}+1="}) + "\n" for i in range(32)))
    words = ["--store", str(tmp_path / "store"), "--hf-checkpoint", str(tiny_model)]
    words += ["--prompt-data", str(tmp_path / "rows.jsonl")]
    words += ["--run", "r", "--rm-type", "random", "--num-rollout", "1"]
    words += ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    for more, hint in (
        (["--router-polcy", "random"], "--router-policy"),
        (["--rollout-external-engine-addrs", "a:1", "b:2", "--sglang-log-level", "info"], "--sglang-log-level"),
    ):
        with pytest.raises(InputError, match=hint):
            preflight(plan_of("train", parse_config([*words, *more])))
    more = ["--router-policy", "cache_aware", "--router-cache-threshold", "0.5", "--rollout-top-p", "0.9"]
    config = parse_config([*words, *more])
    assert config.rollout.router == {"policy": "cache_aware", "cache_threshold": 0.5}
    preflight(plan_of("train", config))
    [warning] = config_warnings(resolve("train", config, STORE))
    assert warning.startswith("top_p=0.9: ") and not config_warnings(resolve("evaluate", config, STORE))
    assert not config_warnings(resolve("train", parse_config(words), STORE))


def test_a_transient_system_error_is_retried_and_a_lasting_one_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "RETRY_SECONDS", 0.0)
    failures = [SystemError("AST constructor recursion depth mismatch")] * 3
    original = ast.parse

    def parse(*args: object) -> ast.Module:
        if failures:
            raise failures.pop()
        return original(*args)

    monkeypatch.setattr(ast, "parse", parse)
    assert isinstance(parse_source("x = 1"), ast.Module)
    failures += [SystemError("always")] * sources.NUM_TRIES
    with pytest.raises(SystemError, match="always"):
        parse_source("x = 1")
    with pytest.raises(SyntaxError):
        parse_source("x =")
