"""When the generating thread of `Turns` may start a rollout, and when weights may be sent. The threads of these tests
follow flows/ahead.py and flows/runtime/processes.py, with random pauses instead of a trainer and engines."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.flows.turns import Turns
from penstock.storage.preemption import Preempted

HANG = 60.0  # seconds; only a deadlock exceeds it
LONGEST_PAUSE = 0.002  # seconds
EVALUATION = -1  # rollout id of an evaluation in `Run.events`


class EngineFailure(Exception):
    """A rollout failed; the stage is retried."""


@dataclass
class Run:
    """A run of `num_rounds` rounds, one thread that trains and one that generates.

    Args:
        seed: of the pauses and failures.
        evaluated: policy versions that are evaluated after their training.
        failures: share of the rollouts that fail and are retried.
    """

    max_ahead: int
    interval: int
    num_rounds: int
    seed: int
    evaluated: frozenset[int] = frozenset()
    failures: float = 0.0
    events: list[tuple[str, int, int]] = field(default_factory=list)  # (event, round, policy version)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(self.max_ahead, self.interval)
        self.trainer_version = 0
        self.engine_version: int | None = None
        self._finished: set[int] = set()
        self._is_training = self._is_sending = False
        self._changed = threading.Condition()

    def execute(self) -> dict[int, int]:
        """Run both threads to their end. Return round -> policy version that generated its rollout."""
        generating = start(self._generate_all, self.problems)
        training = start(self._train_all, self.problems)
        join(training)
        self.turns.close()
        join(generating)
        assert not self.problems, self.problems
        return {rollout_id: version for event, rollout_id, version in self.events if event == "generated"}

    def _train_all(self) -> None:
        pauses = random.Random(self.seed)
        for r in range(self.num_rounds):
            with self._changed:
                assert self._changed.wait_for(lambda r=r: r in self._finished, HANG), f"rollout {r} is missing"
            with self.turns.training(r):
                self._is_training = True
                self._check(not self._is_sending, f"round {r} was trained while weights were sent")
                pause(pauses)
                self.trainer_version = r + 1
                self.events.append(("trained", r, r + 1))
                self._check(not self._is_sending, f"weights were sent while round {r} was trained")
                self._is_training = False
            if r + 1 in self.evaluated:
                self.turns.request_evaluation(r + 1)
            pause(pauses)

    def _generate_all(self) -> None:
        chance = random.Random(self.seed + 1)
        for r in range(self.num_rounds):
            self._evaluate_until_turn(r, chance)
            while not self._generate(r, chance):
                pause(chance)  # the stage is retried
            self.turns.set_next(r + 1 if r + 1 < self.num_rounds else None)
            with self._changed:
                self._finished.add(r)
                self._changed.notify_all()
        try:
            self._evaluate_until_turn(None, chance)
        except Preempted:
            self.events.append(("closed", self.num_rounds, self.trainer_version))

    def _evaluate_until_turn(self, rollout_id: int | None, chance: random.Random) -> None:
        while (version := self.turns.wait_for_turn(rollout_id)) is not None:
            self._send(version, chance)
            self.events.append(("evaluated", EVALUATION, version))
            pause(chance)
            self._check(self.engine_version == version, f"version {version} was replaced during its evaluation")
            self.turns.end_turn()

    def _generate(self, rollout_id: int, chance: random.Random) -> bool:
        version = self.turns.begin_rollout(rollout_id)
        try:
            self._send(version, chance)
            pause(chance)
            if chance.random() < self.failures:
                raise EngineFailure
            self._check(self.engine_version == version, f"the engines got other weights during rollout {rollout_id}")
            self.events.append(("generated", rollout_id, version))
            return True
        except EngineFailure:
            self.turns.forget_weights()
            self.engine_version = None
            return False
        finally:
            self.turns.end_turn()

    def _send(self, version: int, chance: random.Random) -> None:
        if self.engine_version != version:
            pause(chance)
            with self.turns.sending():
                self._is_sending = True
                self._check(not self._is_training, f"version {version} was sent while a round was trained")
                newest = self.trainer_version
                self._check(newest == version, f"version {version} was needed, but the trainer has version {newest}")
                pause(chance)
                self.engine_version, self._is_sending = version, False
        self.turns.weights_sent(version)

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def start(target: Callable[[], object], problems: list[str]) -> threading.Thread:
    """Run `target` in a thread; append its exception to `problems`."""

    def call() -> None:
        try:
            target()
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(HANG)
    assert not thread.is_alive(), "deadlock"


def pause(chance: random.Random) -> None:
    """Let other threads run for a random time, often not at all."""
    if chance.random() < 0.7:
        time.sleep(chance.random() * LONGEST_PAUSE)


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not reached():
        assert time.monotonic() < deadline, "deadlock"
        time.sleep(0.001)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("max_ahead", [0, 1, 2, 5])
def test_no_rollout_is_trained_beyond_its_staleness(max_ahead: int, interval: int, seed: int) -> None:
    versions = Run(max_ahead, interval, 30, seed, failures=0.1 * (seed % 2)).execute()
    assert list(versions) == list(range(30))
    for rollout_id, version in versions.items():
        assert 0 <= rollout_id - version <= max_ahead + interval - 1


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_without_rollouts_ahead_generation_and_training_alternate(interval: int) -> None:
    run = Run(0, interval, 12, seed=5)
    versions = run.execute()
    assert versions == {r: r - r % interval for r in range(12)}
    assert [event[:2] for event in run.events[:-1]] == [
        (event, r) for r in range(12) for event in ("generated", "trained")
    ]


@pytest.mark.parametrize("seed", range(5))
def test_one_rollout_ahead_has_the_same_policies_at_any_speed(seed: int) -> None:
    """The thread that generates goes first when both could continue."""
    assert Run(1, 1, 20, seed).execute() == {r: max(0, r - 1) for r in range(20)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_ahead", "interval"), [(0, 1), (1, 1), (3, 1), (1, 3), (2, 2)])
def test_a_requested_version_is_evaluated_before_newer_rollouts(max_ahead: int, interval: int, seed: int) -> None:
    evaluated = frozenset(random.Random(seed).sample(range(1, 21), 6))
    run = Run(max_ahead, interval, 20, seed, evaluated, failures=0.1)
    versions = run.execute()
    assert [version for event, _, version in run.events if event == "evaluated"] == sorted(evaluated)
    assert all(0 <= r - version <= max_ahead + interval - 1 for r, version in versions.items())
    trained = 0
    for event, _, version in run.events:
        if event == "evaluated":
            assert version == trained, "the trainer has started no round after the evaluated policy"
        trained = version if event == "trained" else trained


@pytest.mark.parametrize(("max_ahead", "interval"), [(1, 1), (3, 1), (2, 2)])
def test_queue_fills_while_a_round_is_trained_and_no_further(max_ahead: int, interval: int) -> None:
    turns, generated, problems = Turns(max_ahead, interval), [], list[str]()

    def generate() -> None:
        for r in range(20):
            assert turns.wait_for_turn(r) is None
            version = turns.begin_rollout(r)
            turns.weights_sent(version)
            generated.append((r, version))
            turns.set_next(r + 1)

    thread = start(generate, problems)
    wait_until(lambda: len(generated) > max_ahead)
    with turns.training(0):
        time.sleep(0.02)
        assert generated == [(r, 0) for r in range(max_ahead + 1)], "K rollouts are ahead of round 0"
    wait_until(lambda: len(generated) == max_ahead + 2)
    turns.close()
    join(thread)
    assert generated[-1] == (max_ahead + 1, 1 if interval == 1 else 0)
    assert problems == ["Preempted: the run ends"]


def test_weights_wait_for_the_end_of_a_round_and_rounds_for_the_end_of_sending() -> None:
    turns, order, problems = Turns(max_ahead=2), [], list[str]()

    def send() -> None:
        with turns.sending():
            order.append("sent")

    def train() -> None:
        with turns.training(1):
            order.append("trained 1")

    with turns.training(0):
        sender = start(send, problems)
        time.sleep(0.01)
        order.append("trained 0")
    join(sender)
    with turns.sending():
        trainer = start(train, problems)
        time.sleep(0.01)
        order.append("sent again")
    join(trainer)
    assert order == ["trained 0", "sent", "sent again", "trained 1"] and not problems


def test_failed_round_does_not_count_as_trained() -> None:
    turns = Turns(max_ahead=1)
    with pytest.raises(EngineFailure), turns.training(0):
        raise EngineFailure
    assert turns.num_trained == 0
    with turns.sending(), turns.sending():
        pass  # the failed round has ended


def test_round_that_was_trained_before_the_start_does_not_lower_the_version() -> None:
    turns = Turns()
    turns.num_trained = 7
    with turns.training(6):  # `Session.remaining_rounds` begins with the last trained round
        pass
    assert turns.num_trained == 7
    assert turns.begin_rollout(7) == 7


def test_next_rollout_gets_the_newest_weights_after_a_failure() -> None:
    turns = Turns(max_ahead=3, interval=3)
    assert turns.begin_rollout(0) == 0
    turns.weights_sent(0)
    with turns.training(0):
        assert turns.begin_rollout(1) == 0
    assert turns.begin_rollout(2) == 0, "version 1 is not due yet"
    turns.forget_weights()
    assert turns.begin_rollout(2) == 1


def begin_rollout_after_failure(turns: Turns) -> None:
    turns.forget_weights()
    turns.begin_rollout(0)


@pytest.mark.parametrize(
    "wait",
    [lambda turns: turns.wait_for_turn(9), lambda turns: turns.wait_for_turn(None), begin_rollout_after_failure],
    ids=["turn", "evaluation", "rollout"],
)
def test_close_ends_waiting_of_the_generating_thread_with_preempted(wait: Callable[[Turns], object]) -> None:
    turns, problems = Turns(max_ahead=1), list[str]()
    with turns.training(0):
        thread = start(lambda: wait(turns), problems)
        time.sleep(0.01)
        assert thread.is_alive(), "it waits"
        turns.close()
        join(thread)
    assert problems == ["Preempted: the run ends"] and turns.closed


def test_close_ends_waiting_of_the_training_thread() -> None:
    turns, trained, problems = Turns(max_ahead=1), [], list[str]()

    def train() -> None:
        with turns.training(0):
            trained.append(0)

    turns.request_evaluation(0)  # nobody evaluates it
    thread = start(train, problems)
    time.sleep(0.01)
    assert thread.is_alive() and not trained, "it waits"
    turns.close()
    join(thread)
    assert trained == [0] and not problems


def test_close_ends_waiting_of_a_thread_that_sends() -> None:
    turns, problems = Turns(), list[str]()

    def send() -> None:
        with turns.sending():
            pass

    with turns.training(0):
        thread = start(send, problems)
        time.sleep(0.01)
        assert thread.is_alive(), "it waits"
        turns.close()
        join(thread)
    assert not problems


def test_evaluation_during_generation_is_awaited() -> None:
    turns, order, problems = Turns(), [], list[str]()

    def wait() -> None:
        turns.wait_for_evaluation()
        order.append("ended")

    turns.begin_evaluation()
    assert turns.is_evaluating
    thread = start(wait, problems)
    time.sleep(0.01)
    order.append("evaluated")
    turns.end_evaluation()
    join(thread)
    assert order == ["evaluated", "ended"] and not problems
