"""`penstock show RUN`: a run on one screen, with its curves. Writes nothing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from rich.text import Text

from penstock.flows.options.argv import parse_run_argument, penstock_command, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.options.nearby_stores import names_no_store, stores_with_run
from penstock.flows.runtime.runs import latest_schedule_options, open_store, read_existing_record
from penstock.flows.terminal.console import TerminalConsole
from penstock.flows.terminal.lines import COLUMNS, format_duration, format_with_interval, short_exponent, sparkline
from penstock.storage.commit import Commit, RunKeys, eval_rewards
from penstock.storage.errors import OptionError
from penstock.storage.history.run_record import Start, StartEnd, read_starts
from penstock.storage.leases import describe_live_drivers
from penstock.storage.store import Store, read_commits
from penstock.storage.web.login import HOST, live_link, ports_with_login

USAGE = """penstock show RUN [--store URI ...]

  Prints a run on one screen: state, curves of its rounds, evaluations, checkpoints, starts. Without --store, the run is
  looked for in the stores around the working directory. Changes nothing."""

MAX_CURVE = 60  # characters
_MAX_STARTS = 5  # newest starts that are printed


def main(argv: list[str]) -> int:
    """Run the command. Return 0."""
    positional, _, rest = split_args(argv, {})
    run = parse_run_argument("show", positional)
    if names_no_store(rest):
        stores = stores_with_run(run)
        if len(stores) > 1:
            raise OptionError(f"{len(stores)} stores have a run {run!r} ({', '.join(stores)}): choose one with --store")
        rest = [*rest, *(argument for store in stores for argument in ("--store", store))]
    store = open_store(parse_store_options(rest, "show"), probe=False)
    print_run(store, RunKeys(run))
    return 0


def print_run(store: Store, keys: RunKeys) -> None:
    """Print a run. Raises RunError if it does not exist."""
    record = read_existing_record(store, keys)
    commits = read_commits(store, keys)
    starts = read_starts(store, keys)
    drivers = describe_live_drivers(store, keys)
    num_rounds = int(latest_schedule_options(store, keys)["run.num_rollout"])
    num_done = sum(commit.kind == "step" for commit in commits)
    if drivers:
        state = f"running: {drivers[0]}"
    elif starts:
        end = starts[-1][1]
        state = "its driver was killed" if end is None else end.outcome.lower()
    else:
        state = "its starts were not recorded" if commits else "not started"
    resume = f"; penstock resume {keys.run}" if num_done < num_rounds and not drivers else ""
    parent = record.parent
    rows: dict[str, str | Text] = {
        "run": f"{keys.run}  ({record.flow})" + (f", a fork of {parent.run} at {parent.at}" if parent else ""),
        "store": store.uri,
        "model": str(record.config["convert"]["hf_checkpoint"]),
        "state": f"{num_done} of {num_rounds} rounds, {state}{resume}",
        **curve_rows(commits),
        **evaluation_rows(commits),
    }
    for kind in ("checkpoint", "export"):
        if versions := sorted(commit.index for commit in commits if commit.kind == kind):
            rows[f"{kind}s"] = " ".join(map(str, versions))
    lines = [*rows.items()]
    lines += [("" if number else "starts", text) for number, text in enumerate(start_lines(starts, bool(drivers)))]
    width = max(len(title) for title, _ in lines) + 2
    console = TerminalConsole(soft_wrap=True, highlight=False)
    for title, text in lines:
        console.print(Text.assemble((f"{title:<{width}}", "dim"), text))
    location = f"--store {shlex.quote(store.uri)}"
    console.print(
        Text(f"\n{penstock_command()} samples {keys.run} {location}   (also report, cost, lineage)", style="dim")
    )


def curve_rows(commits: Sequence[Commit]) -> dict[str, Text]:
    """Return a curve for each number of a round's line (docs/metrics.md) that has not always been the same, and one for
    the seconds of rollout and training, which commits record (not those of weight updates): label -> curve, first and
    last number."""
    numbers: dict[int, dict[str, float]] = {}
    for commit in sorted(commits, key=lambda commit: commit.index):
        if commit.kind in ("rollout", "step"):
            values = numbers.setdefault(commit.index, {})
            seconds = values.get("seconds", 0.0) + commit.seconds.get("train", sum(commit.seconds.values()))
            values |= {**commit.summary, "seconds": seconds}
    rows = {}
    for label, metrics, style in [*((c.label, c.metrics, c.style) for c in COLUMNS), ("seconds", ("seconds",), ".1f")]:
        of_rounds = [next((n[name] for name in metrics if name in n), None) for _, n in sorted(numbers.items())]
        curve = [value for value in of_rounds if value is not None]
        texts = [short_exponent(format(value, style)) for value in curve]
        if len({*texts}) > 1 or (texts and label == "reward"):
            rows[label] = Text.assemble((sparkline(curve, MAX_CURVE), "green"), f"  {texts[0]} -> {texts[-1]}")
    return rows


def evaluation_rows(commits: Sequence[Commit]) -> dict[str, Text]:
    """Return the rewards of the evaluations, then of the rescored ones: kind and data set -> curve, and number by
    policy version."""
    scores: dict[tuple[str, str], list[Commit]] = {}
    for commit in sorted((c for c in commits if c.kind == "eval"), key=lambda c: (c.listed_kind, c.index)):
        for name in eval_rewards(commit):
            scores.setdefault((commit.listed_kind, name), []).append(commit)
    rows = {}
    for (kind, name), evaluated in scores.items():
        rewards = [commit.summary[f"eval/{name}"] for commit in evaluated]
        texts = [f"{format_with_interval(c.summary, f'eval/{name}')} (version {c.index})" for c in evaluated]
        shown = texts if len(texts) <= 4 else [texts[0], "...", *texts[-2:]]
        rows[f"{kind} {name}"] = Text.assemble((sparkline(rewards, MAX_CURVE), "green"), f"  {', '.join(shown)}")
    return rows


def link_of_start(start: Start) -> str:
    """Return a link to the Prefect page of a start: on the server that it used or, if that has ended, on a server of
    this user that shows its flow run now; "" if no server that answers has it."""
    origin, _, flow_run = start.flow_run.rpartition("/runs/flow-run/")
    flow_run = flow_run if origin else start.flow_run
    own = [f"http://{HOST}:{port}" for port in ports_with_login()]
    pages = (f"{each}/runs/flow-run/{flow_run}" for each in dict.fromkeys([origin, *own]) if each and flow_run)
    return next(filter(None, (live_link(page, has_page=f"/api/flow_runs/{flow_run}") for page in pages)), "")


def start_lines(starts: Sequence[tuple[Start, StartEnd | None]], is_running: bool) -> list[str]:
    """Return a line for each of the newest starts: time, host, duration, how it ended, page if its server answers."""
    lines = [f"{len(starts) - _MAX_STARTS} earlier starts"] if len(starts) > _MAX_STARTS else []
    for number, (start, end) in enumerate(starts[-_MAX_STARTS:], max(len(starts) - _MAX_STARTS, 0)):
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(start.at))
        if end is not None:
            outcome = f"{end.outcome.lower()} after {format_duration(end.at - start.at)}"
        else:
            outcome = "running" if is_running and number == len(starts) - 1 else "killed"
        link = link_of_start(start)
        lines.append(f"{at} on {start.host}, {outcome}{f', {link}' if link else ''}")
    return lines
