"""The tracker for TensorBoard: event files in one directory per run, `<directory>/<run>-<identity>`.

The URI is `tensorboard://` and an absolute path. Metrics are scalars, the config and the sample previews are texts.
Child runs, models and data sets (lineage.py) have no counterpart in TensorBoard and are not written.

Delivery is idempotent, since the event files themselves are the index of what was delivered: at the start of a process
they are read, and a point is written only if no file contains a point with the same name, step and time. So neither a
kill between delivery and its mark nor a second `penstock track` duplicates a point, and a record that a crash of the
machine has cut off is written again. Each process writes a new file; complete files are never changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.storage.tracking.lineage import Lineage, eval_name_from_key
from penstock.storage.tracking.points import flatten_config, metric_points
from penstock.storage.tracking.tracker import Committed, Record, Resend, RunStarted, TrackedRun

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_SCHEME = "tensorboard://"
_FILES = "events.out.tfevents.*"
Key = tuple[str, int, float]  # tag, step, wall time


class TensorBoardTracker:
    """The tracker for TensorBoard, for one Penstock run."""

    name: ClassVar[str] = "TensorBoard"
    resend: Resend = "all"  # a crash of the machine may cut off records

    def __init__(self, uri: str, run: TrackedRun) -> None:
        self.directory = Path(uri.removeprefix(_SCHEME)) / f"{run.name}-{run.identity[:8]}"
        logging.getLogger("tensorboard").setLevel(logging.CRITICAL)  # it warns about truncated files
        self._written: set[Key] = {(tag, step, at) for tag, step, at, _ in read_values(self.directory)}
        self._writer: Any = None  # EventFileWriter of this process, created with its first event

    @property
    def page(self) -> str | None:
        """Return the URL of the directory, which `tensorboard --logdir` shows."""
        return self.directory.as_uri()

    def deliver(self, records: Sequence[Record], lineage: Lineage) -> None:
        """Write the metrics, configs and sample previews of records that the event files do not contain yet."""
        for record in records:
            for point in metric_points(record):
                self._write((point.name, point.step, point.at), simple_value=point.value)
            for tag, step, text in texts_of_record(record):
                self._write((tag, step, record.at), text=text)
        if self._writer is not None:
            self._writer.flush()

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return False: files accept every record."""
        return False

    def _write(self, key: Key, *, text: str | None = None, simple_value: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        tag, step, at = key
        if key in self._written:
            return
        if text is None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=simple_value)])
        else:
            summary = text_pb(tag, text)
        if self._writer is None:
            self._writer = EventFileWriter(str(self.directory))
        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))
        self._written.add(key)


def read_values(directory: Path) -> Iterator[tuple[str, int, float, Any]]:
    """Yield the values in the event files of a directory: tag, step, time, and `Summary.Value`. A partial record at the
    end of a file is skipped."""
    for path in sorted(directory.glob(_FILES)):
        for event in read_events(path):
            for value in event.summary.value:
                yield value.tag, event.step, event.wall_time, value


def read_events(path: Path) -> Iterator[Event]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for data in RawEventFileLoader(str(path)).Load():
        yield Event.FromString(data)


def texts_of_record(record: Record) -> Iterator[tuple[str, int, str]]:
    """Yield the texts of a record in Markdown: tag, step, text."""
    match record:
        case RunStarted():
            rows = [(name, json.dumps(value, default=str)) for name, value in flatten_config(record.config)]
            yield "config", 0, _table(["option", "value"], rows)
        case Committed(key, _, commit) if shown := commit.state.get("shown"):
            name = f"samples/eval/{eval_name_from_key(key)}" if commit.kind == "eval" else f"samples/{commit.kind}"
            columns = list(shown[0])
            cells = [[str(row.get(column, "")) for column in columns] for row in shown]
            yield name, commit.index, _table(columns, cells)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return text for one cell of a Markdown table: without line breaks and column separators."""
    return text.replace("|", "&#124;").replace("\r", "").replace("\n", "<br>")
