"""`penstock replay RUN`: train a run's committed shards again, in a new trainer, and compare every step with its
commit.

Nothing is generated and nothing is written to the run. All inputs, including the model's shape and initial weights, are
in the store, so a replay runs on any machine. If the numerics fingerprint (hardware and software of the trainer) equals
the recorded one, weights and all metrics except times must be equal bit for bit; otherwise metrics must agree within
`penstock.stages.train.restore.TOLERANCE`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Completed

from penstock.engines.cluster import Cluster
from penstock.engines.families.shape import ModelShape
from penstock.flows.config import PostTrainConfig, changed_flag, training_options, validate_config
from penstock.flows.gpu_plan import check_layout
from penstock.flows.options.argv import parse_integer, parse_run_argument, split_args
from penstock.flows.options.flags import merge_values, parse_config
from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.engine_options import run_placement
from penstock.flows.runtime.runs import open_store, read_flow_and_config
from penstock.stages.train.restore import PolicyRestorer, ReplayError, ReplayResult, newest_checkpoint
from penstock.stages.train.spec import TrainerSpec
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef, RunKeys, commit_key
from penstock.storage.errors import InputError, OptionError, RunError, StoreError, check_rules
from penstock.storage.history.run_record import read_run_record
from penstock.storage.store import Store

USAGE = """penstock replay RUN [--from A] [--to B] [--json FILE] [--store URI] [placement options]

  RUN      the run to train again, from its committed shards
  --from A start at policy version A, or at the newest checkpoint before it; default 0, the initial weights
  --to B   end at policy version B; default the last committed one. Round r trains version r to r + 1
  --json FILE
           write {round: {verdict, digest, metrics}} to a file

Placement options of the trainer (--trainer-threads, --ray-address, parallel sizes ...) and Megatron's options that
change no result (--recompute-granularity, --optimizer-cpu-offload ...) replace the run's. Bitwise equality is expected
with the placement and the hardware of the run. Exit code 1 if any round differs."""


def main(argv: list[str]) -> int:
    """Run `penstock replay`. Return the exit code: 0 if all rounds agree, 1 if a round differs or the replay failed."""
    positional, own, rest = split_args(argv, {"--from": True, "--to": True, "--json": True})
    run, options, given = parse_run_argument("replay", positional), parse_own_flags(own), parse_config(rest)
    placement = given.train.model_dump(mode="json", exclude_unset=True)
    try:
        replay.fn(run, given.run, placement, **options)  # without Prefect, which only a deployment of the flow needs
    except (InputError, StoreError):
        raise
    except Exception as error:
        failure = "" if isinstance(error, ReplayError) else f"replay failed: {type(error).__name__}: "
        print(f"\npenstock: {failure}{error}", file=sys.stderr)
        return 1
    return 0


@flow(name="replay", flow_run_name="replay-{run}", validate_parameters=True)
def replay(
    run: str,
    where: RunConfig,
    placement: dict[str, Any] | None = None,
    first: int = 0,
    last: int | None = None,
    json_file: str | None = None,
) -> State[None]:
    """Train committed rounds again and compare every step with its commit.

    Args:
        where: the store (`store`, `store_options`), and `ray_address` to use an existing Ray cluster.
        placement: placement options of the trainer (as in a file, below [train]) that replace the recorded ones.
        first: policy version to start at, or the newest checkpoint before it.
        last: policy version to end at; default the last committed one.
        json_file: file to write each round's verdict, weight digest and metrics to.
    """
    config, begin, last = check_replay(run, where, placement or {}, first, last)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    origin = f"checkpoint {begin}" if begin else "the initial weights"
    print(f"replaying {run}: rounds {begin} to {last - 1}, from {origin}; waiting for the trainer", flush=True)
    rounds: list[ReplayResult] = []
    with start_replay_trainer(store, keys, config) as policy:
        policy.load_checkpoint(begin)
        for rollout_id in range(begin, last):
            replayed = policy.replay_round(rollout_id)
            rounds.append(replayed)
            reason = f": {replayed.why}" if replayed.why else ""
            print(f"  round {rollout_id:>4}  {replayed.verdict}{reason}", flush=True)
    if json_file:
        content = {r.rollout_id: {"verdict": r.verdict, "digest": r.digest, "metrics": r.metrics} for r in rounds}
        Path(json_file).write_text(json.dumps(content, indent=1))
    differing = [r.rollout_id for r in rounds if r.verdict == "DIFFERS"]
    equal = sum(r.verdict == "equal bit for bit" for r in rounds)
    within = len(rounds) - equal - len(differing)
    total = f"{equal} of {len(rounds)} rounds are equal bit for bit"
    total += f", {within} within tolerance" if within else ""
    total += f", {len(differing)} differ" if differing else ""
    print(total)
    if differing:
        raise ReplayError(
            f"replaying round {differing[0]} of run {run!r} gave a policy that differs from the committed one "
            f"({total}): check that code, GPU type and parallel layout are those of the run"
        )
    return Completed(message=total)


# ---- checks ----------------------------------------------------------------------------------------------------------


def parse_own_flags(own: dict[str, str]) -> dict[str, Any]:
    """Return the values of --from, --to and --json as keyword arguments of `replay`. Raises OptionError."""
    options: dict[str, Any] = {
        name: parse_integer(flag_name, own[flag_name])
        for flag_name, name in (("--from", "first"), ("--to", "last"))
        if flag_name in own
    }
    if "--json" in own:
        path = Path(own["--json"])
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise OptionError(
                f"--json {own['--json']} is a directory, or is not in an existing directory: give the path of a file"
            )
        options["json_file"] = own["--json"]
    return options


def check_replay(
    run: str, where: RunConfig, placement: dict[str, Any], first: int = 0, last: int | None = None
) -> tuple[PostTrainConfig, int, int]:
    """Check that a run can be replayed from policy version `first` to `last` (None: the last trained version). Return
    the config of the replay, the version of the checkpoint to start at, and the last version."""
    recorded = read_flow_and_config(where, run)[1]
    values = recorded.model_dump(mode="json")
    merge_values(values, {"train": placement})
    for name in ("ray_address", "network_interface", "num_gpus_per_node", "node_timeout"):
        values["run"][name] = getattr(where, name)
    config = validate_config(values)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    trained = len(store.committed_indices(f"{keys.prefix}/steps"))
    last, flag = trained if last is None else last, changed_flag(recorded, config, "identity")
    rules = (
        (flag, f"{flag} changes the result, but a replay uses the recorded options: leave it out, or fork the run"),
        (
            not 0 <= first < last <= trained,
            f"run {run!r} has trained {trained} rounds and cannot be replayed from version {first} to {last}: give "
            f"--from and --to with 0 <= from < to <= {trained}",
        ),
    )
    check_rules(rules)
    config.train.megatron.check()
    begin = newest_checkpoint(store, keys, first)
    check_same_options(store, keys, config, begin, last)
    _, shape = read_initial_weights(store, keys)
    check_layout(shape, config.train)
    return config, begin, last


def check_same_options(store: Store, keys: RunKeys, config: PostTrainConfig, begin: int, last: int) -> None:
    """Check that the training options of `config` trained the rounds between policy versions `begin` and `last`. In a
    fork, earlier rounds were trained by the parent, perhaps with other options. Raises RunError."""
    record = read_run_record(store, keys)
    end, entry = last, record.parent if record else None
    while entry is not None:
        end, ancestor, entry = min(end, entry.at), entry, entry.parent
        has_rounds = max(begin, entry.at if entry else 0) < end  # whether the ancestor trained rounds of this replay
        if has_rounds and training_options(validate_config(ancestor.config)) != training_options(config):
            raise RunError(
                f"the rounds of run {keys.run!r} before {end} were trained by {ancestor.run!r}, from which it was "
                f"forked, with other training options: replay those rounds with `penstock replay {ancestor.run} "
                f"--to {end}`, and this run with --from {end} (needs a checkpoint of version {end})"
            )


@contextmanager
def start_replay_trainer(store: Store, keys: RunKeys, config: PostTrainConfig) -> Iterator[PolicyRestorer]:
    """Start a trainer, and yield a PolicyRestorer that loads and replays policy versions with it.

    The trainer has its own Ray namespace, so it does not disturb the run's trainer if that works on the same cluster.
    """

    base, shape = read_initial_weights(store, keys)
    spec = TrainerSpec(
        run=keys.run,
        shape=shape,
        config=config.train,
        temperature=config.rollout.rollout_temperature,
        store=store.uri,
        store_options=store.options,
        network_interface=config.run.network_interface,
    )
    placement = replace(run_placement(config), engine_gpus=0, teacher_gpus=0)
    cluster = Cluster.start(config.run.ray_address, namespace=f"penstock-replay-{keys.run}", options=placement)
    group = TrainerGroup(cluster, spec)
    try:
        yield PolicyRestorer(store, keys, group, base)
    finally:
        group.kill()
        cluster.stop()


def read_initial_weights(store: Store, keys: RunKeys) -> tuple[CheckpointRef, ModelShape]:
    """Return the reference to a run's initial weights, and the shape of the model. Raises RunError if the weights are
    not in the store."""
    base = store.read_record(CheckpointRef, keys.origin_key("base"))
    if base is None:
        raise RunError(
            f"run {keys.run!r} has no initial weights and has not trained any round: there is nothing to replay"
        )
    model = store.committed(base.key.removesuffix(commit_key("")))
    if model is None or "shape" not in model.state:
        raise RunError(
            f"the initial weights of run {keys.run!r} ({base.key}) are not in the store: convert the model again"
        )
    return base, ModelShape.model_validate(model.state["shape"])
