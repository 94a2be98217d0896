"""A stage of a run as a Prefect task: named, retried, cancelled on request.

Prefect's own retries of a stage are too few and only seconds apart for a full disk: freeing disk space takes minutes.
So `retry_while_disk_full` retries a stage until there is space.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import StateDetails
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote

from penstock.flows.session import Session
from penstock.flows.terminal.lines import log_context, round_of_task
from penstock.storage.disk import FULL, store_full_error
from penstock.storage.errors import StoreFull
from penstock.storage.preemption import StopRequest

T = TypeVar("T")

RETRY_DELAY_SECONDS = 2
PATIENCE = 900.0  # seconds with a full disk after which the stage fails
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds between retries
# Error messages of a full disk, for exceptions (of libraries or other processes) that lack the errno.
MESSAGES = ("No space left on device", "Disk quota exceeded", "database or disk is full")
Needs = Callable[..., Iterable[Sequence[str]]]


def stage(name: str, *, needs: Needs | None = None, after_save: bool = False) -> Callable[[Callable[..., Any]], Stage]:
    """Return a decorator that turns a function, whose first argument is the session, into a stage.

    `name` of the task run is a format string over the function's arguments. `needs`, a function of the same arguments,
    returns one list of task-run names for each result that this stage uses: on the Prefect page an arrow leads here
    from the first name in each list that this flow run has started. With `after_save` the stage waits for the commit of
    a checkpoint that is being saved in another thread.
    """
    return functools.partial(Stage, name, needs=needs, after_save=after_save)


class Stage:
    """A function whose first argument is a Session, as a Prefect task.

    It does not start after a stop request. A failure is printed and retried. If the disk is full, the stage waits for
    free space before it fails. Results are not persisted: with a cached result a stage would not check
    which policy version the trainer and the engines have.
    """

    def __init__(
        self, name: str, body: Callable[..., Any], *, needs: Needs | None = None, after_save: bool = False
    ) -> None:
        self.body = body
        self.needs = needs
        self.after_save = after_save
        functools.update_wrapper(self, body)

        @functools.wraps(body)
        def attempt(session: Session, *args: Any) -> Any:
            context = TaskRunContext.get()
            assert context is not None
            task_run = context.task_run
            # Later stages pass this state to Prefect, which draws the arrows. It is `Completed` although this stage has
            # only begun: Prefect starts no task that depends on another state, but a rollout may start while the
            # training that it depends on still runs. The waiting is done by `PolicyTurns`.

            details = StateDetails(task_run_id=task_run.id, flow_run_id=task_run.flow_run_id)
            session.started_stages[task_run.name] = Completed(data=True, state_details=details)
            number = round_of_task(task_run.name)
            store = session.run.store
            directories = [store.root] if store.is_local else []
            with log_context(body.__name__, number), session.running_stage(body.__name__, number):
                result = retry_while_disk_full(
                    lambda: body(session, *args), directories, session.stop, session.display.note
                )
            session.stage_results.append(result)
            name, message = session.stage_messages.pop(task_run.id, ("Completed", None))
            return Completed(name=name, message=message, data=result)

        self._task: Task[..., Any] = task(
            name=body.__name__,
            task_run_name=name,
            retry_delay_seconds=exponential_backoff(RETRY_DELAY_SECONDS),
            retry_jitter_factor=0.5,
            # no retry after an invalid request or if the disk stayed full
            retry_condition_fn=lambda task, run, state: not isinstance(state.data, (ValueError, StoreFull)),
            persist_result=False,
            cache_policy=NO_CACHE,
        )(attempt)

    def __call__(self, session: Session, *args: Any) -> Any:
        """Run the stage in this thread, with up to --stage-retries retries."""
        task, states = self._wait_and_configure_task(session, *args)
        return task(session, *map(quote, args), wait_for=states, return_state=True).result()

    def submit(self, session: Session, *args: Any) -> PrefectFuture[Any]:
        """Run the stage in another thread."""
        task, states = self._wait_and_configure_task(session, *args)
        return task.submit(session, *map(quote, args), wait_for=states)

    def _wait_and_configure_task(self, session: Session, *args: Any) -> tuple[Task[..., Any], list[State[Any]]]:
        """Wait for a checkpoint if this stage must. Return the task, and the states of the earlier stages whose results
        the task uses. Callers quote the arguments of the task: otherwise Prefect would also draw arrows from task runs
        that returned an equal string."""
        session.stop.raise_if_requested()
        if self.after_save:
            session.wait_for_checkpoint()
        started = session.started_stages
        inputs = self.needs(session, *args) if self.needs else ()
        states = [state for names in inputs if (state := next(filter(None, map(started.get, names)), None))]
        return self._task.with_options(retries=session.config.run.stage_retries), states


def retry_while_disk_full(
    body: Callable[[], T], directories: Sequence[str], stop: StopRequest, note: Callable[[str], object]
) -> T:
    """Return the result of `body`, a stage that writes to `directories`, retried with backoff while the disk is full.
    `note` prints a message before each wait. Raises StoreFull if the disk is still full after PATIENCE seconds, and
    Preempted after a stop request."""
    start, pause = time.monotonic(), FIRST_PAUSE
    while True:
        attempt_start = time.monotonic()
        try:
            return body()
        except Exception as error:
            full = disk_full_error(error, directories)
            if full is None:
                raise
            if time.monotonic() - attempt_start > PATIENCE:  # the disk had space for a long time: restart the limit
                start, pause = time.monotonic(), FIRST_PAUSE
            left = PATIENCE - (time.monotonic() - start)
            if left <= 0:
                raise full from error
            note(f"{full}; retrying in {pause:.0f} s (for at most {left / 60:.0f} more minutes)")
        stop.wait(pause)
        stop.raise_if_requested()
        pause = min(2 * pause, LONGEST_PAUSE)


def disk_full_error(error: BaseException, directories: Sequence[str] = ()) -> StoreFull | None:
    """Return a StoreFull error with the path of the disk if a full disk caused `error`, else None."""
    cause: BaseException | None = error
    is_full = any(message in str(error) for message in MESSAGES)
    while cause is not None:
        if isinstance(cause, StoreFull):
            return cause
        if isinstance(cause, OSError) and cause.errno in FULL:
            if cause.filename:
                return store_full_error(Path(str(cause.filename)).parent)
            is_full = True
        cause = cause.__cause__ or cause.__context__
    if not is_full:
        return None
    # The path is unknown: take the directory with the least free space.
    existing = filter(os.path.isdir, (*directories, tempfile.gettempdir()))
    return store_full_error(min(existing, key=lambda directory: shutil.disk_usage(directory).free))
