"""The rollout stage: prompts in, graded samples in committed shards out. Evaluation is the same stage on other prompts.

It is safe to call twice: what is committed is returned, and what is not is done again from the data-source state of the round
before, so no prompt is lost and none is served twice. Files are written under a private prefix and become true with the commit,
which comes last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from engines.sglang.client import EngineClient
from stages.rewards.grading import Grader
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import PromptSource
from stages.rollout.generate import Generated, Origin, Progress, generate, plan_groups
from stages.rollout.metrics import rollout_metrics
from stages.rollout.tokenizer import PromptTokenizer
from storage.refs import Commit, Kind, RunKeys
from storage.sample import Sample, Status
from storage.shards import write_shards
from storage.store import Store

T = TypeVar("T")


def rollout_stage(
    store: Store,
    prefix: str,
    *,
    run: str,
    rollout_id: int,
    policy_version: int,
    urls: Sequence[str],
    source: PromptSource,
    tokenizer: PromptTokenizer,
    config: RolloutConfig,
    state: dict[str, Any] | None = None,
    num_prompts: int | None = None,
    grader: Grader | None = None,
    kind: Kind = "rollout",
    id_prefix: str = "",
    summarise: Callable[[Sequence[Sample]], dict[str, float]] = rollout_metrics,
    stamp: dict[str, Any] | None = None,
    on_progress: Progress | None = None,
    connect: Callable[..., EngineClient] = EngineClient,
) -> Commit:
    """Generate, grade and commit one round, unless it is committed already.

    Args:
        store: where the samples go.
        prefix: of the commit and its files, e.g. `RunKeys.rollout(12)`.
        run: name of the run.
        rollout_id: the round; of an evaluation, the policy version.
        policy_version: what the engines serve. A sample of another version is an error.
        urls: the engines.
        source: the prompts.
        tokenizer: of the policy.
        config: sampling and rewards.
        state: data-source state after the round before (`state_before`); None at the beginning.
        num_prompts: how many prompts; `rollout_batch_size` if not given (an evaluation takes `len(source)`).
        grader: kept alive between rounds by its owner; None makes one for this call.
        kind: "rollout" or "eval".
        id_prefix: before all ids, to keep those of evaluations apart from those of rollouts.
        summarise: the summary's numbers from the samples.
        stamp: further fields of the commit (`config_hash`, `code_version`).
        on_progress: called with (samples done, samples in all).
        connect: makes the client of the engines from their URLs and a `timeout`.

    Raises:
        ValueError: the data changed, or the reward is wrong.
        RuntimeError: an engine aborted or serves another policy, or every single sample failed; worth trying again.
        ConnectionError: no engine answers; worth trying again.
        TimeoutError: generation took longer than `config.rollout_timeout`.
    """
    if commit := store.committed(prefix):
        return commit
    seconds: dict[str, float] = {}
    with timed(seconds, "prepare"):
        prompts, after = source.take(source.restore(state), num_prompts or config.rollout_batch_size)
        groups = plan_groups(prompts, tokenizer, id_prefix)
        origin = Origin(run, rollout_id, policy_version)
    with grader_of(config) if grader is None else nullcontext(grader) as grading:
        with timed(seconds, "generate"):
            generated = run_to_end(
                generate(
                    connect(list(urls), timeout=config.rollout_timeout),
                    groups,
                    origin,
                    config,
                    tokenizer,
                    grading.submit,
                    num_in_flight=config.sglang_server_concurrency * len(urls),
                    on_progress=on_progress,
                )
            )
        with timed(seconds, "reward"):  # what grading takes beyond generation
            samples = _graded(generated)
    num_gpus = len(urls) * config.rollout_num_gpus_per_engine
    return commit_samples(
        store,
        prefix,
        samples,
        seconds,
        lambda: summarise(samples) | speed_metrics(generated, seconds, num_gpus),
        kind=kind,
        index=rollout_id,
        policy_version=policy_version,
        state={"data_source": after.model_dump(mode="json")},
        **({"run": run, "inputs": inputs_of(config)} | (stamp or {})),
    )


def commit_samples(
    store: Store,
    prefix: str,
    samples: Sequence[Sample],
    seconds: dict[str, float],
    summary: Callable[[], dict[str, float]],
    **fields: Any,
) -> Commit:
    """Write samples as shards under a private prefix, then commit them with `fields`. `summary` is asked last: writing is part of the time."""
    with timed(seconds, "write"):
        attempt = store.new_attempt(prefix)
        with store.writing(attempt) as out:
            write_shards(out.path, samples)
    return store.commit(prefix, Commit(attempt=attempt, files=out.files, seconds=seconds, summary=summary(), **fields))


def state_before(store: Store, keys: RunKeys, rollout_id: int) -> dict[str, Any] | None:
    """The data-source state with which round `rollout_id` begins: what the commit of the round before says.

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
    return previous.state["data_source"]


def grader_of(config: RolloutConfig) -> Grader:
    """The grader that a config describes. Raises ValueError for an unknown reward."""
    return Grader(
        config.rm_type,
        config.custom_rm_path,
        reward_key=config.reward_key,
        timeout=config.reward_timeout,
        num_workers=config.reward_workers,
        arguments=config.model_dump(),
    )


def inputs_of(config: RolloutConfig) -> dict[str, str]:
    """What a round consumes, for the record."""
    return {f"prompt_data/{index}": path for index, path in enumerate(config.prompt_data)}


def _graded(generated: Generated) -> list[Sample]:
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
    """How fast it went. Where there are no GPUs an engine counts as one."""
    num_response = sum(sum(sample.loss_mask) for sample in generated.samples)
    num_prompt = sum(len(sample.token_ids) for sample in generated.samples) - num_response
    longest = max(sum(sample.loss_mask) for sample in generated.samples)
    return {
        "rollout/prefix_cache_hit_rate": generated.num_cached_tokens / max(num_prompt, 1),
        "rollout/avg_cached_tokens_per_sample": generated.num_cached_tokens / len(generated.samples),
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
