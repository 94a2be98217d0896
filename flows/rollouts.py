"""The rollouts of a run, in order: generated when the trainer needs them, or ahead of the trainer by a second
thread."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from penstock.flows import tasks
from penstock.flows.reporting.observer import Observer
from penstock.flows.runtime.display import ProgressCallback
from penstock.flows.session import Session
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.rollout import read_resume_point, rollout_stage
from penstock.stages.rollout.stream import LostRound, RolloutStream
from penstock.storage.commit import Commit, RolloutRef
from penstock.storage.preemption import Preempted

END_TIMEOUT = 60.0  # seconds for the thread to end after a failure; a rollout is cancelled within a second


@contextmanager
def rollouts(session: Session) -> Iterator[Callable[[int], RolloutRef]]:
    """Yield a function: number of a round -> its committed rollout, to be called in the order of the rounds. With
    --async-buffer-size or --async-mode streaming, a thread generates rollouts ahead of these calls. The thread is ended
    after the block. If the block raised an exception, a rollout that is being generated is cancelled; the journal keeps
    its finished groups for the next start."""
    run, turns = session.config.run, session.engines.turns
    turns.schedule.trained = session.run.num_trained_rounds()
    if run.debug_train_only or not run.generates_ahead:
        yield lambda rollout_id: tasks.rollout(session, rollout_id, RoundSource(session).generate)
        return
    ahead = RolloutsAhead(session, StreamSource(session) if run.streams else RoundSource(session))
    flow_run = contextvars.copy_context()  # the thread's tasks belong to this flow run
    thread = threading.Thread(target=flow_run.run, args=(ahead.run,), name="rollouts", daemon=True)
    thread.start()
    try:
        yield ahead.get
    except BaseException:
        turns.close()
        session.wait_for_checkpoint_until_deadline()
        session.stop.request(grace_seconds=0.0)
        thread.join(END_TIMEOUT)
        raise
    turns.close()
    thread.join()
    if ahead.failure is not None:
        raise ahead.failure


class RolloutsAhead:
    """Generates the remaining rollouts, and evaluates policies in between, when `PolicySchedule` allows it. A thread of
    its own executes `run`; the trainer's thread takes the rollouts with `get`."""

    def __init__(self, session: Session, source: RoundSource) -> None:
        self.session = session
        self.source = source
        self.turns = session.engines.turns
        self.failure: BaseException | None = None  # exception that ended the thread
        self._finished: dict[int, RolloutRef] = {}  # number of a round -> its rollout
        self._engine_idle: dict[int, dict[str, float]] = {}  # number of a round -> metric of the engines' idle time
        self._last_get = time.perf_counter()
        self._changed = threading.Condition()

    def get(self, rollout_id: int) -> RolloutRef:
        """Wait until rollout `rollout_id` is committed, and return it. Raises the exception that ended the thread."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: rollout_id in self._finished or self.failure is not None)
            if rollout_id not in self._finished:
                assert self.failure is not None
                raise self.failure
            rollout, depth = self._finished.pop(rollout_id), len(self._finished)
        end = time.perf_counter()
        cycle, self._last_get = end - self._last_get, end
        metrics = {"perf/train_wait_time": end - start, "perf/wait_time_ratio": (end - start) / cycle}
        metrics |= {"rollout/queue_depth": float(depth)} | self._engine_idle.pop(rollout_id, {})
        if rollout_id >= self.turns.schedule.trained:
            self.session.observers.tell(Observer.on_overlap, rollout_id, metrics)
        return rollout

    def run(self) -> None:
        """Generate all rollouts. An exception ends the thread and is raised by `get`."""
        try:
            with closing(self.source):
                self._generate()
        except BaseException as error:
            if not (isinstance(error, Preempted) and self.turns.closed):
                with self._changed:
                    self.failure = error
                    self._changed.notify_all()
            self.turns.close()

    def _generate(self) -> None:
        session, end = self.session, self.session.run.num_rounds
        for r in range(max(0, session.run.num_trained_rounds() - 1), end):
            start = time.perf_counter()
            evaluation_seconds = self._evaluate_until_turn(r)
            is_new = session.run.needs_rollout(r)
            rollout = tasks.rollout(session, r, self.source.generate)
            if is_new and not session.config.run.streams:
                generating = session.run.read_commit(session.run.keys.rollout_prefix(r)).seconds["generate"]
                idle = 1 - (generating + evaluation_seconds) / (time.perf_counter() - start)
                self._engine_idle[r] = {"perf/engine_idle_ratio": max(0.0, idle)}
            if r + 1 == end:
                self.source.close()  # first, because the engines must be free for the evaluation
            # Set before `get` returns this rollout: if the next rollout needs the current weights, the trainer must not
            # replace them first.
            with self.turns.change() as schedule:
                schedule.next_rollout = r + 1 if r + 1 < end else None
            with self._changed:
                self._finished[r] = rollout
                self._changed.notify_all()
        self._evaluate_until_turn(None)

    def _evaluate_until_turn(self, rollout_id: int | None) -> float:
        """Wait until rollout `rollout_id` may start (None: until `close`), and run the evaluations that are requested
        until then. Return the seconds that the evaluations took."""
        seconds = 0.0
        while (version := self.turns.wait_for_turn(rollout_id)) is not None:
            start = time.perf_counter()
            try:
                tasks.evaluate_or_postpone(self.session, version)
            finally:
                with self.turns.change() as schedule:
                    schedule.is_reserved = False
            seconds += time.perf_counter() - start
        return seconds


class RoundSource:
    """Generates one round at a time."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def generate(self, rollout_id: int) -> Commit:
        """Generate and commit round `rollout_id`, and return its commit."""
        session, run = self.session, self.session.run
        with (
            session.display.progress(f"rollout, round {rollout_id}: samples", "rollout") as report,
            session.engines.turns.rollout(rollout_id) as version,
            session.engines.at(version, rewind=False) as engines,
        ):
            limit = session.engines.turns.schedule.limits.bound
            return rollout_stage(
                tasks.generation_context(session, engines, report),
                run.keys.rollout_prefix(rollout_id),
                RolloutRound(run.keys.run, rollout_id, policy_version=version, max_staleness=limit),
                read_resume_point(run.store, run.keys, rollout_id),
            )

    def close(self) -> None:
        """Do nothing, because nothing is generated between two rounds."""


class StreamSource(RoundSource):
    """Takes rounds from a stream of groups that are generated without a pause. The first round starts the stream. After
    a failure, and after another driver of the run has committed a round, the next round starts a new stream."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._stream: RolloutStream | None = None
        self._report: ProgressCallback = lambda done, total: None  # shows the progress of the current round

    def generate(self, rollout_id: int) -> Commit:
        """Commit the next groups of the stream as round `rollout_id`, and return the commit."""
        session = self.session
        with session.display.progress(f"rollout, round {rollout_id}: groups", "rollout") as self._report:
            try:
                if self._stream is not None and self._stream.round.rollout_id != rollout_id:
                    self.close()  # another driver has committed the rounds in between
                if self._stream is None:
                    self._stream = self.open(rollout_id)
                    self._stream.start()
                return self._stream.run_round(rollout_id)
            except LostRound:
                self.close()
                session.display.note(
                    f"another driver of this run has committed round {rollout_id}; the groups in flight are discarded "
                    "and the next round continues from its commit"
                )
                return session.run.read_commit(session.run.keys.rollout_prefix(rollout_id))
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Cancel the groups in flight. If there is a next round, it generates them again."""

        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def open(self, rollout_id: int) -> RolloutStream:
        """Return a stream that begins with round `rollout_id`."""
        session, run, schedule = self.session, self.session.run, self.session.engines.turns.schedule
        return RolloutStream(
            tasks.generation_context(session, list, lambda done, total: self._report(done, total)),
            session.engines.for_stream,
            run.keys.rollout_prefix,
            RolloutRound(
                run.keys.run,
                rollout_id,
                policy_version=schedule.trained,
                max_staleness=schedule.limits.bound,
                updates_in_flight=True,
            ),
            read_resume_point(run.store, run.keys, rollout_id),
            num_rounds=run.num_rounds,
            engine_version=lambda: schedule.trained if schedule.in_engines is None else schedule.in_engines,
        )
