"""The stages as Prefect tasks: a name, retries, and one call each. What a stage does is in stages/, what is true is in the store.

Every task is safe to run again: it begins by looking for its own commit. Task results are never persisted (a cached result would come
back without running, past the check of who holds which policy).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.tasks import exponential_backoff

from flows.conversion import converted, taken_in
from flows.prefect_api import summary_artifact
from flows.room import run_with_room
from flows.session import Session
from storage.errors import StoreFull
from storage.refs import CheckpointRef, Commit, EvalRef, RolloutRef, StepRef, commit_key
from storage.retention import expire_checkpoints

RETRY_DELAY_SECONDS = 2


class Stage:
    """A Prefect task whose first argument is the session, made of a plain function.

    It begins only while nobody has asked the run to stop. A failure is shown and tried again: every attempt looks for the stage's
    commit first, and asks trainer and engines what they hold. A full disk is waited for (room.py) before it counts as a failure.
    """

    def __init__(self, name: str, body: Callable[..., Any], *, after_save: bool = False) -> None:
        self.body = body
        self.after_save = after_save
        functools.update_wrapper(self, body)
        self._task: Task[..., Any] = task(
            name=body.__name__,
            task_run_name=name,
            retry_delay_seconds=exponential_backoff(RETRY_DELAY_SECONDS),
            retry_jitter_factor=0.5,
            retry_condition_fn=_worth_retrying,
            persist_result=False,
            cache_policy=NO_CACHE,
        )(self._telling())

    def __call__(self, session: Session, *args: Any) -> Any:
        """Run it here, tried again as often as --stage-retries says."""
        return self._prepared(session)(session, *args)

    def submit(self, session: Session, *args: Any) -> PrefectFuture[Any]:
        """Run it beside what comes next."""
        return self._prepared(session).submit(session, *args)

    def _prepared(self, session: Session) -> Task[..., Any]:
        session.stop.check()
        if self.after_save:
            session.settle()
        return self._task.with_options(retries=session.config.run.stage_retries)

    def _telling(self) -> Callable[..., Any]:
        body = self.body

        @functools.wraps(body)
        def told(session: Session, *args: Any) -> Any:
            try:
                return run_with_room(lambda: body(session, *args), session.places, session.stop, session.display.note)
            except BaseException as error:
                session.failed(body.__name__, error)
                raise

        return told


def stage(name: str, *, after_save: bool = False) -> Callable[[Callable[..., Any]], Stage]:
    """Makes a function a stage. `name` is a format string over its arguments; `after_save` has it wait for a checkpoint that is being
    written."""
    return functools.partial(Stage, name, after_save=after_save)


def _worth_retrying(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """A wrong request stays wrong, and a disk that was full for minutes stays full; everything else (a dead process, a timeout) may pass."""
    return not isinstance(state.data, (ValueError, StoreFull))


@stage("convert")
def convert(session: Session) -> CheckpointRef:
    """The Hugging Face checkpoint as torch_dist in the store, verified; every policy of the run begins there. So for what it is compared
    with: a reference of its own, a teacher."""
    config = session.config.convert.model_copy(update={"convert_save": None})  # a run begins from its own store
    for name, path in session.config.train.models_beside.items():
        session.pin(name, path, taken_in(session.processes.cluster, session.store, config, path))
    return session.begin_at(converted(session.processes.cluster, session.store, config, verify=True))


@stage("restore")
def restore(session: Session) -> None:
    """Build the trainer with the policy the run has come to, while the engines load. Nothing to do if all rounds are trained."""
    session.processes.bridge()
    version = session.num_trained()
    if version < session.config.run.num_rollout:
        session.processes.trainer_at(version)


@stage("rollout-{rollout_id:06d}")
def rollout(session: Session, rollout_id: int) -> RolloutRef:
    """Generate and grade the samples of one round with policy version `rollout_id`."""
    from stages.rollout.beginning import beginning_of
    from stages.rollout.rollout import rollout_stage
    from stages.rollout.round import Round

    prefix = session.keys.rollout(rollout_id)
    commit = session.store.committed(prefix)
    if commit is None:
        with session.display.progress("samples") as report, session.processes.engines_at(rollout_id) as engines:
            commit = rollout_stage(
                session.store,
                prefix,
                Round(session.keys.run, rollout_id, policy_version=rollout_id),
                engines=engines,
                source=session.prompts,
                tokenizer=session.tokenizer,
                config=session.config.rollout,
                beginning=beginning_of(session.store, session.keys, rollout_id),
                grader=session.grader,
                stamp=session.stamp,
                stop=session.stop,
                on_progress=report,
                connect=session.processes.connect_to_train,
            )
    return _rollout_ref(session, prefix, commit)


@stage("demonstrations-{rollout_id:06d}")
def demonstrate(session: Session, rollout_id: int) -> RolloutRef:
    """Take the demonstrations of one round from the data set."""
    from stages.rollout.beginning import beginning_of
    from stages.rollout.demonstrations import demonstration_stage

    prefix = session.keys.rollout(rollout_id)
    commit = session.store.committed(prefix) or demonstration_stage(
        session.store,
        prefix,
        run=session.keys.run,
        rollout_id=rollout_id,
        source=session.prompts,
        tokenizer=session.tokenizer,
        config=session.config.rollout,
        state=beginning_of(session.store, session.keys, rollout_id).state,
        stamp=session.stamp,
    )
    return _rollout_ref(session, prefix, commit)


@stage("train-{rollout.rollout_id:06d}", after_save=True)
def train(session: Session, rollout: RolloutRef) -> StepRef:
    """One round of training on a committed rollout, once the checkpoint of the round before is written."""
    from stages.train.policy import step_ref, train_round

    r = rollout.rollout_id
    prefix = session.keys.step(r)
    commit = session.store.committed(prefix) or train_round(
        session.store,
        session.keys,
        session.processes.trainer,
        r,
        base=session.processes.base,
        on_progress=session.display.note,
        **session.stamp,
    )
    return step_ref(session.keys, session.record(prefix, commit))


@stage("publish-{version:06d}")
def publish(session: Session, version: int) -> None:
    """Let every engine serve policy `version`, if a rollout is still to be made with it."""
    if session.generates_with(version):
        session.processes.publish(version)


def checkpoint(session: Session, version: int) -> None:
    """Save policy `version` while the engines go on; the next stage that needs the trainer waits for it."""
    session.save_meanwhile(save.submit(session, version))


@stage("checkpoint-{version:06d}")
def save(session: Session, version: int) -> CheckpointRef:
    """Save policy `version` with everything that training needs to go on from it, then let old checkpoints go."""
    from stages.train.policy import save_checkpoint

    prefix = session.keys.checkpoint(version)
    if session.store.committed(prefix) is None:
        save_checkpoint(
            session.store, session.keys, session.processes.trainer, version, base=session.processes.base, **session.stamp
        )
    commit = session.record(prefix, session.committed(prefix))
    run = session.config.run
    if run.keep_checkpoints is not None:
        expired = expire_checkpoints(session.store, session.keys, keep=run.keep_checkpoints, best=run.keep_best)
        if expired:
            session.display.note(f"checkpoints that are not kept any more: {', '.join(map(str, expired))}")
    return CheckpointRef(
        key=commit_key(prefix), uri=session.store.path(commit.attempt or ""), format="torch_dist", policy_version=version
    )


@stage("eval-{version:06d}-{name}")
def evaluate_one(session: Session, version: int, name: str) -> EvalRef:
    """Score policy `version` on one data set: a rollout on its prompts, summed up instead of trained on."""
    from stages.eval.score import score
    from stages.rollout.prompts.source import PromptSource
    from stages.rollout.rollout import rollout_stage
    from stages.rollout.round import Round

    evals = session.config.eval
    prefix = session.keys.eval(version, name)
    commit = session.store.committed(prefix)
    if commit is None:
        config = session.config.rollout.model_copy(update=evals.overrides(dict(evals.eval_prompt_data)[name], name))
        source = PromptSource.open(config)
        with session.display.progress(f"eval {name}") as report, session.processes.engines_at(version) as engines:
            commit = rollout_stage(
                session.store,
                prefix,
                Round(session.keys.run, version, version, kind="eval", id_prefix=f"eval-{version:06d}-{name}-"),
                engines=engines,
                source=source,
                tokenizer=session.tokenizer,
                config=config,
                num_prompts=len(source),
                summarise=lambda samples: score(
                    samples, name, pass_threshold=evals.settings(name).get("pass_threshold"), require_pass_rate=evals.log_passrate
                ),
                stamp=session.stamp,
                stop=session.stop,
                on_progress=report,
                connect=session.processes.connect,
            )
    session.record(prefix, commit)
    return EvalRef(key=commit_key(prefix), task=name, policy_version=version, mean_reward=commit.summary[f"eval/{name}"])


@stage("eval-{version:06d}")
def evaluate_all(session: Session, version: int) -> list[EvalRef]:
    """Score policy `version` on several data sets side by side: one set's last long responses leave room for another's."""
    with session.processes.engines_shared(version):
        scores = [evaluate_one.submit(session, version, name) for name, _ in session.config.eval.eval_prompt_data]
        for score in scores:
            score.wait()
    return [score.result() for score in scores]


def evaluate(session: Session, version: int) -> list[EvalRef]:
    """Score policy `version` on every evaluation data set."""
    names = [name for name, _ in session.config.eval.eval_prompt_data]
    missing = [name for name in names if session.store.committed(session.keys.eval(version, name)) is None]
    if len(missing) > 1 and not session.config.rollout.agent_endpoint_port:  # a port of its own choice can have one endpoint only
        return evaluate_all(session, version)
    return [evaluate_one(session, version, name) for name in names]


@stage("export-{version:06d}", after_save=True)
def export(session: Session, version: int) -> CheckpointRef:
    """Policy `version` as a Hugging Face directory."""
    from stages.convert.to_hf import export_hf

    prefix = session.keys.export(version)
    commit = session.store.committed(prefix)
    if commit is None:
        checkpoint = session.keys.checkpoint(version)
        commit = session.processes.cluster.run(
            export_hf,
            session.store,
            session.committed(checkpoint),
            session.config.convert.hf_checkpoint,
            prefix,
            dtype=session.config.convert.export_dtype,
            mtp=session.config.convert.mtp,
            inputs={"checkpoint": commit_key(checkpoint)},
            timeout=session.config.convert.convert_timeout,
        )
    session.record(prefix, commit)
    return CheckpointRef(
        key=commit_key(prefix), uri=session.store.path(commit.attempt or ""), format="hf", policy_version=version
    )


def finish(session: Session) -> None:
    """Say what came of the run: a table in the terminal, and the same as an artifact on the flow run's Prefect page."""
    session.settle()
    table = "\n".join(f"| {title} | {text} |" for title, text in session.finish().items())
    summary_artifact(f"| {session.keys.run} | |\n|---|---|\n{table}", session.display.note)


def schedule(session: Session) -> Callable[[int], list[Callable[[Session, int], Any]]]:
    """What is due after so many rounds, decided once: policy version -> stages to run."""
    run, evals = session.config.run, session.config.eval
    last = run.num_rollout

    def due(version: int) -> list[Callable[[Session, int], Any]]:
        saves = version > 0 and (version == last or bool(run.save_interval and version % run.save_interval == 0))
        scores = bool(evals.eval_prompt_data) and (
            version in (0, last) or bool(evals.eval_interval and version % evals.eval_interval == 0)
        )
        exports = version > 0 and version == last
        stages: list[tuple[Callable[[Session, int], Any], bool]] = [(checkpoint, saves), (evaluate, scores), (export, exports)]
        return [stage for stage, wanted in stages if wanted]

    return due


def _rollout_ref(session: Session, prefix: str, commit: Commit) -> RolloutRef:
    session.record(prefix, commit)
    return RolloutRef(
        key=commit_key(prefix), rollout_id=commit.index, num_samples=commit.num_samples(), policy_version=commit.policy_version
    )
