"""Detect a run that does not learn: find rounds with a zero gradient, and look for the reason in the metrics of their
rollouts.

All metrics are read from commits, so a resumed run also counts the rounds before the resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock.engines.weights.fp8_blocks import fp8_weights
from penstock.flows.reporting.observer import Observer
from penstock.flows.runtime.debug_runs import LOGPROB_GAP
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.store import Store

if TYPE_CHECKING:
    from penstock.flows.runtime.runs import ActiveRun

NUM_ROUNDS = 3  # consecutive rounds without a gradient before a warning
MAX_LOGPROB_GAP = 0.03  # above it --use-tis is suggested; bf16 engines and trainers differ by about 0.01
MAX_MORE_TRUNCATED = 0.2  # truncated ratio minus that of round 0, above which a warning follows
_TINY = 1e-8  # smaller gradient norms are rounding errors
_ZERO_STD = "rollout/zero_std/count_"


class LearningSignal(Observer):
    """Warns if the last NUM_ROUNDS rounds had zero gradients. Warns once per run if the log-probs of engine and trainer
    differ and no option corrects the loss for that, and if many more responses are truncated than at the start. `warn`
    prints a warning."""

    def __init__(self, run: ActiveRun, warn: Callable[[str], object]) -> None:
        self.run = run
        self.warn = warn

    def on_commit(self, key: str, commit: Commit, is_new: bool) -> None:
        if not is_new or commit.kind != "step":
            return
        run, train, r = self.run, self.run.config.train, commit.index
        of_user = train.custom_advantage_function_path or run.config.rollout.sets_train_rewards
        beyond_rewards = train.disable_rewards_normalization or train.opd or train.gdpo_reward_weights
        group_relative = train.compares_samples and not (of_user or beyond_rewards)
        warnings = [zero_gradient_warning(run.store, run.keys, r, group_relative=group_relative)]
        warnings.append(truncation_warning(run.store, run.keys, r))
        if not (train.use_tis or train.use_rollout_logprobs):
            fp8 = bool(fp8_weights(run.config.convert.hf_checkpoint))
            warnings.append(logprob_gap_warning(run.store, run.keys, r, fp8=fp8))
        for warning in filter(None, warnings):
            self.warn(warning)


def zero_gradient_warning(store: Store, keys: RunKeys, rollout_id: int, *, group_relative: bool) -> str | None:
    """Return a warning if this round and the NUM_ROUNDS - 1 rounds before it had zero gradients or, with
    `group_relative`, only groups whose samples all have the same reward. Otherwise return None.

    `group_relative`: whether an advantage compares a sample with the others of its prompt. If their rewards are equal,
    the advantage is zero, so nothing is learned from rewards, although a KL loss or an entropy bonus may give a
    gradient.
    """
    for index in range(rollout_id, rollout_id - NUM_ROUNDS, -1):
        step = store.committed(keys.step_prefix(index)) if index >= 0 else None
        norm = step.summary.get("train/grad_norm") if step else None
        if norm is None:  # the round does not exist, or it trained only the critic
            return None
        rollout = store.committed(keys.rollout_prefix(index))
        if norm > _TINY and not (group_relative and rollout and _rewards_of_equal_groups(rollout.summary)):
            return None
    rollout = store.committed(keys.rollout_prefix(rollout_id))
    reason = explain_zero_gradient(rollout.summary if rollout else {})
    return f"nothing was learned in the last {NUM_ROUNDS} rounds (zero gradients): {reason}"


def logprob_gap_warning(store: Store, keys: RunKeys, rollout_id: int, *, fp8: bool) -> str | None:
    """Return a warning if this is the first round of the run in which the log-probs of engine and trainer differ too
    much: by more than MAX_LOGPROB_GAP or, with `fp8` engines, at all. Otherwise return None."""
    limit = 0.0 if fp8 else MAX_LOGPROB_GAP
    gap = _metric(store, keys.step_prefix(rollout_id), LOGPROB_GAP)
    earlier = (_metric(store, keys.step_prefix(index), LOGPROB_GAP) for index in reversed(range(rollout_id)))
    if not (gap > limit) or any(value > limit for value in earlier):  # no warning either if it is NaN
        return None
    cause = "engines with fp8 weights" if fp8 else f"more than {MAX_LOGPROB_GAP}"
    return (
        f"the log-probs of engine and trainer differ by {gap:.1e} on average ({cause}), so the samples are off-policy: "
        "add --use-tis, which corrects the loss by importance weights (docs/metrics.md)"
    )


def truncation_warning(store: Store, keys: RunKeys, rollout_id: int) -> str | None:
    """Return a warning if this is the first round of the run in which MAX_MORE_TRUNCATED more of the responses are
    truncated than in round 0. Otherwise return None."""
    name = "rollout/truncated_ratio"
    first, ratio = (_metric(store, keys.rollout_prefix(index), name) for index in (0, rollout_id))
    earlier = (_metric(store, keys.rollout_prefix(index), name) for index in range(rollout_id))
    limit = first + MAX_MORE_TRUNCATED
    if ratio <= limit or any(value > limit for value in earlier):
        return None
    return (
        f"{ratio:.0%} of the responses are truncated, in round 0 {first:.0%} were: if they are right so far, raise "
        "--rollout-max-response-len; else see whether the reward pays for text after the answer"
    )


def _metric(store: Store, prefix: str, name: str) -> float:
    """Return a metric of the commit at `prefix`; 0 if the commit or the metric does not exist."""
    commit = store.committed(prefix)
    return commit.summary.get(name, 0.0) if commit else 0.0


def _rewards_of_equal_groups(summary: Mapping[str, float]) -> dict[str, int]:
    """Return reward -> number of groups in which all samples have that reward, if all groups are such; else {}."""
    groups = {name.removeprefix(_ZERO_STD): int(count) for name, count in summary.items() if name.startswith(_ZERO_STD)}
    return groups if 0 < summary.get("rollout/num_groups", 0) <= sum(groups.values()) else {}


def explain_zero_gradient(summary: Mapping[str, float]) -> str:
    """Return why a rollout gave no gradient, as far as its metrics (`summary`) show, and what to do."""
    num_samples, num_groups = int(summary.get("rollout/num_samples", 0)), int(summary.get("rollout/num_groups", 0))
    advice = "look at the samples of a round (printed below the round's line, or in MLflow)"
    truncated_ratio, truncated = summary.get("rollout/truncated_ratio", 0), ""
    if truncated_ratio > 0.5:
        limit = "a length limit (--rollout-max-response-len)"
        truncated = f"; {truncated_ratio:.0%} of the responses were truncated by {limit}"
    if summary.get("rollout/response_len/max") == 0:
        masked = "removed by a hook or filter, generated by earlier policies, or with step_loss_mask 0"
        return f"all {num_samples} samples are masked ({masked}), so no token is trained"
    if equal := _rewards_of_equal_groups(summary):
        if num_samples == num_groups:
            return "every group has one sample, but advantages compare samples of a group: raise --n-samples-per-prompt"
        most_frequent = sorted(equal.items(), key=lambda entry: -entry[1])
        if len(most_frequent) > 1:
            parts = ", ".join(f"{count} all {reward}" for reward, count in most_frequent[:4])
            return f"in each of the {num_groups} groups all rewards are equal ({parts}){truncated}; {advice}"
        [(reward, _)] = most_frequent
        meaning = "the reward is never 1" if reward in ("0.0", "-1.0") else "the reward does not distinguish responses"
        return f"all {num_groups} groups have equal rewards (all {reward}): {meaning}{truncated}; {advice}"
    if summary.get("rollout/failed_ratio", 0) > 0.5:
        reasons = [name.rpartition("/")[2] for name in summary if name.startswith("rollout/error_cat/")]
        share = f"{summary['rollout/failed_ratio']:.0%}"
        return f"{share} of the samples failed ({', '.join(reasons[:3])}): fix the reward function"
    return f"the metrics of the rollout do not show why{truncated}; {advice}, and check the loss options"
