"""Run the coroutines of a round until it completes, a coroutine fails, time runs out or a stop is requested."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.storage.preemption import Preempted, StopRequest

RESERVE = 2.0  # seconds of a preemption's grace period that are reserved for writing the journal and exiting

T = TypeVar("T")


class SampleProgress:
    """Counts the finished samples of a round and estimates the time until all its samples are finished."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.total = total
        self.done = 0
        self._on_progress = on_progress
        self._start = time.monotonic()

    def add(self, count: int) -> None:
        """Record that `count` further samples are finished, and report the progress."""
        self.done += count
        if self._on_progress is not None:
            self._on_progress(self.done, self.total)

    def seconds_left(self) -> float:
        """Return the estimated seconds until all samples are finished; 0 before the first sample is finished."""
        return (time.monotonic() - self._start) * (self.total - self.done) / self.done if self.done else 0.0


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

    Args:
        progress: estimates whether `work` would finish within the grace period of a stop request.
        time_limit: maximum seconds for `work` (`--rollout-timeout`).

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
        which formats it with its result. Twice for each round: 1.3 s for 512 samples of 1,024 tokens."""
        results.append(await coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(store_result())
    else:
        with ThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(asyncio.run, store_result()).result()
    return results[0]


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


def flatten_errors(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the exceptions of a group, also of groups inside it."""
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from flatten_errors(error)
        else:
            yield error


@contextmanager
def record_seconds(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the duration of the `with` block in `seconds[name]`, in seconds."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
