"""One attempt at a round: its generator, filter and hooks put together, its groups collected within the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

from engines.sglang.client import EngineClient
from stages.rollout.collect import Collected, Judge, collect
from stages.rollout.config import RolloutConfig
from stages.rollout.filters import DynamicFilterOutput, load_filter
from stages.rollout.generate import EngineGenerator
from stages.rollout.hooks import Hooks
from stages.rollout.intake import Intake
from stages.rollout.journal import Journal
from stages.rollout.limits import Pace, within_limits
from stages.rollout.produce import Generator, Production, Submit
from stages.rollout.round import Group, Round
from stages.rollout.tokenizer import PromptTokenizer
from storage.preemption import StopRequest
from storage.sample import Sample, Status

Progress = Callable[[int, int], None]  # samples done, samples in all


@dataclass
class Made:
    """A round before it is written."""

    found: Collected
    production: Production
    num_prompt_tokens: int  # of all requests
    num_cached_tokens: int  # of these, what the engines had computed before
    seconds: dict[str, float]  # until the last token, and what grading took beyond that


async def make_round(
    client: EngineClient,
    intake: Intake,
    journal: Journal,
    submit: Submit,
    config: RolloutConfig,
    tokenizer: PromptTokenizer,
    *,
    num_groups: int,
    stop: StopRequest | None = None,
    on_progress: Progress | None = None,
) -> Made:
    """Collect `num_groups` groups, whatever that takes; arguments and errors as in `rollout_stage`."""
    start = time.perf_counter()
    n = config.n_samples_per_prompt
    pace = Pace(n * num_groups)
    hooks, judge = Hooks(config), judge_of(config)

    def on_kept(group: Group) -> None:
        pace.done += n
        if on_progress is not None:
            on_progress(pace.done, pace.total)

    async def before_grading(sample: Sample) -> None:
        await asyncio.to_thread(hooks.sample_hook, sample)

    async with client, generator_of(config, client, tokenizer, intake.round) as generator:
        production = Production(
            config,
            intake.round,
            generator,
            journal,
            submit,
            hook=before_grading if config.rollout_sample_hook_path else None,
            slots=asyncio.Semaphore(max(1, config.sglang_server_concurrency * max(1, len(client.urls)) // n)),
        )
        found = await within_limits(
            collect(
                intake.next_groups,
                production,
                judge,
                production.stop,
                num_groups=num_groups,
                wave=max(num_groups, config.over_sampling_batch_size or 0),
                max_waves=config.max_waves,
                on_kept=on_kept,
            ),
            [journal.keep()],
            pace,
            time_limit=config.rollout_timeout,
            stop=stop,
        )
    await asyncio.to_thread(hooks.sample_filter, found.kept)
    every = [*found.kept, *found.aside, *(group for group, _ in found.dropped)]
    await asyncio.to_thread(hooks.all_samples, every, intake.source)
    seconds = {"generate": production.last_token - start, "reward": time.perf_counter() - production.last_token}
    return Made(found, production, generator.num_prompt_tokens, generator.num_cached_tokens, seconds)


@asynccontextmanager
async def generator_of(
    config: RolloutConfig, client: EngineClient, tokenizer: PromptTokenizer, round: Round
) -> AsyncIterator[Generator]:
    """The built-in generator, or the user's function."""
    if config.custom_generate_function_path is None:
        yield EngineGenerator(client, config, tokenizer, round)
    else:
        from stages.rollout.custom_generation import CustomGeneration

        async with CustomGeneration(config, client, tokenizer, round) as generator:
            yield generator


def judge_of(config: RolloutConfig) -> Judge:
    """The dynamic filter as `collect` asks it. A group of which nothing could be graded is no question for the filter."""
    if config.dynamic_sampling_filter_path is None:
        return _keep
    check = load_filter(config.dynamic_sampling_filter_path, SimpleNamespace(**config.model_dump()))

    async def judge(group: Group) -> DynamicFilterOutput:
        if all(sample.status is Status.FAILED for sample in group):
            return DynamicFilterOutput(False, "failed")
        return await asyncio.to_thread(check, group)

    return judge


async def _keep(group: Group) -> DynamicFilterOutput:
    return DynamicFilterOutput(True)
