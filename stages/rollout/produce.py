"""How one group of a round is made: taken from the journal or generated, seen by the user's hook, graded.

Many groups are under way at once, bounded by what the engines take. Grading a group overlaps the generation of others. Which groups, and how
many, is decided in collect.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from stages.rewards.outcome import Outcome, failed
from stages.rollout.collect import unfinished
from stages.rollout.config import RolloutConfig
from stages.rollout.journal import Journal
from stages.rollout.round import Group, Round, copied
from storage.faults import reach
from storage.sample import Sample, Status

Submit = Callable[[list[Sample]], "list[Future[Outcome]]"]  # begins to grade the samples of a prompt
Hook = Callable[[Sample], Awaitable[None]]


class Generator(Protocol):
    """Fills in the samples of a group."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests so far: with several turns the same token counts several times."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Of these, what the engines had computed before."""
        ...

    async def __call__(self, samples: Group) -> Group:
        """Raises ValueError if this prompt cannot be generated."""
        ...

    async def abort(self) -> None:
        """Let all groups under way come back as they are, with samples that are `aborted`."""
        ...


@dataclass
class Production:
    """Makes the groups of one round; call it for each. Made in the event loop that it is called in."""

    config: RolloutConfig  # says what is done with samples that were stopped
    round: Round
    generator: Generator
    journal: Journal  # gives what an earlier attempt has finished, and gets what is finished now
    submit: Submit  # begins to grade
    hook: Hook | None  # sees every generated sample before that
    slots: asyncio.Semaphore  # groups that are generated at once
    stopping: bool = False
    generated: list[Sample] = field(default_factory=list)  # this time
    num_response_tokens: int = 0  # of those, this time
    adopted: list[str] = field(default_factory=list)  # ids of groups from the journal
    last_token: float = field(default_factory=time.perf_counter)  # when the last group was generated

    async def __call__(self, group: Group) -> Group:
        """The group with everything that can be said of it, or, if it was stopped, as it is to come back."""
        if unfinished(group):
            if kept := self.journal.take(group):
                group = kept
                self.adopted.append(group[0].group_id)
            else:
                before = [copied(sample) for sample in group]
                group = await self._generate(group)
                if unfinished(group):
                    return self._stopped(group, before)
        await self._grade(group)
        return group

    async def stop(self) -> None:
        """Let all groups under way come back as they are."""
        self.stopping = True
        await self.generator.abort()

    def _stopped(self, group: Group, before: Group) -> Group:
        if not self.stopping:
            raise RuntimeError(
                f"group {group[0].group_id} was aborted and nobody here has asked for it: its engine was stopped, or the generate "
                "function says so"
            )
        return group if self.config.partial_rollout else before

    async def _generate(self, group: Group) -> Group:
        num_before = _trained(group)
        async with self.slots:
            try:
                group = await self.generator(group)
            except ValueError as error:  # of this prompt alone (it is too long, say), which is no reason to end the round
                for sample in group:
                    failed(f"refused by the engine: {error}").apply(sample)
                return group
        self.last_token = time.perf_counter()
        self.generated += group
        self.num_response_tokens += _trained(group) - num_before
        if self.round.kind == "eval":
            reach("eval-generating")
        if all(sample.status in (Status.COMPLETED, Status.TRUNCATED) for sample in group):
            self.journal.add(group)
        return group

    async def _grade(self, group: Group) -> None:
        """Raises ValueError if the request is wrong."""
        samples = [sample for sample in group if sample.reward is None and sample.status is not Status.FAILED]
        if self.hook is not None:
            await asyncio.gather(*(self.hook(sample) for sample in samples))
            samples = [sample for sample in samples if sample.status is not Status.FAILED]
        # Shielded: a grader must not find its future cancelled because the round has ended.
        outcomes = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(one)) for one in self.submit(samples)))
        for sample, outcome in zip(samples, outcomes):
            outcome.apply(sample)


def _trained(group: Group) -> int:
    return sum(sum(sample.loss_mask) for sample in group)
