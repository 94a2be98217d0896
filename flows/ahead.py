"""The rollouts of a run, in order: generated when the trainer asks for them, or ahead of it by a second thread."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.flows import tasks
from penstock.flows.runtime.display import ProgressCallback
from penstock.flows.runtime.session import Session
from penstock.storage.commit import Commit, RolloutRef
from penstock.storage.preemption import Preempted

if TYPE_CHECKING:
    from penstock.stages.rollout.stream import RolloutStream

END_TIMEOUT = 60.0  # seconds for the thread to end after a failure; a rollout is cancelled within a second


def rollouts(session: Session) -> AbstractContextManager[Callable[[int], RolloutRef]]:
    """Return a context manager that yields a function: number of a round -> its committed rollout, to be called in the
    order of the rounds. With --async-buffer-size or --async-mode streaming, rollouts are generated ahead of these
    calls."""
    run = session.config.run
    session.processes.turns.num_trained = session.num_trained_rounds()
    if run.debug_train_only or not run.generates_ahead:
        return nullcontext(partial(tasks.rollout, session))
    return StreamedRollouts(session) if run.streams else RolloutsAhead(session)


class RolloutsAhead:
    """Generates the remaining rollouts and evaluates policies in a thread; `Turns` decides when.

    A context manager that yields `get`. Its end ends the thread. If the block raised an exception, a rollout that is
    being generated is cancelled; its finished groups are in the journal.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.turns = session.processes.turns
        self._finished: dict[int, RolloutRef] = {}  # number of a round -> its rollout
        self._engine_idle: dict[int, dict[str, float]] = {}  # number of a round -> metrics of the wait before it
        self._last_get = time.perf_counter()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        flow_run = contextvars.copy_context()  # the thread's tasks belong to this flow run
        self._thread = threading.Thread(target=flow_run.run, args=(self._run,), name="rollouts", daemon=True)

    def __enter__(self) -> Callable[[int], RolloutRef]:
        self._thread.start()
        return self.get

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turns.close()
        if error is not None:
            self.session.wait_for_checkpoint_until_deadline()
            self.session.stop.request(grace_seconds=0.0)
        self._thread.join(None if error is None else END_TIMEOUT)
        if error is None and self._failure is not None:
            raise self._failure

    def get(self, rollout_id: int) -> RolloutRef:
        """Wait until rollout `rollout_id` is committed. Raises the exception with which the thread failed."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: rollout_id in self._finished or self._failure is not None)
            if rollout_id not in self._finished:
                assert self._failure is not None
                raise self._failure
            rollout, depth = self._finished.pop(rollout_id), len(self._finished)
        end = time.perf_counter()
        cycle, self._last_get = end - self._last_get, end
        metrics = {"perf/train_wait_time": end - start, "perf/wait_time_ratio": (end - start) / cycle}
        metrics |= {"rollout/queue_depth": float(depth)} | self._engine_idle.pop(rollout_id, {})
        if rollout_id >= self.turns.num_trained:
            self.session.record_overlap(rollout_id, metrics)
        return rollout

    def _run(self) -> None:
        try:
            self._generate()
        except BaseException as error:
            if not (isinstance(error, Preempted) and self.turns.closed):
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
            self.turns.close()

    def _generate(self) -> None:
        first, end = max(0, self.session.num_trained_rounds() - 1), self.session.num_rounds
        for r in range(first, end):
            start = time.perf_counter()
            self._evaluate_until_turn(r)
            is_new = self.session.needs_rollout(r)
            rollout = tasks.rollout(self.session, r)
            if is_new:
                generating = self.session.read_existing_commit(self.session.keys.rollout_prefix(r)).seconds["generate"]
                idle = 1 - (generating + self._evaluation_seconds) / (time.perf_counter() - start)
                self._engine_idle[r] = {"perf/engine_idle_ratio": max(0.0, idle)}
            self.turns.set_next(r + 1 if r + 1 < end else None)  # first, so that its turn comes before the trainer's
            self._hand_over(r, rollout)
        self._evaluate_until_turn(None)

    def _hand_over(self, rollout_id: int, rollout: RolloutRef) -> None:
        with self._changed:
            self._finished[rollout_id] = rollout
            self._changed.notify_all()

    def _evaluate_until_turn(self, rollout_id: int | None) -> None:
        """Wait until rollout `rollout_id` may start, and before that run the evaluations that are requested."""
        self._evaluation_seconds = 0.0
        while (version := self.turns.wait_for_turn(rollout_id)) is not None:
            start = time.perf_counter()
            self.turns.begin_evaluation()
            try:
                tasks.evaluate_or_postpone(self.session, version)
            finally:
                self.turns.end_turn()
            self._evaluation_seconds += time.perf_counter() - start


class StreamedRollouts(RolloutsAhead):
    """Takes the remaining rollouts from a stream of groups that are generated without a pause."""

    def _generate(self) -> None:
        first, end = max(0, self.session.num_trained_rounds() - 1), self.session.num_rounds
        rollout = None
        with closing(StreamOfRun(self.session)) as stream:
            for r in range(first, end):
                if rollout is not None:
                    self._hand_over(r - 1, rollout)
                rollout = tasks.take_rollout(self.session, r, stream.run_round)
        if rollout is not None:
            self._hand_over(end - 1, rollout)  # after the stream, because the engines must be free for the evaluation


class StreamOfRun:
    """The stream of groups of a run. It is started by the first round, and again by the next one after a failure or
    after a round that another driver of the run has committed: an old one that was presumed dead, or its successor."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._stream: RolloutStream | None = None
        self._report: ProgressCallback = lambda done, total: None

    def run_round(self, rollout_id: int) -> Commit:
        """Commit the next round, and return its commit; see `RolloutStream.run_round`."""
        from penstock.stages.rollout.stream import LostRound

        with self.session.display.progress(f"rollout, round {rollout_id}: groups", "rollout") as self._report:
            try:
                if self._stream is not None and self._stream.round.rollout_id != rollout_id:
                    self.close()  # another driver has committed the rounds in between
                if self._stream is None:
                    self._stream = self._open(rollout_id)
                    self._stream.start()
                return self._stream.run_round(rollout_id)
            except LostRound:
                self.close()
                self.session.display.note(
                    f"another driver of this run has committed round {rollout_id}; the groups in flight are discarded "
                    "and the next round continues from its commit"
                )
                return self.session.read_existing_commit(self.session.keys.rollout_prefix(rollout_id))
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Cancel the groups in flight. The next round starts them again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self, rollout_id: int) -> RolloutStream:
        from penstock.stages.rollout.prompts.data_source import RolloutRound
        from penstock.stages.rollout.resume_point import read_resume_point
        from penstock.stages.rollout.stream import RolloutStream

        session, turns = self.session, self.session.processes.turns
        return RolloutStream(
            tasks.rollout_context(session, list, on_progress=lambda done, total: self._report(done, total)),
            session.processes.engines_for_stream,
            session.keys.rollout_prefix,
            RolloutRound(
                session.keys.run,
                rollout_id,
                policy_version=turns.num_trained,
                max_staleness=session.config.run.max_staleness,
                updates_in_flight=True,
            ),
            read_resume_point(session.store, session.keys, rollout_id),
            num_rounds=session.num_rounds,
            engine_version=lambda: turns.num_trained if turns.engine_version is None else turns.engine_version,
        )
