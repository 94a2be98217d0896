"""The tracker for Weights & Biases, online and offline. A Penstock run is one W&B run.

The URI is `wandb://?` and a query: project, entity, group, id (default: the run's identity), mode (online or offline),
dir, host, key. A record is one row of the run's history: its metrics, `penstock/step` (the x-axis of all charts), and
`penstock/record`, the record's key. W&B's own step only counts rows, since it may never decrease, whereas rollouts may
be ahead of training.
Child runs, models, data sets and sample previews (lineage.py) are not sent.

Delivery is idempotent, since the history itself is the index of what was delivered: the keys of its rows are read, from
the server or offline from the files in `dir`, when the run is opened, and records with these keys are skipped. W&B
writes rows in another process and in blocks, so rows of a killed run may be lost; the next start sends them again.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from penstock.storage.secrets import register_secret
from penstock.storage.tracking.lineage import Lineage
from penstock.storage.tracking.points import flatten_config, metric_points
from penstock.storage.tracking.tracker import (
    Committed,
    MetricsLogged,
    Record,
    ReportWritten,
    RunEnded,
    RunStarted,
    TrackedRun,
)

RECORD, STEP = "penstock/record", "penstock/step"  # columns of every row
_FINISH_TIMEOUT = 20.0  # seconds; W&B would wait for a lost server without limit, also when the process ends
_INIT_TIMEOUT = 60.0
_WRITE_TIMEOUT = 60.0
_BLOCK, _HEADER, _START = 32768, 7, 7  # of a .wandb file: bytes of a block, of a chunk's header, of the file's header
_LAST_CHUNKS = (1, 4)  # chunk types that end a record: "full" and "last"


class WandbTracker:
    """The tracker for Weights & Biases, for one Penstock run."""

    name: ClassVar[str] = "W&B"
    resend_all = True

    def __init__(self, uri: str, run: TrackedRun) -> None:
        self.run = run
        self.options = dict(parse_qsl(uri.partition("?")[2]))
        self.directory = Path(self.options["dir"])
        self.run_id = self.options.get("id", run.identity)
        self._config: dict[str, Any] = {}  # of the last start
        self._page: str | None = None
        self._client: Any = None  # wandb.Run, opened with its first new record
        self._num_rows = 0  # offline: W&B's step of the next row
        self._known: set[str] | None = None if self._online else self._read_local_keys()  # None: not read yet

    @property
    def page(self) -> str | None:
        """Return the URL of the run; offline that of the directory with the files for `wandb sync`."""
        return self._page if self._online else (self.directory / "wandb").as_uri()

    def deliver(self, records: Sequence[Record], lineage: Lineage) -> None:
        """Send the records that the history does not contain yet."""
        try:
            self._deliver(records)
        except BaseException:
            self._finish(exit_code=1)  # the next tracker of this process could not open the run while it is open
            raise
        if isinstance(records[-1], RunEnded):
            self._finish(exit_code=0 if records[-1].status == "FINISHED" else 1)

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return False: W&B accepts all names, and all numbers as values."""
        return False

    @property
    def _online(self) -> bool:
        return self.options.get("mode") != "offline"

    @property
    def _server(self) -> dict[str, Any]:
        return {"base_url": self.options["host"]} if "host" in self.options else {}

    def _finish(self, exit_code: int) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        client.finish(exit_code=exit_code)
        deadline = time.monotonic() + _WRITE_TIMEOUT
        while not self._online and not (self._known or set()) <= self._read_local_keys():
            if time.monotonic() > deadline:  # on a loaded machine, W&B's process writes after `finish` has returned
                raise TimeoutError(f"W&B has not written all records to {self.directory} within {_WRITE_TIMEOUT:g} s")
            time.sleep(0.1)

    def _deliver(self, records: Sequence[Record]) -> None:
        if self._known is None:
            self._open()
        assert self._known is not None
        for record in records:
            if isinstance(record, RunStarted):
                self._config = dict(flatten_config(record.config))
            if record.key not in self._known:
                self._log(record)
                self._known.add(record.key)

    def _log(self, record: Record) -> None:
        if self._client is None:
            self._open()
        if isinstance(record, RunStarted):
            self._client.config.update(self._config, allow_val_change=True)
        row: dict[str, Any] = {point.name: point.value for point in metric_points(record)}
        match record:
            case ReportWritten() if self.run.store and (content := self.run.store.read(record.store_key)):
                import wandb

                row["report"] = wandb.Html(content.decode(), inject=False)
            case Committed():
                row[STEP] = record.commit.index
            case MetricsLogged():
                row[STEP] = record.step
        step = None if self._online else self._num_rows  # online W&B continues the server's count
        self._client.log({**row, RECORD: record.key, "_timestamp": record.at}, step=step, commit=True)
        self._num_rows += 1

    def _open(self) -> None:
        """Create or resume the W&B run. Online, read which records its history contains."""
        import wandb

        self._wait_for_free_directory()
        key = self.options.get("key")
        settings = wandb.Settings(
            mode="online" if self._online else "offline",
            root_dir=str(self.directory),
            api_key=register_secret(key) if key else None,
            init_timeout=_INIT_TIMEOUT,
            finish_timeout=_FINISH_TIMEOUT,
            silent=True,
            **self._server,
            **_NOTHING_BUT_RECORDS,
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._client = wandb.init(
            project=self.options.get("project"),
            entity=self.options.get("entity"),
            group=self.options.get("group"),
            id=self.run_id,
            name=self.run.name,
            config=self._config,
            resume="allow",
            reinit="create_new",  # independent of W&B runs of user-defined functions
            settings=settings,
        )
        self._client.define_metric(STEP)
        self._client.define_metric("*", step_metric=STEP)
        if self._online:
            self._page = self._client.url
            self._known = self._read_server_keys(key) if self._client.resumed else set()

    def _wait_for_free_directory(self) -> None:
        """Wait until no directory of an earlier process has the name of the new one, which contains the current second.

        W&B would refuse the run, or overwrite the file of the other process.
        """
        while any(self.directory.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{self.run_id}")):
            time.sleep(0.1)

    def _read_server_keys(self, api_key: str | None) -> set[str]:
        import wandb

        run = wandb.Api(overrides=self._server, api_key=api_key, timeout=30).run(self._client.path)
        return {row[RECORD] for row in run.scan_history(keys=[RECORD])}

    def _read_local_keys(self) -> set[str]:
        keys = set()
        for row in read_local_history(self.directory, self.run_id):
            self._num_rows = max(self._num_rows, row["_step"] + 1)
            keys.add(str(row.get(RECORD)))
        return keys


# What W&B would also send: output of the terminal, source code, git state, packages and hardware of the machine.
_NOTHING_BUT_RECORDS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def read_local_history(directory: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the history rows of a W&B run from the files of its offline runs, oldest first."""
    for path in sorted(directory.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        yield from _read_rows(path)


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # its type stubs lack the classes
    for data in _read_records(path.read_bytes()):
        record = messages.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a .wandb file: a LevelDB log, whose records are split into chunks so that no chunk
    crosses the boundary of a block."""
    position, record = _START, b""
    while position + _HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEADER:  # the end of a block is padded
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _HEADER + length
        if position > len(data) or kind == 0:
            return  # cut off by a kill
        record += data[position - length : position]
        if kind in _LAST_CHUNKS:
            yield record
            record = b""
