"""What the live page gets: every commit once, only what is new, points of long runs, newest samples."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from made_run import commit_samples
from run_records import run_json

from penstock.storage.commit import Commit, RunKeys
from penstock.storage.history import run_status
from penstock.storage.history.run_record import Start, record_start
from penstock.storage.history.run_status import CommitFeed, RunStatus
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.report import live
from penstock.storage.report.live import LiveRun, best_and_worst
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.store import Store

KEYS = RunKeys("r")


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a run without commits; an object store with the indirect parameter `memory`."""
    monkeypatch.setattr(live, "READ_SECONDS", 60.0)  # also on a slow machine
    monkeypatch.setattr(live, "RECORDS_SECONDS", 0.0)
    monkeypatch.setattr(run_status, "LISTING_SECONDS", 0.0)
    is_memory = getattr(request, "param", "local") == "memory"
    store = Store(f"memory://{tmp_path.name}" if is_memory else str(tmp_path / "store"))
    create_record(store)
    return store


ON_EVERY_STORE = pytest.mark.parametrize("store", ["local", "memory"], indirect=True)


def create_record(store: Store, id: str = "1a") -> None:
    store.create(KEYS.record, run_json(id=id))


def commit_rollout(store: Store, r: int, reward: float = 0.5, **fields: Any) -> None:
    summary = {"rollout/raw_reward": reward, "perf/tokens_per_gpu_per_sec": 100.0}
    store.commit(KEYS.rollout_prefix(r), Commit(kind="rollout", run="r", index=r, summary=summary, **fields))


def commit_step(store: Store, r: int, **fields: Any) -> None:
    step = Commit(kind="step", run="r", index=r, policy_version=r + 1, summary={"train/grad_norm": 1.0 + r}, **fields)
    store.commit(KEYS.step_prefix(r), step)


def commit_round(store: Store, r: int, reward: float = 0.5) -> None:
    commit_rollout(store, r, reward)
    commit_step(store, r)


def commit_eval(store: Store, version: int, task: str, mean: float = 0.25) -> None:
    prefix = KEYS.eval_prefix(version, task)
    summary = {f"eval/{task}": mean, f"eval/{task}-ci_low": mean - 0.1, f"eval/{task}-ci_high": mean + 0.1}
    store.commit(prefix, Commit(kind="eval", index=version, attempt=f"{prefix}/attempt-0", summary=summary))


def live_run(store: Store) -> LiveRun:
    return LiveRun(store, KEYS, lambda *_: 9, lambda *_: {1: "one"})


def answer(run: LiveRun, since: str = "") -> dict[str, Any]:
    value = run.answer(since)
    assert value is not None
    return json.loads(json.dumps(value, allow_nan=False))  # as a browser gets it


# ---- commits ---------------------------------------------------------------------------------------------------------


def read_all(feed: CommitFeed) -> list[tuple[str, int]]:
    return [(commit.kind, commit.index) for commit in feed.read(60.0)]


@ON_EVERY_STORE
def test_every_commit_is_read_once_in_the_order_of_rounds(store: Store) -> None:
    feed = CommitFeed(store, KEYS)
    assert read_all(feed) == []
    for r in range(3):
        commit_round(store, r)
    commit_eval(store, 0, "sums")
    rounds = [(kind, r) for kind in ("rollout", "step") for r in range(3)]
    assert read_all(feed) == [("eval", 0), *rounds]
    assert read_all(feed) == []
    commit_rollout(store, 3)
    for version in range(1, 5):
        commit_eval(store, version, "sums")
    assert sorted(read_all(feed) + read_all(feed)) == [*(("eval", v) for v in range(1, 5)), ("rollout", 3)]
    commit_eval(store, 0, "second")  # of an old version, when all others have one
    commit_eval(store, 4, "second")
    assert read_all(feed) == [("eval", 4)]
    assert read_all(feed) == [("eval", 0)]  # postponed evaluations are found once a version has more of them
    read = [(c.kind, c.index) for c in CommitFeed(store, KEYS).read(60.0)]
    assert read[:3] == [("rollout", 0), ("step", 0), ("rollout", 1)] and len(read) == 7 + 7


def test_reading_ends_after_its_time_and_continues(store: Store) -> None:
    for r in range(5):
        commit_round(store, r)
    feed, read = CommitFeed(store, KEYS), []
    for number in range(20):
        before = len(read)
        read += [(c.kind, c.index) for c in feed.read(0.0 if number % 2 else 1e-9)]
        assert len(read) - before <= 1
    read += read_all(feed)
    assert sorted(read) == sorted((kind, r) for kind in ("rollout", "step") for r in range(5))
    assert feed.num_waiting == 0 and feed.num_read == 10


def test_later_reads_ask_for_the_next_round_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for r in range(50):
        commit_round(store, r)
    feed = CommitFeed(store, KEYS)
    read_all(feed)
    keys: list[str] = []
    read = store.read
    monkeypatch.setattr(run_status, "LISTING_SECONDS", 60.0)
    monkeypatch.setattr(store, "read", lambda key: keys.append(key) or read(key))
    monkeypatch.setattr(store, "list", lambda prefix: pytest.fail("a listing"))
    assert read_all(feed) == [] and len(keys) == 2


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_answer_has_what_is_new_since_the_cursor(store: Store) -> None:
    run = live_run(store)
    first = answer(run)
    assert first["curves"]["round"] == [] and first["state"]["kind"] == "waiting" and first["evaluations"] == []
    for r in range(4):
        commit_round(store, r, reward=r / 4)
    second = answer(run, first["cursor"])
    assert second["curves"]["round"] == [0, 1, 2, 3]
    assert second["curves"]["metrics"]["rollout/raw_reward"] == [0, 0.25, 0.5, 0.75]
    assert "evaluations" not in second  # none is new
    commit_round(store, 4, reward=float("nan"))
    commit_rollout(store, 5)
    third = answer(run, second["cursor"])
    assert third["curves"]["first"] == 4 and third["curves"]["round"] == [4, 5]
    assert third["curves"]["metrics"]["rollout/raw_reward"] == [None, 0.5]
    commit_step(store, 5)
    fourth = answer(run, third["cursor"])  # round 5 has more metrics now
    assert fourth["curves"]["first"] == 5 and fourth["curves"]["metrics"]["train/grad_norm"] == [6.0]
    everything = answer(run)
    assert everything["curves"]["round"] == list(range(6)) and everything["header"]["num_rounds"] == 6
    assert everything["header"]["num_planned_rounds"] == 9


@pytest.mark.parametrize("since", ["x", "1a-1-99-0", "1a-1--5-0", "1a-2-1-0", "1a-1-\u0662-0"])
def test_cursor_of_another_run_or_none_gives_a_complete_answer(store: Store, since: str) -> None:
    run = live_run(store)
    for r in range(3):
        commit_round(store, r)
    curves = answer(run, since)["curves"]
    assert curves["round"] == list(range(curves["first"], 3))
    assert curves["first"] == 0 or since in ("1a-1-99-0", "1a-1-\u0662-0")


def test_points_of_a_long_run_are_means_of_rounds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_POINTS", 4)
    run = live_run(store)
    for r in range(4):
        commit_round(store, r, reward=float(r))
    before = answer(run)
    for r in range(4, 10):
        commit_round(store, r, reward=float(r))
    after = answer(run, before["cursor"])
    assert after["curves"]["stride"] == 4 and after["curves"]["first"] == 0  # everything again
    assert after["curves"]["round"] == [0, 4, 8]
    assert after["curves"]["metrics"]["rollout/raw_reward"] == [1.5, 5.5, 8.5]
    commit_round(store, 10, reward=16.0)
    last = answer(run, after["cursor"])["curves"]
    assert (last["first"], last["metrics"]["rollout/raw_reward"]) == (2, [11.0])


def test_run_is_on_gpus_by_its_trainer_or_its_newest_processes(store: Store) -> None:
    run = live_run(store)
    commit_round(store, 0)
    commit_step(store, 1, state={"fingerprint": {"cuda": "13.0", "threads": 2}})  # torch for GPUs on a CPU
    assert not answer(run)["header"]["on_gpus"]
    write_status(store, lanes=[{"name": "engine 0", "group": "engines", "devices": "GPU 0"}])
    assert answer(run)["header"]["on_gpus"]
    write_status(store, lanes=[{"name": "engine 0", "group": "engines", "devices": "CPU"}])
    assert not answer(run)["header"]["on_gpus"]
    commit_step(store, 2, state={"fingerprint": {"cuda": "13.0", "threads": None}})
    assert answer(run)["header"]["on_gpus"]


def test_evaluations_are_sent_again_when_there_is_a_new_one(store: Store) -> None:
    run = live_run(store)
    commit_eval(store, 2, "sums", 0.5)
    first = answer(run)
    expected = {"task": "sums", "version": 2, "mean": 0.5, "low": 0.4, "high": 0.6}
    assert first["evaluations"] == [expected]
    assert "evaluations" not in answer(run, first["cursor"])
    commit_eval(store, 4, "sums")
    assert [entry["version"] for entry in answer(run, first["cursor"])["evaluations"]] == [2, 4]


def test_first_answer_of_a_long_run_says_how_much_is_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for r in range(6):
        commit_round(store, r)
    monkeypatch.setattr(live, "READ_SECONDS", 0.0)
    run = live_run(store)
    assert answer(run)["num_loading"] == 12
    monkeypatch.setattr(live, "READ_SECONDS", 60.0)
    assert answer(run)["num_loading"] == 0 and answer(run)["header"]["num_rounds"] == 6


@ON_EVERY_STORE
def test_run_with_the_name_of_a_removed_one_begins_anew(store: Store) -> None:
    run = live_run(store)
    commit_round(store, 0)
    cursor = answer(run)["cursor"]
    store.delete([file.key for file in store.walk(KEYS.prefix)])
    assert run.answer(cursor) is None
    create_record(store, id="2b")
    commit_round(store, 0, reward=0.75)
    again = answer(run, cursor)
    assert again["curves"]["first"] == 0 and again["curves"]["metrics"]["rollout/raw_reward"] == [0.75]


# ---- state -----------------------------------------------------------------------------------------------------------


def write_status(store: Store, **fields: Any) -> None:
    values = {"at": time.time(), "start": 0, "host": "node", "pid": 1} | fields
    store.replace(KEYS.status, RunStatus(**values).model_dump_json().encode())


@ON_EVERY_STORE
def test_killed_run_is_not_shown_as_running(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(run_status, "SILENT_SECONDS", 0.0)
    lease, run = Lease(store, new_driver_lease_key(KEYS)).take(), live_run(store)
    record_start(store, KEYS, Start())
    write_status(store, phase="stopping")
    shown = answer(run)
    assert (shown["state"]["kind"], shown["status"]["phase"], shown["is_current"]) == ("silent", "stopping", True)
    lease.release()
    commit_rollout(store, 0, created_at=time.time() + 100)
    answer(run)
    shown = answer(run)
    assert shown["state"]["kind"] == "killed" and not shown["is_current"]
    assert shown["state"]["since"] > time.time() + 50, "a commit is a sign of life, too"
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    record_start(store, KEYS, Start())
    shown = answer(run)
    assert (shown["state"]["kind"], shown["state"]["num_starts"]) == ("running", 2)
    assert not shown["is_current"], "the status is that of the start before"
    lease.release()


def test_status_that_changes_is_fresh_whatever_its_clock_says(store: Store) -> None:
    lease, run = Lease(store, new_driver_lease_key(KEYS)).take(), live_run(store)
    record_start(store, KEYS, Start(at=1.0))
    write_status(store, at=100.0)  # the clock of the driver is wrong
    assert answer(run)["state"]["kind"] == "silent"
    write_status(store, at=105.0)
    assert answer(run)["state"]["kind"] == "running"
    lease.release()


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_demonstrations_without_rewards_are_shown(store: Store) -> None:
    run = live_run(store)
    samples = [Sample(sample_id=f"{k}", group_id=f"{k}", trajectory_id="", rollout_id=0) for k in range(8)]
    commit_samples(store, KEYS.rollout_prefix(0), samples, kind="rollout", run="r")
    answer(run)
    shown = run.samples()
    assert shown is not None and shown["page"]["id"] == [str(k) for k in range(6)]


def test_best_and_worst_are_of_different_groups() -> None:
    rewards = [0.0, 0.9, 0.8, None, 0.1, 0.2, math.nan, 0.7, 0.05, 0.6]
    groups = ["a", "b", "b", "b", "c", "c", "c", "d", "e", "f"]
    assert [rewards[row] for row in best_and_worst(rewards, groups)] == [0.9, 0.7, 0.6, 0.1, 0.05, 0.0]
    assert best_and_worst([0.25, 0.5], ["a", "a"]) == [1, 0]
    # The worst group has the best sample as well.
    rewards = [0.0, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0]
    worst = best_and_worst(rewards, ["a", "a", "b", "b", "c", "c", "d", "d"])[3:]
    assert [rewards[row] for row in worst] == [0.5, 0.5, 0.0]
    assert best_and_worst([None], ["a"]) == []


def test_newest_samples_are_read_once_for_each_rollout(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reads = live_run(store), []
    assert run.samples() is None
    read_table = live.read_table
    monkeypatch.setattr(live, "read_table", lambda *args: reads.append(args) or read_table(*args))
    for r in range(2):
        samples = [
            Sample(
                sample_id=f"{r}-{k}", group_id=f"g{k}", trajectory_id=f"{r}-{k}", rollout_id=r, prompt="p",
                response="<img src=x>", token_ids=[1, 2], loss_mask=[0, 1], rollout_logprobs=[0.0, -0.5],
                reward=k / 8, status=Status.COMPLETED, policy_versions=(r, r),
            )
            for k in range(8)
        ]  # fmt: skip
        commit_samples(store, KEYS.rollout_prefix(r), samples, kind="rollout", run="r", index=r)
        answer(run)
        shown = run.samples()
        assert run.samples() is shown
        assert shown is not None and (shown["num_samples"], shown["token_texts"]) == (8, {1: "one"})
        assert shown["index"]["reward"] == [7 / 8, 6 / 8, 5 / 8, 2 / 8, 1 / 8, 0]
        assert shown["page"]["response"] == ["<img src=x>"] * 6 and len(reads) == r + 1
