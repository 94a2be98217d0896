"""Run the rollout stage: generate and grade responses to prompts, and commit the samples as shards. Evaluations run the
same stage on their own prompts.

A sample with the built-in generation passes through these files of this folder:

    prompts/prompt_files.py, prompt_rows.py   open the files of --prompt-data, and parse their rows
    prompts/source.py                         read the next row
    prompts/data_source.py                    create a group of pending samples for this row, or take a buffered group
    text/tokenizer.py, templates.py           apply the chat template, tokenize the prompt; later decode the response
    collect.py                                start the group; at its end keep, drop or buffer it
    group.py                                  request responses from an engine, then have them graded
    journal.py                                store finished groups before the round is committed
    rollout.py                                write shards; commit

Outside of this folder, engines/sglang/client.py calls the engines, and stages/rewards/grading.py grades.

The round starts at the data position in the commit of the previous round, so no prompt is lost or used twice. Every
attempt writes its shards under a private prefix; they become valid when the commit, written last, names them. The files
`part-*` hold the samples to train on, `buffer-*` the groups that are buffered for a later round.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from penstock.engines.backends import connect as connect_engines
from penstock.engines.generation import EngineClient, EngineUrls
from penstock.engines.local_gpus import ReadCounters, energy_metric
from penstock.stages.images import ImageProcessor, SampleImages, read_image_token_id
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.outcome import penalize_overlong
from penstock.stages.rollout.collect import (
    CollectedGroups,
    SampleProgress,
    collect_groups,
    record_seconds,
    run_blocking,
    run_with_deadline,
)
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import (
    EngineGenerator,
    Generator,
    GroupRunner,
    ServingTeacher,
    make_grader,
    mask_stale_tokens,
    num_trained_tokens,
    open_teacher,
    policy_spans,
)
from penstock.stages.rollout.journal import Journal
from penstock.stages.rollout.metrics import rollout_metrics, sample_preview, staleness_metrics, throughput_metrics
from penstock.stages.rollout.plugins.custom_generation import CustomGeneration, EngineHandle
from penstock.stages.rollout.plugins.filters import load_group_filter
from penstock.stages.rollout.plugins.hooks import Hooks, make_train_data, run_log_function
from penstock.stages.rollout.plugins.rollout_function import RolloutFunctionCall, find_evaluation_function
from penstock.stages.rollout.prompts.data_source import (
    Dataset,
    Group,
    PromptIntake,
    RolloutRound,
    group_by_group_id,
    open_data_source,
    resized_group,
)
from penstock.stages.rollout.prompts.prompt_images import PromptImages
from penstock.stages.rollout.prompts.source import LengthFilter, PromptSource, SourceState
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.blobs import blob_sizes
from penstock.storage.commit import BUFFER, Commit, RunKeys
from penstock.storage.errors import RunError
from penstock.storage.failpoints import failpoint
from penstock.storage.history.run_record import read_run_record
from penstock.storage.preemption import StopRequest
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples, write_shards
from penstock.storage.store import Store

DISCARDED = "not kept by the data source"  # drop reason of an unused group that the data source did not buffer
# Values that evaluations use for these rollout options, because an evaluation scores every prompt of its data set.
EVAL_OVERRIDES: dict[str, Any] = {
    "data_source_path": None,
    "buffer_filter_path": None,
    "dynamic_sampling_filter_path": None,
    "over_sampling_batch_size": None,
    "partial_rollout": False,
    "rollout_sample_hook_path": None,
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "custom_reward_post_process_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "overlong": None,
}


@dataclass(frozen=True)
class RolloutContext:
    """Inputs, engines and callbacks that all rollouts of a run share."""

    store: Store
    config: RolloutConfig
    prompts: PromptSource
    tokenizer: PromptTokenizer
    engines: EngineUrls = ()  # URLs, or a function that returns the URLs of running engines (`EnginePool.serving`)
    grader: Grader | None = None  # shared by all rounds and closed by the caller; None creates one per round
    provenance: Mapping[str, Any] = field(default_factory=dict)  # added to every commit: config_hash, code_version
    stop: StopRequest | None = None  # set on preemption: finished groups are then journaled for the next attempt
    on_progress: Callable[[int, int], None] | None = None  # called with (samples done, samples in total)
    connect: Callable[..., EngineClient] = connect_engines  # creates the client from `engines` and a `timeout`
    read_counters: ReadCounters = dict  # reads the energy counters of the engines' GPUs
    teacher_top_k: int = 0  # number of the teacher's most probable tokens that the samples store (--opd-top-k)
    teacher_urls: Mapping[str, str] = field(default_factory=dict)  # name -> address of a teacher (--opd-teacher-url)
    serving_teacher: ServingTeacher | None = None  # the run's own engine with a teacher (--opd-teacher-engine)
    hint_template: str | None = None  # of the prompts that a teacher with hints sees (--opd-hint-template)
    max_seq_len: int | None = None  # maximum sequence length of the model in tokens; limits conversations of SFT

    @cached_property
    def images(self) -> SampleImages | None:
        """Return the reader of the samples' images; None for a model of text only."""
        if read_image_token_id(self.tokenizer.directory) is None:
            return None
        bounds = self.config.image_min_pixels, self.config.image_max_pixels
        return SampleImages(self.store, ImageProcessor.load(self.tokenizer.directory, *bounds))


@dataclass(frozen=True)
class ResumePoint:
    """The data-source state and buffered groups that a round starts from. The defaults are for a run's first round."""

    state: dict[str, Any] | None = None  # state of the data source; None: start of the data
    buffer: Sequence[Sample] = ()  # samples of the groups that earlier rounds buffered


def read_resume_point(store: Store, keys: RunKeys, rollout_id: int) -> ResumePoint:
    """Return the resume point of round `rollout_id`.

    In a run forked with new data (`restart_data`), the first round after the fork starts at the beginning of the data
    without buffered groups; only the count of issued prompts continues, because group ids are derived from this count.
    In a run forked with changed rollout options (`discard_responses`), the buffered groups lose their responses, and
    are resized to the fork's number of samples per prompt.
    """
    if rollout_id == 0:
        return ResumePoint()
    previous = store.committed(keys.rollout_prefix(rollout_id - 1))
    if previous is None:
        raise RunError(
            f"round {rollout_id} needs the data position of round {rollout_id - 1}, which is not committed: "
            f"run round {rollout_id - 1} first"
        )
    state = previous.state["data_source"]
    record = read_run_record(store, keys)
    fork = record.parent if record and record.parent and record.parent.at == rollout_id else None
    if fork and fork.restart_data:
        return ResumePoint(SourceState(issued=state["issued"], segments=()).model_dump(mode="json"))
    buffer = read_samples(store, previous, BUFFER) if previous.num_samples(BUFFER) else []
    if record and fork and fork.discard_responses:
        num_samples = record.config["rollout"]["n_samples_per_prompt"]
        buffer = [sample for group in group_by_group_id(buffer) for sample in resized_group(group, num_samples)]
    return ResumePoint(state, buffer)


@dataclass
class RoundResult:
    """The result of generating and grading a round, before it is committed."""

    groups: CollectedGroups
    runner: GroupRunner
    seconds: dict[str, float]  # "generate": from the start to the last token; "reward": from the last token to the end
    energy: dict[str, float]  # metric of the energy that the engines used until the end of grading; {}: not measured


def rollout_stage(
    context: RolloutContext,
    prefix: str,
    round: RolloutRound,
    resume_point: ResumePoint | None = None,
    num_prompts: int | None = None,
    summarize: Callable[[Sequence[Sample]], dict[str, float]] = rollout_metrics,
) -> Commit:
    """Generate, grade and commit `num_prompts` groups (default: `rollout_batch_size`) under the store's `prefix`,
    unless this prefix is committed already. Return the commit. `summarize` computes metrics of its samples.

    Raises ValueError (changed prompt data, an invalid user-defined function), RuntimeError or ConnectionError (the
    engines or all samples failed, or the filter kept too few groups), TimeoutError after --rollout-timeout, and
    Preempted.
    """
    if commit := context.store.committed(prefix):
        return commit
    if round.kind == "eval":
        function = {"rollout_function_path": find_evaluation_function(context.config)}
        context = replace(context, config=context.config.model_copy(update=EVAL_OVERRIDES | function))
    config, seconds = context.config, dict[str, float]()
    journal = Journal(context.store, prefix, round, config)
    with record_seconds(seconds, "prepare"):
        intake = open_prompt_intake(context, round, resume_point or ResumePoint())
        journal.load_finished_groups()
    with (
        make_grader(config) if context.grader is None else nullcontext(context.grader) as grader,
        journal.flushed_on_error(),
    ):
        num_prompts = num_prompts or config.rollout_batch_size
        data_set = prefix.rstrip("/").rpartition("/")[2] if round.kind == "eval" else None
        result = run_blocking(generate_round(context, intake, journal, grader, num_prompts, data_set))
        seconds, groups = seconds | result.seconds, result.groups
        samples, num_masked = samples_to_train(groups.kept, config, round)
        samples = make_train_data(samples, config, context.tokenizer)
        intake.source.add_samples(groups.buffered)
        discarded = intake.groups_discarded_by_source(groups.kept + groups.dropped_groups)
        groups.dropped += [(group, DISCARDED) for group in discarded]
    commit = commit_samples(
        context,
        prefix,
        round,
        samples,
        seconds,
        lambda: (
            summarize(samples)
            | round_metrics(result, intake, round, samples, seconds, num_masked)
            | run_log_function(config, round.rollout_id, samples, sum(seconds.values()), data_set)
        ),
        buffer=[sample for group in intake.buffered_groups for sample in group],
        state=state_of_round(result, intake, samples, round, config.num_shown_samples),
    )
    journal.delete_entries()
    return commit


def open_prompt_intake(context: RolloutContext, round: RolloutRound, resume_point: ResumePoint) -> PromptIntake:
    """Open the data source at the data position of `resume_point`. Rollouts skip prompts above the length limit;
    evaluations do not."""
    config = context.config
    images = PromptImages(config, context.tokenizer.directory, context.store)
    length_filter = None
    if round.kind == "rollout":
        length_filter = LengthFilter(config, context.tokenizer, images.count_extra_tokens)
    template = context.hint_template
    dataset = Dataset(config, context.prompts, context.tokenizer, round, length_filter, images, template)
    return PromptIntake(open_data_source(config, dataset), resume_point.state, resume_point.buffer)


async def generate_round(
    context: RolloutContext,
    intake: PromptIntake,
    journal: Journal,
    grader: Grader,
    num_groups: int,
    data_set: str | None,
) -> RoundResult:
    """Generate and grade groups until `num_groups` are kept, then call the user-defined functions that get all groups
    of a round. `data_set`: name of an evaluation's data set; None: a rollout."""
    start, counters = time.perf_counter(), context.read_counters()
    config = context.config
    hooks, group_filter, num_samples = Hooks(config), load_group_filter(config), config.n_samples_per_prompt
    progress = SampleProgress(num_samples * num_groups, context.on_progress)
    async with (
        open_runner(context, context.engines, journal, grader, hooks) as (runner, client),
        AsyncExitStack() as closing,
    ):
        collect = partial(
            collect_groups,
            runner=runner,
            group_filter=group_filter,
            num_groups=num_groups,
            batch_size=max(num_groups, config.over_sampling_batch_size or 0),
            max_batches=config.max_waves,
            on_kept=lambda: progress.add(num_samples),
        )
        if config.rollout_function_path:
            handle = EngineHandle(client, context.tokenizer, config, runner.round, context.images)
            handle.loop = asyncio.get_running_loop()
            closing.push_async_callback(asyncio.to_thread, handle.close)
            work = RolloutFunctionCall(config, runner, intake, collect, handle, data_set).run(num_groups)
        else:
            work = collect(intake.next_groups)
        groups = await run_with_deadline(
            work,
            [runner.flush_journal_periodically()],
            progress,
            time_limit=config.rollout_timeout,
            stop=context.stop,
        )
    await asyncio.to_thread(hooks.run_sample_filter, groups.kept)
    await asyncio.to_thread(hooks.run_round_hook, groups.kept + groups.buffered + groups.dropped_groups, intake.source)
    seconds = {"generate": runner.last_token_time - start, "reward": time.perf_counter() - runner.last_token_time}
    energy = energy_metric("perf/rollout_energy_joules", counters, context.read_counters())
    return RoundResult(groups, runner, seconds, energy)


@asynccontextmanager
async def open_runner(
    context: RolloutContext, engines: EngineUrls, journal: Journal, grader: Grader, hooks: Hooks
) -> AsyncIterator[tuple[GroupRunner, EngineClient]]:
    """Yield a runner of groups with the generator of --custom-generate-function-path, or the built-in one, and the
    client of the engines."""
    config, round = context.config, journal.round
    client = context.connect(engines, timeout=config.rollout_timeout)
    num_engines = max(1, len(client.urls))
    generators: AbstractAsyncContextManager[Generator] = (
        CustomGeneration(config, client, context.tokenizer, round, context.images)
        if config.custom_generate_function_path is not None
        else nullcontext(EngineGenerator(client, config, context.tokenizer, round, context.images))
    )
    teachers = open_teacher(config, context.teacher_urls, context.serving_teacher, context.teacher_top_k)
    async with client, generators as generator, teachers as teacher:
        runner = GroupRunner(
            round,
            generator,
            journal,
            grader.submit_group,
            hook=hooks.run_sample_hook if config.rollout_sample_hook_path else None,
            teacher=teacher,
            slots=asyncio.Semaphore(max(1, config.engine_concurrency * num_engines // config.n_samples_per_prompt)),
            partial_rollout=config.partial_rollout,
            num_gpus=num_engines * config.rollout_num_gpus_per_engine,
            images=context.images,
        )
        yield runner, client


def samples_to_train(groups: Sequence[Group], config: RolloutConfig, round: RolloutRound) -> tuple[list[Sample], int]:
    """Return the samples of the kept groups, and the number of tokens that are masked because they are more than
    `max_staleness` policy versions old. With `mask_offpolicy_in_partial_rollout`, all tokens that earlier policies
    generated are masked, too; the number does not count them. With `overlong`, the rewards of long responses are
    lowered first. Raises RuntimeError if all samples have failed."""
    samples = [sample for group in groups for sample in group]
    failures = [sample for sample in samples if sample.status is Status.FAILED]
    if len(failures) == len(samples):
        raise RuntimeError(
            f"all {len(failures)} samples failed, the first with {failures[0].metadata['error']!r}: "
            "fix the cause (often the reward or generate function, or the data) and resume the run"
        )
    num_stale, bound = 0, round.rollout_id - round.max_staleness if round.max_staleness else 0
    for sample in samples:
        if overlong := config.overlong:
            length, factor = overlong.overlong_buffer_len, overlong.overlong_penalty_factor
            penalize_overlong(sample, config.rollout_max_response_len, length, factor)
        num_stale += sum(number for version, number in policy_spans(sample) if version < bound)
        newest = sample.policy_versions[1] if config.mask_offpolicy_in_partial_rollout else 0
        mask_stale_tokens(sample, max(bound, newest))
    return samples, num_stale


def state_of_round(
    result: RoundResult, intake: PromptIntake, samples: Sequence[Sample], round: RolloutRound, num_shown: int
) -> dict[str, Any]:
    """Return the commit's state: `data_source` (position in the data), `shown` (a preview of `num_shown` samples), and,
    unless they are empty, `adopted_groups` (ids of groups taken from the journal), `dropped` (id, drop reason and
    source row of every dropped group), `max_staleness` and `updates_in_flight`."""
    adopted = sorted(result.runner.adopted)
    dropped = [
        {"group_id": group[0].group_id, "reason": reason, "source": group[0].metadata.get("source")}
        for group, reason in result.groups.dropped
    ]
    entries = {"adopted_groups": adopted, "dropped": dropped, "max_staleness": round.max_staleness}
    entries["updates_in_flight"] = round.updates_in_flight
    always = {"data_source": intake.source.state_dict(), "shown": sample_preview(samples, num_shown)}
    return always | {name: value for name, value in entries.items() if value}


def round_metrics(
    result: RoundResult,
    intake: PromptIntake,
    round: RolloutRound,
    samples: Sequence[Sample],
    seconds: Mapping[str, float],
    num_masked: int,
) -> dict[str, float]:
    """Return the metrics (name -> value) of throughput, dynamic sampling, skipped prompts and staleness of a round.
    `num_masked`: number of its tokens that are masked as too old."""
    groups, dataset = result.groups, intake.source.dataset
    metrics = throughput_metrics(result.runner, seconds) | result.energy
    if groups.num_batches > 1 or groups.dropped or groups.buffered:
        metrics["rollout/num_waves"] = float(groups.num_batches)
        metrics["rollout/num_dropped_groups"] = float(len(groups.dropped))
        metrics["rollout/num_buffered_groups"] = float(len(intake.buffered_groups))
    for reason, count in Counter(reason for _, reason in groups.dropped).items():
        metrics[f"rollout/dynamic_filter/drop_{reason}"] = float(count)
    if isinstance(dataset.prompt_filter, LengthFilter) and dataset.prompt_filter.limit is not None:
        metrics["rollout/num_skipped_prompts"] = float(intake.num_skipped)
    metrics |= groups.metrics
    if round.kind == "rollout":
        metrics |= staleness_metrics(samples, round.rollout_id)
    if round.max_staleness:
        dropped = sum(num_trained_tokens(group) for group, _ in groups.dropped)
        metrics["rollout/masked_stale_tokens"] = float(num_masked)
        metrics["rollout/wasted_tokens"] = float(num_masked + dropped + intake.num_discarded_tokens)
    return metrics


def commit_samples(
    context: RolloutContext,
    prefix: str,
    round: RolloutRound,
    samples: Sequence[Sample],
    seconds: dict[str, float],
    summary: Callable[[], dict[str, float]],
    *,
    buffer: Sequence[Sample] = (),
    **changes: Any,
) -> Commit:
    """Write samples and buffered samples as shards of a new attempt, then create the commit that names them.

    `summary` computes the commit's metrics after the shards are written, so it can include the seconds spent writing.
    `changes` add fields to the commit, or replace those of `round`. If another attempt has committed first, its commit
    is returned; a caller that must notice this passes `attempt`, from `Store.new_attempt`, and compares the commit's
    `attempt` with it.
    """

    def rollout_failpoint(name: str) -> None:
        if round.kind == "rollout":
            failpoint(name)

    store = context.store
    fields = {
        "kind": round.kind,
        "run": round.run,
        "index": round.rollout_id,
        "policy_version": round.policy_version,
        "inputs": {f"prompt_data/{index}": path for index, path in enumerate(context.config.prompt_data)},
        **context.provenance,
        **changes,
    }
    with record_seconds(seconds, "write"):
        attempt = fields.setdefault("attempt", store.new_attempt(prefix))
        rollout_failpoint("rollout-before-upload")
        with store.writing(attempt) as out:
            write_shards(out.path, samples)
            if buffer:
                write_shards(out.path, buffer, BUFFER)
        rollout_failpoint("rollout-after-upload")
    fields["blobs"] = blob_sizes(store, chain.from_iterable(sample.images for sample in [*samples, *buffer]))
    if fields["blobs"] and context.images:
        fields["state"] = {**fields.get("state", {}), "image_processor": context.images.processor.fingerprint()}
    commit = store.commit(prefix, Commit(files=out.files, seconds=seconds, summary=summary(), **fields))
    rollout_failpoint("rollout-after-commit")
    return commit
