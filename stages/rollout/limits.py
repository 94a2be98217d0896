"""What ends a round early: its time limit, somebody who asks to stop, the first failure of anything that belongs to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from storage.preemption import Preempted, StopRequest

RESERVE = 2.0  # seconds of a grace period that are kept for the journal and the way out

T = TypeVar("T")


class Pace:
    """How far a round is, and how long the rest will take if it goes on like that."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._start = time.monotonic()

    def seconds_left(self) -> float:
        """0 while nothing is known: the wait for the first group may be the wait for all."""
        return (time.monotonic() - self._start) * (self.total - self.done) / self.done if self.done else 0.0


async def within_limits(
    work: Coroutine[Any, Any, T],
    beside: Sequence[Coroutine[Any, Any, None]],
    pace: Pace,
    *,
    time_limit: float,
    stop: StopRequest | None,
) -> T:
    """The result of `work`, with `beside` running as long as it does. The first failure of either ends everything.

    Raises:
        TimeoutError: it takes longer than `time_limit` seconds.
        Preempted: somebody has asked to stop, and the rest would take longer than there is time.
    """
    deadline = asyncio.timeout(time_limit)
    try:
        async with deadline, asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(one) for one in [*beside, _until_preempted(stop, pace)]]
            result = await work
            for task in watching:
                task.cancel()
        return result
    except BaseExceptionGroup as failures:
        raise _first(failures) from None  # the others were cancelled because of it, or failed alike
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"{pace.done} of {pace.total} samples within --rollout-timeout {time_limit:g} s") from None
        raise


async def _until_preempted(stop: StopRequest | None, pace: Pace) -> None:
    """Ends only by raising: when it is time to give up."""
    while stop is not None:
        await asyncio.sleep(0.1)
        spare = stop.seconds_left - RESERVE
        if stop.requested and (spare <= 0 or pace.seconds_left() > spare):
            raise Preempted(f"asked to stop with {pace.done} of {pace.total} samples done; finished groups are journalled")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that says most: being asked to stop explains all others."""
    leaves = list(_leaves(failures))
    return next((error for error in leaves if isinstance(error, Preempted)), leaves[0])


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
