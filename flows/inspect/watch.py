"""`penstock watch`: runs while they run, as a web page on 127.0.0.1 or in a terminal. Reads only the store.

storage/report/ collects what a page shows, storage/web/page_server.py serves it. A run serves its own page as well
(`serving_run`), so that the link in its first line works at once.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from penstock.flows.inspect.report import read_token_texts
from penstock.flows.inspect.run_views import row_of_run
from penstock.flows.options.argv import parse_integer, penstock_command, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.options.paths import find_nearby_stores, names_no_store
from penstock.flows.runtime.runs import (
    num_planned_rounds,
    open_named_store,
    open_store,
    read_existing_record,
    unknown_run_error,
)
from penstock.flows.terminal.console import LiveRegion, TerminalConsole, can_redraw
from penstock.flows.terminal.lines import MAX_COLUMNS, format_sample_preview, seconds_by_stage
from penstock.flows.terminal.panel import Activity, Panel, end_wait, show_wait
from penstock.storage.commit import Commit, RunKeys, is_run_name
from penstock.storage.errors import OptionError, PenstockError, check_rules
from penstock.storage.history.run_record import RunRecord, read_starts
from penstock.storage.history.run_status import (
    STATUS_SECONDS,
    CommitFeed,
    RunState,
    RunStatus,
    read_run_status,
    run_state,
)
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.report.live import LiveRun
from penstock.storage.report.page import SHARED_SCRIPTS, UPLOT, read_asset
from penstock.storage.secrets import write_private
from penstock.storage.store import Store, committed_prefixes
from penstock.storage.web.login import service_directory
from penstock.storage.web.page_server import Content, PageServer, json_content

USAGE = """penstock watch [RUN] [--port N] [--terminal] [--store URI ...]

  Shows a run while it runs, in a browser: what happens now, rewards and evaluations, the last rounds of engines and
  trainer, speed, GPUs, the newest samples token by token, warnings. Reads only the store, so the run may be on another
  machine; waits up to a minute for a run that was just started. Without RUN, all runs that `penstock runs` lists.
  Serves pages on 127.0.0.1 until Ctrl-C; the printed link has a token, without which the pages cannot be read.

  --port       the port (default: any free one)
  --terminal   show the panel of RUN in this terminal instead, until the run ends"""

LIST_SECONDS = 5.0  # between two readings of the list of runs
NEW_RUN_SECONDS, POLL_SECONDS = 60.0, 1.0  # how long to wait for a run that does not exist yet; between two readings
_ASSETS = {
    "": ("text/html; charset=utf-8", "watch.html"),
    **{
        name.rpartition("/")[2]: (f"text/{'css' if name.endswith('.css') else 'javascript'}; charset=utf-8", name)
        for name in (UPLOT[1], *SHARED_SCRIPTS, "watch.js", "page.css")
    },
}


def main(argv: list[str]) -> int:
    """Run the command. Return 0 after the end of the run (--terminal); otherwise it ends by Ctrl-C."""
    positional, own, rest = split_args(argv, {"--port": True, "--terminal": False})
    run = "".join(positional[:1])
    port = parse_integer("--port", own.get("--port", "0"))
    check_rules(
        (
            (len(positional) > 1, f"penstock watch takes at most one run, not {len(positional)}: leave out the others"),
            (port >= 1 << 16, f"--port {port} is not a port: give a number from 1 to 65535, or 0 for any free one"),
            ("--terminal" in own and not run, "penstock watch --terminal shows one run: give its name"),
        )
    )
    if run:
        opened = [store_with_run(rest, run)]
    else:
        config = parse_store_options(rest, "watch")
        stores = find_nearby_stores() if names_no_store(rest) else []
        configs = [config.model_copy(update={"store": path}) for path in stores] or [config]
        opened = [open_store(each, probe=False) for each in configs]
    if "--terminal" in own:
        return watch_in_terminal(opened[0], RunKeys(run))
    try:
        server = PageServer(WatchedRuns(opened).respond, port)
    except OSError as error:
        raise OptionError(f"--port {port} cannot be opened ({error.strerror}): give another port") from error
    with server:
        link = server.link(urlencode({"run": run}) if run else "")
        if sys.stdout.isatty():
            print(f"watch  {link}\nCtrl-C ends the page; runs do not depend on it.", flush=True)
        else:  # a file or pipe may be read by other users
            path = service_directory(server.server_port) / "watch-link"
            write_private(path, link)
            print(
                f"the link is in the file {path}: open it in a browser with JavaScript, or use --terminal", flush=True
            )
        signal.pause()
    return 0


def store_with_run(argv: list[str], run: str) -> Store:
    """Return the store that has a run, by the store options `argv`. A run that was just started writes its record after
    some seconds, so wait up to a minute for it. Raises RunError if the run does not exist."""
    keys, deadline = RunKeys(run), time.monotonic() + NEW_RUN_SECONDS
    store = open_named_store(argv, "watch", run=run)
    if not is_run_name(run):
        raise unknown_run_error(store, run)
    try:
        if not store.exists(keys.record) and not is_removed(store, keys) and not committed_prefixes(store, keys):
            show_wait(f"waiting up to {NEW_RUN_SECONDS:.0f} s for run {run}, which store {store.uri} does not have yet")
            while not store.exists(keys.record) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                store = open_named_store(argv, "watch", run=run)
    finally:
        end_wait()
    read_existing_record(store, keys)
    return store


@contextmanager
def serving_run(store: Store, run: str) -> Iterator[str]:
    """Yield the first line of a run, about where to watch it: in a terminal the link of a page that is served during
    the block, otherwise the command that serves it."""
    command = f"{penstock_command()} watch {run} --store {shlex.quote(store.uri)}"
    if not sys.stdout.isatty():
        yield command
        return
    try:
        server = PageServer(WatchedRuns([store]).respond)
    except OSError:  # no port is free
        yield command
        return
    with server:
        yield server.link(urlencode({"run": run}))


class WatchedRuns:
    """What the pages request of some stores."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = stores
        self._runs: dict[tuple[int, str], LiveRun] = {}
        self._lock, self._list_lock = threading.Lock(), threading.Lock()
        self._list: list[dict[str, Any]] = []
        self._list_expires = float("-inf")

    def respond(self, path: str, query: dict[str, str]) -> Content | None:
        """Return the answer to a request, or None if there is nothing at the path."""
        if path in _ASSETS:
            kind, name = _ASSETS[path]
            return kind, read_asset(name).encode()
        if path == "api/runs":
            return json_content({"runs": self.list_runs()})
        if path not in ("api/run", "api/samples") or (run := self._live_run(query)) is None:
            return None
        value = run.samples() if path == "api/samples" else run.answer(query.get("since", ""))
        return None if value is None else json_content(value)

    def _live_run(self, query: dict[str, str]) -> LiveRun | None:
        number, name = query.get("store", "0"), query.get("run", "")
        if not (number.isdecimal() and int(number) < len(self.stores) and is_run_name(name)):
            return None
        with self._lock:
            place = int(number), name
            if place not in self._runs:
                store = self.stores[place[0]]
                if not store.exists(RunKeys(name).record):
                    return None
                self._runs[place] = LiveRun(store, RunKeys(name), num_planned_rounds, read_token_texts)
            return self._runs[place]

    def list_runs(self) -> list[dict[str, Any]]:
        """Return a row for each run, the newest run first. The list is used for LIST_SECONDS, or for ten times as long
        as it took: many runs in an object store take a while."""
        with self._list_lock:
            start = time.monotonic()
            if start > self._list_expires:
                runs = [(store, number, run) for number, store in enumerate(self.stores) for run in store.list("runs")]
                rows = filter(None, (row_of_list(*run) for run in runs))
                self._list = sorted(rows, key=lambda row: row["started"], reverse=True)
                end = time.monotonic()
                self._list_expires = end + max(LIST_SECONDS, 10 * (end - start))
            return self._list


def row_of_list(store: Store, number: int, run: str) -> dict[str, Any] | None:
    """Return the row of a run in the list of runs, or None if it has neither a record nor commits. `number`: index of
    the store."""
    keys = RunKeys(run)
    row = {"store": number, "uri": store.uri, "run": run, "rounds": "", "reward": "", "evaluations": "", "started": ""}
    try:
        cells = row_of_run(store, keys)
        if not cells:
            return None
        if len(cells) > 2:  # not a removed run
            _, _, row["rounds"], row["reward"], _, row["evaluations"], row["started"] = cells
            status = read_run_status(store, keys)
            return row | {"state": run_state(store, keys, read_starts(store, keys), status).kind}
        return row | {"state": cells[1]}
    except (PenstockError, OSError):
        return row | {"state": "damaged"}


# ---- in a terminal ---------------------------------------------------------------------------------------------------


def watch_in_terminal(store: Store, keys: RunKeys) -> int:
    """Show the panel of a run that another process drives, until the run ends. Return 0."""
    console = TerminalConsole(file=sys.stdout, highlight=False)
    if not can_redraw(console):
        raise OptionError(
            "penstock watch --terminal needs a terminal that can redraw lines: leave out --terminal, or use "
            f"`{penstock_command()} show {keys.run}`"
        )
    record = read_existing_record(store, keys)
    panel = RemotePanel(store, keys, record)
    panel.refresh()
    region = LiveRegion(console, panel.panel.render)
    region.start()
    try:
        while panel.state.kind in ("running", "silent", "waiting"):
            time.sleep(STATUS_SECONDS / 2)
            panel.refresh()
    finally:
        region.stop()
    state = panel.state
    console.print(
        f"{keys.run}: {panel.panel.rounds.done} of {panel.panel.rounds.planned} rounds, "
        f"{state.outcome.lower() or state.kind}"
    )
    return 0


class RemotePanel:
    """Fills a panel from the commits and the status of a run that another process drives."""

    def __init__(self, store: Store, keys: RunKeys, record: RunRecord) -> None:
        self.store = store
        self.keys = keys
        self.state = RunState("waiting")
        self.panel = Panel(keys.run, record.flow, num_planned_rounds(store, keys, record))
        self._feed = CommitFeed(store, keys)
        self._rollouts: dict[int, Commit] = {}  # of rounds that are not trained yet
        self._starts: list[Any] = []

    def refresh(self) -> None:
        """Read what is new in the store."""
        offset = time.monotonic() - time.time()
        for commit in self._feed.read(seconds=60.0):
            self._add(commit, commit.created_at + offset)
        status = read_run_status(self.store, self.keys)
        self._starts = read_starts(self.store, self.keys, known=self._starts)
        self.state = run_state(self.store, self.keys, self._starts, status)
        panel = self.panel
        if self._starts:
            panel.started_at = self._starts[-1][0].at + offset
        shown: RunStatus | None = status if self.state.kind in ("running", "silent") else None
        panel.activities.running = [
            Activity(each.title, each.stage, each.since + offset, done=each.done, total=each.total)
            for each in (shown.activities if shown else ())
        ]
        panel.phase = (shown.phase if shown else "") or ("no new status" if self.state.kind == "silent" else "")
        newest = {name: values[-1] for name, values in (shown.series if shown else {}).items()}
        panel.machine = {k: value for k, value in newest.items() if value is not None and k.startswith("system/")}
        panel.engines = lambda: shown.engines if shown else ""

    def _add(self, commit: Commit, at: float) -> None:
        panel = self.panel
        panel.curves.add(commit)
        if commit.kind == "rollout":
            self._rollouts[commit.index] = commit
            panel.rounds.samples = format_sample_preview(commit, MAX_COLUMNS)
        elif commit.kind == "step":
            rollout = self._rollouts.pop(commit.index, None)
            spent = seconds_by_stage([each for each in (rollout, commit) if each], [])
            panel.rounds.durations = ", ".join(f"{stage} {seconds:.2f}s" for stage, seconds in spent.items())
            panel.rounds.finish(commit.index, at)
        stages = {"step": "train"} | ({"rollout": "data"} if "data" in panel.stages else {})
        panel.activities.finished.add(stages.get(commit.kind, commit.kind))
