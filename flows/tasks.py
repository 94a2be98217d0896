"""The stages of a run as Prefect tasks, which have a name and retries. What a stage does is in stages/.

Every task may be called again: if the store has its commit already, the task returns that commit.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from prefect import State
from prefect.states import Completed

from penstock.engines.families.shape import experts_format
from penstock.flows.promotion import promote_policy
from penstock.flows.reporting.observer import Observer
from penstock.flows.reporting.prefect_page import describe_progress
from penstock.flows.runtime.conversion import export_origin, import_model
from penstock.flows.runtime.debug_runs import check_gates, dump_samples
from penstock.flows.runtime.display import ProgressCallback
from penstock.flows.runtime.engine_options import teacher_options
from penstock.flows.runtime.processes import materialize_fork, wait_for_engines_on_trainer_gpus
from penstock.flows.runtime.publishing import evaluate_policy
from penstock.flows.session import Session
from penstock.flows.stage import stage
from penstock.stages.convert.targets import find_conversion, is_conversion_of, is_published
from penstock.stages.convert.work import copy_export
from penstock.stages.eval.scores import Gate
from penstock.stages.rollout.data_rounds import loaded_rollout_stage, sft_data_stage
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point
from penstock.stages.torch_files import fill_template
from penstock.storage.commit import CheckpointRef, Commit, EvalRef, RolloutRef, StepRef, commit_key
from penstock.storage.errors import PromotionRefused
from penstock.storage.history.run_record import read_run_record
from penstock.storage.maintenance.deletion import expire_checkpoints
from penstock.storage.preemption import Preempted
from penstock.storage.store import read_commits


@stage("convert")
def convert(session: Session) -> CheckpointRef:
    """Convert the initial policy (`start_weights`) and the auxiliary models (reference, teacher) to torch_dist in the
    store, and verify them. Return the initial policy."""
    auxiliary: dict[str, CheckpointRef] = {}  # path -> model
    for name, path in session.config.train.auxiliary_models.items():
        auxiliary[path] = convert_unless_unchanged(session, name, path)
        session.run.pin_model(name, path, auxiliary[path])
    start = session.config.start_weights
    base = auxiliary.get(start) or convert_unless_unchanged(session, "base", start)
    lora = session.config.train.lora
    if adapter := lora and lora.lora_load:
        from penstock.stages.convert.exported_adapters import import_peft

        cluster = session.processes.cluster
        imported = cluster.run(import_peft, session.run.store, adapter, timeout=session.config.convert.convert_timeout)
        session.run.pin_model("adapter", adapter, imported)
    session.set_stage_message(f"{start} is converted: {base.key}")
    session.run.pin_model("base", start, base)
    session.processes.base_checkpoint = base
    return base


def convert_unless_unchanged(session: Session, role: str, path: str) -> CheckpointRef:
    """Return the model that was converted from the current files at `path`: the one that the run has recorded as `role`
    or another one in the store. If neither is known, convert these files. Only a conversion starts a Ray process."""
    store, config = session.run.store, session.config.convert
    model = store.read_record(CheckpointRef, session.run.keys.origin_key(role))
    if model is None or not is_conversion_of(store, model, path):
        model = find_conversion(store, path, config.mtp, config.model_family_path)
    if model is not None:
        session.display.note(f"the store has {path} converted")
        return model
    session.display.note_wait(f"converting {path}")
    # --convert-save is for `penstock convert`; a run needs its initial weights in its own store.
    return import_model(session.processes.cluster, store, config.model_copy(update={"convert_save": None}), path)


def trained_policy(version: int) -> list[str]:
    """Return the names of the stages that may have given the trainer policy `version`, latest first (for `needs`)."""
    return [f"train-{version - 1:06d}", "restore", "convert"]


def published_policy(newest: int, oldest: int) -> list[str]:
    """Return the names of the stages that may have given the engines a policy version from `oldest` to `newest`, latest
    first (for `needs`)."""

    return [*(f"publish-{version:06d}" for version in range(newest, oldest - 1, -1)), *trained_policy(oldest)]


@stage("restore", needs=lambda session: [["convert"]])
def restore(session: Session) -> None:
    """Start the trainer with the run's latest policy version, unless all rounds are trained."""
    materialize_fork(session.processes)
    version = session.run.num_trained_rounds()
    if version < session.run.num_rounds:
        session.display.note_wait("waiting for the trainer (it loads torch, Megatron-core and the policy)")
        wait_for_engines_on_trainer_gpus(session.processes)
        session.processes.restore_trainer_at(version)
        session.set_stage_message(f"the trainer has policy version {version}")
    else:
        session.set_stage_message(f"all {session.run.num_rounds} rounds are trained: no trainer is needed")


@stage(
    "rollout-{rollout_id:06d}",
    needs=lambda session, r, *_: [  # the previous rollout, whose commit has the position in the data, and the policy
        [f"rollout-{r - 1:06d}"],
        published_policy(r, max(0, r - session.config.run.staleness_limit)),
    ],
)
def rollout(session: Session, rollout_id: int, generate: Callable[[int], Commit]) -> RolloutRef:
    """Commit the samples of round `rollout_id`, which `generate` generates and grades with policy version
    `rollout_id`, or with an older one under --async-buffer-size, --async-mode streaming, --update-weights-interval and
    --debug-rollout-only; the commit records it."""
    prefix = session.run.keys.rollout_prefix(rollout_id)
    commit = session.run.store.committed(prefix)
    if commit is None and (template := session.config.debug.load_debug_rollout_data):
        commit = loaded_rollout_stage(
            rollout_context(session),
            prefix,
            RolloutRound(session.run.keys.run, rollout_id, policy_version=-1),
            fill_template(template, rollout_id=rollout_id),
            read_resume_point(session.run.store, session.run.keys, rollout_id),
            num_in_step=session.config.train.global_batch_size,
            fraction=session.config.debug.load_debug_rollout_data_subsample,
        )
    return _report_rollout(session, prefix, commit or generate(rollout_id))


def _report_rollout(session: Session, prefix: str, commit: Commit) -> RolloutRef:
    """Report the commit of a rollout or of demonstrations, and return its reference."""
    session.report_commit(prefix, commit)
    dump_samples(session.config, session.run.store, commit, commit.index, session.display)
    return RolloutRef(
        key=commit_key(prefix),
        rollout_id=commit.index,
        num_samples=commit.num_samples(),
        policy_version=commit.policy_version,
    )


def rollout_context(session: Session, **options: Any) -> RolloutContext:
    """Return the context that all rounds of a run share. `options` are further fields of `RolloutContext`."""
    hinted = session.config.train.hinted
    return RolloutContext(
        session.run.store,
        session.config.rollout_with_args,
        session.prompts,
        session.tokenizer,
        provenance=session.run.provenance,
        hint_template=hinted.opd_hint_template if hinted else None,
        **options,
    )


def generation_context(
    session: Session, engines: Callable[[], list[str]], on_progress: ProgressCallback
) -> RolloutContext:
    """Return the context of rollouts that engines generate; `engines` returns the URLs of these engines."""
    train, processes = session.config.train, session.processes
    connect = processes.connect
    if processes.engine_options.return_experts:  # clients also request the experts that each token was routed to
        connect = partial(connect, experts=experts_format(processes.shape, "--use-rollout-routing-replay"))
    return rollout_context(
        session,
        engines=engines,
        grader=session.grader,
        stop=session.stop,
        on_progress=on_progress,
        connect=connect,
        read_counters=partial(processes.counters, "rollout", "teacher"),
        teacher_top_k=train.stored_top_k,
        teacher_urls=train.opd.opd_teacher_url if train.opd else {},
        serving_teacher=processes.serving_teacher if teacher_options(session.config) else None,
    )


@stage("demonstrations-{rollout_id:06d}", needs=lambda session, r: [[f"demonstrations-{r - 1:06d}"]])
def demonstrate(session: Session, rollout_id: int) -> RolloutRef:
    """Commit the next rows of the data set, which are demonstrations (SFT), in place of the rollout of round
    `rollout_id`."""
    prefix = session.run.keys.rollout_prefix(rollout_id)
    commit = session.run.store.committed(prefix)
    if commit is None:
        context = rollout_context(session, max_seq_len=session.processes.shape.max_position_embeddings)
        state = read_resume_point(session.run.store, session.run.keys, rollout_id).state
        commit = sft_data_stage(context, prefix, session.run.keys.run, rollout_id, state)
    return _report_rollout(session, prefix, commit)


@stage(
    "train-{rollout.rollout_id:06d}",
    needs=lambda session, rollout: [  # the samples, the policy, and the checkpoint of the policy
        [f"rollout-{rollout.rollout_id:06d}", f"demonstrations-{rollout.rollout_id:06d}"],
        trained_policy(rollout.rollout_id),
        [f"checkpoint-{rollout.rollout_id:06d}"],
    ],
    after_save=True,
)
def train(session: Session, rollout: RolloutRef) -> StepRef:
    """Train one round on a committed rollout, after the previous round's checkpoint is saved."""
    r = rollout.rollout_id
    prefix = session.run.keys.step_prefix(r)
    with session.engines.turns.training(r):
        commit = session.run.store.committed(prefix)
        commit = commit or session.processes.policy_restorer().train_round(r, session.run.reuse)
    session.report_commit(prefix, commit)
    check_gates(session.config, commit)
    return StepRef(key=commit_key(prefix), rollout_id=r, policy_version=commit.policy_version)


@stage("publish-{version:06d}", needs=lambda session, version: [trained_policy(version)])
def publish(session: Session, version: int) -> None:
    """Load policy `version` into every engine, unless no more rollouts are needed. With --async-mode streaming, the
    engines continue to generate while they load it."""
    run = session.config.run
    if run.streams and session.run.needs_rollout(run.num_rollout - 1):
        session.engines.publish_in_flight(version)
    elif session.run.needs_rollout(version):
        session.engines.publish(version)
    else:
        session.set_stage_message("no more rollouts are needed")
        return
    session.set_stage_message(f"the engines have policy version {session.engines.turns.schedule.in_engines}")


def checkpoint(session: Session, version: int) -> None:
    """Start saving policy `version` in another thread. The next train or export stage waits for its commit.

    If trainer and engines take turns on the devices, save the checkpoint before returning, because the engines cannot
    use the devices during the save.
    """
    if session.config.run.alternates_trainer_and_engines:
        save(session, version)
    else:
        session.wait_for_checkpoint()
        session.saving = save.submit(session, version)


@stage("checkpoint-{version:06d}", needs=lambda session, version: [trained_policy(version)])
def save(session: Session, version: int) -> CheckpointRef:
    """Save policy `version` with its optimizer state, then remove old checkpoints."""
    prefix = session.run.keys.checkpoint_prefix(version)
    if session.run.store.committed(prefix) is None:
        session.processes.policy_restorer().save_checkpoint(version)
    commit = session.report_commit(prefix, session.run.read_commit(prefix))
    remove_old_checkpoints(session)
    uri = session.run.store.path(commit.attempt or "")
    return CheckpointRef(key=commit_key(prefix), uri=uri, format="torch_dist", policy_version=version)


def remove_old_checkpoints(session: Session) -> None:
    """Remove the checkpoints that --keep-checkpoints and --keep-best do not keep. With --keep-best, also keep
    checkpoints that may turn out to be the best, because an evaluation of them is still missing."""
    run = session.config.run
    if run.keep_checkpoints is None:
        return
    versions = session.run.store.committed_indices(f"{session.run.keys.prefix}/checkpoints") if run.keep_best else []
    expired = expire_checkpoints(
        session.run.store,
        session.run.keys,
        num_to_keep=run.keep_checkpoints,
        best_metric=run.keep_best,
        keep_versions={version for version, _ in postponed_evaluations(session, versions)},
    )
    if expired:
        session.display.note(f"removed old checkpoints: {', '.join(map(str, expired))}")


@stage("eval-{version:06d}-{name}", needs=lambda session, version, name: [published_policy(version, version)])
def evaluate_one(session: Session, version: int, name: str) -> EvalRef:
    """Score policy `version` on the data set `name`: generate responses to its prompts, grade them, commit metrics."""
    prefix = session.run.keys.eval_prefix(version, name)
    commit = session.run.store.committed(prefix)
    if commit is None:
        with session.display.progress(f"eval {name} of version {version}: samples", "eval") as report:
            commit = evaluate_policy(session.engines, session.tokenizer, session.stop, version, name, report)
    session.report_commit(prefix, commit)
    dump_samples(session.config, session.run.store, commit, f"eval_{version}_{name}", session.display)
    return EvalRef(
        key=commit_key(prefix), task=name, policy_version=version, mean_reward=commit.summary[f"eval/{name}"]
    )


@stage("eval-{version:06d}", needs=lambda session, version: [published_policy(version, version)])
def evaluate_all(session: Session, version: int) -> list[EvalRef]:
    """Score policy `version` on all data sets in parallel: while the last long responses to one data set are generated,
    the engines work on the others."""
    with session.engines.for_evaluation(version):
        scores = [evaluate_one.submit(session, version, name) for name, _ in session.config.eval.data_sets]
        for score in scores:
            score.wait()
    session.set_stage_message(f"policy {version} is scored on {len(scores)} data sets")
    return [score.result() for score in scores]


def evaluate(session: Session, version: int) -> list[EvalRef]:
    """Score policy `version` on every evaluation data set."""
    # Parallel evaluations cannot share the port of --agent-endpoint-port.
    if len(missing_evaluations(session, version)) > 1 and not session.config.rollout.agent_endpoint_port:
        return list(evaluate_all(session, version))
    return [evaluate_one(session, version, name) for name, _ in session.config.eval.data_sets]


def missing_evaluations(session: Session, version: int) -> list[str]:
    """Return the names of the data sets on which policy `version` is not scored yet."""
    names = [name for name, _ in session.config.eval.data_sets]
    return [name for name in names if session.run.store.committed(session.run.keys.eval_prefix(version, name)) is None]


def request_evaluation(session: Session, version: int) -> None:
    """Begin to score policy `version`, the trainer's newest, while training continues: on separate engines (--eval-mode
    apart), on engines that also generate rollouts (--async-mode streaming), or before the next rollout that is
    generated ahead (--async-buffer-size)."""
    turns = session.engines.turns
    if not missing_evaluations(session, version):
        return
    if not turns.schedule.limits.evaluates_apart and not turns.schedule.limits.streams:
        with turns.change() as schedule:
            schedule.requested = version
        return
    if not turns.schedule.limits.evaluates_apart and not session.run.needs_rollout(session.config.run.num_rollout - 1):
        evaluate_in_turn(session, version)
        return
    try:
        publish_for_evaluation(session, version)
    except Exception as error:
        note_postponed_evaluation(session, version, error)
        return
    with turns.change() as schedule:
        schedule.evaluated = version
    flow_run = contextvars.copy_context()  # the thread's tasks belong to this flow run
    evaluate_here = partial(flow_run.run, evaluate_or_postpone, session, version)
    threading.Thread(target=evaluate_here, name="evaluation", daemon=True).start()


@stage("publish-for-eval-{version:06d}", needs=lambda session, version: [trained_policy(version)])
def publish_for_evaluation(session: Session, version: int) -> None:
    """Wait until the previous evaluation has ended, and load policy `version`, the trainer's current one, into the
    engines that evaluate it."""
    session.engines.publish_for_evaluation(version)


def evaluate_or_postpone(session: Session, version: int) -> None:
    """Score policy `version` while training continues. If this fails, `evaluate_skipped` does it after the last
    round."""
    try:
        evaluate(session, version)
    except (Exception, Preempted) as error:
        note_postponed_evaluation(session, version, error)
    finally:
        with session.engines.turns.change() as schedule:
            schedule.evaluated = None


def note_postponed_evaluation(session: Session, version: int, error: BaseException) -> None:
    """Print that `evaluate_skipped` will score policy `version` after the last round, because `error` prevented it."""
    session.display.note(
        f"policy version {version} could not be evaluated now ({type(error).__name__}: {error}); it will be evaluated "
        "after the last round"
    )


def evaluate_in_turn(session: Session, version: int) -> None:
    """Wait until the stream of rollouts and the previous evaluation have ended, score policy `version`, and return when
    it is scored."""
    session.engines.turns.wait_until(lambda schedule: schedule.evaluated is None and not schedule.rollouts.streams)
    evaluate(session, version)


def evaluate_skipped(session: Session) -> None:
    """Score the policy versions whose evaluation failed or was killed. The engines get these versions from a trainer
    that is restored from the store."""
    session.engines.turns.wait_until(lambda schedule: schedule.evaluated is None)
    for version, name in postponed_evaluations(session, range(1, session.run.num_trained_rounds())):
        evaluate_one(session, version, name)
    if session.config.run.keep_best:
        remove_old_checkpoints(session)


def postponed_evaluations(session: Session, versions: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield (policy version, data set) for each evaluation of policies in `versions` that was due but is missing.
    Policies that were trained before a data set was added to the run are not evaluated on it. A fork does not evaluate
    its parent's policies, because with the fork's options a replay would not reproduce them."""
    due, keys = build_stage_schedule(session), session.run.keys
    skips_first = session.config.eval.skip_eval_before_train
    record = read_run_record(session.run.store, keys)
    fork_point = record.parent.at if record and record.parent else 0
    for version in versions:
        if version >= max(1, fork_point) and request_evaluation in due(version):
            trained_at = session.run.read_commit(keys.step_prefix(version - 1)).created_at
            for name in missing_evaluations(session, version):
                first = session.run.store.committed(keys.eval_prefix(0, name))
                if skips_first or (first is not None and first.created_at < trained_at):
                    yield version, name


@stage("export-{version:06d}", needs=lambda session, version: [[f"checkpoint-{version:06d}"]], after_save=True)
def export(session: Session, version: int) -> CheckpointRef:
    """Export policy `version` as a Hugging Face directory."""
    from penstock.stages.convert.to_hf import export_hf

    prefix = session.run.keys.export_prefix(version)
    commit = session.run.store.committed(prefix)
    if commit is None:
        checkpoint = session.run.keys.checkpoint_prefix(version)
        origin = export_origin(session.config.convert, keep_mtp=session.config.drafts_with_mtp_layers)
        arguments = (session.run.store, session.run.read_commit(checkpoint), origin, prefix)
        inputs, timeout = {"checkpoint": commit_key(checkpoint)}, session.config.convert.convert_timeout
        write = partial(export_hf, *arguments, inputs=inputs)
        commit = session.processes.trainer.export(version, origin.directory, write, timeout)
        if commit is None:  # the trainer does not have this version: export the checkpoint
            commit = session.processes.cluster.run(export_hf, *arguments, inputs=inputs, timeout=timeout)
    session.report_commit(prefix, commit)
    uri = session.run.store.path(commit.attempt or "")
    return CheckpointRef(key=commit_key(prefix), uri=uri, format="hf", policy_version=version)


@stage("save-hf-{version:06d}", needs=lambda session, version: [[f"export-{version:06d}"]])
def save_hf(session: Session, version: int) -> None:
    """Copy the export of policy `version` to --save-hf, unless the copy exists."""
    exported = session.run.read_commit(session.run.keys.export_prefix(version))
    ref = copy_export(session.run.store, exported, session.config.run.hf_path(version))
    session.set_stage_message(f"Hugging Face files of policy {version}: {ref.uri}")


def save_missing_hf(session: Session) -> None:
    """With --save-hf, write the Hugging Face files of those checkpoints that do not have them yet, because writing them
    failed or was killed."""
    keys = session.run.keys
    if session.config.run.save_hf is None:
        return
    session.wait_for_checkpoint()
    for version in session.run.store.committed_indices(f"{keys.prefix}/checkpoints"):
        if not is_published(session.config.run.hf_path(version), session.run.store.options):
            export(session, version)
            save_hf(session, version)


@stage(
    "promote-{version:06d}",
    needs=lambda session, version: [[f"eval-{version:06d}-{name}"] for name, _ in session.config.eval.data_sets],
)
def promote(session: Session, version: int) -> None:
    """Make policy `version` the champion of --promote-to if the conditions hold; otherwise show the numbers, and with
    --promote-refused fail raise PromotionRefused."""
    evals = session.config.eval
    data_set = evals.promote_data_set or evals.data_sets[0][0]
    gate = Gate(data_set, evals.promote_margin, evals.promote_guards, evals.promote_min_reward)
    policy = f"{session.run.keys.run}/{version}"
    decision = promote_policy(session.run.store, evals.promote_to or "", policy, gate)
    conditions = "; ".join(map(str, decision.conditions))
    text = f"{evals.promote_to}: {policy} {decision.action} ({conditions})"
    session.set_stage_message(text)
    if decision.action != "refused":
        session.display.note(text)
        return
    session.display.warn(text)
    if evals.promote_refused == "fail":
        raise PromotionRefused(text)


def publish_results(session: Session) -> State[None]:
    """Tell the observers the results of the whole run, including rounds before a resume. Return the final state of the
    flow run, whose message says what this start has done."""
    session.wait_for_checkpoint()
    commits = read_commits(session.run.store, session.run.keys)
    session.observers.tell(Observer.on_results, commits)
    return Completed(message=describe_progress(commits, session.run.started_at))


def build_stage_schedule(session: Session) -> Callable[[int], list[Callable[[Session, int], Any]]]:
    """Return a function: policy version -> stages that are due after that version is trained, in order: publish,
    checkpoint, evaluate, export. If trainer and engines take turns on the devices, the checkpoint comes before the
    publish. With --async-buffer-size no publish is due, because the thread of rollouts publishes; with --async-mode
    streaming there is one, because engines are updated while they generate."""

    run, evals = session.config.run, session.config.eval
    last, generates = run.num_rollout, session.config.train.loss_type != "sft_loss"
    engines_are_free = not run.generates_ahead or run.streams

    def due(version: int) -> list[Callable[[Session, int], Any]]:
        stages: list[Callable[[Session, int], Any]] = []
        is_last = version == last
        if version > 0 and version % run.update_weights_interval == 0 and generates and engines_are_free:
            stages.append(publish)
        saves = is_last or (run.save_interval and version % run.save_interval == 0)
        if version > 0 and saves:
            first = 0 if run.alternates_trainer_and_engines else len(stages)
            stages[first:first] = [checkpoint, export, save_hf] if run.save_hf else [checkpoint]
        scores = is_last or (evals.eval_interval and version % evals.eval_interval == 0) or version == 0
        if version == 0 and not is_last and evals.skip_eval_before_train:
            scores = False
        if evals.data_sets and scores and not run.debug_train_only:
            in_turn = version in (0, last) or not (
                run.generates_ahead or session.engines.turns.schedule.limits.evaluates_apart
            )
            stages.append(evaluate_in_turn if in_turn else request_evaluation)
        if is_last and version > 0 and not run.save_hf:
            stages.append(export)
        return stages

    return due
