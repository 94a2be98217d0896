"""Notice a run that "succeeds" without learning: rounds whose gradient is zero, with the reason that their rollouts' metrics give.

Everything is read from commits, so a resumed run counts the rounds before it too.
"""

from __future__ import annotations

from collections.abc import Mapping

from storage.refs import Commit, RunKeys
from storage.store import Store

NUM_ROUNDS = 3  # in a row
_TINY = 1e-8  # gradient norms up to this are rounding
_ZERO_STD = "rollout/zero_std/count_"
# estimators whose advantages are zero where all rewards of a prompt are equal; a KL loss or an entropy bonus may still give a gradient
GROUP_RELATIVE = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")


def zero_gradient_warning(store: Store, keys: RunKeys, rollout_id: int, *, group_relative: bool) -> str | None:
    """Return a warning if nothing was learned in this round and the ones before it.

    Args:
        store: of the run.
        keys: of the run.
        rollout_id: the round whose step has just been committed.
        group_relative: the estimator compares the rewards of a prompt.
    """
    for index in range(rollout_id, rollout_id - NUM_ROUNDS, -1):
        step = store.committed(keys.step(index)) if index >= 0 else None
        if step is None or not _is_zero(step, store.committed(keys.rollout(index)), group_relative):
            return None
    rollout = store.committed(keys.rollout(rollout_id))
    return (
        f"nothing was learned in the last {NUM_ROUNDS} rounds (zero gradients): {reason_of(rollout.summary if rollout else {})}"
    )


def _is_zero(step: Commit, rollout: Commit | None, group_relative: bool) -> bool:
    norm = step.summary.get("train/grad_norm")
    if norm is None:  # only the critic was trained
        return False
    return norm <= _TINY or (group_relative and rollout is not None and _without_contrast(rollout.summary))


def _without_contrast(summary: Mapping[str, float]) -> bool:
    """Return whether all rewards of every prompt are equal."""
    num_groups = summary.get("rollout/num_groups", 0)
    return num_groups > 0 and sum(_equal_groups(summary).values()) >= num_groups


def _equal_groups(summary: Mapping[str, float]) -> dict[str, int]:
    """Return reward -> groups in which all samples got it."""
    return {name.removeprefix(_ZERO_STD): int(count) for name, count in summary.items() if name.startswith(_ZERO_STD)}


def reason_of(summary: Mapping[str, float]) -> str:
    """Return why a rollout gives no gradient, and what to do, from its metrics."""
    num_samples, num_groups = int(summary.get("rollout/num_samples", 0)), int(summary.get("rollout/num_groups", 0))
    look = "look at the samples of a round (below its line, or in MLflow)"
    if summary.get("rollout/response_len/max") == 0:
        masked = "removed by a hook or filter, of earlier policies, or with step_loss_mask 0"
        return f"all {num_samples} samples are masked ({masked}), so no token is trained"
    if _without_contrast(summary):
        if num_samples == num_groups:
            return "every group has one sample, and its advantage is relative to the others: raise --n-samples-per-prompt"
        return f"{_equal_rewards(_equal_groups(summary), num_groups)}{_cut_short(summary)}; {look}"
    if summary.get("rollout/failed_ratio", 0) > 0.5:
        reasons = [name.rpartition("/")[2] for name in summary if name.startswith("rollout/error_cat/")]
        return (
            f"{summary['rollout/failed_ratio']:.0%} of the samples failed ({', '.join(reasons[:3])}): repair the reward function"
        )
    return f"the metrics of the rollout do not show why{_cut_short(summary)}; {look}, and check the loss options"


def _equal_rewards(groups: Mapping[str, int], num_groups: int) -> str:
    if len(groups) > 1:
        parts = ", ".join(f"{count} all {reward}" for reward, count in sorted(groups.items(), key=lambda entry: -entry[1])[:4])
        return f"in each of the {num_groups} groups all rewards are equal ({parts})"
    [reward] = groups
    meaning = "the reward never says 1" if reward in ("0.0", "-1.0") else "the prompts do not tell responses apart"
    return f"all {num_groups} groups have equal rewards (all {reward}): {meaning}"


def _cut_short(summary: Mapping[str, float]) -> str:
    share = summary.get("rollout/truncated_ratio", 0)
    return f"; {share:.0%} of the responses ran into a length limit (--rollout-max-response-len)" if share > 0.5 else ""
