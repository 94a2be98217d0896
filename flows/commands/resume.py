"""`penstock resume RUN`: continue a run with its recorded configuration."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.flows.config import PostTrainConfig
from penstock.flows.inspect.dry_run import dry_run
from penstock.flows.options.argv import parse_run_argument, split_args
from penstock.flows.options.flags import parse_values, store_options_from_values, update_config_from_argv
from penstock.flows.options.resolve import resolve_config
from penstock.flows.runtime.preflight import TRAINING
from penstock.flows.runtime.runner import run_flow
from penstock.flows.runtime.runs import open_store, read_flow_and_config
from penstock.flows.runtime.schedule import is_complete
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError

USAGE = """penstock resume RUN [--store URI ...] [--dry-run]

  Resumes a run after its last committed stage, with the configuration recorded in the store. Number of rounds,
  intervals, engines, GPUs, memory options and time limits may change: `penstock resume --help-all` lists these options.
  Options of placement and memory are not recorded: give them again at the next start. --dry-run checks the run
  and prints its plan."""


def main(argv: list[str]) -> int:
    """Run the command. Return the flow's exit code."""
    positional, own, rest = split_args(argv, {"--dry-run": False})
    flow, config = read_flow_and_resumed_config(parse_run_argument("resume", positional), rest)
    if "--dry-run" not in own:
        return run_flow(flow, config)
    if is_complete(flow, resolve_config(flow, config)):
        print(f"run {config.run.run} is complete: the same command without --dry-run starts nothing")
        return 0
    if flow in TRAINING:
        num_done = len(open_store(config.run, probe=False).committed_indices(f"{RunKeys(config.run.run).prefix}/steps"))
        print(f"{num_done} rounds are committed; the run continues after them")
    return dry_run(flow, config)


def read_flow_and_resumed_config(run: str, argv: Sequence[str]) -> tuple[str, PostTrainConfig]:
    """Return the flow name and the config of a run, updated by the options of `penstock resume`."""
    given = parse_values(argv)
    if "run" in given.get("run", {}):
        raise OptionError("penstock resume takes the run's name as its first argument: leave out --run")
    flow, config = read_flow_and_config(store_options_from_values(given), run)
    return flow, update_config_from_argv(config, argv)
