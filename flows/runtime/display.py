"""The terminal output of a flow: a header, one line and two samples per round, a progress bar on a TTY, a summary.

Only committed results are printed. This module uses neither Prefect nor the stages. Log lines of other libraries are
turned off in flows/runtime/environment.py.
"""

from __future__ import annotations

import atexit
import logging
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from penstock.flows.options.argv import penstock_command
from penstock.flows.reporting.log_format import json_line
from penstock.storage.refs import Commit
from penstock.storage.secrets import redact
from penstock.storage.tracking.lineage import eval_rewards

ProgressCallback = Callable[[int, int], None]  # done, total


class Display:
    """The terminal output of one flow run. The header is printed at once.

    Args:
        run: name of the run.
        flow: name of the flow.
        config: the flow's config; its model, data sets and number of rounds are printed.
        store_uri: URI of the run's store.
        tracking_uri: URI of the MLflow server or database.
        prefect_page: URL of this flow run's page.
        console: where to print; default standard output.
    """

    def __init__(
        self,
        run: str,
        flow: str,
        config: Any,
        store_uri: str,
        tracking_uri: str = "",
        prefect_page: str = "",
        *,
        console: Console | None = None,
    ) -> None:
        # Without a TTY rich would break lines at 80 columns; the line of a round must stay one line for grep.
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.run = run
        self.store_uri = store_uri
        self.tracking_uri = tracking_uri
        self.prefect_page = prefect_page
        self.num_rounds = int(config.run.num_rollout)
        self._json = config.run.log_format == "json"
        self._without_steps = bool(config.run.debug_rollout_only)
        self._commits: list[Commit] = []
        self._rollouts: dict[int, Commit] = {}
        self._publish_seconds: list[float] = []
        self._overlap: dict[int, dict[str, float]] = {}  # number of a round -> its metrics of overlap
        self.on_progress: Callable[[], None] = lambda: None  # called when a stage has moved
        self._bar: Progress | None = None
        self._rounds_bar: TaskID | None = None
        self._print_header(flow, config)
        if self.console.is_terminal and self.num_rounds and not self._json:
            self._start_bar(flow)

    # ---- during the run ----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Print a progress message, secrets redacted."""
        self.on_progress()
        self.forward(text)

    def forward(self, text: str) -> None:
        """Print a message that does not show that a stage has moved, secrets redacted."""
        self._print(Text(redact(text) if self._json else f"· {redact(text)}", style="dim"))

    def warn(self, text: str) -> None:
        """Print a warning in bold red."""
        self._print(Text(text if self._json else f"WARNING: {text}", style="bold red"), level="warning")

    @contextmanager
    def forward_logs(self, *packages: str) -> Iterator[None]:
        """Print the warnings that the Python packages `packages` log during the block, as `note` does."""
        handler = LogForwarder(self)
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
    def progress(self, title: str) -> Iterator[ProgressCallback]:
        """Show a second progress bar during the block. Yields its callback (done, total), which without a
        TTY only records that the stage has moved."""
        if self._bar is None:
            yield lambda done, total: self.on_progress()
            return
        bar, task = self._bar, self._bar.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            self.on_progress()
            bar.update(task, completed=done, total=total)

        try:
            yield update
        finally:
            bar.remove_task(task)

    def record_publish(self, seconds: float) -> None:
        """Record the seconds that a weight update took; the next round's line shows them."""
        self._publish_seconds.append(seconds)

    def record_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Record how generation and training overlapped before a round; the round's line shows it."""
        self._overlap[rollout_id] = metrics

    def print_commit(self, commit: Commit) -> str:
        """Print and return the line of a new commit. For a rollout return "": its step's line shows it, unless there
        are no steps (--debug-rollout-only)."""
        self.on_progress()
        self._commits.append(commit.model_copy(update={"state": {}}))  # without the sample previews, which are large
        samples: list[Text] = []
        if commit.kind == "rollout" and not self._without_steps:
            self._rollouts[commit.index] = commit
            self._set_bar_text(f"training on round {commit.index + 1}")
            return ""
        if commit.kind in ("rollout", "step"):
            rollout = self._rollouts.pop(commit.index, None)
            overlap = self._overlap.pop(commit.index, {})
            line = format_round_line(commit, rollout, self.num_rounds, self._publish_seconds, overlap)
            if rollout := rollout or (commit if commit.kind == "rollout" else None):
                samples = format_sample_preview(
                    rollout, self.console.width if self.console.is_terminal else _PIPE_WIDTH
                )
            if self._bar is not None and self._rounds_bar is not None:
                self._bar.update(self._rounds_bar, completed=commit.index + 1)
            next_round = f"generating round {commit.index + 2}"
            self._set_bar_text(next_round if commit.index + 1 < self.num_rounds else "last round done")
        else:
            line = Text(_EVENT_LINES[commit.kind](commit))
        for text in (line, *samples):
            self._print(text)
        return line.plain

    def print_summary(self, commits: Sequence[Commit] | None = None) -> None:
        """Print the summary of `commits` (default: all commits printed so far)."""
        self.close()
        self._print(Text())
        self._print_rows(
            {
                "run": self.run,
                **self.summary(commits),
                "all runs": f"{penstock_command()} runs --store {shlex.quote(self.store_uri)}",
                "look closer": f"make up STORE={shlex.quote(self.store_uri)}   "
                "(Prefect and MLflow in the browser; prints the links)",
            }
        )
        self._print(Text())

    def summary(self, commits: Sequence[Commit] | None = None) -> dict[str, str]:
        """Return the results of `commits` (default: all commits printed so far): title -> text."""
        return summary_rows(self._commits if commits is None else commits, self._publish_seconds, self.store_uri)

    def close(self) -> None:
        """Remove the progress bar and restore the terminal. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            atexit.unregister(self.close)
            self._bar = self._rounds_bar = None

    # ---- printing ----------------------------------------------------------------------------------------------------

    def _print_header(self, flow: str, config: Any) -> None:
        data = config.rollout.prompt_data
        rows = {
            "run": f"{self.run}  ({flow})",
            "model": config.convert.hf_checkpoint,
            "data": data if isinstance(data, str) else ", ".join(map(str, data or [])),
            "evaluation": ", ".join(f"{name} ({path})" for name, path in config.eval.eval_prompt_data or []),
            "store": self.store_uri,
            "mlflow": redact(self.tracking_uri),
            "prefect": self.prefect_page,
        }
        self._print_rows({title: str(value) for title, value in rows.items() if value})

    def _print_rows(self, rows: dict[str, str]) -> None:
        width = max(map(len, rows)) + 2
        for title, value in rows.items():
            self._print(Text.assemble((f"{title:<{width}}", "dim"), value))

    def _start_bar(self, flow: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, *times, console=self.console, transient=True, refresh_per_second=4)
        self._rounds_bar = self._bar.add_task(flow, total=self.num_rounds)
        self._bar.start()
        atexit.register(self.close)  # restores the cursor after any failure

    def _set_bar_text(self, text: str) -> None:
        if self._bar is not None and self._rounds_bar is not None:
            self._bar.update(self._rounds_bar, description=text)

    def _print(self, text: Text, level: str = "info") -> None:
        if not self._json:
            self.console.print(text)
        elif message := text.plain.strip():  # without the empty lines around the summary
            self.console.out(json_line(level, self.run, message), highlight=False)


class LogForwarder(logging.Handler):
    """Show the first line of each log record on a display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.forward(record.getMessage().partition("\n")[0])


def format_round_line(
    step: Commit,
    rollout: Commit | None,
    num_rounds: int,
    publish_seconds: Sequence[float] = (),
    overlap: Mapping[str, float] | None = None,
) -> Text:
    """Return `round 3/20  reward 0.531  loss -0.0021  kl 0.0003  ...`, with the columns whose metrics the round has."""
    numbers = {**(rollout.summary if rollout else {}), **step.summary, **(overlap or {})}
    if not numbers.get("rollout/staleness/max"):
        numbers.pop("rollout/staleness/mean", None)
    width = len(str(num_rounds))
    parts = [("round", f"{step.index + 1:>{width}}/{num_rounds}")]
    for label, names, style in _COLUMNS:
        value = next((numbers[name] for name in names if name in numbers), None)
        if value is not None:
            parts.append((label, format(value, style)))
    if speed := tokens_per_second(step, rollout):
        parts.append(("tokens/s", f"{speed:,.0f}"))
    for stage, seconds in _seconds_by_stage([c for c in (rollout, step) if c], publish_seconds[-1:]).items():
        parts.append((stage, f"{seconds:.2f}s"))
    return Text("  ").join(Text.assemble((f"{label} ", "dim"), value) for label, value in parts)


def describe_commit(commit: Commit, num_rounds: int) -> str:
    """Return the line of a commit by itself: that of a step without the columns of its rollout."""
    if commit.kind in ("rollout", "step"):
        return format_round_line(commit, None, num_rounds).plain
    return _EVENT_LINES[commit.kind](commit).strip()


def format_sample_preview(rollout: Commit, width: int) -> list[Text]:
    """Return the samples with the highest and the lowest reward of a rollout's preview: `prompt -> response`.

    A line has at most `width` terminal cells. A sample that does not fit takes two lines.
    """
    rows = [row for row in rollout.state.get("shown") or [] if row["reward"] is not None]
    lines = []
    for title, row in [("best", rows[0]), ("worst", rows[-1])][: len(rows)] if rows else []:
        prompt, response = clip_line(row["prompt"], width - 16), clip_line(row["response"], width - 16)
        fits = cell_len(prompt) + cell_len(response) + 4 <= width - 16
        label = f"{title} {row['reward']:.3f}"
        lines.append(Text.assemble((f"  {label:>12}  ", "dim"), prompt))
        if fits:
            lines[-1].append(" -> ", "dim").append(response)
        else:
            lines.append(Text.assemble((f"  {'->':>12}  ", "dim"), response))
    return lines


def clip_line(text: str, width: int) -> str:
    """Return a text as one line without control characters, shortened in the middle to `width` cells."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    if cell_len(text) <= width:
        return text
    half = max(width - 5, 2) // 2
    return f"{set_cell_size(text, half)} ... {set_cell_size(text[::-1], half)[::-1]}"


def tokens_per_second(step: Commit, rollout: Commit | None) -> float | None:
    """Return generated tokens per second per engine GPU or, for SFT, trained tokens per second over all ranks."""
    if rollout and "perf/tokens_per_gpu_per_sec" in rollout.summary:
        return rollout.summary["perf/tokens_per_gpu_per_sec"]
    return step.summary.get("perf/actor_train_tok_per_s")


def summary_rows(commits: Sequence[Commit], publish_seconds: Sequence[float], store_uri: str) -> dict[str, str]:
    """Return the results of a run and the seconds of each stage: title -> text."""
    rows: dict[str, str] = {}
    newest = {c.kind: c for c in sorted(commits, key=lambda c: c.index)}
    if "step" in newest:
        rows["rounds"] = str(newest["step"].policy_version)
    rewards = {
        c.index: c.summary["rollout/raw_reward"]
        for c in commits
        if c.kind == "rollout" and "rollout/raw_reward" in c.summary
    }
    if rewards:
        first, last = min(rewards), max(rewards)
        rows["reward"] = f"{rewards[first]:.3f} in round {first + 1}, {rewards[last]:.3f} in round {last + 1}"
    scores: dict[str, list[str]] = defaultdict(list)
    for commit in sorted((c for c in commits if c.kind == "eval"), key=lambda c: c.index):
        for task, reward in eval_rewards(commit).items():
            scores[task].append(f"{reward:.3f} after {commit.index} rounds")
    rows |= {f"eval {task}": ", ".join(history) for task, history in scores.items()}
    rows |= {kind: f"{store_uri}/{newest[kind].attempt}" for kind in ("checkpoint", "export") if kind in newest}
    if spent := _seconds_by_stage(commits, publish_seconds):
        rows["seconds"] = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in spent.items())
    return rows


def _seconds_by_stage(commits: Sequence[Commit], publish_seconds: Sequence[float]) -> dict[str, float]:
    """Return stage -> seconds, in the order of the loop.

    The total of a commit is the entry of `commit.seconds` named like its stage (`train`), else the sum of all entries.
    """
    spent: dict[str, float] = {}
    for kind, stage in _STAGES.items():
        if of_kind := [c for c in commits if c.kind == kind]:
            spent[stage] = sum(c.seconds.get(stage, sum(c.seconds.values())) for c in of_kind)
        if kind == "step" and publish_seconds:
            spent["publish"] = sum(publish_seconds)
    return spent


def format_eval_line(commit: Commit) -> str:
    """Return the printed line of an evaluation: every metric with its confidence interval."""
    results = []
    for task in eval_rewards(commit):
        others = [
            name
            for name in commit.summary
            if name.startswith(f"eval/{task}-") and not name.endswith(("-ci_low", "-ci_high"))
        ]
        details = ", ".join(
            f"{name.removeprefix(f'eval/{task}-')} {format_with_interval(commit.summary, name)}" for name in others
        )
        mean = format_with_interval(commit.summary, f"eval/{task}")
        results.append(f"{task} {mean} ({details})" if details else f"{task} {mean}")
    return f"  evaluated after {commit.index} rounds: {', '.join(results)}"


def format_with_interval(summary: Mapping[str, float], name: str) -> str:
    """Format a metric with its confidence interval, if the summary has one: `0.500 [0.412, 0.588]`."""
    low, high = summary.get(f"{name}-ci_low"), summary.get(f"{name}-ci_high")
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[name]:.3f}{interval}"


def print_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool = False, width: int = 160
) -> None:
    """Print a table to standard output.

    Args:
        titles: titles of the columns.
        rows: cells of each row.
        numeric: align all columns but the first to the right.
        width: width in characters if the output is not a terminal.
    """
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if numeric and index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = width
    console.print(table)


_EVENT_LINES: dict[str, Callable[[Commit], str]] = {  # kind of commit -> its printed line
    "model": lambda commit: (
        f"  converted{' and verified' if 'convert/num_tensors' in commit.summary else ''} "
        f"in {sum(commit.seconds.values()):.1f}s"
    ),
    "checkpoint": lambda commit: f"  saved checkpoint {commit.index:06d} in {sum(commit.seconds.values()):.1f}s",
    "eval": format_eval_line,
    "export": lambda commit: f"  exported version {commit.policy_version} in {sum(commit.seconds.values()):.1f}s",
}

_PIPE_WIDTH = 160  # width of a sample's line if the output is not a terminal

_STAGES = {  # kind of commit -> stage, in the order of the loop
    "model": "convert",
    "rollout": "rollout",
    "step": "train",
    "checkpoint": "save",
    "eval": "eval",
    "export": "export",
}

# (label, metrics of which the first one present is shown, format)
_COLUMNS: list[tuple[str, tuple[str, ...], str]] = [
    ("reward", ("rollout/raw_reward",), ".3f"),
    (
        "loss",
        ("train/loss",),
        "z.4f",
    ),  # z: on-policy GRPO's loss is a rounding error around 0, and "-0.0000" looks like a bug
    ("grad", ("train/grad_norm",), ".3f"),
    ("value", ("train/critic-value_loss",), ".4f"),
    ("kl", ("train/kl_loss", "train/ppo_kl"), ".1e"),
    ("gap", ("train/train_rollout_logprob_abs_diff",), ".1e"),  # mean |log-prob trainer - engine| of sampled tokens
    ("length", ("rollout/response_len/mean",), ".1f"),
    ("stale", ("rollout/staleness/mean",), ".2f"),  # policy versions
    ("wasted", ("rollout/wasted_tokens",), ",.0f"),  # tokens
    ("queue", ("rollout/queue_depth",), ".0f"),
    ("engines idle", ("perf/engine_idle_ratio",), ".0%"),
    ("trainer idle", ("perf/wait_time_ratio",), ".0%"),
]
