"""The commit protocol: committed files are complete and permanent, whatever other writers do."""

import json
import math
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.store import Store

KEYS = RunKeys("r")


def write(store: Store, prefix: str, content: bytes = b"data") -> Commit:
    """Act like a stage: write files under a private prefix, then commit."""
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        (out.path / "deep").mkdir()
        (out.path / "deep" / "part").write_bytes(content)
    return store.commit(prefix, Commit(kind="rollout", attempt=attempt, files=out.files))


def read(store: Store, commit: Commit) -> bytes:
    with store.reading(commit) as directory:
        return (directory / "deep" / "part").read_bytes()


@pytest.fixture(params=["local", "memory", "faulty_s3"])
def store(request: pytest.FixtureRequest, store_of: Callable[[str], Store]) -> Store:
    return store_of(request.param)


def test_a_commit_is_read_back_with_its_files(store: Store) -> None:
    assert store.committed(KEYS.rollout_prefix(3)) is None
    commit = write(store, KEYS.rollout_prefix(3), b"three")
    again = Store(store.uri, store.options)
    assert again.committed(KEYS.rollout_prefix(3)) == commit
    assert read(again, commit) == b"three"
    assert [record.bytes for record in commit.files] == [5]
    assert again.committed_indices(f"{KEYS.prefix}/rollouts") == [3]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"deep/part is missing.* 4 bytes"), (b"da", "2 bytes"), (b"dada", r"deep/part .*{xxh3}")],
    ids=["deleted", "truncated", "changed"],
)
def test_reading_a_damaged_file_raises_an_error_that_names_it(
    store: Store, content: bytes | None, message: str
) -> None:
    commit = write(store, KEYS.rollout_prefix(0), b"data")
    key = commit.files[0].path
    store.delete([key])
    while content is not None and store.size(key) != len(content):  # the faulty store truncates some uploads
        store.replace(key, content)
    with pytest.raises(StoreError, match=message.format(xxh3=commit.files[0].xxh3)), store.reading(commit):
        pass


def test_several_writers_share_an_attempt(store: Store) -> None:
    """Each rank makes its own files durable, and the commit names all of them."""
    attempt = store.new_attempt(KEYS.checkpoint_prefix(1))
    with store.writing(attempt, owns=lambda name: name == "rank-0") as zero:
        with store.writing(attempt, owns=lambda name: name == "rank-1") as one:
            (zero.path / "rank-0").write_text("half")
            (one.path / "rank-1").write_text("one")
        (zero.path / "rank-0").write_text("zero")
    commit = store.commit(
        KEYS.checkpoint_prefix(1), Commit(kind="checkpoint", attempt=attempt, files=zero.files + one.files)
    )
    with store.reading(commit) as directory:
        assert [(directory / f"rank-{rank}").read_text() for rank in (0, 1)] == ["zero", "one"]
    store.fs.pipe_file(store.path(f"{attempt}/rank-0"), b"changed")
    with store.reading(commit, only=["rank-1"]) as directory:
        assert (directory / "rank-1").read_text() == "one", "the changed file is not read"


# ---- housekeeping ----------------------------------------------------------------------------------------------------


def test_delete_skips_missing_files(store: Store) -> None:
    commit, other = write(store, KEYS.rollout_prefix(0)), write(store, KEYS.rollout_prefix(1))
    store.delete([record.path for record in commit.files])
    store.delete([*(record.path for record in commit.files), commit_key(KEYS.rollout_prefix(0)), "never/was"])
    assert [entry.key for entry in store.walk(KEYS.prefix)] == [commit_key(KEYS.rollout_prefix(1)), other.files[0].path]
    assert not store.is_local or not store.exists(commit.attempt or "")
    assert read(store, other) == b"data"


def test_committed_indices_are_sorted_and_ignore_other_files(store: Store) -> None:
    for index in (10, 2, 7):
        write(store, KEYS.rollout_prefix(index))
    store.fs.pipe_file(store.path(commit_key(f"{KEYS.prefix}/rollouts/copy of 000002")), b"{}")
    killed = commit_key(KEYS.rollout_prefix(3)) + ".1f2e.tmp"  # before its link
    store.fs.pipe_file(store.path(killed), b"{")
    assert store.committed_indices(f"{KEYS.prefix}/rollouts") == [2, 7, 10]


def test_a_file_of_another_client_is_visible_after_a_listing(store: Store) -> None:
    """Drivers cache listings; later writes of another process must still be found."""
    write(store, KEYS.rollout_prefix(0))
    assert store.list(f"{KEYS.prefix}/rollouts")
    other = Store(store.uri, {**store.options, "skip_instance_cache": True} if not store.is_local else None)
    other.create(f"{KEYS.prefix}/rollouts/new.json", b"{}")
    assert store.exists(f"{KEYS.prefix}/rollouts/new.json")
    assert store.size(f"{KEYS.prefix}/rollouts/new.json") == 2


def test_single_writer_keeps_the_first_record(tmp_path: Path, s3_store: Callable[..., Store]) -> None:
    for store in (Store(str(tmp_path / "a"), single_writer=True), s3_store(tmp_path.name, single_writer=True)):
        assert store.create("x", b"1")
        assert not store.create("x", b"2")
        assert store.read("x") == b"1"


# ---- between processes -----------------------------------------------------------------------------------------------


def _race(
    root: str, barrier: "multiprocessing.synchronize.Barrier", writer: int, queue: "multiprocessing.Queue"
) -> None:
    store = Store(root, probe=False)
    won = []
    for index in range(40):
        barrier.wait()
        commit = store.commit(
            KEYS.step_prefix(index), Commit(kind="step", index=index, state={"writer": writer, "pad": "x" * 50_000})
        )
        assert commit.state["pad"] == "x" * 50_000
        won.append(commit.state["writer"])
    queue.put((writer, won))


def test_all_processes_of_a_race_agree_on_one_winner(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_race, args=(str(tmp_path), barrier, writer, queue)) for writer in range(2)]
    for process in processes:
        process.start()
    seen = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert seen[0] == seen[1]
    store = Store(str(tmp_path))
    assert [store.committed(KEYS.step_prefix(i)).state["writer"] for i in range(40)] == seen[0]  # type: ignore[union-attr]
    assert not list(tmp_path.rglob("*.tmp"))


# ---- what a store must be able to do ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "message"), [("{path}/file/store", r"not writable.* --store"), ("foo://x", r"foo://x.* --store")]
)
def test_a_store_that_cannot_be_opened_is_refused(uri: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=message):
        Store(uri.format(path=tmp_path))


def test_a_disk_without_hard_links_needs_single_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match=r"hard links.*--store-single-writer"):
        Store(str(tmp_path))
    assert Store(str(tmp_path), single_writer=True).create("k", b"1")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_link_whose_nfs_reply_was_lost_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_link = os.link

    def link(source: str, target: str) -> None:
        real_link(source, target)
        raise FileExistsError(17, "File exists")

    store = Store(str(tmp_path))
    monkeypatch.setattr(os, "link", link)
    assert store.create("k", b"1")


def test_conflicts_that_s3fs_does_not_translate_are_recognized(
    s3_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MinIO's 412 lacks the name of the condition; AWS's 409 requests a retry."""
    store = s3_store(tmp_path.name)
    assert store.create("k", b"another writer's")

    class ClientError(Exception):
        def __init__(self, code: str) -> None:
            self.response = {"Error": {"Code": code}}

    answers = ["ConditionalRequestConflict", "PreconditionFailed"]

    def pipe_file(*args: object, **kwargs: object) -> None:
        raise OSError(22, "translated") from ClientError(answers.pop(0))

    monkeypatch.setattr(store.fs, "pipe_file", pipe_file)
    assert store.create("k", b"1") is False
    assert answers == []


# ---- commit records --------------------------------------------------------------------------------------------------


def test_a_commit_with_a_nan_loss_is_readable(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.commit(
        KEYS.step_prefix(0), Commit(kind="step", summary={"train/loss": math.nan, "train/grad_norm": math.inf})
    )
    commit = store.committed(KEYS.step_prefix(0))
    assert commit is not None
    assert math.isnan(commit.summary["train/loss"])
    assert commit.summary["train/grad_norm"] == math.inf
    data = store.read(commit_key(KEYS.step_prefix(0)))
    assert data is not None
    json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
