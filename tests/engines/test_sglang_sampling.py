"""Sampling parameters are checked against SGLang's own list; those that bias the policy gradient are known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.engines.sglang.passthrough import (
    check_sampling,
    check_sampling_seeds,
    find_biasing_params,
    sampling_parameter_names,
)
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import config_warnings, plan_of, preflight
from penstock.flows.runtime.resolve import resolve
from penstock.storage.errors import EngineError, InputError
from penstock.storage.store import Store

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
    check_sampling({"min_p": 0.1, "ignore_eos": True}, routed=True)
    check_sampling({"logit_bias": {"1": 1.0}}, routed=False)
    with pytest.raises(EngineError, match=f"--rollout-sampling {name} .*{re.escape(hint)}"):
        check_sampling({name: 1}, routed=True)


def test_sampling_seeds_and_deterministic_engines_require_each_other() -> None:
    check_sampling_seeds(True, {}, {"enable-deterministic-inference": True})
    check_sampling_seeds(False, {"min_p": 0.1}, {})
    with pytest.raises(EngineError, match=r"--sglang-enable-deterministic-inference .*--rollout-sampling-seeds"):
        check_sampling_seeds(False, {}, {"enable-deterministic-inference": True})
    with pytest.raises(EngineError, match=r"min_p=0.1 .*--rollout-sampling-seeds"):
        check_sampling_seeds(True, {"min_p": 0.1}, {})


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
        (["--rollout-sampling", "minp=0.1"], "min_p"),
        (["--rollout-external-engine-addrs", "here"], "host:port"),
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
