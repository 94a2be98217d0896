"""The rollout stage: prompts in, graded samples in committed shards out. Evaluation is the same stage on other prompts.

It is safe to call twice: what is committed is returned, and what is not is done again from where the round before has left the data, so no
prompt is lost and none is served twice. Files are written under a private prefix and become true with the commit, which comes last:
`part-*` holds what is trained on, `buffer-*` the groups that were asked for and wait for a later round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from engines.sglang.client import EngineClient, Engines
from stages.rewards.grading import Grader
from stages.rollout.beginning import Beginning
from stages.rollout.collect import Collected
from stages.rollout.config import RolloutConfig
from stages.rollout.costs import costs
from stages.rollout.intake import Intake
from stages.rollout.journal import Journal
from stages.rollout.make import Made, Progress, make_round
from stages.rollout.metrics import rollout_metrics
from stages.rollout.prompts.source import PromptSource
from stages.rollout.responses import mask_earlier_policies
from stages.rollout.round import Round
from stages.rollout.shown import shown
from stages.rollout.tokenizer import PromptTokenizer
from storage.faults import reach
from storage.preemption import Preempted, StopRequest
from storage.refs import BUFFER, Commit, Kind
from storage.sample import Sample, Status
from storage.secrets import reveal
from storage.shards import write_shards
from storage.store import Store

T = TypeVar("T")
FIRST = Beginning()

# What belongs to training and not to an evaluation, which scores every prompt of a data set once.
NOT_EVALUATED: dict[str, Any] = {
    "data_source_path": None,
    "buffer_filter_path": None,
    "dynamic_sampling_filter_path": None,
    "over_sampling_batch_size": None,
    "partial_rollout": False,
    "rollout_sample_hook_path": None,
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
}


def rollout_stage(
    store: Store,
    prefix: str,
    round: Round,
    *,
    engines: Engines,
    source: PromptSource,
    tokenizer: PromptTokenizer,
    config: RolloutConfig,
    beginning: Beginning = FIRST,
    num_prompts: int | None = None,
    grader: Grader | None = None,
    summarise: Callable[[Sequence[Sample]], dict[str, float]] = rollout_metrics,
    stamp: dict[str, Any] | None = None,
    stop: StopRequest | None = None,
    on_progress: Progress | None = None,
    connect: Callable[..., EngineClient] = EngineClient,
) -> Commit:
    """Generate, grade and commit one round, unless it is committed already.

    Args:
        store: where the samples go.
        prefix: of the commit and its files, e.g. `RunKeys.rollout(12)`.
        round: which one, by which policy.
        engines: their addresses, or what `EnginePool.serving` gives.
        source: the prompts.
        tokenizer: of the policy.
        config: sampling and rewards.
        beginning: what the round before has left (`beginning_of`).
        num_prompts: how many prompts; `rollout_batch_size` if not given (an evaluation takes `len(source)`).
        grader: kept alive between rounds by its owner; None makes one for this call.
        summarise: the summary's numbers from the samples.
        stamp: further fields of the commit (`config_hash`, `code_version`).
        stop: may ask to give up; what is finished is then journalled for the next attempt.
        on_progress: called with (samples done, samples in all).
        connect: makes the client of the engines from `engines` and a `timeout`.

    Raises:
        ValueError: the data changed, or the reward or another function of the user's is wrong.
        RuntimeError: an engine aborted or serves another policy, too many died, every single sample failed, or the filter drops nearly all;
            worth trying again.
        ConnectionError: no engine answers; worth trying again.
        TimeoutError: generation took longer than `config.rollout_timeout`.
        Preempted: asked to stop, and the time left is too short.
    """
    if commit := store.committed(prefix):
        return commit
    if round.kind == "eval":
        config = config.model_copy(update=NOT_EVALUATED)
    seconds: dict[str, float] = {}
    journal = Journal(store, prefix, round, config)
    with timed(seconds, "prepare"):
        intake = Intake(config, source, tokenizer, round, beginning)
        journal.read()
    client = connect(engines, timeout=config.rollout_timeout)
    num_gpus = max(1, len(client.urls)) * config.rollout_num_gpus_per_engine
    with grader_of(config) if grader is None else nullcontext(grader) as grading, kept(journal):
        work = make_round(
            client,
            intake,
            journal,
            grading.submit_group,
            config,
            tokenizer,
            num_groups=num_prompts or config.rollout_batch_size,
            stop=stop,
            on_progress=on_progress,
        )
        made = run_to_end(work)
        seconds |= made.seconds
        samples = trained_on(made.found, config)
        intake.put_back(made.found)
    commit = commit_samples(
        store,
        prefix,
        samples,
        seconds,
        lambda: summarise(samples) | costs(made, intake, samples, seconds, num_gpus),
        buffer=[sample for group in intake.waiting for sample in group],
        kind=round.kind,
        index=round.rollout_id,
        policy_version=round.policy_version,
        state={"data_source": intake.state, "shown": shown(samples, config.num_shown_samples)} | fates(made),
        **({"run": round.run, "inputs": inputs_of(config)} | (stamp or {})),
    )
    journal.remove()
    return commit


def trained_on(found: Collected, config: RolloutConfig) -> list[Sample]:
    """The samples of a round, in the order of their issue. Raises RuntimeError if every single one has failed."""
    samples = [sample for group in found.kept for sample in group]
    failures = [sample for sample in samples if sample.status is Status.FAILED]
    if len(failures) == len(samples):
        reason = failures[0].metadata["error"]
        raise RuntimeError(
            f"all {len(failures)} samples failed, the first with {reason!r}: repair the reward function or the data"
        )
    if config.mask_offpolicy_in_partial_rollout:
        for sample in samples:
            mask_earlier_policies(sample)
    return samples


def fates(made: Made) -> dict[str, Any]:
    """For the commit: which groups an earlier attempt had generated, and what was dropped and why."""
    dropped = [
        {"group_id": group[0].group_id, "reason": reason, "source": group[0].metadata.get("source")}
        for group, reason in made.found.dropped
    ]
    adopted = sorted(made.production.adopted)
    return ({"adopted_groups": adopted} if adopted else {}) | ({"dropped": dropped} if dropped else {})


def commit_samples(
    store: Store,
    prefix: str,
    samples: Sequence[Sample],
    seconds: dict[str, float],
    summary: Callable[[], dict[str, float]],
    *,
    buffer: Sequence[Sample] = (),
    kind: Kind,
    **fields: Any,
) -> Commit:
    """Write samples as shards under a private prefix, and what waits for a later round beside them; then commit both with `fields`.

    `summary` is asked last: writing is part of the time.
    """

    def at(point: str) -> None:
        if kind == "rollout":
            reach(point)

    with timed(seconds, "write"):
        attempt = store.new_attempt(prefix)
        at("rollout-before-upload")
        with store.writing(attempt) as out:
            write_shards(out.path, samples)
            if buffer:
                write_shards(out.path, buffer, BUFFER)
        at("rollout-after-upload")
    commit = store.commit(
        prefix, Commit(kind=kind, attempt=attempt, files=out.files, seconds=seconds, summary=summary(), **fields)
    )
    at("rollout-after-commit")
    return commit


def grader_of(config: RolloutConfig) -> Grader:
    """Return the grader that a config describes. Raises RewardError for an unknown reward."""
    config = config.model_copy(update={"rm_url": reveal(config.rm_url)})
    return Grader.from_options(config, config.reward_workers, config.model_dump())


def inputs_of(config: RolloutConfig) -> dict[str, str]:
    """What a round consumes, for the record."""
    return {f"prompt_data/{index}": path for index, path in enumerate(config.prompt_data)}


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also where the caller's thread runs a loop already: in a notebook, or under `prefect flow-run retry`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


@contextmanager
def kept(journal: Journal) -> Iterator[None]:
    """If the block fails, what it has finished is made durable first."""
    try:
        yield
    except (Exception, Preempted):
        journal.flush()
        raise
