"""The warning after three rounds without gradient, also after a resume."""

from pathlib import Path
from typing import Any

import pytest

from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.reporting.learning_signal import (
    LearningSignal,
    explain_zero_gradient,
    logprob_gap_warning,
    truncation_warning,
    zero_gradient_warning,
)
from penstock.flows.runtime.debug_runs import LOGPROB_GAP
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.store import Store

KEYS = RunKeys("r")
NEVER_RIGHT = {
    "rollout/num_samples": 64.0,
    "rollout/num_groups": 32.0,
    "rollout/response_len/max": 9.0,
    "rollout/zero_std/count_0.0": 32.0,
}


def commit_round(store: Store, index: int, grad_norm: float | None, summary: dict[str, float] | None = None) -> None:
    rollout = NEVER_RIGHT if summary is None else summary
    step = {} if grad_norm is None else {"train/grad_norm": grad_norm}
    for prefix, kind, numbers in (
        (KEYS.rollout_prefix(index), "rollout", rollout),
        (KEYS.step_prefix(index), "step", step),
    ):
        fields: dict[str, Any] = {"kind": kind, "run": "r", "index": index, "policy_version": index, "summary": numbers}
        store.commit(prefix, Commit(**fields))


def warned(store: Store, index: int, *, group_relative: bool = False) -> bool:
    return zero_gradient_warning(store, KEYS, index, group_relative=group_relative) is not None


def test_three_rounds_without_gradient_warn_also_after_a_resume(tmp_path: Path) -> None:
    for index, grad_norm in enumerate([0.0, 0.0, 0.5, 0.0, 0.0]):
        commit_round(Store(str(tmp_path)), index, grad_norm)
        assert not warned(Store(str(tmp_path)), index)  # every store is a new process
    commit_round(Store(str(tmp_path)), 5, 0.0)
    warning = zero_gradient_warning(Store(str(tmp_path)), KEYS, 5, group_relative=False)
    assert warning is not None and "all 32 groups have equal rewards (all 0.0): the reward is never 1" in warning
    assert "\n" not in warning and len(warning) <= 300


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], True),
        (["--advantage-estimator", "ppo"], False),
        (["--advantage-estimator", "gdpo", "--gdpo-reward-weights", "right=1"], False),
    ],
)
def test_zero_gradient_warning_is_told_once_for_new_steps(tmp_path: Path, options: list[str], expected: bool) -> None:
    store, warnings = Store(str(tmp_path)), list[str]()
    words = ["--run", "r", "--num-rollout", "4", "--hf-checkpoint", "model", *options]
    signal = LearningSignal(ActiveRun(store, KEYS, Flow.TRAIN, parse_config(words)), warnings.append)
    for index in range(3):
        commit_round(store, index, 0.01)  # of a KL loss
        for prefix in (KEYS.rollout_prefix(index), KEYS.step_prefix(index)):
            commit = store.committed(prefix)
            assert commit is not None
            signal.on_commit(prefix, commit, is_new=False)
            assert warnings == []
            signal.on_commit(prefix, commit, is_new=True)
    assert [text.partition(":")[0] for text in warnings] == [
        "nothing was learned in the last 3 rounds (zero gradients)"
    ] * expected


def test_zero_advantages_count_although_a_kl_loss_gives_a_gradient(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for index in range(3):
        commit_round(store, index, 0.01)
    assert warned(store, 2, group_relative=True) and not warned(store, 2)
    commit_round(store, 3, 0.01, {**NEVER_RIGHT, "rollout/zero_std/count_0.0": 31.0})
    assert not warned(store, 3, group_relative=True)


def test_first_round_with_many_more_truncated_responses_warns(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    ratios = [0.1, 0.29, 0.31, 0.25, 0.5]
    for index, ratio in enumerate(ratios):
        commit_round(store, index, 0.5, {"rollout/truncated_ratio": ratio})
    warnings = [truncation_warning(store, KEYS, index) for index in range(5)]
    assert [warning is not None for warning in warnings] == [False, False, True, False, False]
    assert "31% of the responses are truncated, in round 0 10% were" in str(warnings[2])


def test_critic_only_rounds_do_not_count(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for index in range(3):
        commit_round(store, index, None, {})
    assert not warned(store, 2) and not warned(store, 2, group_relative=True)


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (NEVER_RIGHT | {"rollout/truncated_ratio": 1.0}, "100% of the responses were truncated"),
        (NEVER_RIGHT | {"rollout/num_samples": 32.0}, "--n-samples-per-prompt"),
        (
            NEVER_RIGHT | {"rollout/zero_std/count_0.0": 30.0, "rollout/zero_std/count_1.0": 2.0},
            "(30 all 0.0, 2 all 1.0)",
        ),
        ({"rollout/num_samples": 8.0, "rollout/response_len/max": 0.0}, "all 8 samples are masked"),
        ({"rollout/failed_ratio": 0.75, "rollout/error_cat/timeout": 6.0}, "75% of the samples failed (timeout)"),
        ({}, "do not show why"),
    ],
)
def test_reason_follows_from_the_metrics(summary: dict[str, float], words: str) -> None:
    reason = explain_zero_gradient(summary)
    assert words in reason and len(reason) <= 240


def test_logprob_gap_warns_once_and_suggests_tis(tmp_path: Path) -> None:
    gaps = [0.008, 0.01, 0.05, 0.04, 0.06]
    for index, gap in enumerate(gaps):
        step = Commit(kind="step", run="r", index=index, policy_version=index, summary={LOGPROB_GAP: gap})
        Store(str(tmp_path)).commit(KEYS.step_prefix(index), step)

    def warnings(fp8: bool) -> list[str | None]:  # every store is a new process
        return [logprob_gap_warning(Store(str(tmp_path)), KEYS, index, fp8=fp8) for index in range(len(gaps))]

    assert [bool(warning) for warning in warnings(fp8=False)] == [False, False, True, False, False]
    assert [bool(warning) for warning in warnings(fp8=True)] == [True, False, False, False, False]
    assert "5.0e-02" in (warnings(fp8=False)[2] or "") and "--use-tis" in (warnings(fp8=False)[2] or "")
    assert "fp8" in (warnings(fp8=True)[0] or "")


@pytest.mark.parametrize("options", [[], ["--use-tis"], ["--use-rollout-logprobs"]], ids=str)
def test_logprob_gap_is_not_reported_if_the_loss_corrects_it(tmp_path: Path, options: list[str]) -> None:
    shown, store = list[str](), Store(str(tmp_path))
    step = Commit(kind="step", run="r", index=0, policy_version=0, summary={LOGPROB_GAP: 0.5})
    store.commit(KEYS.step_prefix(0), step)
    (tmp_path / "config.json").write_text("{}")
    config = parse_config(["--run", "r", "--hf-checkpoint", str(tmp_path), *options])
    LearningSignal(ActiveRun(store, KEYS, Flow.TRAIN, config), shown.append).on_commit("key", step, is_new=True)
    assert len(shown) == (not options)
