"""Waves: enough groups are asked for until enough have come back and been found good; what is not needed any more is stopped.

    while groups that are kept + groups under way < wanted: ask for another wave
    a group comes back: keep it, drop it with a reason, or, if there are enough, put it aside

How a group is generated and graded is `produce`, whether it is kept is `judge`; where groups come from and where those put aside go is the
caller's. Every group that was asked for is in exactly one of the lists at the end. (slime's `generate_rollout_async`; there finished groups
beyond the wanted number are thrown away.)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.rollout.filters import DynamicFilterOutput
from stages.rollout.round import Group
from storage.sample import Status

Produce = Callable[[Group], Coroutine[Any, Any, Group]]
Judge = Callable[[Group], Awaitable[DynamicFilterOutput]]


@dataclass
class Collected:
    """What has become of the groups, each list in the order of their issue."""

    kept: list[Group] = field(default_factory=list)
    aside: list[Group] = field(default_factory=list)  # finished but not needed, or stopped on the way
    dropped: list[tuple[Group, str]] = field(default_factory=list)  # with the reason
    num_waves: int = 0

    @property
    def reasons(self) -> Counter[str]:
        """Reason -> groups dropped for it."""
        return Counter(reason for _, reason in self.dropped)


async def collect(
    next_groups: Callable[[int], Sequence[Group]],
    produce: Produce,
    judge: Judge,
    stop_others: Callable[[], Awaitable[None]],
    *,
    num_groups: int,
    wave: int,
    max_waves: int,
    on_kept: Callable[[Group], None] = lambda group: None,
) -> Collected:
    """Collect `num_groups` groups.

    Args:
        next_groups: the next so many of them.
        produce: generates and grades one; all run side by side.
        judge: called once for every finished group that may still be needed.
        stop_others: ends what is under way, so that `produce` returns with what it has.
        num_groups: how many are wanted.
        wave: how many are asked for at once, at least `num_groups` of them at first.
        max_waves: after so many the judge is asking for what does not exist.
        on_kept: told of every group that is kept.

    Raises:
        RuntimeError: `max_waves` waves were not enough.
    """
    found = Collected()
    running: set[asyncio.Task[Group]] = set()
    async with asyncio.TaskGroup() as tasks:
        while len(found.kept) < num_groups:
            while len(found.kept) + len(running) < num_groups:
                found.num_waves += 1
                if found.num_waves > max_waves:
                    raise RuntimeError(_hopeless(found, num_groups))
                running |= {tasks.create_task(produce(group)) for group in next_groups(wave)}
            finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            num_open = len(finished) + len(running)  # groups that may still be kept
            for group in _ordered(task.result() for task in finished):
                if len(found.kept) == num_groups:
                    found.aside.append(group)
                    continue
                verdict = await judge(group)
                if verdict.keep or (verdict.keep_when_insufficient and len(found.kept) + num_open <= num_groups):
                    found.kept.append(group)
                    on_kept(group)
                else:
                    found.dropped.append((group, str(verdict.reason)))
                num_open -= 1
        if running:
            await stop_others()
            await asyncio.wait(running)
            found.aside += [task.result() for task in running]
    found.kept, found.aside = _ordered(found.kept), _ordered(found.aside)
    found.dropped.sort(key=lambda entry: entry[0][0].group_id)
    return found


def _ordered(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group[0].group_id)


def unfinished(group: Group) -> bool:
    """Whether something of it is still to be generated."""
    return any(sample.status in (Status.PENDING, Status.ABORTED) for sample in group)


def _hopeless(found: Collected, num_groups: int) -> str:
    reasons = ", ".join(f"{count} for {reason!r}" for reason, count in found.reasons.most_common(3))
    return (
        f"{found.num_waves - 1} waves of prompts gave {len(found.kept)} of {num_groups} groups that the filter keeps (dropped: {reasons}): "
        "give prompts that the policy sometimes solves and sometimes not, a milder filter, or more waves with --max-waves"
    )
