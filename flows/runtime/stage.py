"""A stage of a run as a Prefect task: named, retried, cancelled on request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.tasks import exponential_backoff

from penstock.flows.runtime.disk_space import retry_while_disk_full
from penstock.flows.runtime.session import Session
from penstock.storage.errors import StoreFull

RETRY_DELAY_SECONDS = 2


def stage(name: str, *, after_save: bool = False) -> Callable[[Callable[..., Any]], Stage]:
    """Return a decorator that turns a function, whose first argument is the session, into a stage.

    Args:
        name: name of the task run, a format string over the function's arguments.
        after_save: if a checkpoint is being saved in another thread, wait for its commit before the start.
    """
    return functools.partial(Stage, name, after_save=after_save)


class Stage:
    """A function whose first argument is a Session, as a Prefect task.

    It does not start after a stop request. A failure is printed and retried. If the disk is full, the stage waits for
    free space (disk_space.py) before it fails. Results are not persisted: with a cached result a stage would not check
    which policy version the trainer and the engines have.
    """

    def __init__(self, name: str, body: Callable[..., Any], *, after_save: bool = False) -> None:
        self.body = body
        self.after_save = after_save
        functools.update_wrapper(self, body)

        @functools.wraps(body)
        def attempt(session: Session, *args: Any) -> Any:
            try:
                return retry_while_disk_full(
                    lambda: body(session, *args), session.local_directories, session.stop, session.display.note
                )
            except BaseException as error:
                session.report_failure(body.__name__, error)
                raise

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
        return self._wait_and_configure_task(session)(session, *args)

    def submit(self, session: Session, *args: Any) -> PrefectFuture[Any]:
        """Run the stage in another thread."""
        return self._wait_and_configure_task(session).submit(session, *args)

    def _wait_and_configure_task(self, session: Session) -> Task[..., Any]:
        session.stop.raise_if_requested()
        if self.after_save:
            session.wait_for_checkpoint()
        return self._task.with_options(retries=session.config.run.stage_retries)
