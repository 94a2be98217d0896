"""The tracker for Weights & Biases, online and offline. A Penstock run is one W&B run.

The URI is `wandb://?` and a query: project, entity, group, id (default: the run's identity), mode (online or offline),
dir, host, key. A record is one row of the W&B run's history: its metrics, `penstock/step` (the x-axis of all charts),
and `penstock/record`, the record's key. W&B's own step only counts rows: it may never decrease, but rollouts may be
ahead of training. Child runs, models, data sets and sample previews are not sent.

W&B writes rows in another process and in blocks, so rows may be lost if a start is killed. Records of a start therefore
count as delivered only when the end of the start is delivered; until then the next start sends them again. Rows that
are sent twice have the same `penstock/step` and values, so charts do not change.
"""

from __future__ import annotations

import netrc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from penstock.storage.config import option
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import is_reference, register_secret
from penstock.storage.tracking.tracker import (
    Committed,
    MetricsLogged,
    OptionsOfTracker,
    Record,
    ReportWritten,
    RunCommits,
    RunEnded,
    RunStarted,
    TrackedRun,
    Tracker,
    flatten_config,
    metric_points,
    package_rule,
    trackers_directory,
)

if TYPE_CHECKING:
    from penstock.storage.store import Store

RECORD, STEP = "penstock/record", "penstock/step"  # columns of every row


class WandbTracker(Tracker):
    """The tracker for Weights & Biases, for one Penstock run."""

    buffers: ClassVar[bool] = True

    def __init__(self, uri: str, run: TrackedRun) -> None:
        self.run = run
        self.options = dict(parse_qsl(uri.partition("?")[2]))
        self.directory = Path(self.options["dir"])
        self.run_id = self.options.get("id", run.identity)
        self._online = self.options.get("mode") != "offline"
        self._client: Any = None  # wandb.Run, opened when the first record is sent
        if not self._online:
            self.page = (self.directory / "wandb").as_uri()  # files for `wandb sync`

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        """Send the records, each as one row."""
        try:
            for record in records:
                self._log(record)
        except BaseException:
            self._finish(exit_code=1)  # the next try opens the W&B run again, which an open client would prevent
            raise
        if isinstance(records[-1], RunEnded):
            self._finish(exit_code=0 if records[-1].status == "FINISHED" else 1)

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

        # The name of the run's directory contains the current second. If an earlier process created a directory in the
        # same second, W&B would refuse the run or overwrite its file.
        while any(self.directory.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{self.run_id}")):
            time.sleep(0.1)
        key = self.options.get("key")
        server: dict[str, Any] = {"base_url": self.options["host"]} if "host" in self.options else {}
        settings = wandb.Settings(
            mode="online" if self._online else "offline",
            root_dir=str(self.directory),
            api_key=register_secret(key) if key else None,
            init_timeout=60.0,
            finish_timeout=20.0,  # W&B would wait for a lost server without limit, also when the process ends
            silent=True,
            **server,
            **_ONLY_RECORDS,
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
            self.page = self._client.url


class WandbOptions(OptionsOfTracker):
    """Options of Weights & Biases."""

    scheme: ClassVar[str] = "wandb"
    title: ClassVar[str] = "W&B"
    connect: ClassVar[Callable[[str, TrackedRun], Tracker]] = WandbTracker

    use_wandb: bool = option(False, mutability="placement")
    """Also send metrics to Weights & Biases; needs the extra `wandb`."""

    wandb_project: str = option("penstock", mutability="placement", min_length=1)
    """With --use-wandb: project of the W&B run."""

    wandb_team: str | None = option(None, mutability="placement")
    """With --use-wandb: user or team that owns the project; default: the owner of the API key."""

    wandb_group: str | None = option(None, mutability="placement")
    """With --use-wandb: group of the W&B run."""

    wandb_mode: Literal["online", "offline", "disabled"] = option("online", mutability="placement")
    """With --use-wandb: offline writes files for `wandb sync`; disabled sends nothing."""

    wandb_dir: str | None = option(None, mutability="placement")
    """With --use-wandb: local directory in which W&B creates its directory `wandb`; default WANDB_DIR, else the
    store."""

    wandb_host: str | None = option(None, mutability="placement", secret=True)
    """With --use-wandb: URL of your own W&B server; default WANDB_BASE_URL, else W&B's."""

    wandb_key: str | None = option(None, mutability="placement", secret=True)
    """With --use-wandb: the API key, as env:NAME or secret-file:PATH; default WANDB_API_KEY, else ~/.netrc."""

    wandb_run_id: str | None = option(None, mutability="placement", pattern=r"^[\w-]{1,64}$")
    """With --use-wandb: id of the W&B run, new or existing; default: the unique id of the Penstock run."""

    def uri_of(self, store: Store) -> str | None:
        """Return the tracking URI, which may contain the API key, or None if W&B is not used."""
        if not self.use_wandb or self.wandb_mode == "disabled":
            return None
        query = {
            "project": self.wandb_project,
            "entity": self.wandb_team,
            "group": self.wandb_group,
            "id": self.wandb_run_id,
            "mode": self.wandb_mode,
            "host": self.wandb_host,
            "key": self.wandb_key if self.wandb_mode == "online" else None,
        }
        query = {name: resolve_secrets(value) for name, value in query.items() if value}
        path = self.wandb_dir or os.environ.get("WANDB_DIR") or trackers_directory(store)
        return f"wandb://?{urlencode({**query, 'dir': str(Path(path).expanduser().absolute())})}"

    def machine_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules that W&B is installed and, if it is online, has an API key: in an option, WANDB_API_KEY or
        ~/.netrc."""
        if not self.use_wandb or self.wandb_mode == "disabled":
            return
        yield package_rule("wandb", "--use-wandb")
        if self.wandb_mode != "online" or self.wandb_key or os.environ.get("WANDB_API_KEY"):
            return
        host = urlsplit(self.wandb_host or os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
        try:
            in_netrc = netrc.netrc().authenticators(host or "") is not None
        except (OSError, netrc.NetrcParseError):
            in_netrc = False
        yield (
            not in_netrc,
            "--use-wandb found no API key: set WANDB_API_KEY, or give --wandb-key env:NAME or secret-file:PATH, or "
            "--wandb-mode offline",
        )

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from super().rules()
        yield (
            self.wandb_key is not None and not is_reference(self.wandb_key),
            "--wandb-key must be a reference to the API key, not the key itself, since options are recorded: give "
            "env:NAME or secret-file:PATH, or set WANDB_API_KEY and omit --wandb-key",
        )


# Turn off what W&B also sends by default: terminal output, source code, git state, packages, hardware.
_ONLY_RECORDS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
