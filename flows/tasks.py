"""The stages as Prefect tasks: a name, retries, and one call each. What a stage does is in stages/, what is true is in the store.

Every task is safe to run again: it begins by looking for its own commit. Task results are never persisted (a cached result would come
back without running, past the check of who holds which policy).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from flows.session import Session
from storage.refs import CheckpointRef, EvalRef, RolloutRef, StepRef, commit_key

RETRY_DELAY_SECONDS = 2


def _worth_retrying(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """A wrong request stays wrong; everything else (a dead process, a full disk, a timeout) may pass."""
    return not isinstance(state.data, ValueError)


def stage(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A task whose first argument is the session. `name` is a format string over the task's arguments.

    When a task fails, the trainer is fenced: nobody knows whether a step was half applied, so the next attempt restores it from the store.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(session: Session, *args: Any) -> Any:
            try:
                return body(session, *args)
            except BaseException as error:
                get_run_logger().error("%s: %s", type(error).__name__, error)
                session.fence()
                raise

        made = task(
            run,
            name=body.__name__,
            task_run_name=name,
            retry_delay_seconds=exponential_backoff(RETRY_DELAY_SECONDS),
            retry_jitter_factor=0.5,
            retry_condition_fn=_worth_retrying,
            persist_result=False,
            cache_policy=NO_CACHE,
        )

        @functools.wraps(body)
        def call(session: Session, *args: Any) -> Any:
            return made.with_options(retries=session.config.run.stage_retries)(session, *args)

        return call

    return decorate


@stage("convert")
def convert(session: Session) -> CheckpointRef:
    """The Hugging Face checkpoint as torch_dist in the store, where every policy of the run begins."""
    from stages.convert.to_torch_dist import convert_hf

    return session.begin_at(session.cluster.run(convert_hf, session.store, session.config.convert.hf_checkpoint))


@stage("rollout-{rollout_id:06d}")
def rollout(session: Session, rollout_id: int) -> RolloutRef:
    """Generate and grade the samples of one round with policy version `rollout_id`."""
    from stages.rollout.rollout import rollout_stage

    prefix = session.keys.rollout(rollout_id)
    commit = session.store.committed(prefix) or rollout_stage(session, prefix)
    return _rollout_ref(session, prefix, commit)


@stage("demonstrations-{rollout_id:06d}")
def demonstrate(session: Session, rollout_id: int) -> RolloutRef:
    """Take the demonstrations of one round from the data set."""
    return None


@stage("train-{rollout.rollout_id:06d}")
def train(session: Session, rollout: RolloutRef) -> StepRef:
    """One round of training on a committed rollout."""
    from stages.train.policy import step_ref, train_round

    r = rollout.rollout_id
    commit = session.store.committed(session.keys.step(r)) or train_round(
        session.store, session.keys, session.trainer_at(r), r, base=session.base, **session.stamp
    )
    session.record(session.keys.step(r), commit)
    return step_ref(session.keys, commit)


@stage("publish-{version:06d}")
def publish(session: Session, version: int) -> None:
    """Let every engine serve policy `version`."""
    session.engines_at(version)


@stage("checkpoint-{version:06d}")
def checkpoint(session: Session, version: int) -> CheckpointRef:
    """Save policy `version` with everything that training needs to go on from it."""
    from stages.train.policy import save_checkpoint

    prefix = session.keys.checkpoint(version)
    if not session.store.committed(prefix):
        save_checkpoint(session.store, session.keys, session.trainer_at(version), version, base=session.base, **session.stamp)
    return session.recorded(prefix)


def evaluate(session: Session, version: int) -> list[EvalRef]:
    """Score policy `version` on every evaluation data set."""
    return [_evaluate(session, version, name) for name, _ in session.config.eval.eval_prompt_data]


def schedule(session: Session) -> Callable[[int], list[Callable[..., Any]]]:
    """What is due after a round, composed once: policy version -> stages to run."""
    run, evals = session.config.run, session.config.eval
    last = run.num_rollout

    def due(version: int) -> list[Callable[..., Any]]:
        saves = version > 0 and (version == last or bool(run.save_interval and version % run.save_interval == 0))
        scores = bool(evals.eval_prompt_data) and (version in (0, last) or bool(evals.eval_interval and version % evals.eval_interval == 0))
        return [stage for stage, wanted in ((checkpoint, saves), (evaluate, scores)) if wanted]

    return due
