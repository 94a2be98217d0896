"""Write the HTML report of a run into the store when a start of the run ends, for its trackers and Prefect page."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.flows.inspect.report import make_report
from penstock.flows.reporting.observer import Observer
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import RunKeys
from penstock.storage.secrets import redact
from penstock.storage.store import Store, committed_prefixes
from penstock.storage.tracking.delivery import RunTracking

MAX_SAMPLES = 2000  # fewer than `penstock report` shows: the end of a run waits for the report
TIMEOUT = 30.0  # seconds


class FinalReport(Observer):
    """Writes the report at the end of a start, unless that was stopped, and gives it to the trackers."""

    def __init__(self, run: ActiveRun, display: Display, tracking: RunTracking) -> None:
        self.run = run
        self.display = display
        self.tracking = tracking
        self.written = False

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        run = self.run
        if not run.writes_report(kind) or not committed_prefixes(run.store, run.keys):
            return
        content = write_final_report(run.store, run.keys, self.display.note)
        if content is not None:
            self.written = True
            self.tracking.record_report(run.keys.report, content)
            self.display.note(f"report: {run.store.path(run.keys.report)}")


def write_final_report(store: Store, keys: RunKeys, note: Callable[[str], object]) -> bytes | None:
    """Write the report of a run to `RunKeys.report`, replacing that of an earlier start. Return its content, or None if
    that failed or took longer than TIMEOUT; then the reason is printed with `note`, and the run is not affected."""
    pages: list[bytes] = []
    problems: list[str] = []

    def write() -> None:
        try:
            page = make_report(store, keys.run, MAX_SAMPLES).encode()
            store.replace(keys.report, page)
            pages.append(page)
        except Exception as error:  # the report must not fail the run, whatever the run's files or the store are like
            problems.append(redact(f"{type(error).__name__}: {str(error)[:200]}"))

    thread = threading.Thread(target=write, name="report", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if pages:
        return pages[0]
    reason = problems[0] if problems else f"not written within {TIMEOUT:.0f} s"
    note(f"the report of the run is missing ({reason}); `penstock report {keys.run}` writes it")
    return None
