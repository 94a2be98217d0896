"""`penstock gc --delete --older-than 0` while other processes write: nothing that they need disappears."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_run import commit_files

from penstock.flows.commands.maintenance import gc_main
from penstock.storage import disk
from penstock.storage.commit import RunKeys
from penstock.storage.leases import TTL, Lease
from penstock.storage.maintenance.deletion import find_orphans
from penstock.storage.store import Store

KEYS = RunKeys("r")


@pytest.fixture
def deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Delete, as gc does, the first temporary files right before they become visible. Yields their names."""
    names: list[str] = []
    link, replace, rename = os.link, Path.replace, Path.rename

    def after_gc(publish: Callable[..., object]) -> Callable[..., object]:
        def call(temporary: Path, target: Path) -> object:
            if len(names) < 2:
                gc_main(["--delete", "--older-than", "0", "--store", store.root])
                names.append(Path(temporary).name)
                assert not Path(temporary).exists()
            return publish(temporary, target)

        return call

    monkeypatch.setattr(os, "link", after_gc(link))
    monkeypatch.setattr(Path, "replace", after_gc(replace))
    monkeypatch.setattr(Path, "rename", after_gc(rename))
    yield names


def commit_attempt(store: Store) -> None:
    commit_files(store, KEYS.step_prefix(0), {"data": b"data"}, kind="step", run="r", index=0)
    assert store.committed(KEYS.step_prefix(0)) is not None


WRITERS: dict[str, Callable[[Store], object]] = {
    "create": lambda store: store.create("runs/r/run.json", b"{}"),
    "create without hard links": lambda store: disk.create(Path(store.path("runs/r/x")), b"{}", single_writer=True),
    "replace": lambda store: store.replace("runs/r/note.json", b"{}"),
    "lease": lambda store: Lease(store, f"{KEYS.prefix}/drivers/x.lease").take().release(),
    "commit": commit_attempt,
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=list(WRITERS))
def test_writer_whose_temporary_file_is_deleted_writes_it_again(
    store: Store, deleted: list[str], writer: Callable[[Store], object]
) -> None:
    writer(store)
    assert len(set(deleted)) == 2, "gc has deleted temporary files"
    assert not [path for path in Path(store.root).rglob("*.tmp")]


def test_directory_that_disappears_every_time_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(temporary: Path, target: Path) -> None:
        shutil.rmtree(Path(temporary).parent)
        raise FileNotFoundError(target)

    monkeypatch.setattr(os, "link", lose)
    with pytest.raises(FileNotFoundError):
        store.create("runs/r/run.json", b"{}")


def test_probe_of_a_starting_run_is_kept_until_its_writer_must_be_dead(store: Store) -> None:
    probe = Path(store.path(".penstock-probe-12345678"))
    probe.write_bytes(b"x")
    assert find_orphans(store, older_than=0.0, now=time.time() + 1) == []
    assert [orphan.kind for orphan in find_orphans(store, older_than=0.0, now=time.time() + TTL + 1)] == ["probe file"]
