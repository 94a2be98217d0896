"""The trainer and the engines take turns with the policy: when a rollout may start, and when weights may be sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.storage.preemption import Preempted


class Turns:
    """Coordinates one thread that trains with one that generates. Without a second thread, no call waits.

    The trainer has only the newest policy version, so weights are sent between two rounds of training. The engines get
    them between two rollouts. The generating thread goes first if both could continue. All methods are thread-safe.

    Args:
        max_ahead: number of rollouts that may be generated ahead of the trainer (`--async-buffer-size`, K).
        interval: weights are sent after every `interval` rounds (`--update-weights-interval`, N). Then no rollout is
            trained more than K + N - 1 rounds after the policy version that generated it.
    """

    def __init__(self, max_ahead: int = 0, interval: int = 1) -> None:
        self.max_ahead = max_ahead
        self.interval = interval
        self.num_trained = 0  # rounds, which is also the trainer's policy version
        self.engine_version: int | None = None  # None before the first weights of this start
        self._training = False
        self._num_sending = 0  # threads that send weights
        self._has_turn = False  # whether the generating thread is about to send weights
        self._next: int | None = None  # rollout that the generating thread starts next
        self._evaluation: int | None = None  # policy version that it evaluates before
        self.is_evaluating = False  # whether a policy is evaluated while rollouts are generated
        self._closed = False
        self._changed = threading.Condition()

    # ---- the trainer's side ------------------------------------------------------------------------------------------

    @contextmanager
    def training(self, rollout_id: int) -> Iterator[None]:
        """Train round `rollout_id` in the block; wait before it until the generating thread has used its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._weights_are_needed())
            self._training = True
        try:
            yield
            self.num_trained = max(self.num_trained, rollout_id + 1)
        finally:
            with self._changed:
                self._training = False
                self._changed.notify_all()

    def _weights_are_needed(self) -> bool:
        """Return whether the generating thread sends the trainer's weights now, or would if it ran."""
        may_start = self._version_for(self._next) not in (None, self.engine_version)
        return bool(self._num_sending) or self._has_turn or self._evaluation is not None or may_start

    def request_evaluation(self, version: int) -> None:
        """Make the generating thread evaluate policy `version`, the trainer's, before its next rollout. The trainer
        continues when the engines have these weights."""
        with self._changed:
            self._evaluation = version
            self._changed.notify_all()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send weights in the block; wait before it until no round is being trained."""
        with self._changed:
            self._num_sending += 1
            self._changed.wait_for(lambda: self._closed or not self._training)
        try:
            yield
        finally:
            with self._changed:
                self._num_sending -= 1
                self._changed.notify_all()

    def begin_evaluation(self) -> None:
        """Record that the policy in the engines is evaluated, while rollouts are generated with it."""
        self.is_evaluating = True

    def end_evaluation(self) -> None:
        """Record that this evaluation has ended."""
        with self._changed:
            self.is_evaluating = False
            self._changed.notify_all()

    def wait_for_evaluation(self, timeout: float | None = None) -> None:
        """Wait until no policy is evaluated while rollouts are generated, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_evaluating, timeout)

    # ---- the engines' side -------------------------------------------------------------------------------------------

    def set_next(self, rollout_id: int | None) -> None:
        """Announce which rollout the calling thread starts next; None: none."""
        with self._changed:
            self._next = rollout_id
            self._changed.notify_all()

    def wait_for_turn(self, rollout_id: int | None) -> int | None:
        """Wait until rollout `rollout_id` may start, and return None; or until an evaluation is requested, and return
        the policy version to evaluate. The trainer starts no round before `weights_sent` or `end_turn`.

        Raises:
            Preempted: `close` was called.
        """
        with self._changed:
            self._wait_until(lambda: self._evaluation is not None or self._version_for(rollout_id) is not None)
            version, self._evaluation = self._evaluation, None
            self._has_turn = version is not None
            return version

    def begin_rollout(self, rollout_id: int) -> int:
        """Wait until rollout `rollout_id` may start, and return the policy version that generates it. If it is not that
        of the engines, the trainer starts no round before `weights_sent` or `end_turn`.

        Raises:
            Preempted: `close` was called.
        """
        with self._changed:
            self._wait_until(lambda: self._version_for(rollout_id) is not None)
            version = self._version_for(rollout_id)
            assert version is not None
            self._next, self._has_turn = None, version != self.engine_version
            self._changed.notify_all()
            return version

    def weights_sent(self, version: int) -> None:
        """Record that the engines have policy `version`, and let the trainer continue."""
        self.engine_version = version
        self.end_turn()

    def forget_weights(self) -> None:
        """Record that the weights in the engines are unknown: the next rollout gets the newest ones."""
        self.engine_version = None

    def end_turn(self) -> None:
        """Let the trainer continue."""
        with self._changed:
            self._has_turn = False
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End all waiting: of the trainer's side by returning, of the engines' side by Preempted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _version_for(self, rollout_id: int | None) -> int | None:
        """Return the policy version with which a rollout may start now; None if it must wait."""
        newest, sent = self.num_trained, self.engine_version
        if rollout_id is None or rollout_id - newest > self.max_ahead:
            return None
        if sent is not None and newest - newest % self.interval <= sent:
            return sent  # no newer weights are due
        if not self._training:
            return newest
        return sent if sent is not None and rollout_id - sent < self.max_ahead + self.interval else None

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or condition())
        if self._closed:
            raise Preempted("the run ends")
