"""Keys outside the store are refused: in their text, through symbolic links, and in edited records."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import config_of, edit_record, make_run, write_data

from penstock.flows.commands.maintenance import gc_main
from penstock.storage.commit import Commit, FileRecord, RunKeys, commit_key, describe_key_problem
from penstock.storage.errors import StoreError
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import expire_checkpoints, finish_interrupted_expiries, tombstone_key
from penstock.storage.store import Store

BAD = ["/etc/passwd", "a/../../x", "a\0b", "x" * 256, "a/" * 600 + "b"]
KEYS = RunKeys("r")


@pytest.mark.parametrize("key", BAD)
def test_every_method_of_the_store_refuses_a_key_outside_its_root(store: Store, key: str) -> None:
    before = list(store.walk(""))
    for call in (store.path, store.read, store.size, store.exists, store.list, lambda k: store.create(k, b"x")):
        with pytest.raises(StoreError):
            call(key)
    with pytest.raises(StoreError):
        store.delete([key])
    with pytest.raises(StoreError), store.writing(key):
        pass
    assert list(store.walk("")) == before


def test_exactly_relative_normalized_keys_are_accepted() -> None:
    """The operating system's path resolution is the reference."""
    rng, root = random.Random(0), Path("/s/t/o/r/e")
    pieces = ["a", "b.json", "..", ".", "", "...", " ", "\0", "ü", "a..b", "~", "-"]
    taken = 0
    for _ in range(4000):
        key = "/".join(rng.choices(pieces, k=rng.randint(1, 5)))
        ours = describe_key_problem(key) is None
        plain = "\0" not in key and (root / key).as_posix() == f"{root}/{key}" and ".." not in Path(key).parts
        assert ours == (plain or key == ""), repr(key)
        taken += ours
    assert 500 < taken < 3500


def test_delete_does_not_follow_links_out_of_the_store(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (outside / "other").write_text("x")
    Path(store.root, "runs").mkdir(parents=True)
    Path(store.root, "runs", "link").symlink_to(outside)
    Path(store.root, "runs", "file").symlink_to(outside / "other")
    with pytest.raises(StoreError):
        store.delete(["runs/link/precious"])
    store.delete(["runs/file"])
    assert sorted(path.name for path in outside.iterdir()) == ["other", "precious"]
    assert not Path(store.root, "runs", "file").is_symlink(), "the link itself is in the store"


def test_a_store_behind_a_symbolic_link_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = Store(str(tmp_path / "link"))
    store.create("a/b", b"x")
    store.delete(["a/b"])
    assert list(store.walk("")) == []


@pytest.fixture(scope="module")
def with_a_tombstone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store in which checkpoint 1 of run `r` has expired."""
    root = tmp_path_factory.mktemp("made")
    store = Store(str(root / "store"))
    keys = make_run(store, config_of(store, write_data(root / "data.jsonl")), 2, save=(1, 2))
    expire_checkpoints(store, keys, num_to_keep=1)
    return Path(store.root)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["commit"]["files"][0].update(path="../precious"),
        lambda record: record["commit"].update(attempt="runs/other", files=[]),
        lambda record: record["commit"].update(kind="rollout"),
    ],
)
def test_gc_deletes_nothing_that_an_edited_tombstone_names(
    store: Store, tmp_path: Path, with_a_tombstone: Path, change: Callable[[dict], object]
) -> None:
    shutil.copytree(with_a_tombstone, store.root, dirs_exist_ok=True)
    (tmp_path / "precious").write_text("x")
    store.create("runs/other/run.json", b"{}")
    store.create(f"{KEYS.checkpoint_prefix(1)}/attempt-x/left", b"x")  # so that gc finds it unfinished
    edit_record(store, tombstone_key(KEYS.checkpoint_prefix(1)), change)
    before = sorted(found.key for found in store.walk(""))
    with pytest.raises(StoreError):
        finish_interrupted_expiries(store, KEYS)
    with pytest.raises(StoreError):
        gc_main(["--delete", "--older-than", "0", "--store", store.root])
    assert (tmp_path / "precious").exists()
    assert sorted(found.key for found in store.walk("")) == before
    assert any("expired.json" in problem for problem in audit_run(store, KEYS).problems)


def test_a_commit_with_files_outside_its_attempt_is_refused(store: Store) -> None:
    with pytest.raises(ValueError):
        FileRecord(path="/etc/passwd", bytes=1, xxh3="")
    record = Commit(kind="step").model_dump(mode="json")
    file = {"path": "b/part", "bytes": 1, "xxh3": ""}
    for number, change in enumerate(
        ({"attempt": "../x"}, {"attempt": "a", "files": [file]}, {"inputs": {"x": "/y.commit.json"}})
    ):
        store.create(commit_key(KEYS.step_prefix(number)), json.dumps(record | change).encode())
        with pytest.raises(StoreError):
            store.committed(KEYS.step_prefix(number))
