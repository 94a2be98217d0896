"""Evaluations while training continues: on engines of their own, on engines that generate rollouts, or later."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_run import config_of, make_run, score_one, write_data
from penstock_command import penstock
from run_records import parent_record, run_json

from penstock.engines.serving.pool import EnginePool
from penstock.flows import tasks
from penstock.flows.commands.demo_model import make_tiny_data
from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.policy_schedule import PolicyLimits, PolicySchedule, PolicyTurns
from penstock.flows.runtime.preflight import check_eval_engines
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import EngineError
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.store import Store

KEYS = RunKeys("r")


def pool_of(num_engines: int) -> EnginePool:
    pool = object.__new__(EnginePool)
    pool._lock, pool.listener, pool._split_off = threading.RLock(), print, []
    pool.replicas = [SimpleNamespace(known_url=f"http://{n}", place=lambda n=n: n) for n in range(num_engines)]  # type: ignore[misc]
    return pool


def test_split_moves_the_last_engines_to_another_pool() -> None:
    pool = pool_of(3)
    other = pool.split(1)
    assert [replica.known_url for replica in pool.replicas] == ["http://0", "http://1"]
    assert [replica.known_url for replica in other.replicas] == ["http://2"]
    assert other._lock is not pool._lock and other.listener is not pool.listener
    assert pool.places(["http://0", "http://2"]) == {"http://0": 0, "http://2": 2}
    with pytest.raises(EngineError, match="leaves no engine for rollouts"):
        pool_of(2).split(2)


def test_engines_that_only_evaluate_must_leave_some_for_rollouts() -> None:
    config = parse_config(
        ["--run", "r", "--eval-mode", "apart", "--eval-num-engines", "2", "--eval-prompt-data", "h", "h.jsonl"]
    )
    check_eval_engines(config, num_engines=3)
    with pytest.raises(EngineError, match=r"leaves no engine for rollouts, because the run has 2"):
        check_eval_engines(config, num_engines=2)


def test_evaluations_apart_do_not_use_the_router(tmp_path: Path) -> None:
    words = ["--run", "r", "--use-router", "--eval-mode", "apart", "--eval-prompt-data", "h", "h.jsonl"]
    processes = Processes(ActiveRun(Store(str(tmp_path)), KEYS, Flow.TRAIN, parse_config(words)), print)
    processes.__dict__["router"] = SimpleNamespace(address=lambda: "http://router")
    rollouts, evaluations = processes.connect(["http://0"]), processes.connect_for_evaluation(["http://0"])
    assert rollouts.router is not None and evaluations.router is None  # type: ignore[attr-defined]


def test_only_evaluations_of_data_sets_that_the_run_had_are_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    data = ["--eval-prompt-data", "old", "a.jsonl", "new", "b.jsonl", "--eval-interval", "1", "--num-rollout", "4"]
    config = parse_config(["--run", "r", "--async-buffer-size", "1", *data])
    store.commit(KEYS.eval_prefix(0, "old"), Commit(kind="eval", policy_version=0, created_at=1.0))
    for r in range(4):
        store.commit(KEYS.step_prefix(r), Commit(kind="step", index=r, created_at=2.0 + r))
    store.commit(KEYS.eval_prefix(0, "new"), Commit(kind="eval", policy_version=0, created_at=3.5))  # after a resume
    evaluated: list[tuple[int, str]] = []
    monkeypatch.setattr(tasks, "evaluate_one", lambda session, version, name: evaluated.append((version, name)))
    store.create(KEYS.record, run_json())
    run = ActiveRun(store, KEYS, Flow.TRAIN, config)
    session = SimpleNamespace(
        config=config,
        run=run,
        engines=SimpleNamespace(turns=PolicyTurns(PolicySchedule(PolicyLimits(lead=1, bound=1)))),
    )
    tasks.evaluate_skipped(session)  # type: ignore[arg-type]
    assert evaluated == [(1, "old"), (2, "old"), (3, "old"), (3, "new")]
    evaluated.clear()
    store.replace(KEYS.record, run_json(parent=parent_record("parent", 2)))
    tasks.evaluate_skipped(session)  # type: ignore[arg-type]
    assert evaluated == [(2, "old"), (3, "old"), (3, "new")], "a fork cannot train its parent's rounds again"


@pytest.mark.parametrize("mode", ["--async-buffer-size 1", "--eval-mode apart --num-engines 2"])
def test_checkpoint_is_kept_until_its_postponed_evaluation_is_done(tmp_path: Path, mode: str) -> None:
    """Regression test: the best checkpoint was removed before its score was known."""
    store, notes = Store(str(tmp_path / "store")), list[str]()
    data, words = write_data(tmp_path / "data.jsonl"), "--keep-checkpoints 1 --keep-best eval/sums --eval-interval 1"
    config = config_of(store, data, "r", "--eval-prompt-data", "sums", str(data), *words.split(), *mode.split())
    keys = make_run(store, config, 4, save=(1, 2, 3, 4), score=(0, 1))
    session = SimpleNamespace(
        config=config,
        run=ActiveRun(store, keys, Flow.TRAIN, config),
        engines=SimpleNamespace(turns=PolicyTurns(PolicySchedule(PolicyLimits(evaluates_apart="apart" in mode)))),
        display=SimpleNamespace(note=notes.append),
    )
    for version, reward, kept in ((2, 9.0, [2, 3, 4]), (3, 5.0, [2, 4])):
        tasks.remove_old_checkpoints(session)  # type: ignore[arg-type]
        score_one(store, keys, config, version, reward)
        tasks.remove_old_checkpoints(session)  # type: ignore[arg-type]
        assert store.committed_indices(f"{keys.prefix}/checkpoints") == kept
    assert notes == ["removed old checkpoints: 1", "removed old checkpoints: 3"]


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("mode", ["synchronous", "streaming"])
def test_every_policy_is_evaluated_apart_while_training_continues(
    mode: str, prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    more = ["--async-mode", "streaming"] if mode == "streaming" else []
    apart = ["--num-rollout", "4", "--num-engines", "2", "--eval-mode", "apart"]
    train(store, prefect_api, tiny_model, tmp_path, *apart, *more)
    assert_evaluated(store, 4)
    if mode == "synchronous":  # in streaming, rollouts may be committed before an evaluation begins
        rollout, score = store.committed(KEYS.rollout_prefix(2)), store.committed(KEYS.eval_prefix(1, "held"))
        assert rollout and score
        assert rollout.policy_version == 2 and score.policy_version == 1


@pytest.mark.integration
@pytest.mark.full
def test_skipped_evaluations_follow_after_the_last_round(
    prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    ahead = ("--async-buffer-size", "1")
    train(store, prefect_api, tiny_model, tmp_path, "--num-rollout", "3", "--eval-interval", "9", *ahead)
    assert store.committed(KEYS.eval_prefix(1, "held")) is None
    train(store, prefect_api, tiny_model, tmp_path, "--num-rollout", "4", *ahead)
    assert_evaluated(store, 4)


def train(store: Store, env: dict[str, str], model: Path, directory: Path, *more: str) -> None:
    data = make_tiny_data(directory / "data")
    words = f"""
        --run r --store {store.uri} --hf-checkpoint {model} --prompt-data {data["train"]} --input-key prompt
        --label-key label --rm-type random --apply-chat-template --rollout-batch-size 4 --n-samples-per-prompt 2
        --rollout-max-response-len 8 --lr 1e-3 --trainer-threads 1 --check-logits false
        --eval-prompt-data held {data["heldout"]} --eval-max-response-len 4
    """.split()
    interval = [] if "--eval-interval" in more else ["--eval-interval", "1"]
    penstock("train", *words, *interval, *more, env=env)


def assert_evaluated(store: Store, num_rounds: int) -> None:
    """Assert that every policy has an evaluation of its own version, and that the run is whole."""
    for version in range(num_rounds + 1):
        score = store.committed(KEYS.eval_prefix(version, "held"))
        assert score is not None and score.policy_version == version
    assert audit_run(store, KEYS).problems == []
