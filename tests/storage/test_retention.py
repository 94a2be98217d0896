"""Checkpoints go only when nobody needs them, whoever is killed meanwhile; gc finds what nothing needs and never anything else."""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from made_run import BATCH, commit_files, config_of, make_run, save_one, score_one, write_data

from flows import gc
from flows.fork import fork
from storage.audit import audit
from storage.errors import StoreError
from storage.leftovers import Leftover, leftovers, remove
from storage.refs import Commit, RunKeys, commit_key
from storage.retention import expire_checkpoints, expired, expired_key, expired_versions, finish_expiries, fork_key
from storage.store import Store


class Killed(BaseException):
    """As a SIGKILL is: nothing that comes after it happens."""


class DyingStore(Store):
    """Dies before the change number `left`; every file that is deleted counts."""

    def __init__(self, uri: str, left: int) -> None:
        super().__init__(uri, probe=False)
        self.left = left

    def create(self, key: str, data: bytes) -> bool:
        self._count()
        return super().create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._count()
            super().delete([key])

    def _count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.jsonl")


def kept(store: Store, keys: RunKeys) -> list[int]:
    return store.committed_indices(f"{keys.prefix}/checkpoints")


def shared(store: Store, data: Path, at: int, name: str = "f", parent: str = "r") -> RunKeys:
    fork(store, "post_train", config_of(store, data, parent), config_of(store, data, name), at, restart_data=False)
    return RunKeys(name)


# ---- retention --------------------------------------------------------------------------------------------------------------


def test_the_newest_the_best_and_the_wanted_stay(store: Store, data: Path) -> None:
    config = config_of(store, data)
    keys = make_run(store, config, 6, save=(1, 2, 3, 4, 5, 6))
    for version, reward in {1: 0.1, 2: 0.9, 3: 0.9, 4: float("nan"), 6: 0.3}.items():
        score_one(store, keys, config, version, reward)
    assert expire_checkpoints(store, keys, keep=2, best="eval/sums", also={1}) == [2, 4], "of equals the newer is the best"
    assert kept(store, keys) == [1, 3, 5, 6]
    assert expire_checkpoints(store, keys, keep=2, best="eval/sums", also={1}) == [], "again changes nothing"
    assert expire_checkpoints(store, keys, keep=1, best="eval/unknown") == [1, 3, 5]
    assert expired_versions(store, keys) == [1, 2, 3, 4, 5]
    tombstone = expired(store, keys.checkpoint(2))
    assert tombstone is not None and tombstone.commit.state["digest"] == {"w": "2"}
    assert tombstone.why == "beyond the newest 2 and not the best by eval/sums"
    assert [found.key for found in store.walk(f"{keys.prefix}/checkpoints/000002")] == []
    assert not Path(store.path(keys.checkpoint(2))).exists()


def test_killed_anywhere_the_next_call_finishes(tmp_path: Path, data: Path) -> None:
    """Two checkpoints with two files each go: two tombstones, two records, four files."""
    whole = Store(str(tmp_path / "whole"))
    keys = make_run(whole, config_of(whole, data), 3, save=(1, 2, 3))
    for left in range(9):
        store = Store(str(shutil.copytree(whole.root, tmp_path / f"store-{left}")))
        dying = DyingStore(store.uri, left)
        if left < 8:
            with pytest.raises(Killed):
                expire_checkpoints(dying, keys, keep=1)
        else:
            assert expire_checkpoints(dying, keys, keep=1) == [1, 2] and dying.left == 0
        assert audit(store, keys).problems == [], f"killed before change {left}"
        assert 3 in kept(store, keys)
        expire_checkpoints(store, keys, keep=1)
        assert kept(store, keys) == [3] and expired_versions(store, keys) == [1, 2]
        assert {Path(found.key).parts[3] for found in store.walk(f"{keys.prefix}/checkpoints")} == {
            "000001.expired.json",
            "000002.expired.json",
            "000003",
            "000003.commit.json",
        }
        assert finish_expiries(store, keys) == []


def test_files_go_with_the_last_run_that_names_them(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 4, save=(1, 2, 4))
    fork_keys = shared(store, data, at=4)
    commit = store.committed(keys.checkpoint(1))
    assert commit is not None
    expire_checkpoints(store, keys, keep=1)
    assert kept(store, keys) == [4] and kept(store, fork_keys) == [1, 2, 4]
    assert audit(store, fork_keys).problems == [], "the fork needs its parent's files"
    assert leftovers(store, older_than=0) == []
    expire_checkpoints(store, fork_keys, keep=1)
    assert not any(store.exists(record.path) for record in commit.files)
    assert audit(store, fork_keys).problems == audit(store, keys).problems == []


def test_where_a_fork_begins_both_keep_the_checkpoint(store: Store, data: Path) -> None:
    config = config_of(store, data)
    keys = make_run(store, config, 6, save=(1, 2, 4, 6))
    fork_keys = shared(store, data, at=3)  # it begins with checkpoint 2
    make_run(store, config_of(store, data, "f"), 6, save=(5, 6))
    assert expire_checkpoints(store, keys, keep=1) == [1, 4]
    assert expire_checkpoints(store, fork_keys, keep=1) == [1, 5]
    assert kept(store, keys) == kept(store, fork_keys) == [2, 6]


def test_a_version_saved_again_after_it_expired_lives(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 3, save=(1, 2, 3))
    expire_checkpoints(store, keys, keep=1)
    save_one(store, keys, 2)
    finish_expiries(store, keys)
    assert kept(store, keys) == [2, 3] and audit(store, keys).problems == []
    assert expire_checkpoints(store, keys, keep=1) == [2], "and it can expire again"
    assert kept(store, keys) == [3] and not Path(store.path(keys.checkpoint(2))).exists()


def test_on_a_store_that_fails_now_and_then(tmp_path: Path, data: Path, faulty_store: Callable[..., Store]) -> None:
    store = faulty_store(tmp_path.name)
    keys = make_run(store, config_of(store, data), 3, save=(1, 2, 3))
    fork_keys = shared(store, data, at=3)
    expire_checkpoints(store, keys, keep=1)  # a listing that lags may hide some of them: those stay until the next time
    assert store.committed(keys.checkpoint(3)) is not None
    assert audit(store, keys).problems == audit(store, fork_keys).problems == []


# ---- leftovers --------------------------------------------------------------------------------------------------------------


def litter(store: Store, keys: RunKeys) -> dict[str, str]:
    """One of each kind: directory or file -> kind."""
    lost, model = f"{keys.rollout(9)}/attempt-lost", "models/abc/attempt-lost"
    files = {
        f"{lost}/part-00000.parquet": "unfinished attempt",
        f"{lost}/deep/part": "unfinished attempt",
        f"{model}/weights": "unfinished attempt",
        f"{keys.rollout(0)}.journal/attempt-x/part-00000.parquet": "journal of a finished round",
        f"{keys.rollout(0)}.journal/000000.commit.json": "journal of a finished round",
        f"{keys.step(0)}.commit.json.0123456789ab.tmp": "temporary file",
        f"{keys.prefix}/published/weights-1/model.safetensors": "published weights",
        "runs/half/fork.json": "half-made fork",
        "runs/half/steps/000000.commit.json": "half-made fork",
        ".penstock-probe-01234567": "probe file",
    }
    needed = [f"{keys.rollout(9)}.journal/attempt-x/part", f"{keys.prefix}/logs/engine.log", f"{keys.prefix}/changes/000000.json"]
    for key in [*files, *needed]:
        content = Commit(kind="step").model_dump_json() if key.endswith(".commit.json") else "{}"
        store.create(key, content.encode())
    return {
        lost: "unfinished attempt",
        model: "unfinished attempt",
        f"{keys.rollout(0)}.journal": "journal of a finished round",
        "runs/half": "half-made fork",
        f"{keys.prefix}/published/weights-1": "published weights",
    } | {key: kind for key, kind in files.items() if kind in ("temporary file", "probe file")}


@pytest.mark.parametrize("kind", ["local", "memory", "s3"])
def test_exactly_what_nothing_needs_is_found_and_goes(
    kind: str, tmp_path: Path, data: Path, request: pytest.FixtureRequest
) -> None:
    uri = str(tmp_path / "store") if kind == "local" else f"memory://{tmp_path.name}"
    store = request.getfixturevalue("s3_store")(tmp_path.name) if kind == "s3" else Store(uri)
    config = config_of(store, data)
    keys = make_run(store, config, 2, save=(1, 2), score=(2,))
    before = {found.key for found in store.walk("")}
    wanted = litter(store, keys)
    assert leftovers(store, older_than=3600) == [], "its writers may still be at work"
    later = time.time() + 7200
    found = leftovers(store, older_than=3600, now=later)
    assert {leftover.key: leftover.kind for leftover in found} == wanted
    assert {leftover.key for leftover in leftovers(store, "r", older_than=3600, now=later)} == {
        key for key in wanted if key.startswith("runs/r/")
    }
    attempt = next(leftover for leftover in found if leftover.key.startswith(keys.rollout(9)))
    assert (len(attempt.files), attempt.bytes) == (2, 4)
    assert all(remove(store, leftover) for leftover in found)
    assert {found.key for found in store.walk("")} - before == {
        f"{keys.rollout(9)}.journal/attempt-x/part",
        f"{keys.prefix}/logs/engine.log",
        f"{keys.prefix}/changes/000000.json",
    }
    assert before <= {found.key for found in store.walk("")}, "nothing that was needed went"
    assert audit(store, keys).problems == []


def test_what_has_come_to_be_needed_is_not_removed(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 1)
    # a model's attempt does not lie under the model's name, which is known at its end only
    for attempt, prefix in ((store.new_attempt(keys.checkpoint(1)), keys.checkpoint(1)), ("models/attempt-x", "models/other")):
        with store.writing(attempt) as out:
            (out.path / "weights").write_bytes(b"slow")
        (found,) = leftovers(store, older_than=0, now=time.time() + 1)
        store.commit(prefix, Commit(kind="checkpoint", attempt=attempt, files=out.files, index=1, policy_version=1))
        assert not remove(store, found) and store.exists(f"{attempt}/weights")
    store.create(fork_key(RunKeys("f")), b"{}")
    half: Leftover = leftovers(store, "f", older_than=0, now=time.time() + 1)[0]
    store.create(RunKeys("f").record, b"{}")
    assert not remove(store, half) and store.exists(fork_key(RunKeys("f")))


def test_an_expiry_that_was_killed_is_listed_at_once_and_finished(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 2, save=(1, 2))
    with pytest.raises(Killed):
        expire_checkpoints(DyingStore(store.uri, 1), keys, keep=1)  # the tombstone stands, and nothing has gone
    found = leftovers(store, older_than=3600)
    assert [(leftover.kind, len(leftover.files)) for leftover in found] == [("expired checkpoint", 2)]
    assert gc.delete(store, found, None, 3600) == {found[0].key}
    assert kept(store, keys) == [2] and leftovers(store, older_than=0) == []
    assert store.exists(expired_key(keys.checkpoint(1)))


def test_a_record_that_nobody_can_read_stops_gc(store: Store, data: Path) -> None:
    keys = make_run(store, config_of(store, data), 1)
    Path(store.path(commit_key(keys.rollout(0)))).write_text("{")
    with pytest.raises(StoreError, match=r"rollouts/000000.commit.json .*nothing is deleted"):
        leftovers(store, older_than=0)


def test_the_command_deletes_only_when_told(store: Store, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = make_run(store, config_of(store, data), BATCH)
    lost = f"{keys.rollout(9)}/attempt-lost/part"
    store.create(lost, b"x" * 1500)
    where = ["--store", store.root]
    assert gc.main(["r", *where]) == 0
    assert "nothing is left over" in capsys.readouterr().out
    assert gc.main(["r", "--older-than", "0", *where]) == 0
    out = capsys.readouterr().out
    assert "unfinished attempt" in out and "1 files, 1.5 kB; nothing was removed" in out and store.exists(lost)
    assert gc.main(["--older-than=0", "--delete", "r", *where]) == 0
    assert "1 files, 1.5 kB removed" in capsys.readouterr().out and not store.exists(lost)
    with pytest.raises(ValueError, match="has no run 'x'"):
        gc.main(["x", *where])
    with pytest.raises(ValueError, match="--older-than takes a number"):
        gc.main(["--older-than", "soon", *where])


def test_files_of_models_that_runs_share_stay(store: Store, data: Path) -> None:
    make_run(store, config_of(store, data), 1)
    commit_files(store, "models/unused", {"weights": b"another"}, kind="model")
    assert leftovers(store, older_than=0, now=time.time() + 1) == []
