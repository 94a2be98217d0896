"""Costs: on every device, stages and idle time add up to the time in which a driver was alive."""

import json
import random
from pathlib import Path

import pytest
from run_records import run_json

from penstock.flows.cli import main
from penstock.flows.config import Flow, validate_config
from penstock.flows.runtime.engine_options import device_counts
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.history.costs import IDLE, Interval, compute_costs, costs_at_end, seconds_by_stage
from penstock.storage.history.run_record import Start, StartEnd, record_end, record_start
from penstock.storage.store import Store

KEYS = RunKeys("r")


def commit(store: Store, kind: str, index: int, at: float, seconds: float, **fields) -> None:
    version = index + 1 if kind == "step" else index
    fields = {"kind": kind, "run": "r", "index": index, "policy_version": version, **fields}
    record = Commit(created_at=at, seconds={"all": seconds}, **fields)
    assert store.create(commit_key(f"{KEYS.prefix}/{kind}s/{index:06d}"), record.model_dump_json().encode())


def test_overlapping_moments_count_once_for_the_later_stage() -> None:
    intervals = [Interval(0, 10, "eval"), Interval(4, 6, "save"), Interval(20, 30, "train"), Interval(95, 120, "train")]
    assert seconds_by_stage(intervals, 0, 100) == {"eval": 8, "save": 2, "train": 15, IDLE: 75}


@pytest.mark.parametrize("seed", range(5))
def test_stages_and_idle_time_always_add_up_to_the_wall_time(seed: int) -> None:
    rng = random.Random(seed)
    intervals = []
    for _ in range(rng.randrange(30)):
        begin = rng.uniform(-10, 110)
        intervals.append(Interval(begin, begin + rng.expovariate(0.1), rng.choice("abc")))
    seconds = seconds_by_stage(intervals, 0, 100)
    assert sum(seconds.values()) == pytest.approx(100) and min(seconds.values()) >= 0
    covered = sum(any(i.begin <= t / 10 < i.end for i in intervals) for t in range(1000)) / 10
    assert 100 - seconds[IDLE] == pytest.approx(covered, abs=0.1 * max(1, 2 * len(intervals)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two starts, the first killed at its last commit (130), the second from 200 to 250."""
    store = Store(str(tmp_path / "store"))
    start = Start(at=100, trainer_devices=2, engine_devices=4)
    assert record_start(store, KEYS, start) == 0
    summary = {"rollout/removed_ratio": 0.25, "rollout/response_len/mean": 5.0, "rollout/num_dropped_groups": 3.0}
    commit(store, "rollout", 0, at=120, seconds=10, summary=summary)
    commit(store, "step", 0, at=130, seconds=8)
    assert record_start(store, KEYS, start.model_copy(update={"at": 200})) == 1
    commit(store, "rollout", 1, at=220, seconds=20)
    commit(store, "step", 1, at=240, seconds=12)
    commit(store, "checkpoint", 2, at=245, seconds=5)
    record_end(store, KEYS, 1, "FINISHED")
    end = StartEnd(at=250, outcome="FINISHED")
    Path(store.path("runs/r/starts/000001.end.json")).write_text(end.model_dump_json())
    return store


def test_costs_of_two_starts(store: Store) -> None:
    costs = compute_costs(store, KEYS)
    assert (costs.wall_seconds, costs.num_starts) == (30 + 50, 2)
    assert costs.device_seconds["trainer"] == {"training": 2 * 20, "checkpoint": 2 * 5, IDLE: 2 * 55}
    assert costs.device_seconds["engines"] == {"rollout": 4 * 30, IDLE: 4 * 50}
    for devices, stages in costs.device_seconds.items():
        assert sum(stages.values()) == pytest.approx(costs.num_devices[devices] * costs.wall_seconds)
    assert costs.checkpoints == {2: 2 * 20 + 4 * 30 + 2 * 5}
    assert costs.metrics(3.6)["usage/money"] == pytest.approx(0.001 * costs.total_device_seconds)
    assert costs.rounds[0].dropped_groups == 3
    assert costs.joules == {} and costs.checkpoint_joules == {} and costs.rounds[0].joules == {}
    assert not [name for name in costs.metrics() if "energy" in name or "joules" in name]


def test_costs_at_the_end_of_a_start_do_not_change_later(store: Store) -> None:
    record_start(store, KEYS, Start(at=300, trainer_devices=2, engine_devices=4))
    commit(store, "rollout", 2, at=320, seconds=20)
    [(number, end, costs)] = costs_at_end(store, KEYS)  # the first and the third start were killed
    assert (number, end.at, costs.wall_seconds, len(costs.rounds)) == (1, 250, 30 + 50, 2)
    assert compute_costs(store, KEYS).wall_seconds == 30 + 50 + 20
    assert list(costs_at_end(store, KEYS, 0)) == []


def test_colocated_gpus_are_counted_once(store: Store) -> None:
    start = Start(at=300, trainer_devices=2, engine_devices=2, colocated=True)
    record_start(store, KEYS, start)
    commit(store, "step", 2, at=310, seconds=10, state={"fingerprint": {"cuda": "13.0", "world_size": 2}})
    costs = compute_costs(store, KEYS)
    assert costs.device_seconds["trainer and engines"] == {"training": 20, IDLE: 0}


def test_command_prints_every_stage(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.create(KEYS.record, run_json())
    assert main(["show", "r", "--cost", "--rounds", "--price", "36", "--store", store.root]) == 0
    text = capsys.readouterr().out
    assert "r in " in text and "80.0 s in 2 starts" in text and "2 x trainer" in text and "4 x engines" in text
    assert f"{0.01 * (160 + 320):,.2f}" in text and "checkpoint 2" in text and "energy of the GPUs" not in text
    assert main(["show", "r", "--cost", "--price", "36", "--json", "--store", store.root]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["usage/money"] == pytest.approx(0.01 * (160 + 320))
    assert main(["show", "r", "--cost", "--price", "-1", "--store", store.root]) == 2


@pytest.mark.parametrize(
    ("flow", "train", "counts"),
    [
        ("train", {}, (1, 1, True)),
        ("train", {"actor_num_gpus_per_node": 4}, (4, 1, True)),
        ("sft", {"loss_type": "sft_loss"}, (1, 0, False)),
        ("evaluate", {}, (0, 1, False)),
    ],
)
def test_devices_of_a_flow(flow: str, train: dict, counts: tuple) -> None:
    values = {"convert": {"hf_checkpoint": "m"}, "run": {"run": "r"}, "train": train}
    assert device_counts(Flow(flow), validate_config(values)) == counts


def test_energy_is_summed_by_stage_and_the_rest_of_a_start_is_idle(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    record_start(store, KEYS, Start(at=100, trainer_devices=1, engine_devices=1))
    for r, at in ((0, 110), (1, 130)):
        commit(store, "rollout", r, at=at, seconds=5, summary={"perf/rollout_energy_joules": 1000.0})
        commit(store, "step", r, at=at + 10, seconds=5, summary={"perf/train_energy_joules": 2000.0})
    commit(store, "checkpoint", 2, at=145, seconds=1, summary={"perf/save_energy_joules": 100.0})
    end = StartEnd(at=150, outcome="FINISHED", joules=7000.0)
    Path(store.path("runs/r/starts/000000.end.json")).write_text(end.model_dump_json())
    costs = compute_costs(store, KEYS)
    assert costs.joules == {"rollout": 2000, "training": 4000, "checkpoint": 100, IDLE: 900}
    assert costs.rounds[1].joules == {"rollout": 1000, "training": 2000}
    assert costs.checkpoint_joules == {2: 6100}
    assert costs.metrics()["usage/energy_kwh"] == pytest.approx(7000 / 3.6e6)


def test_regraded_evaluation_costs_nothing_and_does_not_extend_a_killed_start(store: Store) -> None:
    record_start(store, KEYS, Start(at=300, trainer_devices=2, engine_devices=4))
    prefix = KEYS.eval_prefix(1, "sums")
    fields = {"kind": "eval", "run": "r", "index": 1, "policy_version": 1}
    evaluation = Commit(created_at=320, seconds={"generate": 15.0}, **fields)
    assert store.create(commit_key(prefix), evaluation.model_dump_json().encode())
    before = compute_costs(store, KEYS)
    regraded = Commit(created_at=9e5, seconds={"reward": 15.0}, inputs={"samples": commit_key(prefix)}, **fields)
    assert store.create(commit_key(f"{prefix}@0123abcd"), regraded.model_dump_json().encode())
    assert compute_costs(store, KEYS) == before
    assert before.device_seconds["engines"]["evaluation"] == 4 * 15
