"""`penstock runs`, `show` and `show --cost`: a table of runs, a run on one screen, and its costs. Writes nothing."""

from __future__ import annotations

import itertools
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.text import Text

from penstock.flows.config import RunConfig
from penstock.flows.options.argv import parse_number, parse_run_argument, penstock_command, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.options.paths import find_nearby_stores, names_no_store
from penstock.flows.runtime.runs import (
    keys_of_existing_run,
    num_planned_rounds,
    open_named_store,
    open_store,
    read_existing_record,
)
from penstock.flows.terminal.console import print_table, wide_console
from penstock.flows.terminal.lines import (
    COLUMNS,
    format_duration,
    format_with_interval,
    short_exponent,
    sparkline,
)
from penstock.storage.commit import Commit, RunKeys, eval_rewards, model_title
from penstock.storage.errors import PenstockError, RunError
from penstock.storage.history.costs import IDLE, RunCosts, compute_costs
from penstock.storage.history.run_record import Start, StartEnd, read_run_record, read_starts
from penstock.storage.leases import describe_live_drivers
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.report.data import task_of
from penstock.storage.store import Store, committed_prefixes, read_commits
from penstock.storage.tracking.delivery import read_logged_metric
from penstock.storage.web.login import HOST, live_link, ports_with_login

# ---- penstock runs ---------------------------------------------------------------------------------------------------

RUNS_USAGE = """penstock runs [--store URI ...]

  Lists runs: rounds, rewards, checkpoints, evaluations. Without --store, lists the runs of all stores below the working
  directory (three levels), and of the store that contains it. Changes nothing."""


def runs_main(argv: list[str]) -> int:
    """Run `penstock runs`. Return 0."""
    run_config = parse_store_options(argv, "runs")
    stores = find_nearby_stores() if names_no_store(argv) else []
    for path in stores:
        print(f"store {path}")
        print_runs(run_config.model_copy(update={"store": path}))
        print()
    if not stores:
        print_runs(run_config)
    return 0


def print_runs(run_config: RunConfig) -> None:
    """Print a table of the runs in a store. A damaged run is marked in the table and described below it."""
    store = open_store(run_config, probe=False)
    rows, reasons = [], []
    for run in store.list("runs"):
        try:
            row = row_of_run(store, RunKeys(run))
        except (PenstockError, OSError) as error:
            row = [run, "damaged"]
            reasons.append(f"{run} is damaged: {' '.join(str(error).split())[:300]}")
        if row:
            rows.append(row)
    if rows:
        print_table(("run", "flow", "rounds", "reward first -> last", "checkpoints", "evals", "started"), rows)
    else:
        print(f"no runs in {store.uri}; `penstock demo` makes one")
    for reason in reasons:
        print(reason)


def row_of_run(store: Store, keys: RunKeys) -> list[str]:
    """Return the cells of a run's row in the table; [] if the run has neither a record nor commits. Raises RunError if
    it has commits but no record."""
    if is_removed(store, keys):
        return [keys.run, "removed"]
    record = read_run_record(store, keys)
    if record is None:
        if committed_prefixes(store, keys):
            raise RunError(f"{store.path(keys.record)} is missing: restore it from a backup")
        return []
    rounds = store.committed_indices(f"{keys.prefix}/steps")
    rollouts = [store.committed(keys.rollout_prefix(r)) for r in rounds[:1] + rounds[-1:]]
    rewards = [rollout.summary.get("rollout/raw_reward") for rollout in rollouts if rollout]
    parent = record.parent
    return [
        f"{keys.run} (from {parent.run} at {parent.at})" if parent else keys.run,
        record.flow,
        f"{len(rounds)} of {num_planned_rounds(store, keys, record)}",
        " -> ".join(f"{reward:.3f}" for reward in rewards if reward is not None) or "-",
        " ".join(str(number) for number in store.committed_indices(f"{keys.prefix}/checkpoints")) or "-",
        " ".join(name.lstrip("0") or "0" for name in store.list(f"{keys.prefix}/evals")) or "-",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at)),
    ]


# ---- penstock show ---------------------------------------------------------------------------------------------------

SHOW_USAGE = """penstock show RUN [--cost] [--store URI ...]

  Prints a run on one screen: state, curves of its rounds, evaluations, checkpoints, starts. Without --store, the run is
  looked for in the stores around the working directory. Changes nothing. `penstock show --cost --help` explains what
  --cost prints."""

MAX_CURVE = 60  # characters
MIN_CURVE = 10
_MAX_STARTS = 5  # newest starts that are printed


def show_main(argv: list[str]) -> int:
    """Run `penstock show`. Return 0."""
    positional, _, rest = split_args(argv, {})
    run = parse_run_argument("show", positional)
    print_run(open_named_store(rest, "show", run=run), RunKeys(run))
    return 0


def print_run(store: Store, keys: RunKeys) -> None:
    """Print a run on one screen."""
    record = read_existing_record(store, keys)
    commits = read_commits(store, keys)
    starts = read_starts(store, keys)
    drivers = describe_live_drivers(store, keys)
    num_rounds = num_planned_rounds(store, keys, record)
    num_done = sum(commit.kind == "step" for commit in commits)
    state = "its starts were not recorded" if commits else "not started"
    if drivers:
        state = f"running: {drivers[0]}"
    elif starts:
        end = starts[-1][1]
        state = "its driver was killed" if end is None else end.outcome.lower()
    resume = f"; penstock resume {keys.run}" if num_done < num_rounds and not drivers else ""
    parent = record.parent
    rows: dict[str, str | Curve] = {
        "run": f"{keys.run}  ({record.flow})"
        + (f", a fork of {parent.run} at {parent.at}" if parent else "")
        + (f", with its rollouts up to round {parent.reused_rounds[-1]}" if parent and parent.num_reused else ""),
        "store": store.uri,
        "model": model_title(record.config["convert"]["hf_checkpoint"]),
        "state": f"{num_done} of {num_rounds} rounds, {state}{resume}",
        **curve_rows(commits, read_logged_metric(store, keys, "perf/update_weights_time")),
        **evaluation_rows(commits),
    }
    for kind in ("checkpoint", "export"):
        if versions := sorted(commit.index for commit in commits if commit.kind == kind):
            rows[f"{kind}s"] = " ".join(map(str, versions))
    lines = [*rows.items()]
    lines += [("" if number else "starts", text) for number, text in enumerate(start_lines(starts, bool(drivers)))]
    width = max(len(title) for title, _ in lines) + 2
    console = wide_console()
    for title, content in lines:
        text = content if isinstance(content, str) else content.fit(console.width - width)
        console.print(Text.assemble((f"{title:<{width}}", "dim"), text), soft_wrap=True)
    location = f"--store {shlex.quote(store.uri)}"
    advice = f"\n{penstock_command()} samples {keys.run} {location}   (also report, lineage)"
    console.print(Text(advice, style="dim"), soft_wrap=True)


@dataclass(frozen=True)
class Curve:
    """The numbers of a curve, and texts that describe them, the longest first."""

    numbers: Sequence[float]
    texts: Sequence[str]

    def fit(self, width: int) -> Text:
        """Return the curve and beside it the longest text that fits into `width` columns, or the shortest if none
        does."""
        least = min(len(self.numbers), MIN_CURVE)
        text = next((text for text in self.texts if least + 2 + len(text) <= width), self.texts[-1])
        size = max(least, min(MAX_CURVE, width - 2 - len(text)))
        return Text.assemble((sparkline(self.numbers, size), "green"), f"  {text}")


def curve_rows(commits: Sequence[Commit], update_seconds: Mapping[int, float]) -> dict[str, Curve]:
    """Return a curve for each number in the printed line of a round (docs/metrics.md) that is not constant, and one for
    the duration of a round: label -> curve. From 20 rounds on, a curve is the moving average over a tenth of the
    rounds. `update_seconds`: round -> seconds of the weight update after it, which count as time of the next round."""
    numbers: dict[int, dict[str, float]] = {}
    for commit in sorted(commits, key=lambda commit: commit.index):
        if commit.kind in ("rollout", "step"):
            values = numbers.setdefault(commit.index, {})
            seconds = values.get("seconds", update_seconds.get(commit.index - 1, 0.0)) + commit.seconds.get(
                "train", sum(commit.seconds.values())
            )
            values |= {**commit.summary, "seconds": seconds}
    rows = {}
    for label, metrics, style in [*((c.label, c.metrics, c.style) for c in COLUMNS), ("seconds", ("seconds",), ".1f")]:
        of_rounds = [next((n[name] for name in metrics if name in n), None) for _, n in sorted(numbers.items())]
        values_of_rounds = [value for value in of_rounds if value is not None]
        window = max(1, len(values_of_rounds) // 10)
        ends = range(window, len(values_of_rounds) + 1)
        curve = [fmean(values_of_rounds[end - window : end]) for end in ends]
        texts = [short_exponent(format(value, style)) for value in curve]
        if len({*texts}) > 1 or (texts and label == "reward"):
            change = f"{texts[0]} -> {texts[-1]}"
            averages = [f"{change}  (averages of {window} rounds)"] if label == "reward" and window > 1 else []
            rows[label] = Curve(curve, [*averages, change])
    return rows


def evaluation_rows(commits: Sequence[Commit]) -> dict[str, Curve]:
    """Return the curves of the rewards over the policy versions, first of the evaluations, then of evaluations that
    were graded again: "eval DATA_SET" or "regrade DATA_SET" -> curve; then, for each other grading of training rounds,
    the curve of the number of changed rewards: "regrade HASH" -> curve."""
    scores: dict[tuple[str, str], list[Commit]] = {}
    for commit in sorted((c for c in commits if c.kind == "eval"), key=lambda c: (c.listed_kind, c.index)):
        for name in eval_rewards(commit):
            scores.setdefault((commit.listed_kind, name), []).append(commit)
    rows = {}
    for (kind, name), evaluated in scores.items():
        texts = [f"{format_with_interval(c.summary, f'eval/{name}')} (version {c.index})" for c in evaluated]
        shorter = [[texts[0], "...", *texts[-2:]], [texts[0], "...", texts[-1]]] if len(texts) > 2 else []
        choices = [", ".join(each) for each in [*([texts] if len(texts) <= 4 else []), *shorter]]
        rewards = [commit.summary[f"eval/{name}"] for commit in evaluated]
        choices += [f"{rewards[0]:.3f} -> {texts[-1]}"] if len(rewards) > 1 else []
        rows[f"{kind} {name}"] = Curve(rewards, [*choices, f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"])
    regraded = sorted((task_of(c), c.index, c) for c in commits if c.kind == "regrade")
    for name, of_name in itertools.groupby(regraded, lambda each: each[0]):
        changed = [commit.summary[f"regrade@{name}/changed"] for _, _, commit in of_name]
        rows[f"regrade {name}"] = Curve(changed, [f"{sum(changed):,.0f} rewards changed in {len(changed)} rounds"])
    return rows


def link_of_start(start: Start) -> str:
    """Return a link to the Prefect page of a start, on the server that it used or another server of this user that has
    the flow run; "" if no such server answers."""
    origin, _, flow_run = start.flow_run.rpartition("/runs/flow-run/")
    flow_run = flow_run if origin else start.flow_run
    own = [f"http://{HOST}:{port}" for port in ports_with_login()]
    pages = (f"{each}/runs/flow-run/{flow_run}" for each in dict.fromkeys([origin, *own]) if each and flow_run)
    return next(filter(None, (live_link(page, has_page=f"/api/flow_runs/{flow_run}") for page in pages)), "")


def start_lines(starts: Sequence[tuple[Start, StartEnd | None]], is_running: bool) -> list[str]:
    """Return a line for each of the newest starts of a run: time, host, how it ended and after how long, and a link to
    its Prefect page if a server answers. `is_running`: whether the run has a live driver."""
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


# ---- penstock show --cost --------------------------------------------------------------------------------------------

COST_USAGE = """penstock show RUN --cost [--rounds] [--price NUMBER] [--json] [--store URI ...]

  Prints the device-seconds of every stage and of idle time, and the energy of the GPUs where it was measured. Devices
  are GPUs; without GPUs, the trainer's processes and the engines. On each device, stages and idle time add up to the
  time in which a driver of the run was alive; idle time includes starts, weight updates and waits. Rounds that a fork
  shares with its parent do not count.

  --rounds   a line for every round: seconds, samples, tokens
  --price    price of a device for one hour, in any currency
  --json     everything as JSON"""


def cost_main(argv: list[str]) -> int:
    """Run `penstock show --cost`. Return 0."""
    positional, own, rest = split_args(argv, {"--cost": False, "--rounds": False, "--json": False, "--price": True})
    run = parse_run_argument("show --cost", positional)
    price = parse_number("--price", own["--price"]) if "--price" in own else None
    store = open_named_store(rest, "show --cost", run=run)
    costs = compute_costs(store, keys_of_existing_run(store, run))
    if "--json" in own:
        print(json.dumps(asdict(costs) | {"metrics": costs.metrics(price)}, indent=1))
        return 0
    starts = f"{costs.num_starts} starts" if costs.num_starts > 1 else "1 start"
    print(f"{run} in {store.uri}: {costs.wall_seconds:,.1f} s in {starts}")
    print_stages(costs, price)
    if "--rounds" in own:
        rows = [
            [
                str(cost.rollout_id),
                *(f"{cost.device_seconds.get(stage, 0.0):.2f}" for stage in ("rollout", "training")),
                str(cost.kept_samples),
                str(cost.removed_samples),
                str(cost.dropped_groups),
                f"{cost.trained_tokens:,.0f}",
                f"{cost.wasted_tokens:,.0f}",
                *([f"{sum(cost.joules.values()):,.0f}"] if costs.joules else []),
            ]
            for cost in costs.rounds
        ]
        titles = ["round", "rollout", "training", "samples", "removed", "dropped groups", "tokens", "wasted tokens"]
        print_table([*titles, *(["joules"] if costs.joules else [])], rows, numeric=True)
    return 0


def print_stages(costs: RunCosts, price: float | None) -> None:
    """Print device-seconds by devices and stage, and the totals; with a `price` of one device-hour also the costs."""
    rows = []
    for devices, stages in costs.device_seconds.items():
        total = sum(stages.values())
        for stage, seconds in sorted(stages.items(), key=lambda item: (item[0] == IDLE, -item[1])):
            share = f"{seconds / total:.1%}" if total else "-"
            money = [] if price is None else [f"{seconds / 3600 * price:,.2f}"]
            rows.append([f"{costs.num_devices[devices]} x {devices}", stage, f"{seconds:,.1f}", share, *money])
    print_table(["devices", "stage", "device-seconds", "share", *([] if price is None else ["price"])], rows)
    metrics = costs.metrics(price)
    total_price = f", price {metrics['usage/money']:,.2f}" if price is not None else ""
    print(
        f"total {costs.total_device_seconds:,.1f} device-seconds, {metrics['usage/idle_ratio']:.1%} idle{total_price}"
    )
    if costs.kept_samples:
        per_sample = metrics["usage/device_seconds_per_kept_sample"]
        print(f"{costs.kept_samples:,} samples trained, {per_sample:.4f} device-seconds each")
    for version, seconds in costs.checkpoints.items():
        energy = f", {costs.checkpoint_joules[version]:,.0f} J" if version in costs.checkpoint_joules else ""
        print(f"checkpoint {version}: {seconds:,.1f} device-seconds{energy} of stages since the previous checkpoint")
    if costs.joules:
        of_stages = ", ".join(f"{stage} {joules:,.0f} J" for stage, joules in costs.joules.items())
        each = f", {metrics['usage/joules_per_kept_sample']:,.1f} J per sample" if costs.kept_samples else ""
        print(f"energy of the GPUs {metrics['usage/energy_kwh']:,.4f} kWh: {of_stages}{each}")
