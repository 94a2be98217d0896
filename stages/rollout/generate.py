"""From prompts to samples: one request per group, a bounded number in flight, every token and log-prob as the engine gave it.

The engine's ids are the truth: the response text is decoded from them, never the other way round. Every sample records the policy version
that the engine reported with it, and another version than expected is an error, not a label. Rewards are begun here, as soon as a
group is done, and awaited by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from stages.rewards.outcome import Outcome
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import Prompt
from stages.rollout.tokenizer import PromptTokenizer
from storage.sample import Sample, Status

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}  # finish reason -> status; anything else ends the rollout

Submit = Callable[[Sample], "Future[Outcome]"]  # begins to grade a sample
Progress = Callable[[int, int], None]  # samples done, samples in all


class Generation(Protocol):
    """What an engine gives for one sample."""

    token_ids: list[int]  # [R]
    logprobs: list[float]  # [R]
    finish_reason: str
    weight_version: str
    cached_tokens: int


class Client(Protocol):
    """What this stage needs of engines.sglang.client.EngineClient."""

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], n: int) -> Sequence[Generation]:
        """`n` responses to one prompt."""
        ...


@dataclass(frozen=True)
class GroupPlan:
    """One prompt, ready to be sent."""

    prompt: Prompt
    group_id: str
    text: str
    token_ids: list[int]  # [P]


@dataclass(frozen=True)
class Origin:
    """What every sample of a rollout has in common."""

    run: str
    rollout_id: int
    policy_version: int

    @property
    def weight_version(self) -> str:
        """What engines report while they serve this policy."""
        return f"{self.run}/{self.policy_version}"


@dataclass
class Generated:
    """A rollout before its rewards have arrived."""

    samples: list[Sample]
    outcomes: list[Future[Outcome]]  # one per sample
    num_cached_tokens: int  # prompt tokens that the engines had computed before


def plan_groups(prompts: Sequence[Prompt], tokenizer: PromptTokenizer, id_prefix: str = "") -> list[GroupPlan]:
    """Render and tokenise. Group ids count the prompts issued in the run, so they are the same whenever the round is done again."""
    texts = tokenizer.render([prompt.content for prompt in prompts])
    return [
        GroupPlan(prompt, f"{id_prefix}{prompt.issue:09d}", text, token_ids)
        for prompt, text, token_ids in zip(prompts, texts, tokenizer.encode(texts))
    ]


def sampling_params(config: RolloutConfig) -> dict[str, Any]:
    """The config in SGLang's words."""
    params: dict[str, Any] = {
        "temperature": config.rollout_temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": config.rollout_max_response_len,
    }
    if config.rollout_stop:
        params |= {"stop": config.rollout_stop, "no_stop_trim": True}
    if config.rollout_stop_token_ids:
        params["stop_token_ids"] = config.rollout_stop_token_ids
    return params


async def generate(
    connect: Callable[[], AbstractAsyncContextManager[Client]],
    groups: Sequence[GroupPlan],
    origin: Origin,
    config: RolloutConfig,
    tokenizer: PromptTokenizer,
    submit: Submit,
    *,
    num_in_flight: int,
    on_progress: Progress | None = None,
) -> Generated:
    """All groups, in order.

    Args:
        connect: opens the engine client; called inside the event loop.
        groups: what to generate.
        origin: run, round and policy version; engines must report exactly these.
        config: sampling, samples per prompt, time limit.
        tokenizer: decodes the responses.
        submit: begins to grade a sample.
        num_in_flight: samples in flight on all engines together.
        on_progress: called with (samples done, samples in all).

    Raises:
        RuntimeError: an engine aborted a sample, or serves another policy.
        TimeoutError: longer than `config.rollout_timeout`.
    """
    n = config.n_samples_per_prompt
    params = sampling_params(config)
    slots = asyncio.Semaphore(max(1, num_in_flight // n))
    done = 0

    async def one(client: Client, group: GroupPlan) -> tuple[list[Sample], list[Future[Outcome]], int]:
        nonlocal done
        async with slots:
            generations = await client.generate(group.token_ids, params, n)
        samples = _samples(group, generations, origin, config, tokenizer)
        done += n
        if on_progress is not None:
            on_progress(done, n * len(groups))
        return samples, [submit(sample) for sample in samples], sum(generation.cached_tokens for generation in generations)

    try:
        async with asyncio.timeout(config.rollout_timeout), connect() as client, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(client, group)) for group in groups]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others were cancelled because of it, or failed alike
    results = [task.result() for task in running]
    return Generated(
        samples=[sample for samples, _, _ in results for sample in samples],
        outcomes=[outcome for _, outcomes, _ in results for outcome in outcomes],
        num_cached_tokens=sum(cached for _, _, cached in results),
    )


def _samples(
    group: GroupPlan, generations: Sequence[Generation], origin: Origin, config: RolloutConfig, tokenizer: PromptTokenizer
) -> list[Sample]:
    assert len(generations) == config.n_samples_per_prompt, f"{len(generations)} responses for one prompt"
    prompt, length = group.prompt, len(group.token_ids)
    texts = tokenizer.decode([g.token_ids for g in generations], skip_special_tokens=config.rollout_skip_special_tokens)
    samples = []
    for index, (generation, text) in enumerate(zip(generations, texts)):
        assert len(generation.token_ids) == len(generation.logprobs), "the engine gave another number of log-probs than tokens"
        sample_id = f"{group.group_id}-{index:02d}"
        samples.append(
            Sample(
                sample_id=sample_id,
                group_id=group.group_id,
                trajectory_id=sample_id,
                rollout_id=origin.rollout_id,
                prompt=group.text,
                response=text,
                label=prompt.label,
                token_ids=group.token_ids + generation.token_ids,
                loss_mask=[0] * length + [1] * len(generation.token_ids),
                rollout_logprobs=[0.0] * length + generation.logprobs,
                status=_status(generation, sample_id),
                policy_versions=_versions(generation, origin, sample_id),
                metadata={**prompt.metadata, "source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
            )
        )
    return samples


def _status(generation: Generation, sample_id: str) -> Status:
    if generation.finish_reason not in STATUS:
        raise RuntimeError(
            f"sample {sample_id} ended with {generation.finish_reason!r}: the engine was stopped; the round is done again"
        )
    return STATUS[generation.finish_reason]


def _versions(generation: Generation, origin: Origin, sample_id: str) -> tuple[int, int]:
    if generation.weight_version != origin.weight_version:
        raise RuntimeError(
            f"sample {sample_id} was generated by weights {generation.weight_version!r}, expected {origin.weight_version!r}: "
            "the engine must be given this policy again"
        )
    return origin.policy_version, origin.policy_version
