"""Only unneeded checkpoints expire, despite kills; gc deletes exactly the orphans."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import BATCH, DyingStore, commit_files, config_of, make_run, save_one, score_one, write_data

from penstock.flows.commands.fork import create_fork
from penstock.flows.commands.maintenance import delete_orphans, gc_main
from penstock.flows.runtime.resolve import resolve
from penstock.storage.champions import Decision, Policy, champion, record_decision
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.history.run_record import ScheduleChange
from penstock.storage.leases import lease_key, store_time
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import (
    Orphan,
    expire_checkpoints,
    expired_versions,
    find_orphans,
    finish_interrupted_expiries,
    read_tombstone,
    remove_orphan,
    tombstone_key,
)
from penstock.storage.store import Store


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.jsonl")


def kept(store: Store, keys: RunKeys) -> list[int]:
    return store.committed_indices(f"{keys.prefix}/checkpoints")


def shared(store: Store, data: Path, at: int, name: str = "f", parent: str = "r") -> RunKeys:
    plans = [resolve("train", config_of(store, data, run), store) for run in (parent, name)]
    create_fork(store, *plans, at, restart_data=False)
    return RunKeys(name)


# ---- retention -------------------------------------------------------------------------------------------------------


def test_the_newest_the_best_and_the_requested_checkpoints_are_kept(store: Store, data: Path) -> None:
    config = config_of(store, data)
    keys = make_run(store, config, 6, save=(1, 2, 3, 4, 5, 6))
    for version, reward in {1: 0.1, 2: 0.9, 3: 0.9, 4: float("nan"), 6: 0.3}.items():
        score_one(store, keys, config, version, reward)
    options = {"num_to_keep": 2, "best_metric": "eval/sums", "keep_versions": {1}}
    assert expire_checkpoints(store, keys, **options) == [2, 4], "of equals the newer is the best"
    assert kept(store, keys) == [1, 3, 5, 6]
    assert expire_checkpoints(store, keys, **options) == [], "again changes nothing"
    assert expire_checkpoints(store, keys, num_to_keep=1, best_metric="eval/unknown") == [1, 3, 5]
    assert expired_versions(store, keys) == [1, 2, 3, 4, 5]
    tombstone = read_tombstone(store, keys.checkpoint_prefix(2))
    assert tombstone is not None and tombstone.commit.state["digest"] == {"w": "2"}
    assert tombstone.why == "beyond the newest 2 and not the best by eval/sums"
    assert [found.key for found in store.walk(f"{keys.prefix}/checkpoints/000002")] == []
    assert not Path(store.path(keys.checkpoint_prefix(2))).exists()


def test_a_killed_expiry_is_finished_by_the_next_call(tmp_path: Path, data: Path) -> None:
    """Two checkpoints with two files each expire: two tombstones, two records, four files."""
    whole = Store(str(tmp_path / "whole"))
    keys = make_run(whole, config_of(whole, data), 3, save=(1, 2, 3))
    for left in (0, 1, 2, 5, 8):
        store = Store(str(shutil.copytree(whole.root, tmp_path / f"store-{left}")))
        dying = DyingStore(store, left)
        if left < 8:
            with pytest.raises(KeyboardInterrupt):
                expire_checkpoints(dying, keys, num_to_keep=1)
        else:
            assert expire_checkpoints(dying, keys, num_to_keep=1) == [1, 2] and dying.left == 0
        assert audit_run(store, keys).problems == [], f"killed before change {left}"
        assert 3 in kept(store, keys)
        expire_checkpoints(store, keys, num_to_keep=1)
        assert kept(store, keys) == [3] and expired_versions(store, keys) == [1, 2]
        left_names = {Path(found.key).parts[3] for found in store.walk(f"{keys.prefix}/checkpoints")}
        assert left_names == {"000001.expired.json", "000002.expired.json", "000003", "000003.commit.json"}
        assert finish_interrupted_expiries(store, keys) == []


def test_shared_files_are_deleted_with_the_last_run_that_names_them(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 4, save=(1, 2, 4))
    fork_keys = shared(store, data, at=4)
    commit = store.committed(keys.checkpoint_prefix(1))
    assert commit is not None
    expire_checkpoints(store, keys, num_to_keep=1)
    assert kept(store, keys) == [4] and kept(store, fork_keys) == [1, 2, 4]
    assert audit_run(store, fork_keys).problems == [], "the fork needs its parent's files"
    assert find_orphans(store, older_than=0) == []
    expire_checkpoints(store, fork_keys, num_to_keep=1)
    assert not any(store.exists(record.path) for record in commit.files)
    assert audit_run(store, fork_keys).problems == audit_run(store, keys).problems == []


def test_parent_and_fork_keep_the_checkpoint_at_the_fork_point(store: Store, data: Path) -> None:
    config = config_of(store, data)
    keys = make_run(store, config, 6, save=(1, 2, 4, 6))
    fork_keys = shared(store, data, at=3)  # it begins with checkpoint 2
    make_run(store, config_of(store, data, "f"), 6, save=(5, 6))
    assert expire_checkpoints(store, keys, num_to_keep=1) == [1, 4]
    assert expire_checkpoints(store, fork_keys, num_to_keep=1) == [1, 5]
    assert kept(store, keys) == kept(store, fork_keys) == [2, 6]


def test_a_version_saved_again_after_it_expired_is_kept(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 3, save=(1, 2, 3))
    expire_checkpoints(store, keys, num_to_keep=1)
    save_one(store, keys, 2)
    finish_interrupted_expiries(store, keys)
    assert kept(store, keys) == [2, 3] and audit_run(store, keys).problems == []
    assert expire_checkpoints(store, keys, num_to_keep=1) == [2], "and it can expire again"
    assert kept(store, keys) == [3] and not Path(store.path(keys.checkpoint_prefix(2))).exists()


# ---- leftovers -------------------------------------------------------------------------------------------------------


def litter(store: Store, keys: RunKeys) -> dict[str, str]:
    """Return one orphan of each kind: directory or file -> kind."""
    lost, model = f"{keys.rollout_prefix(9)}/attempt-lost", "models/abc/attempt-lost"
    files = {
        f"{lost}/part-00000.parquet": "unfinished attempt",
        f"{lost}/deep/part": "unfinished attempt",
        f"{model}/weights": "unfinished attempt",
        f"{keys.rollout_prefix(0)}.journal/attempt-x/part-00000.parquet": "journal of a finished round",
        f"{keys.rollout_prefix(0)}.journal/000000.commit.json": "journal of a finished round",
        f"{keys.step_prefix(0)}.commit.json.0123456789ab.tmp": "temporary file",
        f"{keys.prefix}/published/weights-1/model.safetensors": "published weights",
        "runs/half/fork.json": "half-made fork",
        "runs/half/steps/000000.commit.json": "half-made fork",
        ".penstock-probe-01234567": "probe file",
    }
    needed = [
        f"{keys.rollout_prefix(9)}.journal/attempt-x/part",
        f"{keys.prefix}/logs/engine.log",
        f"{keys.prefix}/changes/000000.json",
    ]
    for key in [*files, *needed]:
        content = Commit(kind="step").model_dump_json() if key.endswith(".commit.json") else "{}"
        if key in needed[2:]:
            content = ScheduleChange(at=0.0, id="1", schedule={}, given={}).model_dump_json()
        store.create(key, content.encode())
    return {
        lost: "unfinished attempt",
        model: "unfinished attempt",
        f"{keys.rollout_prefix(0)}.journal": "journal of a finished round",
        "runs/half": "half-made fork",
        f"{keys.prefix}/published/weights-1": "published weights",
    } | {key: kind for key, kind in files.items() if kind in ("temporary file", "probe file")}


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_gc_deletes_exactly_the_orphans(kind: str, data: Path, store_of: Callable[[str], Store]) -> None:
    store = store_of(kind)
    config = config_of(store, data)
    keys = make_run(store, config, 2, save=(1, 2), score=(2,))
    commit_files(store, "models/unused", {"weights": b"another"}, kind="model")  # a later run may start from it
    before = {found.key for found in store.walk("")}
    wanted = litter(store, keys)
    assert find_orphans(store, older_than=3600) == [], "its writers may still be at work"
    later = time.time() + 7200
    found = find_orphans(store, older_than=3600, now=later)
    assert {orphan.key: orphan.kind for orphan in found} == wanted
    assert {orphan.key for orphan in find_orphans(store, "r", older_than=3600, now=later)} == {
        key for key in wanted if key.startswith("runs/r/")
    }
    attempt = next(orphan for orphan in found if orphan.key.startswith(keys.rollout_prefix(9)))
    assert (len(attempt.files), attempt.bytes) == (2, 4)
    assert all(remove_orphan(store, orphan, store_time(store)) for orphan in found)
    assert {found.key for found in store.walk("")} - before == {
        f"{keys.rollout_prefix(9)}.journal/attempt-x/part",
        f"{keys.prefix}/logs/engine.log",
        f"{keys.prefix}/changes/000000.json",
    }
    assert before <= {found.key for found in store.walk("")}, "nothing that was needed went"
    assert audit_run(store, keys).problems == []


@pytest.mark.parametrize("run", ["attempt-3.lease", "r.journal", "rollouts"])
def test_gc_keeps_a_run_named_like_a_part_of_a_key(store: Store, data: Path, run: str) -> None:
    keys = make_run(store, config_of(store, data, run), 2, save=(1, 2), score=(2,))
    fork_keys = shared(store, data, at=2, name="f.journal", parent=run)  # it keeps its parent's checkpoint
    expire_checkpoints(store, keys, num_to_keep=1)
    decision = Decision(action="promoted", champion=Policy(run=run, version=2, checkpoint="x"))
    record_decision(store, run, 0, decision)
    store.create(f"tensorboard/{run}/events", b"x")
    attempt = store.new_attempt(keys.rollout_prefix(9))
    with store.writing(attempt) as out:
        (out.path / "part").write_bytes(b"x")
        assert store.exists(lease_key(attempt)), "its writer is protected"
    lease = json.loads(store.read(lease_key(attempt)))
    store.replace(lease_key(attempt), json.dumps(lease | {"renewed": lease["renewed"] - 7200}).encode())
    later = time.time() + 7200
    found = find_orphans(store, older_than=0, now=later)
    assert [(orphan.kind, orphan.key) for orphan in found] == [("unfinished attempt", attempt)]
    assert remove_orphan(store, found[0], later)
    assert audit_run(store, keys).problems == audit_run(store, fork_keys).problems == []
    assert champion(store, run) == decision.champion and store.exists(f"tensorboard/{run}/events")


def test_gc_reads_only_commit_records_of_stages(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 1)
    torn = ["mlflow/artifacts/1/abc/artifacts/commits/rollouts/000000.commit.json", "notes.expired.json"]
    for key in [*torn, f"{keys.rollout_prefix(9)}/attempt-x/000000.commit.json"]:
        store.create(key, b"{")
    found = find_orphans(store, older_than=0, now=time.time() + 1)
    assert [orphan.key for orphan in found] == [f"{keys.rollout_prefix(9)}/attempt-x"]


def test_an_orphan_that_became_needed_is_kept(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 1)
    # a model's attempt is not under the model's prefix, which is known only when it is committed
    for attempt, prefix in (
        (store.new_attempt(keys.checkpoint_prefix(1)), keys.checkpoint_prefix(1)),
        ("models/attempt-x", "models/other"),
    ):
        with store.writing(attempt) as out:
            (out.path / "weights").write_bytes(b"slow")
        (found,) = find_orphans(store, older_than=0, now=time.time() + 1)
        store.commit(prefix, Commit(kind="checkpoint", attempt=attempt, files=out.files, index=1, policy_version=1))
        assert not remove_orphan(store, found, store_time(store)) and store.exists(f"{attempt}/weights")
    store.create(RunKeys("f").fork, b"{}")
    half: Orphan = find_orphans(store, "f", older_than=0, now=time.time() + 1)[0]
    store.create(RunKeys("f").record, b"{}")
    assert not remove_orphan(store, half, store_time(store)) and store.exists(RunKeys("f").fork)


def test_a_killed_expiry_is_listed_without_grace_and_finished(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 2, save=(1, 2))
    with pytest.raises(KeyboardInterrupt):
        expire_checkpoints(DyingStore(store, 1), keys, num_to_keep=1)  # after the tombstone
    found = find_orphans(store, older_than=3600)
    assert [(orphan.kind, len(orphan.files)) for orphan in found] == [("expired checkpoint", 2)]
    assert delete_orphans(store, found, None, 3600) == {found[0].key}
    assert kept(store, keys) == [2] and find_orphans(store, older_than=0) == []
    assert store.exists(tombstone_key(keys.checkpoint_prefix(1)))


def test_gc_keeps_an_expired_checkpoint_that_a_fork_shares_since_its_listing(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 6, save=(2, 4, 6))
    with pytest.raises(KeyboardInterrupt):
        expire_checkpoints(DyingStore(store, 1), keys, num_to_keep=2)
    (found,) = find_orphans(store, older_than=3600)
    fork_keys = shared(store, data, at=3)
    finish_interrupted_expiries(store, keys)
    assert kept(store, keys) == [4, 6] and kept(store, fork_keys) == [2]
    assert not remove_orphan(store, found, store_time(store))
    assert audit_run(store, fork_keys).problems == []


def test_an_unreadable_record_stops_gc(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 1)
    Path(store.path(commit_key(keys.rollout_prefix(0)))).write_text("{")
    with pytest.raises(StoreError, match=r"rollouts/000000.commit.json .*nothing is deleted"):
        find_orphans(store, older_than=0)


def test_the_command_deletes_only_with_the_flag(store: Store, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = make_run(store, config_of(store, data), BATCH)
    lost = f"{keys.rollout_prefix(9)}/attempt-lost/part"
    store.create(lost, b"x" * 1500)
    where = ["--store", store.root]
    assert gc_main(["r", *where]) == 0
    assert "no unneeded files" in capsys.readouterr().out
    assert gc_main(["r", "--older-than", "0", *where]) == 0
    out = capsys.readouterr().out
    assert "unfinished attempt" in out and "1 files, 1.5 kB; nothing was removed" in out and store.exists(lost)
    assert gc_main(["--older-than=0", "--delete", "r", *where]) == 0
    assert "1 files, 1.5 kB removed" in capsys.readouterr().out and not store.exists(lost)
