"""`penstock cost RUN`: device-seconds of a run by stage, round and checkpoint, and their price. Writes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict

from penstock.flows.options.argv import parse_number, parse_run_argument, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.runtime.runs import keys_of_existing_run, open_store
from penstock.flows.terminal.console import print_table
from penstock.storage.history.costs import IDLE, RunCosts, compute_costs

USAGE = """penstock cost RUN [--rounds] [--price NUMBER] [--json] [--store URI ...]

  Prints the device-seconds of every stage and of idle time, and the energy of the GPUs where it was measured. Devices
  are GPUs; without GPUs, the trainer's processes and the engines. On each device, stages and idle time add up to the
  time in which a driver of the run was alive; idle time includes starts, weight updates and waits. Rounds that a fork
  shares with its parent do not count.

  --rounds   a line for every round: seconds, samples, tokens
  --price    price of a device for one hour, in any currency
  --json     everything as JSON"""


def main(argv: list[str]) -> int:
    """Run the command. Return 0."""
    positional, own, rest = split_args(argv, {"--rounds": False, "--json": False, "--price": True})
    run = parse_run_argument("cost", positional)
    price = parse_number("--price", own["--price"]) if "--price" in own else None
    store = open_store(parse_store_options(rest, "cost"), probe=False)
    costs = compute_costs(store, keys_of_existing_run(store, run))
    if "--json" in own:
        print(json.dumps(asdict(costs) | {"metrics": costs.metrics(price)}, indent=1))
        return 0
    starts = f"{costs.num_starts} starts" if costs.num_starts > 1 else "1 start"
    print(f"{run} in {store.uri}: {costs.wall_seconds:,.1f} s in {starts}")
    print_stages(costs, price)
    if "--rounds" in own:
        print_rounds(costs)
    return 0


def print_stages(costs: RunCosts, price: float | None) -> None:
    """Print device-seconds by devices and stage, and the totals."""
    rows = []
    for devices, stages in costs.device_seconds.items():
        total = sum(stages.values())
        for stage, seconds in sorted(stages.items(), key=lambda item: (item[0] == IDLE, -item[1])):
            share = f"{seconds / total:.1%}" if total else "-"
            money = [] if price is None else [f"{seconds / 3600 * price:,.2f}"]
            rows.append([f"{costs.num_devices[devices]} x {devices}", stage, f"{seconds:,.1f}", share, *money])
    print_table(["devices", "stage", "device-seconds", "share", *([] if price is None else ["price"])], rows)
    metrics = costs.metrics(price)
    total_price = f", price {metrics['cost/money']:,.2f}" if price is not None else ""
    print(f"total {costs.total_device_seconds:,.1f} device-seconds, {metrics['cost/idle_ratio']:.1%} idle{total_price}")
    if costs.kept_samples:
        per_sample = metrics["cost/device_seconds_per_kept_sample"]
        print(f"{costs.kept_samples:,} samples trained, {per_sample:.4f} device-seconds each")
    for version, seconds in costs.checkpoints.items():
        energy = f", {costs.checkpoint_joules[version]:,.0f} J" if version in costs.checkpoint_joules else ""
        print(f"checkpoint {version}: {seconds:,.1f} device-seconds{energy} of stages since the one before")
    if costs.joules:
        of_stages = ", ".join(f"{stage} {joules:,.0f} J" for stage, joules in costs.joules.items())
        each = f", {metrics['cost/joules_per_kept_sample']:,.1f} J per sample" if costs.kept_samples else ""
        print(f"energy of the GPUs {metrics['cost/energy_kwh']:,.4f} kWh: {of_stages}{each}")


def print_rounds(costs: RunCosts) -> None:
    """Print one line for every round."""
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
    titles += ["joules"] if costs.joules else []
    print_table(titles, rows, numeric=True)
