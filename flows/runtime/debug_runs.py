"""Apply the debug options in a run: gates (conditions that fail the run) for tests, and dumps of samples to files that
other tools read.

Gates (--ci-test, --ci-save-grad-norm, --ci-load-grad-norm) read the committed metrics of a round after its commit, so
the run keeps the round, and a resumed start checks it again.

Dumps (--save-debug-rollout-data, --dump-details) are exports: they are written after the commit, from the commit, and
again when a resumed start returns to the round; if a dump cannot be written, the run prints a warning and continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.flows.config import PostTrainConfig
from penstock.flows.runtime.display import Display
from penstock.stages.rollout.data_rounds import save_rollout_file
from penstock.stages.torch_files import fill_template, load_torch_file, save_torch_file
from penstock.storage.commit import Commit
from penstock.storage.errors import GateFailed, PenstockError
from penstock.storage.store import Store

GRAD_NORMS = {"actor": "train/grad_norm", "critic": "train/critic-grad_norm"}  # role -> metric
LOGPROB_GAP = "train/train_rollout_logprob_abs_diff"
MAX_KL = 1e-8  # nats, between policies that must be equal
GRAD_NORM_TOLERANCE = 0.01  # absolute or relative


def check_gates(config: PostTrainConfig, commit: Commit) -> None:
    """Check the gates on the optimizer steps of a committed round, and raise GateFailed if one does not hold; with
    --ci-save-grad-norm write their gradient norms."""
    debug, rollout_id = config.debug, commit.index
    steps: list[Mapping[str, Any]] = commit.state.get("steps", [])
    for step_id, step in enumerate(steps):
        where = f"round {rollout_id}, step {step_id}"
        if debug.ci_test:
            for problem in violations(config, step, rollout_id, step_id):
                raise GateFailed(f"--ci-test failed in {where}: {problem}")
        for role, metric in GRAD_NORMS.items():
            if metric not in step:
                continue
            norm, values = float(step[metric]), {"role": role, "rollout_id": rollout_id, "step_id": step_id}
            if debug.ci_save_grad_norm:
                save_torch_file(fill_template(debug.ci_save_grad_norm, **values), norm)
            if debug.ci_load_grad_norm:
                path = fill_template(debug.ci_load_grad_norm, **values)
                expected = float(load_torch_file(path))
                if not math.isclose(norm, expected, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
                    raise GateFailed(
                        f"--ci-load-grad-norm failed in {where}: the gradient norm of the {role} is {norm:g}, but "
                        f"{path} has {expected:g}, and they may differ by at most {GRAD_NORM_TOLERANCE}"
                    )


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
    # At the first step of a round, the policy is still the one that computed the old log-probs; at the first step of
    # the run, it is also the reference policy. With the engines' routing, however, policy and reference route
    # differently.
    must_be_zero = {"train/ppo_kl": step_id == 0}
    must_be_zero["train/kl_loss"] = rollout_id == step_id == 0 and not config.train.use_rollout_routing_replay
    for metric, applies in must_be_zero.items():
        if applies and metric in step and not abs(float(step[metric])) < MAX_KL:
            yield (
                f"{metric} is {float(step[metric]):g}, but must be 0 (below {MAX_KL:g}) in this step; "
                "--ci-disable-kl-checker turns this check off"
            )


# ---- samples in files ------------------------------------------------------------------------------------------------


def dump_samples(
    config: PostTrainConfig, store: Store, commit: Commit, rollout_id: int | str, display: Display
) -> None:
    """With --save-debug-rollout-data or --dump-details, write the samples of a commit to a file."""
    template = config.debug.rollout_dump
    if template is None:
        return
    path = fill_template(template, rollout_id=rollout_id)
    try:
        save_rollout_file(store, commit, path, rollout_id)
        display.note(f"wrote the samples of rollout {rollout_id} to {path}")
    except (OSError, PenstockError) as error:  # the run does not depend on the file
        display.warn(f"the samples of rollout {rollout_id} are not written to {path} ({error}); continuing")
