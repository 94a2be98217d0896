"""The rollout stage: prompts in, graded samples in committed shards out. Evaluation is the same stage on other prompts.

It is safe to call twice: what is committed is returned, and what is not is done again from the data-source state of the round
before, so no prompt is lost and none is served twice. Files are written under a private prefix and become true with the commit,
which comes last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from engines.sglang.client import EngineClient, Engines
from stages.rewards.grading import Grader
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import PromptSource, SourceState
from stages.rollout.generate import RESERVE, Generated, Progress, Round, generate, plan_groups
from stages.rollout.journal import Journal
from stages.rollout.metrics import rollout_metrics
from stages.rollout.prompt_lengths import LengthFilter
from stages.rollout.tokenizer import PromptTokenizer
from storage.faults import reach
from storage.preemption import Preempted, StopRequest
from storage.refs import Commit, Kind, RunKeys
from storage.sample import Sample, Status
from storage.shards import write_shards
from storage.store import Store

T = TypeVar("T")


def rollout_stage(
    store: Store,
    prefix: str,
    round: Round,
    *,
    engines: Engines,
    source: PromptSource,
    tokenizer: PromptTokenizer,
    config: RolloutConfig,
    state: dict[str, Any] | None = None,
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
        state: data-source state after the round before (`state_before`); None at the beginning.
        num_prompts: how many prompts; `rollout_batch_size` if not given (an evaluation takes `len(source)`).
        grader: kept alive between rounds by its owner; None makes one for this call.
        summarise: the summary's numbers from the samples.
        stamp: further fields of the commit (`config_hash`, `code_version`).
        stop: may ask to give up; what is finished is then journalled for the next attempt.
        on_progress: called with (samples done, samples in all).
        connect: makes the client of the engines from `engines` and a `timeout`.

    Raises:
        ValueError: the data changed, or the reward is wrong.
        RuntimeError: an engine aborted or serves another policy, too many died, or every single sample failed; worth trying again.
        ConnectionError: no engine answers; worth trying again.
        TimeoutError: generation took longer than `config.rollout_timeout`.
        Preempted: asked to stop, and the time left is too short.
    """
    if commit := store.committed(prefix):
        return commit
    seconds: dict[str, float] = {}
    journal = Journal(store, prefix, round, config)
    with timed(seconds, "prepare"):
        before = source.restore(state)
        admits = LengthFilter(config, tokenizer) if round.kind == "rollout" else None  # a score is about all prompts
        prompts, after = source.take(before, num_prompts or config.rollout_batch_size, admits)
        groups = plan_groups(prompts, tokenizer, round.id_prefix)
        journal.adopt(groups)
    client = connect(engines, timeout=config.rollout_timeout)
    num_gpus = max(1, len(client.urls)) * config.rollout_num_gpus_per_engine
    with grader_of(config) if grader is None else nullcontext(grader) as grading, kept(journal):
        with timed(seconds, "generate"):
            generated = run_to_end(
                generate(
                    client,
                    groups,
                    round,
                    config,
                    tokenizer,
                    grading.submit_group,
                    journal=journal,
                    stop=stop,
                    on_progress=on_progress,
                )
            )
        with timed(seconds, "reward"):  # what grading takes beyond generation
            samples = _graded(generated, stop)
    skipped = {"rollout/num_skipped_prompts": float(after.skipped - before.skipped)} if admits and admits.limit else {}
    adopted = {"adopted_groups": generated.adopted_groups} if generated.adopted_groups else {}
    commit = commit_samples(
        store,
        prefix,
        samples,
        seconds,
        lambda: summarise(samples) | speed_metrics(generated, seconds, num_gpus) | skipped,
        kind=round.kind,
        index=round.rollout_id,
        policy_version=round.policy_version,
        state={"data_source": after.model_dump(mode="json"), **adopted},
        **({"run": round.run, "inputs": inputs_of(config)} | (stamp or {})),
    )
    journal.remove()
    return commit


def commit_samples(
    store: Store,
    prefix: str,
    samples: Sequence[Sample],
    seconds: dict[str, float],
    summary: Callable[[], dict[str, float]],
    *,
    kind: Kind,
    **fields: Any,
) -> Commit:
    """Write samples as shards under a private prefix, then commit them with `fields`. `summary` is asked last: writing is part of the time."""

    def at(point: str) -> None:
        if kind == "rollout":
            reach(point)

    with timed(seconds, "write"):
        attempt = store.new_attempt(prefix)
        at("rollout-before-upload")
        with store.writing(attempt) as out:
            write_shards(out.path, samples)
        at("rollout-after-upload")
    commit = store.commit(
        prefix, Commit(kind=kind, attempt=attempt, files=out.files, seconds=seconds, summary=summary(), **fields)
    )
    at("rollout-after-commit")
    return commit


def state_before(store: Store, keys: RunKeys, rollout_id: int) -> dict[str, Any] | None:
    """The data-source state with which round `rollout_id` begins: what the commit of the round before says.

    A fork with other data begins them anew where it leaves its parent; only the numbers of the prompts go on, for ids are made of them.

    Raises:
        ValueError: that round is not committed.
    """
    if rollout_id == 0:
        return None
    previous = store.committed(keys.rollout(rollout_id - 1))
    if previous is None:
        raise ValueError(
            f"round {rollout_id} begins where round {rollout_id - 1} left the data, which is not committed: do that round first"
        )
    state = previous.state["data_source"]
    parent = (store.read_json(keys.record) or {}).get("parent") or {}
    if parent.get("restart_data") and parent["at"] == rollout_id:
        return SourceState(issued=state["issued"], segments=()).model_dump(mode="json")
    return state


def grader_of(config: RolloutConfig) -> Grader:
    """The grader that a config describes. Raises ValueError for an unknown reward."""
    return Grader(
        config.rm_type,
        config.custom_rm_path,
        reward_key=config.reward_key,
        timeout=config.reward_timeout,
        start_timeout=config.reward_start_timeout,
        group_rm=config.group_rm,
        rm_url=config.rm_url,
        rm_model_path=config.rm_model_path,
        num_workers=config.reward_workers,
        arguments=config.model_dump(),
    )


def inputs_of(config: RolloutConfig) -> dict[str, str]:
    """What a round consumes, for the record."""
    return {f"prompt_data/{index}": path for index, path in enumerate(config.prompt_data)}


def _graded(generated: Generated, stop: StopRequest | None) -> list[Sample]:
    waiting = set(generated.outcomes)
    while waiting := wait(waiting, timeout=None if stop is None else 0.2).not_done:
        if stop is not None and stop.seconds_left <= RESERVE:
            raise Preempted(f"asked to stop with {len(waiting)} of {len(generated.samples)} samples still to grade")
    for sample, outcome in zip(generated.samples, generated.outcomes):
        outcome.result().apply(sample)
    failures = [sample for sample in generated.samples if sample.status is Status.FAILED]
    if len(failures) == len(generated.samples):
        reason = failures[0].metadata["error"]
        raise RuntimeError(
            f"all {len(failures)} samples failed, the first with {reason!r}: repair the reward function or the data"
        )
    return generated.samples


def speed_metrics(generated: Generated, seconds: dict[str, float], num_gpus: int) -> dict[str, float]:
    """How fast it went, without what an earlier attempt had generated. Where there are no GPUs an engine counts as one."""
    fresh = generated.fresh
    num_response = sum(sum(sample.loss_mask) for sample in fresh)
    num_prompt = sum(len(sample.token_ids) for sample in fresh) - num_response
    longest = max((sum(sample.loss_mask) for sample in fresh), default=0)
    return {
        "rollout/num_adopted_groups": float(len(generated.adopted_groups)),
        "rollout/prefix_cache_hit_rate": generated.num_cached_tokens / max(num_prompt, 1),
        "rollout/avg_cached_tokens_per_sample": generated.num_cached_tokens / max(len(fresh), 1),
        "perf/rollout_time": sum(seconds.values()),
        "perf/tokens_per_gpu_per_sec": num_response / seconds["generate"] / num_gpus,
        "perf/longest_sample_tokens_per_sec": longest / seconds["generate"],
    }


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
