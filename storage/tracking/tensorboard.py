"""The tracker for TensorBoard: event files in one directory per run, `<directory>/<run>-<identity>`.

The URI is `tensorboard://` and an absolute path. Metrics are scalars, the config and the sample previews are texts.
Child runs, models and data sets have no counterpart in TensorBoard and are not written.

Delivery is idempotent. A process first reads the event files, and writes a point only if no file contains a point with
the same name, step and time. So a record that is delivered twice (after a kill, or by `penstock report --to`) is
written once, and a record that a crash of the machine has cut off is written again. Each process writes a new file and
changes no other file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.storage.config import option
from penstock.storage.tracking.tracker import (
    Committed,
    OptionsOfTracker,
    Record,
    RunCommits,
    RunStarted,
    TrackedRun,
    Tracker,
    eval_name_from_key,
    flatten_config,
    metric_points,
    package_rule,
    trackers_directory,
)

if TYPE_CHECKING:
    from penstock.storage.store import Store

_SCHEME = "tensorboard://"
_DIRECTORY_NAME = r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$"  # one or more levels, none of them hidden or `..`
Key = tuple[str, int, float]  # tag (name), step, time in seconds since the epoch


class TensorBoardTracker(Tracker):
    """Writes the records of one run to TensorBoard event files."""

    wants_all = True  # a crash of the machine may cut off records

    def __init__(self, uri: str, run: TrackedRun) -> None:
        self.directory = Path(uri.removeprefix(_SCHEME)) / f"{run.name}-{run.identity[:8]}"
        logging.getLogger("tensorboard").setLevel(logging.CRITICAL)  # TensorBoard would warn about truncated files
        self._written: set[Key] = {(tag, step, at) for tag, step, at, _ in read_values(self.directory)}
        self._writer: Any = None  # EventFileWriter of this process, created with its first event
        self.page = self.directory.as_uri()  # `tensorboard --logdir` shows this directory

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        """Write the metrics, configs and sample previews in records, except what the event files already contain."""
        for record in records:
            for point in metric_points(record):
                self._write((point.name, point.step, point.at), simple_value=point.value)
            match record:
                case RunStarted():
                    rows = [(name, json.dumps(value, default=str)) for name, value in flatten_config(record.config)]
                    self._write(("config", 0, record.at), text=_table(["option", "value"], rows))
                case Committed(key, at, commit) if shown := commit.state.get("shown"):
                    kind = f"eval/{eval_name_from_key(key)}" if commit.kind == "eval" else commit.kind
                    columns = list(shown[0])
                    cells = [[str(row.get(column, "")) for column in columns] for row in shown]
                    self._write((f"samples/{kind}", commit.index, at), text=_table(columns, cells))
        if self._writer is not None:
            self._writer.flush()

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


class TensorBoardOptions(OptionsOfTracker):
    """Options of TensorBoard."""

    scheme: ClassVar[str] = "tensorboard"
    title: ClassVar[str] = "TensorBoard"
    connect: ClassVar[Callable[[str, TrackedRun], Tracker]] = TensorBoardTracker

    use_tensorboard: bool = option(False, mutability="placement")
    """Also write metrics to TensorBoard event files; needs the extra `tensorboard`."""

    tb_dir: str | None = option(None, mutability="placement")
    """With --use-tensorboard: local directory with one directory of event files per run; default TENSORBOARD_DIR, else
    `tensorboard` in the store."""

    tb_project_name: str | None = option(None, mutability="placement", pattern=_DIRECTORY_NAME)
    """With --use-tensorboard: directory in --tb-dir for the runs of a project."""

    tb_experiment_name: str | None = option(None, mutability="placement", pattern=_DIRECTORY_NAME)
    """With --use-tensorboard: directory for the runs of an experiment, inside the directory of --tb-project-name."""

    def uri_of(self, store: Store) -> str | None:
        """Return the tracking URI, whose path is --tb-dir, TENSORBOARD_DIR, or `tensorboard` in the store, followed by
        the directories of project and experiment. None without --use-tensorboard."""
        if not self.use_tensorboard:
            return None
        path = self.tb_dir or os.environ.get("TENSORBOARD_DIR") or trackers_directory(store) / "tensorboard"
        names = [name for name in (self.tb_project_name, self.tb_experiment_name) if name]
        return f"{_SCHEME}{Path(path, *names).expanduser().absolute()}"

    def machine_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules that TensorBoard is installed, and that its directory is local."""
        if self.use_tensorboard:
            yield package_rule("tensorboard", "--use-tensorboard")
            path = self.tb_dir or ""
            yield "://" in path, f"--tb-dir {path[:80]!r} is a URI, but a local directory is needed: give its path"


def read_values(directory: Path) -> Iterator[tuple[str, int, float, Any]]:
    """Yield the values in the event files of a directory: tag, step, time, and `Summary.Value`. A partial record at the
    end of a file is skipped."""
    for path in sorted(directory.glob("events.out.tfevents.*")):
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event

        for data in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(data)
            for value in event.summary.value:
                yield value.tag, event.step, event.wall_time, value


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose cells contain neither line breaks nor column separators."""
    lines = [columns, ["---"] * len(columns), *rows]
    text = {ord("|"): "&#124;", ord("\r"): "", ord("\n"): "<br>"}
    return "\n".join(f"| {' | '.join(cell.translate(text) for cell in line)} |" for line in lines)
