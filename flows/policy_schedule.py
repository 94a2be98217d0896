"""Decide the order in which training, weight updates, rollouts and evaluations use the policy. A picture is in
docs/design/0027-who-uses-the-policy.md.

Four actions use the policy: a round is trained, a version is sent to engines (published), a rollout is generated, a
version is evaluated. Two bounds order them, both in rounds:

    lead    a rollout starts at most this many rounds ahead of the trainer
    bound   no token is trained more than this many versions after the version that generated it

Synchronous runs have lead 0. --async-buffer-size K and --update-weights-interval N mean lead K and bound K + N - 1.
--async-mode streaming means lead and bound --max-staleness, and weight updates while groups are in flight.

`PolicySchedule` has the state and the rules, without threads: the methods `may_...` and `version_for` are the rules,
and the others change the state. `PolicyTurns` lets a thread wait until a rule allows its action.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from penstock.storage.preemption import Preempted


@dataclass(eq=False)  # pools are compared by identity, not by state
class EngineUse:
    """The use of a pool of engines by rollouts or evaluations. The first user opens the pool at a policy version, and
    others that need the same version join. All of them leave before the pool is opened at another version."""

    version: int | None = None  # policy version at which the pool was opened, or which a stream has loaded since
    serves: bool = False  # whether the engines have loaded `version`, so that others may join
    streams: bool = False  # whether a stream uses the pool: it loads newer versions while it generates
    num_users: int = 0


@dataclass(frozen=True)
class PolicyLimits:
    """What the options of a run say about the use of the policy."""

    lead: int = 0  # rounds by which a rollout may start ahead of the trainer
    bound: int = 0  # versions by which a token may be older than the policy that is trained on it
    interval: int = 1  # number of rounds after which newer weights are due in the engines
    streams: bool = False  # --async-mode streaming
    evaluates_apart: bool = False  # evaluations have their own engines


@dataclass
class PolicySchedule:
    """Which policy versions the trainer and the engines have and what they do, and the rules for what may happen next.
    The trainer has only the newest version (`trained`)."""

    limits: PolicyLimits = PolicyLimits()
    trained: int = 0  # number of trained rounds, which is also the trainer's policy version
    in_engines: int | None = None  # policy version of the engines that generate; None: unknown, or not sent yet
    is_training: bool = False
    num_sending: int = 0  # threads that send the trainer's weights to engines
    is_reserved: bool = False  # the current weights are about to be sent; training, which would replace them, waits
    next_rollout: int | None = None  # round that the thread of rollouts will generate next, set before it waits
    requested: int | None = None  # version that the thread of rollouts must evaluate before its next rollout
    evaluated: int | None = None  # version that is being evaluated while training continues
    rollouts: EngineUse = field(default_factory=EngineUse)
    evaluations: EngineUse = field(default_factory=EngineUse)  # with `evaluates_apart`

    # ---- the rules ---------------------------------------------------------------------------------------------------

    def may_train(self) -> bool:
        """Return whether the next round may be trained: no weights are being sent, and no rollout or evaluation waits
        for the current weights, which training would replace. A stream never waits for weights, because the trainer's
        thread sends them between two rounds."""
        next_needs_weights = self.version_for(self.next_rollout) not in (None, self.in_engines)
        waits = self.is_reserved or self.requested is not None or (next_needs_weights and not self.limits.streams)
        return not (self.is_training or self.num_sending or waits)

    def may_send(self) -> bool:
        """Return whether weights may be sent: only between two rounds, and one send at a time."""
        return not self.is_training and not self.num_sending

    def version_for(self, rollout_id: int | None) -> int | None:
        """Return the version with which a rollout may start now; None if it must wait. If newer weights are due but
        cannot be sent during training, the rollout uses the version in the engines if `bound` permits that, and waits
        otherwise."""
        newest, sent = self.trained, self.in_engines
        if rollout_id is None or rollout_id - newest > self.limits.lead:
            return None
        if sent is not None and newest - newest % self.limits.interval <= sent:
            return sent  # no newer weights are due
        if not self.is_training:
            return newest
        return sent if sent is not None and rollout_id - sent <= self.limits.bound else None

    def may_update_in_flight(self, *, may_skip: bool = True) -> Literal["send", "skip", "wait"]:
        """Return what to do about new weights for engines that generate a stream. The newest weights are sent, unless
        an evaluation on the same engines needs their current version. Then the update waits, or with `may_skip` it is
        skipped if tokens stay within `bound` until the next update."""

        if self.evaluated is not None and not self.limits.evaluates_apart:
            sent = self.in_engines
            is_early = sent is not None and self.trained + self.limits.interval - sent <= self.limits.bound
            return "skip" if sent is None or (is_early and may_skip) else "wait"
        return "send" if self.rollouts.serves and self.in_engines != self.trained else "skip"

    def may_use(self, pool: EngineUse, version: int | None) -> Literal["open", "join", "wait", "never"]:
        """Return how a user may use a pool at a version; None: as a stream, which loads newer versions while it
        generates.

        Returns:
            "open": the pool is unused, so the caller loads the version into it. A stream opens the pool only between
                two rounds of training.
            "join": the engines have the version.
            "wait": they do not have it yet, or the pool is used at another version.
            "never": a stream uses the pool at another version, to which it will not return.
        """
        if pool.num_users == 0:
            return "wait" if version is None and self.is_training else "open"
        if version is None or not (pool.serves or pool.streams):
            return "wait"
        if version != pool.version:
            return "never" if pool.streams else "wait"
        return "join" if pool.serves else "wait"

    # ---- changes of state --------------------------------------------------------------------------------------------

    def begin_rollout(self, rollout_id: int) -> int:
        """Return the version that generates a rollout. If the engines do not have this version, keep training from
        replacing it until it is sent."""
        version = self.version_for(rollout_id)
        assert version is not None, "the rollout must wait"
        self.next_rollout, self.is_reserved = None, version != self.in_engines
        return version

    def take_request(self) -> int | None:
        """Return the version whose evaluation is requested, if any, and clear the request. Keep training from replacing
        this version until it is sent to the engines."""
        version, self.requested = self.requested, None
        self.is_reserved = version is not None
        return version

    def open_pool(self, pool: EngineUse, version: int | None) -> int:
        """Record that a pool is being opened at a version, and return the version. A stream (`version` None) opens the
        pool at the newest version."""
        pool.streams = version is None
        if version is None:
            version, self.is_reserved = self.trained, True
        pool.version, pool.num_users = version, 1
        return version

    def weights_sent(self, pool: EngineUse, version: int) -> None:
        """Record that all engines of a pool have loaded a version."""
        if pool is self.rollouts:
            self.in_engines, self.is_reserved = version, False
        if pool.num_users:
            pool.version, pool.serves = version, True


class PolicyTurns:
    """Makes threads wait until the rules of a `PolicySchedule` allow their actions. All methods are thread-safe. In a
    run with a single thread, no call waits."""

    def __init__(self, schedule: PolicySchedule) -> None:
        self.schedule = schedule
        self.closed = False  # after `close`: `training` and `sending` do not wait, `rollout` and `wait_for_turn` raise
        self._changed = threading.Condition(threading.RLock())

    @contextmanager
    def change(self) -> Iterator[PolicySchedule]:
        """Yield the schedule, to be changed in the block; then wake the threads that wait for a rule."""
        with self._changed:
            yield self.schedule
            self._changed.notify_all()

    def close(self) -> None:
        """Wake the threads that wait in `training` and `sending`, which then do not wait any longer, and in
        `wait_for_turn` and `rollout`, which then raise Preempted."""
        with self.change():
            self.closed = True

    def wait_until(self, reached: Callable[[PolicySchedule], bool], timeout: float | None = None) -> None:
        """Wait until `reached(schedule)` is true, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: reached(self.schedule), timeout)

    @contextmanager
    def training(self, rollout_id: int) -> Iterator[None]:
        """Wait until the next round may be trained; the block trains it."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.schedule.may_train())
            self.schedule.is_training = True
        num_trained = 0  # after a failure it is still 0, so `trained` does not change
        try:
            yield
            num_trained = rollout_id + 1
        finally:
            with self.change() as schedule:
                schedule.is_training, schedule.trained = False, max(schedule.trained, num_trained)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Wait until weights may be sent; the block sends them."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.schedule.may_send())
            self.schedule.num_sending += 1
        try:
            yield
        finally:
            with self.change() as schedule:
                schedule.num_sending -= 1

    def wait_for_turn(self, rollout_id: int | None) -> int | None:
        """Wait until rollout `rollout_id` may start, or until an evaluation is requested before that; with None, after
        the last rollout, only for requests. Return the policy version to evaluate, or None if the rollout may start.
        Raises Preempted after `close`."""
        with self._changed:
            schedule = self.schedule
            self._wait(lambda: schedule.requested is not None or schedule.version_for(rollout_id) is not None)
            return schedule.take_request()

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[int]:
        """Wait until a rollout may start, and yield the policy version with which the block must generate it. Raises
        Preempted after `close`."""
        with self._changed:
            self._wait(lambda: self.schedule.version_for(rollout_id) is not None)
            version = self.schedule.begin_rollout(rollout_id)
            self._changed.notify_all()
        try:
            yield version
        except BaseException:
            # A retry must use the newest version: the trainer may have replaced the older one by now, so restarted
            # engines could not get it.
            self.schedule.in_engines = None
            raise

        finally:
            with self.change() as schedule:
                schedule.is_reserved = False

    @contextmanager
    def using(self, pool: EngineUse, version: int | None) -> Iterator[int | None]:
        """Wait until a pool of engines may be used at a version (None: as a stream); the block uses it. Yields the
        version if the caller opens the pool and must load it into the engines; None if they have it. Raises
        RuntimeError if a stream uses the pool at another version, to which it will not return."""
        with self._changed:
            self._changed.wait_for(lambda: self.schedule.may_use(pool, version) != "wait")
            may = self.schedule.may_use(pool, version)
            if may == "never":
                raise RuntimeError(
                    f"policy version {version} is not in the engines, because the stream of rollouts "
                    f"(--async-mode streaming) has loaded version {pool.version}"
                )
            if may == "join":
                pool.num_users += 1
            opened = self.schedule.open_pool(pool, version) if may == "open" else None
        try:
            yield opened
        finally:
            with self.change() as schedule:
                if opened is not None:
                    pool.serves = False  # from now on no user can join
                    # cancel the reservation of a stream that could not load its weights
                    schedule.is_reserved &= version is not None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: pool.num_users == 1)
                    pool.streams = False
                pool.num_users -= 1

    def _wait(self, reached: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self.closed or reached())
        if self.closed:
            raise Preempted("the run ends")
