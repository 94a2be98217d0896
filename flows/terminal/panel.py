"""The live panel of a run on a terminal: progress, stages, reward, engines, GPUs, samples, links.

`Display` (flows/runtime/display.py) changes what the panel shows; a LiveRegion draws it several times a second.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rich.style import Style
from rich.text import Text

from penstock.flows.terminal.console import LiveRegion, TerminalConsole, WaitReminder, can_redraw
from penstock.flows.terminal.lines import format_duration, json_line, sparkline
from penstock.storage.commit import Commit, eval_rewards

MAX_WIDTH = 100  # columns
ETA_ROUNDS = 10  # the remaining time is estimated from the median duration of this many newest rounds
LABEL = 10  # width in characters of the titles of rows
MAX_MESSAGES, MAX_ENDED = 12, 40  # number of printed lines (of each level) and of ended activities that are kept
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

STAGES = {  # name of a stage's function -> its name in the panel, in the order of the loop
    "convert": "convert",
    "restore": "restore",
    "rollout": "rollout",
    "demonstrate": "data",
    "train": "train",
    "publish": "publish",
    "publish_for_evaluation": "publish",
    "save": "checkpoint",
    "evaluate_one": "eval",
    "evaluate_all": "eval",
    "export": "export",
    "save_hf": "export",
    "promote": "promote",
}
STAGE_BARS = {  # flow -> stages of its bar
    "train": ("convert", "restore", "rollout", "train", "publish", "checkpoint", "eval", "export"),
    "sft": ("convert", "restore", "data", "train", "checkpoint", "export"),
    "evaluate": ("convert", "eval"),
    "convert": ("convert",),
}


@dataclass
class Activity:
    """Something that is running: a stage, or a part of a stage with a known number of steps (`total`)."""

    title: str
    stage: str
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None  # None while it is running, and if an exception interrupted it
    done: int = 0
    total: int | None = None


@dataclass
class Activities:
    """What is running in a run, and what has ended."""

    running: list[Activity] = field(default_factory=list)
    ended: deque[Activity] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))
    finished: set[str] = field(default_factory=set)  # stages that were finished at least once

    @contextmanager
    def show(self, title: str, stage: str) -> Iterator[Activity]:
        """Show an activity during the block."""
        activity = Activity(title, stage)
        self.running.append(activity)
        try:
            yield activity
            self.finished.add(stage)
            activity.ended_at = time.monotonic()
            self.ended.append(activity)
        finally:
            self.running.remove(activity)


@dataclass
class Rounds:
    """The progress of a run's rounds."""

    planned: int  # 0 if the flow does not train
    done: int = 0  # number of trained rounds
    durations: str = ""  # of the stages of the newest round
    samples: Sequence[Text] = ()  # best and worst sample of the newest round
    ends: list[float] = field(default_factory=lambda: [time.monotonic()])  # the start of the panel, then ends of rounds

    def finish(self, rollout_id: int, at: float | None = None) -> None:
        """Count a round that was trained now, or at the time `at` of the monotonic clock."""
        self.done = max(self.done, rollout_id + 1)
        self.ends = [*self.ends[-ETA_ROUNDS:], time.monotonic() if at is None else at]

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the last round is trained; None before the end of the second round that
        this process trains, and after the last."""
        ends = self.ends[1:]  # not the duration of the first round, in which processes start
        if len(ends) < 2 or self.done >= self.planned:
            return None
        durations = [end - start for start, end in pairwise(ends)]
        return max(0.0, median(durations) * (self.planned - self.done) - (time.monotonic() - ends[-1]))


@dataclass
class Curves:
    """The rewards of a run, or its losses if it has no rewards."""

    name: str  # "reward" or "loss"
    of_rounds: dict[int, float] = field(default_factory=dict)  # round -> its reward or loss
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)  # data set -> policy version -> reward

    def add(self, commit: Commit) -> None:
        """Add the reward or the loss of a commit, if it has one."""
        kind, metric = ("rollout", "rollout/raw_reward") if self.name == "reward" else ("step", "train/loss")
        if commit.kind == kind and metric in commit.summary:
            self.of_rounds[commit.index] = commit.summary[metric]
        elif commit.kind == "eval":
            for task, reward in eval_rewards(commit).items():
                self.evaluations.setdefault(task, {})[commit.index] = reward

    def rows(self, width: int) -> list[Text]:
        """Return a line with the curve of the rounds and one with the evaluations, if there are any."""
        values = [value for _, value in sorted(self.of_rounds.items())]
        rows = []
        if values:
            change = f"{values[0]:.3f} -> {values[-1]:.3f}"
            line = sparkline(values, min(60, width - LABEL - len(change) - 2))
            rows.append(Text.assemble((self.name.ljust(LABEL), "dim"), (line, "green"), f"  {change}"))
        if self.evaluations:
            scores = [
                f"{name} " + " -> ".join(f"{reward:.3f}" for _, reward in sorted(versions.items())[-5:])
                for name, versions in list(self.evaluations.items())
            ]
            rows.append(Text.assemble(("eval".ljust(LABEL), "dim"), ", ".join(scores)))
        return rows


class Panel:
    """What the panel shows, and the methods that draw it. `num_rounds` is 0 if the flow does not train."""

    def __init__(self, run: str, flow: str, num_rounds: int) -> None:
        self.run = run
        self.stages = STAGE_BARS.get(flow, ())
        self.rounds = Rounds(num_rounds)
        self.curves = Curves("loss" if "data" in self.stages else "reward")
        self.activities = Activities()
        self.links: Callable[[], Mapping[str, str]] = dict  # returns title -> URL of the pages about the run
        self.engines: Callable[[], str] = str  # returns the state of the engines in words, "" before their start
        self.machine: Mapping[str, float] = {}  # newest system metrics
        self.phase = ""  # what happens outside of the stages, for instance the shutdown
        self.messages: dict[str, deque[tuple[float, str]]] = {  # level -> (time, text) of the newest printed lines
            "warning": deque(maxlen=MAX_MESSAGES),
            "info": deque(maxlen=MAX_MESSAGES),
        }
        self.started_at = time.monotonic()

    def render(self, width: int, height: int) -> list[Text]:
        """Return the lines of the panel: at most `height` lines, at most `width` characters wide. If they do not fit,
        less important lines are left out."""
        width = min(width, MAX_WIDTH)
        required = [self._title(width), *self._activity_rows(width)]
        active = {activity.stage for activity in list(self.activities.running)}
        stages = [
            Text(name, "bold reverse" if name in active else "green" if name in self.activities.finished else "dim")
            for name in self.stages
        ]
        machine = {
            "machine": ", ".join(filter(None, [self.engines(), *describe_machine(self.machine)])),
            "a round": self.rounds.durations,
        }
        links = [Text(f"{title} ↗", style=Style(link=url, underline=True)) for title, url in self.links().items()]
        blocks = [
            [Text.assemble(("stages".ljust(LABEL), "dim"), Text(" > ", style="dim").join(stages))],
            self.curves.rows(width),
            [Text.assemble((title.ljust(LABEL), "dim"), text) for title, text in machine.items() if text],
            [Text("  ").join(links)] if links else [],
            list(self.rounds.samples),
        ]
        rows = 1 + len(required)  # 1 for the horizontal rule above
        shown: list[list[Text]] = []
        for block in blocks:
            fits = rows + len(block) <= height
            shown.append(block if fits else [])
            rows += len(block) if fits else 0
        stage_bar, curve, machine_rows, links_row, samples = shown
        title, *activities = required
        lines = [title, *stage_bar, *activities, *curve, *samples, *machine_rows, *links_row]
        return [Text("─" * width, style="dim"), *lines] if len(lines) < height else lines[:height]

    def phase_row(self, otherwise: str) -> Text:
        """Return one line with the current phase, or `otherwise` if there is none, and the time since the start."""
        now = time.monotonic()
        frame = SPINNER[int(now * 8) % len(SPINNER)]
        elapsed = format_duration(now - self.started_at)
        return Text.assemble((f"{frame} ", "cyan"), self.phase or otherwise, (f"  {elapsed}", "dim"))

    def _title(self, width: int) -> Text:
        elapsed, rounds = format_duration(time.monotonic() - self.started_at), self.rounds
        if not rounds.planned:
            return Text.assemble((self.run, "bold"), f"  {elapsed}")
        left = rounds.seconds_left()
        times = elapsed if left is None else f"{elapsed}, {format_duration(left)} left"
        text = f"{rounds.done}/{rounds.planned} rounds"
        size = max(0, min(40, width - len(self.run) - len(text) - len(times) - 6))
        parts: list[str | tuple[str, str]] = [(self.run, "bold"), "  ", *bar(rounds.done, rounds.planned, size)]
        return Text.assemble(*parts, "  " if size else "", text, "  ", (times, "dim"))

    def _activity_rows(self, width: int) -> list[Text]:
        """Return a line for each running activity, or a single line during the shutdown or between two stages."""
        now, rows = time.monotonic(), []
        frame = SPINNER[int(now * 8) % len(SPINNER)]
        activities = list(self.activities.running)
        nested = {activity.stage for activity in activities if activity.total is not None}
        for activity in activities:
            if activity.total is None and activity.stage in nested:
                continue  # the activity with a progress bar has its own line
            parts: list[str | tuple[str, str]] = [(f"{frame} ", "cyan"), activity.title]
            if activity.total:
                size = max(0, min(30, width - len(activity.title) - 30))
                count = f"{activity.done:,}/{activity.total:,}"
                parts += ["  ", *bar(activity.done, activity.total, size), "  ", count]
            rows.append(Text.assemble(*parts, (f"  {format_duration(now - activity.started_at)}", "dim")))
        if self.phase or not rows:
            rows = [self.phase_row("between two stages")]
        return rows


def bar(done: int, total: int, width: int) -> list[tuple[str, str]]:
    """Return the parts (text, style) of a progress bar."""
    filled = min(width, width * done // max(total, 1))
    return [("━" * filled, "green"), ("─" * (width - filled), "dim")]


def describe_machine(metrics: Mapping[str, float]) -> list[str]:
    """Return the use of CPU, memory and GPUs in words, from the metrics of `sample_system`. For several GPUs it has the
    lowest and the highest value."""
    if not metrics:
        return []
    words = [
        f"CPU {metrics['system/cpu_utilization_percentage']:.0f}%",
        f"memory {metrics['system/system_memory_usage_megabytes'] / 1000:.1f} GB",
    ]
    gpus = sorted({name.split("_")[1] for name in metrics if name.startswith("system/gpu_")}, key=int)
    title = f"{len(gpus)} GPUs " if len(gpus) > 1 else "GPU "
    columns = (title, "utilization_percentage", "%", 1.0), ("", "memory_usage_megabytes", " GB", 1000.0)
    for what, name, unit, scale in columns:
        values = [value / scale for gpu in gpus if (value := metrics.get(f"system/gpu_{gpu}_{name}")) is not None]
        if values:
            low, high = f"{min(values):.0f}", f"{max(values):.0f}"
            words.append(f"{what}{low if low == high else f'{low}-{high}'}{unit}")
    return words


# ---- before a run has a display --------------------------------------------------------------------------------------

_shown: list[tuple[Panel, LiveRegion | WaitReminder]] = []  # the wait of `show_wait`: its line, or what repeats it


def show_wait(text: str, *, run: str = "", as_json: bool = False, only_on_terminal: bool = False) -> None:
    """Show what the command is waiting for (`text`), until `end_wait` or the next call: on a terminal in one line that
    `end_wait` erases, otherwise (unless `only_on_terminal`) as a printed line, as JSON with `as_json`, which is
    repeated with the duration."""
    console = TerminalConsole(file=sys.stdout, highlight=False)
    redraws = can_redraw(console) and not as_json

    def print_line(line: str) -> None:
        if as_json:
            print(json_line("info", run, line), file=console.file, flush=True)
        else:
            console.print(Text(f"· {line}", style="dim"), soft_wrap=True)

    panel = Panel(run, "", 0)
    panel.phase = text
    if redraws and _shown:
        _shown[0][0].phase = text
    elif redraws:
        region = LiveRegion(console, lambda width, height: [panel.phase_row("starting")])
        _shown.append((panel, region))
        region.start()
    elif not only_on_terminal:
        end_wait()
        print_line(text)
        _shown.append((panel, WaitReminder(lambda: (text, panel.started_at), print_line)))


def end_wait() -> None:
    """End the wait of `show_wait` and erase its line. Safe to call twice."""
    while _shown:
        _shown.pop()[1].stop()
