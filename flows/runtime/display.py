"""The terminal output of a flow: a header, then a live panel on a terminal and one line a round, and a summary.

Only committed results are printed. This module uses neither Prefect nor the stages. Log lines of other libraries are
turned off in flows/runtime/environment.py.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock.flows.options.argv import penstock_command
from penstock.flows.runtime.environment import CONSOLE_LEVEL, QUIET
from penstock.flows.terminal.console import LiveRegion, TerminalConsole, WaitReminder, can_redraw
from penstock.flows.terminal.lines import (
    EVENT_LINES,
    MAX_COLUMNS,
    RoundLines,
    format_sample_preview,
    json_line,
    seconds_by_stage,
    summary_rows,
)
from penstock.flows.terminal.panel import STAGES, Panel, end_wait
from penstock.storage.commit import Commit, eval_rewards
from penstock.storage.secrets import redact
from penstock.storage.web.login import live_link

ProgressCallback = Callable[[int, int], None]  # done, total


class Display:
    """The terminal output of one flow run. The header is printed at once, with `pages`: the links "watch" and
    "prefect"."""

    def __init__(
        self,
        run: str,
        flow: str,
        config: Any,
        store_uri: str,
        tracking_uri: str = "",
        pages: Mapping[str, str] = MappingProxyType({}),
        *,
        console: Console | None = None,
    ) -> None:
        end_wait()  # first, because it restores sys.stdout
        # Without a TTY rich would break lines at 80 columns; the line of a round must stay one line for grep.
        self.console = console or TerminalConsole(file=sys.stdout, soft_wrap=True, highlight=False)
        self.run = run
        self.store_uri = store_uri
        self.tracking_uri = tracking_uri
        num_rounds = int(config.run.num_rollout)
        self._json = config.run.log_format == "json"
        self._without_steps = bool(config.run.debug_rollout_only)
        self._commits: list[Commit] = []
        self._rollouts: dict[int, Commit] = {}
        self.publish_seconds: list[float] = []  # of weight updates, which are part of the next round's time
        # number of a round -> metrics of the overlap of generation and training
        self.overlap: dict[int, dict[str, float]] = {}
        self._announced: set[str] = set()  # waits that were printed
        self._round_lines = RoundLines(num_rounds)
        self.on_progress: Callable[[], None] = lambda: None  # called when a stage has made progress
        self.panel = Panel(run, flow, num_rounds)
        self._region: LiveRegion | None = None
        self._stop_reminder: Callable[[], None] = lambda: None  # without a region, repeats waits until the first round
        self._wait: tuple[str, float] | None = None  # the wait that was printed last and its time, until it ends
        data = config.rollout.prompt_data
        header = {
            "watch": pages.get("watch", ""),  # first: a link that works from now on
            "run": f"{run}  ({flow})",
            "model": str(config.convert.hf_checkpoint),
            "data": data if isinstance(data, str) else ", ".join(map(str, data or [])),
            "evaluation": ", ".join(f"{name} ({path})" for name, path in config.eval.data_sets),
            "store": store_uri,
            "mlflow": live_link(redact(tracking_uri)),
            "prefect": pages.get("prefect", ""),
        }
        self._print_rows({title: str(value) for title, value in header.items() if value})
        prefect_level = os.environ.get(CONSOLE_LEVEL, "INFO")  # with --verbose Prefect prints log lines, too
        if not self._json and can_redraw(self.console) and prefect_level == QUIET[CONSOLE_LEVEL]:
            self._region = LiveRegion(self.console, self.panel.render)
            self._region.start()
        else:
            self._stop_reminder = WaitReminder(self._current_wait, self._print_note).stop

    # ---- during the run ----------------------------------------------------------------------------------------------

    def add_earlier(self, commits: Sequence[Commit]) -> None:
        """Add the commits of earlier starts of the run to the panel's curves and to the choice of columns."""
        steps = {commit.index: commit for commit in commits if commit.kind == "step"}
        for commit in commits:
            if commit.kind == "rollout":
                step = steps.get(commit.index)
                if step is None and not self._without_steps:  # this start trains it: the line of the round shows both
                    is_own = commit.writer in ("", self.run)  # else a parent has spent the seconds
                    self._rollouts[commit.index] = commit if is_own else commit.model_copy(update={"seconds": {}})
                self._round_lines.add({**commit.summary, **(step.summary if step else {})})
            self.panel.curves.add(commit)
        self.panel.rounds.done = max((commit.policy_version for commit in steps.values()), default=0)

    def note(self, text: str) -> None:
        """Print a progress message, secrets redacted."""
        self.on_progress()
        self.forward(text)

    def forward(self, text: str) -> None:
        """Print a message that does not count as progress of a stage, secrets redacted."""
        self.panel.messages["info"].append((time.time(), redact(text)))
        self._print_note(redact(text))

    def warn(self, text: str) -> None:
        """Print a warning in bold red."""
        self.panel.messages["warning"].append((time.time(), redact(text)))
        self._print(Text(text if self._json else f"WARNING: {text}", style="bold red"), level="warning")

    @contextmanager
    def forward_logs(self, *packages: str) -> Iterator[None]:
        """Print the first line of each warning that the Python packages `packages` log during the block."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.forward(record.getMessage().partition("\n")[0])  # type: ignore[method-assign]
        loggers = [logging.getLogger(name) for name in packages]
        for logger in loggers:
            logger.addHandler(handler)
            logger.propagate = False
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
                logger.propagate = True

    @contextmanager
    def stage(self, name: str, rollout_id: int | None) -> Iterator[None]:
        """Show a stage in the panel during the block. Without a panel, print what the first start of a slow stage waits
        for."""
        shown = STAGES.get(name, name)
        title = shown if rollout_id is None else f"{shown}, round {rollout_id}"
        if name in _WAITS:
            self.note_wait(_WAITS[name])
        with self.panel.activities.show(title, shown):
            yield
            self._wait = None

    def note_wait(self, text: str) -> None:
        """Print what the run waits for, once, unless there is a panel, which shows it."""
        if self._region is None and text not in self._announced:
            self._announced.add(text)
            self.note(text)
            self._wait = text, time.monotonic()

    def _current_wait(self) -> tuple[str, float] | None:
        """Return what the run waits for, and since when: the wait that was printed, else the newest activity."""
        activity = next(reversed(list(self.panel.activities.running)), None)
        if self._wait is not None or activity is None:
            return self._wait
        done = f" {activity.done:,}/{activity.total:,}" if activity.total else ""
        return f"in {activity.title}{done}", activity.started_at

    @contextmanager
    def progress(self, title: str, stage: str) -> Iterator[ProgressCallback]:
        """Show a progress bar of a stage during the block. Yields its callback (done, total), which without a panel
        only records that the stage has made progress."""
        with self.panel.activities.show(title, stage) as activity:

            def update(done: int, total: int) -> None:
                self.on_progress()
                self._wait = None  # for the engines
                activity.done, activity.total = done, total

            yield update

    def print_commit(self, commit: Commit) -> str:
        """Print and return the line of a new commit. For a rollout return "": its step's line shows it, unless there
        are no steps (--debug-rollout-only)."""
        self.on_progress()
        self._commits.append(commit.model_copy(update={"state": {}}))  # without the sample previews, which are large
        self.panel.curves.add(commit)
        if commit.kind == "rollout":
            self.panel.rounds.samples = format_sample_preview(commit, min(self.console.width - 1, MAX_COLUMNS))
        if commit.kind == "rollout" and not self._without_steps:
            self._rollouts[commit.index] = commit
            return ""
        if commit.kind in ("rollout", "step"):
            rollout = self._rollouts.pop(commit.index, None)
            overlap = self.overlap.pop(commit.index, {})
            width = min(MAX_COLUMNS, self.console.width) if self._region else MAX_COLUMNS
            line = self._round_lines.format(commit, rollout, self.publish_seconds, overlap, width)
            spent = seconds_by_stage([c for c in (rollout, commit) if c], self.publish_seconds[-1:])
            self.panel.rounds.durations = ", ".join(f"{stage} {seconds:.2f}s" for stage, seconds in spent.items())
            self.panel.rounds.finish(commit.index)
            self._stop_reminder()
        else:
            line = Text(EVENT_LINES[commit.kind](commit))
        self._print(line)
        return line.plain

    def result(self, commit: Commit) -> str:
        """Return the main number of a commit that was printed or added: `reward 0.725`, `loss 1.25`, `held-out 0.5`; ""
        if it has none."""
        curves = self.panel.curves
        if commit.kind in ("rollout", "step") and commit.index in curves.of_rounds:
            return f"{curves.name} {curves.of_rounds[commit.index]:.3f}"
        return ", ".join(f"{task} {reward:.3f}" for task, reward in eval_rewards(commit).items())

    def print_summary(self, commits: Sequence[Commit] | None = None) -> None:
        """Print the summary of `commits` (default: all commits printed so far)."""
        self.close()
        self._print(Text())
        store = shlex.quote(self.store_uri)
        self._print_rows(
            {
                "run": self.run,
                **self.summary(commits),
                "look closer": f"{penstock_command()} show {self.run} --store {store}",
                "all runs": f"{penstock_command()} runs --store {store}",
                "in a browser": f"{penstock_command()} up --store {store}   (Prefect and MLflow; prints the links)",
            }
        )
        self._print(Text())

    def summary(self, commits: Sequence[Commit] | None = None) -> dict[str, str]:
        """Return the results of `commits` (default: all commits printed so far): title -> text."""
        return summary_rows(self._commits if commits is None else commits, self.publish_seconds, self.store_uri)

    def close(self) -> None:
        """Erase the panel. Safe to call twice."""
        self._stop_reminder()
        if self._region is not None:
            self._region.stop()
            self._region = None

    # ---- printing ----------------------------------------------------------------------------------------------------

    def _print_rows(self, rows: dict[str, str]) -> None:
        width = max(map(len, rows)) + 2
        for title, value in rows.items():
            style = Style(link=value.split()[0]) if value.startswith(("http://", "https://")) else Style()
            self._print(Text.assemble((f"{title:<{width}}", "dim"), (value, style)))

    def _print_note(self, text: str) -> None:
        self._print(Text(text if self._json else f"· {text}", style="dim"))

    def _print(self, text: Text, level: str = "info") -> None:
        if self._json:
            if message := text.plain.strip():  # without the empty lines around the summary
                self.console.out(json_line(level, self.run, message), highlight=False)
        elif self._region is not None:
            self._region.print(text)
        else:
            self.console.print(text)


_ENGINES = "waiting for the engines (they load the model)"
_WAITS = {  # stage -> what its first start waits for
    "evaluate_one": _ENGINES,
    "rollout": _ENGINES,
}
