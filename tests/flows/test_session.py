"""Beginning and end of a session, without Prefect's server, trackers and processes; and the loop of rollouts."""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from prefect.exceptions import TerminationSignal

from penstock.flows import rollouts as rollouts_module
from penstock.flows import session as sessions
from penstock.flows import tasks
from penstock.flows.options.flags import parse_config
from penstock.flows.policy_schedule import PolicyLimits, PolicySchedule, PolicyTurns
from penstock.flows.reporting import observers, prefect_page
from penstock.flows.reporting.observer import Observer
from penstock.flows.rollouts import RoundSource, rollouts
from penstock.flows.runtime.resolve import resolve
from penstock.flows.session import open_session
from penstock.storage.commit import Commit, RolloutRef, RunKeys
from penstock.storage.errors import RunError
from penstock.storage.history.run_record import read_completion, read_starts
from penstock.storage.leases import describe_live_drivers
from penstock.storage.preemption import Preempted, StopRequest
from penstock.storage.store import Store

KEYS = RunKeys("r")


class ScriptedTracking:
    """Tracking that records nothing but its end."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.deliveries = [SimpleNamespace(name="MLflow", page=None, problem=None, num_waiting=lambda: 0)]

    def start(self) -> Self:
        return self

    def close(self, status: str, timeout: float) -> None:
        self.events.append(status)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: name == "record_commit"  # whether the commit is new


class Client:
    """A Prefect client for a flow run without tags and tasks."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: [] if name == "read_task_runs" else SimpleNamespace(tags=[], state=None)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    flow_run = SimpleNamespace(ui_url=None, id=str(uuid.uuid4()))
    world = SimpleNamespace(
        store=Store(str(tmp_path / "store")), tracking=ScriptedTracking(), artifacts=list[tuple[str, str]]()
    )
    world.config = parse_config(["--run", "r", "--store", world.store.root, "--num-rollout", "2"])
    for module, name, value in (
        (sessions, "plan_of", lambda flow, config: resolve(flow, config, world.store)),
        (sessions, "preflight", lambda plan, own_lease: None),
        (sessions, "config_warnings", lambda plan: []),
        (sessions, "flow_run", flow_run),
        (sessions, "RunTracking", lambda *_: world.tracking),
        (prefect_page, "flow_run", flow_run),
        (prefect_page, "get_client", lambda **_: Client()),
        (
            prefect_page,
            "create_markdown_artifact",
            lambda text, **more: world.artifacts.append((more["description"], text)) or uuid.uuid4(),
        ),
        (prefect_page, "wait_for_api", lambda note, patience_seconds: True),
        (observers, "read_cost_metrics", lambda *_: []),
    ):
        monkeypatch.setattr(module, name, value)
    return world


def drivers(world: SimpleNamespace) -> list[str]:
    return describe_live_drivers(world.store, KEYS)


@pytest.mark.parametrize(
    ("error", "raised", "outcome", "status"),
    [
        (None, None, "FINISHED", "FINISHED"),
        (RuntimeError("why"), RuntimeError, "FAILED", "FAILED"),
        (KeyboardInterrupt(), KeyboardInterrupt, "STOPPED", "FAILED"),
        (Preempted("stopped"), TerminationSignal, "STOPPED", "FAILED"),
    ],
    ids=str,
)
def test_end_of_a_session_is_recorded_and_frees_the_run(
    world: SimpleNamespace, error: BaseException | None, raised: type[BaseException] | None, outcome: str, status: str
) -> None:
    with pytest.raises(raised) if raised else nullcontext(), open_session("train", world.config) as session:
        assert len(drivers(world)) == 1 and session.run.num_rounds == 2
        assert [end for _, end in read_starts(world.store, KEYS)] == [None]
        if error is not None:
            raise error
    [(_, end)] = read_starts(world.store, KEYS)
    assert end is not None and end.outcome == outcome
    assert drivers(world) == [] and world.tracking.events == [status]
    assert (read_completion(world.store, KEYS) is not None) == (error is None)


@pytest.mark.parametrize("name", ["tracked_run", "Processes"])
def test_failure_while_a_session_is_opened_frees_the_run(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Regression test: the thread that renews the lease went on, and the run counted as driven."""

    def fail(*_: object, **__: object) -> None:
        raise RunError("damaged")

    monkeypatch.setattr(sessions, name, fail)
    before = threading.active_count()
    with pytest.raises(RunError, match="damaged"), open_session("train", world.config):
        pass
    assert drivers(world) == [] and threading.active_count() <= before


def test_observer_is_told_what_happens_in_the_order_of_the_rows(world: SimpleNamespace) -> None:
    told: list[str] = []

    class Listener(Observer):
        def on_stage(self, name: str, rollout_id: int | None) -> None:
            told.append(f"{name} {rollout_id}")

        def on_results(self, commits: list[Commit]) -> None:
            told.append(f"{len(commits)} commits")

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
            told.append(f"ended by {kind}")

    with open_session("train", world.config) as session:
        session.observers.add(Listener())
        with session.running_stage("train", 1):
            pass
        assert tasks.publish_results(session).message == "no new stage was committed"
    assert told == ["train 1", "0 commits", "ended by None"]


def commit_round(world: SimpleNamespace, session: sessions.Session, r: int, *kinds: str) -> None:
    for kind in kinds:
        prefix = KEYS.rollout_prefix(r) if kind == "rollout" else KEYS.step_prefix(r)
        summary = {"rollout/raw_reward": 0.5 + r / 4} if kind == "rollout" else {"train/loss": 1.0}
        commit = Commit(
            kind=kind, index=r, policy_version=r + (kind == "step"), summary=summary, created_at=time.time()
        )
        world.store.commit(prefix, commit)
        session.report_commit(prefix, commit)


@pytest.fixture
def stage_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stages be reported outside of a task run. Their names and messages are in `Session.stage_messages`."""
    monkeypatch.setattr(sessions, "task_run", SimpleNamespace(id=str(uuid.uuid4())))
    monkeypatch.setattr(sessions, "get_run_logger", lambda: logging.getLogger("flow"))


@pytest.mark.usefixtures("stage_states")
def test_states_of_stages_are_named_by_the_reward_and_the_flow_runs_by_prefect(world: SimpleNamespace) -> None:
    with open_session("train", world.config) as session:
        for r, kind in ((0, "rollout"), (0, "step"), (1, "rollout")):
            commit_round(world, session, r, kind)
            [(name, message)] = session.stage_messages.values()
            assert name == f"reward {0.5 + r / 4:.3f}" and message
        score = Commit(kind="eval", index=1, summary={"eval/held": 0.25, "eval/held-pass@4": 1.0})
        session.report_commit(KEYS.eval_prefix(1, "held"), score)
        assert [name for name, _ in session.stage_messages.values()] == ["held 0.250"]
        session.set_stage_message("the trainer has policy version 0")
        assert [name for name, _ in session.stage_messages.values()] == ["Completed"]
        assert tasks.publish_results(session).name == "Completed", "which Prefect's filters expect"


@pytest.mark.usefixtures("stage_states")
def test_the_artifact_is_rewritten_while_the_run_runs(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        Client, "update_artifact", lambda self, id, artifact: written.append(artifact.description), False
    )
    monkeypatch.setattr(prefect_page, "http_answers", lambda url: True)
    monkeypatch.setattr(prefect_page, "REWRITE_SECONDS", 0.01)
    with open_session("train", world.config) as session:
        commit_round(world, session, 0, "rollout", "step")
        deadline = time.monotonic() + 60
        while not written:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [name for name, _ in world.artifacts] == ["running"] and written[0].startswith("running: round 0, ")
    assert written[-1] == "round 0, reward 0.500"


@pytest.mark.usefixtures("stage_states")
def test_a_flow_run_is_named_by_run_number_of_its_start_and_its_newest_result(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(Client, "update_flow_run", lambda self, id, *, name, tags=(): names.append(name), False)
    with open_session("train", world.config) as session:
        commit_round(world, session, 0, "rollout", "step")
        commit_round(world, session, 1, "rollout")
    with open_session("train", world.config):
        pass
    assert names == ["r #1", "r #1, reward 0.500", "r #2", "r #2"], "of the newest round that this start has trained"


@pytest.mark.usefixtures("stage_states")
@pytest.mark.parametrize(("killed", "how"), [(True, "killed after"), (False, "failed at")])
def test_a_resumed_run_says_how_many_rounds_it_has_and_how_it_ended(
    world: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    killed: bool,
    how: str,
) -> None:
    with pytest.raises(RuntimeError), open_session("train", world.config) as session:
        commit_round(world, session, 0, "rollout", "step")
        commit_round(world, session, 1, "rollout")
        raise RuntimeError("why")
    if killed:
        world.store.delete([f"{KEYS.prefix}/starts/000000.end.json"])
    capsys.readouterr()
    with caplog.at_level(logging.INFO), open_session("train", world.config) as session:
        assert list(session.remaining_rounds()) == [0, 1]
        expected = rf"resuming: 1 of 2 rounds are committed, {how} \d\d:\d\d"
        assert re.search(expected, caplog.text) and re.search(expected, capsys.readouterr().out)
        commit_round(world, session, 1, "step")
        assert "round 1 (2/2)  reward 0.750" in capsys.readouterr().out, "its rollout is of the earlier start"


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (Preempted("SIGTERM"), "train cancelled on request; it will rerun on resume"),
        (ValueError("why\nmore"), "train failed (ValueError: why); its inputs will be restored"),
    ],
    ids=repr,
)
def test_stage_that_is_interrupted_is_not_reported_as_failed(
    world: SimpleNamespace, error: BaseException, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_session("train", world.config) as session:
        with pytest.raises(type(error)), session.running_stage("train", 1):
            raise error
    assert f"· {note}" in capsys.readouterr().out


@pytest.mark.parametrize("ends_with_process", [True, False])
def test_a_run_prints_no_link_to_a_server_that_ends_with_it(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ends_with_process: bool
) -> None:
    monkeypatch.setattr(sessions, "OWN_SERVER", SimpleNamespace(is_set=lambda: ends_with_process))
    monkeypatch.setattr(sessions, "flow_run", SimpleNamespace(ui_url="http://server/runs/0d8c", id="0d8c"))
    with open_session("train", world.config) as session:
        assert ("Prefect" in session.display.panel.links()) is not ends_with_process


# ---- rollouts --------------------------------------------------------------------------------------------------------


class Ahead:
    """A run whose rollouts and evaluations are only counted."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, *words: str, num_rounds: int = 5) -> None:
        config = parse_config(["--run", "r", "--num-rollout", str(num_rounds), *words])
        run = config.run
        schedule = PolicySchedule(PolicyLimits(run.async_buffer_size, run.staleness_limit, run.update_weights_interval))
        self.turns, self.versions, self.evaluated = PolicyTurns(schedule), dict[int, int](), list[int]()
        self.overlaps: list[int] = []
        self.fails_at: int | None = None
        self.session: Any = SimpleNamespace(
            config=config,
            run=SimpleNamespace(
                num_rounds=num_rounds,
                keys=KEYS,
                num_trained_rounds=lambda: schedule.trained,
                needs_rollout=lambda r: r not in self.versions,
                read_commit=lambda prefix: Commit(kind="rollout", policy_version=0, seconds={"generate": 0.0}),
            ),
            engines=SimpleNamespace(turns=self.turns),
            stop=StopRequest(),
            observers=SimpleNamespace(tell=lambda event, r, metrics: self.overlaps.append(r)),
            wait_for_checkpoint_until_deadline=lambda: None,
        )
        monkeypatch.setattr(RoundSource, "generate", self.generate)
        monkeypatch.setattr(tasks, "rollout", lambda session, r, generate: generate(r))
        monkeypatch.setattr(tasks, "evaluate", lambda session, version: self.evaluate(version))
        monkeypatch.setattr(tasks, "note_postponed_evaluation", lambda session, version, error: None)

    def generate(self, r: int) -> RolloutRef:
        with self.turns.rollout(r) as version, self.turns.using(self.turns.schedule.rollouts, version):
            with self.turns.sending(), self.turns.change() as schedule:
                schedule.weights_sent(schedule.rollouts, version)
            if r == self.fails_at:
                raise ConnectionError("no engine answered")
            self.versions[r] = version
        return RolloutRef(key=str(r), rollout_id=r, num_samples=1, policy_version=version)

    def evaluate(self, version: int) -> None:
        with self.turns.using(self.turns.schedule.rollouts, version), self.turns.sending():
            assert self.turns.schedule.trained == version
            self.evaluated.append(version)
            with self.turns.change() as schedule:
                schedule.weights_sent(schedule.rollouts, version)

    def train(self, rounds: Iterator[int], evaluate: tuple[int, ...] = ()) -> None:
        with rollouts(self.session) as get:
            for r in rounds:
                assert get(r).rollout_id == r
                with self.turns.training(r):
                    pass
                if r + 1 in evaluate:
                    with self.turns.change() as schedule:
                        schedule.requested = r + 1


@pytest.mark.parametrize(("k", "n"), [(0, 3), (1, 1), (2, 2)])
def test_rollouts_are_handed_over_in_order_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int, n: int
) -> None:
    words = ["--async-buffer-size", str(k), "--update-weights-interval", str(n)]
    run = Ahead(Store(str(tmp_path)), monkeypatch, *words, num_rounds=12)
    evaluate = (3, 7, 8) if k else ()
    run.train(iter(range(12)), evaluate)
    assert list(run.versions) == list(range(12)) and run.evaluated == list(evaluate)
    assert all(0 <= r - version <= k + n - 1 for r, version in run.versions.items())
    assert run.overlaps == (list(range(12)) if k else [])
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_failed_rollout_fails_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ahead(Store(str(tmp_path)), monkeypatch, "--async-buffer-size", "1")
    run.fails_at = 2
    with pytest.raises(ConnectionError, match="no engine answered"):
        run.train(iter(range(5)))
    assert list(run.versions) == [0, 1] and run.session.stop.requested


def test_failed_training_ends_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ahead(Store(str(tmp_path)), monkeypatch, "--async-buffer-size", "1")
    monkeypatch.setattr(rollouts_module, "END_TIMEOUT", 30.0)

    def rounds() -> Iterator[int]:
        yield from (0, 1)
        raise ValueError("the trainer failed")

    with pytest.raises(ValueError, match="the trainer failed"):
        run.train(rounds())
    assert run.turns.closed and not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
