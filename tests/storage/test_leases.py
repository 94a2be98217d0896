"""`gc --delete` and a writer, in every order: either the commit is complete, or the writer fails and writes again."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.flows.commands.maintenance import gc_main
from penstock.storage import leases
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.failpoints import VARIABLE
from penstock.storage.leases import (
    Lease,
    claim_key,
    describe_lease_holder,
    describe_live_drivers,
    lease_key,
    store_time,
)
from penstock.storage.maintenance.deletion import Orphan, find_orphans, remove_orphan
from penstock.storage.store import Store

KEYS = RunKeys("r")
PREFIX = KEYS.rollout_prefix(0)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, store_of: Callable[[str], Store]) -> Store:
    return store_of(request.param)


@pytest.fixture
def lapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every lease expire, like that of a writer that was stopped for long."""
    monkeypatch.setattr(leases, "TTL", -10.0)


@pytest.fixture
def stopped_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return a context manager: `with stopped_at(point, call) as result:` runs `call` in a thread that waits at `point`
    during the block."""
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "faults"))

    @contextmanager
    def stop(point: str, call: Callable[[], object]) -> Iterator[Future[object]]:
        armed, reached = tmp_path / "faults" / point, tmp_path / "faults" / f"{point}.reached"
        armed.touch()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(call)
            try:
                while not reached.exists():
                    assert not result.done(), result.exception()
                    time.sleep(0.001)
                yield result
            finally:
                reached.unlink(missing_ok=True)
                armed.unlink(missing_ok=True)

    return stop


def write(store: Store, content: bytes = b"data") -> Commit:
    """Act like a stage: look for the commit, write, commit."""
    if commit := store.committed(PREFIX):
        return commit
    attempt = store.new_attempt(PREFIX)
    with store.writing(attempt) as out:
        (out.path / "part").write_bytes(content)
        (out.path / "other").write_bytes(content)
    return store.commit(PREFIX, Commit(kind="rollout", attempt=attempt, files=out.files))


def collect(store: Store) -> set[str]:
    """Run `gc --delete --older-than 0`, a minute later by the store's clock. Return the deleted keys."""
    now = store_time(store) + 60
    return {orphan.key for orphan in find_orphans(store, older_than=0, now=now) if remove_orphan(store, orphan, now)}


def assert_whole(store: Store) -> None:
    commit = store.committed(PREFIX)
    assert commit is not None
    with store.reading(commit) as directory:
        assert (directory / "part").exists()


# ---- interleavings ---------------------------------------------------------------------------------------------------


def test_gc_keeps_the_files_of_a_live_writer(store: Store, stopped_at: Callable) -> None:
    with stopped_at("commit-before-seal", lambda: write(store)) as result:
        assert collect(store) == set()
        assert len(find_orphans(store, older_than=0, now=time.time() + 60)) == 1, "it is listed"
    assert result.result() == store.committed(PREFIX)
    assert_whole(store)
    assert {found.key for found in store.walk(PREFIX)} == {file.path for file in result.result().files}, (
        "no lease, no claim"
    )


@pytest.mark.usefixtures("lapsed")
def test_gc_before_the_seal_makes_the_writer_fail_and_rerun(store: Store, stopped_at: Callable) -> None:
    with stopped_at("commit-before-seal", lambda: write(store)) as result:
        assert len(collect(store)) == 1
        assert not list(store.walk(PREFIX))
    with pytest.raises(StoreError):
        result.result()
    assert store.committed(PREFIX) is None, "no commit without its files"
    write(store, b"again")
    assert_whole(store)


@pytest.mark.usefixtures("lapsed")
def test_gc_after_the_seal_keeps_the_attempt(store: Store, stopped_at: Callable) -> None:
    with stopped_at("commit-sealed", lambda: write(store)) as result:
        assert collect(store) == set()
    result.result()
    assert_whole(store)
    assert collect(store) == set()


@pytest.mark.usefixtures("lapsed")
def test_a_writer_that_commits_during_gc_fails(store: Store, stopped_at: Callable) -> None:
    with stopped_at("commit-before-seal", lambda: write(store)) as writer:
        with stopped_at("gc-condemned", lambda: collect(store)) as collector:
            os.unlink(Path(os.environ[VARIABLE]) / "commit-before-seal.reached")
            with pytest.raises(StoreError):
                writer.result(timeout=60)
            assert len(list(store.walk(PREFIX))) >= 2, "gc has deleted nothing yet"
        assert len(collector.result()) == 1
    assert store.committed(PREFIX) is None
    assert not list(store.walk(PREFIX))


@pytest.mark.usefixtures("lapsed")
def test_gc_pardons_an_attempt_committed_after_its_listing(store: Store, stopped_at: Callable) -> None:
    with stopped_at("commit-before-seal", lambda: write(store)) as writer:
        with stopped_at("gc-before-condemn", lambda: collect(store)) as collector:
            os.unlink(Path(os.environ[VARIABLE]) / "commit-before-seal.reached")
            writer.result(timeout=60)
        assert collector.result() == set()
    assert_whole(store)
    assert collect(store) == set(), "not even a claim is left"


@pytest.mark.usefixtures("lapsed")
def test_the_next_gc_finishes_a_killed_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = store.new_attempt(PREFIX)
    with store.writing(attempt) as out:
        (out.path / "part").write_bytes(b"x")
    delete = Store.delete

    def killed(self: Store, keys: Iterable[str]) -> None:
        keys = list(keys)
        if any(key.startswith(attempt) for key in keys):
            raise KeyboardInterrupt
        delete(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(store)
    with pytest.raises(StoreError):
        store.commit(PREFIX, Commit(kind="rollout", attempt=attempt, files=out.files))
    assert collect(store) == {attempt}
    assert not list(store.walk(PREFIX))


@pytest.mark.usefixtures("lapsed")
def test_an_attempt_sealed_by_a_killed_writer_is_deleted_after_the_limit(store: Store) -> None:
    attempt = store.new_attempt(PREFIX)
    with store.writing(attempt) as out:
        (out.path / "part").write_bytes(b"x")
    leases.sealed_against_deletion(store, Commit(kind="rollout", attempt=attempt, files=out.files)).__enter__()
    assert collect(store) == set()
    [orphan] = find_orphans(store, older_than=0, now=time.time() + 2 * leases.SEAL_LIMIT)
    assert remove_orphan(store, orphan, time.time() + 2 * leases.SEAL_LIMIT)
    assert not list(store.walk(PREFIX))


def test_a_writer_stopped_after_its_seal_does_not_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "SEAL_LIMIT", -1.0)
    with pytest.raises(StoreError):
        write(store)
    assert store.committed(PREFIX) is None


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_lasts_until_it_is_released(store: Store) -> None:
    key = leases.new_driver_lease_key(KEYS)
    lease = Lease(store, key).take()
    assert len(describe_live_drivers(store, KEYS)) == 1 and describe_live_drivers(store, KEYS, own_lease=key) == []
    lease.release()
    assert describe_live_drivers(store, KEYS) == [] and not store.exists(key)


def test_a_failed_renewal_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    monkeypatch.setattr(leases, "RENEW", 0.01)
    failures = iter([OSError(28, "No space left on device"), StoreError("away")])
    replace, renewed = Store.replace, threading.Event()

    def fail_twice(self: Store, key: str, data: bytes) -> None:
        if threading.current_thread().name == "lease" and (failure := next(failures, None)):
            raise failure
        replace(self, key, data)
        if threading.current_thread().name == "lease":
            renewed.set()

    monkeypatch.setattr(Store, "replace", fail_twice)
    lease = Lease(store, leases.new_driver_lease_key(KEYS)).take()
    assert renewed.wait(60)
    lease.release()


def test_a_lease_cut_by_a_full_disk_is_deleted_after_its_term(tmp_path: Path) -> None:
    store, key = Store(str(tmp_path)), leases.new_driver_lease_key(KEYS)
    Lease(store, key).take().stop_renewing()
    store.replace(key, b"")
    now = store_time(store)
    [orphan] = find_orphans(store, older_than=0, now=now + 60)
    assert (orphan.kind, remove_orphan(store, orphan, now)) == ("old lease", False)
    assert remove_orphan(store, orphan, now + leases.TTL + 60)


def test_published_weights_are_kept_while_a_driver_runs(store: Store) -> None:
    weights = f"{KEYS.prefix}/published/weights-1/model.safetensors"
    store.create(weights, b"x")
    lease = Lease(store, leases.new_driver_lease_key(KEYS)).take()
    assert collect(store) == set() and store.exists(weights)
    lease.release()
    assert collect(store) == {weights.rpartition("/")[0]}


def test_a_writer_that_fails_leaves_no_lease(store: Store) -> None:
    attempt = store.new_attempt(PREFIX)
    with pytest.raises(ZeroDivisionError), store.writing(attempt) as out:
        (out.path / "part").write_bytes(b"x")
        assert store.exists(lease_key(attempt))
        _ = 1 / 0
    assert not store.exists(lease_key(attempt)) and not store.exists(claim_key(attempt))
    assert store.committed(PREFIX) is None and store.committed_indices(f"{KEYS.prefix}/rollouts") == []


def test_the_loser_of_a_race_leaves_no_lease_and_its_files_are_orphans(store: Store) -> None:
    winner, attempts = write(store), []
    for _ in range(2):
        attempts.append(store.new_attempt(PREFIX))
        with store.writing(attempts[-1]) as out:
            (out.path / "part").write_bytes(b"late")
        assert store.commit(PREFIX, Commit(kind="rollout", attempt=attempts[-1], files=out.files)) == winner
    assert collect(store) == set(attempts)
    assert_whole(store)


def test_a_lease_or_claim_beside_a_commit_is_an_orphan(store: Store) -> None:
    commit = write(store)
    keys = {lease_key(commit.attempt or ""), claim_key(commit.attempt or "")}
    for key in keys:
        store.create(key, leases.SEALED)
    assert collect(store) == keys
    assert store.exists(commit_key(PREFIX))
    assert_whole(store)


def test_the_command_uses_the_stores_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A machine whose clock is two days ahead deletes no recent files."""
    store = Store(str(tmp_path))
    store.create(f"{PREFIX}/attempt-x/part", b"x")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * 86400)
    assert gc_main(["--delete", "--store", store.root]) == 0
    assert store.exists(f"{PREFIX}/attempt-x/part"), capsys.readouterr().out
    assert isinstance(find_orphans(store, older_than=0)[0], Orphan)


def test_a_damaged_lease_counts_until_it_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that keeps half of a renewal answers every reading with a wrong checksum, also after the holder's end."""

    class FlexibleChecksumError(Exception):
        """As in botocore."""

    def fails(cause: type[Exception]) -> None:
        def read(key: str) -> bytes:
            raise StoreError("accessing the lease failed 7 times") from cause("Expected checksum")

        monkeypatch.setattr(store, "read", read)

    store = Store(str(tmp_path))
    lease = Lease(store, "runs/r/drivers/1.lease").take()
    lease.stop_renewing()
    now = store_time(store)
    fails(FlexibleChecksumError)
    assert "process ?" in str(describe_lease_holder(store, lease.key, now))
    assert describe_lease_holder(store, lease.key, now, is_here=True) is None
    assert describe_lease_holder(store, lease.key, now + leases.TTL + 10) is None
    fails(ConnectionError)
    with pytest.raises(StoreError):
        describe_lease_holder(store, lease.key, now)
