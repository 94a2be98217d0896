"""The engines of a stream, and evaluations that use them meanwhile, with a scripted engine pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.policy_schedule import PolicyTurns
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.publishing import PolicyEngines
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

HANG = 60.0  # seconds; only a deadlock exceeds it
URLS = ["http://engine"]


class ScriptedPool:
    """Engines that need time until they serve; only one thread at a time can be inside `serving`, as in EnginePool."""

    def __init__(self) -> None:
        self.lock, self.is_starting, self.may_serve = threading.RLock(), threading.Event(), threading.Event()
        self.updates: list[str] = []

    @contextmanager
    def serving(self, version: str, publish: Callable[[list[str]], None]) -> Iterator[Callable[[], list[str]]]:
        with self.lock:
            self.is_starting.set()
            assert self.may_serve.wait(HANG)
            publish(URLS)
            self.updates.append(version)
            yield lambda: URLS

    def update_while_serving(self, version: str, publish: Callable[[list[str]], None]) -> None:
        publish(URLS)
        self.updates.append(version)


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool()


@pytest.fixture
def engines(tmp_path: Path, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch) -> PolicyEngines:
    config = parse_config(["--async-mode", "streaming", "--max-staleness", "2", "--num-rollout", "9"])
    run = ActiveRun(Store(str(tmp_path / "store")), RunKeys("run"), Flow.TRAIN, config)
    processes = Processes(run, note=lambda text: None)
    monkeypatch.setattr(processes, "start_engines", lambda role: pool)
    engines = PolicyEngines(processes, on_published=lambda *published: None)
    monkeypatch.setattr(engines.publisher, "send", lambda version, urls, rewind: None)
    engines.turns.schedule.trained = 3
    return engines


def set_evaluated(turns: PolicyTurns, version: int | None) -> None:
    with turns.change() as schedule:
        schedule.evaluated = version


class Stream:
    """A thread inside `for_stream` until `end`."""

    def __init__(self, engines: PolicyEngines) -> None:
        self.engines, self.serves, self.may_end = engines, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self.engines.for_stream() as urls:
            assert urls() == URLS
            self.serves.set()
            assert self.may_end.wait(HANG)

    def end(self) -> None:
        self.may_end.set()
        self.thread.join(HANG)
        assert not self.thread.is_alive(), "deadlock"


def evaluate(engines: PolicyEngines, version: int) -> tuple[threading.Thread, list[Any]]:
    """Evaluate a policy in a thread. Returns it, and a list of its result: the engines' addresses or an exception."""
    results: list[Any] = []

    def run() -> None:
        try:
            with engines.for_evaluation(version) as urls:
                results.append(urls())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def train(engines: PolicyEngines, rollout_id: int) -> None:
    with engines.turns.training(rollout_id):
        pass


def test_policy_published_before_any_weights_is_left_to_the_start_of_the_engines(
    engines: PolicyEngines, pool: ScriptedPool
) -> None:
    """Regression test: a round trained while the engines of an evaluation were starting ended the run."""
    set_evaluated(engines.turns, 3)
    engines.turns.schedule.trained = 4
    engines.publish_in_flight(4)
    assert pool.updates == [] and engines.turns.schedule.in_engines is None
    set_evaluated(engines.turns, None)
    pool.may_serve.set()
    stream = Stream(engines)
    assert stream.serves.wait(HANG) and pool.updates == ["run/4"]
    stream.end()


@pytest.mark.parametrize("version", [3, 2])
def test_evaluation_that_finds_a_starting_stream_uses_its_engines(
    engines: PolicyEngines, pool: ScriptedPool, version: int
) -> None:
    """Regression test: it waited for the end of the stream, which waited for rounds, whose weights waited for it."""
    stream = Stream(engines)
    assert pool.is_starting.wait(HANG)
    thread, results = evaluate(engines, version)
    thread.join(0.05)
    pool.may_serve.set()
    thread.join(HANG / 4)
    assert not thread.is_alive(), "deadlock"
    if version == 3:
        assert results == [URLS]
    else:
        assert isinstance(results[0], RuntimeError) and "has loaded version 3" in str(results[0])
    assert stream.thread.is_alive() and engines.turns.schedule.rollouts.streams
    stream.end()
    assert not engines.turns.schedule.rollouts.streams and pool.updates == ["run/3"]


def test_stream_waits_for_an_evaluation_that_uses_the_engines(engines: PolicyEngines, pool: ScriptedPool) -> None:
    pool.may_serve.set()
    with engines.at(3):
        stream = Stream(engines)
        assert not stream.serves.wait(0.05)
        trainer = threading.Thread(target=train, args=(engines, 3), daemon=True)
        trainer.start()
        trainer.join(HANG / 4)
        assert not trainer.is_alive(), "a stream that waits does not delay the trainer"
    assert stream.serves.wait(HANG)
    stream.end()
    assert pool.updates == ["run/3", "run/4"]


def test_weights_are_sent_during_an_evaluation_only_when_rollouts_would_get_too_old(
    engines: PolicyEngines, pool: ScriptedPool
) -> None:
    pool.may_serve.set()
    stream, turns = Stream(engines), engines.turns
    assert stream.serves.wait(HANG)
    set_evaluated(turns, 3)
    turns.schedule.trained = 4
    engines.publish_in_flight(4)
    assert turns.schedule.in_engines == 3, "4 - 3 + 1 <= --max-staleness 2: later"
    turns.schedule.trained = 5
    publish = threading.Thread(target=engines.publish_in_flight, args=(5,), daemon=True)
    publish.start()
    publish.join(0.05)
    assert publish.is_alive() and turns.schedule.in_engines == 3, "it waits for the evaluation"
    set_evaluated(turns, None)
    publish.join(HANG)
    assert not publish.is_alive() and turns.schedule.in_engines == 5 and pool.updates == ["run/3", "run/5"]
    with pytest.raises(RuntimeError, match="has loaded version 5"), engines.at(3):
        pass
    stream.end()


def test_evaluation_waits_for_the_one_before_without_a_stream(engines: PolicyEngines, pool: ScriptedPool) -> None:
    """Regression test: the evaluation after the last round failed if an earlier one still shared the engines."""
    pool.may_serve.set()
    with engines.for_evaluation(3):
        same, results = evaluate(engines, 3)
        same.join(HANG)
        assert results == [URLS]
        other, results = evaluate(engines, 4)
        other.join(0.05)
        assert other.is_alive() and results == []
    other.join(HANG)
    assert results == [URLS] and pool.updates == ["run/3", "run/4"]


def test_trainer_is_not_restored_for_an_evaluation_beside_it(
    engines: PolicyEngines, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewinds: list[bool] = []
    monkeypatch.setattr(engines.publisher, "send", lambda version, urls, rewind: rewinds.append(rewind))
    pool.may_serve.set()
    with engines.for_evaluation(3):
        pass
    set_evaluated(engines.turns, 3)
    with engines.for_evaluation(3):
        pass
    assert rewinds == [True, False]
