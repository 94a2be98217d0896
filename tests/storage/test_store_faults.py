"""The commit protocol on a faulty server: commits are complete, unique and found, although single calls fail."""

import random
import threading
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faulty import FaultyProxy
from made_run import commit_files

from penstock.storage import disk, objects
from penstock.storage.commit import Commit, FileRecord, RunKeys, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.store import Store, committed_prefixes

KEYS = RunKeys("r")
Faulty = Callable[..., AbstractContextManager[tuple[FaultyProxy, dict[str, Any]]]]


def pattern(size: int, seed: int) -> bytes:
    return bytes((index * 31 + seed * 7) % 251 for index in range(997)) * (size // 997 + 1)


@pytest.mark.integration
def test_two_writers_on_a_faulty_store_agree_on_every_round(
    faulty_s3: Faulty, s3_store: Callable[..., Store], tmp_path: Path
) -> None:
    num_rounds = 3
    with faulty_s3(rate=0.3, seed=3) as (proxy, options):
        seen: dict[int, list[Commit]] = {0: [], 1: []}

        def work(writer: int) -> None:
            store = Store(f"s3://bucket/{tmp_path.name}", {**options, "skip_instance_cache": True})
            for index in range(num_rounds):
                contents = {f"part-{n}": pattern(3000, 100 * index + 10 * writer + n) for n in range(3)}
                fields = {"kind": "rollout", "state": {"writer": writer}}
                seen[writer].append(commit_files(store, KEYS.rollout_prefix(index), contents, **fields))
                with store.reading(seen[writer][-1]) as directory:
                    by = seen[writer][-1].state["writer"]
                    for n in range(3):
                        assert (directory / f"part-{n}").read_bytes() == pattern(3000, 100 * index + 10 * by + n)
                assert index in store.committed_indices(f"{KEYS.prefix}/rollouts")

        threads = [threading.Thread(target=work, args=(writer,)) for writer in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen[0] == seen[1]
    assert len(seen[0]) == num_rounds
    clean = s3_store(tmp_path.name)
    assert [clean.committed(KEYS.rollout_prefix(index)) for index in range(num_rounds)] == seen[0]
    for commit in seen[0]:
        with clean.reading(commit):
            pass
    num_faults = sum(proxy.counts.values()) - proxy.counts["calls"]
    assert num_faults >= 0.15 * proxy.counts["calls"], proxy.counts


@pytest.mark.integration
def test_a_large_file_is_uploaded_in_parts_and_downloaded_in_ranges(
    faulty_s3: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault repeats one part or range. Only damage repeats a whole file, since only the hash reveals it."""
    monkeypatch.setattr(objects, "CHUNK", 5 << 20)  # S3's smallest part
    content = pattern(31 << 20, 1)
    with faulty_s3(rate=0.4, seed=2, kinds={"throttle", "reset", "lost", "cut", "cut_upload"}) as (proxy, options):
        store = Store(f"s3://bucket/{tmp_path.name}", options)
        files = {"big": content, "small": b"x", "empty": b""}
        commit = commit_files(store, KEYS.rollout_prefix(0), files, kind="rollout")
        with store.reading(commit) as directory:
            assert (directory / "big").read_bytes() == content
            assert (directory / "empty").read_bytes() == b""
        assert sum(proxy.counts.values()) - proxy.counts["calls"] > 5, proxy.counts
        proxy.rate, proxy.kinds, proxy.limit = 1.0, {"damage"}, 2
        with store.reading(commit) as directory:
            assert (directory / "big").read_bytes() == content
        assert proxy.counts["damage"] == 2


def test_failed_uploads_are_repeated_until_the_file_is_complete(faulty_s3: Faulty, tmp_path: Path) -> None:
    kinds = {"lost", "short", "cut_upload"}
    with faulty_s3(rate=0.5, seed=2, kinds=kinds) as (proxy, options):
        store = Store(f"s3://bucket/{tmp_path.name}", options)
        commits = [
            commit_files(store, KEYS.rollout_prefix(index), {"part": pattern(2000, index)}, kind="rollout")
            for index in range(4)
        ]
        assert store.committed_indices(f"{KEYS.prefix}/rollouts") == [0, 1, 2, 3]
        for index, commit in enumerate(commits):
            with store.reading(commit) as directory:
                assert (directory / "part").read_bytes() == pattern(2000, index)
        assert kinds <= set(proxy.counts), proxy.counts


def test_a_create_with_a_lost_response_succeeds_only_for_its_own_content(faulty_s3: Faulty, tmp_path: Path) -> None:
    with faulty_s3(rate=0.0, kinds={"lost"}) as (proxy, options):
        store = Store(f"s3://bucket/{tmp_path.name}", options)
        proxy.rate = 1.0
        for limit in (1, 5):
            proxy.limit = limit  # so many answers are lost, one after another
            assert store.create(f"mine/{limit}", b"mine")
            assert not store.create(f"mine/{limit}", b"another's")
            assert store.read(f"mine/{limit}") == b"mine"
        assert proxy.counts["lost"] == 6


def test_stale_listings_are_corrected_in_both_directions(
    s3_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = s3_store(tmp_path.name)
    for index in range(5):
        store.commit(KEYS.step_prefix(index), Commit(kind="step"))
    for version in (4, 8):
        store.commit(KEYS.checkpoint_prefix(version), Commit(kind="checkpoint"))
    old = {"steps": ["000001", "000003"], "checkpoints": ["000004", "000006", "000008"]}  # 6 has expired since
    monkeypatch.setattr(store, "list", lambda prefix: [commit_key(name) for name in old[prefix.rsplit("/", 1)[-1]]])
    assert store.committed_indices(f"{KEYS.prefix}/steps") == [0, 1, 2, 3, 4]
    assert store.committed_indices(f"{KEYS.prefix}/checkpoints") == [4, 8]
    monkeypatch.setattr(store, "list", lambda prefix: [])
    assert committed_prefixes(store, KEYS) == [KEYS.step_prefix(index) for index in range(5)]


@pytest.mark.integration
def test_an_unreachable_server_is_reported_in_one_sentence(
    faulty_s3: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "NUM_TRIES", 2)
    with faulty_s3(rate=0.0) as (proxy, options):
        store = Store(f"s3://bucket/{tmp_path.name}", options)
        store.create("k", b"1")
        proxy.rate, proxy.kinds = 1.0, {"throttle"}
        with pytest.raises(StoreError, match=r"/k failed \d+ times"):
            store.read("k")
    begin = time.monotonic()
    with pytest.raises(StoreError, match=f"s3://bucket/{tmp_path.name}"):  # the server has been stopped
        Store(f"s3://bucket/{tmp_path.name}", {**options, "skip_instance_cache": True})
    assert time.monotonic() - begin < 60


# ---- which failures are worth another try ----------------------------------------------------------------------------


class ClientError(Exception):
    def __init__(self, code: str, status: int) -> None:
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


def translated(code: str, status: int) -> OSError:
    error = OSError(22, "translated by s3fs")
    error.__cause__ = ClientError(code, status)
    return error


class HttpError(Exception):
    """An error of gcsfs (`code`); Azure's has `status_code`."""

    def __init__(self, code: int) -> None:
        self.code = code


@pytest.mark.parametrize(
    "error, is_definite",
    [
        (translated("SlowDown", 503), False),
        (translated("RequestTimeout", 400), False),
        (translated("InvalidRequest", 400), True),
        (translated("ConditionalRequestConflict", 409), False),
        (HttpError(429), False),
        (HttpError(400), True),
        (TimeoutError(), False),
        (FileNotFoundError(), True),
        (StoreError("final"), True),
    ],
)
def test_only_transient_failures_are_retried(
    error: Exception, is_definite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_FIRST_PAUSE", 0.0)
    calls = []

    def call() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return "answer"

    if is_definite:
        with pytest.raises(type(error)):
            objects.call_with_retries(call, "asking")
    else:
        assert objects.call_with_retries(call, "asking") == "answer"
    assert len(calls) == (1 if is_definite else 2)


def test_missing_credentials_are_one_error_that_says_what_to_set() -> None:
    def call() -> None:
        raise type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")

    with pytest.raises(StoreError, match=r"listing runs needs credentials.*AWS_ACCESS_KEY_ID"):
        objects.call_with_retries(call, "listing runs")


def test_backoff_does_not_advance_the_seeded_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_PAUSE", 0.001)
    random.seed(7)
    expected = random.random()
    random.seed(7)
    answers = iter([TimeoutError(), TimeoutError(), None])

    def call() -> None:
        if error := next(answers):
            raise error

    objects.call_with_retries(call, "asking")
    assert random.random() == expected


# ---- other drivers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri, package", [("gs://bucket/x", "gcsfs"), ("az://container/x", "adlfs"), ("oss://b/x", "ossfs")]
)
def test_a_missing_driver_is_named(uri: str, package: str) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(StoreError, match=f"pip install {package}"):
        Store(uri)


class _Azure(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """Refuses a second create with an error of the Azure SDK, which some versions of adlfs do not translate."""

    protocol = "azure-like"
    store: dict = {}  # noqa: RUF012 - the parent class keeps its files in a class attribute
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        if mode == "create" and self.exists(path):
            raise type("ResourceExistsError", (Exception,), {})("The specified blob already exists.")
        super().pipe_file(path, value)


class _Overwriting(_Azure):
    """An object store that accepts `mode="create"` and ignores it."""

    protocol = "careless"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        super().pipe_file(path, value)


class _Old(_Azure):
    """A driver older than `mode="create"` (gcsfs before 2024.12)."""

    protocol = "old"

    def pipe_file(self, path: str, value: bytes) -> None:
        super().pipe_file(path, value)


def test_a_drivers_own_conflict_error_is_recognized() -> None:
    fsspec.register_implementation("azure-like", _Azure, clobber=True)
    store = Store("azure-like://x")
    assert store.create("k", b"1")
    assert not store.create("k", b"2")
    assert store.read("k") == b"1"


@pytest.mark.parametrize(("driver", "message"), [(_Overwriting, "second create"), (_Old, "conditional create")])
def test_a_driver_without_conditional_create_needs_single_writer(driver: type[_Azure], message: str) -> None:
    fsspec.register_implementation(driver.protocol, driver, clobber=True)
    uri = f"{driver.protocol}://{driver.protocol}"
    with pytest.raises(StoreError, match=rf"{message}.*--store-single-writer"):
        Store(uri)
    assert Store(uri, single_writer=True).create("k", b"1")


def test_an_incomplete_upload_is_removed_for_drivers_that_do_not_overwrite(tmp_path: Path) -> None:
    """adlfs refuses to overwrite the file of an earlier, failed upload."""
    store = Store(f"memory://{tmp_path.name}")
    put = store.fs.put_file

    def put_file(self: object, source: str, path: str) -> None:
        if store.fs.exists(path):
            raise FileExistsError(path)
        put(source, path)

    source = tmp_path / "part"
    source.write_bytes(b"whole")
    store.fs.pipe_file(store.path("a/part"), b"who")
    driver = types.SimpleNamespace(
        **{name: getattr(store.fs, name) for name in ("rm_file", "info", "invalidate_cache", "protocol")}
    )
    driver.put_file = types.MethodType(put_file, driver)
    objects.upload(driver, [(source, store.path("a/part"), 5)])  # type: ignore[arg-type]
    assert store.read("a/part") == b"whole"


def test_a_download_larger_than_the_scratch_disk_is_refused_before_it_starts(
    s3_store: Callable[..., Store], tmp_path: Path
) -> None:
    huge = FileRecord(path="runs/a/attempt-1/x", bytes=1 << 60, xxh3="")
    commit = Commit(kind="checkpoint", attempt="runs/a/attempt-1", files=[huge])
    with pytest.raises(StoreError, match="TMPDIR"), s3_store(tmp_path.name).reading(commit):
        pass


def test_the_first_failure_of_parallel_jobs_stops_the_rest() -> None:
    done = []

    def job(number: int) -> None:
        if number == 0:
            raise KeyError("first")
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(KeyError):
        disk.map_in_threads(job, range(100), 2)
    assert len(done) < 50
