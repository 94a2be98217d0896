"""Collect the groups of a round: generate, grade and filter groups concurrently until enough are kept, or until a group
fails, time runs out or a stop is requested."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.stages.rollout.group import GroupRunner
from penstock.stages.rollout.plugins.filters import GroupFilter
from penstock.stages.rollout.prompts.data_source import Group
from penstock.storage.preemption import Preempted, StopRequest


@dataclass
class CollectedGroups:
    """The groups of a round, each in one of three lists, which are sorted by group id (the prompt order)."""

    kept: list[Group] = field(default_factory=list)  # trained on in this round
    buffered: list[Group] = field(default_factory=list)  # kept for later rounds: finished but not needed, or aborted
    dropped: list[tuple[Group, str]] = field(default_factory=list)  # (group, reason)
    num_batches: int = 0  # number of sampling batches requested from the data source
    metrics: dict[str, float] = field(default_factory=dict)  # returned by a user-defined rollout function

    @property
    def dropped_groups(self) -> list[Group]:
        """The dropped groups, without their drop reasons."""
        return [group for group, _ in self.dropped]


async def collect_groups(
    next_groups: Callable[[int], Sequence[Group]],
    runner: GroupRunner,
    group_filter: GroupFilter,
    *,
    num_groups: int,
    batch_size: int,
    max_batches: int,
    on_kept: Callable[[], None] = lambda: None,
) -> CollectedGroups:
    """Generate sampling batches of `batch_size` groups until `num_groups` groups are kept, then abort the groups in
    flight. `on_kept` is called after every kept group. Every requested group ends in exactly one list of the result:
    kept, dropped with a reason, or buffered (aborted, or finished after enough groups were kept; the filter is not
    called for buffered groups)."""
    num_batches = 0
    async with asyncio.TaskGroup() as tasks:
        groups = GroupsInFlight(runner, group_filter, tasks, num_needed=num_groups, on_kept=on_kept)
        while len(groups.finished) < num_groups:
            while len(groups.finished) + len(groups.running) < num_groups:
                if num_batches == max_batches:
                    drop_reasons = Counter(reason for _, reason in groups.dropped)
                    reasons = ", ".join(f"{n} for {reason!r}" for reason, n in drop_reasons.most_common(3))
                    raise RuntimeError(
                        f"after {max_batches} sampling batches the dynamic sampling filter has kept only "
                        f"{len(groups.finished)} of {num_groups} groups (dropped: {reasons}): use prompts that the "
                        "policy solves only sometimes, use a less strict filter, or raise --max-waves"
                    )
                num_batches += 1
                for group in next_groups(batch_size):
                    groups.start(Flight(group), group)
            await groups.wait_for_change()
        if running := list(groups.running.values()):
            await runner.stop()
            await asyncio.wait(running)
    finished = [flight.group or [] for flight in groups.finished]
    kept, buffered = sorted_by_id(finished[:num_groups]), sorted_by_id(finished[num_groups:])
    return CollectedGroups(kept, buffered, sorted(groups.dropped, key=lambda entry: entry[0][0].group_id), num_batches)


@dataclass(eq=False)
class Flight:
    """A group from the start of its generation until it is used."""

    prompts: Group  # the group without responses, to start it again
    version: int = 0  # policy version at its start; if it had responses already, their oldest policy version
    group: Group | None = None  # the group with responses and rewards, once it is finished


@dataclass(eq=False)
class GroupsInFlight:
    """Generates, grades and filters groups concurrently, for a round or a stream of rounds. Every group that was
    started is in one place: `running`, `finished`, or `dropped` with a reason. Once `num_needed` groups are finished
    (None: no limit), the filter is not called for later ones."""

    runner: GroupRunner
    filter: GroupFilter
    tasks: asyncio.TaskGroup
    num_needed: int | None = None
    on_kept: Callable[[], None] = lambda: None
    running: dict[Flight, asyncio.Task[None]] = field(default_factory=dict)
    finished: list[Flight] = field(default_factory=list)  # the group that finished first comes first
    dropped: list[tuple[Group, str]] = field(default_factory=list)
    idle_seconds: float = 0.0  # time without a group in flight, since the caller set this to 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    idle_since: float | None = None  # set while no group is in flight

    def start(self, flight: Flight, group: Group) -> None:
        """Start to generate `group`: `flight.prompts`, possibly with responses from an earlier round."""
        self.running[flight] = self.tasks.create_task(self._finish(flight, group))
        self.count_idle_seconds()

    def count_idle_seconds(self) -> None:
        """Add the time since the last call to the idle seconds, if no group was in flight."""
        now = time.perf_counter()
        if self.idle_since is not None:
            self.idle_seconds += now - self.idle_since
        self.idle_since = None if self.running else now

    async def wait_for_change(self) -> None:
        """Wait until a group is finished or dropped, or `changed` is set."""
        self.changed.clear()
        await self.changed.wait()

    async def _finish(self, flight: Flight, group: Group) -> None:
        flight.group = group = await self.runner.run(group)
        keeps, reason, is_needed = True, "", self._needs_more()
        if is_needed:
            decision = await self.filter(group)
            num_open = len(self.finished) + len(self.running)  # including this group
            is_insufficient = self.num_needed is not None and num_open <= self.num_needed
            keeps = decision.keep or (decision.keep_when_insufficient and is_insufficient)
            reason, is_needed = str(decision.reason), self._needs_more()
        del self.running[flight]  # no `await` from here to the end: other coroutines must find every group in one place
        self.count_idle_seconds()
        self.changed.set()
        if not keeps:
            self.dropped.append((group, reason))
            return
        self.finished.append(flight)
        if is_needed:
            self.on_kept()

    def _needs_more(self) -> bool:
        return self.num_needed is None or len(self.finished) < self.num_needed


def sorted_by_id(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group[0].group_id)


# ---- deadlines -------------------------------------------------------------------------------------------------------


RESERVE = 2.0  # seconds of a preemption's grace period that are reserved for writing the journal and exiting

T = TypeVar("T")


@dataclass
class SampleProgress:
    """Counts the finished samples of a round."""

    total: int
    on_progress: Callable[[int, int], None] | None = None  # called with (samples done, samples in total)
    done: int = 0
    start: float = field(default_factory=time.monotonic)

    def add(self, count: int) -> None:
        """Record that `count` further samples are finished, and report the progress."""
        self.done += count
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


async def run_with_deadline(
    work: Coroutine[Any, Any, T],
    background: Sequence[Coroutine[Any, Any, None]],
    progress: SampleProgress,
    *,
    time_limit: float,
    stop: StopRequest | None,
) -> T:
    """Return the result of `work`. The coroutines in `background` run concurrently and are cancelled when `work`
    returns. The first exception in any coroutine cancels all others and is raised.

    Raises TimeoutError after `time_limit` seconds (--rollout-timeout), and Preempted if a stop was requested and the
    samples left in `progress` would take longer than the grace period.
    """

    async def watch_stop_request() -> None:
        while stop is not None:
            await asyncio.sleep(0.1)
            elapsed, num_left = time.monotonic() - progress.start, progress.total - progress.done
            seconds_left = elapsed * num_left / progress.done if progress.done else 0.0  # estimated, for all samples
            spare = stop.seconds_left - RESERVE
            if stop.requested and (spare <= 0 or seconds_left > spare):
                raise Preempted(
                    f"stop requested with {progress.done} of {progress.total} samples done; "
                    "finished groups are in the journal and will be reused when the round restarts"
                )

    deadline = asyncio.timeout(time_limit)
    try:
        async with deadline, asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(coroutine) for coroutine in [*background, watch_stop_request()]]
            result = await work
            for task in others:
                task.cancel()
        return result
    except BaseExceptionGroup as failures:  # later exceptions follow from the first one or have the same cause
        errors = list(flatten_errors(failures))
        raise next((error for error in errors if isinstance(error, Preempted)), errors[0]) from None
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(
                f"only {progress.done} of {progress.total} samples were finished within --rollout-timeout "
                f"{time_limit:g} s: raise --rollout-timeout, or use more engines"
            ) from None
        raise


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result, like `asyncio.run`. If the calling thread already runs an event loop (in a
    notebook, or in `prefect flow-run retry`), the coroutine runs in a new thread."""
    results: list[T] = []

    async def store_result() -> None:
        """Store the result here, not in a task: with Python 3.11 `asyncio.run` passes its task to `signal.signal`,
        which formats the task with its result, twice per round: 1.3 s for 512 samples of 1,024 tokens."""
        results.append(await coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(store_result())
    else:
        with ThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(asyncio.run, store_result()).result()
    return results[0]


def flatten_errors(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the exceptions of a group, also of groups inside it."""
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from flatten_errors(error)
        else:
            yield error


@contextmanager
def record_seconds(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the duration of the `with` block in `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
