"""From prompts to samples: one request per group, a bounded number in flight, every token and log-prob as the engine gave it.

The engine's ids are the truth: the response text is decoded from them, never the other way round. Every sample records the policy
versions that the engine reported with it, and another one than expected is an error, not a label. Grading is begun here, as soon
as a group is done, and awaited by the caller. Groups that the journal has kept are not asked for again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engines.sglang.client import EngineClient, Generation
from stages.rewards.outcome import Outcome, failed
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import Prompt
from stages.rollout.prompt_lengths import response_limit
from stages.rollout.tokenizer import PromptTokenizer
from storage.faults import reach
from storage.preemption import Preempted, StopRequest
from storage.refs import Kind
from storage.sample import Sample, Status

if TYPE_CHECKING:
    from stages.rollout.journal import Journal

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}  # finish reason -> status; anything else ends the rollout
RESERVE = 2.0  # seconds of a grace period that are kept for the journal and the way out

T = TypeVar("T")
Submit = Callable[[list[Sample]], "list[Future[Outcome]]"]  # begins to grade the samples of a prompt
Progress = Callable[[int, int], None]  # samples done, samples in all


@dataclass(frozen=True)
class GroupPlan:
    """One prompt, ready to be sent."""

    prompt: Prompt
    group_id: str
    text: str
    token_ids: list[int]  # [P]


@dataclass(frozen=True)
class Round:
    """What is generated: what every sample of it has in common."""

    run: str
    rollout_id: int  # the round; of an evaluation, the policy version
    policy_version: int  # what the engines serve; a sample of another version is an error
    kind: Kind = "rollout"  # or "eval"
    id_prefix: str = ""  # before all ids, to keep those of evaluations apart from those of rollouts

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
    adopted_groups: list[str]  # ids of those that an earlier attempt had generated

    @property
    def fresh(self) -> list[Sample]:
        """What the engines have generated this time."""
        adopted = set(self.adopted_groups)
        return [sample for sample in self.samples if sample.group_id not in adopted]


def plan_groups(prompts: Sequence[Prompt], tokenizer: PromptTokenizer, id_prefix: str = "") -> list[GroupPlan]:
    """Render and tokenise. Group ids count the prompts issued in the run: a round that is done again has the same ones."""
    texts = tokenizer.render([prompt.content for prompt in prompts], [prompt.tools for prompt in prompts])
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
    round: Round,
    config: RolloutConfig,
    tokenizer: PromptTokenizer,
    submit: Submit,
    *,
    journal: Journal,
    stop: StopRequest | None = None,
    on_progress: Progress | None = None,
) -> Generated:
    """All groups, in order.

    Args:
        client: of the engines; closed at the end.
        groups: what to generate.
        round: run, round and policy version; engines must report exactly these.
        config: sampling, samples per prompt, time limit.
        tokenizer: decodes the responses.
        submit: begins to grade the samples of a prompt.
        journal: gives the groups that are there already and gets those that are finished.
        stop: may ask to give up.
        on_progress: called with (samples done, samples in all).

    Raises:
        RuntimeError: an engine aborted a sample, or serves another policy; too many engines have died.
        TimeoutError: longer than `config.rollout_timeout`.
        Preempted: asked to stop, and the rest would take longer than there is time.
    """
    n = config.n_samples_per_prompt
    params = sampling_params(config)
    slots = asyncio.Semaphore(max(1, config.sglang_server_concurrency * max(1, len(client.urls)) // n))
    pace = _Pace(total=n * (len(groups) - len(journal.adopted)))

    def report(num_samples: int) -> None:
        pace.done += num_samples
        if on_progress is not None:
            on_progress(n * len(journal.adopted) + pace.done, n * len(groups))

    async def one(group: GroupPlan) -> list[tuple[Sample, Future[Outcome], int]]:
        if kept := journal.adopted.get(group.group_id):
            return [(sample, outcome, 0) for sample, outcome in zip(kept, submit(kept))]
        samples = [blank_sample(group, index, round) for index in range(n)]
        async with slots:
            try:
                longest = min(params["max_new_tokens"], response_limit(config, len(group.token_ids)))
                generations = await client.generate(group.token_ids, params | {"max_new_tokens": longest}, n)
            except ValueError as error:  # of this prompt alone (it is too long, say), which is no reason to end the run
                report(n)
                return [(sample, _refused(error), 0) for sample in samples]
        report(n)
        if round.kind == "eval":
            reach("eval-generating")
        assert len(generations) == n, f"{len(generations)} responses for {n} samples"
        texts = tokenizer.decode([g.token_ids for g in generations], skip_special_tokens=config.rollout_skip_special_tokens)
        for sample, generation, text in zip(samples, generations, texts):
            _add_response(sample, generation, text, round)
        journal.add(samples)
        return list(zip(samples, submit(samples), [generation.cached_tokens for generation in generations]))

    beside = [journal.keep(), *([_until_preempted(stop, pace)] if stop is not None else [])]
    async with client:
        answered = await _together([one(group) for group in groups], beside, config.rollout_timeout, pace)
    results = [result for group in answered for result in group]
    return Generated(
        samples=[sample for sample, _, _ in results],
        outcomes=[outcome for _, outcome, _ in results],
        num_cached_tokens=sum(cached for _, _, cached in results),
        adopted_groups=[group.group_id for group in groups if group.group_id in journal.adopted],
    )


async def _together(
    work: Sequence[Coroutine[Any, Any, T]], beside: Sequence[Coroutine[Any, Any, None]], time_limit: float, pace: _Pace
) -> list[T]:
    """The results of all of `work`, in order, with `beside` running as long as it does. The first failure of either ends everything."""
    deadline = asyncio.timeout(time_limit)
    try:
        async with deadline, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
            watching = [tasks.create_task(one) for one in beside]
            await asyncio.wait(running)
            for task in watching:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise _first(failures) from None  # the others were cancelled because of it, or failed alike
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"{pace.done} of {pace.total} samples within --rollout-timeout {time_limit:g} s") from None
        raise
    return [task.result() for task in running]


class _Pace:
    """How far generation is, and how long the rest will take if it goes on like that."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._start = time.monotonic()

    def seconds_left(self) -> float:
        """0 while nothing is known: the wait for the first answer may be the wait for all."""
        return (time.monotonic() - self._start) * (self.total - self.done) / self.done if self.done else 0.0


async def _until_preempted(stop: StopRequest, pace: _Pace) -> None:
    """Ends only by raising: when it is time to give up."""
    while True:
        await asyncio.sleep(0.1)
        spare = stop.seconds_left - RESERVE
        if stop.requested and (spare <= 0 or pace.seconds_left() > spare):
            raise Preempted(f"asked to stop with {pace.done} of {pace.total} samples generated; finished groups are journalled")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that says most: being asked to stop explains all others."""
    return next((error for error in failures.exceptions if isinstance(error, Preempted)), failures.exceptions[0])


def blank_sample(group: GroupPlan, index: int, round: Round) -> Sample:
    """A sample that waits for its response."""
    prompt, sample_id = group.prompt, f"{group.group_id}-{index:02d}"
    return Sample(
        sample_id=sample_id,
        group_id=group.group_id,
        trajectory_id=sample_id,
        rollout_id=round.rollout_id,
        prompt=group.text,
        label=prompt.label,
        token_ids=list(group.token_ids),
        loss_mask=[0] * len(group.token_ids),
        rollout_logprobs=[0.0] * len(group.token_ids),
        policy_versions=(round.policy_version, round.policy_version),
        metadata={**prompt.metadata, "source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
    )


def _add_response(sample: Sample, generation: Generation, text: str, round: Round) -> None:
    if generation.finish_reason not in STATUS:
        raise RuntimeError(f"sample {sample.sample_id} ended with {generation.finish_reason!r}: its engine was stopped")
    for version in (generation.first_weight_version, generation.weight_version):
        if version != round.weight_version:
            raise RuntimeError(
                f"sample {sample.sample_id} was generated by weights {version!r}, expected {round.weight_version!r}: "
                "the engine must be given this policy again"
            )
    assert len(generation.token_ids) == len(generation.logprobs), "the engine gave another number of log-probs than tokens"
    sample.response = text
    sample.token_ids += generation.token_ids
    sample.loss_mask += [1] * len(generation.token_ids)
    sample.rollout_logprobs += generation.logprobs
    sample.routed_experts = generation.routed_experts
    sample.status = STATUS[generation.finish_reason]


def _refused(error: ValueError) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(failed(f"refused by the engine: {error}"))
    return future
