"""Parts of a conversion, done by several threads of several processes, each part at most once although processes are killed.

A part that is done leaves a record behind, written after its files are safe. Whoever does the conversion again, with however many
processes, does what has no record. What the parts are is for `to_torch_dist` and `to_hf`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from stages.convert.targets import Target, room
from storage import disk, leases
from storage.refs import FileRecord
from storage.store import hash_file

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Record = dict[str, Any]
NUM_THREADS = 4  # a process: files are copied by the kernel, and one thread waits for the disk while another reads


class Part(Protocol):
    """Something that can be done by itself."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


P = TypeVar("P", bound=Part)


class Tally:
    """Adds up bytes of several threads and reports them."""

    def __init__(self, total: int, report: Progress | None) -> None:
        self.total, self.report = total, report
        self.done, self._lock = 0, threading.Lock()

    def add(self, count: int) -> None:
        if self.report is not None:
            with self._lock:
                self.done += count
                self.report(self.done, self.total)


class Parts(Generic[P]):
    """The parts of one conversion and the records of those that are done."""

    def __init__(self, target: Target, parts: Sequence[P]) -> None:
        self.target, self.parts = target, parts

    def do(self, work: Callable[[P], Record], counter: Tally, rank: int = 0, num_ranks: int = 1) -> None:
        """Do what is left of this process's parts, in their order; every process takes every `num_ranks`-th.

        Raises:
            StoreError: no room is left.
        """
        mine = self.parts[rank::num_ranks]
        done = {part.name for part in mine} - {part.name for part in self.left(mine)}

        def one(part: P) -> None:
            if part.name in done:
                counter.add(part.num_bytes)
                return
            record = json.dumps(work(part)).encode()
            if not self.target.store.create(self._key(part), record):
                self.target.store.delete([self._key(part)])  # it was of files that are there no more
                self.target.store.create(self._key(part), record)

        with room(self.target.store), leases.writer(self.target.store, self.target.attempt):
            disk.in_parallel(one, mine, min(NUM_THREADS, len(os.sched_getaffinity(0)) + 1))

    def left(self, parts: Sequence[P] | None = None) -> list[P]:
        """Those that are not done: without a record, or without the files that the record names."""
        chosen = self.parts if parts is None else parts
        found = disk.in_parallel(self._record, chosen, 16)
        return [part for part, record in zip(chosen, found, strict=True) if record is None]

    def records(self) -> list[tuple[P, Record]]:
        """Of all parts, all of which are done."""
        found = disk.in_parallel(self._record, self.parts, 16)
        done = [(part, record) for part, record in zip(self.parts, found, strict=True) if record is not None]
        assert len(done) == len(self.parts), f"only {[part.name for part, _ in done]} are done"
        return done

    def _record(self, part: P) -> Record | None:
        record = self.target.store.read_json(self._key(part))
        files = [] if record is None else record.get("files", [])
        return record if all(self.target.store.size(file["path"]) == file["bytes"] for file in files) else None

    def forget(self) -> None:
        """Remove the records and what killed processes have left beside them, once the result is visible."""
        store = self.target.store
        if store.is_local:
            shutil.rmtree(store.path(self.target.parts), ignore_errors=True)
        else:
            store.delete([self._key(part) for part in self.parts])

    def _key(self, part: P) -> str:
        return f"{self.target.parts}/{part.name}.json"


def write_files(target: Target, write: Callable[[Path], object], hashes: Callable[[], dict[str, str]] = dict) -> list[FileRecord]:
    """Write some files of a result; safe beside others that write the same ones.

    Args:
        target: of the result.
        write: fills the directory that it is given.
        hashes: asked afterwards for the hashes of files, by relative name, that were summed up while they were written.

    Returns:
        the records of the files.
    """
    store = target.store
    if not store.is_local:
        with store.writing(target.attempt) as writing:
            write(writing.path)
        return writing.files
    top, mine = Path(store.path(target.attempt)), Path(store.path(f"{target.parts}/writing-{uuid.uuid4().hex[:12]}"))
    disk.make_directory(top)
    disk.make_directory(mine)
    try:
        write(mine)
        written = [path.relative_to(mine) for path in disk.files_in(mine)]
        for name in written:
            disk.fsync(mine / name)
            disk.make_directory((top / name).parent)
            (mine / name).replace(top / name)  # whole, or not at all; whoever else writes it writes the same bytes
    finally:
        shutil.rmtree(mine)
    for directory in {(top / name).parent for name in written}:
        disk.fsync(directory)
    known = hashes()
    return [
        FileRecord(
            path=f"{target.attempt}/{name.as_posix()}",
            bytes=(top / name).stat().st_size,
            xxh3=known.get(name.as_posix()) or hash_file(top / name),
        )
        for name in written
    ]
