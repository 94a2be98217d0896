"""Say what a command waits for before its run has a display: the import of Prefect, and the start of its server."""

from __future__ import annotations

import sys

from rich.text import Text

from penstock.flows.reporting.log_format import json_line
from penstock.flows.terminal.console import TerminalConsole
from penstock.flows.terminal.panel import Panel
from penstock.flows.terminal.region import LiveRegion, can_redraw

_shown: list[tuple[Panel, LiveRegion]] = []  # at most one, on a terminal


def show_wait(text: str, *, run: str = "", as_json: bool = False, only_on_terminal: bool = False) -> None:
    """Show what the command waits for now: on a terminal in one line that `end_wait` erases, otherwise as a line.

    Args:
        text: what it waits for.
        run: name of the run, for JSON lines.
        as_json: print a JSON line (--log-format json).
        only_on_terminal: print nothing otherwise. A refused command prints nothing but its error.
    """
    console = TerminalConsole(file=sys.stdout, highlight=False)
    if only_on_terminal and (as_json or not can_redraw(console)):
        return
    if as_json:
        print(json_line("info", run, text), flush=True)
    elif _shown:
        _shown[0][0].phase = text
    elif not can_redraw(console):
        console.print(Text(f"· {text}", style="dim"), soft_wrap=True)
    else:
        panel = Panel(run, "", 0)
        panel.phase = text
        region = LiveRegion(console, panel.render_phase)
        _shown.append((panel, region))
        region.open()


def end_wait() -> None:
    """Erase what the command waited for. Safe to call twice."""
    while _shown:
        _shown.pop()[1].close()
