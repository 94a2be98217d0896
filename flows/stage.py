"""A stage of a run as a Prefect task: named, retried, cancelled on request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import StateDetails
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote

from penstock.flows.runtime.disk_space import retry_while_disk_full
from penstock.flows.session import Session
from penstock.flows.terminal.lines import log_context, round_of_task
from penstock.storage.errors import StoreFull

RETRY_DELAY_SECONDS = 2
Needs = Callable[..., Iterable[Sequence[str]]]


def stage(name: str, *, needs: Needs | None = None, after_save: bool = False) -> Callable[[Callable[..., Any]], Stage]:
    """Return a decorator that turns a function, whose first argument is the session, into a stage.

    Args:
        name: name of the task run, a format string over the function's arguments.
        needs: function of the same arguments that returns which stages' results this one uses, for the arrows on the
            Prefect page: for each input the names of task runs, of which the first that this flow run has started
            counts.
        after_save: if a checkpoint is being saved in another thread, wait for its commit before the start.
    """
    return functools.partial(Stage, name, needs=needs, after_save=after_save)


class Stage:
    """A function whose first argument is a Session, as a Prefect task.

    It does not start after a stop request. A failure is printed and retried. If the disk is full, the stage waits for
    free space (disk_space.py) before it fails. Results are not persisted: with a cached result a stage would not check
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
            # For the arrows from this stage. `Completed`, because our own code does all waiting: a rollout may be
            # started while the round that it waits for is still being trained.
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
            return Completed(message=session.stage_messages.pop(task_run.id, None), data=result)

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
        """Return the task and the states of the stages whose results it uses. The arguments are quoted: otherwise
        Prefect would draw arrows from earlier task runs with equal strings in their results."""
        session.stop.raise_if_requested()
        if self.after_save:
            session.wait_for_checkpoint()
        started = session.started_stages
        inputs = self.needs(session, *args) if self.needs else ()
        states = [state for names in inputs if (state := next(filter(None, map(started.get, names)), None))]
        return self._task.with_options(retries=session.config.run.stage_retries), states
