"""From prompts to samples: one request per group, a bounded number in flight, every token and log-prob as the engine gave it.

The engine's ids are the truth: the response text is decoded from them, never the other way round. Every sample records the policy
versions that the engine reported with it, and another one than expected is an error, not a label. Grading is begun here, as soon
as a group is done, and awaited by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engines.sglang.client import EngineClient, Generation
from stages.rewards.outcome import Outcome, failed
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import Prompt
from stages.rollout.tokenizer import PromptTokenizer
from storage.sample import Sample, Status

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}  # finish reason -> status; anything else ends the rollout

Submit = Callable[[Sample], "Future[Outcome]"]  # begins to grade a sample
Progress = Callable[[int, int], None]  # samples done, samples in all


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
    """Render and tokenise. Group ids count the prompts issued in the run: a round that is done again has the same ones."""
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
    return params | config.rollout_sampling


async def generate(
    client: EngineClient,
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
        client: of the engines; closed at the end.
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

    async def one(group: GroupPlan) -> list[tuple[Sample, Future[Outcome], int]]:
        nonlocal done
        samples = [_blank_sample(group, index, origin) for index in range(n)]
        refusal: ValueError | None = None
        async with slots:
            try:
                generations = await client.generate(group.token_ids, params, n)
            except ValueError as error:  # of this prompt alone (it is too long, say), which is no reason to end the run
                refusal = error
        done += n
        if on_progress is not None:
            on_progress(done, n * len(groups))
        if refusal is not None:
            return [(sample, _refused(refusal), 0) for sample in samples]
        assert len(generations) == n, f"{len(generations)} responses for {n} samples"
        texts = tokenizer.decode([g.token_ids for g in generations], skip_special_tokens=config.rollout_skip_special_tokens)
        for sample, generation, text in zip(samples, generations, texts):
            _add_response(sample, generation, text, origin)
        return [(sample, submit(sample), generation.cached_tokens) for sample, generation in zip(samples, generations)]

    deadline = asyncio.timeout(config.rollout_timeout)
    try:
        async with deadline, client, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(group)) for group in groups]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others were cancelled because of it, or failed alike
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(
                f"{done} of {n * len(groups)} samples within --rollout-timeout {config.rollout_timeout:g} s"
            ) from None
        raise
    results = [result for task in running for result in task.result()]
    return Generated(
        samples=[sample for sample, _, _ in results],
        outcomes=[outcome for _, outcome, _ in results],
        num_cached_tokens=sum(cached for _, _, cached in results),
    )


def _blank_sample(group: GroupPlan, index: int, origin: Origin) -> Sample:
    prompt, sample_id = group.prompt, f"{group.group_id}-{index:02d}"
    return Sample(
        sample_id=sample_id,
        group_id=group.group_id,
        trajectory_id=sample_id,
        rollout_id=origin.rollout_id,
        prompt=group.text,
        label=prompt.label,
        token_ids=list(group.token_ids),
        loss_mask=[0] * len(group.token_ids),
        rollout_logprobs=[0.0] * len(group.token_ids),
        policy_versions=(origin.policy_version, origin.policy_version),
        metadata={**prompt.metadata, "source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
    )


def _add_response(sample: Sample, generation: Generation, text: str, origin: Origin) -> None:
    if generation.finish_reason not in STATUS:
        raise RuntimeError(f"sample {sample.sample_id} ended with {generation.finish_reason!r}: its engine was stopped")
    for version in (generation.first_weight_version, generation.weight_version):
        if version != origin.weight_version:
            raise RuntimeError(
                f"sample {sample.sample_id} was generated by weights {version!r}, expected {origin.weight_version!r}: "
                "the engine must be given this policy again"
            )
    assert len(generation.token_ids) == len(generation.logprobs), "the engine gave another number of log-probs than tokens"
    sample.response = text
    sample.token_ids += generation.token_ids
    sample.loss_mask += [1] * len(generation.token_ids)
    sample.rollout_logprobs += generation.logprobs
    sample.status = STATUS[generation.finish_reason]


def _refused(error: ValueError) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(failed(f"refused by the engine: {error}"))
    return future
