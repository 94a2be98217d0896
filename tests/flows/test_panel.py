"""The live panel: what a terminal shows while a run works, and that the panel leaves nothing behind."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from penstock.flows.runtime.display import Display
from penstock.flows.terminal import panel as panel_module
from penstock.flows.terminal.console import WaitReminder, can_redraw
from penstock.flows.terminal.lines import sparkline
from penstock.flows.terminal.panel import Panel, describe_machine, end_wait, format_duration, show_wait
from penstock.storage.commit import Commit

CODES = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|(\r)|(\n)|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """A file that is a terminal, and what its screen shows."""

    def isatty(self) -> bool:
        return True

    def screen(self, width: int) -> list[str]:
        """Return the rows of a terminal of `width` columns, of any height, that got the text."""
        rows, row, column = [""], 0, 0
        for count, code, home, newline, text in CODES.findall(self.getvalue()):
            if code == "A":
                row = max(0, row - int(count or 1))
            elif code == "K":
                rows[row] = ""
            elif home:
                column = 0
            elif newline:
                row, column = row + 1, 0
            for char in text:
                if column == width:
                    row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
                column += 1
            rows += [""] * (row + 1 - len(rows))
        return rows


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 100 columns, which `attach` makes standard output and standard error."""
    for name, value in (("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    return Terminal()


def open_display(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Display:
    attach(terminal, monkeypatch)
    display = Display("my-run", "train", config(), "/store")
    display.start()
    return display


def attach(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal standard output and error. In the test itself, because pytest sets them after the fixtures."""
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)


def config() -> SimpleNamespace:
    return SimpleNamespace(
        run=SimpleNamespace(num_rollout=20, debug_rollout_only=False, log_format="text"),
        convert=SimpleNamespace(hf_checkpoint="/models/tiny"),
        rollout=SimpleNamespace(prompt_data=["/data/train.jsonl"]),
        eval=SimpleNamespace(data_sets=[]),
    )


def train(display: Display, num_rounds: int) -> None:
    for r in range(num_rounds):
        with display.stage("rollout", r), display.progress(f"rollout, round {r}: samples", "rollout") as report:
            report(3, 8)
        shown = [{"reward": 1.0, "prompt": "2+3=", "response": "5"}, {"reward": 0.0, "prompt": "4+4=", "response": "9"}]
        summary = {"rollout/raw_reward": 0.1 * r}
        display.print_commit(Commit(kind="rollout", index=r, summary=summary, state={"shown": shown}))
        display.print_commit(Commit(kind="step", index=r, policy_version=r + 1, seconds={"train": 1.0}))


def test_panel_shows_progress_curve_samples_and_links_and_is_erased_at_the_end(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = open_display(terminal, monkeypatch)
    display.panel.links = lambda: {"MLflow": "http://127.0.0.1:5000/#/runs/1"}
    display.panel.engines = lambda: "1 of 2 engines started"
    train(display, 4)
    print("a line of a library")
    assert display._region is not None
    display._region.refresh()
    shown = "\n".join(terminal.screen(100))
    for part in ("4/20 rounds", "▁▃▆█  0.000 -> 0.300", "best      1.000  2+3= -> 5", "1 of 2 engines", "MLflow ↗"):
        assert part in shown
    assert "\x1b]8;" in terminal.getvalue() and "http://127.0.0.1:5000/#/runs/1" in terminal.getvalue()
    assert shown.index("round  3 (4/20)") < shown.index("a line of a library") < shown.index("4/20 rounds")
    sys.stderr.write("RuntimeError: without a newline")
    display.close()
    lines = [line for line in terminal.screen(100) if line]
    assert lines[-3:-1] == ["round  3 (4/20)   reward 0.300  time 1.0s", "a line of a library"]
    assert lines[-1] == "RuntimeError: without a newline"
    assert sys.stdout is terminal and sys.stderr is terminal
    assert "\x1b[?25l" not in terminal.getvalue()  # the cursor is never hidden


@pytest.mark.parametrize("width, height", [(100, 30), (100, 8), (40, 30), (5, 2)])
def test_panel_fits_every_terminal(
    width: int, height: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = open_display(terminal, monkeypatch)
    train(display, 3)
    display.panel.machine = {"system/cpu_utilization_percentage": 5.0, "system/system_memory_usage_megabytes": 5e3}
    lines = display.panel.render(width, height)
    display.close()
    assert 1 <= len(lines) <= height and any("my-run" in line.plain for line in lines)
    assert height < 30 or any("reward" in line.plain for line in lines)


def test_a_closed_terminal_does_not_end_the_run(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    display = open_display(terminal, monkeypatch)

    def fail(text: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", fail)
    train(display, 2)
    print("a line of a library")
    assert display._region is not None
    display._region.refresh()
    display.close()


@pytest.mark.parametrize("name, value", [("TERM", "dumb"), ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "INFO")])
def test_panel_is_not_drawn_without_control_codes_or_with_verbose(
    name: str, value: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    display = open_display(terminal, monkeypatch)
    train(display, 2)
    display.close()
    assert "\x1b[2K" not in terminal.getvalue() and "round  1 (2/20)" in terminal.getvalue()


def test_colours_are_off_in_a_pipe_and_with_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display = open_display(terminal, monkeypatch)
    train(display, 2)
    display.warn("careful")
    display.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.getvalue())
    assert not can_redraw(Console(file=io.StringIO())) and can_redraw(Console(file=terminal))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not can_redraw(Console(file=io.StringIO()))  # colours in a pipe, but no panel


def test_what_a_command_waits_for_is_erased_on_a_terminal_and_printed_in_a_pipe(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(terminal, monkeypatch)
    show_wait("loading Prefect")
    assert "loading Prefect" in "".join(terminal.screen(100))
    show_wait("opening the run")
    display = Display("my-run", "train", config(), "/store")
    display.start()
    assert "my-run" in "".join(terminal.screen(100)) and sys.stdout is not terminal
    display.close()
    end_wait()
    assert not any("Prefect" in line or "opening" in line for line in terminal.screen(100)) and sys.stdout is terminal
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    show_wait("loading Prefect")
    [(_, first)] = panel_module._shown
    show_wait("opening the run", run="r", as_json=True)
    [(_, second)] = panel_module._shown
    assert isinstance(first, WaitReminder) and isinstance(second, WaitReminder)
    second._print_line("still opening")
    show_wait("checking", only_on_terminal=True)
    lines = pipe.getvalue().splitlines()
    assert lines[0] == "· loading Prefect" and '"run": "r"' in lines[1] and '"message": "opening the run"' in lines[1]
    assert len(lines) == 3 and '"message": "still opening"' in lines[2]
    end_wait()
    for reminder in (first, second):
        reminder.thread.join(timeout=60)
        assert not reminder.thread.is_alive()
    assert not panel_module._shown


def test_first_start_of_a_stage_says_in_a_pipe_what_it_waits_for() -> None:
    out = io.StringIO()
    display = Display("my-run", "train", config(), "/store", console=Console(file=out))
    for name in ("convert", "evaluate_one", "rollout", "rollout", "train"):
        with display.stage(name, 0):
            display.note_wait("waiting for the trainer")
    waits = [line for line in out.getvalue().splitlines() if line.startswith("· ")]
    assert len(waits) == 2 and all(word in line for word, line in zip(("trainer", "engines"), waits))


# ---- waits in a pipe or a log ----------------------------------------------------------------------------------------


class FakeTime(threading.Event):
    """A clock that jumps to the end of each wait, runs the events before it, and stops at the time `end`."""

    def __init__(self, end: float, events: dict[float, Callable[[], object]]) -> None:
        super().__init__()
        self.now, self.end, self.events = 0.0, end, events

    def wait(self, timeout: float | None = None) -> bool:
        """Set the clock to the end of the wait, after the events until then."""
        until = self.now + (timeout or 0.0)
        for at in sorted(at for at in self.events if at <= until):
            self.now = max(self.now, at)
            self.events.pop(at)()
        self.now = until
        return self.is_set() or self.now > self.end


def reminders(end: float, events: dict[float, tuple[str, float] | None], *, stop: float = 1e9) -> list[str]:
    """Return the lines of a reminder until the time `end` of a run whose current wait changes as in `events`."""
    current: list[tuple[str, float] | None] = [None]
    lines: list[str] = []
    clock = FakeTime(end, {at: partial(current.__setitem__, 0, wait) for at, wait in events.items()})
    clock.events[stop] = clock.set
    reminder = WaitReminder(lambda: current[0], lines.append, lambda: clock.now, clock).start()
    reminder.thread.join(timeout=60)
    assert not reminder.thread.is_alive()
    return lines


def test_wait_is_repeated_every_30_seconds_with_its_duration() -> None:
    assert reminders(110, {5: ("converting tiny", 5), 105: None}) == [
        *("still converting tiny, 30 s", "still converting tiny, 1 min 0 s", "still converting tiny, 1 min 30 s")
    ]
    assert reminders(200, {0: ("a", 0.0), 29: ("b", 29), 40: ("c", 40), 80: None, 90: ("d", 90)}) == [
        *("still c, 30 s", "still d, 30 s", "still d, 1 min 0 s", "still d, 1 min 30 s")
    ]
    old = {10: ("waiting", 10), 50: ("in rollout", 11.0)}  # the second one was shown late
    assert reminders(80, old) == ["still waiting, 30 s", "still in rollout, 1 min 0 s"]
    assert reminders(1000, {0: ("a", 0.0)}, stop=50) == ["still a, 30 s"], "it ends when it is stopped"


def test_log_repeats_what_a_run_waits_for_until_its_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    display = Display("my-run", "train", config(), "/store", console=Console(file=out))
    display.start()
    reminder = display._reminder
    assert reminder._current() is None
    with display.stage("rollout", 0), display.progress("rollout, round 0: samples", "rollout") as update:
        assert reminder._current()[0] == "waiting for the engines (they load the model)"  # type: ignore[index]
        update(12, 64)
        assert reminder._current()[0] == "in rollout, round 0: samples 12/64"  # type: ignore[index]
        reminder._print_line("still waiting")
    with display.stage("train", 0):
        assert reminder._current()[0] == "in train, round 0" and reminder.thread.is_alive()  # type: ignore[index]
    display.print_commit(Commit(kind="step", index=0, policy_version=1, summary={"train/loss": 1.0}))
    reminder.thread.join(timeout=60)
    assert not reminder.thread.is_alive() and "· still waiting\n" in out.getvalue()
    assert display.panel.messages["info"][-1][1] != "still waiting"  # the live page shows activities by itself


def test_earlier_rounds_of_a_resumed_run_are_counted() -> None:
    display = Display("my-run", "train", config(), "/store", console=Console(file=io.StringIO()))
    commits = [Commit(kind="rollout", index=r, summary={"rollout/raw_reward": 0.5}) for r in range(5)]
    commits += [Commit(kind="step", index=r, policy_version=r + 1, summary={"train/loss": 1.0}) for r in range(5)]
    display.add_earlier(commits)
    assert display.panel.rounds.done == 5 and list(display.panel.curves.of_rounds) == [0, 1, 2, 3, 4]
    line = display.print_commit(Commit(kind="step", index=5, policy_version=6, summary={"train/loss": 0.0}))
    assert line == "round  5 (6/20)   loss 0.0000  time 0.0s"  # the column was not always 0


def test_remaining_time_is_that_of_the_newest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("penstock.flows.terminal.panel.time.monotonic", lambda: now[0])
    panel = Panel("r", "train", 10)
    for r, duration in enumerate((50.0, 2.0, 2.0, 9.0, 2.0)):  # the first round waits for the engines
        assert r > 1 or panel.rounds.seconds_left() is None
        now[0] += duration
        panel.rounds.finish(r)
    assert panel.rounds.seconds_left() == 5 * 2.0
    now[0] += 0.5
    assert panel.rounds.seconds_left() == 9.5


def test_numbers_are_formatted_for_the_panel() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█" == sparkline([float(i // 100) for i in range(800)], 8)
    assert sparkline([2.0, 2.0], 8) == "▅▅" and sparkline([], 8) == sparkline([float("nan")], 8) == ""
    assert [format_duration(seconds) for seconds in (4.6, 754, 3723)] == ["0:05", "12:34", "1:02:03"]
    metrics = {"system/cpu_utilization_percentage": 12.3, "system/system_memory_usage_megabytes": 4567.0}
    assert describe_machine(metrics) == ["CPU 12%", "memory 4.6 GB"]
    metrics |= {f"system/gpu_{i}_utilization_percentage": 90.0 + i for i in range(3)}
    metrics |= {f"system/gpu_{i}_memory_usage_megabytes": 61e3 for i in range(3)}
    assert describe_machine(metrics)[2:] == ["3 GPUs 90-92%", "61 GB"]
