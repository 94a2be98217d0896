"""The commands that start a flow: `penstock train`, `sft`, `eval`, and `resume`, which continues a run with its
recorded configuration."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.flows.config import PostTrainConfig, validate_config, with_sft_loss
from penstock.flows.options.argv import parse_run_argument, split_args
from penstock.flows.options.flags import parse_values, store_options_from_values, update_config_from_argv
from penstock.flows.options.help import flow_usage, full_help, search_help, short_help
from penstock.flows.runtime.runs import read_flow_and_config
from penstock.storage.errors import OptionError

RESUME_USAGE = """penstock resume RUN [--store URI ...] [--dry-run]

  Resumes a run after its last committed stage, with the configuration recorded in the store. Number of rounds,
  intervals, engines, GPUs, memory options and time limits may change: `penstock resume --help-all` lists these options.
  Options of placement and memory are not recorded: give them again at the next start. --dry-run checks the run
  and prints its plan."""

FLOWS = {"train": "train", "sft": "sft", "eval": "evaluate"}  # command -> its flow


def start_flow(command: str, argv: list[str]) -> int:
    """Parse the arguments of a command of FLOWS into a config and start its flow. Return the exit code."""
    if {"--help", "-h", "--help-all"} & {*argv}:
        word = argv[argv.index("--help") + 1 :][:1] if "--help" in argv else []
        every = full_help(command, flow_usage(command)) if "--help-all" in argv else ""
        print(every or (search_help(command, word[0]) if word else short_help(command)))
        return 0
    values = parse_values([argument for argument in argv if argument != "--dry-run"])
    config = validate_config(with_sft_loss(values) if command == "sft" else values)
    return run_or_plan(FLOWS[command], config, dry="--dry-run" in argv)


def resume_main(argv: list[str]) -> int:
    """Run `penstock resume`. Return the exit code of the flow."""
    positional, own, rest = split_args(argv, {"--dry-run": False})
    flow, config = read_flow_and_resumed_config(parse_run_argument("resume", positional), rest)
    return run_or_plan(flow, config, dry="--dry-run" in own)


def read_flow_and_resumed_config(run: str, argv: Sequence[str]) -> tuple[str, PostTrainConfig]:
    """Return the flow name and the config of a run, updated by the options of `penstock resume`."""
    given = parse_values(argv)
    if "run" in given.get("run", {}):
        raise OptionError("penstock resume takes the run's name as its first argument: leave out --run")
    flow, config = read_flow_and_config(store_options_from_values(given), run)
    return flow, update_config_from_argv(config, argv)


def run_or_plan(flow: str, config: PostTrainConfig, *, dry: bool) -> int:
    """Run a flow or, with --dry-run, check the config and print the plan. Return the exit code."""
    if dry:
        from penstock.flows.inspect.dry_run import dry_run

        return dry_run(flow, config)
    from penstock.flows.runtime.runner import run_flow

    return run_flow(flow, config)
