"""Sampling parameters are checked by SGLang's own list, and what makes log-probs inexact is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.sglang.sampling import check_sampling, check_seeds, inexact, sampling_names
from flows.flags import parse
from flows.preflight import preflight, warnings


def test_names_of_the_installed_sglang() -> None:
    assert {"min_p", "frequency_penalty", "logit_bias", "stop_regex", "ignore_eos"} <= sampling_names()
    assert not any(name.startswith(("stop_str", "is_")) for name in sampling_names()), "SGLang fills these in itself"


def test_names_of_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "srt/sampling").mkdir(parents=True)
    source = "class SamplingParams:\n    def __init__(self, max_new_tokens=128, min_p=0.0, *, n=1):\n        pass\n"
    (tmp_path / "srt/sampling/sampling_params.py").write_text(source)
    assert sampling_names(tmp_path) == {"max_new_tokens", "min_p", "n"}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("min_pp", "min_pp is not a sampling parameter of the installed SGLang: did you mean min_p?"),
        ("temperature", "use --rollout-temperature"),
        ("sampling_seed", "use --rollout-sampling-seeds"),
        ("logit_bias", "does not pass SGLang's router"),
    ],
)
def test_refusals(name: str, sentence: str) -> None:
    check_sampling({"min_p": 0.1, "ignore_eos": True}, routed=True)
    check_sampling({"logit_bias": {"1": 1.0}}, routed=False)
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        check_sampling({name: 1}, routed=True)


def test_seeds_and_deterministic_engines_belong_together() -> None:
    check_seeds(True, {}, {"enable-deterministic-inference": True})
    check_seeds(False, {"min_p": 0.1}, {})
    with pytest.raises(ValueError, match="all samples of a prompt are equal"):
        check_seeds(False, {}, {"enable-deterministic-inference": True})
    with pytest.raises(ValueError, match="leave one out"):
        check_seeds(True, {"min_p": 0.1}, {})


def test_what_makes_log_probs_inexact() -> None:
    assert inexact({"top_p": 1.0, "top_k": -1, "min_p": 0, "ignore_eos": True, "temperature": 0.5}) == []
    assert inexact({"top_p": 0.9, "repetition_penalty": 1.1}) == ["top_p=0.9", "repetition_penalty=1.1"]


def test_preflight(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input": f"{i}+1="}) + "\n" for i in range(32)))
    words = ["--run", "r", "--store", str(tmp_path / "store"), "--hf-checkpoint", str(tiny_model), "--rm-type", "random"]
    words += ["--num-rollout", "1", "--prompt-data", str(tmp_path / "rows.jsonl")]
    words += ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    for more, sentence in (
        (["--router-polcy", "random"], "did you mean --router-policy"),
        (["--rollout-sampling", "minp=0.1"], "did you mean min_p"),
        (["--rollout-external-engine-addrs", "here"], "host:port"),
        (["--rollout-external-engine-addrs", "a:1", "b:2", "--sglang-log-level", "info"], "are started already"),
    ):
        with pytest.raises(ValueError, match=sentence):
            preflight("post_train", parse([*words, *more]))
    config = parse([*words, "--router-policy", "cache_aware", "--router-cache-threshold", "0.5", "--rollout-top-p", "0.9"])
    assert config.rollout.router == {"policy": "cache_aware", "cache_threshold": 0.5}
    preflight("post_train", config)
    [warning] = warnings("post_train", config)
    assert warning.startswith("top_p=0.9: tokens come from another distribution") and not warnings("evaluate", config)
    assert not warnings("post_train", parse(words))
