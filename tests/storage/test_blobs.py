"""Images in a store: blobs are written once, verified, kept while any run lists them, and then deleted."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import commit_samples, config_of, make_run, write_data

from penstock.flows.cli import main
from penstock.flows.commands import fork
from penstock.flows.commands.maintenance import gc_main, rm_main
from penstock.storage import blobs
from penstock.storage.blobs import COLLECTION_LEASE, blob_key, blob_sizes, digest_of, read_blob, write_blobs
from penstock.storage.commit import BUFFER, Commit, RunKeys, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import find_orphans
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples, write_shards
from penstock.storage.store import Store

KEYS = RunKeys("r")
IMAGES = [b"first picture", b"second picture", b"third picture"]
NAMES = [digest_of(image) for image in IMAGES]
ROUNDS = 3


def add_images(store: Store, keys: RunKeys, rollout_id: int, images: list[bytes]) -> None:
    """Replace a committed rollout by one whose samples refer to images, each sample to all of them."""
    prefix = keys.rollout_prefix(rollout_id)
    commit = store.committed(prefix)
    samples, names = read_samples(store, commit), write_blobs(store, images)
    for sample in samples:
        sample.images = names
    store.delete([commit_key(prefix), *(file.path for file in commit.files)])
    fields = commit.model_dump(exclude={"attempt", "files", "digest", "blobs"})
    commit_samples(store, prefix, samples, blobs=blob_sizes(store, names), **fields)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Round 0 of the run has the first two images, round 1 the second one, and no run has the third one."""
    root = tmp_path_factory.mktemp("made")
    store = Store(str(root / "store"))
    make_run(store, config_of(store, write_data(root / "data.jsonl")), ROUNDS, save=(2,))
    make_run(store, config_of(store, root / "data.jsonl", "other"), 1)
    add_images(store, KEYS, 0, IMAGES[:2])
    add_images(store, KEYS, 1, IMAGES[1:2])
    write_blobs(store, IMAGES[2:])
    return root


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return Store(str(tmp_path / "store"))


def blobs_in(store: Store) -> list[str]:
    return sorted(set(store.list("blobs")))


def gc(store: Store, *words: str) -> None:
    assert gc_main(["--older-than", "0", *words, "--store", store.root]) == 0


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_blobs_are_written_once_and_read_back_verified(kind: str, store_of: Callable[[str], Store]) -> None:
    store = store_of(kind)
    assert write_blobs(store, [*IMAGES, IMAGES[0]]) == [*NAMES, NAMES[0]]
    before = {file.key: file.modified for file in store.walk("blobs")}
    assert list(before) == sorted(map(blob_key, NAMES))
    write_blobs(store, IMAGES)
    assert {file.key: file.modified for file in store.walk("blobs")} == before
    assert [read_blob(store, name) for name in NAMES] == IMAGES
    assert blob_sizes(store, NAMES) == dict(zip(NAMES, map(len, IMAGES)))
    store.replace(blob_key(NAMES[0]), IMAGES[0][:4])
    with pytest.raises(StoreError, match=f"{NAMES[0]} is damaged"):
        read_blob(store, NAMES[0])
    write_blobs(store, IMAGES)
    assert read_blob(store, NAMES[0]) == IMAGES[0], "a truncated blob is written again"
    store.delete([blob_key(NAMES[1])])
    with pytest.raises(StoreError, match=rf"{NAMES[1]}.* is missing"):
        read_blob(store, NAMES[1])
    with pytest.raises(StoreError, match=rf"{NAMES[1]}.* is missing.*rerun the stage"):
        blob_sizes(store, NAMES)


@pytest.mark.parametrize("with_hashes", [True, False])
def test_verify_reports_missing_and_damaged_images(store: Store, with_hashes: bool) -> None:
    Path(store.path(blob_key(NAMES[1]))).unlink()
    [problem] = audit_run(store, KEYS, verify_hashes=with_hashes).problems
    assert f"{NAMES[1]} is missing" in problem and "runs/r/rollouts" in problem
    write_blobs(store, IMAGES)
    Path(store.path(blob_key(NAMES[0]))).write_bytes(IMAGES[0].swapcase())  # the same size
    problems = audit_run(store, KEYS, verify_hashes=with_hashes).problems
    assert ["is damaged" in problem for problem in problems] == [True] * with_hashes


@pytest.mark.parametrize("name", ["part", BUFFER])
def test_verify_reports_images_that_the_commit_does_not_list(store: Store, name: str) -> None:
    prefix = KEYS.rollout_prefix(2)
    commit = store.committed(prefix)
    samples = read_samples(store, commit)
    buffered = [Sample("b", "000000099", "b", 2, images=NAMES[2:])]
    if name == "part":
        samples[0].images = NAMES[2:]
    store.delete([commit_key(prefix), *(file.path for file in commit.files)])
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
        if name == BUFFER:
            write_shards(out.path, buffered, BUFFER)
    fields = commit.model_dump(exclude={"attempt", "files", "digest"})
    store.commit(prefix, Commit(attempt=attempt, files=out.files, **fields))
    assert any(f"does not list the image {NAMES[2]}" in problem for problem in audit_run(store, KEYS).problems)


def test_gc_deletes_only_images_that_no_commit_lists(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    gc(store)
    assert "unused images" in capsys.readouterr().out and blobs_in(store) == sorted(NAMES)
    assert find_orphans(store, older_than=3600) == [], "the image is younger"
    [old, _] = write_blobs(store, [b"old", b"young"])
    os.utime(store.path(blob_key(old)), (0, 0))
    assert [orphan.files for orphan in find_orphans(store, older_than=3600)] == [(blob_key(old),)]
    assert find_orphans(store, "r", older_than=0) == [], "blobs belong to no run"
    gc(store, "--delete")
    assert blobs_in(store) == sorted(NAMES[:2])
    assert audit_run(store, KEYS).problems == []


def test_gc_keeps_images_of_the_journal_of_an_unfinished_round(store: Store) -> None:
    prefix = f"{KEYS.rollout_prefix(ROUNDS)}.journal"
    samples = [Sample("s", "g", "s", ROUNDS, images=NAMES[2:])]
    entry = commit_samples(store, f"{prefix}/000000", samples, kind="rollout", blobs={NAMES[2]: 13})
    gc(store, "--delete")
    assert blobs_in(store) == sorted(NAMES)
    store.create(commit_key(KEYS.rollout_prefix(ROUNDS)), store.read(commit_key(KEYS.rollout_prefix(2))))
    gc(store, "--delete")
    assert blobs_in(store) == sorted(NAMES[:2]) and store.list(entry.attempt) == []


def test_gc_keeps_all_images_while_any_run_has_a_driver(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    lease = Lease(store, new_driver_lease_key(RunKeys("other"))).take()
    gc(store, "--delete")
    assert "(in use, kept)" in capsys.readouterr().out and blobs_in(store) == sorted(NAMES)
    lease.release()
    gc(store, "--delete")
    assert blobs_in(store) == sorted(NAMES[:2])


def test_a_writer_waits_while_images_are_deleted_but_not_for_a_dead_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, pauses = Lease(store, COLLECTION_LEASE).take(), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert not store.exists(blob_key(digest_of(b"new")))
        if len(pauses) == 3:
            lease.release()

    monkeypatch.setattr(blobs.time, "sleep", pause)
    write_blobs(store, [b"new"])
    assert len(pauses) == 3 and store.exists(blob_key(digest_of(b"new")))
    store.replace(COLLECTION_LEASE, b"")
    monkeypatch.setattr(blobs, "describe_lease_holder", lambda *arguments: None)
    write_blobs(store, [b"newer"])
    assert len(pauses) == 3 and store.exists(blob_key(digest_of(b"newer")))


def test_a_removed_run_leaves_images_to_gc_unless_a_fork_lists_them(store: Store) -> None:
    assert fork.main(["r", "--at", "1", "--name", "f", "--store", store.root]) == 0
    assert store.committed(RunKeys("f").rollout_prefix(0)).blobs == dict(zip(NAMES[:2], map(len, IMAGES)))
    assert audit_run(store, RunKeys("f")).problems == []
    gc(store, "--delete")
    assert blobs_in(store) == sorted(NAMES[:2])
    assert rm_main(["f", "--yes", "f", "--store", store.root]) == 0
    gc(store, "--delete")
    assert blobs_in(store) == sorted(NAMES[:2]), "the parent has them"
    assert rm_main(["r", "--yes", "r", "--store", store.root]) == 0
    assert blobs_in(store) == sorted(NAMES[:2])
    gc(store, "--delete")
    assert blobs_in(store) == [] and audit_run(store, RunKeys("other")).problems == []


def test_lineage_of_an_image_names_what_was_made_from_it(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lineage", blob_key(NAMES[0]), "--json", "--store", store.root]) == 0
    shown = capsys.readouterr().out
    assert '"r/rollout/0"' in shown and '"r/checkpoint/2"' in shown and '"r/rollout/2"' in shown
    assert NAMES[1] not in shown, "other images are not listed"
    assert main(["lineage", blob_key(NAMES[0]), "--store", store.root]) == 0
    assert main(["lineage", "r/rollout/0", "--store", store.root]) == 0
    assert "2 images" in capsys.readouterr().out
    assert main(["lineage", blob_key(NAMES[2]), "--store", store.root]) != 0, "no run used it"
