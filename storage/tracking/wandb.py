"""The tracker for Weights & Biases, online and offline. A Penstock run is one W&B run.

The URI is `wandb://?` and a query: project, entity, group, id (default: the run's identity), mode (online or offline),
dir, host, key. A record is one row of the run's history: its metrics, `penstock/step` (the x-axis of all charts), and
`penstock/record`, the record's key. W&B's own step only counts rows, since it may never decrease, whereas rollouts may
be ahead of training.
Child runs, models, data sets and sample previews (lineage.py) are not sent.

W&B writes rows in another process and in blocks, so rows of a killed start may be lost; the next start sends all
records of that start again, and `penstock track` those of the run. Rows that are sent twice have the same
`penstock/step` and values, so charts do not change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    Resend,
    RunEnded,
    RunStarted,
    TrackedRun,
)

RECORD, STEP = "penstock/record", "penstock/step"  # columns of every row
_FINISH_TIMEOUT = 20.0  # seconds; W&B would wait for a lost server without limit, also when the process ends
_INIT_TIMEOUT = 60.0


class WandbTracker:
    """The tracker for Weights & Biases, for one Penstock run."""

    name: ClassVar[str] = "W&B"
    resend: Resend = "unended"

    def __init__(self, uri: str, run: TrackedRun) -> None:
        self.run = run
        self.options = dict(parse_qsl(uri.partition("?")[2]))
        self.directory = Path(self.options["dir"])
        self.run_id = self.options.get("id", run.identity)
        self._page: str | None = None
        self._client: Any = None  # wandb.Run, opened with its first record

    @property
    def page(self) -> str | None:
        """Return the URL of the run; offline that of the directory with the files for `wandb sync`."""
        return self._page if self._online else (self.directory / "wandb").as_uri()

    def deliver(self, records: Sequence[Record], lineage: Lineage) -> None:
        """Send the records, each as one row."""
        try:
            for record in records:
                self._log(record)
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
        if client is not None:
            client.finish(exit_code=exit_code)

    def _log(self, record: Record) -> None:
        if self._client is None:
            self._open()
        if isinstance(record, RunStarted):
            self._client.config.update(dict(flatten_config(record.config)), allow_val_change=True)
        row: dict[str, Any] = {point.name: point.value for point in metric_points(record)}
        match record:
            case ReportWritten() if self.run.store and (content := self.run.store.read(record.store_key)):
                import wandb

                row["report"] = wandb.Html(content.decode(), inject=False)
            case Committed():
                row[STEP] = record.commit.index
            case MetricsLogged():
                row[STEP] = record.step
        self._client.log({**row, RECORD: record.key, "_timestamp": record.at}, commit=True)

    def _open(self) -> None:
        """Create or resume the W&B run."""
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
            resume="allow",
            reinit="create_new",  # independent of W&B runs of user-defined functions
            settings=settings,
        )
        self._client.define_metric(STEP)
        self._client.define_metric("*", step_metric=STEP)
        if self._online:
            self._page = self._client.url

    def _wait_for_free_directory(self) -> None:
        """Wait until no directory of an earlier process has the name of the new one, which contains the current second.

        W&B would refuse the run, or overwrite the file of the other process.
        """
        while any(self.directory.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{self.run_id}")):
            time.sleep(0.1)


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
