"""Run the coroutines of a round until it completes, one of them fails, a time limit expires or a stop is requested."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.storage.preemption import Preempted, StopRequest

RESERVE = 2.0  # seconds of the grace period that are reserved for writing the journal and exiting

T = TypeVar("T")


class SampleProgress:
    """Counts finished samples and estimates the time until all of them are finished.

    Args:
        total: number of samples of the round.
        on_progress: called with (samples done, samples in total).
    """

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.total = total
        self.done = 0
        self._on_progress = on_progress
        self._start = time.monotonic()

    def add(self, count: int) -> None:
        """Count finished samples."""
        self.done += count
        if self._on_progress is not None:
            self._on_progress(self.done, self.total)

    def seconds_left(self) -> float:
        """Return the estimated seconds until all samples are finished; 0 before the first one is."""
        return (time.monotonic() - self._start) * (self.total - self.done) / self.done if self.done else 0.0


async def run_with_deadline(
    work: Coroutine[Any, Any, T],
    background: Sequence[Coroutine[Any, Any, None]],
    progress: SampleProgress,
    *,
    time_limit: float,
    stop: StopRequest | None,
) -> T:
    """Return the result of `work`; the coroutines of `background` run concurrently and are cancelled at its end. The
    first exception in any of them cancels the others and is raised.

    Args:
        work: the coroutine to wait for.
        background: coroutines that run until `work` has returned.
        progress: estimates the remaining time, for a stop request.
        time_limit: seconds (`--rollout-timeout`).
        stop: may request to stop; None: never.

    Raises:
        TimeoutError: `work` takes longer than `time_limit`.
        Preempted: a stop was requested, and the remaining samples would take longer than the grace period.
    """
    deadline = asyncio.timeout(time_limit)
    try:
        async with deadline, asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(coroutine) for coroutine in [*background, _watch_stop_request(stop, progress)]]
            result = await work
            for task in others:
                task.cancel()
        return result
    except BaseExceptionGroup as failures:  # the first exception caused the others, or all have the same cause
        errors = list(_flatten_errors(failures))
        raise next((error for error in errors if isinstance(error, Preempted)), errors[0]) from None
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(
                f"only {progress.done} of {progress.total} samples were finished within --rollout-timeout "
                f"{time_limit:g} s: raise it, or use more engines"
            ) from None
        raise


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, even if the calling thread already runs an event loop (in a notebook, or in
    `prefect flow-run retry`): the coroutine then runs in a new thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _watch_stop_request(stop: StopRequest | None, progress: SampleProgress) -> None:
    """Raise Preempted as soon as a stop is requested and the remaining samples would take longer than the grace
    period."""
    while stop is not None:
        await asyncio.sleep(0.1)
        spare = stop.seconds_left - RESERVE
        if stop.requested and (spare <= 0 or progress.seconds_left() > spare):
            raise Preempted(
                f"stop requested with {progress.done} of {progress.total} samples done; "
                "finished groups are in the journal and will be reused when the round restarts"
            )


def _flatten_errors(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten_errors(error)
        else:
            yield error


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the duration of the block in `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
