"""Distribute the work items of a conversion over threads and processes. Each item is finished once, even if processes
are killed.

A record in the store marks a finished item; it is written after the item's files are durable. A restarted conversion,
with any number of processes, runs only the items without a record.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from penstock.stages.convert.targets import DirectoryTarget, Target, check_free_space, full_disk_as_store_error
from penstock.storage import disk, leases
from penstock.storage.commit import CheckpointRef, Commit, FileRecord, Frozen
from penstock.storage.disk import hash_file
from penstock.storage.store import Store

OnBytes = Callable[[int, int], object]  # arguments: bytes done, total bytes
NUM_THREADS = 4  # per process; one thread can read while another waits for the disk
REPORT_INTERVAL = 0.2  # seconds between two reports of progress


class WorkRecord(Frozen):
    """Record of a finished work item: the files that it wrote, or the hash that it computed."""

    files: tuple[FileRecord, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()  # for a checkpoint file: (first byte, length) of each slice
    xxh3: str = ""  # for a source file that was only hashed: its hash


class WorkItem(Protocol):
    """A part of a conversion (such as one file to write or hash) that does not depend on other work items."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


W = TypeVar("W", bound=WorkItem)


class Progress:
    """Sums up the bytes that several threads have processed, and calls `report` with (bytes done, total bytes)."""

    def __init__(self, total: int, report: OnBytes | None) -> None:
        self.total, self.report = total, report
        self.done, self._lock = 0, threading.Lock()

    def add(self, num_bytes: int) -> None:
        if self.report is not None:
            with self._lock:
                self.done += num_bytes
                self.report(self.done, self.total)


class ProgressFile:
    """Reports the progress of a process to another process on the same machine through a small file."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._written_at = Path(path), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._written_at >= REPORT_INTERVAL or done == total:
            self._written_at = now
            self.path.with_suffix(".new").write_text(f"{done} {total}")
            self.path.with_suffix(".new").rename(self.path)

    def read(self) -> tuple[int, int] | None:
        """Return the last reported (bytes done, total bytes), or None if nothing was reported."""
        if not self.path.is_file():
            return None
        done, total = self.path.read_text().split()
        return int(done), int(total)


class WorkItems(Generic[W]):
    """The work items of one conversion (files to write or to hash), and the records of the finished items."""

    def __init__(self, target: Target, items: Sequence[W]) -> None:
        self.target, self.items = target, items
        self.num_bytes = sum(item.num_bytes for item in items)

    def run(self, process: Callable[[W], WorkRecord], progress: Progress, rank: int = 0, num_ranks: int = 1) -> None:
        """Run the unfinished items among `items[rank::num_ranks]`, in several threads.

        `process` returns the record of one item, and must add the item's bytes to `progress`; this method adds the
        bytes of items that were finished before a restart of the conversion.
        """
        items = self.items[rank::num_ranks]
        unfinished = {item.name for item in self.unfinished_items(items)}

        def run_item(item: W) -> None:
            if item.name not in unfinished:
                progress.add(item.num_bytes)
                return
            record = process(item).model_dump_json().encode()
            if not self.target.store.create(self._record_key(item), record):
                # replace the record of an item whose files are missing
                self.target.store.delete([self._record_key(item)])
                self.target.store.create(self._record_key(item), record)

        with full_disk_as_store_error(self.target.store), leases.writer_lease(self.target.store, self.target.attempt):
            disk.map_in_threads(run_item, items, min(NUM_THREADS, len(os.sched_getaffinity(0)) + 1))

    def unfinished_items(self, items: Sequence[W] | None = None) -> list[W]:
        """Return the items in `items` (default: all) that have no record, or whose files are missing."""
        chosen = self.items if items is None else items
        return [item for item, record in zip(chosen, self._records(chosen), strict=True) if record is None]

    def num_bytes_left(self) -> int:
        return sum(item.num_bytes for item in self.unfinished_items())

    def items_with_records(self) -> list[tuple[W, WorkRecord]]:
        """Return all items with their records. Every item must be finished."""
        records = self._records(self.items)
        finished = [(item, record) for item, record in zip(self.items, records, strict=True) if record is not None]
        assert len(finished) == len(self.items), (
            f"unfinished work items: only {[item.name for item, _ in finished]} have records"
        )
        return finished

    def _records(self, items: Sequence[W]) -> list[WorkRecord | None]:
        """Return the record of every item; None if it has no record, or if files that the record lists are missing."""
        store = self.target.store

        def read(item: W) -> WorkRecord | None:
            record = store.read_record(WorkRecord, self._record_key(item))
            files = record.files if record else ()
            return record if all(store.size(file.path) == file.bytes for file in files) else None

        return disk.map_in_threads(read, items, 16)

    def delete_records(self) -> None:
        """Delete the records of the finished items, and temporary files of killed processes. Call this after the
        commit of the converted model."""
        store = self.target.store
        if store.is_local:
            shutil.rmtree(store.path(self.target.records_prefix), ignore_errors=True)
        else:
            store.delete([self._record_key(item) for item in self.items])

    def _record_key(self, item: W) -> str:
        return f"{self.target.records_prefix}/{item.name}.json"


def collect_file_records(records: Sequence[tuple[Any, WorkRecord]]) -> list[FileRecord]:
    """Return the path, size and hash of every file that the records of finished work items list."""
    return [file for _, record in records for file in record.files]


def write_files(target: Target, write: Callable[[Path], dict[str, str] | None]) -> list[FileRecord]:
    """Write files of a conversion's result under `target.attempt`; return path, size and hash of every file. Several
    processes may write the same files at the same time.

    `write` is called with a directory, into which it writes the files. It may return hashes by relative file name; the
    other files are hashed here.
    """
    store = target.store
    if not store.is_local:
        with store.writing(target.attempt) as writing:
            write(writing.path)
        return writing.files
    top = Path(store.path(target.attempt))
    scratch = Path(store.path(f"{target.records_prefix}/writing-{uuid.uuid4().hex[:12]}"))
    disk.make_directory(top)
    disk.make_directory(scratch)
    try:
        hashes = write(scratch) or {}
        names = [path.relative_to(scratch) for path in disk.files_in(scratch)]
        for name in names:
            disk.fsync(scratch / name)
            disk.make_directory((top / name).parent)
            (scratch / name).replace(top / name)  # atomic; concurrent processes write identical bytes
    finally:
        shutil.rmtree(scratch)
    for directory in {(top / name).parent for name in names}:
        disk.fsync(directory)
    return [
        FileRecord(
            path=f"{target.attempt}/{name.as_posix()}",
            bytes=(top / name).stat().st_size,
            xxh3=hashes.get(name.as_posix()) or hash_file(top / name),
        )
        for name in names
    ]


def copy_export(
    store: Store, export: Commit, uri: str, identity: str | None = None, on_start: Callable[[], object] = lambda: None
) -> CheckpointRef:
    """Copy a run's export, with verified hashes, to a directory or URI, which becomes visible when it is complete.
    Return the existing result if there is one.

    Args:
        identity: name of the result; None: the key of the export's files.
        on_start: called before a copy, not if the result exists.
    """
    identity = identity or str(export.attempt)
    target = DirectoryTarget(uri, "hf", identity.replace("/", "-"), store.options)
    if existing := target.find_published(identity):
        return existing
    check_free_space(target.store, sum(file.bytes for file in export.files))
    on_start()
    records = {file.path.removeprefix(f"{export.attempt}/"): file for file in export.files}
    started = f"{target.records_prefix}/copy.json"
    target.store.create(started, b"{}")  # the files in an object store are then known as those of an unfinished copy

    def write(out: Path) -> dict[str, str]:
        for name in records:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, out / name)
        disk.verify_files([(out / name, record) for name, record in records.items()])
        return {name: record.xxh3 for name, record in records.items()}

    with full_disk_as_store_error(target.store), store.reading(export) as source:
        files = write_files(target, write)
    changes = {"attempt": target.attempt, "files": files, "created_at": time.time()}
    changes |= {"inputs": {**export.inputs, "export": str(export.attempt)}}
    ref = target.publish(identity, export.model_copy(update=changes))
    WorkItems(target, []).delete_records()
    target.store.delete([started])
    return ref
