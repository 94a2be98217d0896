"""Gates for tests: --ci-test, --ci-save-grad-norm and --ci-load-grad-norm.

They read the committed metrics of a round after its commit, so the run keeps the round, and a resumed start checks it
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.flows.config import PostTrainConfig
from penstock.stages.torch_files import fill_template, load_torch_file, save_torch_file
from penstock.storage.commit import Commit
from penstock.storage.errors import GateFailed

GRAD_NORMS = {"actor": "train/grad_norm", "critic": "train/critic-grad_norm"}  # role -> metric
LOGPROB_GAP = "train/train_rollout_logprob_abs_diff"
MAX_KL = 1e-8  # of policies that must be equal
GRAD_NORM_TOLERANCE = 0.01  # absolute or relative


def check_gates(config: PostTrainConfig, commit: Commit) -> None:
    """Check the gates on the optimizer steps of a committed round; with --ci-save-grad-norm write their gradient norms.

    Raises:
        GateFailed: a gate does not hold.
        DataError: a file of --ci-load-grad-norm cannot be read.
    """
    debug, rollout_id = config.debug, commit.index
    steps: list[Mapping[str, Any]] = commit.state.get("steps", [])
    for step_id, step in enumerate(steps):
        where = f"round {rollout_id}, step {step_id}"
        if debug.ci_test:
            for problem in violations(config, step, rollout_id, step_id):
                raise GateFailed(f"--ci-test failed in {where}: {problem}")
        for role, metric in GRAD_NORMS.items():
            if metric in step:
                check_grad_norm(config, float(step[metric]), where, role=role, rollout_id=rollout_id, step_id=step_id)


def violations(config: PostTrainConfig, step: Mapping[str, Any], rollout_id: int, step_id: int) -> Iterator[str]:
    """Yield the reason of each gate of --ci-test that does not hold in an optimizer step."""
    limit = config.debug.ci_train_rollout_logprob_abs_diff_threshold
    if LOGPROB_GAP in step and not float(step[LOGPROB_GAP]) <= limit:
        yield (
            f"the log-probs of engine and trainer differ by {float(step[LOGPROB_GAP]):g} on average, more than "
            f"--ci-train-rollout-logprob-abs-diff-threshold {limit:g}"
        )
    if config.debug.ci_disable_kl_checker:
        return
    # The first step of a round trains the policy that computed the old log-probs; the first one of the run trains
    # the reference, but with the engine's experts the reference's log-probs have other routing.
    must_be_zero = {"train/ppo_kl": step_id == 0}
    must_be_zero["train/kl_loss"] = rollout_id == step_id == 0 and not config.train.use_rollout_routing_replay
    for metric, applies in must_be_zero.items():
        if applies and metric in step and not abs(float(step[metric])) < MAX_KL:
            yield (
                f"{metric} is {float(step[metric]):g}, but must be 0 (below {MAX_KL:g}) in this step; "
                "--ci-disable-kl-checker turns this check off"
            )


def check_grad_norm(config: PostTrainConfig, norm: float, where: str, **values: object) -> None:
    """Write a gradient norm with --ci-save-grad-norm, or compare it with the one in the file of --ci-load-grad-norm."""
    debug = config.debug
    if debug.ci_save_grad_norm:
        save_torch_file(fill_template(debug.ci_save_grad_norm, **values), norm)
    if debug.ci_load_grad_norm:
        path = fill_template(debug.ci_load_grad_norm, **values)
        expected = float(load_torch_file(path))
        if not math.isclose(norm, expected, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
            raise GateFailed(
                f"--ci-load-grad-norm failed in {where}: the gradient norm of the {values['role']} is {norm:g}, but "
                f"{path} has {expected:g}, and they may differ by {GRAD_NORM_TOLERANCE}"
            )
